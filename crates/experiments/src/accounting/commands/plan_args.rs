//! How a model is trained, and on what.

use accounting::decoder_flops::{Recomputation, Workload};
use accounting::estimate::Plan;
use accounting::hardware::{self, Hardware};
use accounting::lora::{LowRank, Targets};
use accounting::memory::host::OnHost;
use accounting::memory::logits::Loss;
use accounting::memory::optimizer::{Optimizer, StepKernel};
use accounting::memory::recipe::Recipe;
use accounting::memory::zero::{Sharding, ZeroStage};
use accounting::quantity::{parse_bytes, parse_count};
use accounting::recompute::{AttentionKernel, NormKernel, Recompute, SwigluLevel};
use accounting::{Decoder, Error};

const TRAINING: &str = "Training";

#[derive(clap::Args)]
pub(crate) struct WorkArgs {
    /// Sequences per device
    #[arg(long, default_value = "1", value_parser = parse_count, allow_negative_numbers = true, value_name = "N", help_heading = TRAINING)]
    pub(crate) batch: u64,
    /// Tokens of a sequence [default: 1024, or the model's context if that is shorter]
    #[arg(long, value_parser = parse_count, allow_negative_numbers = true, value_name = "N", help_heading = TRAINING)]
    sequence: Option<u64>,
}

impl WorkArgs {
    pub(crate) fn workload(&self, model: &Decoder) -> Workload {
        Workload { batch: self.batch, sequence: self.sequence.unwrap_or(model.context.min(1024)) }
    }
}

#[derive(clap::Args)]
pub(crate) struct RecomputeArgs {
    /// Attention kernel: eager or flash
    #[arg(long, default_value = "flash", value_name = "KERNEL", help_heading = TRAINING)]
    attention: AttentionKernel,
    /// What is computed again: none, selective (the attention's core) or full (each block)
    #[arg(long, default_value = "none", value_name = "CHOICE", help_heading = TRAINING)]
    recompute: Recompute,
    /// What a SwiGLU keeps: eager, save-all, save-gate-up, save-one or input-only
    #[arg(long, default_value = "eager", value_name = "LEVEL", help_heading = TRAINING)]
    swiglu: SwigluLevel,
}

impl RecomputeArgs {
    pub(crate) fn recomputation(&self) -> Recomputation {
        Recomputation { attention: self.attention, checkpoint: self.recompute, swiglu: self.swiglu }
    }
}

#[derive(clap::Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) work: WorkArgs,
    /// Number formats: fp32, amp-fp16, amp-bf16, fp16-master, bf16-master, bf16-master-fp32-grads or bf16
    #[arg(long, default_value = "bf16-master", value_name = "RECIPE", help_heading = TRAINING)]
    recipe: Recipe,
    /// sgd, momentum, adagrad, rmsprop, adam, adamw or adam-8bit
    #[arg(long, default_value = "adamw", value_name = "NAME", help_heading = TRAINING)]
    optimizer: Optimizer,
    /// How the optimizer's step runs: fused, foreach or loop
    #[arg(long, default_value = "foreach", value_name = "KERNEL", help_heading = TRAINING)]
    step: StepKernel,
    #[command(flatten)]
    recompute: RecomputeArgs,
    /// How an RMSNorm is computed: fused, fused-output (which keeps its output), or composed of operations (torch on a CPU)
    #[arg(long, default_value = "fused", value_name = "KERNEL", help_heading = TRAINING)]
    norm: NormKernel,
    /// Dropout is on
    #[arg(long, help_heading = TRAINING)]
    dropout: bool,
    /// How the loss is computed: naive, chunked-recompute, grad-in-forward or linear-cross-entropy [default: naive, or
    /// linear-cross-entropy with --loss-chunk]
    #[arg(long, value_parser = loss_name, value_name = "NAME", help_heading = TRAINING)]
    loss: Option<&'static str>,
    /// Output and loss for N tokens at a time [default: 1024 if the loss has chunks]
    #[arg(long, value_parser = parse_count, allow_negative_numbers = true, value_name = "N", help_heading = TRAINING)]
    loss_chunk: Option<u64>,
    /// What is kept on the host: parameters, gradients, optimizer, block-inputs
    #[arg(long, value_delimiter = ',', value_name = "NAME,…", help_heading = TRAINING)]
    on_host: Vec<String>,
    /// Gradients of earlier batches are kept while the next runs
    #[arg(long, help_heading = TRAINING)]
    accumulate: bool,
    /// ZeRO stage: 0, 1, 2 or 3
    #[arg(long, default_value = "0", value_parser = zero_stage, allow_negative_numbers = true, value_name = "STAGE", help_heading = TRAINING)]
    zero: ZeroStage,
    /// Data-parallel devices
    #[arg(long, default_value = "1", value_parser = parse_count, allow_negative_numbers = true, value_name = "N", help_heading = TRAINING)]
    devices: u64,
    /// Tokens of the step that have a label [default: all]
    #[arg(long, value_parser = parse_count, allow_negative_numbers = true, value_name = "N", help_heading = TRAINING)]
    labelled: Option<u64>,
    #[command(flatten)]
    lora: LoraArgs,
}

