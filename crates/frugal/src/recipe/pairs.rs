//! Techniques that cannot be combined: a table of two settings, why they exclude each other, and what to use instead.

use lora::Init;

use crate::config::{
    ActivationPlan, Compute, Config, DivergenceKind, Dtype, LossHeadKind, ObjectiveKind, OffloadConfig,
    OffloadMethod, OffloadTier, OptimizerPlace, OptimizerRule, ReferenceKind, Task,
};
use crate::error::{Error, Result};

/// Subject of a rule: its name, and whether a configuration has it.
struct Setting {
    is_set: fn(&Config) -> bool,
    name: Name,
}

enum Name {
    Fixed(&'static str),
    Of(fn(&Config) -> String),
}

/// Two settings that exclude each other, why, and what to use.
type Rule = (Setting, Setting, &'static str, &'static str);

const fn when(name: &'static str, is_set: fn(&Config) -> bool) -> Setting {
    Setting { is_set, name: Name::Fixed(name) }
}

const fn named(name: fn(&Config) -> String, is_set: fn(&Config) -> bool) -> Setting {
    Setting { is_set, name: Name::Of(name) }
}

impl Setting {
    fn name(&self, config: &Config) -> String {
        match self.name {
            Name::Fixed(name) => name.to_owned(),
            Name::Of(name) => name(config),
        }
    }
}

pub(super) const KEPT_CASTS: &str =
    "the activations of a layer then include casts of its weights, which would stay for all layers at once";
pub(super) const RECOMPUTE: &str = "use `activations.plan = \"recompute\"`, or `model.dtype = \"bfloat16\"` with `precision.compute = \"fp32\"`";

const HOST: Setting =
    when("`optimizer.place = \"host\"`", |config| config.optimizer.place == OptimizerPlace::Host);
const OFFLOAD: Setting = when("`offload`", |config| config.offload.is_some());
const EXPERTS: Setting = when("`experts`", |config| config.experts.is_some());
const IN_BACKWARD: Setting = when("`optimizer.in_backward`", |config| config.optimizer.in_backward);
const LEVEL: Setting = when("`mlp.level`", |config| config.mlp.level.is_some());
const QUANTIZED: Setting = named(quantized, is_quantized);
const FULL: Setting = when("full fine-tuning", |config| config.adapter.is_none());
const FP16: Setting =
    when("`precision.compute = \"fp16\"`", |config| config.precision.compute == Compute::Fp16);
const PREFERENCES: Setting = named(objective, |config| config.objective.kind.is_preference());
/// A reference that is the model without its adapters.
const REFERENCE: Setting = named(objective, |config| {
    config.objective.has_reference() && !config.objective.is_computed_before(config.adapter.is_some())
});
/// A choice of the reference.
const CHOSEN_REFERENCE: Setting = named(chosen_reference, |config| {
    config.objective.reference != ReferenceKind::Auto || config.objective.reference_model.is_some()
});
const REWARDS: Setting = named(objective, |config| config.objective.kind == ObjectiveKind::Grpo);
const DISTILLATION: Setting = named(objective, |config| config.objective.kind == ObjectiveKind::Distillation);
const PLAIN: Setting = when("`loss.head = \"plain\"`", |config| config.loss.head == LossHeadKind::Plain);

static RULES: [Rule; 51] = [
    (
        when("`offload.method = \"one-layer\"`", |config| method(config) == Some(OffloadMethod::OneLayer)),
        when("training", |_| true),
        "it frees a layer without keeping what backward needs",
        "take \"overlap\", \"function\" or \"checkpointing\"",
    ),
    (
        named(kept_in_parts, |config| !config.keeps_whole_layers()),
        OFFLOAD,
        "an offloaded layer keeps all its activations, or its input alone",
        "use `activations.plan = \"keep\"`, \"every-k\" or \"recompute\" with `activations.recompute = \"layer\"` or \"offload\", or keep the \
         weights on the device",
    ),
    (
        named(kept_by, Config::keeps_offloaded),
        when("`offload.method` other than \"overlap\"", |config| {
            method(config).is_some_and(|method| method != OffloadMethod::Overlap)
        }),
        "with those methods every layer runs again in backward",
        "use `offload.method = \"overlap\"`, or `activations.plan = \"recompute\"`",
    ),
    (
        named(|config| format!("{} with `offload`", kept_by(config)), |config| config.offload.is_some()),
        named(compute, Config::keeps_casts),
        KEPT_CASTS,
        RECOMPUTE,
    ),
    (
        when("`offload.tier = \"file\"` with full fine-tuning", |config| {
            tier(config) == Some(OffloadTier::File) && config.adapter.is_none()
        }),
        when("`optimizer.place = \"device\"`", |config| config.optimizer.place == OptimizerPlace::Device),
        "the optimizer's state of trained layers in files is in files, too",
        "use `optimizer.place = \"host\"`, train an adapter, or use `offload.tier = \"host\"`",
    ),
    (
        HOST,
        when("weights on the device", |config| config.offload.is_none()),
        "the update on the host is that of offloaded layers",
        "add `offload`, or use `optimizer.place = \"device\"`",
    ),
    (
        HOST,
        named(
            |config| value("optimizer.rule", &config.optimizer.rule),
            |config| config.optimizer.rule != OptimizerRule::AdamW,
        ),
        "the host computes AdamW only",
        "use `optimizer.rule = \"adamw\"`, or `optimizer.place = \"device\"`",
    ),
    (
        when("`optimizer.rule = \"adamw8bit\"`", |config| config.optimizer.rule == OptimizerRule::AdamW8bit),
        when("`model.dtype = \"float64\"`", |config| config.model.dtype == Some(Dtype::Float64)),
        "moments of 8 bits are computed in float32",
        "use `optimizer.rule = \"adamw\"`, or `model.dtype = \"float32\"`",
    ),
    (
        HOST,
        when("the loss scaler of `precision.compute = \"fp16\"`", FP16.is_set),
        "layers are updated during backward, before it is known whether a gradient overflows",
        "use `precision.compute = \"bf16\"`, or `optimizer.place = \"device\"`",
    ),
    (
        IN_BACKWARD,
        when("`optimizer.clip` above 0", |config| config.optimizer.clip > 0.0),
        "the norm is that of all gradients, which are never in memory at once",
        "use `optimizer.clip = 0`, or leave `optimizer.in_backward` out",
    ),
    (
        IN_BACKWARD,
        when("several micro-batches in a step", |config| {
            let training = &config.training;
            training.accumulation > 1 || training.micro_batch_size.is_some_and(|rows| rows < training.batch)
        }),
        "all gradients would be in memory until the last micro-batch",
        "use `training.accumulation = 1` and leave `training.micro_batch_size` out, or leave `optimizer.in_backward` out",
    ),
    (
        IN_BACKWARD,
        OFFLOAD,
        "offloaded layers are updated when their slot is free",
        "use `optimizer.place = \"host\"`, which updates offloaded layers during backward, and leave `optimizer.in_backward` out",
    ),
    (
        IN_BACKWARD,
        when("the loss scaler of `precision.compute = \"fp16\"`", FP16.is_set),
        "weights are updated during backward, before it is known whether a gradient overflows",
        "use `precision.compute = \"bf16\"`, or leave `optimizer.in_backward` out",
    ),
    (
        IN_BACKWARD,
        when("`loss.gradients_in_backward`", |config| config.loss.gradients_in_backward),
        "the loss's own backward adds to a matrix that the embedding uses too, after which it would be updated twice",
        "leave one of them out",
    ),
    (
        LEVEL,
        when("an adapter on the MLP's projections", |config| adapts(config, &mlp_names())),
        "the recomputed MLP is one function over its three weights, and an adapted projection is not a plain weight",
        "adapt attention only, or leave `mlp.level` out and use `activations.recompute = \"mlp\"`",
    ),
    (
        when("`loss.head = \"fused\"`", |config| config.loss.head == LossHeadKind::Fused),
        when("an adapter on `lm_head`", |config| adapts(config, &["lm_head".to_owned()])),
        "the fused loss is over the head's plain weight",
        "use `loss.head = \"auto\"`, or leave the head out of the adapter",
    ),
    (
        PLAIN,
        when("the options of the fused loss", |config| {
            let loss = &config.loss;
            loss.chunk_tokens.is_some() || loss.chunk_bytes.is_some() || loss.gradients_in_backward
        }),
        "the plain head computes all logits at once",
        "use `loss.head = \"fused\"`, or leave the options out",
    ),
    (
        when("`loss.chunk_tokens`", |config| config.loss.chunk_tokens.is_some()),
        when("`loss.chunk_bytes`", |config| config.loss.chunk_bytes.is_some()),
        "both say how many logits exist at a time",
        "give one of them",
    ),
    (
        when("`precision.scaler`", |config| config.precision.scaler.is_some()),
        named(compute, |config| config.precision.compute != Compute::Fp16),
        "only fp16's gradients are too small without one",
        "leave the scaler out, or use `precision.compute = \"fp16\"`",
    ),
    (
        FP16,
        when("trained weights in `model.dtype = \"float16\"`", |config| {
            config.model.dtype == Some(Dtype::Float16) && config.adapter.is_none()
        }),
        "the gradients of fp16 weights are fp16, and cannot be unscaled without loss",
        "use `model.dtype = \"float32\"`: the products are in fp16 all the same",
    ),
    (
        named(compute, |config| config.precision.compute != Compute::Fp32),
        when("`model.dtype = \"float64\"`", |config| config.model.dtype == Some(Dtype::Float64)),
        "mixed precision leaves float64 as it is",
        "use `model.dtype = \"float32\"`, or `precision.compute = \"fp32\"`",
    ),
    (
        QUANTIZED,
        FULL,
        "quantized weights cannot take the steps of an optimizer",
        "train an adapter, or use `model.dtype = \"bfloat16\"`",
    ),
    (
        QUANTIZED,
        LEVEL,
        "the recomputed MLP is one function over three weights of a floating dtype",
        "leave `mlp.level` out and use `activations.recompute = \"mlp\"`",
    ),
    (
        QUANTIZED,
        when("`precision.compute = \"fp8\"`", |config| config.precision.compute == Compute::Fp8),
        "a product in fp8 rounds its weight again",
        "use `precision.compute = \"bf16\"`",
    ),
    (
        EXPERTS,
        OFFLOAD,
        "layers are offloaded as a whole, with all their experts",
        "leave `offload` out: without their experts the layers of a mixture are small",
    ),
    (
        EXPERTS,
        FULL,
        "experts are streamed from files that are only read, so they are frozen",
        "train an adapter, or leave `experts` out",
    ),
    (
        EXPERTS,
        named(compute, |config| config.precision.compute != Compute::Fp32),
        "the casts of experts would stay in memory for the whole step",
        "use `model.dtype = \"bfloat16\"` with `precision.compute = \"fp32\"`",
    ),
    (
        EXPERTS,
        when("`model.dtype = \"gguf\"`", |config| config.model.dtype == Some(Dtype::Gguf)),
        "a file's blocks are read as a whole",
        "use `model.dtype = \"nf4\"` or \"bfloat16\"",
    ),
    (
        when("`model.freeze`", |config| config.model.freeze.is_some()),
        when("`adapter`", |config| config.adapter.is_some()),
        "an adapter freezes the whole base",
        "leave `model.freeze` out",
    ),
    (
        when("`activations.plan = \"plan\"`", |config| config.activations.plan == ActivationPlan::Plan),
        when("no budget", |config| config.activations.budget.or(config.training.budget).is_none()),
        "the plan is the one of least recomputation that fits a budget",
        "give `training.budget` or `activations.budget` in bytes",
    ),
    (
        PREFERENCES,
        when("a training from scratch", |config| config.task == Task::Train),
        "it is learned which answers are better, by a model that has learned to answer",
        "fine-tune a model",
    ),
    (
        PREFERENCES,
        // That of a run's file is the whole batch.
        when("`training.micro_batch_size`", |config| {
            config.training.micro_batch_size.is_some_and(|rows| rows < config.training.batch)
        }),
        "answers that are compared are in one micro-batch",
        "use a smaller `training.batch` with more `training.accumulation`",
    ),
    (
        PREFERENCES,
        when("`loss.router_aux_loss`", |config| {
            config.loss.router_aux_loss.is_some_and(|factor| factor > 0.0)
        }),
        "the loss of a router is that of a batch whose tokens are all learned",
        "leave `loss.router_aux_loss` out",
    ),
    (
        PREFERENCES,
        EXPERTS,
        "the reference would load other experts between those of a step, which has never run",
        "leave `experts` out",
    ),
    (
        REWARDS,
        when("a training from scratch", |config| config.task == Task::Train),
        "a model that has not learned to answer gets no rewards",
        "fine-tune a model",
    ),
    (
        REWARDS,
        when("`data.packing`", |config| config.data.packing.is_some()),
        "rows are the model's own answers, which are not known before a step",
        "leave `data.packing` out",
    ),
    (
        REWARDS,
        when("`loss.router_aux_loss`", |config| {
            config.loss.router_aux_loss.is_some_and(|factor| factor > 0.0)
        }),
        "the loss of a router is that of a batch whose tokens are all learned",
        "leave `loss.router_aux_loss` out",
    ),
    (
        REWARDS,
        when("`training.neftune_noise_alpha`", |config| {
            config.training.neftune_noise_alpha.is_some_and(|alpha| alpha > 0.0)
        }),
        "a reward is for the answer that the model gives without noise",
        "leave `training.neftune_noise_alpha` out",
    ),
    (REWARDS, EXPERTS, "each token of an answer would read experts from the disk", "leave `experts` out"),
    (
        REWARDS,
        OFFLOAD,
        "each token of an answer would load every layer",
        "leave `offload` out; `model.dtype = \"nf4\"` makes the weights smaller",
    ),
    (
        REWARDS,
        when("`model.new_tokens`", |config| !config.model.new_tokens.is_empty()),
        "the model would have to sample tokens that it has never seen",
        "fine-tune on texts with them first",
    ),
    (
        named(
            |config| format!("{} with `objective.beta`", objective(config)),
            |config| config.objective.kind == ObjectiveKind::Grpo && config.objective.has_reference(),
        ),
        FULL,
        "the reference is the model without its adapters",
        "train an adapter, or leave `objective.beta` out",
    ),
    (
        REWARDS,
        CHOSEN_REFERENCE,
        "the reference is the model without its adapters, because answers are not known before a step",
        "leave it out",
    ),
    (
        REFERENCE,
        FULL,
        "the reference is the model without its adapters",
        "train an adapter, or use `objective.reference = \"before-training\"`",
    ),
    (
        REFERENCE,
        when("an adapter that changes the model from the start", |config| {
            let init = config.adapter.as_ref().map(lora::LoraConfig::init);
            init.is_some_and(|init| matches!(init, Ok(Init::Random | Init::Pissa | Init::Olora)))
        }),
        "the reference is the model without its adapters, which is not the model at the start then",
        "use `adapter.init_lora_weights = true`, \"gaussian\" or \"orthogonal\", or `objective.reference = \"before-training\"`",
    ),
    (
        DISTILLATION,
        when("training from scratch", |config| config.task == Task::Train),
        "a student has the tokens of its teacher, whose tokenizer a model's folder has",
        "fine-tune: `frugal finetune` also learns from the start where the folder's weights are random",
    ),
    (
        DISTILLATION,
        when("`model.new_tokens`", |config| !config.model.new_tokens.is_empty()),
        "the teacher does not have these tokens",
        "fine-tune on texts with them first, both models if the student shall learn them from its teacher",
    ),
    (
        when("`objective.teacher_top_k`", |config| config.objective.teacher_top_k.is_some()),
        when("a divergence other than \"forward-kl\"", |config| {
            config.objective.divergence.is_some_and(|own| own != DivergenceKind::ForwardKl)
        }),
        "only the forward divergence does without the teacher's probabilities of all other tokens",
        "leave `objective.divergence` out, or ask the teacher in each step, without `objective.teacher_top_k`",
    ),
    (
        when("`objective.teacher_files`", |config| config.objective.teacher_files.is_some()),
        when("a teacher that is asked in each step", |config| config.objective.teacher_top_k.is_none()),
        "the files have the most probable tokens of a teacher that is asked once",
        "give `objective.teacher_top_k`, the number of tokens that they have at each label",
    ),
    (
        CHOSEN_REFERENCE,
        when("an objective without a reference", |config| !config.objective.has_reference()),
        "only \"dpo\", \"ipo\" and \"kto\" compare with a reference",
        "leave it out",
    ),
    (
        when("`objective.reference_model`", |config| config.objective.reference_model.is_some()),
        when("`objective.reference = \"adapters-off\"`", |config| {
            config.objective.reference == ReferenceKind::AdaptersOff
        }),
        "another model is asked before the training, and not in each step",
        "leave one of them out",
    ),
];

/// Checks each technique against every other.
pub(super) fn check(config: &Config) -> Result<()> {
    // An invalid pattern of names is an error of its own.
    config.adapter.as_ref().map_or(Ok(false), |adapter| adapter.adapts("lm_head"))?;
    let is_met = |(first, second, ..): &&Rule| (first.is_set)(config) && (second.is_set)(config);
    match RULES.iter().find(is_met) {
        None => Ok(()),
        Some((first, second, why, remedy)) => {
            Err(Error::Conflict { first: first.name(config), second: second.name(config), why, remedy })
        }
    }
}

/// A key with its value, as a file has it.
fn value(key: &str, value: &dyn std::fmt::Debug) -> String {
    format!("`{key} = \"{}\"`", format!("{value:?}").to_lowercase())
}

fn chosen_reference(config: &Config) -> String {
    let key = if config.objective.reference_model.is_some() { "reference_model" } else { "reference" };
    format!("`objective.{key}`")
}

fn objective(config: &Config) -> String {
    format!("`objective.kind = \"{}\"`", config.objective.kind.name())
}

fn compute(config: &Config) -> String {
    value("precision.compute", &config.precision.compute)
}

fn method(config: &Config) -> Option<OffloadMethod> {
    config.offload.as_ref().map(|offload| offload.method)
}

fn tier(config: &Config) -> Option<OffloadTier> {
    config.offload.as_ref().map(|offload| offload.tier)
}

/// The key by which layers keep some of their activations.
/// Whether the matrices of the base are quantized.
pub(super) fn is_quantized(config: &Config) -> bool {
    matches!(config.model.dtype, Some(Dtype::Nf4 | Dtype::Gguf))
}

pub(super) fn quantized(config: &Config) -> String {
    format!("`model.dtype = \"{}\"`", if config.model.dtype == Some(Dtype::Gguf) { "gguf" } else { "nf4" })
}

fn kept_in_parts(config: &Config) -> String {
    match config.activations.plan {
        ActivationPlan::Plan => "`activations.plan = \"plan\"`".to_owned(),
        _ => value("activations.recompute", &config.activations.recompute),
    }
}

/// The key by which offloaded layers keep their activations.
pub(super) fn kept_by(config: &Config) -> String {
    match config.offload.as_ref().and_then(|offload: &OffloadConfig| offload.keep.as_ref()) {
        Some(_) => "`offload.keep`".to_owned(),
        None => format!("`activations.plan = \"{}\"`", plan_name(config.activations.plan)),
    }
}

/// A plan's name in a configuration.
fn plan_name(plan: ActivationPlan) -> &'static str {
    match plan {
        ActivationPlan::Auto => "auto",
        ActivationPlan::Keep => "keep",
        ActivationPlan::Recompute => "recompute",
        ActivationPlan::EveryK => "every-k",
        ActivationPlan::Plan => "plan",
    }
}

/// Whether an adapter is on one of these projections.
fn adapts(config: &Config, names: &[String]) -> bool {
    let Some(adapter) = &config.adapter else { return false };
    names.iter().any(|name| adapter.adapts(name).is_ok_and(|is_adapted| is_adapted))
}

/// More layers than a model has.
const MOST_LAYERS: usize = 256;

/// The projections of gated MLPs.
fn mlp_names() -> Vec<String> {
    let of_layer =
        |layer| ["gate_proj", "up_proj", "down_proj"].map(|name| format!("model.layers.{layer}.mlp.{name}"));
    (0..MOST_LAYERS).flat_map(of_layer).collect()
}
