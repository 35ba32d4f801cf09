//! `frugal plan`: the ways to run a step within a budget, at this machine's measured rates or at a GPU's.

mod ranks;
mod rates;
mod search;
mod variants;

use std::path::PathBuf;

use accounting::Decoder;
use accounting::decoder_flops::Workload;
use accounting::lora::{LowRank, Targets};
use accounting::memory::nf4;
use accounting::memory::recipe::Recipe;
use accounting::offload::sizes::Choices;
use accounting::offload::{Budget, Direction, Gpu, Rates, StepCosts, gpu, sizes};
use accounting::quantity::{bytes_text, grouped, parse_bytes};
use anyhow::bail;
use clap::{Args, ValueEnum};
use frugal::config::{Bytes, Dtype, MasterWeights, OffloadTier, TrainingConfig};
use frugal::models::hugging_face::Folder;
use frugal::planning::{self, MachineRates};
use report::cli::Failure;
use report::unit::human;
use serde_json::json;
use tch::{Device, Kind};

use super::super::Common;
use super::super::output::{print_line, print_lines};
use super::model_args::ModelArgs;
use super::step_args::known_hardware;
use crate::program::flags::values::budget;
use crate::program::folder::run_record::shell_word;
use crate::program::run::plan::{NOTHING_FITS, fitting};
use ranks::RanksArgs;
pub(crate) use search::Ways;
use variants::{Variant, streaming, variants};

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Work {
    /// Train low-rank adapters
    Lora,
    /// Train low-rank adapters and the magnitudes of rows (DoRA)
    Dora,
    /// Train all weights
    Full,
    /// Run the forward pass only
    Inference,
}

#[derive(Args)]
pub(crate) struct StepArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// As of finetune; said in another way here
    #[arg(long, hide = true)]
    data: Option<String>,
    /// Memory limit of the device, such as 10GiB; on a CPU, of the whole process [default: 80 % of the free memory, or that of --hardware]
    #[arg(long, value_name = "BYTES", value_parser = budget)]
    budget: Option<Bytes>,
    /// Memory limit of the host for offloaded layers and optimizer state [default: none]
    #[arg(long, value_name = "BYTES")]
    host_budget: Option<Bytes>,
    /// What a step computes
    #[arg(long, value_enum, default_value = "lora")]
    method: Work,
    /// Rank of the adapters
    #[arg(long, alias = "lora-rank", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    r: u64,
    /// Projections to adapt: q, k, v, o, gate, up, down, or all [default: q,k,v,o]
    #[arg(long, alias = "lora-targets", value_name = "NAME,…")]
    targets: Option<Targets>,
    /// Rows per batch [default: 4, as finetune; 1 in inference and over several ranks]
    #[arg(long, alias = "batch", value_parser = clap::value_parser!(u64).range(1..))]
    batch_size: Option<u64>,
    /// Tokens of a row, as finetune's --max-length [default: 512, or the model's context if that is shorter]
    #[arg(long, aliases = ["tokens", "sequence"], value_parser = clap::value_parser!(u64).range(1..))]
    length: Option<u64>,
    /// Dtype of the weights: float32, bfloat16 or nf4 [default: that of the files in the folder --model; without one bfloat16, and float32
    /// where all weights are trained]
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Gradient accumulation steps: batches per optimizer step [default: 4, as finetune]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    accumulation: Option<u64>,
    /// Tokens whose logits exist at a time [default: as finetune, so many that their logits take 128 MiB, on a GPU 1 GiB]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    loss_chunk: Option<u64>,
    /// Where offloaded layers are stored [default: host; on a CPU file, because frozen layers then need no memory]
    #[arg(long, value_name = "TIER")]
    offload: Option<OffloadTier>,
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

/// What a plan over GPUs says instead of flags.
const ON_GPUS: &str = "another program: the ranks of this one are connected over CPUs (groups over NCCL have never run on a GPU), so this \
    is a prediction of the method";

/// The step that is planned.
pub(crate) struct PlannedStep {
    pub(crate) model: Decoder,
    pub(crate) work: Workload,
    /// Dtype of the weights.
    kind: Kind,
    device: Device,
    /// Where offloaded layers live.
    tier: OffloadTier,
    /// Bytes of the weights.
    weights: u64,
    /// What is trained, in words.
    pub(crate) trains: String,
}

/// What is planned, at which rates, within which budget.
struct Asked {
    planned: PlannedStep,
    machine: MachineRates,
    budget: Budget,
    on_cpu: bool,
    /// Ranks that share the machine.
    sharing: u64,
}

