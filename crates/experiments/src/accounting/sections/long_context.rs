//! Long sequences on one card, on paper: which terms remain as techniques come together, and how long a sequence fits.

use accounting::decoder_flops::{Recomputation, Workload};
use accounting::memory::logits::{self, Loss};
use accounting::memory::recipe::Recipe;
use accounting::memory::total;
use accounting::memory::vocabulary_parallel::{rank_bytes, ring_sends};
use accounting::memory::zero::ZeroStage;
use accounting::model::Decoder;
use accounting::offload::Moment;
use accounting::recompute::{Recompute, SwigluLevel};
use accounting::textbook::{Memory, OnHost, Step, memory};
use accounting::{Error, hardware, presets};
use report::{Case, Environment, Metric, Record};

use super::fits::longest_sequence;
use super::record;

const MODEL: &str = "llama-3-8b";
const CARD: &str = "h100";
const SEQUENCES: [(u64, &str); 2] = [(32_768, "32k"), (131_072, "131k")];
const FUSED: Loss = Loss::LinearCrossEntropy { tokens: 1024, whole: 0 };

const ON_DEVICE: OnHost =
    OnHost { parameters: false, gradients: false, optimizer: false, block_inputs: false };
const ALL_STATES: OnHost = OnHost { parameters: true, gradients: true, optimizer: true, ..ON_DEVICE };

/// Peaks that the fused-loss assignment shows for Llama-3-8B in bf16 on an A100 of 80 GB, checkpoints, parameters and
/// gradients on the host: what it calls them, the sequence, whether the loss is fused, decimal gigabytes.
const PUBLISHED: [(u64, bool, f64); 3] =
    [(32_768, false, 67.3e9), (32_768, true, 12.4e9), (131_072, true, 36.0e9)];

/// The terms of Llama-3-8B's step, step by step; the published peaks beside ours; the longest sequence for every
/// combination of the techniques.
pub(crate) fn long_context(environment: &Environment) -> Result<Vec<Record>, Error> {
    let model = presets::find(MODEL)?;
    let mut records = Vec::new();
    let mut put = |case: &Case, metric| records.push(record("long-context", case, metric, environment));
    for (sequence, label) in SEQUENCES {
        for (step, plan) in series(sequence) {
            let case = Case::new().with("shows", "terms").with("sequence", label).with("step", step);
            terms(&model, &plan)?.into_iter().for_each(|metric| put(&case, metric));
        }
    }
    for (sequence, is_fused, published) in PUBLISHED {
        let loss = if is_fused { FUSED } else { Loss::Eager };
        let plan = Step { loss, ..assignment(sequence) };
        let ours = memory(&model, &plan)?.peak().total as f64;
        let label = SEQUENCES.iter().find(|(tokens, _)| *tokens == sequence).map_or("", |(_, label)| label);
        let case = Case::new()
            .with("shows", "published")
            .with("sequence", label)
            .with("loss", if is_fused { "fused" } else { "eager" });
        for metric in [
            Metric::exact("published_peak_bytes", "B", published),
            Metric::exact("predicted_peak_bytes", "B", ours),
            Metric::exact("predicted_over_published", "ratio", ours / published),
            Metric::exact("relative_error", "ratio", (ours / published - 1.0).abs()),
        ] {
            put(&case, metric);
        }
    }
    for (case, metrics) in two_gpus(&model)? {
        metrics.into_iter().for_each(|metric| put(&case, metric));
    }
    let available = hardware::find(CARD)?.memory;
    for (case, plan) in combinations()? {
        let metric = match longest_sequence(&model, &plan, available) {
            Ok(tokens) => Metric::exact("longest_sequence", "count", tokens as f64),
            Err(Error::NothingFits { needed, .. }) => {
                Metric::not_measured("longest_sequence", "count", &format!("one token needs {needed}"))
            }
            Err(error) => return Err(error),
        };
        put(&case, metric);
    }
    Ok(records)
}

/// bf16 with fp32 master weights, AdamW, model states on the host, flash attention; what the assignment profiles.
fn assignment(sequence: u64) -> Step {
    Step {
        work: Workload { batch: 1, sequence },
        recomputation: Recomputation { checkpoint: Recompute::Full, ..Recomputation::default() },
        host: OnHost { block_inputs: true, ..ALL_STATES },
        ..Step::default()
    }
}

