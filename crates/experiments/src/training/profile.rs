//! `training profile`: steps with each injected inefficiency on and off, and all of them on and off. `training repair`: all
//! of them on, and then one repaired after another.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context;
use flate2::Compression;
use flate2::write::GzEncoder;
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use runtime::atomic_write;
use training::profile::{Comparison, Composition, Diagnosis, Finding, Phase, StepTimes};

use super::injected_slowdowns::Inefficiency;
use super::profiling::{Effort, Pair, Repairs, Turn, detector, measure_pair, profile, repair};
use super::setup::{Common, Setup};
use super::sizes::{Sizes, Which};
use crate::corpus::Corpus;

#[derive(clap::Args)]
pub(crate) struct ProfileArgs {
    #[command(flatten)]
    which: Which,
    /// These inefficiencies only
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Inefficiency>,
    /// Keep the traces for ui.perfetto.dev in FOLDER [default: `traces` beside the records' folder, else nowhere]
    #[arg(long, value_name = "FOLDER")]
    traces: Option<PathBuf>,
}

#[derive(clap::Args)]
pub(crate) struct RepairArgs {
    #[command(flatten)]
    which: Which,
}

pub(crate) fn run(common: &CommonArgs, arguments: &ProfileArgs) -> anyhow::Result<()> {
    let chosen: Vec<Inefficiency> =
        if arguments.only.is_empty() { Inefficiency::ALL.into() } else { arguments.only.clone() };
    let scratch = tempfile::tempdir().context("making a folder for traces")?;
    let traces = match (&arguments.traces, &common.records) {
        (Some(folder), _) => folder.clone(),
        (None, Some(records)) => {
            records.parent().and_then(Path::parent).unwrap_or(Path::new(".")).join("traces")
        }
        (None, None) => scratch.path().to_owned(),
    };
    std::fs::create_dir_all(&traces).with_context(|| format!("making the folder {}", traces.display()))?;
    let mut measurement = Measurement::new(common, &arguments.which, chosen.len() + 2)?;
    measurement.profile(&chosen, &traces, &scratch.path().join("trace.json"))
}

pub(crate) fn run_repair(common: &CommonArgs, arguments: &RepairArgs) -> anyhow::Result<()> {
    let mut measurement = Measurement::new(common, &arguments.which, Inefficiency::ALL.len() + 2)?;
    // Each stage is measured twice: with the one before and with the one after it.
    measurement.effort.turns = measurement.effort.turns.min(5);
    measurement.repair()
}

const COMPOSITION: &str = "profile";
const REPAIR: &str = "repair";
/// Operators of the two kept traces that the report lists.
const TOP_OPERATORS: usize = 8;

struct Measurement {
    sink: Sink,
    progress: Progress,
    corpus: Corpus,
    common: Common,
    effort: Effort,
}

impl Measurement {
    fn new(common: &CommonArgs, which: &Which, parts: usize) -> anyhow::Result<Self> {
        let device = runtime::device::select(&common.device)?;
        runtime::memory::track_cpu()?;
        let &Which { scale, data } = which;
        let sizes = Sizes::of(scale);
        let smoke = scale == Scale::Smoke;
        Ok(Self {
            sink: Sink::new(common, crate::environment::of(device)?)?,
            progress: Progress::new(parts as u64),
            corpus: sizes.corpus(data)?.map_err(anyhow::Error::msg)?,
            common: Common {
                model: sizes.profiled,
                odd: sizes.odd,
                batch_size: sizes.batch_size,
                device,
                seed: common.seed,
            },
            effort: Effort {
                warmup: 2,
                turn: if device.is_cuda() { 10 } else { 1 },
                turns: if smoke { 3 } else { 7 },
                traced: if smoke { 2 } else { 3 },
            },
        })
    }

    fn profile(&mut self, chosen: &[Inefficiency], traces: &Path, scratch: &Path) -> anyhow::Result<()> {
        let none = BTreeSet::new();
        self.progress.message("no inefficiency");
        let mut clean = Setup::new(&self.corpus, &none, &self.common)?;
        clean.run(self.effort.warmup)?;
        // The first trace of a process sets the profiler up; it is not the one that is shown.
        profile(&mut clean, self.effort, scratch)?;
        let (base, diagnosis) = profile(&mut clean, self.effort, scratch)?;
        drop(clean);
        keep(scratch, &traces.join("all-off.json.gz"))?;
        self.put("none", "all off", &base, None, &diagnosis, Vec::new())?;
        self.progress.step();

        for &inefficiency in chosen {
            self.progress.message(inefficiency.name());
            if !inefficiency.concerns(self.common.device) {
                let missing = |name, unit| Metric::not_measured(name, unit, "it concerns CUDA devices alone");
                let metrics = vec![missing("slowdown", "ratio"), missing("detected", "count")];
                self.sink.put(COMPOSITION, &self.case(inefficiency.name(), "on"), metrics)?;
                self.progress.step();
                continue;
            }
            let (on, off) = setups(inefficiency);
            let diagnosis = self.compare(inefficiency.name(), "on", &on, &off, scratch)?;
            let detected = match detector(inefficiency) {
                Some(name) => {
                    Metric::exact("detected", "count", f64::from(u8::from(diagnosis.finding(name).is_some())))
                }
                None => {
                    Metric::not_measured("detected", "count", "no profile can tell it from what is wanted")
                }
            };
            self.sink.put(COMPOSITION, &self.case(inefficiency.name(), "on"), vec![detected])?;
            self.progress.step();
        }

        self.progress.message("all of them");
        self.compare("all", "all on", &Inefficiency::ALL.into(), &none, scratch)?;
        keep(scratch, &traces.join("all-on.json.gz"))?;
        self.progress.step();
        Ok(())
    }

