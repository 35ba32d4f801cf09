//! `frugal plan`: the ways to run a step within a budget, at this machine's measured rates or at a card's.

use std::io::Write;
use std::path::{Path, PathBuf};

use accounting::Decoder;
use accounting::decoder_flops::Workload;
use accounting::lora::{LowRank, Targets};
use accounting::offload::{
    Budget, Card, Direction, GEN4, Job, Method, OffloadPlan, OptimizerPlace, Rates, Setup, SimulatedStep,
    Start, card, plan, simulate, sizes,
};
use accounting::quantity::{bytes_text, grouped, parse_bytes};
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use frugal::config::{Bytes, OffloadTier};
use frugal::offload::Tier;
use frugal::planning::{self, MachineRates};
use report::unit::human;
use serde_json::{Value, json};
use tch::{Device, Kind};

use super::super::Common;
use super::super::output::{print_line, print_lines};
use super::super::settings::{DtypeArg, OffloadArg};
use super::model_args::ModelArgs;

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Work {
    /// Train low-rank adapters
    Lora,
    /// Train all weights
    Full,
    /// Read tokens
    Inference,
}

#[derive(Args)]
pub(crate) struct StepArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Bytes that may be held on the device, such as 10GiB; on a CPU by the whole process [default: what is free, or the card's memory]
    #[arg(long, value_name = "BYTES")]
    budget: Option<Bytes>,
    /// Bytes of the host that offloaded layers and optimizer state may take [default: any]
    #[arg(long, value_name = "BYTES")]
    host_budget: Option<Bytes>,
    /// What a step does
    #[arg(long, value_enum, default_value = "lora")]
    method: Work,
    /// Rank of the adapters
    #[arg(long, alias = "lora-rank", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    r: u64,
    /// Which projections are adapted: q, k, v, o, gate, up, down, or all [default: q,k,v,o]
    #[arg(long, alias = "lora-targets", value_name = "NAME,…")]
    targets: Option<Targets>,
    /// Rows per batch
    #[arg(long, alias = "batch", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    batch_size: u64,
    /// Tokens of a row [default: 512, or the model's context if that is shorter]
    #[arg(long, aliases = ["tokens", "sequence"], value_parser = clap::value_parser!(u64).range(1..))]
    length: Option<u64>,
    /// Dtype of the weights: float32 or bfloat16 [default: bfloat16, and float32 where all weights are trained]
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    /// Tokens whose logits exist at a time
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..))]
    loss_chunk: u64,
    /// Where offloaded layers live [default: host; on a CPU file, where frozen layers need no memory]
    #[arg(long, value_name = "TIER")]
    offload: Option<OffloadArg>,
    /// A folder on the disk that offloaded layers are read from, for measuring it [default: the model's, or the current one]
    #[arg(long, value_name = "FOLDER", conflicts_with = "hardware")]
    folder: Option<PathBuf>,
    /// Plan for a card instead of this machine: 3090, 4090, a100, h100 or h200
    #[arg(long, alias = "card", value_name = "NAME", value_parser = card)]
    hardware: Option<Card>,
    /// FLOP/s of products [default: measured, or what trainings reach on the card]
    #[arg(long, value_name = "FLOP/S")]
    flops: Option<f64>,
    /// Bytes per second at which layers are loaded, such as 25GB [default: measured, or the card's link]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    link: Option<u64>,
    /// Bytes per second of the host's memory [default: measured, or 50GB for a card]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    host_bandwidth: Option<u64>,
}

/// Bytes per second of the memory of a host with a card, by default.
const CARD_HOST_BANDWIDTH: f64 = 2.0 * GEN4;

/// The step that is planned.
struct PlannedStep {
    model: Decoder,
    work: Workload,
    /// Dtype of the weights.
    kind: Kind,
    device: Device,
    /// Where offloaded layers live.
    tier: OffloadTier,
    /// Bytes of the weights.
    weights: u64,
}

/// A way to run a step, and what it takes.
struct Variant {
    name: &'static str,
    flags: String,
    step: SimulatedStep,
    /// Bytes at the peak.
    peak: u64,
    /// The plan of offloaded layers.
    plan: Option<OffloadPlan>,
}

