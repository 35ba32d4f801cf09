//! `robustness soak`: many steps, and what the process holds meanwhile.
//!
//! The kernel's account of the process is read every half second: resident memory, open files, threads, locked pages. Growth is the
//! median over the last tenth of the run less that over the second tenth, when everything has been allocated once.

use std::time::{Duration, Instant};

use anyhow::ensure;
use report::{Case, Metric};

use super::work::{SOAKED, Sandbox, Work};
use crate::driver::Bench;

/// A quantity of what a process holds.
type Quantity = fn(&ResourceUse) -> f64;

/// Quantities that must not grow: the metric, its unit, and the quantity.
const GROWTHS: [(&str, &str, Quantity); 4] = [
    ("resident_growth_bytes", "B", |resources| resources.resident),
    ("locked_growth_bytes", "B", |resources| resources.locked),
    ("open_files_growth", "", |resources| resources.files),
    ("threads_growth", "", |resources| resources.threads),
];

/// Resources that a process holds at one moment.
#[derive(Clone, Copy, Debug)]
struct ResourceUse {
    resident: f64,
    locked: f64,
    files: f64,
    threads: f64,
}

pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let sandbox = Sandbox::new()?;
    let share = bench.sized([1000, 100, 1, 1]);
    let label = |(work, _): &(Work, u64)| work.name.to_owned();
    bench.each(SOAKED, label, |bench, (work, steps)| {
        let steps = steps / share;
        let start = Instant::now();
        let resources = watch(&sandbox, &work, steps)?;
        let case = Case::new().with("command", work.name);
        let mut metrics = vec![
            Metric::exact("steps", "", steps as f64),
            Metric::exact("seconds", "s", start.elapsed().as_secs_f64()),
        ];
        for (name, unit, quantity) in GROWTHS {
            metrics.push(match growth(&resources, quantity) {
                Some(growth) => Metric::exact(name, unit, growth),
                None => Metric::not_measured(name, unit, "the run is too short"),
            });
        }
        metrics.push(Metric::exact(
            "resident_bytes",
            "B",
            resources.last().map_or(0.0, |resources| resources.resident),
        ));
        bench.put(&case, metrics)
    })
}

/// Runs a command of so many steps to its end, and returns what it held every half second.
fn watch(sandbox: &Sandbox, work: &Work, steps: u64) -> anyhow::Result<Vec<ResourceUse>> {
    let mut command = sandbox.command(work, "soaked");
    command.args(["--steps", &steps.to_string()]);
    let mut child = command.spawn()?;
    let mut resources = Vec::new();
    while child.try_wait()?.is_none() {
        resources.extend(now(child.id()));
        std::thread::sleep(Duration::from_millis(500));
    }
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}: {}", work.name, String::from_utf8_lossy(&output.stderr));
    sandbox.remove("soaked")?;
    Ok(resources)
}

/// Reads a process's resources from /proc; `None` when it has ended.
fn now(process: u32) -> Option<ResourceUse> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let field = |name: &str| -> Option<f64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse().ok()
    };
    let files = std::fs::read_dir(format!("/proc/{process}/fd")).ok()?.count();
    Some(ResourceUse {
        resident: field("VmRSS")? * 1024.0,
        locked: field("VmLck")? * 1024.0,
        files: files as f64,
        threads: field("Threads")?,
    })
}

/// The median over the last tenth less that over the second; `None` for fewer than 40 moments.
fn growth(resources: &[ResourceUse], quantity: Quantity) -> Option<f64> {
    if resources.len() < 40 {
        return None;
    }
    let tenth = resources.len() / 10;
    let median = |part: &[ResourceUse]| {
        let mut values: Vec<f64> = part.iter().map(quantity).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Some(median(&resources[resources.len() - tenth..]) - median(&resources[tenth..2 * tenth]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_what_a_leak_makes_and_not_what_the_start_takes() {
        let resources = |resident: f64| ResourceUse { resident, locked: 0.0, files: 3.0, threads: 1.0 };
        let steady: Vec<ResourceUse> = (0..100).map(|at| resources(if at < 5 { 1.0 } else { 9.0 })).collect();
        assert_eq!(growth(&steady, |resources| resources.resident), Some(0.0));
        let leaking: Vec<ResourceUse> = (0..100).map(|at| resources(f64::from(at))).collect();
        assert_eq!(growth(&leaking, |resources| resources.resident), Some(80.0));
        assert_eq!(growth(&steady[..20], |resources| resources.resident), None);
    }
}
