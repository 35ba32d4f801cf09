//! `training profile`: steps with each injected inefficiency on and off, and all of them on and off.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context;
use files::atomic_write;
use flate2::Compression;
use flate2::write::GzEncoder;
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use trace::{Comparison, Composition, Diagnosis, Finding, Phase, Profile, StepTimes};

use super::injected_slowdowns::Inefficiency;
use super::profiling::{Effort, Pair, Turn, detector, measure_pair, profile};
use super::setup::{Common, Setup};
use super::sizes::{Sizes, Which};
use super::trace_spans::{Span, TracePart, spans};
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

const COMPOSITION: &str = "profile";
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
        let sizes = Sizes::of(which.scale);
        let traced = match which.scale {
            Scale::Smoke => 1,
            Scale::Laptop => 2,
            Scale::Full | Scale::Paper => 3,
        };
        Ok(Self {
            sink: Sink::new(common, crate::environment::of(device)?, which.scale)?,
            progress: Progress::new(parts as u64),
            corpus: sizes.corpus(which)?,
            common: Common {
                model: sizes.profiled,
                odd: sizes.odd,
                batch_size: sizes.batch_size,
                lr: 1e-4,
                device,
                seed: common.seed,
            },
            effort: Effort {
                warmup: 2,
                turn: if device.is_cuda() { 10 } else { 1 },
                turns: sizes.turns,
                traced,
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
                let metrics = [
                    ("slowdown", "ratio"),
                    ("token_seconds", "s"),
                    ("data_seconds", "s"),
                    ("detected", "count"),
                ]
                .map(|(name, unit)| missing(name, unit))
                .to_vec();
                self.sink.put(COMPOSITION, &self.case(inefficiency.name(), "on"), metrics)?;
                self.progress.step();
                continue;
            }
            let (on, off) = setups(inefficiency);
            let part = Some(TracePart::of(inefficiency));
            let diagnosis = self.compare(inefficiency.name(), "on", [&on, &off], part, scratch)?;
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
        self.compare("all", "all on", [&Inefficiency::ALL.into(), &none], None, scratch)?;
        keep(scratch, &traces.join("all-on.json.gz"))?;
        self.progress.step();
        Ok(())
    }

    /// Times a setup in turns with one without, and profiles both over the same batches, as far as they make the same. Records
    /// what both traces show at `part`.
    fn compare(
        &mut self,
        name: &str,
        state: &str,
        [on, off]: [&BTreeSet<Inefficiency>; 2],
        part: Option<TracePart>,
        scratch: &Path,
    ) -> anyhow::Result<Diagnosis> {
        let mut with = Setup::new(&self.corpus, on, &self.common)?;
        let mut without = Setup::new(&self.corpus, off, &self.common)?;
        let pair = measure_pair(&mut with, &mut without, self.effort)?;
        let (base, beside) = profile(&mut without, self.effort, scratch)?;
        let repaired = match part {
            Some(part) => Some(spans(&Profile::read(scratch)?, part)),
            None => None,
        };
        let (composition, diagnosis) = profile(&mut with, self.effort, scratch)?;
        if let (Some(part), Some(repaired)) = (part, repaired) {
            self.put_spans(name, "with it", spans(&Profile::read(scratch)?, part))?;
            self.put_spans(name, "repaired", repaired)?;
        }
        self.put(name, "clean", &base, None, &beside, vec![token_seconds(&pair.off)])?;
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

    /// Records what a trace shows.
    fn put_spans(&mut self, name: &str, trace: &str, spans: Vec<Span>) -> anyhow::Result<()> {
        for (index, span) in spans.into_iter().enumerate() {
            let case = Case::new()
                .with("shows", "trace")
                .with("inefficiency", name)
                .with("trace", trace)
                .with("row", span.row)
                .with("kind", span.kind)
                .with("what", span.what)
                .with("index", index as u64);
            let metrics = vec![
                Metric::exact("start_seconds", "s", span.start),
                Metric::exact("end_seconds", "s", span.end),
            ];
            self.sink.put(COMPOSITION, &case, metrics)?;
        }
        Ok(())
    }

    fn case(&self, inefficiency: &str, state: &str) -> Case {
        let width = self.common.model.hidden_dim;
        Case::new().with("inefficiency", inefficiency).with("state", state).with("width", width)
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

fn token_seconds(turns: &[Turn]) -> Metric {
    Metric::of_samples("token_seconds", "s", &turns.iter().map(|turn| turn.token).collect::<Vec<f64>>())
}

fn of_pair(pair: &Pair) -> Vec<Metric> {
    vec![
        token_seconds(&pair.on),
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

/// The setups with an inefficiency and without. Tokenizing is injected as the assignment's script has it, in the training
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