pub(crate) fn run(common: &Common, arguments: &StepArgs) -> anyhow::Result<()> {
    let device = common.device()?;
    let model = arguments.model.decoder()?;
    let tokens = arguments.length.unwrap_or_else(|| model.context.min(512));
    if tokens > model.context {
        bail!("--length {tokens}: the model takes rows of {} at most", model.context);
    }
    let kind = match (arguments.dtype.map(|dtype| dtype.get().kind()), arguments.method) {
        (None, Work::Full) => Kind::Float,
        (None, _) => Kind::BFloat16,
        (Some(kind @ (Kind::Float | Kind::BFloat16)), _) => kind,
        (Some(_), _) => bail!("--dtype: a plan is made for float32 and bfloat16"),
    };
    let on_cpu = device == Device::Cpu && arguments.hardware.is_none();
    let tier = match arguments.offload {
        Some(tier) => tier.get(),
        None if on_cpu && arguments.method != Work::Full => OffloadTier::File,
        None => OffloadTier::Host,
    };
    if arguments.method == Work::Full && tier == OffloadTier::File {
        bail!("--method full trains all weights, and layers in files cannot be trained; give --offload host");
    }
    let work = Workload { batch: arguments.batch_size, sequence: tokens };
    let weights = planning::recipe(kind).parameters.bytes(model.parameters()?)?;
    let planned = PlannedStep { model, work, kind, device, tier, weights };
    let machine = arguments.rates(&planned)?;
    let budget = arguments.budget(device)?;
    let job = arguments.job(&planned, &machine)?;
    let variants = variants(&job, &machine.transfers, budget, tier, on_cpu)?;
    let chosen = variants
        .iter()
        .filter(|variant| variant.peak <= budget.device)
        .min_by(|a, b| a.step.seconds.total_cmp(&b.step.seconds));
    let hiding = arguments.tokens_that_hide_loads(&machine, kind, variants.last())?;
    if common.json {
        print_line(&json!({
            "model": arguments.model.name(),
            "model_bytes": weights,
            "parameters": planned.model.parameters()?,
            "budget": budget.device,
            "flops": machine.flops,
            "memory_rate": machine.bandwidth,
            "link_rate": machine.transfers.load,
            "variants": variants.iter().map(|variant| variant.json(budget.device)).collect::<Vec<_>>(),
            "chosen": chosen.map(|variant| variant.name),
            "tokens_that_hide_loads": hiding.iter()
                .map(|(pass, tokens)| json!({ "pass": pass.name(), "tokens": tokens })).collect::<Vec<_>>(),
        }));
        return Ok(());
    }
    let source = arguments.hardware.map_or("measured", |card| card.name);
    let mut lines = vec![
        (
            "parameters".to_owned(),
            format!("{} ({})", grouped(planned.model.parameters()?.into()), bytes_text(weights)),
        ),
        ("budget for tensors".into(), bytes_text(budget.device)),
        (
            source.into(),
            format!(
                "{:.3e} FLOP/s of products, {:.3e} B/s of memory, {:.3e} B/s of loads",
                machine.flops, machine.bandwidth, machine.transfers.load
            ),
        ),
        blank(),
    ];
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
        lines.push((
            variant.name.to_owned(),
            format!(
                "peak {}, {} a step, {fits}{mark}",
                bytes_text(variant.peak),
                human(variant.step.seconds, "s")
            ),
        ));
    }
    if let Some(shown) = chosen.or(variants.last()) {
        lines.push(blank());
        lines.push(("at the peak".into(), shown.step.device.moment.to_string()));
        lines.extend(
            shown.step.device.parts.iter().map(|part| (format!("  {}", part.name), bytes_text(part.bytes))),
        );
        if let Some(plan) = &shown.plan {
            lines.extend(streaming(plan));
            lines.extend(hiding.iter().map(|(pass, tokens)| {
                (format!("tokens that hide loads, {}", pass.name()), grouped((*tokens).into()))
            }));
        }
        let command = if arguments.method == Work::Inference { "generate" } else { "finetune" };
        let flags = if shown.flags.is_empty() { "none are needed" } else { &shown.flags };
        lines.push((format!("flags of {command}"), flags.to_owned()));
    }
    print_lines(lines.iter().map(|(name, text)| (name.as_str(), text.as_str())));
    match chosen {
        Some(_) => Ok(()),
        None => bail!(
            "nothing fits {}; take fewer or shorter rows, a lower rank, or a smaller model",
            bytes_text(budget.device)
        ),
    }
}

fn blank() -> (String, String) {
    (String::new(), String::new())
}