/// The ways to run a training step in one process: what `frugal plan` compares, and `plan memory` and `plan fit` look into.
///
/// # Errors
/// Inference, and several ranks; those of the plan.
pub(crate) fn training_ways(common: &Common, arguments: &StepArgs) -> anyhow::Result<(PlannedStep, Ways)> {
    if arguments.method == Work::Inference || arguments.ranks.ranks > 1 {
        bail!(
            "this is answered for a training in one process; `frugal plan` with the same flags shows the peak's parts"
        );
    }
    let Asked { planned, machine, budget, .. } = asked(common, arguments)?;
    let ways = search::ways(arguments, &planned, &machine, budget)?;
    Ok((planned, ways))
}

fn asked(common: &Common, arguments: &StepArgs) -> anyhow::Result<Asked> {
    if let Some(data) = &arguments.data {
        let (model, data) = (shell_word(&arguments.model.name()), shell_word(data));
        bail!("the plan for data is `frugal finetune --model {model} --data {data} --dry-run`");
    }
    let device = common.device()?;
    let model = arguments.model.decoder()?;
    let tokens = arguments.length.unwrap_or_else(|| model.context.min(512));
    if tokens > model.context {
        bail!("--length {tokens}: the model takes rows of {} at most", model.context);
    }
    let kind = match (arguments.kind(), arguments.method) {
        (None, Work::Full) => Kind::Float,
        (None, _) => Kind::BFloat16,
        (Some(kind @ (Kind::Float | Kind::BFloat16)), _) => kind,
        (Some(kind), Work::Lora | Work::Dora | Work::Inference) if planning::recipe(kind).quantized => {
            if arguments.ranks.ranks > 1 {
                bail!("--dtype nf4: a plan over several ranks is made for float32 and bfloat16");
            }
            kind
        }
        (Some(kind), _) if planning::recipe(kind).quantized => {
            bail!("--dtype nf4: 4-bit weights cannot be trained; give --method lora")
        }
        (Some(_), _) => bail!("--dtype: a plan is made for float32, bfloat16 and nf4"),
    };
    let on_cpu = device == Device::Cpu && arguments.hardware.is_none();
    let tier = match arguments.offload {
        Some(tier) => tier,
        None if on_cpu => OffloadTier::File,
        None => OffloadTier::Host,
    };
    arguments.ranks.check(arguments)?;
    let is_training = arguments.method != Work::Inference && arguments.ranks.ranks == 1;
    let rows = if is_training { TrainingConfig::default().batch as u64 } else { 1 };
    let work = Workload { batch: arguments.batch_size.unwrap_or(rows), sequence: tokens };
    let weights = nf4::model_bytes(&model, &planning::recipe(kind))?;
    let trains = match arguments.method {
        Work::Lora => format!("adapters of rank {} on {}", arguments.r, arguments.lora(device).targets),
        Work::Dora => format!("DoRA of rank {} on {}", arguments.r, arguments.lora(device).targets),
        Work::Full => "all weights are trained".to_owned(),
        Work::Inference => "forward only".to_owned(),
    };
    let planned = PlannedStep { model, work, kind, device, tier, weights, trains };
    let sharing = arguments.ranks.sharing(on_cpu);
    let machine = shared(arguments.rates(&planned)?, sharing);
    let budget = arguments.budget(device)?;
    let budget = Budget { device: budget.device / sharing, host: budget.host.map(|bytes| bytes / sharing) };
    Ok(Asked { planned, machine, budget, on_cpu, sharing })
}