    /// Times a setup in turns with one without, and profiles both over the same batches, as far as they make the same.
    fn compare(
        &mut self,
        name: &str,
        state: &str,
        on: &BTreeSet<Inefficiency>,
        off: &BTreeSet<Inefficiency>,
        scratch: &Path,
    ) -> anyhow::Result<Diagnosis> {
        let mut with = Setup::new(&self.corpus, on, &self.common)?;
        let mut without = Setup::new(&self.corpus, off, &self.common)?;
        let pair = measure_pair(&mut with, &mut without, self.effort)?;
        let (base, beside) = profile(&mut without, self.effort, scratch)?;
        let (composition, diagnosis) = profile(&mut with, self.effort, scratch)?;
        self.put(name, "clean", &base, None, &beside, Vec::new())?;
        let repaired = Comparison::between(&composition, &base);
        self.put(name, state, &composition, Some(&repaired), &diagnosis, of_pair(&pair))?;
        Ok(diagnosis)
    }

    /// Records what a profile shows, in figures and, where something is on, in words.
    fn put(
        &mut self,
        name: &str,
        state: &str,
        composition: &Composition,
        repaired: Option<&Comparison>,
        diagnosis: &Diagnosis,
        more: Vec<Metric>,
    ) -> anyhow::Result<()> {
        let mut metrics = of_profile(composition, diagnosis);
        metrics.extend(more);
        if let Some(repaired) = repaired {
            let note = Some(format!("repaired: {repaired}"));
            metrics.push(Metric { note, ..Metric::exact("saved_by_repair", "ratio", -repaired.relative()) });
        }
        let case = self.case(name, state);
        self.sink.put(COMPOSITION, &case, metrics)?;
        if ["all off", "all on"].contains(&state) {
            for (rank, operator) in composition.operators.iter().take(TOP_OPERATORS).enumerate() {
                let case = self
                    .case(name, state)
                    .with("rank", rank as u64 + 1)
                    .with("operator", operator.name.as_str());
                let metrics = vec![
                    Metric::exact("self_seconds", "s", operator.seconds),
                    Metric::exact("calls", "count", operator.calls),
                    Metric::exact("share", "ratio", operator.share),
                ];
                self.sink.put(COMPOSITION, &case, metrics)?;
            }
        }
        Ok(())
    }

    fn case(&self, inefficiency: &str, state: &str) -> Case {
        let width = self.common.model.hidden_dim;
        Case::new().with("inefficiency", inefficiency).with("state", state).with("width", width)
    }

    fn repair(&mut self) -> anyhow::Result<()> {
        let progress = &mut self.progress;
        let Repairs { stages, total, beyond_batching } =
            repair(&self.corpus, &self.common, self.effort, |what| {
                progress.message(&format!("repairing {what}"));
                progress.step();
            })?;
        let mut product = 1.0;
        for (number, stage) in stages.iter().enumerate() {
            let name = stage.repaired.map_or("all on".to_owned(), |repaired| format!("without {repaired}"));
            let rates: Vec<f64> = stage.turns.iter().map(|turn| 1.0 / turn.token).collect();
            let mut metrics = vec![
                Metric::of_samples("step_seconds", "s", &steps(&stage.turns)),
                Metric::of_samples("tokens_per_second", "tokens/s", &rates),
                Metric::exact("peak_bytes", "B", stage.peak_bytes as f64),
            ];
            if !stage.speedups.is_empty() {
                let speedup = Metric::of_samples("stage_speedup", "ratio", &stage.speedups);
                product *= speedup.value.unwrap_or(f64::NAN);
                metrics.push(speedup);
            }
            metrics.push(Metric::exact("cumulative_speedup", "ratio", product));
            let case = Case::new().with("stage", number as u64).with("setup", name);
            self.sink.put(REPAIR, &case, metrics)?;
        }
        let ends = [("all repaired vs none", total), ("all repaired vs padding only", beyond_batching)];
        for (setups, speedups) in ends {
            let case = Case::new().with("setups", setups);
            let metrics = vec![Metric::of_samples("total_speedup", "ratio", &speedups)];
            self.sink.put(REPAIR, &case, metrics)?;
        }
        Ok(())
    }
}