/// What the transfers of a plan come to.
fn streaming(plan: &OffloadPlan) -> Vec<(String, String)> {
    let SimulatedStep { host_bytes, load_bytes, idle_seconds, .. } = plan.step;
    vec![
        ("resident layers".into(), format!("{} of {}", plan.setup.resident.len(), plan.layers)),
        ("outside of the device".into(), bytes_text(host_bytes)),
        ("loaded per step".into(), bytes_text(load_bytes)),
        ("compute waits".into(), human(idle_seconds, "s")),
        ("share of resident speed".into(), format!("{:.3}", plan.share_of_resident_speed())),
    ]
}

impl StepArgs {
    /// Measures this machine, unless a card is given. Rates among the flags win.
    fn rates(&self, planned: &PlannedStep) -> anyhow::Result<MachineRates> {
        let bytes = |rate: Option<u64>| rate.map(|rate| rate as f64);
        let rates = [
            ("--flops", self.flops),
            ("--link", bytes(self.link)),
            ("--host-bandwidth", bytes(self.host_bandwidth)),
        ];
        for (flag, rate) in rates {
            if let Some(rate) = rate.filter(|rate| !(*rate > 0.0 && rate.is_finite())) {
                bail!("{flag} is {rate}; give a rate above 0");
            }
        }
        let mut rates = match self.hardware {
            Some(card) => {
                let bandwidth = card.data_sheet()?.bandwidth;
                let transfers = Rates::of_memory(card.link, CARD_HOST_BANDWIDTH, bandwidth);
                MachineRates { flops: card.flops, bandwidth, transfers, product_workspaces: 0 }
            }
            None => self.measure(planned)?,
        };
        if self.link.is_some() || self.host_bandwidth.is_some() {
            let link = self.link.map_or(rates.transfers.load, |link| link as f64);
            let host = match (self.host_bandwidth, self.hardware) {
                (Some(rate), _) => rate as f64,
                (None, Some(_)) => CARD_HOST_BANDWIDTH,
                (None, None) => runtime::measure::physical::copy_bandwidth(Device::Cpu)?
                    .rate()
                    .context("the rate of a copy")?,
            };
            rates.transfers = Rates::of_memory(link, host, rates.bandwidth);
        }
        rates.flops = self.flops.unwrap_or(rates.flops);
        Ok(rates)
    }

    fn measure(&self, planned: &PlannedStep) -> anyhow::Result<MachineRates> {
        let &PlannedStep { ref model, work, kind, device, tier, weights } = planned;
        // A part of the model's own product, which says the same in less time and memory.
        let size = |of: u64, most: i64| i64::try_from(of).map_or(most, |of| of.min(most));
        let product = [size(work.tokens()?, 2048), size(model.feed_forward, 4096), size(model.hidden, 4096)];
        if tier == OffloadTier::Host {
            return Ok(MachineRates::measure(product, (kind, device), &Tier::Host)?);
        }
        let scratch = self.scratch()?;
        let tier = Tier::File(scratch.path().to_owned());
        let mut rates = MachineRates::measure(product, (kind, device), &tier)?;
        // What the page cache cannot hold comes from the disk in every step.
        if weights > runtime::device::memory_info(Device::Cpu)?.free {
            let file = match self.model.folder().map(weights_file).transpose()?.flatten() {
                Some(file) => file,
                None => written(scratch.path())?,
            };
            let disk = planning::file_read_rate(&file)?;
            rates.transfers.load = rates.transfers.load.min(disk);
        }
        Ok(rates)
    }

    /// A folder for the files that are measured; it is removed with the value.
    fn scratch(&self) -> anyhow::Result<tempfile::TempDir> {
        let folder = self.folder.as_deref().unwrap_or(Path::new("."));
        tempfile::Builder::new().prefix(".frugal-plan-").tempdir_in(folder).with_context(|| {
            format!(
                "{} cannot be written; give a folder on the disk with the model as --folder",
                folder.display()
            )
        })
    }

    /// What tensors may take.
    fn budget(&self, device: Device) -> anyhow::Result<Budget> {
        let budget = match (self.budget, self.hardware) {
            (Some(budget), Some(_)) => budget.0,
            (None, Some(card)) => card.data_sheet()?.memory,
            (Some(budget), None) => planning::tensor_budget(budget.0, device)?,
            (None, None) => runtime::device::memory_info(device)?.free,
        };
        Ok(Budget { device: budget, host: self.host_budget.map(|budget| budget.0) })
    }

