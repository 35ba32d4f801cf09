//! `frugal plan`: the ways to run a step within a budget, in one process or over several ranks, at this machine's measured rates or at a GPU's.

mod compare;
mod ranks;
mod rates;
mod search;
mod shape;
mod variants;

use std::path::PathBuf;

use accounting::Decoder;
use accounting::decoder_flops::Workload;
use accounting::lora::{LowRank, Targets};
use accounting::memory::quantized;
use accounting::offload::sizes::Choices;
use accounting::offload::{AvailableMemory, Direction, Gpu, Rates, StepCosts, gpu, sizes};
use accounting::quantity::{bytes_text, grouped, parse_bytes};
use anyhow::{anyhow, bail};
use clap::Args;
use frugal::config::{ActivationPlan, Bytes, ObjectiveKind, OffloadTier, Task};
use frugal::models::hugging_face::Folder;
use frugal::planning::{self, Budget, MachineRates, NotPredicted, WeightFormat};
use frugal::{Config, Recipe};
use kernels::quantized::blocks;
use report::cli::Failure;
use serde_json::{Value, json};
use tch::{Device, Kind};

use super::model_args::ModelArgs;
use super::new_tokens;
use super::step_args::known_hardware;
use crate::common_flags::Common;
use crate::flags::Flags;
use crate::flags::table::PLAN;
use crate::output::figures::counted;
use crate::output::shell_command::shell_word;
use crate::run::plan::{NOTHING_FITS, budget_text, fitting};
use ranks::RanksArgs;
pub(crate) use search::{Ways, bytes};
use shape::shape;
use variants::Variant;

#[derive(Args)]
pub(crate) struct StepArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    flags: Flags<PLAN>,
    /// As of finetune, whose dry run plans for data
    #[arg(long, hide = true)]
    data: Option<String>,
    /// Memory limit of the host for offloaded layers and optimizer state [default: none]
    #[arg(long, value_name = "BYTES")]
    host_budget: Option<Bytes>,
    /// Folder on the disk of offloaded layers, whose read rate is measured [default: the model's, or the current one]
    #[arg(long, value_name = "FOLDER", conflicts_with = "hardware")]
    folder: Option<PathBuf>,
    #[arg(long, alias = "card", value_name = "NAME", value_parser = gpu, help = known_hardware("Plan for this GPU instead of this machine"))]
    hardware: Option<Gpu>,
    /// FLOP/s of matrix products [default: measured, or what trainings reach on --hardware]
    #[arg(long, value_name = "FLOP/S")]
    flops: Option<f64>,
    /// Bytes per second at which layers are loaded, such as 25GB [default: measured, or that of --hardware]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    link: Option<u64>,
    /// Bytes per second of the host's memory [default: measured, or 50GB with --hardware]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    host_bandwidth: Option<u64>,
    #[command(flatten)]
    ranks: RanksArgs,
}

/// The step that is planned.
pub(crate) struct PlannedStep {
    /// The training, as finetune would have it with the same flags.
    config: Config,
    pub(crate) model: Decoder,
    /// The adapters; `None` where all weights are trained, or none.
    lora: Option<LowRank>,
    /// A batch.
    pub(crate) work: Workload,
    /// Gradient accumulation steps: batches of a step.
    batches: u64,
    /// Format of the weights.
    format: WeightFormat,
    /// The device whose kernels compute it.
    device: Device,
    /// Where offloaded layers live.
    tier: OffloadTier,
    /// Bytes of the weights.
    weights: u64,
    /// The trained parameters, in words.
    pub(crate) trains: String,
}

/// A step, the rates of the machine, and the memory that there is.
pub(crate) struct Conditions {
    pub(crate) planned: PlannedStep,
    machine: MachineRates,
    budget: Budget,
    /// The memory for tensors, of one rank if there are several.
    pub(crate) memory: AvailableMemory,
    on_cpu: bool,
    /// Ranks that share the machine.
    sharing: u64,
}

