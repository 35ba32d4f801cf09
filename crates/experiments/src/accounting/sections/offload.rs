//! Predicted weight offloading: the tokens that hide the loads on common GPUs, plans for Qwen2.5-7B in 10 GB, and timelines of a step.

use accounting::decoder_flops::Workload;
use accounting::lora::LowRank;
use accounting::memory::recipe::Recipe;
use accounting::offload::sizes::{self, Choices};
use accounting::offload::{
    AvailableMemory, Condition, Direction, GEN4, GEN5, GPUS, Gpu, Method, OffloadPlan, OptimizerPlace, Rates,
    Setup, SimulatedStep, Span, Start, StepCosts, gpu, least_tokens, plan, simulate,
};
use accounting::{Error, presets};
use report::{Case, Environment, Metric, Record};

use super::record;

const MODEL: &str = "qwen2.5-7b";
const BUDGET: u64 = 10_000_000_000;
const TOKENS: [u64; 4] = [1, 512, 2048, 8192];
const TIMELINE_GPU: &str = "4090";
const TIMELINE_TOKENS: u64 = 4096;
const TIMELINE_LAYERS: usize = 10;
const METHODS: [(&str, Method); 3] = [
    ("one layer at a time", Method::OneAtATime),
    ("ring of 2", Method::Overlap { ring: 2 }),
    ("ring of 3", Method::Overlap { ring: 3 }),
];
const LINKS: [(&str, f64); 2] = [("gen4, 25 GB/s", GEN4), ("gen5, 50 GB/s", GEN5)];

