//! Steps over many GPUs, on paper: rows that others have published, tables up to 131 072 GPUs, and effective time under failures.

use accounting::decoder_flops::Workload;
use accounting::hardware;
use accounting::memory::recipe::Recipe;
use accounting::scale::{Gpus, LLAMA_3_FAILURES, Network, Parallelism, Run, critical_tokens};
use accounting::{Decoder, Dtype, Error, presets};
use report::{Case, Environment, Metric, Record};

use super::record;

const EXPERIMENT: &str = "accounting-scale";
const SEQUENCE: u64 = 8192;
/// The rate that a 400 Gb/s link reaches.
const LINK: f64 = 46e9;
/// Rates of NVLink and of eight links to a node; the FLOP/s are calibrated.
const H100: Network = Network { node: 8, local: 380e9, between: 8.0 * LINK, latency: 10e-6 };
/// Tokens per second and GPU of Llama-3.1-8B on 8 H100: FSDP with torch.compile, and with fp8 products too.
const CALIBRATION: [(&str, f64); 3] = [("eager", 5762.0), ("torch.compile", 6667.0), ("fp8", 8532.0)];
/// torchtitan keeps the results of every second product.
const SELECTIVE: f64 = 0.5;

/// A published row of tokens per second and GPU: the source's words, the program, model, sequences of a rank, forwards recomputed, GPUs,
/// those of a shard, those of a model, the share of the pipeline that is empty, the published value.
type Row = (&'static str, &'static str, &'static str, u64, f64, [u64; 3], f64, f64);

/// Numbers of GPUs.
const COUNTS: [u64; 9] = [8, 64, 512, 2048, 4096, 8192, 16_384, 32_768, 100_000];

/// Stages of the pipeline, and micro-batches; interleaved stages are empty for half as long.
const EMPTY: f64 = 7.0 / (32.0 + 7.0);
const EMPTY_INTERLEAVED: f64 = 7.0 / (2.0 * 32.0 + 7.0);

const TITAN: [Row; 5] = [
    ("8B on 128 GPUs, FSDP", "eager", "llama-3-8b", 2, SELECTIVE, [128, 128, 1], 0.0, 5605.0),
    (
        "8B on 128 GPUs, FSDP, torch.compile",
        "torch.compile",
        "llama-3-8b",
        2,
        SELECTIVE,
        [128, 128, 1],
        0.0,
        6514.0,
    ),
    ("70B on 256 GPUs, FSDP 32 × TP 8, fp8", "fp8", "llama-3-70b", 16, 1.0, [256, 32, 8], 0.0, 876.0),
    (
        "405B on 512 GPUs, FSDP 8 × TP 8 × PP 8, fp8, 1F1B",
        "fp8",
        "llama-3.1-405b",
        32,
        1.0,
        [512, 8, 64],
        EMPTY,
        100.0,
    ),
    (
        "405B on 512 GPUs, FSDP 8 × TP 8 × PP 8, fp8, interleaved",
        "fp8",
        "llama-3.1-405b",
        32,
        1.0,
        [512, 8, 64],
        EMPTY_INTERLEAVED,
        128.0,
    ),
];

fn run(
    model: &Decoder,
    sequences: u64,
    recomputed: f64,
    [gpus, shard, share]: [u64; 3],
    bubble: f64,
) -> Run<'_> {
    Run {
        model,
        work: Workload { batch: sequences, sequence: SEQUENCE },
        recomputed,
        weights: Dtype::Bf16,
        gradients: Dtype::Fp32,
        parallelism: Parallelism { gpus, shard, model: share, bubble },
    }
}

/// H100s at the rate of one of the calibrations.
fn calibrated(program: &str) -> Result<Gpus, Error> {
    let peak = hardware::find("h100")?.bf16;
    let model = presets::find("llama-3-8b")?;
    let published = CALIBRATION.iter().find(|(name, _)| *name == program).map_or(f64::NAN, |row| row.1);
    run(&model, 2, SELECTIVE, [8, 8, 1], 0.0).calibrate(&Gpus { peak, flops: peak, network: H100 }, published)
}

/// Everything that the experiment shows.
pub(crate) fn scale(environment: &Environment) -> Result<Vec<Record>, Error> {
    let mut figures = published()?;
    figures.extend(steps()?);
    figures.extend(critical()?);
    Ok(figures.into_iter().map(|(case, metric)| record(EXPERIMENT, &case, metric, environment)).collect())
}

