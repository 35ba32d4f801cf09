//! Writes a report of made-up records, to look at its layout: `cargo run -p report --example sample -- FOLDER`.
//!
//! The figures follow a simple cost model of a SwiGLU MLP with noise; nothing here was measured.

use std::path::PathBuf;

use report::{Case, Environment, Metric, Record, RunOutcome, RunState, Specs, cli, site};

const LEVELS: [(&str, f64, f64); 6] = [
    ("PyTorch", 4.3, 1.0),
    ("SaveAll", 3.25, 0.97),
    ("SaveGateUp", 2.25, 1.01),
    ("SaveOne", 1.25, 1.10),
    ("InputOnly", 0.25, 1.19),
    ("InputOnlyTiled", 0.05, 1.22),
];

const CONFIGS: [(u64, u64, u64, u64); 10] = [
    (1, 512, 512, 2),
    (4, 256, 768, 1),
    (4, 512, 768, 3),
    (8, 512, 1024, 3),
    (16, 512, 1024, 3),
    (8, 1024, 1024, 3),
    (2, 2048, 1024, 6),
    (1, 4096, 2048, 2),
    (4, 2048, 2048, 4),
    (8, 2048, 4096, 2),
];

fn environment() -> Environment {
    Environment {
        device: "cpu".into(),
        cpu: "Example CPU @ 2.40 GHz".into(),
        threads: 2,
        memory_bytes: 8 << 30,
        torch: Some("2.11.0".into()),
        packages: std::collections::BTreeMap::new(),
        beside: None,
        implementations: None,
        scale: None,
        revision: "c5ea097".into(),
        unix_time: 1_795_248_000,
    }
}

