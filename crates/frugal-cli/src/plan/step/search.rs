//! The ways to run a training step, and the fastest that fits.

use accounting::activation_plan::LayerPlan;
use accounting::candidates::{Allowed, Candidate, Job, Placement, SearchResult, Tier};
use accounting::offload::{Condition, Direction, OptimizerPlace, least_tokens};
use accounting::quantity::{bytes_text, grouped};
use clap::ValueEnum as _;
use frugal::config::{Dtype, MasterWeights, Method, OffloadTier};
use frugal::planning::{self, Budget, DataShape, KnownRates, Searched};
use report::unit::human;
use serde_json::json;
use tch::{Device, Kind};

use super::{
    Conditions, PlannedStep, StepArgs, entries, head, hiding_json, not_predicted, nothing_fits, shape,
};
use crate::common_flags::Common;
use crate::output::{print_line, print_lines, print_text};
use crate::run::plan::{Columns, candidates_json, candidates_table};

/// The ways to run a training step, and the search that found them.
pub(crate) struct Ways {
    pub(crate) job: Job,
    pub(crate) allowed: Allowed,
    pub(crate) result: SearchResult,
    /// How weights of 16 bits that are trained take small updates.
    half: Option<MasterWeights>,
}

/// Finds the ways to run the step.
///
/// # Errors
/// A model whose activations are not predicted.
pub(super) fn ways(arguments: &StepArgs, conditions: &Conditions) -> anyhow::Result<Ways> {
    let Conditions { planned, memory, .. } = conditions;
    let PlannedStep { config, model, format, .. } = planned;
    let kind = format.kind;
    let mut allowed = planning::allowed(config, model.layers as usize, planned.device)?;
    // The files of another machine are not known, unless they are asked for at a given rate.
    let is_open = arguments.hardware.is_some() && config.offload.is_none();
    if let Some(offloaded) = allowed.offloaded.as_mut().filter(|_| is_open) {
        offloaded.tiers.retain(|tier| *tier == Tier::Host);
    }
    let over = arguments.planned_ranks(planned)?;
    if let Some(ranks) = over {
        let job = job(arguments, conditions, config.optimizer.master_weights)?;
        let on = (kind, planned.device);
        (_, allowed) = planning::over_ranks((job, allowed), config, ranks, on).map_err(not_predicted)?;
        allowed.replicas = arguments.compared_replicas(planned);
    }
    let search = |master_weights| -> anyhow::Result<_> {
        let job = Job { ranks: over, ..job(arguments, conditions, master_weights)? };
        let result = job.search(&allowed, *memory)?;
        Ok((job, result))
    };
    let Searched { master_weights, job, result } = planning::choose_master_weights(config, kind, search)?;
    let half = planning::trains_half(config, kind).then_some(master_weights);
    Ok(Ways { job, allowed, result, half })
}

/// Prints the ways to run the step.
///
/// # Errors
/// A model whose activations are not predicted; nothing that fits.
pub(super) fn run(common: &Common, arguments: &StepArgs, conditions: &Conditions) -> anyhow::Result<()> {
    let ways = ways(arguments, conditions)?;
    let printed = Printed { arguments, conditions, ways: &ways };
    match common.json {
        true => print_line(&printed.json()?),
        false => printed.print()?,
    }
    let result = &ways.result;
    match result.chosen() {
        Some(_) => Ok(()),
        None => Err(nothing_fits(arguments, conditions, bytes(result))),
    }
}

/// The bytes that each candidate takes on the device and on the host.
pub(crate) fn bytes(result: &SearchResult) -> impl Iterator<Item = (u64, u64)> + Clone {
    result.candidates.iter().map(|candidate| (candidate.device_bytes(), candidate.host_bytes))
}

/// The plan as it is printed.
struct Printed<'a> {
    arguments: &'a StepArgs,
    conditions: &'a Conditions,
    ways: &'a Ways,
}

