//! The ways to run a training step of one process, and the fastest that fits.

use accounting::activation_plan::LayerPlan;
use accounting::candidates::{
    Allowed, Batch, Candidate, Found, Job, Layers, OffloadedLayers, Placement, Tier,
};
use accounting::lora::{LowRank, Projection, Targets};
use accounting::offload::sizes::Choices;
use accounting::offload::{Budget, Condition, Direction, MOST_PLANNED_SLOTS, OptimizerPlace, least_tokens};
use accounting::quantity::{bytes_text, grouped};
use anyhow::anyhow;
use clap::ValueEnum as _;
use frugal::Config;
use frugal::config::{Dtype, MasterWeights, Method, OffloadTier, Task, TrainingConfig};
use frugal::lora::{LoraConfig, Names};
use frugal::models::DecoderConfig;
use frugal::models::hugging_face::Folder;
use frugal::planning::{self, DataShape, KnownRates, MachineRates, NotPredicted, Searched};
use report::unit::human;
use serde_json::json;
use tch::{Device, Kind};

use super::super::super::Common;
use super::super::super::output::{print_line, print_lines, print_text};
use super::{PlannedStep, StepArgs, Work, blank, head, nothing_fits};
use crate::program::run::plan::{Columns, candidates_json, candidates_table};

/// The ways to run a training step, and the search that found them.
pub(crate) struct Ways {
    pub(crate) job: Job,
    pub(crate) allowed: Allowed,
    pub(crate) found: Found,
    /// How weights of 16 bits that are trained take small updates.
    half: Option<MasterWeights>,
}

/// Finds the ways to run the step.
///
/// # Errors
/// A model whose activations are not predicted.
pub(super) fn ways(
    arguments: &StepArgs,
    planned: &PlannedStep,
    machine: &MachineRates,
    budget: Budget,
) -> anyhow::Result<Ways> {
    let &PlannedStep { ref model, kind, device, tier, .. } = planned;
    let full = arguments.method == Work::Full;
    let on_cpu = device == Device::Cpu && arguments.hardware.is_none();
    let as_finetune = arguments.as_finetune(planned)?;
    let job = |master_weights| match &as_finetune {
        Some(finetune) => finetune.job(arguments, planned, machine, master_weights),
        None => Ok(described(arguments, planned, machine, master_weights)),
    };
    // In host memory a CPU's layers take what they took before.
    let offloads = !(on_cpu && tier == OffloadTier::Host) || arguments.offload.is_some();
    let offloaded = OffloadedLayers {
        tiers: vec![if tier == OffloadTier::Host { Tier::Host } else { Tier::File }],
        most_slots: MOST_PLANNED_SLOTS,
        resident: None,
        keep: None,
        optimizer: if full { OptimizerPlace::Host } else { OptimizerPlace::Device },
    };
    let layers = arguments.offload.is_none().then_some(Layers::Any);
    let allowed = match &as_finetune {
        Some(finetune) if arguments.offload.is_none() => {
            planning::allowed(&finetune.config, model.layers as usize, device)?
        }
        _ => Allowed { layers, offloaded: offloads.then_some(offloaded), splits: true, rows: None },
    };
    let config = Config::defaults(Task::Finetune, if full { Method::Full } else { Method::Lora });
    let search = |master_weights| -> anyhow::Result<_> {
        let job = job(master_weights)?;
        let found = job.search(&allowed, budget)?;
        Ok((job, found))
    };
    let Searched { master_weights, job, found } = planning::choose_master_weights(&config, kind, search)?;
    let half = planning::trains_half(&config, kind).then_some(master_weights);
    Ok(Ways { job, allowed, found, half })
}

