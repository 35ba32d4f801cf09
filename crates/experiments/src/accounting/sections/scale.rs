//! Predicts training steps on 8 to 100,000 GPUs: the errors against published figures, step time and MFU with the time that failures cost,
//! and the tokens per GPU that hide the transfers of ZeRO-3.

use accounting::decoder_flops::Workload;
use accounting::hardware;
use accounting::memory::recipe::Recipe;
use accounting::quantity::grouped;
use accounting::scale::{
    Gpus, LLAMA_3_FAILURES, Network, Parallelism, Run, critical_tokens, direct_bytes_over_ring,
};
use accounting::{Decoder, Dtype, Error, presets};
use report::{Case, Environment, Metric, Record};

use super::record;

const EXPERIMENT: &str = "accounting-scale";
/// Tokens of a sequence.
const SEQUENCE: u64 = 8192;
/// Bytes per second that a 400 Gb/s link reaches.
const LINK: f64 = 46e9;
/// Bytes per second of NVLink within a node of 8 GPUs, and of its eight links to other nodes.
pub(super) const H100: Network =
    Network { node: 8, local: 380e9, between: 8.0 * LINK, latency: 10e-6, direct: false };
/// Published tokens per second and GPU of Llama-3.1-8B with FSDP on 8 H100: eager, with torch.compile, and with fp8 products too.
const CALIBRATION: [(&str, f64); 3] = [("eager", 5762.0), ("torch.compile", 6667.0), ("fp8", 8532.0)];
/// The share of the forward that selective recomputation runs again: torchtitan keeps the results of every second product.
const SELECTIVE: f64 = 0.5;

/// A published training step.
#[derive(Clone, Copy)]
struct Published {
    /// The source's description.
    what: &'static str,
    /// A name in [`CALIBRATION`].
    program: &'static str,
    /// A preset.
    model: &'static str,
    /// Sequences per rank.
    sequences: u64,
    /// The share of the forward that backward runs again.
    recomputed: f64,
    /// All GPUs; those that divide the weights (FSDP); those that divide the layers (TP · PP): see [`Parallelism`].
    gpus: [u64; 3],
    /// The share of the time in which the pipeline is empty ([`bubble`]).
    bubble: f64,
    /// Published tokens per second and GPU.
    rate: f64,
}

/// The share of the time in which a pipeline of `ranks` is empty, each with so many of the model's stages, for a step of `micro_batches`
/// (Narayanan et al., arXiv:2104.04473): (p − 1)/(v·m + p − 1).
const fn bubble(ranks: u32, stages: u32, micro_batches: u32) -> f64 {
    let empty = (ranks - 1) as f64;
    empty / ((stages * micro_batches) as f64 + empty)
}

/// Numbers of GPUs of the predicted steps.
const COUNTS: [u64; 9] = [8, 64, 512, 2048, 4096, 8192, 16_384, 32_768, 100_000];

/// Micro-batches of a step of torchtitan over a pipeline of 8 ranks: as many as ranks, its default
/// (`pipeline_parallel_microbatches`), of 4 of the 32 sequences each.
const TITAN_MICRO_BATCHES: u32 = 8;

const TITAN_8B: Published = Published {
    what: "8B on 128 GPUs, FSDP",
    program: "eager",
    model: "llama-3-8b",
    sequences: 2,
    recomputed: SELECTIVE,
    gpus: [128, 128, 1],
    bubble: 0.0,
    rate: 5605.0,
};
const TITAN_405B: Published = Published {
    what: "405B on 512 GPUs, FSDP 8 × TP 8 × PP 8, fp8, 1F1B",
    program: "fp8",
    model: "llama-3.1-405b",
    sequences: 32,
    recomputed: 1.0,
    gpus: [512, 8, 64],
    bubble: bubble(8, 1, TITAN_MICRO_BATCHES),
    rate: 100.0,
};
const TITAN_70B: Published = Published {
    what: "70B on 256 GPUs, FSDP 32 × TP 8, fp8",
    program: "fp8",
    model: "llama-3-70b",
    sequences: 16,
    recomputed: 1.0,
    gpus: [256, 32, 8],
    bubble: 0.0,
    rate: 829.0,
};
const TITAN: [Published; 7] = [
    TITAN_8B,
    Published { what: "8B on 128 GPUs, FSDP, fp8", program: "fp8", rate: 8380.0, ..TITAN_8B },
    Published {
        what: "8B on 128 GPUs, FSDP, torch.compile",
        program: "torch.compile",
        rate: 6514.0,
        ..TITAN_8B
    },
    TITAN_70B,
    Published { what: "70B on 256 GPUs, FSDP 32 × asynchronous TP 8, fp8", rate: 876.0, ..TITAN_70B },
    TITAN_405B,
    Published {
        what: "405B on 512 GPUs, FSDP 8 × TP 8 × PP 8, fp8, interleaved",
        bubble: bubble(8, 2, TITAN_MICRO_BATCHES),
        rate: 128.0,
        ..TITAN_405B
    },
];