/// The last line of a plan over GPUs, in place of flags.
const ON_GPUS: &str = "ranks on GPUs have never run, so this is a prediction of the method; FRUGAL_TRY_NCCL=1 before `frugal launch` tries it";

const COLUMNS: Columns = Columns { is_timed: true, epoch: None };

impl Printed<'_> {
    /// The candidate whose parts and flags are shown: the one that is chosen, or the smallest.
    fn shown(&self) -> Option<&Candidate> {
        self.ways.result.chosen().or_else(|| self.ways.result.least())
    }

    /// Tokens from which on loads hide behind compute, for each pass.
    fn hiding(&self) -> anyhow::Result<Vec<(Direction, u64)>> {
        let is_full = self.conditions.planned.lora.is_none();
        self.shown().map_or(Ok(Vec::new()), |shown| tokens_that_hide_loads(&self.ways.job, shown, is_full))
    }

    fn json(&self) -> anyhow::Result<serde_json::Value> {
        let Ways { result, half, .. } = self.ways;
        let mut plan = self.conditions.json(self.arguments)?;
        plan.extend(entries([
            ("ranks", json!(self.arguments.ranks.ranks)),
            ("master_weights", json!(half)),
            ("variants", self.variants()?),
            ("chosen", json!(result.chosen().map(Candidate::name))),
            (
                "flags",
                json!(
                    self.shown()
                        .filter(|shown| shown.ranks.is_none() || self.conditions.on_cpu)
                        .map(|shown| self.flags(shown))
                ),
            ),
            ("with_more_memory", json!(result.faster().map(Candidate::name))),
            ("with_less_memory", json!(result.cheaper().map(Candidate::name))),
            ("tokens_that_hide_loads", hiding_json(&self.hiding()?)),
        ]));
        Ok(plan.into())
    }

    /// The candidates, and what each exchanges with other ranks.
    fn variants(&self) -> anyhow::Result<serde_json::Value> {
        let mut variants = candidates_json(&self.ways.result, COLUMNS);
        for (variant, candidate) in variants.iter_mut().zip(&self.ways.result.candidates) {
            if let (Some(ranks), Some(traffic)) = (candidate.ranks, self.ways.job.traffic(candidate)?) {
                variant["zero_stage"] = ranks.stage.number().into();
                variant["replicas"] = ranks.replicas.into();
                variant["bound_by"] = traffic.times.bound(1.0).name().into();
                variant["exposed_seconds"] = traffic.times.exposed().into();
                variant["sent_bytes"] = traffic.sent_bytes.into();
            }
        }
        Ok(variants.into())
    }

    fn print(&self) -> anyhow::Result<()> {
        let mut lines = head(self.arguments, self.conditions)?;
        if let Some(half) = self.ways.half {
            let how = if half.keeps_copies() { "fp32" } else { "none: weights are rounded stochastically" };
            lines.push(("master weights".to_owned(), how.to_owned()));
        }
        print(&lines);
        print_text(&format!("\n{}\n", candidates_table(&self.ways.result, COLUMNS, &|tensors| tensors)));
        if let Some(shown) = self.shown() {
            print(&self.details(shown)?);
        }
        Ok(())
    }

    /// The parts at the peak, the plans beside the one that is shown, and its flags.
    fn details(&self, shown: &Candidate) -> anyhow::Result<Vec<(String, String)>> {
        let result = &self.ways.result;
        let mut lines = vec![("at the peak".to_owned(), shown.peak.moment.to_string())];
        let parts = shown.peak.parts.iter();
        lines.extend(parts.map(|part| (format!("  {}", part.name), bytes_text(part.bytes))));
        if shown.host_bytes > 0 {
            lines.push(("in host memory".into(), bytes_text(shown.host_bytes)));
        }
        if let Some(traffic) = self.ways.job.traffic(shown)? {
            lines.push(("bound by".into(), traffic.times.bound(1.0).name().into()));
            lines.push(("sent by a rank".into(), bytes_text(traffic.sent_bytes)));
            lines.push(("waits for other ranks".into(), human(traffic.times.exposed(), "s")));
        }
        let Conditions { planned, .. } = self.conditions;
        if shown.ranks.is_none()
            && planning::capture_refusal(&planned.config, false, planned.device).is_none()
            && let Some(memory) = planning::captured_memory(&self.ways.job, shown)?
        {
            lines.push(("captured steps".into(), planning::captured_text(&memory)));
        }
        lines.extend(self.hiding()?.into_iter().map(|(pass, tokens)| {
            (format!("tokens that hide loads, {}", pass.name()), grouped(tokens.into()))
        }));
        let other = |one: &Candidate| {
            let budget = self.conditions.budget.for_tensors(one.device_bytes()) >> 20;
            format!("--budget {budget}MiB: {}, {} a step", one.name(), human(one.seconds, "s"))
        };
        lines.extend(result.faster().map(|faster| ("more memory".to_owned(), other(faster))));
        lines.extend(result.cheaper().map(|cheaper| ("less memory".to_owned(), other(cheaper))));
        lines.push(match shown.ranks.is_some() && !self.conditions.on_cpu {
            true => ("to run it".into(), ON_GPUS.to_owned()),
            false => ("flags of finetune".into(), self.flags(shown)),
        });
        Ok(lines)
    }

    /// The flags of finetune that make this plan.
    fn flags(&self, shown: &Candidate) -> String {
        let Conditions { planned, budget, .. } = self.conditions;
        let flags = flags(self.arguments, planned, shown, self.ways.job.model.layers as usize, *budget);
        // Without the budget, another decision could be made.
        match self.ways.half {
            _ if self.arguments.flags.has(&["--master-weights"]) => flags,
            Some(MasterWeights::Stochastic) if flags == NO_FLAGS => "--master-weights stochastic".to_owned(),
            Some(MasterWeights::Stochastic) => format!("{flags} --master-weights stochastic"),
            _ => flags,
        }
    }
}

