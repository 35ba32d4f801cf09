//! Checks before a weight is read: values outside their ranges, and techniques that cannot be combined.

use models::hugging_face::Folder;
use runtime::nf4::Scales;
use tch::Kind;

use crate::config::{
    ActivationPlan, Compute, Config, Dtype, FrozenPlace, LossHeadKind, OffloadMethod, OffloadTier,
    OptimizerPlace, OptimizerRule, nearest_name,
};
use crate::error::{Error, Result};

/// Passes over the data whose batches can be counted one by one.
const MAX_EPOCHS: u64 = 1_000_000;
/// Rows of a batch, and batches of a step, that can be gathered.
const MAX_BATCH: u64 = 1 << 20;
/// Threads that make batches.
const MAX_WORKERS: u64 = 256;
/// Names of checkpoint levels.
const LEVELS: [&str; 5] = ["save-all", "save-gate-up", "save-one", "input-only", "input-only-tiled:16MiB"];

/// Checks each value by itself.
pub(super) fn values(config: &Config) -> Result<()> {
    let Config { training, optimizer, data, activations, .. } = config;
    let counts: [(&'static str, Option<u64>); 15] = [
        ("training.steps", training.steps),
        ("training.epochs", training.epochs),
        ("training.batch", Some(training.batch as u64)),
        ("training.accumulation", Some(training.accumulation as u64)),
        ("training.micro_batch_size", training.micro_batch_size.map(|rows| rows as u64)),
        ("training.checkpoint_every", training.checkpoint_every.steps()),
        ("training.evaluate_every", training.evaluate_every),
        ("training.patience", training.patience),
        ("training.log_every", Some(training.log_every)),
        ("training.keep", Some(training.keep as u64)),
        ("data.limit", data.limit.map(|rows| rows as u64)),
        ("data.max_length", data.max_length.map(|tokens| tokens as u64)),
        ("data.packing", data.packing.map(|positions| positions as u64)),
        ("activations.every", Some(activations.every as u64)),
        ("offload.ring", config.offload.as_ref().map(|offload| offload.ring as u64)),
    ];
    for (key, value) in counts {
        if value == Some(0) {
            return Err(Error::Value { key, found: "0".to_owned(), expected: "1 or more" });
        }
    }
    let bounds = [
        ("training.epochs", training.epochs, MAX_EPOCHS, "1 to 1000000"),
        ("training.batch", Some(training.batch as u64), MAX_BATCH, "1 to 1048576"),
        ("training.accumulation", Some(training.accumulation as u64), MAX_BATCH, "1 to 1048576"),
        ("data.workers", Some(data.workers as u64), MAX_WORKERS, "0 to 256"),
    ];
    for (key, value, most, expected) in bounds {
        if let Some(value) = value.filter(|value| *value > most) {
            return Err(Error::Value { key, found: value.to_string(), expected });
        }
    }
    let ranges: [(&'static str, f64, &'static str); 4] = [
        ("optimizer.lr", optimizer.lr, "a finite number, 0 or more"),
        ("optimizer.warmup", optimizer.warmup, "a share of the steps below 1, or a number of steps"),
        ("optimizer.weight_decay", optimizer.weight_decay, "a finite number, 0 or more"),
        ("optimizer.clip", optimizer.clip, "a maximum norm above 0, or 0 for no clipping"),
    ];
    for (key, value, expected) in ranges {
        if !(value.is_finite() && value >= 0.0) {
            return Err(Error::Value { key, found: value.to_string(), expected });
        }
    }
    if !(0.0..=0.5).contains(&data.held_out) {
        let expected = "a share from 0 to 0.5 of the rows";
        return Err(Error::Value { key: "data.held_out", found: data.held_out.to_string(), expected });
    }
    if let (Some(patience), None) = (training.patience, training.evaluate_every) {
        let expected = "`training.evaluate_every` with it: patience counts evaluations";
        return Err(Error::Value { key: "training.patience", found: patience.to_string(), expected });
    }
    if !(1..=3).contains(&optimizer.zero_stage) {
        return Err(Error::Value {
            key: "optimizer.zero_stage",
            found: optimizer.zero_stage.to_string(),
            expected: "1, 2 or 3",
        });
    }
    if optimizer.replicas == 0 {
        return Err(Error::Value { key: "optimizer.replicas", found: "0".to_owned(), expected: "1 or more" });
    }
    if let Some(tokens) = config.loss.chunk_tokens.filter(|tokens| *tokens < 1) {
        return Err(Error::Value {
            key: "loss.chunk_tokens",
            found: tokens.to_string(),
            expected: "1 or more",
        });
    }
    if let Some(level) = &config.mlp.level {
        let parsed: Result<swiglu_ckpt::CheckpointLevel, _> = level.parse();
        parsed.map_err(|error| match nearest_name(level, LEVELS.into_iter()) {
            Some(name) => Error::Toml(format!("`mlp.level`: {error}; did you mean `{name}`?")),
            None => error.into(),
        })?;
    }
    if let Some(adapter) = &config.adapter {
        adapter.check()?;
        let patterns = adapter.alpha_pattern.values().filter_map(serde_json::Value::as_f64);
        if let Some(alpha) = std::iter::once(adapter.lora_alpha).chain(patterns).find(|alpha| *alpha <= 0.0) {
            let key =
                if alpha == adapter.lora_alpha { "adapter.lora_alpha" } else { "adapter.alpha_pattern" };
            let expected = "a number above 0: the adapter's product is scaled by α/r";
            return Err(Error::Value { key, found: alpha.to_string(), expected });
        }
    }
    Ok(())
}

/// Checks the techniques against a training over several ranks.
pub(super) fn ranks(config: &Config, ranks: usize) -> Result<()> {
    let refused = |first: &str, why, remedy| {
        Err(Error::Conflict { first: first.to_owned(), second: format!("{ranks} ranks"), why, remedy })
    };
    let Config { offload, optimizer, .. } = config;
    if optimizer.zero_stage < 3 && offload.is_some() {
        let why = "offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets";
        return refused("`offload`", why, "use `optimizer.zero_stage = 3`, or leave `offload` out");
    }
    if optimizer.place == OptimizerPlace::Host {
        let why = "the ranks' own optimizer steps the shards, where they are";
        return refused("`optimizer.place = \"host\"`", why, "use `optimizer.place = \"device\"`");
    }
    if offload.as_ref().is_some_and(|offload| offload.method != OffloadMethod::Overlap) {
        let why = "layers are gathered into the ring's slots";
        return refused("`offload.method`", why, "use `offload.method = \"overlap\"`");
    }
    if offload.as_ref().is_some_and(|offload| offload.tier == OffloadTier::File)
        && optimizer.frozen_weights == FrozenPlace::Sharded
    {
        let why = "shards of frozen weights are in host memory";
        let remedy = "use `optimizer.frozen_weights = \"whole\"`, or `offload.tier = \"host\"`";
        return refused("`offload.tier = \"file\"`", why, remedy);
    }
    if optimizer.zero_stage == 3 && !config.keeps_whole_layers() {
        let why = "a divided layer keeps all its activations, or its input alone";
        let remedy = "use `activations.plan = \"keep\"`, \"every-k\" or \"recompute\" with `activations.recompute = \"layer\"`, or \
                      `optimizer.zero_stage = 2`";
        return refused("`activations`", why, remedy);
    }
    if optimizer.zero_stage == 3 && config.keeps_casts() {
        return refused(&format!("{} in mixed precision", kept_by(config)), KEPT_CASTS, RECOMPUTE);
    }
    if optimizer.zero_stage == 3 && config.model.dtype == Some(Dtype::Nf4) {
        let why = "layers that are divided are placeholders of NaN between their uses, which bytes of four-bit weights do not have";
        let remedy = "use `optimizer.zero_stage = 2`, where each rank has the whole base";
        return refused(NF4, why, remedy);
    }
    if !["auto", "cpu"].contains(&&*config.training.device) {
        let why = "ranks are connected over CPUs; groups over NCCL have never run on a GPU";
        return refused("`training.device`", why, "use `training.device = \"cpu\"`, or one process");
    }
    if !ranks.is_multiple_of(optimizer.replicas) {
        let found = format!("{} with {ranks} ranks", optimizer.replicas);
        let expected = "a number that divides the number of ranks";
        return Err(Error::Value { key: "optimizer.replicas", found, expected });
    }
    if config.training.accumulation < ranks {
        return Err(Error::Value {
            key: "training.accumulation",
            found: config.training.accumulation.to_string(),
            expected: "at least one batch for each rank: a step's batches are divided among the ranks; give --accumulation",
        });
    }
    Ok(())
}

const KEPT_CASTS: &str =
    "the activations of a layer then include casts of its weights, which would stay for all layers at once";
const RECOMPUTE: &str = "use `activations.plan = \"recompute\"`, or `model.dtype = \"bfloat16\"` with `precision.compute = \"fp32\"`";

/// The key that says that offloaded layers keep their activations.
fn kept_by(config: &Config) -> String {
    match config.offload.as_ref().and_then(|offload| offload.keep.as_ref()) {
        Some(_) => "`offload.keep`".to_owned(),
        None => format!("`activations.plan = \"{}\"`", plan_name(config.activations.plan)),
    }
}

/// Names of two techniques, why they cannot be combined, and what works instead.
struct Rule {
    is_met: bool,
    first: String,
    second: String,
    why: &'static str,
    remedy: &'static str,
}

/// Checks each technique against every other.
pub(super) fn pairs(config: &Config) -> Result<()> {
    let Config { adapter, mlp, loss, activations, offload, precision, optimizer, model, training, .. } =
        config;
    let offloaded = offload.as_ref();
    let tier = offloaded.map(|offload| offload.tier);
    let adapts = |names: &[&str]| -> Result<bool> {
        let Some(adapter) = adapter else { return Ok(false) };
        for name in names {
            if adapter.adapts(name)? {
                return Ok(true);
            }
        }
        Ok(false)
    };
    let mlp_names: Vec<String> = (0..MOST_LAYERS)
        .flat_map(|layer| MLP.map(|name| format!("model.layers.{layer}.mlp.{name}")))
        .collect();
    let mlp_names: Vec<&str> = mlp_names.iter().map(String::as_str).collect();
    let of = |key: &str, value: &dyn std::fmt::Debug| {
        format!("`{key} = \"{}\"`", format!("{value:?}").to_lowercase())
    };
    let host = optimizer.place == OptimizerPlace::Host;
    let in_nf4 = model.dtype == Some(Dtype::Nf4);
    let low = |dtype: Option<Dtype>| matches!(dtype, Some(Dtype::Float16));
    let rules = [
        Rule {
            is_met: offloaded.is_some_and(|offload| offload.method == OffloadMethod::OneLayer),
            first: "`offload.method = \"one-layer\"`".to_owned(),
            second: "training".to_owned(),
            why: "it frees a layer without keeping what backward needs",
            remedy: "take \"overlap\", \"function\" or \"checkpointing\"",
        },
        Rule {
            is_met: offloaded.is_some() && !config.keeps_whole_layers(),
            first: match activations.plan {
                ActivationPlan::Plan => "`activations.plan = \"plan\"`".to_owned(),
                _ => of("activations.recompute", &activations.recompute),
            },
            second: "`offload`".to_owned(),
            why: "an offloaded layer keeps all its activations, or its input alone",
            remedy: "use `activations.plan = \"keep\"`, \"every-k\" or \"recompute\" with `activations.recompute = \"layer\"`, or keep \
                     the weights on the device",
        },
        Rule {
            is_met: config.keeps_offloaded()
                && offloaded.is_some_and(|offload| offload.method != OffloadMethod::Overlap),
            first: kept_by(config),
            second: "`offload.method` other than \"overlap\"".to_owned(),
            why: "with those methods every layer runs again in backward",
            remedy: "use `offload.method = \"overlap\"`, or `activations.plan = \"recompute\"`",
        },
        Rule {
            is_met: offloaded.is_some() && config.keeps_casts(),
            first: format!("{} with `offload`", kept_by(config)),
            second: of("precision.compute", &precision.compute),
            why: KEPT_CASTS,
            remedy: RECOMPUTE,
        },
        Rule {
            is_met: tier == Some(OffloadTier::File) && adapter.is_none() && !host,
            first: "`offload.tier = \"file\"` with full fine-tuning".to_owned(),
            second: "`optimizer.place = \"device\"`".to_owned(),
            why: "the optimizer's state of trained layers in files is in files, too",
            remedy: "use `optimizer.place = \"host\"`, train an adapter, or use `offload.tier = \"host\"`",
        },
        Rule {
            is_met: host && offloaded.is_none(),
            first: "`optimizer.place = \"host\"`".to_owned(),
            second: "weights on the device".to_owned(),
            why: "the update on the host is that of offloaded layers",
            remedy: "add `offload`, or use `optimizer.place = \"device\"`",
        },
        Rule {
            is_met: host && optimizer.rule != OptimizerRule::AdamW,
            first: "`optimizer.place = \"host\"`".to_owned(),
            second: of("optimizer.rule", &optimizer.rule),
            why: "the host computes AdamW only",
            remedy: "use `optimizer.rule = \"adamw\"`, or `optimizer.place = \"device\"`",
        },
        Rule {
            is_met: host && precision.compute == Compute::Fp16,
            first: "`optimizer.place = \"host\"`".to_owned(),
            second: "the loss scaler of `precision.compute = \"fp16\"`".to_owned(),
            why: "layers are updated during backward, before it is known whether a gradient overflows",
            remedy: "use `precision.compute = \"bf16\"`, or `optimizer.place = \"device\"`",
        },
        Rule {
            is_met: mlp.level.is_some() && adapts(&mlp_names)?,
            first: "`mlp.level`".to_owned(),
            second: "an adapter on the MLP's projections".to_owned(),
            why: "the recomputed MLP is one function over its three weights, and an adapted projection is not a plain weight",
            remedy: "adapt attention only, or leave `mlp.level` out and use `activations.recompute = \"mlp\"`",
        },
        Rule {
            is_met: loss.head == LossHeadKind::Fused && adapts(&["lm_head"])?,
            first: "`loss.head = \"fused\"`".to_owned(),
            second: "an adapter on `lm_head`".to_owned(),
            why: "the fused loss is over the head's plain weight",
            remedy: "use `loss.head = \"auto\"`, or leave the head out of the adapter",
        },
        Rule {
            is_met: loss.head == LossHeadKind::Plain
                && (loss.chunk_tokens.is_some() || loss.chunk_bytes.is_some() || loss.gradients_in_backward),
            first: "`loss.head = \"plain\"`".to_owned(),
            second: "the options of the fused loss".to_owned(),
            why: "the plain head computes all logits at once",
            remedy: "use `loss.head = \"fused\"`, or leave the options out",
        },
        Rule {
            is_met: loss.chunk_tokens.is_some() && loss.chunk_bytes.is_some(),
            first: "`loss.chunk_tokens`".to_owned(),
            second: "`loss.chunk_bytes`".to_owned(),
            why: "both say how many logits exist at a time",
            remedy: "give one of them",
        },
        Rule {
            is_met: precision.scaler.is_some() && precision.compute != Compute::Fp16,
            first: "`precision.scaler`".to_owned(),
            second: of("precision.compute", &precision.compute),
            why: "only fp16's gradients are too small without one",
            remedy: "leave the scaler out, or use `precision.compute = \"fp16\"`",
        },
        Rule {
            is_met: precision.compute == Compute::Fp16 && low(model.dtype) && adapter.is_none(),
            first: "`precision.compute = \"fp16\"`".to_owned(),
            second: "trained weights in `model.dtype = \"float16\"`".to_owned(),
            why: "the gradients of fp16 weights are fp16, and cannot be unscaled without loss",
            remedy: "use `model.dtype = \"float32\"`: the products are in fp16 all the same",
        },
        Rule {
            is_met: precision.compute != Compute::Fp32 && model.dtype == Some(Dtype::Float64),
            first: of("precision.compute", &precision.compute),
            second: "`model.dtype = \"float64\"`".to_owned(),
            why: "mixed precision leaves float64 as it is",
            remedy: "use `model.dtype = \"float32\"`, or `precision.compute = \"fp32\"`",
        },
        Rule {
            is_met: in_nf4 && adapter.is_none(),
            first: NF4.to_owned(),
            second: "full fine-tuning".to_owned(),
            why: "weights of four bits cannot take the steps of an optimizer",
            remedy: "train an adapter, or use `model.dtype = \"bfloat16\"`",
        },
        Rule {
            is_met: in_nf4 && mlp.level.is_some(),
            first: NF4.to_owned(),
            second: "`mlp.level`".to_owned(),
            why: "the recomputed MLP is one function over three weights of a floating dtype",
            remedy: "leave `mlp.level` out and use `activations.recompute = \"mlp\"`",
        },
        Rule {
            is_met: in_nf4 && precision.compute == Compute::Fp8,
            first: NF4.to_owned(),
            second: "`precision.compute = \"fp8\"`".to_owned(),
            why: "a product in fp8 rounds its weight again",
            remedy: "use `precision.compute = \"bf16\"`",
        },
        Rule {
            is_met: model.freeze.is_some() && adapter.is_some(),
            first: "`model.freeze`".to_owned(),
            second: "`adapter`".to_owned(),
            why: "an adapter freezes the whole base",
            remedy: "leave `model.freeze` out",
        },
        Rule {
            is_met: activations.plan == ActivationPlan::Plan
                && activations.budget.or(training.budget).is_none(),
            first: "`activations.plan = \"plan\"`".to_owned(),
            second: "no budget".to_owned(),
            why: "the plan is the one of least recomputation that fits a budget",
            remedy: "give `training.budget` or `activations.budget` in bytes",
        },
    ];
    match rules.into_iter().find(|rule| rule.is_met) {
        None => Ok(()),
        Some(Rule { first, second, why, remedy, .. }) => Err(Error::Conflict { first, second, why, remedy }),
    }
}

const NF4: &str = "`model.dtype = \"nf4\"`";

/// Returns a plan's name in a configuration.
fn plan_name(plan: ActivationPlan) -> &'static str {
    match plan {
        ActivationPlan::Auto => "auto",
        ActivationPlan::Keep => "keep",
        ActivationPlan::Recompute => "recompute",
        ActivationPlan::EveryK => "every-k",
        ActivationPlan::Plan => "plan",
    }
}

