//! The flags of a training step on paper.

use accounting::decoder_flops::{Recomputation, Workload};
use accounting::estimate::TrainingPlan;
use accounting::hardware::{self, Hardware};
use accounting::lora::{LowRank, Targets};
use accounting::memory::host::OnHost;
use accounting::memory::logits::Loss;
use accounting::memory::optimizer::{Optimizer, StepKernel};
use accounting::memory::recipe::Recipe;
use accounting::memory::zero::{Sharding, ZeroStage};
use accounting::model::Family;
use accounting::quantity::{parse_bytes, parse_count};
use accounting::recompute::{AttentionKernel, NormKernel, Recompute, SwigluLevel};
use accounting::{Decoder, Error};

const TRAINING: &str = "Training";

#[derive(clap::Args)]
pub(crate) struct WorkArgs {
    /// Rows per batch and device
    #[arg(long, alias = "batch", default_value = "1", value_parser = parse_count, allow_negative_numbers = true, value_name = "N", help_heading = TRAINING)]
    pub(crate) batch_size: u64,
    /// Tokens of a row [default: 1024, or the model's context if that is shorter]
    #[arg(long, alias = "sequence", value_parser = parse_count, allow_negative_numbers = true, value_name = "N", help_heading = TRAINING)]
    length: Option<u64>,
}

impl WorkArgs {
    pub(crate) fn workload(&self, model: &Decoder) -> Workload {
        Workload { batch: self.batch_size, sequence: self.length.unwrap_or(model.context.min(1024)) }
    }
}

/// `--activations`.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum Activations {
    /// Keep all
    #[default]
    Keep,
    /// Recompute scores, softmax and weighted values (selective recomputation)
    RecomputeAttention,
    /// Recompute each layer from its input
    Recompute,
}

#[derive(clap::Args)]
pub(crate) struct RecomputeArgs {
    /// Attention kernel: eager or flash
    #[arg(long, default_value = "flash", value_name = "KERNEL", help_heading = TRAINING)]
    attention: AttentionKernel,
    /// Which activations are kept for backward
    #[arg(long, value_enum, default_value_t, value_name = "PLAN", help_heading = TRAINING)]
    activations: Activations,
    /// Checkpoint level of gated MLPs: eager, save-all, save-gate-up, save-one or input-only
    #[arg(long, default_value = "eager", value_name = "LEVEL", help_heading = TRAINING)]
    mlp: SwigluLevel,
}

impl RecomputeArgs {
    pub(crate) fn recomputation(&self) -> Recomputation {
        let checkpoint = match self.activations {
            Activations::Keep => Recompute::None,
            Activations::RecomputeAttention => Recompute::Selective,
            Activations::Recompute => Recompute::Full,
        };
        Recomputation { attention: self.attention, checkpoint, swiglu: self.mlp }
    }
}

