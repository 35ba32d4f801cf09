//! The record of a training in its output folder, from its start to its end.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use frugal::Config;
use frugal::config::{CONFIG_FILE, Task};
use frugal::models::module::ParameterCount;
use frugal::planning::{MemorySamples, PeakMeter};
use frugal::run_folder::{FileRecord, Outcome, RunRecord, SplitRecord, StartRecord, State, unix_time};
use frugal::training::observer::{Observer, StepRecord};
use serde_json::Value;
use tch::Device;

use crate::common_flags::Common;
use crate::output::{run_page, shell_command};

/// The entries of a record on the data and the plan.
#[derive(Default)]
pub(crate) struct About {
    pub(crate) train: SplitRecord,
    pub(crate) validation: SplitRecord,
    /// The files of a teacher.
    pub(crate) teacher: SplitRecord,
    pub(crate) plan: Value,
    /// The chat template in the output folder.
    pub(crate) chat_template: Option<PathBuf>,
}

/// The record of a training that runs.
pub(crate) struct Recorder<'a> {
    out: &'a Path,
    record: RunRecord,
    /// The peaks of the start before, if it ended.
    before: (u64, u64),
    began: Instant,
    meter: Option<PeakMeter>,
    device: Device,
}

impl<'a> Recorder<'a> {
    /// Writes the configuration and the record of a start after `step` steps.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub(crate) fn start(
        out: &'a Path,
        common: &Common,
        config: &Config,
        about: About,
        of: (ParameterCount, u64, u64, Value),
        device: Device,
    ) -> anyhow::Result<Self> {
        let (counted, step, steps, batches) = of;
        let earlier = RunRecord::read(out)?.filter(|_| step > 0).unwrap_or_default();
        let before = earlier.outcome.map_or((0, 0), |outcome| (outcome.peak_bytes, outcome.file_bytes));
        let mut starts = earlier.starts;
        starts.push(StartRecord { unix_time: unix_time(), step, command: shell_command::this_process() });
        let record = RunRecord {
            frugal: env!("CARGO_PKG_VERSION").to_owned(),
            torch: runtime::torch_version().to_owned(),
            model: base(config),
            method: method(config).to_owned(),
            steps,
            trainable: counted.trainable,
            parameters: counted.total,
            train: about.train,
            validation: about.validation,
            teacher: about.teacher,
            batches,
            plan: about.plan,
            chat_template: about.chat_template.as_deref().map(FileRecord::of).transpose()?,
            config: serde_json::to_value(config)?,
            origins: common.origins.clone(),
            starts,
            outcome: None,
        };
        let text = common.origins.annotate(config)?;
        let path = out.join(CONFIG_FILE);
        files::atomic_write::file(&path, |file| file.write_all(text.as_bytes()))
            .with_context(|| format!("{} cannot be written", path.display()))?;
        record.write(out)?;
        // A system that does not count gives no figure.
        let meter = PeakMeter::of_process(device).ok();
        Ok(Self { out, record, before, began: Instant::now(), meter, device })
    }

    /// Looks at the process's memory at each step.
    pub(crate) fn watch_memory(&self) -> Option<Box<dyn Observer>> {
        let samples = self.meter.as_ref()?.samples();
        Some(Box::new(MemoryAtSteps(samples)))
    }

    /// Writes how the training ended after `step` steps, and the page.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub(crate) fn end(
        mut self,
        common: &Common,
        (state, reason): (State, Option<&str>),
        step: u64,
    ) -> anyhow::Result<Outcome> {
        let peak = self.meter.and_then(|meter| meter.finish().ok());
        let peak_bytes = peak.map_or(0, |peak| peak.counted(self.device));
        let file_bytes = peak.filter(|_| self.device == Device::Cpu).map_or(0, |peak| peak.file);
        let seconds = self.began.elapsed().as_secs_f64();
        let reason = reason.map(str::to_owned);
        let outcome = Outcome { state, step, seconds, peak_bytes, file_bytes, reason };
        // What is reported of this start is its own; the record has the run's.
        let (peak_bytes, file_bytes) = (peak_bytes.max(self.before.0), file_bytes.max(self.before.1));
        self.record.outcome = Some(Outcome { peak_bytes, file_bytes, ..outcome.clone() });
        self.record.write(self.out)?;
        write_page(common, self.out, state);
        Ok(outcome)
    }
}

/// Takes a sample after each step whose loss is read.
struct MemoryAtSteps(MemorySamples);

impl Observer for MemoryAtSteps {
    fn on_step(&mut self, _: &StepRecord) -> training::Result<()> {
        // A figure for the report is no reason to end a training.
        let _ = self.0.take();
        Ok(())
    }
}

/// Writes the page. One that cannot be written is no failure of a training.
pub(crate) fn write_page(common: &Common, out: &Path, state: State) {
    if let Err(error) = run_page::write(out, Some(state)) {
        common.note(&format!("the page was not written: {error:#}"));
    }
}

/// The model of a configuration.
pub(crate) fn base(config: &Config) -> String {
    config.model.name.clone().unwrap_or_else(|| {
        config.model.shape.as_ref().map_or_else(|| "–".to_owned(), |shape| shape.family.name().to_owned())
    })
}

/// The training method of a configuration.
pub(crate) fn method(config: &Config) -> &'static str {
    match (config.task, &config.adapter) {
        (Task::Train, _) => "from scratch",
        (Task::Finetune, None) => "full",
        (Task::Finetune, Some(adapter)) if adapter.use_dora => "DoRA",
        (Task::Finetune, Some(_)) => "LoRA",
    }
}

/// Says that the data are not those of the training whose configuration is used.
pub(crate) fn note_other_data(common: &Common, about: &About) {
    let Some(earlier) = &common.earlier else { return };
    let known =
        |split: &SplitRecord| split.files.iter().all(|file| file.sha256.is_some()) && !split.files.is_empty();
    for (name, before, now) in
        [("training", &earlier.train, &about.train), ("validation", &earlier.validation, &about.validation)]
    {
        let digests = |split: &SplitRecord| -> Vec<Option<String>> {
            split.files.iter().map(|file| file.sha256.clone()).collect()
        };
        if known(before) && known(now) && digests(before) != digests(now) {
            let files: Vec<String> = now.files.iter().map(|file| file.path.display().to_string()).collect();
            common.note(&format!(
                    "note: the {name} data have changed since the training whose configuration this is (SHA-256 of {})",
                    files.join(", ")
                ),
            );
        }
    }
}