impl Conditions {
    /// The step and the rates, which every plan prints as JSON.
    fn json(&self, arguments: &StepArgs) -> anyhow::Result<serde_json::Map<String, Value>> {
        let Self { planned, machine, budget, memory, .. } = self;
        let conditions = entries([
            ("model", json!(arguments.model.name())),
            ("model_bytes", json!(planned.weights)),
            ("parameters", json!(planned.model.parameters()?)),
            ("budget_bytes", json!(budget.total)),
            ("budget", json!(memory.device)),
            ("flops", json!(machine.flops)),
            ("memory_rate", json!(machine.bandwidth)),
            ("link_rate", json!(machine.transfers.load)),
        ]);
        Ok(conditions.collect())
    }
}

/// Named values as the entries of a JSON object.
fn entries<const N: usize>(values: [(&str, Value); N]) -> impl Iterator<Item = (String, Value)> {
    values.into_iter().map(|(name, value)| (name.to_owned(), value))
}

/// Tokens from which on loads hide behind compute, for each pass.
fn hiding_json(hiding: &[(Direction, u64)]) -> Value {
    hiding.iter().map(|(pass, tokens)| json!({ "pass": pass.name(), "tokens": tokens })).collect()
}

/// The ways to run a training step in one process: what `frugal plan` compares, and `plan memory` and `plan fit` look into.
///
/// # Errors
/// Inference, and several ranks; those of the plan.
pub(crate) fn training_ways(common: &Common, arguments: &StepArgs) -> anyhow::Result<(Conditions, Ways)> {
    if arguments.is_inference() || arguments.has_ranks() {
        bail!(
            "this is answered for a training in one process; `frugal plan` with the same flags shows the peak's parts"
        );
    }
    let conditions = conditions(common, arguments)?;
    let ways = search::ways(arguments, &conditions)?;
    Ok((conditions, ways))
}

pub(crate) fn run(common: &Common, arguments: &StepArgs) -> anyhow::Result<()> {
    let conditions = conditions(common, arguments)?;
    match arguments.is_inference() {
        true => compare::run(common, arguments, &conditions),
        false => search::run(common, arguments, &conditions),
    }
}

fn conditions(common: &Common, arguments: &StepArgs) -> anyhow::Result<Conditions> {
    if let Some(data) = &arguments.data {
        let (model, data) = (shell_word(&arguments.model.name()), shell_word(data));
        bail!("the plan for data is `frugal finetune --model {model} --data {data} --dry-run`");
    }
    let device = match arguments.hardware {
        Some(_) => Device::Cuda(0),
        None => common.device()?,
    };
    let planned = planned(arguments, device)?;
    let on_cpu = device == Device::Cpu;
    let sharing = arguments.ranks.sharing(on_cpu);
    let machine = shared(arguments.rates(&planned)?, sharing);
    let budget = arguments.budget(&planned.config, device, sharing)?;
    let host = arguments.host_budget.map(|budget| budget.0);
    let memory = AvailableMemory { device: fitting(budget.free())?, host };
    Ok(Conditions { planned, machine, budget, memory, on_cpu, sharing })
}

