//! `training profile`: steps with each planted inefficiency on and off, and all of them on and off. `training repair`: all
//! of them on, and then one repaired after another.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use flate2::Compression;
use flate2::write::GzEncoder;
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress};
use training::experiment::corpus::Corpus;
use training::experiment::profiling::{Effort, Pair, Stage, Turn, detector, measure_pair, profile, repair};
use training::experiment::setup::{Common, Setup};
use training::planted::Inefficiency;
use training::profile::{Comparison, Composition, Diagnosis};

use super::sink::Sink;
use super::sizes::{Sizes, Which};

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
    Measurement::new(common, &arguments.which, Inefficiency::ALL.len() + 1)?.repair()
}

const COMPOSITION: &str = "profile";
const REPAIR: &str = "repair";

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
            sink: Sink::new(common, device)?,
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
        keep(scratch, &traces.join("all-off.json.gz"))?;
        let case = self.case("none", "all off");
        self.sink.put(COMPOSITION, &case, of_profile(&base, &diagnosis))?;
        explain("all off", None, &diagnosis)?;
        self.progress.step();

        for &inefficiency in chosen {
            self.progress.message(inefficiency.name());
            let mut on = Setup::new(&self.corpus, &BTreeSet::from([inefficiency]), &self.common)?;
            let pair = measure_pair(&mut on, &mut clean, self.effort)?;
            // Both are profiled at about the same time, as they are timed.
            let (base, _) = profile(&mut clean, self.effort, scratch)?;
            let (composition, diagnosis) = profile(&mut on, self.effort, scratch)?;
            let mut metrics = of_profile(&composition, &diagnosis);
            metrics.extend(of_pair(&pair));
            metrics.push(match detector(inefficiency) {
                Some(name) => {
                    Metric::exact("detected", "count", f64::from(u8::from(diagnosis.finding(name).is_some())))
                }
                None => {
                    Metric::not_measured("detected", "count", "no profile can tell it from what is wanted")
                }
            });
            let case = self.case(inefficiency.name(), "on");
            self.sink.put(COMPOSITION, &case, metrics)?;
            explain(inefficiency.name(), Some(&Comparison::between(&composition, &base)), &diagnosis)?;
            self.progress.step();
        }

        self.progress.message("all of them");
        let mut all = Setup::new(&self.corpus, &Inefficiency::ALL.into(), &self.common)?;
        let pair = measure_pair(&mut all, &mut clean, self.effort)?;
        let (base, _) = profile(&mut clean, self.effort, scratch)?;
        let (composition, diagnosis) = profile(&mut all, self.effort, scratch)?;
        keep(scratch, &traces.join("all-on.json.gz"))?;
        let mut metrics = of_profile(&composition, &diagnosis);
        metrics.extend(of_pair(&pair));
        let case = self.case("all", "all on");
        self.sink.put(COMPOSITION, &case, metrics)?;
        explain("all on", Some(&Comparison::between(&composition, &base)), &diagnosis)?;
        self.progress.step();
        Ok(())
    }

    fn case(&self, inefficiency: &str, state: &str) -> Case {
        let width = self.common.model.hidden_dim;
        Case::new().with("inefficiency", inefficiency).with("state", state).with("width", width)
    }

    fn repair(&mut self) -> anyhow::Result<()> {
        self.progress.message("repairing one after another");
        let progress = &mut self.progress;
        let stages = repair(&self.corpus, &self.common, self.effort, |stage| {
            progress.message(&format!("repaired: {}", stage.repaired.map_or("nothing", Inefficiency::name)));
            progress.step();
        })?;
        let median = |stage: &Stage| {
            let mut tokens: Vec<f64> = stage.turns.iter().map(|turn| turn.token).collect();
            tokens.sort_by(f64::total_cmp);
            tokens[tokens.len() / 2]
        };
        let first = stages.first().map_or(f64::NAN, median);
        let mut before = first;
        for (number, stage) in stages.iter().enumerate() {
            let name =
                stage.repaired.map_or("all of them on".to_owned(), |repaired| format!("without {repaired}"));
            let now = median(stage);
            let rates: Vec<f64> = stage.turns.iter().map(|turn| 1.0 / turn.token).collect();
            let metrics = vec![
                Metric::of_samples("step_seconds", "s", &steps(&stage.turns)),
                Metric::of_samples("tokens_per_second", "token/s", &rates),
                Metric::exact("peak_bytes", "B", stage.peak_bytes as f64),
                Metric::exact("stage_speedup", "ratio", before / now),
                Metric::exact("total_speedup", "ratio", first / now),
            ];
            let case = Case::new().with("stage", number as u64).with("setup", name);
            self.sink.put(REPAIR, &case, metrics)?;
            before = now;
        }
        Ok(())
    }
}

/// Compresses a trace, as Perfetto opens it too, into a file that appears whole.
fn keep(trace: &Path, path: &Path) -> anyhow::Result<()> {
    let partial = path.with_extension("partial");
    let copy = || -> std::io::Result<()> {
        let mut out = GzEncoder::new(File::create(&partial)?, Compression::best());
        std::io::copy(&mut File::open(trace)?, &mut out)?;
        out.finish()?.sync_all()?;
        std::fs::rename(&partial, path)
    };
    copy().with_context(|| format!("keeping the trace {}", path.display()))
}

fn steps(turns: &[Turn]) -> Vec<f64> {
    turns.iter().map(|turn| turn.step).collect()
}

/// The profiler's figures. Its step is not the one that is compared: under the profiler every operator is slower.
fn of_profile(composition: &Composition, diagnosis: &Diagnosis) -> Vec<Metric> {
    let mut metrics = composition.metrics();
    for metric in &mut metrics {
        if metric.name == "step_seconds" {
            metric.name = "profiled_step_seconds".into();
        }
    }
    metrics.push(Metric::exact("findings", "count", diagnosis.findings.len() as f64));
    metrics
}

fn of_pair(pair: &Pair) -> Vec<Metric> {
    vec![
        Metric::of_samples("step_seconds", "s", &steps(&pair.on)),
        Metric::of_samples("clean_step_seconds", "s", &steps(&pair.off)),
        Metric::of_samples("slowdown", "ratio", &pair.slowdown()),
    ]
}

/// What the profile says in words, for who runs this by hand; `cargo xtask run-all` keeps it in the log.
fn explain(name: &str, repaired: Option<&Comparison>, diagnosis: &Diagnosis) -> anyhow::Result<()> {
    let mut out = std::io::stderr().lock();
    if let Some(comparison) = repaired {
        writeln!(out, "{name}: repaired, {comparison}")?;
    }
    writeln!(out, "{name}: {diagnosis}")?;
    Ok(())
}