/// Prints the ways to run the step.
///
/// # Errors
/// A model whose activations are not predicted; nothing that fits.
pub(super) fn run(
    common: &Common,
    arguments: &StepArgs,
    planned: &PlannedStep,
    machine: &MachineRates,
    budget: Budget,
) -> anyhow::Result<()> {
    let &PlannedStep { ref model, weights, .. } = planned;
    let full = arguments.method == Work::Full;
    let Ways { job, found, half, .. } = ways(arguments, planned, machine, budget)?;
    let flags = |shown: &Candidate| {
        let flags = flags(arguments, planned, shown, job.model.layers as usize, budget);
        // Without the budget, another decision could be made.
        match half {
            Some(MasterWeights::Stochastic) if flags == NO_FLAGS => "--master-weights stochastic".to_owned(),
            Some(MasterWeights::Stochastic) => format!("{flags} --master-weights stochastic"),
            _ => flags,
        }
    };
    let columns = Columns { is_timed: true, epoch: None };
    let chosen = found.chosen();
    let shown = chosen.or_else(|| found.least());
    let hiding = shown.map_or(Ok(Vec::new()), |shown| tokens_that_hide_loads(&job, shown, full))?;
    if common.json {
        print_line(&json!({
            "model": arguments.model.name(),
            "model_bytes": weights,
            "parameters": model.parameters()?,
            "budget": budget.device,
            "flops": machine.flops,
            "memory_rate": machine.bandwidth,
            "link_rate": machine.transfers.load,
            "ranks": 1,
            "master_weights": half,
            "variants": candidates_json(&found, columns),
            "chosen": chosen.map(Candidate::name),
            "flags": shown.map(flags),
            "with_more_memory": found.faster().map(Candidate::name),
            "with_less_memory": found.cheaper().map(Candidate::name),
            "tokens_that_hide_loads": hiding.iter()
                .map(|(pass, tokens)| json!({ "pass": pass.name(), "tokens": tokens })).collect::<Vec<_>>(),
        }));
    } else {
        let mut lines = head(planned, machine, arguments.hardware.map_or("measured", |gpu| gpu.name))?;
        lines[1] = ("budget for tensors".to_owned(), bytes_text(budget.device));
        if let Some(half) = half {
            let how = if half.keeps_copies() { "fp32" } else { "none: weights are rounded stochastically" };
            lines.push(("master weights".to_owned(), how.to_owned()));
        }
        print(&lines);
        print_text(&format!("\n{}\n", candidates_table(&found, columns, &|tensors| tensors)));
        let mut lines = Vec::new();
        if let Some(shown) = shown {
            lines.push(("at the peak".to_owned(), shown.peak.moment.to_string()));
            let parts = shown.peak.parts.iter();
            lines.extend(parts.map(|part| (format!("  {}", part.name), bytes_text(part.bytes))));
            if shown.host_bytes > 0 {
                lines.push(("in host memory".into(), bytes_text(shown.host_bytes)));
            }
            lines.extend(hiding.iter().map(|(pass, tokens)| {
                (format!("tokens that hide loads, {}", pass.name()), grouped((*tokens).into()))
            }));
            let other = |one: &Candidate| {
                format!("{}: {}, {} a step", bytes_text(one.peak.total), one.name(), human(one.seconds, "s"))
            };
            lines.extend(found.faster().map(|faster| ("more memory".to_owned(), other(faster))));
            lines.extend(found.cheaper().map(|cheaper| ("less memory".to_owned(), other(cheaper))));
            lines.push(("flags of finetune".into(), flags(shown)));
        }
        lines.retain(|line| *line != blank());
        print(&lines);
    }
    match chosen {
        Some(_) => Ok(()),
        None => Err(nothing_fits(budget, found.least().map(Candidate::device_bytes))),
    }
}

/// The step of a model that is known by its sizes alone, or on hardware that is not there.
fn described(
    arguments: &StepArgs,
    planned: &PlannedStep,
    machine: &MachineRates,
    master_weights: MasterWeights,
) -> Job {
    let &PlannedStep { ref model, work, kind, device, .. } = planned;
    let on_cpu = device == Device::Cpu && arguments.hardware.is_none();
    let batch = Batch { work, labelled: None };
    Job {
        model: model.clone(),
        lora: (arguments.method != Work::Full).then(|| LowRank { on_cpu, ..arguments.lora(device) }),
        choices: Choices {
            packs: on_cpu,
            widens: on_cpu && planning::widens(kind, device),
            recipe: arguments.recipe(kind, master_weights),
            ..planning::choices(kind, machine, arguments.loss_tokens(planned))
        },
        largest: vec![batch],
        mean: batch,
        evaluation: None,
        accumulation: arguments.accumulation.unwrap_or(TrainingConfig::default().accumulation as u64),
        clips: true,
        rates: machine.transfers,
        file_load: machine.transfers.load,
        file_optimizer: machine.transfers.host_optimizer,
        on_cpu,
    }
}

