//! `offload large`: a model larger than its budget, which is enforced.

mod calibration;
mod passes;

use std::path::PathBuf;

use accounting::offload::{Budget, Start, plan, simulate};
use accounting::quantity::{bytes_text, parse_bytes};
use anyhow::bail;
use clap::Args;
use frugal::planning::{self, MachineRates, PeakMeter};
use models::DecoderConfig;
use offload::{Method, OffloadConfig, Tier};
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Sink};
use runtime::device;
use tch::Kind;

use super::folder::scratch;
use super::measured_model::MeasuredModel;
use super::predicted::{self, Step as Planned};
use crate::shape::Shape;
use calibration::PartTimes;
use passes::{Measured, Passes, RANK};

const EXPERIMENT: &str = "offload-large";
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
    let mut sink = Sink::new(common, crate::environment::of(device)?, arguments.scale)?;
    let (name, layers, vocabulary, tokens, allowed) = match arguments.scale {
        Scale::Smoke => ("tiny", 6, 512, 16, 1 << 30),
        Scale::Laptop => ("Qwen2.5-7B's blocks", 3, 8192, 16, 11 << 27),
        Scale::Full => ("Qwen2.5-7B's blocks", 4, 32_768, 64, 2 << 30),
        Scale::Paper => ("Qwen2.5-7B", 28, 152_064, 256, 10 << 30),
    };
    let allowed = arguments.budget.unwrap_or(allowed);
    let tokens = arguments.tokens.unwrap_or(tokens);
    let shape = if arguments.scale == Scale::Smoke { Shape::Tiny } else { Shape::Large };
    let config = shape.resized(layers, vocabulary, tokens)?;
    let scratch = scratch(arguments.folder.as_deref())?;
    let tier = Tier::File(scratch.path().to_owned());
    let mut progress = report::Progress::new(3 + 2 * u64::from(arguments.repeats));
    progress.message("measuring this machine");
    let product = [tokens, config.intermediate_size, config.hidden_size];
    let measured = MachineRates::measure(product, (KIND, device), &tier)?;
    runtime::memory::empty_cache(device)?;
    progress.step();

    // One plan for both: that of the step which needs more.
    let for_tensors = planning::Budget::new(allowed, device)?.free()?;
    let of = |step| predicted::costs(&config, (KIND, device), tokens, step, &measured);
    let costs = [of(Planned::Inference)?, of(Planned::Lora(RANK.unsigned_abs()))?];
    let parameters = accounting::Decoder::of(&config)?.parameters()?;
    let whole = planning::recipe(KIND).parameters.bytes(parameters)?;
    // Beside the program itself the smallest model is nothing: its plan gets less than it has, too.
    let for_tensors = match arguments.scale {
        Scale::Smoke => {
            for_tensors.min(whole / 2 + costs[1].working.head_bytes + costs[1].working.backward_bytes)
        }
        _ => for_tensors,
    };
    let rates = &measured.transfers;
    let plan = plan(&costs[1], rates, Budget { device: for_tensors, host: None })?;
    progress.print(&format!("{plan}"));
    if arguments.budget.is_none() && plan.ring() == 0 {
        bail!(
            "{name}, {} of weights, stays wholly on the device in {}: nothing is offloaded; give a smaller --budget",
            bytes_text(whole),
            bytes_text(allowed)
        );
    }
    let from_products = [simulate(&costs[0], rates, &plan.setup, Start::Warm)?, plan.step.clone()];

    progress.message("measuring a few layers");
    let few = DecoderConfig { num_hidden_layers: layers.min(calibration::LAYERS), ..config.clone() };
    let ring = calibration::RING.min(layers.unsigned_abs() as usize - 1).max(1);
    let folder = tempfile::tempdir_in(scratch.path())?;
    let options = OffloadConfig {
        device,
        method: Method::Overlap,
        ring,
        tier: Tier::File(folder.path().to_owned()),
        ..OffloadConfig::default()
    };
    let subject = MeasuredModel::new(&few, (KIND, device), Some(&options), (tokens, common.seed))?;
    let Measured { inference, lora, .. } = Measured::of(subject, 2, common.seed, &mut |_| ())?;
    let times = [&inference, &lora].map(PartTimes::of);
    drop(folder);
    runtime::memory::empty_cache(device)?;
    let simulated = |pass: usize| {
        let (costs, rates) = (times[pass].calibrated(&costs[pass]), times[pass].rates(rates));
        simulate(&costs, &rates, &plan.setup, Start::Warm)
    };
    let predicted = [simulated(0)?, simulated(1)?];
    progress.step();

    progress.message(&format!("writing {layers} layers into {}", scratch.path().display()));
    let limit = planning::enforce(device, allowed)?;
    let watch = PeakMeter::start(device)?;
    let options = OffloadConfig {
        device,
        method: Method::Overlap,
        ring: plan.ring().max(1),
        resident: plan.setup.resident.clone(),
        tier,
        ..OffloadConfig::default()
    };
    let subject = MeasuredModel::new(&config, (KIND, device), Some(&options), (tokens, common.seed))?;
    let made = watch.finish()?;
    progress.step();

    let case = |pass: &str| Case::new().with("model", name).with("layers", layers).with("pass", pass);
    let about = |pass: usize| {
        let step = &predicted[pass];
        let exact = |name: &str, unit: &str, value: u64| Metric::exact(name, unit, value as f64);
        vec![
            exact("model_bytes", "B", whole),
            exact("budget_bytes", "B", allowed),
            exact("tokens", "tokens", tokens.unsigned_abs()),
            exact("resident_layers", "count", plan.setup.resident.len() as u64),
            exact("ring_slots", "count", plan.ring() as u64),
            Metric::exact("predicted_step_seconds", "s", step.seconds),
            exact("measured_layers", "count", few.num_hidden_layers.unsigned_abs()),
            Metric::exact("from_products_seconds", "s", from_products[pass].seconds),
            Metric::exact("layer_over_products", "ratio", times[pass].over(&costs[pass])),
            exact("predicted_peak_bytes", "B", step.device.total),
        ]
    };
    let figures = |passes: &Passes, pass: usize| {
        let mut metrics = about(pass);
        let errors: Vec<f64> =
            passes.seconds.iter().map(|s| (predicted[pass].seconds / s - 1.0).abs()).collect();
        metrics.push(Metric::of_samples("time_error", "ratio", &errors));
        metrics.extend(passes.metrics(predicted[pass].device.total, tokens, device));
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

    let repeats = arguments.repeats;
    let Measured { inference, installed, lora } = Measured::of(subject, repeats, common.seed, &mut |what| {
        progress.message(what);
        progress.step();
    })?;
    for (pass, (name, passes)) in [("inference", &inference), ("LoRA step", &lora)].into_iter().enumerate() {
        sink.put(EXPERIMENT, &case(name), figures(passes, pass))?;
    }
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