fn records() -> Vec<Record> {
    let mut records = Vec::new();
    let mut noise = 1u64;
    let mut jitter = || {
        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1.0 + ((noise >> 33) as f64 / f64::from(1u32 << 31) - 0.5) * 0.04
    };
    let mut add = |experiment: &str, case: &Case, metric: Metric| {
        records.push(Record {
            experiment: experiment.into(),
            case: case.clone(),
            metric,
            environment: environment(),
        });
    };
    for (batch, sequence, hidden, layers) in CONFIGS {
        let (tokens, wide) = ((batch * sequence) as f64, (4 * hidden) as f64);
        let flops = 6.0 * tokens * hidden as f64 * wide * layers as f64;
        for (level, kept, time) in LEVELS {
            let case = Case::new()
                .with("batch", batch)
                .with("sequence", sequence)
                .with("hidden", hidden)
                .with("layers", layers)
                .with("config", format!("{batch}×{sequence}×{hidden}, {layers} layers"))
                .with("level", level);
            if hidden == 4096 && kept > 3.0 {
                for name in ["forward_seconds", "backward_seconds"] {
                    add("swiglu", &case, Metric::not_measured(name, "s", "needs 11 GiB, this machine has 8"));
                }
                add(
                    "swiglu",
                    &case,
                    Metric::not_measured("peak_bytes", "B", "needs 11 GiB, this machine has 8"),
                );
                continue;
            }
            let forward = flops / 120e9;
            let samples = |middle: f64, jitter: &mut dyn FnMut() -> f64| -> Vec<f64> {
                (0..5).map(|_| middle * jitter()).collect()
            };
            add("swiglu", &case, Metric::of_samples("forward_seconds", "s", &samples(forward, &mut jitter)));
            let backward = forward * (3.0 * time - 1.0);
            add(
                "swiglu",
                &case,
                Metric::of_samples("backward_seconds", "s", &samples(backward, &mut jitter)),
            );
            let weights = 3.0 * hidden as f64 * wide * layers as f64 * 4.0;
            let peak =
                2.0 * weights + tokens * wide * 4.0 * (kept * layers as f64 + 2.0 * kept.clamp(0.2, 1.0));
            add("swiglu", &case, Metric::exact("peak_bytes", "B", peak.round()));
            add("swiglu", &case, Metric::exact("predicted_bytes", "B", (peak * 0.985).round()));
        }
    }
    for (model, parts) in [
        ("gpt2-small", [0.5, 0.5, 1.0, 3.1, 1.2]),
        ("gpt2-medium", [1.4, 1.4, 2.8, 7.2, 1.6]),
        ("Qwen2.5-0.5B", [2.0, 2.0, 4.0, 6.5, 4.9]),
        ("Qwen2.5-7B with a long name", [15.2, 15.2, 30.5, 20.1, 9.8]),
    ] {
        let case = Case::new().with("model", model);
        let names =
            ["parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "logit_bytes"];
        for (name, gib) in names.into_iter().zip(parts) {
            add("accounting", &case, Metric::exact(name, "B", gib * 1024.0 * 1024.0 * 1024.0));
        }
        for days in [1u64, 2, 4, 8, 16] {
            let case = Case::new().with("model", model).with("devices", 64 * days);
            let years = parts[0] * 40.0 / days as f64;
            add("accounting", &case, Metric::exact("training_days", "days", years));
        }
    }
    for (method, ahead) in [("one layer at a time", false), ("ring of 3", true)] {
        for (case, start, end) in offloaded(ahead) {
            let case = Case::new()
                .with("method", method)
                .with("lane", case.0)
                .with("what", case.1)
                .with("layer", case.2);
            add("offload", &case, Metric::exact("start", "s", start));
            add("offload", &case, Metric::exact("end", "s", end));
        }
    }
    for round in 0..5 {
        for (name, level, factor) in [
            ("frugal", "SaveAll", 0.97),
            ("frugal", "SaveOne", 1.13),
            ("frugal", "InputOnly", 1.18),
            ("pytorch", "eager", 1.0),
        ] {
            let case = Case::new().with("impl", name).with("level", level).with("round", round);
            add("swiglu-time", &case, Metric::exact("step_seconds", "s", 2.4 * factor * jitter()));
        }
    }
    records
}

/// Lane, work and layer, start and end of the spans of a step over 12 layers.
type Spans = Vec<((&'static str, &'static str, u64), f64, f64)>;

/// Loads take as long as a forward; a backward takes thrice that, and a gradient leaves behind it.
fn offloaded(ahead: bool) -> Spans {
    const LAYERS: u64 = 12;
    let mut spans = Spans::new();
    let (mut load, mut compute, mut store) = (0.0f64, 0.0f64, 0.0f64);
    let mut done = Vec::new();
    let visits = (0..LAYERS).map(|layer| (layer, "forward", 0.018));
    for (layer, what, seconds) in visits.chain((0..LAYERS).rev().map(|layer| (layer, "backward", 0.054))) {
        let free = if ahead { done.iter().rev().nth(2).copied().unwrap_or(0.0) } else { compute.max(store) };
        let start = load.max(free);
        load = start + 0.0186;
        spans.push((("load", if what == "forward" { "load" } else { "load again" }, layer), start, load));
        let start = compute.max(load);
        compute = start + seconds;
        done.push(compute);
        spans.push((("compute", what, layer), start, compute));
        if what == "backward" {
            let start = store.max(compute);
            store = start + 0.009;
            spans.push((("store", "gradient", layer), start, store));
        }
    }
    spans
}

fn main() -> std::process::ExitCode {
    cli::run(|| {
        let out = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "target/sample-report".into()));
        let specs: Specs = toml::from_str(include_str!("sample.toml"))?;
        let outcome = |experiment: &str, state| RunOutcome { experiment: experiment.into(), state };
        let runs = [
            outcome("swiglu", RunState::Done { seconds: 318.4 }),
            outcome(
                "accounting",
                RunState::Failed { message: "error: cannot read config.json: no such file".into() },
            ),
            outcome("fused-ce", RunState::Skipped { why: "no GPU".into() }),
            outcome("offload", RunState::Done { seconds: 12.0 }),
            outcome("swiglu-time", RunState::Done { seconds: 41.0 }),
        ];
        let written = site::write(&specs, &records(), &runs, &[], &out)?;
        for claim in &written.claims {
            eprintln!("{claim}");
        }
        Ok(())
    })
}