pub(crate) fn run(common: &Common, arguments: &StepArgs) -> anyhow::Result<()> {
    let Asked { planned, machine, budget, on_cpu, sharing } = asked(common, arguments)?;
    let (kind, tier, weights, ranks) = (planned.kind, planned.tier, planned.weights, arguments.ranks.ranks);
    if arguments.method != Work::Inference && ranks == 1 {
        return search::run(common, arguments, &planned, &machine, budget);
    }
    let costs = arguments.costs(&planned, &machine)?;
    let mut variants = variants(&costs, &machine.transfers, budget, tier, on_cpu)?;
    let hiding = arguments.tokens_that_hide_loads(&machine, kind, variants.last())?;
    if ranks > 1 {
        // What one rank alone does comes last.
        let alone = std::mem::take(&mut variants);
        variants = ranks::variants(arguments, &planned, &costs, &machine)?;
        variants.extend(alone);
    }
    let tokens = planned.work.tokens()? as f64;
    let rate = |variant: &Variant| {
        tokens * if variant.ranks.is_some() { ranks as f64 } else { 1.0 } / variant.step.seconds
    };
    let chosen = variants
        .iter()
        .filter(|variant| variant.peak <= budget.device)
        .max_by(|a, b| rate(a).total_cmp(&rate(b)));
    if common.json {
        print_line(&json!({
            "model": arguments.model.name(),
            "model_bytes": weights,
            "parameters": planned.model.parameters()?,
            "budget": budget.device,
            "flops": machine.flops,
            "memory_rate": machine.bandwidth,
            "link_rate": machine.transfers.load,
            "ranks": ranks,
            "variants": variants.iter().map(|variant| variant.json(budget.device)).collect::<Vec<_>>(),
            "chosen": chosen.map(|variant| variant.name.as_str()),
            "tokens_that_hide_loads": hiding.iter()
                .map(|(pass, tokens)| json!({ "pass": pass.name(), "tokens": tokens })).collect::<Vec<_>>(),
        }));
        return Ok(());
    }
    let source = arguments.hardware.map_or("measured", |gpu| gpu.name);
    let mut lines = head(&planned, &machine, source)?;
    lines[1] = (
        if sharing > 1 { "budget for tensors of a rank" } else { "budget for tensors" }.into(),
        bytes_text(budget.device),
    );
    lines.push(blank());
    for variant in &variants {
        let fits = match variant.peak.checked_sub(budget.device) {
            None | Some(0) => "fits".to_owned(),
            Some(excess) => format!("{} too much", bytes_text(excess)),
        };
        let mark = if chosen.is_some_and(|chosen| chosen.name == variant.name) {
            "; the fastest that fits"
        } else {
            ""
        };
        let over = match &variant.ranks {
            Some(over) => format!(
                " of {} tokens, bound by {}",
                grouped((tokens * ranks as f64) as u128),
                over.bound.name()
            ),
            None if ranks > 1 => format!(" of {} tokens", grouped(tokens as u128)),
            None => String::new(),
        };
        let seconds = human(variant.step.seconds, "s");
        lines.push((
            variant.name.clone(),
            format!("peak {}, {seconds} a step{over}, {fits}{mark}", bytes_text(variant.peak)),
        ));
    }
    if let Some(shown) = chosen.or(variants.last()) {
        lines.push(blank());
        lines.push(("at the peak".into(), shown.step.device.moment.to_string()));
        lines.extend(
            shown.step.device.parts.iter().map(|part| (format!("  {}", part.name), bytes_text(part.bytes))),
        );
        if let Some(over) = &shown.ranks {
            lines.push(("sent by a rank".into(), bytes_text(over.sent_bytes)));
            lines.push(("waits for other ranks".into(), human(over.exposed, "s")));
        }
        if let Some(plan) = &shown.plan {
            lines.extend(streaming(plan));
            lines.extend(hiding.iter().map(|(pass, tokens)| {
                (format!("tokens that hide loads, {}", pass.name()), grouped((*tokens).into()))
            }));
        }
        let command = if arguments.method == Work::Inference { "generate" } else { "finetune" };
        if ranks > 1 && !on_cpu {
            lines.push(("to run it".into(), ON_GPUS.to_owned()));
        } else {
            let flags = if shown.flags.is_empty() { "none are needed" } else { &shown.flags };
            lines.push((format!("flags of {command}"), flags.to_owned()));
        }
    }
    print_lines(lines.iter().map(|(name, text)| (name.as_str(), text.as_str())));
    match chosen {
        Some(_) => Ok(()),
        None => Err(nothing_fits(budget, variants.iter().map(|variant| variant.peak).min())),
    }
}

/// The error where nothing fits, with the least bytes of tensors that something takes.
fn nothing_fits(budget: Budget, least: Option<u64>) -> anyhow::Error {
    let least = least.map_or_else(String::new, |least| format!("; the least takes {}", bytes_text(least)));
    let message = format!(
        "nothing fits {}{least}; take fewer or shorter rows, a lower rank, or a smaller model",
        bytes_text(budget.device)
    );
    Failure { status: NOTHING_FITS, message }.into()
}

