//! `offload large`: a model larger than its budget, which is enforced.

mod calibration;
mod passes;

use std::path::{Path, PathBuf};

use accounting::offload::{
    AvailableMemory, OffloadPlan, Rates, SimulatedStep, Start, StepCosts, plan, simulate,
};
use accounting::quantity::{bytes_text, parse_bytes};
use anyhow::bail;
use clap::Args;
use frugal::planning::{self, MachineRates, PeakMeter};
use models::DecoderConfig;
use offload::{Method, OffloadConfig, Tier};
use report::cli::Scale;
use report::{Case, Metric};
use tch::{Device, Kind};
use tempfile::TempDir;

use super::folder::scratch;
use super::measured_model::MeasuredModel;
use super::predicted::{self, Step};
use crate::driver::Bench;
use crate::shape::Shape;
use calibration::PartTimes;
use passes::{Measured, Passes, RANK};

const KIND: Kind = Kind::BFloat16;

#[derive(Args)]
pub(crate) struct Large {
    /// Bytes that the process (on a GPU, its tensors there) may hold
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    budget: Option<u64>,
    /// Tokens of a step
    #[arg(long, value_parser = clap::value_parser!(i64).range(2..))]
    tokens: Option<i64>,
    /// Measured passes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Where the layers are; `host` is for a GPU
    #[arg(long, value_enum, default_value_t = Place::File)]
    tier: Place,
    /// Where the files of the tier `file` are [default: beside this program]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Write a trace of one more LoRA step to FILE: the operators, and on a GPU its kernels and copies; for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl Large {
    /// The name of the experiment: one for each tier.
    pub(super) fn experiment(&self) -> &'static str {
        match self.tier {
            Place::File => "offload-large",
            Place::Host => "offload-large-host",
        }
    }
}

/// Where the layers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Place {
    File,
    Host,
}

/// A model with its plan, and what its passes were predicted to take.
struct Planned {
    name: &'static str,
    config: DecoderConfig,
    tokens: i64,
    /// Bytes that may be held.
    budget: u64,
    /// Bytes of the weights.
    weights: u64,
    plan: OffloadPlan,
    /// Inference and a LoRA step.
    predicted: [Predicted; 2],
    place: Place,
    folder: TempDir,
}

/// A pass on paper.
struct Predicted {
    /// Seconds from the rate of one product.
    from_products: f64,
    /// How many times as long as from that rate a layer takes.
    layer_over_products: f64,
    /// The step with the times of a few measured layers.
    step: SimulatedStep,
}

