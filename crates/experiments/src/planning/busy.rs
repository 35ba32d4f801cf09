//! `planning busy`: a training beside a process on every core, under each way in which OpenMP's threads can wait.

use std::sync::atomic::{AtomicBool, Ordering};

use models::DecoderConfig;
use report::cli::Scale;
use report::{Case, Metric};
use runtime::wait_policy::VARIABLES;
use tch::Kind;

use super::sandbox::{Sandbox, median};
use crate::driver::Bench;

/// How threads wait, and the variable that sets it.
type Policy = (&'static str, Option<(&'static str, &'static str)>);

const POLICIES: [Policy; 3] = [
    ("Frugal's", None),
    ("OpenMP's default", Some(("GOMP_SPINCOUNT", "300000"))),
    ("sleep at once", Some(("OMP_WAIT_POLICY", "passive"))),
];

#[derive(clap::Args)]
pub(crate) struct Busy {
    /// Iterations that threads spin, in place of the policies
    #[arg(long, value_delimiter = ',')]
    spins: Vec<String>,
}

/// Medians over the rounds of a step's mean time.
struct Measured {
    quiet: Vec<f64>,
    busy: Vec<f64>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Busy) -> anyhow::Result<()> {
    let (steps, rounds) = bench.sized([(5, 1), (20, 3), (20, 5), (20, 5)]);
    let spins: Vec<(&str, Option<(&str, &str)>)> =
        arguments.spins.iter().map(|spins| (&**spins, Some(("GOMP_SPINCOUNT", &**spins)))).collect();
    let policies: &[(&str, Option<(&str, &str)>)] = if spins.is_empty() { &POLICIES } else { &spins };
    let sandbox = Sandbox::new()?;
    let config = match bench.scale {
        Scale::Smoke => DecoderConfig::llama(4096, 64, 176, 2, 2),
        _ => DecoderConfig::llama(4096, 256, 704, 6, 4),
    };
    sandbox.write_model("model", &config, Kind::Float)?;
    sandbox.write_rows("rows.jsonl", 16, 64, bench.seed)?;
    let training = |ranks: usize| {
        let mut words: Vec<String> = Vec::new();
        if ranks > 1 {
            words.extend(["launch", "-n", &ranks.to_string(), "--"].map(str::to_owned));
        }
        let steps = steps.to_string();
        let flags = ["--model", "model", "--data", "rows.jsonl", "--method", "full", "--batch-size", "2"];
        let loop_flags = ["--accumulation", "2", "--steps", &steps, "--held-out", "0", "--samples", "0"];
        words.push("finetune".to_owned());
        words.extend(flags.into_iter().chain(loop_flags).chain(["--log-every", "1"]).map(str::to_owned));
        words
    };
    let ranks = [1, 2];
    bench.expect(rounds * ranks.len() * policies.len() * 2);
    for ranks in ranks {
        let words = training(ranks);
        let mut measured: Vec<Measured> =
            policies.iter().map(|_| Measured { quiet: Vec::new(), busy: Vec::new() }).collect();
        for _ in 0..rounds {
            for ((name, variable), measured) in policies.iter().zip(&mut measured) {
                for is_busy in [false, true] {
                    bench.message(&format!("{name}, {}", if is_busy { "busy" } else { "quiet" }));
                    let seconds = || sandbox.mean_step_seconds(&words, &VARIABLES, *variable);
                    if is_busy {
                        measured.busy.push(beside_busy_cores(seconds)?);
                    } else {
                        measured.quiet.push(seconds()?);
                    }
                    bench.step();
                }
            }
        }
        let default = policies.iter().position(|(name, _)| *name == POLICIES[1].0);
        let reference = default.map(|default| median(&mut measured[default].quiet.clone()));
        for ((name, _), mut measured) in policies.iter().zip(measured) {
            let case = Case::new().with("ranks", ranks).with("threads_wait", *name);
            let (quiet, busy) = (median(&mut measured.quiet), median(&mut measured.busy));
            let mut metrics = vec![
                Metric::exact("quiet_step_seconds", "s", quiet),
                Metric::exact("busy_step_seconds", "s", busy),
                Metric::exact("busy_over_quiet", "ratio", busy / quiet),
            ];
            metrics.extend(
                reference.map(|default| Metric::exact("quiet_over_default", "ratio", quiet / default)),
            );
            bench.put(&case, metrics)?;
        }
    }
    Ok(())
}

/// Runs `work` while a thread of this process keeps each core busy.
fn beside_busy_cores<T>(work: impl FnOnce() -> T) -> T {
    let ends = AtomicBool::new(false);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    std::hint::black_box((0..10_000_u64).fold(0, |sum, at| std::hint::black_box(sum ^ at)));
                }
            });
        }
        let result = work();
        ends.store(true, Ordering::Relaxed);
        result
    })
}