/// Returns the run of a model in bf16 weights and fp32 gradients.
fn run(
    model: &Decoder,
    sequences: u64,
    recomputed: f64,
    [gpus, shard, model_parallel]: [u64; 3],
    bubble: f64,
) -> Run<'_> {
    Run {
        model,
        work: Workload { batch: sequences, sequence: SEQUENCE },
        recomputed,
        weights: Dtype::Bf16,
        gradients: Dtype::Fp32,
        parallelism: Parallelism { gpus, shard, model: model_parallel, bubble },
    }
}

/// Returns H100s whose FLOP/s reproduce a published rate of [`CALIBRATION`].
fn calibrated(program: &str) -> Result<Gpus, Error> {
    let peak = hardware::find("h100")?.bf16;
    let model = presets::find("llama-3-8b")?;
    let published = CALIBRATION.iter().find(|(name, _)| *name == program).map_or(f64::NAN, |row| row.1);
    run(&model, 2, SELECTIVE, [8, 8, 1], 0.0).calibrate(&Gpus { peak, flops: peak, network: H100 }, published)
}

/// Returns all records of the experiment.
pub(crate) fn scale(environment: &Environment) -> Result<Vec<Record>, Error> {
    let mut figures = published()?;
    figures.extend(steps()?);
    figures.extend(critical()?);
    Ok(figures.into_iter().map(|(case, metric)| record(EXPERIMENT, &case, metric, environment)).collect())
}

type Figures = Vec<(Case, Metric)>;

/// Returns published figures, their predictions, and the errors of the predictions.
fn published() -> Result<Figures, Error> {
    let mut figures = Vec::new();
    let mut add = |kind: &str, what: &str, source: &str, unit: &str, value: f64, predicted: f64| {
        let case = Case::new()
            .with("shows", "published")
            .with("kind", kind)
            .with("what", what)
            .with("source", source);
        figures.push((case.clone(), Metric::exact("published", unit, value)));
        figures.push((case.clone(), Metric::exact("predicted", unit, predicted)));
        figures.push((case.clone(), Metric::exact("distance", "%", 100.0 * (predicted / value - 1.0))));
        figures.push((case, Metric::exact("relative_error", "ratio", (predicted / value - 1.0).abs())));
    };
    const TITAN_SOURCE: &str = "torchtitan, December 2024";
    for Published { what, program, model, sequences, recomputed, gpus, bubble, rate } in TITAN {
        let model = presets::find(model)?;
        let predicted =
            run(&model, sequences, recomputed, gpus, bubble).tokens_per_second(&calibrated(program)?)?;
        add("tokens/s", what, TITAN_SOURCE, "tokens/s", rate, predicted);
    }
    // Llama 3's pre-training (table 4), in bf16 without recomputation: TP 8 × PP 16, 32 and 16 sequences of each data-parallel rank, a
    // micro-batch of one. The interleaved stages of a rank are not published: 8, of one layer each, are assumed.
    let (model, gpus) = (presets::find("llama-3.1-405b")?, calibrated("torch.compile")?);
    for (count, sequences, published) in [(8192, 32, 43.0), (16_384, 16, 41.0)] {
        let share = [count, count / 128, 128];
        let run =
            run(&model, sequences, 0.0, share, bubble(16, 8, u32::try_from(sequences).unwrap_or(u32::MAX)));
        let what = format!("405B on {} GPUs, TP 8 × PP 16, bf16", grouped(count.into()));
        add("utilization", &what, "arXiv:2407.21783", "%", published, 100.0 * run.utilization(&gpus)?);
    }
    // torchtitan publishes the peak memory of a GPU in GiB, among 8 and among 128. The difference is the shard of the weights, gradients and
    // moments in fp32: activations take as much on 8 GPUs as on 128.
    let model = presets::find("llama-3-8b")?;
    let states = |gpus| run(&model, 2, SELECTIVE, [gpus, gpus, 1], 0.0).state_bytes(&Recipe::FP32);
    let saved = states(8)? - states(128)?;
    let gib = f64::from(1u32 << 30);
    add("bytes", "8B, memory less on 128 GPUs than on 8", TITAN_SOURCE, "B", (82.4 - 67.0) * gib, saved);
    add("bytes", "the same with torch.compile", TITAN_SOURCE, "B", (77.0 - 62.0) * gib, saved);
    let effective = |gpus| 100.0 * LLAMA_3_FAILURES.effective(gpus);
    add("effective", "Llama 3 on 16,384 GPUs: more than", "arXiv:2407.21783", "%", 90.0, effective(16_384));
    add("effective", "about 100,000 GPUs, full restarts", "arXiv:2602.00277", "%", 44.0, effective(100_000));
    Ok(figures)
}

