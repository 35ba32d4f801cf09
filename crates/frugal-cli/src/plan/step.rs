//! `frugal plan`: the ways to run a step within a budget, at this machine's measured rates or at a GPU's.

mod ranks;
mod rates;
mod search;
mod variants;

use std::path::PathBuf;

use accounting::Decoder;
use accounting::decoder_flops::Workload;
use accounting::lora::LowRank;
use accounting::memory::nf4;
use accounting::memory::recipe::Recipe as AccountedRecipe;
use accounting::offload::sizes::Choices;
use accounting::offload::{AvailableMemory, Direction, Gpu, Rates, StepCosts, gpu, sizes};
use accounting::quantity::{bytes_text, grouped, parse_bytes};
use anyhow::{anyhow, bail};
use clap::Args;
use frugal::config::{Bytes, OffloadTier, Task};
use frugal::models::DecoderConfig;
use frugal::models::hugging_face::Folder;
use frugal::planning::{self, MachineRates, NotPredicted};
use frugal::{Config, Recipe};
use report::cli::Failure;
use report::unit::human;
use serde_json::json;
use tch::{Device, Kind};

use super::model_args::ModelArgs;
use super::step_args::known_hardware;
use crate::common_flags::Common;
use crate::flags::Flags;
use crate::flags::table::PLAN;
use crate::output::shell_command::shell_word;
use crate::output::{print_line, print_lines};
use crate::run::plan::{NOTHING_FITS, fitting};
use ranks::RanksArgs;
pub(crate) use search::Ways;
use variants::{Variant, streaming, variants};

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

/// What a plan over GPUs says instead of flags.
const ON_GPUS: &str = "another program: the ranks of this one are connected over CPUs (groups over NCCL have never run on a GPU), so this \
    is a prediction of the method";

/// The step that is planned.
pub(crate) struct PlannedStep {
    /// The training, as finetune would have it with the same flags.
    config: Config,
    pub(crate) model: Decoder,
    /// The adapters; `None` where all weights are trained, or none.
    lora: Option<LowRank>,
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
    budget: AvailableMemory,
    on_cpu: bool,
    /// Ranks that share the machine.
    sharing: u64,
}