/// The step of the flags, checked.
fn planned(arguments: &StepArgs, device: Device) -> anyhow::Result<PlannedStep> {
    arguments.check_ranks()?;
    // The model, and the training that finetune would have.
    let (model, config) =
        new_tokens::added(&arguments.model, arguments.model.decoder()?, arguments.config()?)?;
    let tokens = config.data.max_length.map_or_else(|| model.context.min(512), |length| length as u64);
    if tokens > model.context {
        bail!("--length {tokens}: the model takes rows of {} at most", model.context);
    }
    let format = arguments.format(&config, model.vocabulary)?;
    if !arguments.is_inference() {
        Recipe::new(&config)?;
    }

    // Where offloaded layers are.
    let on_cpu = device == Device::Cpu;
    let tier = match &config.offload {
        Some(offload) => offload.tier,
        None if on_cpu => OffloadTier::File,
        None => OffloadTier::Host,
    };
    if let (OffloadTier::File, Some(gpu), None) = (tier, arguments.hardware, arguments.link) {
        bail!(
            "--offload file: the disk of a machine with --hardware {} is not known; give its bytes per second as --link, or --offload host",
            gpu.name
        );
    }

    // The work, and what is trained.
    let objective = config.objective.kind;
    if matches!(objective, ObjectiveKind::Grpo | ObjectiveKind::Distillation) {
        bail!(
            "--objective {}: its plan depends on the {}; give the flags of the training to `frugal finetune`, with --dry-run",
            objective.name(),
            if objective == ObjectiveKind::Grpo { "questions" } else { "teacher" }
        );
    }
    let rows = config.training.batch * config.objective.grouping()?.rows();
    let work = Workload { batch: rows as u64, sequence: tokens };
    let batches = if arguments.is_inference() { 1 } else { config.training.accumulation as u64 };
    let weights = quantized::model_bytes(&model, &format.recipe())?;
    let low_rank = |adapter| planning::low_rank(adapter, &shape(&model), on_cpu).map_err(not_predicted);
    let lora = config.adapter.as_ref().map(low_rank).transpose()?;
    if let Some(adapter) = config.adapter.as_ref().filter(|_| arguments.flags.has(&["--targets"])) {
        adapter.check_matches(&shape(&model)).map_err(frugal::Error::from)?;
    }
    let rows = lora.map_or(0, |lora| lora.token_rows.trained);
    let mut trains = match &lora {
        Some(lora) if lora.magnitudes => format!("DoRA of rank {} on {}", lora.rank, lora.targets),
        Some(lora) => format!("adapters of rank {} on {}", lora.rank, adapted_text(lora)),
        None if arguments.is_inference() => "forward only".to_owned(),
        None => "all weights are trained".to_owned(),
    };
    if rows > 0 {
        trains += &format!(" and {} of tokens", counted(rows, "row"));
    }
    let planned = PlannedStep { config, model, lora, work, batches, format, device, tier, weights, trains };
    arguments.check_division(&planned)?;
    Ok(planned)
}

/// The error where nothing fits, with what suffices. `ways` are the bytes that each takes on the device and on the host.
pub(crate) fn nothing_fits(
    arguments: &StepArgs,
    conditions: &Conditions,
    ways: impl Iterator<Item = (u64, u64)> + Clone,
) -> anyhow::Error {
    let Conditions { planned, budget, memory, .. } = conditions;
    let fitting_device = ways.clone().filter(|(device, _)| *device <= memory.device);
    let message = match (arguments.host_budget, fitting_device.map(|(_, host)| host).min()) {
        (Some(given), Some(host)) => format!(
            "nothing fits a host budget of {}: the ways that fit the device take {} of host memory at least; give --host-budget {}MiB",
            bytes_text(given.0),
            bytes_text(host),
            host.div_ceil(1 << 20)
        ),
        _ => {
            let least = ways.map(|(device, _)| device).min();
            let least = least.map_or_else(String::new, |least| {
                let suffices = budget.for_tensors(least) >> 20;
                format!("; the least takes {} for tensors; give --budget {suffices}MiB,", bytes_text(least))
            });
            let fewer = match &planned.lora {
                Some(_) => "fewer or shorter rows, a lower rank",
                None if arguments.is_inference() => "fewer or shorter rows",
                None => "fewer or shorter rows, --method lora",
            };
            format!("nothing fits {}{least} {fewer}, or a smaller model", budget_text(budget))
        }
    };
    Failure { status: NOTHING_FITS, message }.into()
}

/// The table's first lines: parameters, budget, rates, and the work of a step.
fn head(arguments: &StepArgs, conditions: &Conditions) -> anyhow::Result<Vec<(String, String)>> {
    let Conditions { planned, machine, budget, memory, .. } = conditions;
    let parameters = grouped(planned.model.parameters()?.into());
    let source = match arguments.hardware {
        Some(gpu) => format!("{} in {}", gpu.name, planned.format.recipe().compute),
        None => "measured".to_owned(),
    };
    let over =
        if arguments.has_ranks() { format!(" over {} ranks", arguments.ranks.ranks) } else { String::new() };
    let of_each = if arguments.has_ranks() { " of each rank" } else { "" };
    Ok(vec![
        ("parameters".to_owned(), format!("{parameters} ({})", bytes_text(planned.weights))),
        ("budget".to_owned(), budget_text(budget) + of_each),
        ("  for tensors".to_owned(), bytes_text(memory.device)),
        (
            source,
            format!(
                "{:.3e} FLOP/s of products, {:.3e} B/s of memory, {:.3e} B/s of loads",
                machine.flops, machine.bandwidth, machine.transfers.load
            ),
        ),
        ("step".to_owned(), planned.work_text() + &over),
    ])
}