impl Planned {
    /// Measures the machine, plans, and measures a few layers.
    fn new(arguments: &Large, bench: &mut Bench) -> anyhow::Result<Self> {
        let (device, place) = (bench.device, arguments.tier);
        let (name, layers, vocabulary, tokens, budget) = bench.sized([
            ("tiny", 6, 512, 16, 1 << 30),
            ("Qwen2.5-7B's blocks", 3, 8192, 16, 11 << 27),
            ("Qwen2.5-7B's blocks", 4, 32_768, 64, 2 << 30),
            ("Qwen2.5-7B", 28, 152_064, 256, 10 << 30),
        ]);
        let budget = arguments.budget.unwrap_or(budget);
        let tokens = arguments.tokens.unwrap_or(tokens);
        let shape = if bench.scale == Scale::Smoke { Shape::Tiny } else { Shape::Large };
        let config = shape.resized(layers, vocabulary, tokens)?;
        let folder = scratch(arguments.folder.as_deref())?;

        bench.message("measuring this machine");
        let product = [tokens, config.intermediate_size, config.hidden_size];
        let tier = place.tier(folder.path());
        let rates = MachineRates::measure(product, (KIND, device), &tier)?;
        runtime::memory::empty_cache(device)?;

        // One plan for both steps: that of the step that needs more.
        let costs = |step| predicted::costs(&config, (KIND, device), tokens, step, &rates);
        let costs = [costs(Step::Inference)?, costs(Step::Lora(RANK.unsigned_abs()))?];
        let parameters = accounting::Decoder::from_config(&config)?.parameters()?;
        let weights = planning::recipe(KIND).parameters.bytes(parameters)?;
        let mut tensors = planning::Budget::new(budget, device)?.free()?;
        if bench.scale == Scale::Smoke {
            // Beside the program itself the smallest model is nothing: its plan gets less than it has, too.
            tensors =
                tensors.min(weights / 2 + costs[1].working.head_bytes + costs[1].working.backward_bytes);
        }
        let rates = &rates.transfers;
        let plan = plan(&costs[1], rates, AvailableMemory { device: tensors, host: None })?;
        bench.print(&format!("{plan}"));
        if arguments.budget.is_none() && plan.ring() == 0 {
            bail!(
                "{name}, {} of weights, stays wholly on the device in {}: nothing is offloaded; give a smaller --budget",
                bytes_text(weights),
                bytes_text(budget)
            );
        }

        bench.message("measuring a few layers");
        let times = few_layers(&config, tokens, (place, folder.path()), bench)?;
        let predicted = |pass: usize| Predicted::new(&costs[pass], times[pass], rates, &plan);
        let predicted = [predicted(0)?, predicted(1)?];
        Ok(Self { name, config, tokens, budget, weights, plan, predicted, place, folder })
    }

    fn case(&self, pass: &str) -> Case {
        let layers = self.config.num_hidden_layers;
        Case::new().with("model", self.name).with("layers", layers).with("pass", pass)
    }

    /// Metrics of a pass beside its prediction.
    fn figures(&self, predicted: &Predicted, passes: &Passes, device: Device) -> Vec<Metric> {
        let exact = |name: &str, unit: &str, value: u64| Metric::exact(name, unit, value as f64);
        let step = &predicted.step;
        let errors: Vec<f64> =
            passes.seconds.iter().map(|seconds| (step.seconds / seconds - 1.0).abs()).collect();
        let mut metrics = vec![
            exact("model_bytes", "B", self.weights),
            exact("budget_bytes", "B", self.budget),
            exact("tokens", "tokens", self.tokens.unsigned_abs()),
            exact("resident_layers", "count", self.plan.setup.resident.len() as u64),
            exact("ring_slots", "count", self.plan.ring() as u64),
            Metric::exact("predicted_step_seconds", "s", step.seconds),
            exact("measured_layers", "count", measured_layers(&self.config).unsigned_abs()),
            Metric::exact("from_products_seconds", "s", predicted.from_products),
            Metric::exact("layer_over_products", "ratio", predicted.layer_over_products),
            exact("predicted_peak_bytes", "B", step.device.total),
            Metric::of_samples("time_error", "ratio", &errors),
        ];
        metrics.extend(passes.metrics(step.device.total, self.tokens, device));
        metrics
    }
}

impl Place {
    fn tier(self, folder: &Path) -> Tier {
        match self {
            Self::File => Tier::File(folder.to_owned()),
            Self::Host => Tier::Host,
        }
    }
}

impl Predicted {
    fn new(costs: &StepCosts, times: PartTimes, rates: &Rates, plan: &OffloadPlan) -> anyhow::Result<Self> {
        let simulated = |costs: &StepCosts, rates: &Rates| simulate(costs, rates, &plan.setup, Start::Warm);
        Ok(Self {
            from_products: simulated(costs, rates)?.seconds,
            layer_over_products: times.over(costs),
            step: simulated(&times.calibrated(costs), &times.rates(rates))?,
        })
    }
}

/// The number of layers whose times stand for all.
fn measured_layers(config: &DecoderConfig) -> i64 {
    config.num_hidden_layers.min(calibration::LAYERS)
}