#[derive(clap::Args)]
pub(crate) struct TrainingArgs {
    #[command(flatten)]
    pub(crate) work: WorkArgs,
    /// Number formats: fp32, amp-fp16, amp-bf16, fp16-master, bf16-master, bf16-master-fp32-grads or bf16
    #[arg(long, default_value = "bf16-master", value_name = "RECIPE", help_heading = TRAINING)]
    recipe: Recipe,
    /// sgd, momentum, adagrad, rmsprop, adam, adamw or adam-8bit
    #[arg(long, default_value = "adamw", value_name = "NAME", help_heading = TRAINING)]
    optimizer: Optimizer,
    /// Implementation of the optimizer's step, as PyTorch names them: fused, foreach or loop (one operator and tensor at a time)
    #[arg(long, default_value = "foreach", value_name = "KERNEL", help_heading = TRAINING)]
    step: StepKernel,
    #[command(flatten)]
    recompute: RecomputeArgs,
    /// RMSNorm: fused (saves its input), fused-output (saves its output), or composed (separate operators, as in torch on a CPU)
    #[arg(long, default_value = "fused", value_name = "KERNEL", help_heading = TRAINING)]
    norm: NormKernel,
    /// Count the masks of dropout
    #[arg(long, help_heading = TRAINING)]
    dropout: bool,
    /// Loss: plain, fused, chunked-recompute or grad-in-forward [default: plain, or fused with --loss-chunk]
    #[arg(long, value_parser = loss_name, value_name = "NAME", help_heading = TRAINING)]
    loss: Option<&'static str>,
    /// Tokens whose logits exist at a time [default: 1024 if the loss has chunks]
    #[arg(long, value_parser = parse_count, allow_negative_numbers = true, value_name = "N", help_heading = TRAINING)]
    loss_chunk: Option<u64>,
    /// Parts in host memory: parameters, gradients, optimizer, block-inputs
    #[arg(long, value_delimiter = ',', value_name = "NAME,…", help_heading = TRAINING)]
    on_host: Vec<String>,
    /// Gradient accumulation steps
    #[arg(long, default_value = "1", value_parser = parse_count, allow_negative_numbers = true, value_name = "N", help_heading = TRAINING)]
    accumulation: u64,
    /// ZeRO stage: 0, 1, 2 or 3
    #[arg(long, alias = "zero", default_value = "0", value_parser = zero_stage, allow_negative_numbers = true, value_name = "STAGE", help_heading = TRAINING)]
    zero_stage: ZeroStage,
    /// Data-parallel ranks
    #[arg(long, alias = "devices", default_value = "1", value_parser = parse_count, allow_negative_numbers = true, value_name = "N", help_heading = TRAINING)]
    ranks: u64,
    /// Tokens of the step that have a label [default: all]
    #[arg(long, value_parser = parse_count, allow_negative_numbers = true, value_name = "N", help_heading = TRAINING)]
    labelled: Option<u64>,
    #[command(flatten)]
    lora: LoraArgs,
}

const ADAPTERS: &str = "Low-rank adapters (the base is frozen)";

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Trained {
    /// Low-rank adapters
    Lora,
    /// All weights
    Full,
}

/// Rank of adapters by default, as in `frugal plan` and `frugal finetune`.
const RANK: u64 = 8;

/// Adapters, and what trains them.
#[derive(clap::Args)]
pub(crate) struct LoraArgs {
    /// What is trained [default: lora; full for gpt2, gpt2-like and `plan flops`]
    #[arg(long, value_enum, value_name = "METHOD", help_heading = TRAINING)]
    method: Option<Trained>,
    /// Rank of the adapters [default: 8]
    #[arg(long, alias = "lora-rank", value_parser = parse_count, allow_negative_numbers = true, value_name = "R", help_heading = ADAPTERS)]
    r: Option<u64>,
    /// Projections to adapt: q, k, v, o, gate, up, down, or all [default: q,k,v,o]
    #[arg(long, alias = "lora-targets", value_name = "NAME,…", help_heading = ADAPTERS)]
    targets: Option<Targets>,
    /// Count the masks of the adapters' dropout
    #[arg(long, help_heading = ADAPTERS)]
    lora_dropout: bool,
    /// Let the loss round the gradient of 16-bit logits in place, as on a CPU
    #[arg(long, help_heading = ADAPTERS)]
    lora_on_cpu: bool,
}

impl LoraArgs {
    /// The adapters; `None` where all weights are trained.
    ///
    /// # Errors
    /// Flags of adapters, and all weights are to be trained.
    pub(crate) fn low_rank(&self, default: Trained) -> Result<Option<LowRank>, Error> {
        let given = [
            ("--r", self.r.is_some()),
            ("--targets", self.targets.is_some()),
            ("--lora-dropout", self.lora_dropout),
            ("--lora-on-cpu", self.lora_on_cpu),
        ];
        let given = given.into_iter().find(|(_, given)| *given);
        match (self.method, given) {
            (Some(Trained::Full), Some((flag, _))) => {
                return Err(Error::Shape {
                    what: format!("{flag} is of adapters, and --method full trains all weights"),
                    remedy: "leave one of them out".into(),
                });
            }
            (Some(Trained::Full), None) => return Ok(None),
            (None, None) if default == Trained::Full => return Ok(None),
            _ => {}
        }
        Ok(Some(LowRank {
            rank: self.r.unwrap_or(RANK),
            targets: self.targets.unwrap_or(Targets::ATTENTION),
            dropout: self.lora_dropout,
            on_cpu: self.lora_on_cpu,
            ..LowRank::default()
        }))
    }
}

