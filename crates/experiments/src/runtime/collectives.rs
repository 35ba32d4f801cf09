//! Transfers between two processes: this project's messages beside Gloo's own collectives, in turns.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Context;
use report::cli::Scale;
use report::{Case, Metric};
use runtime::collectives::{Division, Group, GroupConfig, Launch, Order, ReduceConfig, Store};
use tch::{Device, Kind, Tensor};

use super::cost::{Figures, Part};
use crate::driver::Bench;

const RANKS: usize = 2;
const ELEMENTS: i64 = 16 << 20;
const SIZE: &str = "64 MiB";
/// How long the processes may take.
const LIMIT: Duration = Duration::from_secs(300);

/// An operation, and the bytes that a rank sends as a share of the whole.
const OPERATIONS: [(&str, f64); 3] = [("all-gather", 0.5), ("reduce-scatter", 0.5), ("all-reduce", 1.0)];

pub(crate) fn parts(_: &Bench) -> Vec<Part> {
    vec![Part { about: "transfers between processes", run: Box::new(transfers) }]
}

fn case(operation: &str) -> Case {
    Case::new().with("operation", operation).with("ranks", RANKS as i64).with("size", SIZE)
}

fn transfers(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    if device != Device::Cpu {
        let metric = || Metric::not_measured("time_ratio", "ratio", "groups connect CPUs");
        return Ok(OPERATIONS.iter().map(|(operation, _)| (case(operation), metric())).collect());
    }
    let rounds = if matches!(scale, Scale::Smoke | Scale::Laptop) { 3 } else { 15 };
    let arguments = ["runtime", "collectives-rank", "--rounds", &rounds.to_string()].map(str::to_owned);
    let lines = crate::processes::run(RANKS, &arguments, LIMIT)?.swap_remove(0);
    let mut samples: BTreeMap<&str, [Vec<f64>; 3]> = BTreeMap::new();
    for line in &lines {
        let [operation, ours, native] = line.split('\t').collect::<Vec<_>>()[..] else { continue };
        let (ours, native): (f64, f64) = (ours.parse()?, native.parse()?);
        let [of_ours, of_native, ratios] = samples.entry(operation).or_default();
        of_ours.push(ours);
        of_native.push(native);
        ratios.push(ours / native);
    }
    let mut figures = Vec::new();
    for (operation, share) in OPERATIONS {
        let [ours, native, ratios] =
            samples.get(operation).with_context(|| format!("rank 0 gave no figures of {operation}"))?;
        let sent = share * 4.0 * ELEMENTS as f64;
        let rates: Vec<f64> = ours.iter().map(|seconds| sent / seconds).collect();
        figures.push((case(operation), Metric::of_samples("seconds", "s", ours)));
        figures.push((case(operation), Metric::of_samples("native_seconds", "s", native)));
        figures.push((case(operation), Metric::of_samples("time_ratio", "ratio", ratios)));
        figures.push((case(operation), Metric::of_samples("rate", "B/s", &rates)));
    }
    Ok(figures)
}

/// Runs `rounds` rounds as a process of the group.
pub(crate) fn rank(rounds: usize) -> anyhow::Result<()> {
    let launch = Launch::from_environment()?.context("this verb is run by `collectives`, as its ranks")?;
    let store = Store::connect(&launch, Duration::from_secs(60))?;
    let group = Group::new(&store, "measured", GroupConfig::default())?;
    let ones = Tensor::f_ones([ELEMENTS], (Kind::Float, Device::Cpu))?;
    let division = Division::even(ELEMENTS, group.size());
    let shard = Tensor::f_ones([division.len(group.rank())], (Kind::Float, Device::Cpu))?;
    let ordered = ReduceConfig::default();
    let native = ReduceConfig { order: Order::Native, ..ordered };
    let once = |operation: &str, ours: bool| -> runtime::Result<()> {
        let options = if ours { ordered } else { native };
        match (operation, ours) {
            ("all-gather", true) => group.all_gather(&ones, division, &shard, operation)?.wait(),
            ("all-gather", false) => group.all_gather_native(&ones, &shard, operation)?.wait(),
            ("reduce-scatter", _) => {
                group.reduce_scatter(&ones, division, &shard, options, operation)?.wait()
            }
            _ => group.all_reduce(&ones, options, operation),
        }
    };
    let seconds = |operation: &str, ours: bool| -> runtime::Result<f64> {
        group.barrier("before")?;
        let start = Instant::now();
        once(operation, ours)?;
        Ok(start.elapsed().as_secs_f64())
    };
    for (operation, _) in OPERATIONS {
        for round in 0..=rounds {
            let first = seconds(operation, round % 2 == 0)?;
            let second = seconds(operation, round % 2 == 1)?;
            let (ours, native) = if round % 2 == 0 { (first, second) } else { (second, first) };
            // The first round touches memory for the first time.
            if round > 0 && group.rank() == 0 {
                writeln!(std::io::stdout(), "{operation}\t{ours:e}\t{native:e}")?;
            }
            // Sums of sums would overflow.
            let _ = ones.shallow_clone().f_fill_(1.0)?;
        }
    }
    group.barrier("end")?;
    Ok(())
}