/// Steps with ever more techniques, from a flash kernel alone to all of them.
fn series(sequence: u64) -> Vec<(&'static str, Step)> {
    let device = Step { work: Workload { batch: 1, sequence }, ..Step::default() };
    let states = Step { host: ALL_STATES, ..device };
    let recompute = Step { recomputation: assignment(sequence).recomputation, ..states };
    let inputs = assignment(sequence);
    let fused = Step { loss: FUSED, ..inputs };
    let recomputation = Recomputation { swiglu: SwigluLevel::InputOnly, ..inputs.recomputation };
    vec![
        ("1 all on the device", device),
        ("2 + model states on the host", states),
        ("3 + full recomputation", recompute),
        ("4 + block inputs on the host", inputs),
        ("5 + fused loss", fused),
        ("6 + SwiGLU input-only", Step { recomputation, ..fused }),
    ]
}

/// The parts of the peak, the temporaries split by what they are; and the largest that logits, activations and the
/// optimizer each take at any moment.
fn terms(model: &Decoder, plan: &Step) -> Result<Vec<Metric>, Error> {
    let predicted = memory(model, plan)?;
    let peak = predicted.peak();
    let one_block = if matches!(peak.moment, Moment::Backward(_)) { predicted.block_backward } else { 0 };
    let states = ["parameters", "master weights", "optimizer state", "gradients"];
    let bytes = |name: &str, bytes: u64| Metric::exact(name, "B", bytes as f64);
    let mut total = bytes("peak_bytes", peak.total);
    total.note = Some(format!("at the {}", peak.moment));
    Ok(vec![
        bytes("model_states_bytes", states.map(|part| peak.bytes(part)).into_iter().sum()),
        bytes("in_transfer_bytes", peak.bytes("temporaries") - one_block),
        bytes("activations_bytes", peak.bytes("activations")),
        bytes("logits_and_loss_bytes", peak.bytes("logits and loss")),
        bytes("one_block_bytes", one_block),
        total,
        bytes("host_bytes", predicted.host_bytes),
        bytes("largest_logits_bytes", predicted.largest("logits and loss")),
        bytes("largest_activations_bytes", largest_of_the_blocks(&predicted)),
        bytes("largest_optimizer_bytes", optimizer(&predicted)),
    ])
}

/// Activations with what exists for a moment in a block's backward, at the moment when they are largest together.
fn largest_of_the_blocks(memory: &Memory) -> u64 {
    let before_the_step = &memory.moments[..4];
    let bytes =
        before_the_step.iter().map(|moment| moment.bytes("activations") + moment.bytes("temporaries"));
    bytes.max().unwrap_or(0)
}

/// Master weights, state, and the step's own.
fn optimizer(memory: &Memory) -> u64 {
    ["master weights", "optimizer state", "temporaries"]
        .map(|part| memory.moments[4].bytes(part))
        .iter()
        .sum()
}

/// The assignment's second profile: four sequences of 20480 tokens on two GPUs, by what each rank has of them.
fn two_gpus(model: &Decoder) -> Result<Vec<(Case, Vec<Metric>)>, Error> {
    const RANKS: u64 = 2;
    const TILE: u64 = 1024;
    let all = Workload { batch: 4, sequence: 20_480 };
    let recipe = Recipe::BF16_MASTER;
    let bytes = |name: &str, bytes: u64| Metric::exact(name, "B", bytes as f64);
    let case = |ranks: &str, loss: &str| {
        Case::new().with("shows", "two GPUs").with("ranks_have", ranks).with("loss", loss)
    };
    let [whole, half] = [1, RANKS].map(|ranks| rank_bytes(model, all, &recipe, TILE, ranks));
    let (whole, half) = (whole?, half?);
    let mut rows = Vec::new();
    for (ranks, work, stage, devices) in [
        ("one rank: all sequences", all, ZeroStage::Zero, 1),
        (
            "data parallel: half of the sequences",
            Workload { batch: all.batch / RANKS, ..all },
            ZeroStage::Three,
            RANKS,
        ),
    ] {
        for loss in [Loss::Eager, FUSED] {
            let plan = Step { work, loss, stage, devices, ..assignment(all.sequence) };
            let predicted = memory(model, &plan)?;
            let metrics = vec![
                bytes("logits_and_loss_bytes", total(&logits::peak(model, work, &recipe, loss, None)?)?),
                bytes("sent_for_the_loss_bytes", ring_sends(whole.matrix_gradient, devices)?),
                bytes("peak_bytes", predicted.peak().total),
            ];
            rows.push((case(ranks, if loss == Loss::Eager { "eager" } else { "fused" }), metrics));
        }
    }
    let metrics = vec![
        bytes("logits_and_loss_bytes", half.tile + half.accumulator + half.hidden_gradient),
        bytes("statistics_bytes", half.statistics),
        bytes("output_matrix_bytes", half.matrix + half.matrix_gradient),
        bytes("sent_for_the_loss_bytes", ring_sends(half.reduced()?, RANKS)?),
        Metric::not_measured("peak_bytes", "B", "only the loss is divided here"),
    ];
    rows.push((case("vocabulary parallel: half of the output matrix", "fused"), metrics));
    Ok(rows)
}