/// A step of `frugal finetune` with the same flags, on this machine.
struct AsFinetune {
    config: Config,
    shape: DecoderConfig,
}

impl StepArgs {
    /// What `frugal finetune` would be asked for; `None` for a model without a folder here, or for hardware that is not here.
    fn as_finetune(&self, planned: &PlannedStep) -> anyhow::Result<Option<AsFinetune>> {
        let Some(path) = self.model.folder().filter(|_| self.hardware.is_none() && !self.model.any_size())
        else {
            return Ok(None);
        };
        let Ok(folder) = Folder::open(path) else { return Ok(None) };
        let mut config = Config::default();
        config.model.dtype = self.dtype;
        config.training.batch = usize::try_from(planned.work.batch)?;
        if let Some(accumulation) = self.accumulation {
            config.training.accumulation = usize::try_from(accumulation)?;
        }
        config.loss.chunk_tokens = self.loss_chunk.map(i64::try_from).transpose()?;
        if self.method != Work::Full {
            let adapter = frugal::Config::default_adapter();
            config.adapter = Some(LoraConfig {
                r: i64::try_from(self.r)?,
                use_dora: self.method == Work::Dora,
                target_modules: match self.targets {
                    Some(targets) => Some(Names::List(names(targets))),
                    None => adapter.target_modules.clone(),
                },
                ..adapter
            });
        }
        Ok(Some(AsFinetune { config, shape: folder.config().clone() }))
    }
}

/// The names of projections, as finetune takes them.
fn names(targets: Targets) -> Vec<String> {
    let adapted = Projection::ALL.into_iter().filter(|projection| targets.has(*projection));
    adapted.map(|projection| format!("{}_proj", projection.name())).collect()
}

impl AsFinetune {
    fn job(
        &self,
        arguments: &StepArgs,
        planned: &PlannedStep,
        machine: &MachineRates,
        master_weights: MasterWeights,
    ) -> anyhow::Result<Job> {
        let &PlannedStep { work, kind, device, tier, .. } = planned;
        // A row of n tokens has n − 1 positions that predict one.
        let data = DataShape::uniform(work.batch, (work.sequence - 1).max(1), false);
        let rates = KnownRates::get(device, kind)?;
        let mut config = self.config.clone();
        config.optimizer.master_weights = master_weights;
        let job = planning::job(&config, &self.shape, (kind, device), &data, &rates);
        let mut job =
            job.map_err(|NotPredicted(why)| anyhow!("the memory of a step is not predicted for {why}"))?;
        let is_given = arguments.link.is_some() || arguments.host_bandwidth.is_some();
        job.choices.flops = machine.flops;
        if is_given {
            job.rates = machine.transfers;
        }
        // What the page cache cannot hold comes from the disk.
        if is_given || tier == OffloadTier::File {
            (job.file_load, job.file_optimizer) = (machine.transfers.load, machine.transfers.host_optimizer);
        }
        Ok(job)
    }
}

/// The flags of `frugal finetune` for the training that was planned, where they are not its defaults.
fn of_training(arguments: &StepArgs, planned: &PlannedStep, is_mixed: bool, budget: Budget) -> Vec<String> {
    let mut flags = Vec::new();
    let mut given = |flag: &str, value: Option<String>| {
        flags.extend(value.map(|value| format!("{flag} {value}")));
    };
    let method = match arguments.method {
        Work::Dora => Some("dora".to_owned()),
        Work::Full => Some("full".to_owned()),
        Work::Lora | Work::Inference => None,
    };
    let is_adapted = method.as_deref() != Some("full");
    given("--method", method);
    // Of a model without a folder here, the plan is made for a dtype that need not be that of its files.
    let dtype = arguments.dtype.or_else(|| match (arguments.kind(), planned.kind) {
        (None, Kind::BFloat16) => Some(Dtype::Bfloat16),
        (None, _) => Some(Dtype::Float32),
        (Some(_), _) => None,
    });
    let dtype = dtype.and_then(|dtype| dtype.to_possible_value());
    given("--dtype", dtype.map(|dtype| dtype.get_name().to_owned()));
    let rank = frugal::Config::default_adapter().r.unsigned_abs();
    given("--r", (is_adapted && arguments.r != rank).then(|| arguments.r.to_string()));
    let targets = arguments.targets.filter(|_| is_adapted);
    given("--targets", targets.map(|targets| names(targets).join(",")));
    given("--batch-size", arguments.batch_size.map(|rows| rows.to_string()));
    let is_shorter = arguments.length.is_some() || planned.work.sequence < planned.model.context;
    given("--max-length", is_shorter.then(|| planned.work.sequence.to_string()));
    given("--accumulation", arguments.accumulation.map(|batches| batches.to_string()));
    given("--loss-chunk", arguments.loss_chunk.map(|tokens| tokens.to_string()));
    // Layers of several plans are found again under the same budget, which here is the default one if none was given.
    let of_card = arguments.hardware.filter(|_| is_mixed).map(|_| budget.device);
    given("--budget", arguments.budget.map(|budget| budget.0).or(of_card).map(budget_text));
    flags
}