impl PlannedStep {
    /// Ranks that divide each row.
    fn sequence_ranks(&self) -> u64 {
        self.config.training.sequence_parallel_size as u64
    }

    /// Describes the trained parameters and the tokens of a step.
    pub(crate) fn work_text(&self) -> String {
        let Workload { batch, sequence } = self.work;
        let length = grouped(sequence.into());
        let rows = match self.batches {
            1 => format!("batch {batch} × {length} tokens"),
            batches => format!("{batches} batches of {batch} × {length} tokens"),
        };
        format!("{}, {rows}", self.trains)
    }
}

/// What adapters are on.
fn adapted_text(lora: &LowRank) -> String {
    let experts = if lora.experts.any() { format!("the experts' {}", lora.experts) } else { String::new() };
    match (lora.targets, lora.experts.any()) {
        (targets, false) => targets.to_string(),
        (Targets::NONE, true) => experts,
        (targets, true) => format!("{targets} and {experts}"),
    }
}

/// The rates of each of several ranks that share a machine.
fn shared(machine: MachineRates, ranks: u64) -> MachineRates {
    let share = |rate: f64| rate / ranks as f64;
    let Rates { load, store, host_optimizer, device_optimizer } = machine.transfers;
    let transfers = Rates {
        load: share(load),
        store: share(store),
        host_optimizer: share(host_optimizer),
        device_optimizer: share(device_optimizer),
    };
    MachineRates { flops: share(machine.flops), bandwidth: share(machine.bandwidth), transfers, ..machine }
}

fn not_predicted(NotPredicted(why): NotPredicted) -> anyhow::Error {
    anyhow!("the memory of a step is not predicted for {why}")
}

impl StepArgs {
    /// Whether a step is a forward pass alone.
    fn is_inference(&self) -> bool {
        self.flags.text("--method") == Some("inference")
    }

    /// The training that `frugal finetune` would be asked for by the same flags; of inference, its model and rows.
    fn config(&self) -> anyhow::Result<Config> {
        let mut given = self.flags.given()?;
        self.flags.give_method(&mut given)?;
        self.flags.give(&mut given, Task::Finetune)?;
        let mut config = given.config(Task::Finetune)?;
        if self.is_inference() {
            config.adapter = None;
        }
        let has_recomputation =
            matches!(config.activations.plan, ActivationPlan::Recompute | ActivationPlan::EveryK);
        if self.flags.has(&["--recompute-what"]) && !has_recomputation {
            bail!(
                "--recompute-what changes nothing without --activations recompute or every-k; give one of them"
            );
        }
        if !given.origins().has("training.batch") && (self.is_inference() || self.has_ranks()) {
            config.training.batch = 1;
        }
        // A micro-batch for each rank, or group of ranks that divide its rows.
        if !given.origins().has("training.accumulation") && self.has_ranks() {
            let groups = self.ranks.ranks / (config.training.sequence_parallel_size as u64).max(1);
            config.training.accumulation = usize::try_from(groups)?.max(1);
        }
        Ok(config)
    }

    /// The dtype that was given, or that of the weights' files where there are any in one for which a plan is made.
    fn kind(&self, config: &Config) -> Option<Kind> {
        if let Some(dtype) = config.model.dtype {
            return Some(dtype.kind());
        }
        let kind = self.model.kind();
        let is_frozen = config.adapter.is_some() || self.is_inference();
        let is_quantized = |kind: Kind| planning::recipe(kind).is_quantized() && is_frozen;
        kind.filter(|kind| matches!(kind, Kind::Float | Kind::BFloat16) || is_quantized(*kind))
    }