    fn job(&self, planned: &PlannedStep, machine: &MachineRates) -> anyhow::Result<Job> {
        let &PlannedStep { ref model, work, kind, device, .. } = planned;
        let choices = planning::choices(kind, machine, self.loss_chunk);
        Ok(match self.method {
            Work::Lora => {
                let lora = LowRank {
                    rank: self.r,
                    targets: self.targets.unwrap_or(Targets::ATTENTION),
                    on_cpu: device == Device::Cpu && self.hardware.is_none(),
                    ..LowRank::default()
                };
                sizes::adapters(model, &lora, work, None, &choices)?
            }
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
            Work::Lora => &[Direction::Forward, Direction::FrozenBackward],
            Work::Inference => &[Direction::Forward],
        };
        let bytes = kind.elt_size_in_bytes() as f64;
        let least = |&pass: &Direction| -> anyhow::Result<_> {
            Ok((pass, plan.least_tokens(machine.flops, &machine.transfers, bytes, pass)?))
        };
        passes.iter().map(least).collect()
    }
}

/// A file with weights in a model's folder.
fn weights_file(folder: &Path) -> anyhow::Result<Option<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    Ok(paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .max_by_key(|path| path.metadata().map_or(0, |metadata| metadata.len())))
}

/// A file of 64 MiB on the disk.
fn written(folder: &Path) -> anyhow::Result<PathBuf> {
    let path = folder.join("read");
    let mut file = std::fs::File::create(&path)?;
    let block = vec![1; 1 << 20];
    (0..64).try_for_each(|_| file.write_all(&block)).with_context(|| path.display().to_string())?;
    Ok(path)
}

impl Variant {
    fn json(&self, budget: u64) -> Value {
        let mut value = json!({
            "variant": self.name,
            "flags": self.flags,
            "peak_bytes": self.peak,
            "host_bytes": self.step.host_bytes,
            "step_seconds": self.step.seconds,
            "fits": self.peak <= budget,
            "parts": self.step.device.parts.iter().map(|part| json!({ "what": part.name, "bytes": part.bytes }))
                .collect::<Vec<_>>(),
        });
        if let Some(plan) = &self.plan {
            value["layers"] = plan.layers.into();
            value["resident_layers"] = json!(plan.setup.resident);
            value["ring_slots"] = plan.ring().into();
            value["loaded_bytes"] = plan.step.load_bytes.into();
            value["idle_seconds"] = plan.step.idle_seconds.into();
            value["share_of_resident_speed"] = plan.share_of_resident_speed().into();
        }
        value
    }
}

/// The ways to run a step, the fastest first. On a CPU layers in the host's memory are part of what the device holds.
fn variants(
    job: &Job,
    rates: &Rates,
    budget: Budget,
    tier: OffloadTier,
    on_cpu: bool,
) -> anyhow::Result<Vec<Variant>> {
    let shared = on_cpu && tier == OffloadTier::Host;
    let peak = |step: &SimulatedStep| step.device.total + if shared { step.host_bytes } else { 0 };
    let of = |name, flags: &str, method, optimizer| -> anyhow::Result<Variant> {
        let setup = Setup { method, resident: Vec::new(), optimizer };
        let step = simulate(job, rates, &setup, Start::Warm)?;
        Ok(Variant { name, flags: flags.to_owned(), peak: peak(&step), step, plan: None })
    };
    let device = OptimizerPlace::Device;
    let mut all = vec![of("all on the device", "", Method::Resident { recompute: false }, device)?];
    // Inference keeps nothing that could be computed again.
    if job.training {
        let recompute = Method::Resident { recompute: true };
        all.push(of("activations recomputed", "--activations recompute", recompute, device)?);
    }
    let tier = if tier == OffloadTier::Host { "host" } else { "file" };
    let taken = if shared { job.layer_bytes()? } else { 0 };
    let available = Budget { device: budget.device.saturating_sub(taken), ..budget };
    all.push(match plan(job, rates, available) {
        Ok(found) => {
            let resident: Vec<String> = found.setup.resident.iter().map(ToString::to_string).collect();
            let mut flags = format!("--offload {tier} --ring {}", found.ring().max(1));
            if !resident.is_empty() {
                flags += &format!(" --resident {}", resident.join(","));
            }
            if found.optimizer == Some(OptimizerPlace::Host) {
                flags += " --optimizer-on host";
            }
            let step = found.step.clone();
            Variant { name: "layers offloaded", flags, peak: peak(&step), step, plan: Some(found) }
        }
        // Where nothing fits, a ring of one takes the least.
        Err(accounting::Error::NoOffloadFits { .. }) => {
            let flags = format!("--offload {tier} --ring 1");
            of("layers offloaded", &flags, Method::Overlap { ring: 1 }, OptimizerPlace::Host)?
        }
        Err(error) => return Err(error.into()),
    });
    Ok(all)
}