/// The step of the training, as `frugal finetune` predicts it.
fn job(arguments: &StepArgs, conditions: &Conditions, master_weights: MasterWeights) -> anyhow::Result<Job> {
    let Conditions { planned, machine, sharing, .. } = conditions;
    let &PlannedStep { ref model, work, format, tier, .. } = planned;
    // A row of n tokens has n − 1 positions that predict one.
    let data = DataShape::uniform(work.batch, (work.sequence - 1).max(1), false);
    let mut config = planned.config.clone();
    config.optimizer.master_weights = master_weights;
    let rates = match arguments.hardware {
        Some(_) => KnownRates { bandwidth: machine.bandwidth, ..KnownRates::nominal(Device::Cpu)? },
        None => KnownRates::get(planned.device, format.kind)?.divided(usize::try_from(*sharing)?),
    };
    let device = planned.device;
    let job =
        planning::job(&config, &shape(model), (format, device), &data, &rates).map_err(not_predicted)?;
    let mut job = Job { model: model.clone(), ..job };
    let is_given =
        arguments.hardware.is_some() || arguments.link.is_some() || arguments.host_bandwidth.is_some();
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

/// Flags that the plan decides itself, or writes in another way.
const DECIDED: [&str; 13] = [
    "--method",
    "--dtype",
    "--length",
    "--budget",
    "--micro-batch-size",
    "--activations",
    "--recompute-what",
    "--offload",
    "--ring",
    "--resident",
    "--optimizer-on",
    "--zero-stage",
    "--replicas",
];

/// The flags of `frugal finetune` for the training that was planned, where they are not its defaults.
fn of_training(arguments: &StepArgs, planned: &PlannedStep, is_mixed: bool, budget: Budget) -> Vec<String> {
    let PlannedStep { config, format, .. } = planned;
    let mut flags = Vec::new();
    let method =
        config.method().filter(|method| *method != Method::Lora && !arguments.flags.has(&["--dora"]));
    flags.extend(method.map(|method| format!("--method {}", method.name())));
    // Of a model without a folder here, the plan is made for a dtype that need not be that of its files.
    let dtype = config.model.dtype.or_else(|| match (arguments.kind(config), format.kind) {
        (None, Kind::BFloat16) => Some(Dtype::Bfloat16),
        (None, _) => Some(Dtype::Float32),
        (Some(_), _) => None,
    });
    let dtype = dtype.and_then(|dtype| dtype.to_possible_value());
    flags.extend(dtype.map(|dtype| format!("--dtype {}", dtype.get_name())));
    // A plan of several kinds of layers has no flag of its own: it is found again by what was asked.
    let asked = ["--activations", "--recompute-what"];
    let mut decided: Vec<&str> =
        DECIDED.into_iter().filter(|flag| !is_mixed || !asked.contains(flag)).collect();
    // Its value is what the file holds.
    decided.push(NEW_TOKENS);
    flags.extend(arguments.flags.typed(&decided));
    if arguments.flags.has(&[NEW_TOKENS]) {
        flags.push(format!("{NEW_TOKENS} FILE"));
    }
    if config.data.max_length.is_some() || planned.work.sequence < planned.model.context {
        flags.push(format!("--max-length {}", planned.work.sequence));
    }
    // Layers of several plans are found again under the same budget, which here is the default one if none was given.
    let of_card = arguments.hardware.filter(|_| is_mixed).map(|_| budget.total);
    let budget = config.training.budget.map(|budget| budget.0).or(of_card);
    flags.extend(budget.map(|bytes| format!("--budget {}", exact_bytes(bytes))));
    flags
}

/// A budget as its flag reads it, without rounding.
fn exact_bytes(bytes: u64) -> String {
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

const NEW_TOKENS: &str = "--new-tokens";

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
    if let Some(ranks) = &candidate.ranks {
        flags.push(format!("--zero-stage {}", ranks.stage.number()));
        if ranks.replicas > 1 {
            flags.push(format!("--replicas {}", ranks.replicas));
        }
        if ranks.keeps_files() {
            flags.push("--offload file".to_owned());
            flags.extend(planned.lora.is_none().then(|| "--optimizer-on host".to_owned()));
        }
        let training = &planned.config.training;
        for (flag, number) in [("--batch", training.batch), ("--accumulation", training.accumulation)] {
            flags.extend((!arguments.flags.has(&[flag])).then(|| format!("{flag} {number}")));
        }
    }
    match &candidate.placement {
        Placement::Resident(_) if is_mixed => {}
        Placement::Resident(layers) => match layers.first() {
            Some(LayerPlan::RecomputeAll) => flags.push("--activations recompute".to_owned()),
            _ => flags.push("--activations keep".to_owned()),
        },
        Placement::Offloaded { tier, ring, resident, keep, inputs_on_host, optimizer } => {
            let tier = if *tier == Tier::Host { "host" } else { "file" };
            flags.push(format!("--offload {tier} --ring {ring}"));
            if !resident.is_empty() {
                let layers: Vec<String> = resident.iter().map(ToString::to_string).collect();
                flags.push(format!("--resident {}", layers.join(",")));
            }
            match keep.len() {
                kept if kept == layers => flags.push("--activations keep".to_owned()),
                _ if *inputs_on_host => {
                    flags.push("--activations recompute --recompute-what offload".to_owned());
                }
                0 => flags.push("--activations recompute".to_owned()),
                _ => {}
            }
            if (1..layers).contains(&keep.len()) {
                flags.push(format!("--set 'offload.keep={}'", format!("{keep:?}").replace(' ', "")));
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
    let least = |pass: Direction| Ok((pass, least_tokens(&condition, pass)?));
    [Direction::Forward, backward].into_iter().map(least).collect()
}