    /// The format of the weights.
    ///
    /// # Errors
    /// Dtypes for which no plan is made, or that cannot be trained.
    fn format(&self, config: &Config, vocabulary: u64) -> anyhow::Result<WeightFormat> {
        let trains_all = config.adapter.is_none() && !self.is_inference();
        let Some(kind) = self.kind(config) else {
            return Ok(if trains_all { Kind::Float } else { Kind::BFloat16 }.into());
        };
        let is_quantized = planning::recipe(kind).is_quantized();
        let name = if kind == blocks::KIND { "gguf" } else { "nf4" };
        match kind {
            Kind::Float | Kind::BFloat16 => {}
            _ if !is_quantized => bail!("--dtype: a plan is made for float32, bfloat16, nf4 and gguf"),
            _ if trains_all => {
                bail!("--dtype {name}: quantized weights cannot be trained; give --method lora")
            }
            _ if self.has_ranks() => {
                bail!("--dtype {name}: a plan over several ranks is made for float32 and bfloat16")
            }
            _ => {}
        }
        if kind != blocks::KIND {
            return Ok(kind.into());
        }
        if let Some(gpu) = self.hardware {
            bail!("--dtype gguf: blocks are multiplied on a CPU only, not on {}; give --dtype nf4", gpu.name);
        }
        let folder = self.model.folder().map(|folder| Folder::open(&folder)).transpose()?;
        match folder.filter(|folder| folder.gguf_file().is_some()) {
            Some(folder) => {
                let folder = folder.with_vocabulary(i64::try_from(vocabulary).unwrap_or(i64::MAX));
                Ok(WeightFormat::of(&folder, kind)?)
            }
            None => {
                bail!("--dtype gguf keeps the blocks of a file; give a GGUF file as --model, or --dtype nf4")
            }
        }
    }

    /// The memory limit of one of `sharing` processes on this machine, of its GPU, or of a GPU that is named.
    fn budget(&self, config: &Config, device: Device, sharing: u64) -> anyhow::Result<Budget> {
        let given = config.training.budget.map(|budget| budget.0);
        Ok(match self.hardware {
            Some(gpu) => Budget::of_gpu(given, gpu.data_sheet()?.memory),
            None => Budget::given_or_default(given, device, usize::try_from(sharing)?)?,
        })
    }

    /// The costs of a forward pass.
    fn costs(&self, planned: &PlannedStep, machine: &MachineRates) -> anyhow::Result<StepCosts> {
        let &PlannedStep { ref model, ref config, work, format, .. } = planned;
        let kind = format.kind;
        let vocabulary = i64::try_from(model.vocabulary).unwrap_or(i64::MAX);
        let loss_tokens = match config.loss.chunk_tokens {
            Some(tokens) => tokens.unsigned_abs(),
            None => planning::loss_chunk(vocabulary, kind, planned.device),
        };
        let choices = planning::choices((kind, planned.device), machine, loss_tokens);
        let choices = Choices { recipe: format.recipe(), ..choices };
        Ok(sizes::inference(model, work, &choices)?)
    }

    /// Tokens of a step from which on loads hide behind compute, for each pass.
    fn tokens_that_hide_loads(
        &self,
        planned: &PlannedStep,
        machine: &MachineRates,
        variant: Option<&Variant>,
    ) -> anyhow::Result<Vec<(Direction, u64)>> {
        let Some(plan) = variant.and_then(|variant| variant.plan.as_ref()) else { return Ok(Vec::new()) };
        let bytes = match planned.format {
            // Of all weights: those of a layer's are not known apart.
            WeightFormat { stored: Some(_), .. } => {
                planned.weights as f64 / planned.model.parameters()? as f64
            }
            format if format.recipe().is_quantized() => quantized::NF4_WEIGHT_BYTES,
            format => format.kind.elt_size_in_bytes() as f64,
        };
        let pass = Direction::Forward;
        Ok(vec![(pass, plan.least_tokens(machine.flops, &machine.transfers, bytes, pass)?)])
    }
}