/// What is planned: parameters, a line for the budget, rates.
fn head(
    planned: &PlannedStep,
    machine: &MachineRates,
    source: &str,
) -> anyhow::Result<Vec<(String, String)>> {
    let parameters = grouped(planned.model.parameters()?.into());
    let Workload { batch, sequence } = planned.work;
    let work = format!("{}, batch {batch} × {} tokens", planned.trains, grouped(sequence.into()));
    Ok(vec![
        ("parameters".to_owned(), format!("{parameters} ({})", bytes_text(planned.weights))),
        blank(),
        (
            source.to_owned(),
            format!(
                "{:.3e} FLOP/s of products, {:.3e} B/s of memory, {:.3e} B/s of loads",
                machine.flops, machine.bandwidth, machine.transfers.load
            ),
        ),
        ("step".to_owned(), work),
    ])
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

fn blank() -> (String, String) {
    (String::new(), String::new())
}

impl StepArgs {
    /// The dtype that was given, or that of the weights' files where there are any in one for which a plan is made.
    fn kind(&self) -> Option<Kind> {
        if let Some(dtype) = self.dtype {
            return Some(dtype.kind());
        }
        // A folder with a config.json alone is a model, too.
        let folder = self.model.folder().and_then(|folder| Folder::open(folder).ok());
        let kind = folder.and_then(|folder| folder.kind().ok());
        let is_quantized = |kind: Kind| planning::recipe(kind).quantized && self.method != Work::Full;
        kind.filter(|kind| matches!(kind, Kind::Float | Kind::BFloat16) || is_quantized(*kind))
    }

    /// What tensors may take.
    fn budget(&self, device: Device) -> anyhow::Result<Budget> {
        let budget = match (self.budget, self.hardware) {
            (Some(budget), Some(_)) => budget.0,
            (None, Some(gpu)) => gpu.data_sheet()?.memory,
            (given, None) => {
                let budget = planning::Budget::given_or_default(given.map(|budget| budget.0), device)?;
                fitting(budget.free())?
            }
        };
        Ok(Budget { device: budget, host: self.host_budget.map(|budget| budget.0) })
    }

    /// Tokens whose logits exist at a time.
    fn loss_tokens(&self, planned: &PlannedStep) -> u64 {
        let of_gpu = self.hardware.is_some() && planned.device == Device::Cpu;
        let device = if of_gpu { Device::Cuda(0) } else { planned.device };
        let vocabulary = i64::try_from(planned.model.vocabulary).unwrap_or(i64::MAX);
        self.loss_chunk.unwrap_or_else(|| planning::loss_chunk(vocabulary, planned.kind, device))
    }

    fn lora(&self, device: Device) -> LowRank {
        LowRank {
            rank: self.r,
            targets: self.targets.unwrap_or(Targets::ATTENTION),
            magnitudes: self.method == Work::Dora,
            on_cpu: device == Device::Cpu && self.hardware.is_none(),
            ..LowRank::default()
        }
    }

    /// The number formats of the step.
    fn recipe(&self, kind: Kind, master_weights: MasterWeights) -> Recipe {
        match self.method {
            Work::Full => planning::trained_recipe(kind, master_weights.keeps_copies()),
            Work::Lora | Work::Dora | Work::Inference => planning::recipe(kind),
        }
    }

    fn costs(&self, planned: &PlannedStep, machine: &MachineRates) -> anyhow::Result<StepCosts> {
        let &PlannedStep { ref model, work, kind, device, .. } = planned;
        let recipe = self.recipe(kind, MasterWeights::default());
        let choices = Choices { recipe, ..planning::choices(kind, machine, self.loss_tokens(planned)) };
        Ok(match self.method {
            Work::Lora | Work::Dora => sizes::adapters(model, &self.lora(device), work, None, &choices)?,
            Work::Full => sizes::training(model, work, &choices)?,
            Work::Inference => sizes::inference(model, work, &choices)?,
        })
    }

    /// Tokens of a step from which on loads hide behind compute, for each pass.
    fn tokens_that_hide_loads(
        &self,
        machine: &MachineRates,
        kind: Kind,
        variant: Option<&Variant>,
    ) -> anyhow::Result<Vec<(Direction, u64)>> {
        let Some(plan) = variant.and_then(|variant| variant.plan.as_ref()) else { return Ok(Vec::new()) };
        let passes: &[Direction] = match self.method {
            Work::Full => &[Direction::Forward, Direction::Backward],
            Work::Lora | Work::Dora => &[Direction::Forward, Direction::FrozenBackward],
            Work::Inference => &[Direction::Forward],
        };
        let quantized = planning::recipe(kind).quantized;
        let bytes = if quantized { nf4::WEIGHT_BYTES } else { kind.elt_size_in_bytes() as f64 };
        let least = |&pass: &Direction| -> anyhow::Result<_> {
            Ok((pass, plan.least_tokens(machine.flops, &machine.transfers, bytes, pass)?))
        };
        passes.iter().map(least).collect()
    }
}