/// Projections of a gated MLP.
const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
/// More layers than a model has.
const MOST_LAYERS: usize = 256;

/// Returns the configuration with the dtype of files that are in NF4, unless it has one.
pub(super) fn with_dtype_of(config: &Config, folder: &Folder) -> Config {
    let mut config = config.clone();
    if folder.kind().is_ok_and(|kind| Scales::of(kind).is_some()) {
        config.model.dtype.get_or_insert(Dtype::Nf4);
    }
    config
}

/// Checks the techniques against the model's configuration and the dtype of its files.
pub(super) fn folder(config: &Config, folder: &Folder) -> Result<()> {
    let model = folder.config();
    if let Some(adapter) = &config.adapter {
        adapter.check_matches(model)?;
        adapter.trainable_parameters(model)?;
        adapter.check_tying(model)?;
    }
    if let Some(offload) = &config.offload {
        let layers = usize::try_from(model.num_hidden_layers).unwrap_or(0);
        let kept = offload.keep.as_deref().unwrap_or_default();
        for (key, numbers) in [("offload.resident", &offload.resident[..]), ("offload.keep", kept)] {
            if let Some(layer) = numbers.iter().find(|layer| **layer >= layers) {
                let expected = "numbers of layers that the model has, from 0";
                return Err(Error::Value { key, found: layer.to_string(), expected });
            }
        }
    }
    pairs(&with_dtype_of(config, folder))?;
    let is_half = config.model.dtype.is_none() && folder.kind().is_ok_and(|kind| kind == Kind::Half);
    if is_half && config.adapter.is_none() && config.precision.compute == Compute::Fp16 {
        let dtype = Some(Dtype::Float16);
        let model = crate::config::ModelConfig { dtype, ..config.model.clone() };
        return pairs(&Config { model, ..config.clone() });
    }
    Ok(())
}