/// The times of the parts of both passes, measured on a few layers.
fn few_layers(
    config: &DecoderConfig,
    tokens: i64,
    (place, folder): (Place, &Path),
    bench: &Bench,
) -> anyhow::Result<[PartTimes; 2]> {
    let (device, seed) = (bench.device, bench.seed);
    let few = DecoderConfig { num_hidden_layers: measured_layers(config), ..config.clone() };
    let ring = calibration::RING.min(config.num_hidden_layers.unsigned_abs() as usize - 1).max(1);
    let folder = tempfile::tempdir_in(folder)?;
    let tier = place.tier(folder.path());
    let options = OffloadConfig { device, method: Method::Overlap, ring, tier, ..OffloadConfig::default() };
    let subject = MeasuredModel::new(&few, (KIND, device), Some(&options), (tokens, seed))?;
    let Measured { inference, lora, .. } = Measured::run(subject, (2, seed), None, &mut |_| ())?;
    runtime::memory::empty_cache(device)?;
    Ok([&inference, &lora].map(PartTimes::new))
}

/// Makes the model in files, runs its passes within the budget, and checks that they kept it.
pub(crate) fn run(bench: &mut Bench, arguments: &Large) -> anyhow::Result<()> {
    let (device, seed) = (bench.device, bench.seed);
    if arguments.tier == Place::Host && !device.is_cuda() {
        // Host memory is that of a CPU: nothing would be outside of the budget.
        let none = |name: &str, unit: &str| Metric::not_measured(name, unit, "no GPU");
        let case = Case::new().with("model", "Qwen2.5-7B").with("pass", "LoRA step");
        return bench.put(
            &case,
            vec![none("step_seconds", "s"), none("counted_bytes", "B"), none("overlap", "ratio")],
        );
    }
    runtime::memory::track_cpu()?;
    let planned = Planned::new(arguments, bench)?;
    bench.expect(1 + 2 * arguments.repeats as usize);
    let layers = planned.config.num_hidden_layers;
    bench.message(&match planned.place {
        Place::File => format!("writing {layers} layers into {}", planned.folder.path().display()),
        Place::Host => format!("making {layers} layers in host memory"),
    });
    let limit = planning::enforce(device, planned.budget)?;
    let watch = PeakMeter::start(device)?;
    let options = OffloadConfig {
        device,
        method: Method::Overlap,
        ring: planned.plan.ring().max(1),
        resident: planned.plan.setup.resident.clone(),
        tier: planned.place.tier(planned.folder.path()),
        ..OffloadConfig::default()
    };
    let subject =
        MeasuredModel::new(&planned.config, (KIND, device), Some(&options), (planned.tokens, seed))?;
    let made = watch.finish()?;
    let metrics = vec![
        Metric::exact("budget_bytes", "B", planned.budget as f64),
        Metric::exact("peak_bytes", "B", made.tensors.peak as f64),
        Metric::exact("process_bytes", "B", made.process as f64),
    ];
    bench.put(&planned.case("construction"), metrics)?;
    bench.step();

    let trace = arguments.trace.as_deref();
    let Measured { inference, installed, lora } =
        Measured::run(subject, (arguments.repeats, seed), trace, &mut |what| {
            bench.message(what);
            bench.step();
        })?;
    let passes = [("inference", &inference), ("LoRA step", &lora)];
    for ((name, passes), predicted) in passes.into_iter().zip(&planned.predicted) {
        bench.put(&planned.case(name), planned.figures(predicted, passes, device))?;
    }
    drop(limit);

    for (what, seen) in [
        ("making the model", made),
        ("inference", inference.seen),
        ("installing adapters", installed),
        ("the LoRA step", lora.seen),
    ] {
        let most = seen.counted(device);
        if most > planned.budget {
            bail!(
                "{what} took {} of a budget of {}: the plan was wrong by {}; give fewer --tokens, or report this",
                bytes_text(most),
                bytes_text(planned.budget),
                bytes_text(most - planned.budget)
            );
        }
    }
    Ok(())
}
