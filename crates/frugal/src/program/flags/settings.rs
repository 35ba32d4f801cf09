//! The flags of a training, each of which overrides a value of the configuration.

use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, ValueEnum};
use frugal::Config;
use frugal::config::{
    ActivationPlan, Bytes, CheckpointEvery, Compute, Given, LossHeadKind, MasterWeights, OffloadConfig,
    OffloadMethod, OffloadTier, OptimizerPlace, OptimizerRule, Recomputed,
};
use frugal::dataloading::chat::Mask;
use frugal::training::schedule::Shape;

use runtime::collectives::Launch;

use crate::program::Common;
use crate::program::flags::run::RunArgs;
use crate::program::flags::{DATA, put, put_some};

// Headings of the help.
const LOOP: &str = "Training";
const MEMORY: &str = "Memory";
const OPTIMIZER: &str = "Precision and optimizer";

/// The error of flags about offloaded layers where no layer is offloaded.
pub(crate) const WITHOUT_OFFLOAD: &str =
    "--ring and --resident apply to offloaded layers only; give --offload host or --offload file";

/// The techniques, the optimizer and the loop.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct SettingsArgs {
    /// Read every setting from a TOML file; flags override it
    #[arg(long, value_name = "FILE", help_heading = LOOP)]
    pub(crate) config: Option<PathBuf>,
    /// Optimizer steps; if --epochs is given too, training ends at whichever comes first [default: those of --epochs; for train: 100]
    #[arg(long, alias = "max-steps", help_heading = LOOP)]
    steps: Option<u64>,
    /// Passes over the data [default: 1, or as many as --steps needs]
    #[arg(long, alias = "num-train-epochs", help_heading = LOOP)]
    epochs: Option<u64>,
    /// Rows per batch [default: 4; for train: 8]
    #[arg(long, aliases = ["batch", "per-device-train-batch-size"], help_heading = LOOP)]
    batch_size: Option<usize>,
    /// Gradient accumulation steps: batches per optimizer step [default: 4; for train: 1]
    #[arg(long, alias = "gradient-accumulation-steps", help_heading = LOOP)]
    accumulation: Option<usize>,
    /// Pack several rows into one of TOKENS positions, without attention between them [default without a value: 1024]
    #[arg(long, value_name = "TOKENS", num_args = 0..=1, default_missing_value = "1024", help_heading = DATA)]
    packing: Option<usize>,
    /// Steps (500) or time (10m, 600s, 2h) between checkpoints, besides those at the end and on Ctrl-C [default: 10m]
    #[arg(long, value_name = "STEPS_OR_TIME", help_heading = LOOP)]
    checkpoint_every: Option<CheckpointEvery>,
    /// Checkpoints to keep [default: 2; for train: 3]
    #[arg(long, help_heading = LOOP)]
    keep: Option<usize>,
    /// Steps between evaluations on the validation data; finetune makes one at the end in any case
    #[arg(long, value_name = "STEPS", help_heading = LOOP)]
    evaluate_every: Option<u64>,
    /// Steps between reads of the loss, which wait for the device [default: 1; for train: 10]
    #[arg(long, alias = "read-every", value_name = "STEPS", help_heading = LOOP)]
    log_every: Option<u64>,
    /// Micro-batch size: rows per forward and backward; the gradients of a batch are summed [default: the batch, or fewer if the budget needs that]
    #[arg(long, alias = "rows-at-once", value_name = "ROWS", help_heading = MEMORY)]
    micro_batch_size: Option<usize>,
    /// Memory limit, such as 3GiB: of the process on a CPU, of tensors on a GPU [default: 80 % of the free memory]
    #[arg(long, value_name = "BYTES", value_parser = budget, help_heading = MEMORY)]
    budget: Option<Bytes>,
    /// Which layers keep their activations for backward [default: auto]
    #[arg(long, value_name = "PLAN", help_heading = MEMORY)]
    activations: Option<ActivationPlan>,
    /// What a layer that does not keep its activations recomputes [default: layer]
    #[arg(long, value_name = "WHAT", help_heading = MEMORY)]
    recompute_what: Option<Recomputed>,
    /// Short for --activations recompute
    #[arg(long, conflicts_with = "activations", help_heading = MEMORY)]
    recompute: bool,
    /// Checkpoint level of the MLPs: save-all, save-gate-up, save-one, input-only or input-only-tiled:SIZE [default: the model's own MLP]
    #[arg(long, value_name = "LEVEL", help_heading = MEMORY)]
    mlp: Option<String>,
    /// Loss head [default: auto]
    #[arg(long, value_name = "HEAD", help_heading = MEMORY)]
    loss: Option<LossHeadKind>,
    /// Tokens whose logits exist at a time in the fused loss [default: as many as fit 128 MiB on a CPU, 1 GiB on a GPU]
    #[arg(long, value_name = "TOKENS", help_heading = MEMORY)]
    loss_chunk: Option<i64>,
    /// Offload the layers' weights, and load them when they are needed
    #[arg(long, value_name = "TIER", help_heading = MEMORY)]
    offload: Option<OffloadTier>,
    /// How offloaded layers are transferred [default: overlap]
    #[arg(long, value_name = "METHOD", help_heading = MEMORY)]
    offload_method: Option<OffloadMethod>,
    /// Number of offloaded layers on the device at a time [default: 3]
    #[arg(long, value_name = "LAYERS", help_heading = MEMORY)]
    ring: Option<usize>,
    /// Layers that are not offloaded: numbers from 0, separated by commas
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', help_heading = MEMORY)]
    resident: Option<Vec<usize>>,
    /// Precision of matrix products (autocast) [default: fp32, no autocast]
    #[arg(long, help_heading = OPTIMIZER)]
    precision: Option<Compute>,
    /// Update rule, with its usual coefficients [default: adamw]
    #[arg(long, help_heading = OPTIMIZER)]
    optimizer: Option<OptimizerRule>,
    /// How trained weights in bf16 and fp16 take updates smaller than their last digit [default: auto]
    #[arg(long, value_name = "HOW", help_heading = OPTIMIZER)]
    master_weights: Option<MasterWeights>,
    /// Where the optimizer state of offloaded layers is stored and updated [default: device]
    #[arg(long, value_name = "PLACE", help_heading = MEMORY)]
    optimizer_on: Option<OptimizerPlace>,
    /// ZeRO stage of a training over several ranks (`frugal launch`): 1 shards the optimizer state, 2 also the gradients, 3 also the layers' weights [default: 1]
    #[arg(long, value_name = "STAGE", value_parser = clap::value_parser!(u8).range(1..=3), help_heading = MEMORY)]
    zero_stage: Option<u8>,
    /// Replicas among which the ranks are divided (hybrid sharding): the ranks of each shard weights, gradients and optimizer state among them, and layers are gathered within a replica [default: 1]
    #[arg(long, value_name = "REPLICAS", help_heading = MEMORY)]
    replicas: Option<usize>,
    /// Learning rate [default: 2e-4, with --method full 2e-5; for train: 1e-3]
    #[arg(long, alias = "learning-rate", allow_negative_numbers = true, help_heading = OPTIMIZER)]
    lr: Option<f64>,
    /// Learning-rate schedule after warm-up [default: cosine; for train: constant]
    #[arg(long, help_heading = OPTIMIZER)]
    schedule: Option<ScheduleArg>,
    /// Warm-up steps; below 1, a share of all steps [default: 0.03; for train: 0]
    #[arg(long, value_name = "SHARE_OR_STEPS", allow_negative_numbers = true, help_heading = OPTIMIZER)]
    warmup: Option<f64>,
    /// Weight decay of matrices: decoupled for adamw, an L2 penalty for the others [default: 0; for train: 0.1]
    #[arg(long, allow_negative_numbers = true, help_heading = OPTIMIZER)]
    weight_decay: Option<f64>,
    /// Maximum gradient norm; 0 for no clipping [default: 1; for train: 0]
    #[arg(long, allow_negative_numbers = true, help_heading = OPTIMIZER)]
    clip: Option<f64>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// A flag's values for an enum of a library, which knows no command line.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident of $to:ty { $($(#[$each:meta])* $variant:ident),* $(,)? }) => {
        #[derive(Clone, Copy, Debug, ValueEnum)]
        $(#[$doc])*
        pub(crate) enum $name { $($(#[$each])* $variant),* }

        impl $name {
            pub(crate) fn get(self) -> $to {
                match self { $(Self::$variant => <$to>::$variant),* }
            }
        }
    };
}

choice! {
    /// `--schedule`.
    ScheduleArg of Shape {
        /// No decay
        Constant,
        /// Linear decay to 0 at the last step
        Linear,
        /// Cosine decay to 0 at the last step
        Cosine,
    }
}
choice! {
    /// `--mask`.
    MaskArg of Mask {
        /// Every assistant turn or completion, except messages of weight 0
        Answers,
        /// The last assistant turn
        Last,
        /// All tokens
        All,
    }
}

impl SettingsArgs {
    /// What the configuration file and `--set` give.
    ///
    /// # Errors
    /// A file that is no configuration; a key that is unknown.
    pub(crate) fn given(&self) -> anyhow::Result<Given> {
        let mut given = Given::default();
        if let Some(path) = &self.config {
            given.file(path)?;
        }
        self.run.assign(&mut given)?;
        Ok(given)
    }

    /// Overrides the configuration's values by the flags that were given.
    ///
    /// # Errors
    /// Flags about offloaded layers without `--offload`.
    pub(crate) fn apply(&self, config: &mut Config, common: &Common) -> anyhow::Result<()> {
        let of_ranks = [("--zero-stage", self.zero_stage.is_some()), ("--replicas", self.replicas.is_some())];
        if let Some((flag, _)) = of_ranks.into_iter().find(|(_, given)| *given)
            && Launch::from_environment()?.is_none()
        {
            bail!(
                "{flag} applies to training over several ranks only; start it with `frugal launch -n RANKS -- frugal …`"
            );
        }
        let Config { training, activations, loss, precision, optimizer, data, mlp, .. } = config;
        put(&mut training.seed, common.seed);
        put(&mut training.device, common.device.clone());
        // The two say the same thing: the flag that is given alone counts.
        match (self.steps, self.epochs) {
            (Some(steps), None) => (training.steps, training.epochs) = (Some(steps), None),
            (None, Some(epochs)) => (training.steps, training.epochs) = (None, Some(epochs)),
            (Some(_), Some(_)) => (training.steps, training.epochs) = (self.steps, self.epochs),
            (None, None) => {}
        }
        put(&mut training.batch, self.batch_size);
        put(&mut training.accumulation, self.accumulation);
        put_some(&mut training.micro_batch_size, self.micro_batch_size);
        put_some(&mut data.packing, self.packing);
        put(&mut training.checkpoint_every, self.checkpoint_every);
        put(&mut training.keep, self.keep);
        put_some(&mut training.evaluate_every, self.evaluate_every);
        put(&mut training.log_every, self.log_every);
        put_some(&mut training.budget, self.budget);
        put(&mut activations.plan, self.activations);
        put(&mut activations.plan, self.recompute.then_some(ActivationPlan::Recompute));
        put(&mut activations.recompute, self.recompute_what);
        put_some(&mut mlp.level, self.mlp.clone());
        put(&mut loss.head, self.loss);
        put_some(&mut loss.chunk_tokens, self.loss_chunk);
        put(&mut precision.compute, self.precision);
        put(&mut optimizer.rule, self.optimizer);
        put(&mut optimizer.master_weights, self.master_weights);
        put(&mut optimizer.place, self.optimizer_on);
        put(&mut optimizer.zero_stage, self.zero_stage);
        put(&mut optimizer.replicas, self.replicas);
        put(&mut optimizer.lr, self.lr);
        put(&mut optimizer.schedule, self.schedule.map(ScheduleArg::get));
        put(&mut optimizer.warmup, self.warmup);
        put(&mut optimizer.weight_decay, self.weight_decay);
        put(&mut optimizer.clip, self.clip);
        self.run.apply(config);
        if self.offload.is_some() {
            config.offload.get_or_insert_with(OffloadConfig::default);
        }
        if let Some(offload) = &mut config.offload {
            put(&mut offload.tier, self.offload);
            put(&mut offload.method, self.offload_method);
            put(&mut offload.ring, self.ring);
            put(&mut offload.resident, self.resident.clone());
        } else if self.ring.is_some() || self.resident.is_some() {
            bail!(WITHOUT_OFFLOAD);
        } else if self.offload_method.is_some() {
            bail!("--offload-method applies to offloaded layers only; give --offload host or --offload file");
        }
        Ok(())
    }
}

/// Parses a memory limit.
///
/// # Errors
/// A small number without a unit: one was forgotten.
pub(crate) fn budget(text: &str) -> Result<Bytes, String> {
    let budget: Bytes = text.parse()?;
    match text.trim().parse::<u64>() {
        Ok(number) if number < 1 << 20 => {
            Err(format!("this is {budget}; give a unit, as {number}MiB or {number}GiB"))
        }
        _ => Ok(budget),
    }
}
