//! Records and a spec with every kind of view, small enough that their renderings can be read in a test.

// Each test program takes what it needs of these.
#![allow(dead_code)]

use report::{Case, Environment, Metric, Record, Specs};

/// A machine that never changes.
pub(crate) fn environment() -> Environment {
    Environment {
        device: "cpu".into(),
        cpu: "Test CPU".into(),
        threads: 2,
        memory_bytes: 8 << 30,
        torch: Some("2.11.0".into()),
        packages: std::collections::BTreeMap::new(),
        beside: None,
        implementations: None,
        scale: None,
        revision: "abc1234".into(),
        unix_time: 1_795_248_000,
    }
}

pub(crate) fn record(experiment: &str, case: Case, metric: Metric) -> Record {
    Record { experiment: experiment.into(), case, metric, environment: environment() }
}

/// Two batches at two levels; the larger batch does not fit at the level that keeps everything.
pub(crate) fn swiglu() -> Vec<Record> {
    let mib = 1024.0 * 1024.0;
    let mut records = Vec::new();
    for (batch, level, seconds, peak) in [
        (1, "SaveAll", [0.100, 0.104, 0.102], Some(400.0)),
        (1, "InputOnly", [0.128, 0.131, 0.126], Some(250.0)),
        (8, "SaveAll", [0.0; 3], None),
        (8, "InputOnly", [0.990, 1.010, 1.000], Some(1536.0)),
    ] {
        let case = Case::new().with("batch", batch).with("level", level);
        let (time, peak) = match peak {
            Some(peak) => (
                Metric::of_samples("backward_seconds", "s", &seconds),
                Metric::exact("peak_bytes", "B", peak * mib),
            ),
            None => (
                Metric::not_measured("backward_seconds", "s", "needs 12 GiB"),
                Metric::not_measured("peak_bytes", "B", "needs 12 GiB"),
            ),
        };
        records.push(record("swiglu", case.clone(), time));
        records.push(record("swiglu", case, peak));
    }
    records
}

/// Three rounds of ours and theirs; ours is 5 % faster in each, on a machine that gets slower.
pub(crate) fn rounds() -> Vec<Record> {
    let mut records = Vec::new();
    for round in 0..3 {
        for (name, seconds) in [("frugal", 1.9), ("pytorch", 2.0)] {
            let case = Case::new().with("impl", name).with("batch", 8).with("round", round);
            let slower = 1.0 + f64::from(round);
            records.push(record("swiglu-time", case, Metric::exact("step_seconds", "s", seconds * slower)));
        }
    }
    records
}

pub(crate) fn specs() -> Specs {
    toml::from_str(
        r#"
        [[experiment]]
        name = "swiglu"
        title = "Keep or recompute"
        about = "What each **level** costs."
        package = "swiglu-ckpt"

        [[experiment.table]]
        title = "Time and memory"
        rows = ["batch", "level"]
        columns = ["backward_seconds", "peak_bytes"]

        [[experiment.plot]]
        name = "pareto"
        title = "Time against memory"
        kind = "scatter"
        x = "peak_bytes"
        y = "backward_seconds"
        series = "level"
        pareto = true

        [[experiment.finding]]
        per = ["batch"]
        of = { level = "InputOnly" }
        against = { level = "SaveAll" }
        text = "{per}: {level} needs {less:peak_bytes} memory for {more:backward_seconds} time, {of:peak_bytes} against {against:peak_bytes} ({ratio:peak_bytes})"

        [[comparison]]
        name = "swiglu-time"
        title = "Against PyTorch"
        about = "In turns."
        package = "swiglu-ckpt"
        peer = "swiglu.py"
        rounds = 3

        [[comparison.ratio]]
        metric = "step_seconds"
        ours = { impl = "frugal" }
        theirs = { impl = "pytorch" }
        as = "step_time_ratio"
        per = ["batch"]

        [[claim]]
        name = "swiglu/time"
        what = "time against eager"
        experiment = "swiglu-time"
        metric = "step_time_ratio"
        op = "<="
        limit = 1.0
        run = "cargo xtask compare"

        [[claim]]
        name = "swiglu/peak"
        what = "peak of the smallest level"
        experiment = "swiglu"
        metric = "peak_bytes"
        case = { level = "InputOnly" }
        op = "<="
        limit = 1073741824
        run = "cargo xtask run-all --only swiglu"

        [[claim]]
        name = "swiglu/save-all-peak"
        what = "peak of the level that keeps everything"
        experiment = "swiglu"
        metric = "peak_bytes"
        case = { level = "SaveAll" }
        op = "<="
        limit = 1073741824
        run = "cargo xtask run-all --only swiglu"
        "#,
    )
    .expect("the spec of the tests is valid")
}
