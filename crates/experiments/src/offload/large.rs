//! `offload large`: a model larger than its budget, which is enforced.

use std::path::PathBuf;

use accounting::offload::{Budget, SimulatedStep, Start, plan, simulate};
use accounting::quantity::{bytes_text, parse_bytes};
use anyhow::bail;
use clap::Args;
use frugal::planning::{self, MachineRates, PeakMeter, PeakUsage};
use lora::{Adapters, LoraConfig};
use offload::{Method, Offload, Options, Tier};
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Sink};
use runtime::device;
use tch::{Device, Kind};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

use super::folder::scratch;
use super::measured_model::MeasuredModel;
use super::predicted::{self, Step as Planned};
use super::shape;

const EXPERIMENT: &str = "offload-large";
const RANK: i64 = 8;
const KIND: Kind = Kind::BFloat16;

#[derive(Args)]
pub(crate) struct Large {
    /// How large it is: paper is all of Qwen2.5-7B, and 13 GB on the disk
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    /// Bytes that the process (on a GPU, its tensors there) may hold
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    budget: Option<u64>,
    /// Tokens of a step
    #[arg(long, value_parser = clap::value_parser!(i64).range(2..))]
    tokens: Option<i64>,
    /// Measured passes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Where the layers lie [default: beside this program]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Large) -> anyhow::Result<()> {
    let device = device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    let mut sink = Sink::new(common, crate::environment::of(device)?)?;
    let (name, layers, vocabulary, tokens, allowed) = match arguments.scale {
        Scale::Smoke => ("tiny", 6, 512, 16, 1 << 30),
        Scale::Laptop => ("Qwen2.5-7B's blocks", 2, 8192, 16, 3 << 29),
        Scale::Full => ("Qwen2.5-7B's blocks", 4, 32_768, 64, 2 << 30),
        Scale::Paper => ("Qwen2.5-7B", 28, 152_064, 256, 10 << 30),
    };
    let allowed = arguments.budget.unwrap_or(allowed);
    let tokens = arguments.tokens.unwrap_or(tokens);
    let config = match arguments.scale {
        Scale::Smoke => shape::tiny(layers, tokens),
        _ => shape::large(layers, vocabulary, tokens),
    };
    let scratch = scratch(arguments.folder.as_deref())?;
    let tier = Tier::File(scratch.path().to_owned());
    let mut progress = report::Progress::new(3 + 2 * u64::from(arguments.repeats));
    progress.message("measuring this machine");
    let product = [tokens, config.intermediate_size, config.hidden_size];
    let measured = MachineRates::measure(product, (KIND, device), &tier)?;
    runtime::memory::empty_cache(device)?;
    progress.step();

    // One plan for both: that of the step which needs more.
    let for_tensors = planning::tensor_budget(allowed, device)?;
    let job = |step| predicted::job(&config, (KIND, device), tokens, step, &measured);
    let jobs = [job(Planned::Inference)?, job(Planned::Lora(RANK.unsigned_abs()))?];
    let parameters = ::training::predicted::decoder(&config)?.parameters()?;
    let whole = planning::recipe(KIND).parameters.bytes(parameters)?;
    // Beside the program itself the smallest model is nothing: its plan gets less than it has, too.
    let for_tensors = match arguments.scale {
        Scale::Smoke => {
            for_tensors.min(whole / 2 + jobs[1].working.head_bytes + jobs[1].working.backward_bytes)
        }
        _ => for_tensors,
    };
    let rates = &measured.transfers;
    let plan = plan(&jobs[1], rates, Budget { device: for_tensors, host: None })?;
    progress.print(&format!("{plan}"));
    let predicted = [simulate(&jobs[0], rates, &plan.setup, Start::Warm)?, plan.step.clone()];

    progress.message(&format!("writing {layers} layers into {}", scratch.path().display()));
    let limit = planning::enforce(device, allowed)?;
    let watch = PeakMeter::start(device)?;
    let options = Options {
        device,
        method: Method::Overlap,
        ring: plan.ring().max(1),
        resident: plan.setup.resident.clone(),
        tier,
        ..Options::default()
    };
    let mut subject = MeasuredModel::new(&config, (KIND, device), Some(&options), (tokens, common.seed))?;
    let made = watch.finish()?;
    progress.step();