/// Compresses a trace, as Perfetto opens it too, into a file that appears whole.
fn keep(trace: &Path, path: &Path) -> anyhow::Result<()> {
    let kept = atomic_write::file(path, |out| {
        let mut out = GzEncoder::new(out, Compression::best());
        std::io::copy(&mut File::open(trace)?, &mut out)?;
        out.finish().map(drop)
    });
    kept.with_context(|| format!("keeping the trace {}", path.display()))
}

fn steps(turns: &[Turn]) -> Vec<f64> {
    turns.iter().map(|turn| turn.step).collect()
}

/// The figures of a composition as metrics of records, each with its spread over the steps: `step_seconds`, `data_seconds` and so on for
/// each part, `idle_seconds`, `host_seconds`, `copy_seconds`, `operators`, `copies`, `allocated_bytes`, and on CUDA
/// `device_idle_share` and `kernels`.
fn composition_metrics(composition: &Composition) -> Vec<Metric> {
    let metric = |name: &str, unit: &str, of: &dyn Fn(&StepTimes) -> f64| {
        Metric::of_samples(name, unit, &composition.steps.iter().map(of).collect::<Vec<f64>>())
    };
    let mut metrics = vec![metric("step_seconds", "s", &|step| step.seconds)];
    for phase in Phase::ALL {
        let name = format!("{}_seconds", phase.name());
        metrics.push(metric(&name, "s", &|step| step.phases[phase as usize]));
    }
    metrics.extend([
        metric("idle_seconds", "s", &|step| step.idle_seconds),
        metric("host_seconds", "s", &|step| step.host_seconds),
        metric("copy_seconds", "s", &|step| step.copies.seconds),
        metric("operators", "count", &|step| step.calls.iter().sum::<usize>() as f64),
        metric("copies", "count", &|step| step.copies.count),
        metric("allocated_bytes", "B", &|step| step.allocated_bytes),
    ]);
    if composition.median.device.is_some() {
        let device = |step: &StepTimes| step.device.unwrap_or_default();
        metrics.push(metric("device_idle_share", "ratio", &|step| device(step).idle_share));
        metrics.push(metric("kernels", "count", &|step| device(step).kernels));
    }
    metrics
}

/// The profiler's figures. Its step is not the one that is compared: under the profiler every operator is slower.
fn of_profile(composition: &Composition, diagnosis: &Diagnosis) -> Vec<Metric> {
    let mut metrics = composition_metrics(composition);
    for metric in &mut metrics {
        if metric.name == "step_seconds" {
            metric.name = "profiled_step_seconds".into();
        }
    }
    let note = Some(found(diagnosis));
    metrics.push(Metric { note, ..Metric::exact("findings", "count", diagnosis.findings.len() as f64) });
    metrics
}

fn of_pair(pair: &Pair) -> Vec<Metric> {
    vec![
        Metric::of_samples("step_seconds", "s", &steps(&pair.on)),
        Metric::of_samples("clean_step_seconds", "s", &steps(&pair.off)),
        Metric::of_samples("slowdown", "ratio", &pair.slowdown()),
    ]
}

/// The findings in words.
fn found(diagnosis: &Diagnosis) -> String {
    if diagnosis.findings.is_empty() {
        return "the diagnosis names nothing".into();
    }
    let finding = |finding: &Finding| format!("{}: {}", finding.name, finding.evidence);
    format!("the diagnosis names {}", diagnosis.findings.iter().map(finding).collect::<Vec<_>>().join("; "))
}

/// The setups with an inefficiency and without. Tokenizing is planted as the assignment's script has it, in the training
/// process: a worker would hide it.
fn setups(inefficiency: Inefficiency) -> (BTreeSet<Inefficiency>, BTreeSet<Inefficiency>) {
    match inefficiency {
        Inefficiency::TokenizePerItem => (
            BTreeSet::from([inefficiency, Inefficiency::NoWorkers]),
            BTreeSet::from([Inefficiency::NoWorkers]),
        ),
        other => (BTreeSet::from([other]), BTreeSet::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_those_of_the_steps() {
        let step = |seconds, calls| StepTimes {
            seconds,
            phases: [0.0, seconds / 2.0, 0.0, 0.0, 0.0, seconds / 2.0],
            calls: [0, calls, 0, 0, 0, 0],
            ..StepTimes::default()
        };
        let steps = vec![step(3.0, 1), step(5.0, 2)];
        let composition = Composition { median: steps[0], steps, operators: Vec::new() };
        let metrics = composition_metrics(&composition);
        let named = |name: &str| metrics.iter().find(|metric| metric.name == name).unwrap();
        assert_eq!(named("step_seconds").value, Some(4.0));
        assert_eq!((named("forward_seconds").n, named("forward_seconds").value), (2, Some(2.0)));
        assert_eq!(named("operators").value, Some(1.5));
    }
}