/// What is trained of a model unless a flag says it: adapters, or all weights of one that is trained from scratch.
fn trained_by_default(model: &Decoder) -> Trained {
    match model.family {
        Family::Gpt2 | Family::Gpt2Like => Trained::Full,
        _ => Trained::Lora,
    }
}

/// What a plan trains and how, in a line.
pub(crate) fn plan_text(plan: &TrainingPlan) -> String {
    let summary = plan.summary();
    match plan.lora {
        Some(_) => summary,
        None => format!("{summary}, all weights are trained"),
    }
}

impl TrainingArgs {
    pub(crate) fn plan(&self, model: &Decoder) -> Result<TrainingPlan, Error> {
        Ok(TrainingPlan {
            work: self.work.workload(model),
            recipe: self.recipe,
            optimizer: self.optimizer,
            step: self.step,
            recomputation: self.recompute.recomputation(),
            norm: self.norm,
            dropout: self.dropout,
            loss: self.loss()?,
            sharding: Sharding::new(self.zero_stage, self.ranks)?,
            accumulate: self.accumulation > 1,
            host: self.on_host.iter().try_fold(OnHost::default(), |host, name| host.with(name))?,
            labelled: self.labelled,
            lora: self.lora.low_rank(trained_by_default(model))?,
            product_workspaces: 0,
        })
    }

    fn loss(&self) -> Result<Loss, Error> {
        match (self.loss, self.loss_chunk) {
            (Some(name), Some(_)) if name == Loss::Eager.name() => Err(Error::Shape {
                what: "the plain loss has no chunks".into(),
                remedy: "leave out --loss-chunk, or name another --loss".into(),
            }),
            (Some(name), tokens) => Loss::from_name(name, tokens.unwrap_or(1024)),
            (None, Some(tokens)) => Ok(Loss::LinearCrossEntropy { tokens, whole: 0 }),
            (None, None) => Ok(Loss::Eager),
        }
    }
}

fn loss_name(text: &str) -> Result<&'static str, Error> {
    Ok(match text {
        "plain" => Loss::Eager.name(),
        "fused" => Loss::LinearCrossEntropy { tokens: 1, whole: 0 }.name(),
        other => other.parse::<Loss>()?.name(),
    })
}

fn zero_stage(text: &str) -> Result<ZeroStage, String> {
    let number: u64 = text.parse().map_err(|_| "give 0, 1, 2 or 3".to_owned())?;
    ZeroStage::from_number(number).map_err(|error| error.to_string())
}

/// A help text that lists the devices of `--hardware`.
pub(crate) fn known_hardware(what: &str) -> String {
    let names = hardware::ALL.map(|hardware| hardware.name);
    let (last, others) = names.split_last().unwrap_or((&"", &[]));
    format!("{what}: {} or {last}", others.join(", "))
}

#[derive(clap::Args)]
#[group(multiple = false)]
pub(crate) struct DeviceMemoryArgs {
    /// Memory limit of the device, such as 24GiB
    #[arg(long, alias = "memory", value_parser = parse_bytes, allow_negative_numbers = true, value_name = "BYTES", help_heading = "Device (one of)")]
    budget: Option<u64>,
    #[arg(long, value_parser = hardware::find, value_name = "NAME", help_heading = "Device (one of)", help = known_hardware("A known device"))]
    hardware: Option<Hardware>,
}

impl DeviceMemoryArgs {
    /// Bytes of the device, if one was named.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.budget.or(self.hardware.map(|hardware| hardware.memory))
    }
}