const ADAPTERS: &str = "Adapters beside a frozen base";

/// Adapters, and what trains them.
#[derive(clap::Args)]
pub(crate) struct LoraArgs {
    /// Train low-rank adapters of this rank and nothing else
    #[arg(long, value_parser = parse_count, allow_negative_numbers = true, value_name = "R", help_heading = ADAPTERS)]
    lora_rank: Option<u64>,
    /// Which projections are adapted: q, k, v, o, gate, up, down, or all [default: q,k,v,o]
    #[arg(long, requires = "lora_rank", value_name = "NAME,…", help_heading = ADAPTERS)]
    lora_targets: Option<Targets>,
    /// The adapters' input is dropped
    #[arg(long, requires = "lora_rank", help_heading = ADAPTERS)]
    lora_dropout: bool,
    /// A base of 16 bits is cast to fp32 for the adapters' products, as on a processor
    #[arg(long, requires = "lora_rank", help_heading = ADAPTERS)]
    lora_on_cpu: bool,
}

impl LoraArgs {
    pub(crate) fn low_rank(&self) -> Option<LowRank> {
        self.lora_rank.map(|rank| LowRank {
            rank,
            targets: self.lora_targets.unwrap_or(Targets::ATTENTION),
            dropout: self.lora_dropout,
            on_cpu: self.lora_on_cpu,
        })
    }
}

impl PlanArgs {
    pub(crate) fn plan(&self, model: &Decoder) -> Result<Plan, Error> {
        Ok(Plan {
            work: self.work.workload(model),
            recipe: self.recipe,
            optimizer: self.optimizer,
            step: self.step,
            recomputation: self.recompute.recomputation(),
            norm: self.norm,
            dropout: self.dropout,
            loss: self.loss()?,
            sharding: Sharding::new(self.zero, self.devices)?,
            accumulate: self.accumulate,
            host: self.on_host.iter().try_fold(OnHost::default(), |host, name| host.with(name))?,
            labelled: self.labelled,
            lora: self.lora.low_rank(),
        })
    }

    fn loss(&self) -> Result<Loss, Error> {
        match (self.loss, self.loss_chunk) {
            (Some(name), Some(_)) if name == Loss::Eager.name() => Err(Error::Shape {
                what: format!("a loss computed by `{name}` has no chunks"),
                remedy: "leave out --loss-chunk, or name another --loss".into(),
            }),
            (Some(name), tokens) => Loss::from_name(name, tokens.unwrap_or(1024)),
            (None, Some(tokens)) => Ok(Loss::LinearCrossEntropy { tokens }),
            (None, None) => Ok(Loss::Eager),
        }
    }
}

fn loss_name(text: &str) -> Result<&'static str, Error> {
    Ok(text.parse::<Loss>()?.name())
}

fn zero_stage(text: &str) -> Result<ZeroStage, String> {
    let number: u64 = text.parse().map_err(|_| "give 0, 1, 2 or 3".to_owned())?;
    ZeroStage::from_number(number).map_err(|error| error.to_string())
}

#[derive(clap::Args)]
#[group(multiple = false)]
pub(crate) struct DeviceMemoryArgs {
    /// Memory of the device, for example 80GB or 24GiB
    #[arg(long, value_parser = parse_bytes, allow_negative_numbers = true, value_name = "BYTES", help_heading = "Device (one of)")]
    memory: Option<u64>,
    /// A known device: b200, h200, h100, mi300x, a100, a100-40gb, v100, rtx4090, rtx3090 or t4
    #[arg(long, value_parser = hardware::find, value_name = "NAME", help_heading = "Device (one of)")]
    hardware: Option<Hardware>,
}

impl DeviceMemoryArgs {
    /// Bytes of the device, if one was named.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.memory.or(self.hardware.map(|hardware| hardware.memory))
    }
}
