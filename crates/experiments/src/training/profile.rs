//! `training profile`: steps with each injected inefficiency on and off, and all of them on and off.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context;
use files::atomic_write;
use flate2::Compression;
use flate2::write::GzEncoder;
use report::{Case, Metric};
use tempfile::TempDir;
use trace::{Comparison, Composition, Diagnosis, Finding, Phase, Profile, StepTimes};

use super::injected_slowdowns::Inefficiency;
use super::profiling::{Effort, Pair, Turn, detector, measure_pair, profile};
use super::setup::{Common, Setup};
use super::sizes::Sizes;
use super::trace_spans::{Span, TracePart, spans};
use crate::corpus::{Corpus, DataArgs};
use crate::driver::Bench;

#[derive(clap::Args)]
pub(crate) struct ProfileArgs {
    #[command(flatten)]
    data: DataArgs,
    /// These inefficiencies only
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Inefficiency>,
    /// Keep the traces for ui.perfetto.dev in FOLDER [default: `traces` beside the records' folder, else nowhere]
    #[arg(long, value_name = "FOLDER")]
    traces: Option<PathBuf>,
}

/// Operators of the two kept traces that the report lists.
const TOP_OPERATORS: usize = 8;

/// Trainings with the inefficiencies on and off.
struct Slowdowns {
    corpus: Corpus,
    common: Common,
    effort: Effort,
    /// Where traces are kept.
    traces: PathBuf,
    scratch: TempDir,
}

/// The inefficiencies that are on.
enum Injected {
    Nothing,
    One(Inefficiency),
    All,
}

impl Slowdowns {
    fn new(arguments: &ProfileArgs, bench: &Bench) -> anyhow::Result<Self> {
        let scratch = tempfile::tempdir().context("making a folder for traces")?;
        let traces = match (&arguments.traces, bench.records()) {
            (Some(folder), _) => folder.clone(),
            (None, Some(records)) => {
                records.parent().and_then(Path::parent).unwrap_or(Path::new(".")).join("traces")
            }
            (None, None) => scratch.path().to_owned(),
        };
        std::fs::create_dir_all(&traces)
            .with_context(|| format!("making the folder {}", traces.display()))?;
        let sizes = Sizes::new(bench.scale);
        Ok(Self {
            corpus: sizes.corpus(&arguments.data, bench.scale)?,
            common: Common {
                model: sizes.profiled,
                odd: sizes.odd,
                batch_size: sizes.batch_size,
                lr: 1e-4,
                device: bench.device,
                seed: bench.seed,
            },
            effort: Effort {
                warmup: 2,
                turn: if bench.device.is_cuda() { 10 } else { 1 },
                turns: sizes.turns,
                traced: bench.sized([1, 2, 3, 3]),
            },
            traces,
            scratch,
        })
    }
}

/// Runs the trainings.
pub(crate) fn run(bench: &mut Bench, arguments: &ProfileArgs) -> anyhow::Result<()> {
    runtime::memory::track_cpu()?;
    let slowdowns = Slowdowns::new(arguments, bench)?;
    let one = |inefficiency: &Inefficiency| Injected::One(*inefficiency);
    let chosen = if arguments.only.is_empty() { &Inefficiency::ALL[..] } else { &arguments.only };
    let cases = std::iter::once(Injected::Nothing).chain(chosen.iter().map(one)).chain([Injected::All]);
    bench.each(cases, Injected::name, |bench, case| match case {
        Injected::Nothing => slowdowns.nothing(bench),
        Injected::One(inefficiency) => slowdowns.one(inefficiency, bench),
        Injected::All => slowdowns.all(bench),
    })
}

impl Injected {
    fn name(&self) -> String {
        match self {
            Self::Nothing => "no inefficiency",
            Self::One(inefficiency) => inefficiency.name(),
            Self::All => "all of them",
        }
        .to_owned()
    }
}

impl Slowdowns {
    /// The trace at hand.
    fn trace(&self) -> PathBuf {
        self.scratch.path().join("trace.json")
    }