type Figures = Vec<(Case, Metric)>;

/// Published figures beside the prediction, and the relative distance.
fn published() -> Result<Figures, Error> {
    let mut figures = Vec::new();
    let mut put = |kind: &str, what: &str, source: &str, unit: &str, value: f64, ours: f64| {
        let case = Case::new()
            .with("shows", "published")
            .with("kind", kind)
            .with("what", what)
            .with("source", source);
        figures.push((case.clone(), Metric::exact("published", unit, value)));
        figures.push((case.clone(), Metric::exact("predicted", unit, ours)));
        figures.push((case.clone(), Metric::exact("distance", "%", 100.0 * (ours / value - 1.0))));
        figures.push((case, Metric::exact("relative_error", "ratio", (ours / value - 1.0).abs())));
    };
    const TITAN_SOURCE: &str = "torchtitan, December 2024";
    for (what, program, model, sequences, recomputed, gpus, bubble, value) in TITAN {
        let model = presets::find(model)?;
        let ours =
            run(&model, sequences, recomputed, gpus, bubble).tokens_per_second(&calibrated(program)?)?;
        put("tokens/s", what, TITAN_SOURCE, "tokens/s", value, ours);
    }
    // fp32 weights, gradients and moments, all divided; activations are the same on 8 and on 128 GPUs.
    let model = presets::find("llama-3-8b")?;
    let states = |gpus| run(&model, 2, SELECTIVE, [gpus, gpus, 1], 0.0).state_bytes(&Recipe::FP32);
    let less = states(8)? - states(128)?;
    let gib = f64::from(1u32 << 30);
    put("bytes", "8B, memory less on 128 GPUs than on 8", TITAN_SOURCE, "B", (82.4 - 67.0) * gib, less);
    put("bytes", "the same with torch.compile", TITAN_SOURCE, "B", (77.0 - 62.0) * gib, less);
    let effective = |gpus| 100.0 * LLAMA_3_FAILURES.effective(gpus);
    put("effective", "Llama 3 on 16,384 GPUs: more than", "arXiv:2407.21783", "%", 90.0, effective(16_384));
    put("effective", "about 100,000 GPUs, full restarts", "arXiv:2602.00277", "%", 44.0, effective(100_000));
    Ok(figures)
}

/// Llama-3-8B, 70B and 405B by the number of GPUs, with a fixed batch and with fixed tokens of a GPU.
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
                    // Without a split sequence a GPU has at least a part of one; more than 64 Ki tokens are several micro-batches.
                    if !(128..=65_536).contains(&tokens)
                        || (division != "all GPUs" && (count == 8 || name != "llama-3-8b"))
                    {
                        continue;
                    }
                    let sequence = tokens.min(SEQUENCE);
                    let one = run(&model, tokens / sequence, SELECTIVE, [count, shard, 1], 0.0);
                    let one = Run { work: Workload { batch: tokens / sequence, sequence }, ..one };
                    let (step, effective) = (one.step(&gpus)?, LLAMA_3_FAILURES.effective(count));
                    let mfu = one.utilization(&gpus)?;
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
                        Metric::exact("state_bytes", "B", one.state_bytes(&Recipe::FP32)?),
                    ] {
                        figures.push((case.clone(), metric));
                    }
                }
            }
        }
    }
    Ok(figures)
}

/// Critical tokens of a GPU by its node's links.
fn critical() -> Result<Figures, Error> {
    let gpus = calibrated("torch.compile")?;
    let links = [
        ("NVLink, one node", H100.local),
        ("8 × 400 Gb/s", 8.0 * LINK),
        ("1 × 400 Gb/s", LINK),
        ("1 × 100 Gb/s", LINK / 4.0),
        ("1 × 10 Gb/s", LINK / 40.0),
    ];
    let mut figures = Vec::new();
    for (name, rate) in links {
        let case = Case::new().with("shows", "critical").with("network", name);
        let tokens = critical_tokens(2.0, 4.0, gpus.flops, rate);
        figures.push((case.clone(), Metric::exact("critical_tokens", "tokens", tokens)));
        let most = (f64::from(1 << 24) / tokens).floor();
        figures.push((case, Metric::exact("useful_gpus", "count", most)));
    }
    Ok(figures)
}