/// A budget as its flag reads it, without rounding.
fn budget_text(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        _ if bytes.is_multiple_of(1 << 30) => format!("{}GiB", bytes >> 30),
        _ if bytes.is_multiple_of(1 << 20) => format!("{}MiB", bytes >> 20),
        _ => bytes.to_string(),
    }
}

fn print(lines: &[(String, String)]) {
    print_lines(lines.iter().map(|(name, text)| (name.as_str(), text.as_str())));
}

const NO_FLAGS: &str = "none are needed";

/// The flags of a training that runs in this way.
fn flags(
    arguments: &StepArgs,
    planned: &PlannedStep,
    candidate: &Candidate,
    layers: usize,
    budget: Budget,
) -> String {
    let is_mixed = match &candidate.placement {
        Placement::Resident(layers) => {
            layers.iter().any(|kept| *kept != layers[0])
                || layers
                    .first()
                    .is_some_and(|kept| !matches!(kept, LayerPlan::KeepAll | LayerPlan::RecomputeAll))
        }
        Placement::Offloaded { .. } => false,
    };
    let mut flags = Vec::new();
    match &candidate.placement {
        Placement::Resident(_) if is_mixed => {}
        Placement::Resident(layers) => match layers.first() {
            Some(LayerPlan::RecomputeAll) => flags.push("--activations recompute".to_owned()),
            _ => flags.push("--activations keep".to_owned()),
        },
        Placement::Offloaded { tier, ring, resident, keep, optimizer } => {
            let tier = if *tier == Tier::Host { "host" } else { "file" };
            flags.push(format!("--offload {tier} --ring {ring}"));
            if !resident.is_empty() {
                let layers: Vec<String> = resident.iter().map(ToString::to_string).collect();
                flags.push(format!("--resident {}", layers.join(",")));
            }
            match keep.len() {
                0 => flags.push("--activations recompute".to_owned()),
                kept if kept == layers => flags.push("--activations keep".to_owned()),
                _ => flags.push(format!("--set 'offload.keep={}'", format!("{keep:?}").replace(' ', ""))),
            }
            if *optimizer == OptimizerPlace::Host {
                flags.push("--optimizer-on host".to_owned());
            }
        }
    }
    flags.extend(candidate.rows.map(|rows| format!("--micro-batch-size {rows}")));
    flags.extend(of_training(arguments, planned, is_mixed, budget));
    if flags.is_empty() { NO_FLAGS.to_owned() } else { flags.join(" ") }
}

/// Tokens of a pass from which on loads hide behind compute, for each pass; none without offloaded layers.
fn tokens_that_hide_loads(
    job: &Job,
    candidate: &Candidate,
    full: bool,
) -> anyhow::Result<Vec<(Direction, u64)>> {
    let Placement::Offloaded { resident, .. } = &candidate.placement else { return Ok(Vec::new()) };
    let backward = if full { Direction::Backward } else { Direction::FrozenBackward };
    let condition = Condition {
        flops: job.choices.flops,
        link: job.rates.load,
        bytes_per_parameter: job.choices.recipe.parameters.storage_bits() as f64 / 8.0,
        resident_share: resident.len() as f64 / job.model.layers.max(1) as f64,
    };
    let of = |pass: Direction| Ok((pass, least_tokens(&condition, pass)?));
    [Direction::Forward, backward].into_iter().map(of).collect()
}
