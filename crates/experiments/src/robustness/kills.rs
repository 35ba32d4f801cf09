//! `robustness kills`: kill −9 at random instants.
//!
//! A command runs up to five times and is killed at an instant that is uniform over the time that it takes; after each kill its output is
//! inspected. Then it runs to its end, and its results are compared, byte for byte, with those of a run that nobody disturbed.

use std::time::{Duration, Instant};

use anyhow::ensure;
use report::{Case, Metric};

use super::recovery::Recovery;
use super::work::{Sandbox, Work, named};
use crate::driver::Bench;

/// Kills before a command may end.
const IN_A_ROW: usize = 5;

#[derive(clap::Args)]
pub(crate) struct Kills {
    /// Kills of each command [default: by scale]
    #[arg(long)]
    tries: Option<usize>,
    /// Only these commands
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

/// The outcomes of the kills of one command.
#[derive(Debug, Default)]
struct Outcome {
    kills: usize,
    ends: usize,
    recovery: Recovery,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Kills) -> anyhow::Result<()> {
    let tries = arguments.tries.unwrap_or(bench.sized([2, 5, 100, 100]));
    let works = named(&arguments.only, bench.scale)?;
    let sandbox = Sandbox::new()?;
    bench.expect(works.len() * tries);
    let mut random = Uniform(bench.seed ^ 0x2545_f491_4f6c_dd1d);
    for work in works {
        bench.message(work.name);
        let outcome = kill_at_random(&sandbox, &work, tries, &mut random, bench)?;
        let count = |name: &str, count: usize| Metric::exact(name, "", count as f64);
        let mut metrics = vec![count("kills", outcome.kills), count("runs_to_the_end", outcome.ends)];
        metrics.extend(outcome.recovery.metrics());
        bench.put(&Case::new().with("command", work.name), metrics)?;
    }
    Ok(())
}

fn kill_at_random(
    sandbox: &Sandbox,
    work: &Work,
    tries: usize,
    random: &mut Uniform,
    bench: &mut Bench,
) -> anyhow::Result<Outcome> {
    let mut seconds = 0.0;
    let mut expected = None;
    // Twice: the second one has the caches that the tries will have, and shows that the results repeat.
    for out in ["reference", "again"] {
        let start = Instant::now();
        sandbox.succeed(sandbox.command(work, out))?;
        seconds = start.elapsed().as_secs_f64();
        let results = sandbox.results(work, out)?;
        ensure!(
            expected.as_ref().is_none_or(|before| *before == results),
            "two undisturbed runs of {} differ",
            work.name
        );
        expected = Some(results);
        sandbox.remove(out)?;
    }
    let expected = expected.expect("two runs");
    let mut outcome = Outcome::default();
    let note = |what: &str| eprintln!("{}: {what}", work.name);
    while outcome.kills < tries {
        let out = format!("try-{}", outcome.ends);
        let mut in_a_row = 0;
        while in_a_row < IN_A_ROW && outcome.kills < tries {
            let mut child = sandbox.command(work, &out).spawn()?;
            std::thread::sleep(Duration::from_secs_f64(random.next() * seconds));
            if child.try_wait()?.is_some() {
                break;
            }
            child.kill()?;
            child.wait()?;
            if !work.alone {
                wait_for_ranks(&sandbox.output(&out).display().to_string())?;
            }
            outcome.kills += 1;
            in_a_row += 1;
            bench.step();
            outcome.recovery.inspect((sandbox, work), &out, &expected, &note);
        }
        outcome.recovery.run_again((sandbox, work), &out, &expected, &note)?;
        outcome.ends += 1;
    }
    Ok(outcome)
}

/// Waits until no process has the output's path among its arguments: ranks end when their launcher is gone.
fn wait_for_ranks(out: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let running = std::fs::read_dir("/proc")?
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()))
            .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
            .any(|line| String::from_utf8_lossy(&line).contains(out));
        if !running {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "ranks still run 30 s after their launcher was killed");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Numbers that are uniform in [0, 1), by SplitMix64 (Steele, Lea and Flood 2014).
#[derive(Debug)]
struct Uniform(u64);

impl Uniform {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