/// Returns the smallest numbers of tokens for every GPU, link and direction in bf16, the plans by GPU and tokens of a step, and the spans of a
/// LoRA step by three methods.
pub(crate) fn offload_condition(environment: &Environment) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    let mut put = |case: &Case, metric| records.push(record("offload-condition", case, metric, environment));
    for gpu in GPUS {
        // The condition.
        for (name, link) in LINKS {
            let case = Case::new().with("shows", "condition").with("gpu", gpu.name).with("link", name);
            for direction in Direction::ALL {
                let condition =
                    Condition { flops: gpu.flops, link, bytes_per_parameter: 2.0, resident_share: 0.0 };
                let case = case.clone().with("pass", direction.name());
                let tokens = least_tokens(&condition, direction)? as f64;
                put(&case, Metric::exact("min_tokens", "tokens", tokens));
            }
        }
        // The plans; where none fits, the reason is recorded.
        for tokens in TOKENS {
            for (step, costs) in costs(tokens, gpu)? {
                let rates = rates(gpu)?;
                let case = Case::new()
                    .with("shows", "plan")
                    .with("gpu", gpu.name)
                    .with("step", step)
                    .with("tokens", tokens);
                match plan(&costs, &rates, AvailableMemory { device: BUDGET, host: None }) {
                    Ok(plan) => metrics(&plan).into_iter().for_each(|metric| put(&case, metric)),
                    Err(error @ Error::NoOffloadFits { .. }) => {
                        put(&case, Metric::not_measured("resident_share", "ratio", &error.to_string()));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
    }
    // The timelines, of the last of the steps: LoRA.
    let costs = costs(TIMELINE_TOKENS, gpu(TIMELINE_GPU)?)?.into_iter().next_back();
    let rates = rates(gpu(TIMELINE_GPU)?)?;
    for (name, method) in METHODS {
        let Some((_, costs)) = &costs else { break };
        // The first layers alone, so that each is visible.
        let costs = StepCosts { layers: costs.layers[..TIMELINE_LAYERS].to_vec(), ..costs.clone() };
        let setup = Setup { method, resident: Vec::new(), optimizer: OptimizerPlace::Host };
        let step = simulate(&costs, &rates, &setup, Start::Warm)?;
        for (case, metric) in span_metrics(&Case::new().with("shows", "timeline").with("method", name), &step)
        {
            put(&case, metric);
        }
    }
    Ok(records)
}

/// Returns a step's spans as a plot of kind `timeline` reads them. A span is a case with `stream`, `what`, `layer` (`–` without one) and its
/// number as `span`; its metrics are `start` and `end` in seconds.
fn span_metrics(case: &Case, step: &SimulatedStep) -> Vec<(Case, Metric)> {
    let measure = |(number, span): (usize, &Span)| {
        let layer = span.layer.map_or("–".to_owned(), |layer| layer.to_string());
        let case = case
            .clone()
            .with("stream", span.stream.name())
            .with("what", span.operation.name())
            .with("layer", layer)
            .with("span", number);
        [("start", span.start), ("end", span.end)]
            .map(|(name, time)| (case.clone(), Metric::exact(name, "s", time)))
    };
    step.spans.iter().enumerate().flat_map(measure).collect()
}

/// Returns the rates of a GPU: its link in both directions, 50 GB/s of memory for an optimizer on the host, and the GPU's bandwidth for one
/// on the device.
fn rates(gpu: Gpu) -> Result<Rates, Error> {
    Ok(Rates::of_memory(gpu.link, 50e9, gpu.data_sheet()?.bandwidth))
}

/// Returns the costs of inference and of a LoRA step, for one sequence of `tokens`.
fn costs(tokens: u64, gpu: Gpu) -> Result<[(&'static str, StepCosts); 2], Error> {
    let model = presets::find(MODEL)?;
    let work = Workload { batch: 1, sequence: tokens };
    let choices = Choices {
        flops: gpu.flops,
        bandwidth: gpu.data_sheet()?.bandwidth,
        recipe: Recipe::BF16,
        ..Choices::default()
    };
    Ok([
        ("inference", sizes::inference(&model, work, &choices)?),
        ("LoRA, rank 8", sizes::adapters(&model, &LowRank::default(), work, None, &choices)?),
    ])
}

/// Returns the metrics of a plan.
pub(crate) fn metrics(plan: &OffloadPlan) -> Vec<Metric> {
    let bytes = |name: &str, bytes: u64| Metric::exact(name, "B", bytes as f64);
    let mut share = Metric::exact("resident_share", "ratio", plan.resident_share);
    share.note = Some(format!("{} of {} layers", plan.setup.resident.len(), plan.layers));
    let mut peak = bytes("peak_bytes", plan.step.device.total);
    peak.note = Some(format!("at the {}", plan.step.device.moment));
    vec![
        Metric::exact("resident_layers", "count", plan.setup.resident.len() as f64),
        share,
        Metric::exact("ring_slots", "count", plan.ring() as f64),
        Metric::exact(
            "optimizer_on_host",
            "",
            f64::from(u8::from(plan.optimizer == Some(OptimizerPlace::Host))),
        ),
        peak,
        bytes("host_bytes", plan.step.host_bytes),
        bytes("loaded_bytes", plan.step.load_bytes),
        bytes("stored_bytes", plan.step.store_bytes),
        Metric::exact("step_seconds", "s", plan.step.seconds),
        Metric::exact("idle_seconds", "s", plan.step.idle_seconds),
        Metric::exact("resident_step_seconds", "s", plan.resident_seconds),
        Metric::exact("share_of_resident_speed", "ratio", plan.share_of_resident_speed()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With more tokens than the condition asks for, the resident share included, a step waits for no load; with more tokens a plan is never
    /// slower, relative to resident layers.
    #[test]
    fn plans_keep_what_the_condition_promises() {
        for gpu in GPUS {
            let rates = rates(gpu).unwrap();
            let mut last = 0.0;
            for tokens in [1, 512, 2048, 8192, 24_000] {
                let [(_, costs), _] = costs(tokens, gpu).unwrap();
                let Ok(chosen) = plan(&costs, &rates, AvailableMemory { device: BUDGET, host: None }) else {
                    assert!(tokens > 8192, "the logits alone take too much");
                    continue;
                };
                let least = chosen.least_tokens(gpu.flops, &rates, 2.0, Direction::Forward).unwrap();
                let share = chosen.share_of_resident_speed();
                // Attention's core and the head compute too, so that fewer tokens than the condition's may be enough.
                assert!(tokens < least || share > 0.999, "{} {tokens} {least} {share}", gpu.name);
                assert!(share >= last || share > 0.999, "{} {tokens}: {share} after {last}", gpu.name);
                last = share;
            }
        }
    }
}