    fn nothing(&self, bench: &mut Bench) -> anyhow::Result<()> {
        let mut clean = Setup::new(&self.corpus, &BTreeSet::new(), &self.common)?;
        clean.run(self.effort.warmup)?;
        // The first trace of a process sets the profiler up; it is not the one that is shown.
        profile(&mut clean, self.effort, &self.trace())?;
        let (base, diagnosis) = profile(&mut clean, self.effort, &self.trace())?;
        drop(clean);
        keep(&self.trace(), &self.traces.join("all-off.json.gz"))?;
        self.put(bench, ["none", "all off"], &base, None, &diagnosis, Vec::new())
    }

    fn all(&self, bench: &mut Bench) -> anyhow::Result<()> {
        let all = Inefficiency::ALL.into();
        self.compare(bench, ["all", "all on"], [&all, &BTreeSet::new()], None)?;
        keep(&self.trace(), &self.traces.join("all-on.json.gz"))
    }

    fn one(&self, inefficiency: Inefficiency, bench: &mut Bench) -> anyhow::Result<()> {
        let case = self.case(inefficiency.name(), "on");
        if !inefficiency.concerns(self.common.device) {
            let columns =
                [("slowdown", "ratio"), ("token_seconds", "s"), ("data_seconds", "s"), ("detected", "count")];
            let why = "it concerns CUDA devices alone";
            let metrics = columns.map(|(name, unit)| Metric::not_measured(name, unit, why));
            return bench.put(&case, metrics.to_vec());
        }
        let (on, off) = setups(inefficiency);
        let part = Some(TracePart::showing(inefficiency));
        let diagnosis = self.compare(bench, [inefficiency.name(), "on"], [&on, &off], part)?;
        let detected = match detector(inefficiency) {
            Some(name) => {
                Metric::exact("detected", "count", f64::from(u8::from(diagnosis.finding(name).is_some())))
            }
            None => Metric::not_measured("detected", "count", "no profile can tell it from what is wanted"),
        };
        bench.put(&case, vec![detected])
    }

    /// Times a setup in turns with one without, and profiles both over the same batches, as far as they make the same. Records
    /// what both traces show at `part`.
    fn compare(
        &self,
        bench: &mut Bench,
        [name, state]: [&str; 2],
        [on, off]: [&BTreeSet<Inefficiency>; 2],
        part: Option<TracePart>,
    ) -> anyhow::Result<Diagnosis> {
        let trace = &self.trace();
        let mut with = Setup::new(&self.corpus, on, &self.common)?;
        let mut without = Setup::new(&self.corpus, off, &self.common)?;
        let pair = measure_pair(&mut with, &mut without, self.effort)?;
        let (base, beside) = profile(&mut without, self.effort, trace)?;
        let repaired = match part {
            Some(part) => Some(spans(&Profile::read(trace)?, part)),
            None => None,
        };
        let (composition, diagnosis) = profile(&mut with, self.effort, trace)?;
        if let (Some(part), Some(repaired)) = (part, repaired) {
            self.put_spans(bench, name, "with it", spans(&Profile::read(trace)?, part))?;
            self.put_spans(bench, name, "repaired", repaired)?;
        }
        self.put(bench, [name, "clean"], &base, None, &beside, vec![token_seconds(&pair.off)])?;
        let repaired = Comparison::between(&composition, &base);
        self.put(bench, [name, state], &composition, Some(&repaired), &diagnosis, of_pair(&pair))?;
        Ok(diagnosis)
    }

    /// Records what a profile shows, in figures and, where something is on, in words.
    fn put(
        &self,
        bench: &mut Bench,
        [name, state]: [&str; 2],
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
        bench.put(&case, metrics)?;
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
                bench.put(&case, metrics)?;
            }
        }
        Ok(())
    }

    /// Records what a trace shows.
    fn put_spans(&self, bench: &mut Bench, name: &str, trace: &str, spans: Vec<Span>) -> anyhow::Result<()> {
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
            bench.put(&case, metrics)?;
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
    let metric = |name: &str, unit: &str, value: &dyn Fn(&StepTimes) -> f64| {
        Metric::of_samples(name, unit, &composition.steps.iter().map(value).collect::<Vec<f64>>())
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