/// Returns predicted steps of Llama-3-8B and 70B by the number of GPUs, with a fixed batch and with a fixed number of tokens per GPU.
fn steps() -> Result<Figures, Error> {
    let gpus = calibrated("torch.compile")?;
    let mut figures = Vec::new();
    for name in ["llama-3-8b", "llama-3-70b"] {
        let model = presets::find(name)?;
        for count in COUNTS {
            for (division, shard) in [("all GPUs", count), ("the GPUs of a node", 8)] {
                for (batch, tokens) in
                    [("16 Mi tokens", (1 << 24) / count), ("8 Ki tokens of each GPU", SEQUENCE)]
                {
                    // Leave out fewer than 128 tokens per GPU, and more than 64 Ki, which would be several micro-batches. Shards of a
                    // node are shown for the 8B model alone, on several nodes.
                    if !(128..=65_536).contains(&tokens)
                        || (division != "all GPUs" && (count == 8 || name != "llama-3-8b"))
                    {
                        continue;
                    }
                    let sequence = tokens.min(SEQUENCE);
                    let full = run(&model, tokens / sequence, SELECTIVE, [count, shard, 1], 0.0);
                    let short = Run { work: Workload { sequence, ..full.work }, ..full };
                    let (step, effective) = (short.step(&gpus)?, LLAMA_3_FAILURES.effective(count));
                    let mfu = short.utilization(&gpus)?;
                    let case = Case::new()
                        .with("shows", "steps")
                        .with("model", name)
                        .with("batch", batch)
                        .with("divided_among", division)
                        .with("gpus", count)
                        .with("bound_by", step.bound(effective).name());
                    for metric in [
                        Metric::exact("tokens_per_gpu", "tokens", tokens as f64),
                        Metric::exact("step_seconds", "s", step.seconds()),
                        Metric::exact("exposed_share", "ratio", step.exposed() / step.seconds()),
                        Metric::exact("mfu", "ratio", mfu),
                        Metric::exact("effective_time", "ratio", effective),
                        Metric::exact("effective_mfu", "ratio", mfu * effective),
                        Metric::exact("state_bytes", "B", short.state_bytes(&Recipe::FP32)?),
                    ] {
                        figures.push((case.clone(), metric));
                    }
                }
            }
        }
    }
    Ok(figures)
}

/// Returns, for each network, the smallest number of tokens per GPU that hides the transfers, and the number of GPUs among which a batch of
/// 16 Mi tokens gives each so many.
fn critical() -> Result<Figures, Error> {
    let gpus = calibrated("torch.compile")?;
    // The GPUs of the other rows fill many nodes of 8.
    let links = [
        ("NVLink, one node", H100.local, H100.node),
        ("8 × 400 Gb/s", 8.0 * LINK, u64::MAX),
        ("1 × 400 Gb/s", LINK, u64::MAX),
        ("1 × 100 Gb/s", LINK / 4.0, u64::MAX),
        ("1 × 10 Gb/s", LINK / 40.0, u64::MAX),
    ];
    let mut figures = Vec::new();
    for (name, rate, ranks) in links {
        let case = Case::new().with("shows", "critical").with("network", name);
        let tokens = critical_tokens(2.0, 4.0, gpus.flops, rate);
        figures.push((case.clone(), Metric::exact("critical_tokens", "tokens", tokens)));
        let ordered = 4.0 * direct_bytes_over_ring(ranks, H100.node);
        let tokens_of_ordered = critical_tokens(2.0, ordered, gpus.flops, rate);
        figures.push((case.clone(), Metric::exact("ordered_critical_tokens", "tokens", tokens_of_ordered)));
        let most = (f64::from(1 << 24) / tokens).floor();
        figures.push((case, Metric::exact("useful_gpus", "count", most)));
    }
    Ok(figures)
}