/// The ways to run a training step in one process: what `frugal plan` compares, and `plan memory` and `plan fit` look into.
///
/// # Errors
/// Inference, and several ranks; those of the plan.
pub(crate) fn training_ways(common: &Common, arguments: &StepArgs) -> anyhow::Result<(PlannedStep, Ways)> {
    if arguments.is_inference() || arguments.ranks.ranks > 1 {
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
    let config = arguments.config()?;
    let tokens = config.data.max_length.map_or_else(|| model.context.min(512), |length| length as u64);
    if tokens > model.context {
        bail!("--length {tokens}: the model takes rows of {} at most", model.context);
    }
    let trains_all = config.adapter.is_none() && !arguments.is_inference();
    let kind = match (arguments.kind(&config), trains_all) {
        (None, true) => Kind::Float,
        (None, false) => Kind::BFloat16,
        (Some(kind @ (Kind::Float | Kind::BFloat16)), _) => kind,
        (Some(kind), false) if planning::recipe(kind).quantized => {
            if arguments.ranks.ranks > 1 {
                bail!("--dtype nf4: a plan over several ranks is made for float32 and bfloat16");
            }
            kind
        }
        (Some(kind), true) if planning::recipe(kind).quantized => {
            bail!("--dtype nf4: 4-bit weights cannot be trained; give --method lora")
        }
        (Some(_), _) => bail!("--dtype: a plan is made for float32, bfloat16 and nf4"),
    };
    if !arguments.is_inference() {
        Recipe::new(&config)?;
    }
    let on_cpu = device == Device::Cpu && arguments.hardware.is_none();
    let tier = match &config.offload {
        Some(offload) => offload.tier,
        None if on_cpu => OffloadTier::File,
        None => OffloadTier::Host,
    };
    arguments.ranks.check(arguments)?;
    let work = Workload { batch: config.training.batch as u64, sequence: tokens };
    let weights = nf4::model_bytes(&model, &planning::recipe(kind))?;
    let low_rank = |adapter| planning::low_rank(adapter, &shape(&model), on_cpu).map_err(not_predicted);
    let lora = config.adapter.as_ref().map(low_rank).transpose()?;
    let trains = match &lora {
        Some(lora) if lora.magnitudes => format!("DoRA of rank {} on {}", lora.rank, lora.targets),
        Some(lora) => format!("adapters of rank {} on {}", lora.rank, lora.targets),
        None if arguments.is_inference() => "forward only".to_owned(),
        None => "all weights are trained".to_owned(),
    };
    let planned = PlannedStep { config, model, lora, work, kind, device, tier, weights, trains };
    let sharing = arguments.ranks.sharing(on_cpu);
    let machine = shared(arguments.rates(&planned)?, sharing);
    let budget = arguments.budget(&planned.config, device)?;
    let budget =
        AvailableMemory { device: budget.device / sharing, host: budget.host.map(|bytes| bytes / sharing) };
    Ok(Asked { planned, machine, budget, on_cpu, sharing })
}

pub(crate) fn run(common: &Common, arguments: &StepArgs) -> anyhow::Result<()> {
    let Asked { planned, machine, budget, on_cpu, sharing } = asked(common, arguments)?;
    let (tier, weights, ranks) = (planned.tier, planned.weights, arguments.ranks.ranks);
    if !arguments.is_inference() && ranks == 1 {
        return search::run(common, arguments, &planned, &machine, budget);
    }
    let costs = arguments.costs(&planned, &machine)?;
    let mut variants = variants(&costs, &machine.transfers, budget, tier, on_cpu)?;
    let hiding = arguments.tokens_that_hide_loads(&planned, &machine, variants.last())?;
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
        let command = if arguments.is_inference() { "generate" } else { "finetune" };
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
fn nothing_fits(budget: AvailableMemory, least: Option<u64>) -> anyhow::Error {
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

/// The sizes of a model as a `config.json` has them, as far as adapters and chunks of the loss depend on them.
fn shape(model: &Decoder) -> DecoderConfig {
    let size = |size: u64| i64::try_from(size).unwrap_or(i64::MAX);
    let [vocabulary, hidden, feed_forward] = [model.vocabulary, model.hidden, model.feed_forward].map(size);
    DecoderConfig {
        family: model.family,
        num_key_value_heads: size(model.kv_heads),
        head_dim: size(model.head_dim),
        ..DecoderConfig::llama(vocabulary, hidden, feed_forward, size(model.layers), size(model.heads))
    }
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
        if !given.origins().has("training.batch") && (self.is_inference() || self.ranks.ranks > 1) {
            config.training.batch = 1;
        }
        Ok(config)
    }

    /// The dtype that was given, or that of the weights' files where there are any in one for which a plan is made.
    fn kind(&self, config: &Config) -> Option<Kind> {
        if let Some(dtype) = config.model.dtype {
            return Some(dtype.kind());
        }
        // A folder with a config.json alone is a model, too.
        let folder = self.model.folder().and_then(|folder| Folder::open(folder).ok());
        let kind = folder.and_then(|folder| folder.kind().ok());
        let is_frozen = config.adapter.is_some() || self.is_inference();
        let is_quantized = |kind: Kind| planning::recipe(kind).quantized && is_frozen;
        kind.filter(|kind| matches!(kind, Kind::Float | Kind::BFloat16) || is_quantized(*kind))
    }

    /// What tensors may take.
    fn budget(&self, config: &Config, device: Device) -> anyhow::Result<AvailableMemory> {
        let budget = match (config.training.budget, self.hardware) {
            (Some(budget), Some(_)) => budget.0,
            (None, Some(gpu)) => gpu.data_sheet()?.memory,
            (given, None) => {
                let budget = planning::Budget::given_or_default(given.map(|budget| budget.0), device)?;
                fitting(budget.free())?
            }
        };
        Ok(AvailableMemory { device: budget, host: self.host_budget.map(|budget| budget.0) })
    }

    /// The device whose kernels compute the step.
    fn device_of_step(&self, planned: &PlannedStep) -> Device {
        let is_card = self.hardware.is_some() && planned.device == Device::Cpu;
        if is_card { Device::Cuda(0) } else { planned.device }
    }

    fn costs(&self, planned: &PlannedStep, machine: &MachineRates) -> anyhow::Result<StepCosts> {
        let &PlannedStep { ref model, ref config, ref lora, work, kind, .. } = planned;
        let vocabulary = i64::try_from(model.vocabulary).unwrap_or(i64::MAX);
        let loss_tokens = match config.loss.chunk_tokens {
            Some(tokens) => tokens.unsigned_abs(),
            None => planning::loss_chunk(vocabulary, kind, self.device_of_step(planned)),
        };
        let choices = planning::choices(kind, machine, loss_tokens);
        let choices = Choices { recipe: self.recipe(planned), ..choices };
        Ok(match lora {
            Some(lora) => sizes::adapters(model, lora, work, None, &choices)?,
            None if self.is_inference() => sizes::inference(model, work, &choices)?,
            None => sizes::training(model, work, &choices)?,
        })
    }

    /// The number formats of the step.
    fn recipe(&self, planned: &PlannedStep) -> AccountedRecipe {
        let PlannedStep { config, kind, .. } = planned;
        match config.adapter.is_none() && !self.is_inference() {
            true => planning::trained_recipe(*kind, config.optimizer.master_weights.keeps_copies()),
            false => planning::recipe(*kind),
        }
    }

    /// Tokens of a step from which on loads hide behind compute, for each pass.
    fn tokens_that_hide_loads(
        &self,
        planned: &PlannedStep,
        machine: &MachineRates,
        variant: Option<&Variant>,
    ) -> anyhow::Result<Vec<(Direction, u64)>> {
        let Some(plan) = variant.and_then(|variant| variant.plan.as_ref()) else { return Ok(Vec::new()) };
        let passes: &[Direction] = match &planned.lora {
            Some(_) => &[Direction::Forward, Direction::FrozenBackward],
            None if self.is_inference() => &[Direction::Forward],
            None => &[Direction::Forward, Direction::Backward],
        };
        let quantized = planning::recipe(planned.kind).quantized;
        let bytes = if quantized { nf4::WEIGHT_BYTES } else { planned.kind.elt_size_in_bytes() as f64 };
        let least = |&pass: &Direction| -> anyhow::Result<_> {
            Ok((pass, plan.least_tokens(machine.flops, &machine.transfers, bytes, pass)?))
        };
        passes.iter().map(least).collect()
    }
}
