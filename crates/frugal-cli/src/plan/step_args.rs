//! The flags of the FLOPs of a step, of a KV cache, and of a device's memory.

use std::path::PathBuf;

use accounting::decoder_flops::{Recomputation, Workload};
use accounting::hardware::{self, Hardware};
use accounting::lora::{ExpertTargets, LowRank, Targets, TokenRows};
use accounting::quantity::{parse_bytes, parse_count};
use accounting::recompute::{AttentionKernel, Recompute, SwigluLevel};
use accounting::{Decoder, Error};
use frugal::config::NewToken;

use super::model_args::ModelArgs;
use super::new_tokens;

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
    /// Activations that are kept for backward
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

const ADAPTERS: &str = "Low-rank adapters (the base is frozen)";

/// The training method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Trained {
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
    /// Training method [default: full; lora with a flag of adapters]
    #[arg(long, value_enum, value_name = "METHOD", help_heading = TRAINING)]
    method: Option<Trained>,
    /// Rank of the adapters [default: 8]
    #[arg(long, alias = "lora-rank", value_parser = parse_count, allow_negative_numbers = true, value_name = "R", help_heading = ADAPTERS)]
    r: Option<u64>,
    /// Projections to adapt: q, k, v, o, gate, up, down, or all; none [default: q,k,v,o]
    #[arg(long, alias = "lora-targets", value_name = "NAME,…", help_heading = ADAPTERS)]
    targets: Option<Targets>,
    /// Tensors of all experts of a layer to adapt: gate_up_proj, down_proj
    #[arg(long, value_name = "NAME,…", help_heading = ADAPTERS)]
    target_parameters: Option<ExpertTargets>,
    /// Tokens to add, as of finetune: an adapter trains their rows of the embedding and of the head alone
    #[arg(long, value_name = "FILE", help_heading = ADAPTERS)]
    new_tokens: Option<PathBuf>,
    /// Make a vocabulary that new tokens enlarge a multiple of this many rows [default: a row for each token]
    #[arg(long, alias = "pad-to-multiple-of", value_name = "ROWS", value_parser = clap::value_parser!(i64).range(1..), requires = "new_tokens", help_heading = ADAPTERS)]
    pad_vocabulary_to: Option<i64>,
}

impl LoraArgs {
    /// The model, with a row for each new token, and the adapters; `None` where all weights are trained.
    ///
    /// # Errors
    /// Flags of adapters, and all weights are to be trained; a file of tokens that cannot be read.
    pub(crate) fn low_rank(
        &self,
        arguments: &ModelArgs,
        model: Decoder,
    ) -> anyhow::Result<(Decoder, Option<LowRank>)> {
        let tokens = self.new_tokens.as_deref().map(NewToken::read).transpose()?.unwrap_or_default();
        let (model, ids) = match tokens.is_empty() {
            true => (model, Vec::new()),
            false => new_tokens::rows(arguments, &model, &tokens, self.pad_vocabulary_to)?,
        };
        let given = [
            ("--r", self.r.is_some()),
            ("--targets", self.targets.is_some()),
            ("--target-parameters", self.target_parameters.is_some()),
        ];
        let given = given.into_iter().find(|(_, given)| *given);
        match (self.method, given) {
            (Some(Trained::Full), Some((flag, _))) => {
                return Err(Error::Shape {
                    what: format!("{flag} is of adapters, and --method full trains all weights"),
                    remedy: "leave one of them out".into(),
                }
                .into());
            }
            (Some(Trained::Full), None) => return Ok((model, None)),
            (None, None) if ids.is_empty() => return Ok((model, None)),
            _ => {}
        }
        let rows = ids.len() as u64;
        let lora = LowRank {
            rank: self.r.unwrap_or(RANK),
            targets: self.targets.unwrap_or(Targets::ATTENTION),
            experts: self.target_parameters.unwrap_or(ExpertTargets::NONE),
            token_rows: TokenRows {
                trained: if model.tied { rows } else { 2 * rows },
                in_embedding: rows,
                in_head: rows,
            },
            ..LowRank::default()
        };
        Ok((model, Some(lora)))
    }
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