    let case = |pass: &str| Case::new().with("model", name).with("layers", layers).with("pass", pass);
    let about = |step: &SimulatedStep| {
        let exact = |name: &str, unit: &str, value: u64| Metric::exact(name, unit, value as f64);
        vec![
            exact("model_bytes", "B", whole),
            exact("budget_bytes", "B", allowed),
            exact("tokens", "tokens", tokens.unsigned_abs()),
            exact("resident_layers", "count", plan.setup.resident.len() as u64),
            exact("ring_slots", "count", plan.ring() as u64),
            Metric::exact("predicted_step_seconds", "s", step.seconds),
            exact("predicted_peak_bytes", "B", step.device.total),
        ]
    };
    let figures = |passes: &Passes, step: &SimulatedStep| {
        let mut metrics = about(step);
        metrics.extend(passes.metrics(step.device.total, tokens, device));
        metrics
    };
    sink.put(
        EXPERIMENT,
        &case("construction"),
        vec![
            Metric::exact("budget_bytes", "B", allowed as f64),
            Metric::exact("peak_bytes", "B", made.tensors.peak as f64),
            Metric::exact("process_bytes", "B", made.process as f64),
        ],
    )?;

    progress.message("reading");
    let inference = Passes::run(&subject, arguments.repeats, &mut progress, |subject| subject.infer())?;
    sink.put(EXPERIMENT, &case("inference"), figures(&inference, &predicted[0]))?;

    let adapters = LoraConfig {
        r: RANK,
        lora_alpha: 16.0,
        target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj"].into()),
        ..LoraConfig::default()
    };
    progress.message("a LoRA step");
    let watch = PeakMeter::start(device)?;
    Adapters::install(&mut subject.model, &adapters, common.seed)?;
    let installed = watch.finish()?;
    let group = Group::new(subject.parameters(), 1e-4);
    let mut optimizer = DeviceOptimizer::new(AdamW::default(), vec![group])?;
    progress.step();
    let lora = Passes::run(&subject, arguments.repeats, &mut progress, |subject| {
        let passes = subject.gradients()?;
        let began = std::time::Instant::now();
        optimizer.step()?;
        optimizer.zero_grad(ZeroGrad::ToNone)?;
        Ok(passes.total() + began.elapsed().as_secs_f64())
    })?;
    sink.put(EXPERIMENT, &case("LoRA step"), figures(&lora, &predicted[1]))?;
    drop(limit);

    for (what, seen) in [
        ("making the model", made),
        ("inference", inference.seen),
        ("installing adapters", installed),
        ("the LoRA step", lora.seen),
    ] {
        let most = seen.counted(device);
        if most > allowed {
            bail!(
                "{what} took {} of a budget of {}: the plan was wrong by {}; give fewer --tokens, or report this",
                bytes_text(most),
                bytes_text(allowed),
                bytes_text(most - allowed)
            );
        }
    }
    Ok(())
}

/// Passes that were measured.
struct Passes {
    seconds: Vec<f64>,
    seen: PeakUsage,
    link_rate: Option<f64>,
    overlap: f64,
    loaded: f64,
}

impl Passes {
    /// Runs a pass to warm up, and then some that are measured.
    fn run(
        subject: &MeasuredModel,
        repeats: u32,
        progress: &mut report::Progress,
        mut pass: impl FnMut(&MeasuredModel) -> anyhow::Result<f64>,
    ) -> anyhow::Result<Self> {
        let watch = PeakMeter::start(subject.device)?;
        pass(subject)?;
        let trace_of = |offload: &Offload| offload.start_trace();
        let (mut seconds, mut trace) = (Vec::new(), Vec::new());
        let mut loaded = 0;
        for _ in 0..repeats {
            let before = subject.offload.as_ref().map_or(0, |offload| offload.counters().loaded);
            subject.offload.as_ref().map(trace_of).transpose()?;
            seconds.push(pass(subject)?);
            if let Some(offload) = &subject.offload {
                trace = offload.take_trace()?;
                loaded = offload.counters().loaded - before;
            }
            progress.step();
        }
        Ok(Self {
            seconds,
            seen: watch.finish()?,
            link_rate: offload::load_rate(&trace),
            overlap: offload::overlap(&trace),
            loaded: loaded as f64,
        })
    }

    fn metrics(&self, predicted: u64, tokens: i64, device: Device) -> Vec<Metric> {
        let peak = self.seen.tensors.peak as f64;
        let rates: Vec<f64> = self.seconds.iter().map(|seconds| tokens as f64 / seconds).collect();
        let mut metrics = vec![
            Metric::of_samples("step_seconds", "s", &self.seconds),
            Metric::of_samples("tokens_per_second", "tokens/s", &rates),
            Metric::exact("peak_bytes", "B", peak),
            Metric::exact("prediction_error", "ratio", (predicted as f64 / peak - 1.0).abs()),
            Metric::exact("process_bytes", "B", self.seen.process as f64),
            Metric::exact("counted_bytes", "B", self.seen.counted(device) as f64),
            Metric::exact("loaded_bytes", "B", self.loaded),
            Metric::exact("overlap", "ratio", self.overlap),
        ];
        metrics.extend(self.link_rate.map(|rate| Metric::exact("link_rate", "B/s", rate)));
        metrics
    }
}