/// Names, formats and places of the model states.
const STATES: [(&str, Recipe, OnHost); 4] = [
    ("on the device", Recipe::BF16_MASTER, ON_DEVICE),
    ("on the device, all in bf16", Recipe::BF16, ON_DEVICE),
    ("optimizer on the host", Recipe::BF16_MASTER, OnHost { optimizer: true, ..ON_DEVICE }),
    ("all on the host", Recipe::BF16_MASTER, ALL_STATES),
];

/// All combinations of the techniques: their names, and the plan for one token.
fn combinations() -> Result<Vec<(Case, Step)>, Error> {
    let mut all = Vec::new();
    for (states, recipe, host) in STATES {
        for (checkpointing, checkpoint, block_inputs) in [
            ("none", Recompute::None, false),
            ("full", Recompute::Full, false),
            ("full, inputs on the host", Recompute::Full, true),
        ] {
            for loss in Loss::NAMES {
                for swiglu in SwigluLevel::ALL {
                    let case = Case::new()
                        .with("shows", "longest")
                        .with("states", states)
                        .with("checkpointing", checkpointing)
                        .with("loss", loss)
                        .with("swiglu", swiglu.name());
                    let plan = Step {
                        work: Workload { batch: 1, sequence: 1 },
                        recipe,
                        // A list of tensors at once would need another 16 GB of the device.
                        fused_optimizer: true,
                        recomputation: Recomputation { checkpoint, swiglu, ..Recomputation::default() },
                        loss: Loss::from_name(loss, 1024)?,
                        host: OnHost { block_inputs, ..host },
                        ..Step::default()
                    };
                    all.push((case, plan));
                }
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment() -> Environment {
        Environment::detect("cpu", None)
    }

    fn value(records: &[Record], metric: &str, case: &[(&str, &str)]) -> Option<f64> {
        let is_case = |record: &&Record| {
            record.metric.name == metric
                && case.iter().all(|(key, value)| {
                    record.case.get(key).and_then(|actual| actual.as_str()) == Some(*value)
                })
        };
        let mut matching = records.iter().filter(is_case);
        let one = matching.next().expect("a record of the case");
        assert!(matching.next().is_none(), "{case:?} is not one case");
        one.metric.value
    }

    #[test]
    fn every_step_of_the_series_takes_less() {
        let records = long_context(&environment()).unwrap();
        for (tokens, label) in SEQUENCES {
            let mut last = f64::INFINITY;
            for (step, _) in series(tokens) {
                let case = [("sequence", label), ("step", step)];
                let peak = value(&records, "peak_bytes", &case).unwrap();
                assert!(peak < last, "{label} {step}: {peak} after {last}");
                last = peak;
                let terms = ["model_states", "in_transfer", "activations", "logits_and_loss", "one_block"];
                let sum: f64 =
                    terms.iter().map(|term| value(&records, &format!("{term}_bytes"), &case).unwrap()).sum();
                assert_eq!(sum, peak);
            }
        }
    }

    /// The published peaks are of another program, with buckets of its own: ours has to be near, not equal.
    #[test]
    fn published_peaks_are_met_within_a_fifth() {
        let records = long_context(&environment()).unwrap();
        let ratios: Vec<f64> = records
            .iter()
            .filter(|record| record.metric.name == "predicted_over_published")
            .filter_map(|record| record.metric.value)
            .collect();
        assert_eq!(ratios.len(), PUBLISHED.len());
        assert!(ratios.iter().all(|ratio| (0.8..1.2).contains(ratio)), "{ratios:?}");
    }

    #[test]
    fn model_states_in_16_bytes_do_not_fit_the_card() {
        let records = long_context(&environment()).unwrap();
        for (case, plan) in combinations().unwrap() {
            let record = records.iter().find(|record| record.case == case).unwrap();
            let fits = plan.recipe == Recipe::BF16 || plan.host.optimizer;
            assert_eq!(record.metric.value.is_some(), fits, "{case:?}");
        }
    }
}
