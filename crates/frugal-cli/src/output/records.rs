//! A training's steps as records of the experiment `training`.

use std::path::{Path, PathBuf};

use frugal::config::{Config, Task};
use frugal::training::evaluation::Evaluation;
use frugal::training::observer::{Observer, StepRecord};
use report::{Case, Environment, Metric, Record, RecordWriter};
use tch::Device;

/// Steps and evaluations as records of the experiment `training`, each in the case of its step. A line is written
/// when its step is read: a run that is killed keeps its records. A resumed run appends; of a step that was done
/// twice the later records are those that count.
pub(crate) struct StepRecords {
    writer: RecordWriter,
    path: PathBuf,
    case: Case,
    environment: Environment,
}

impl StepRecords {
    /// Appends to the file `path`.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub(crate) fn append(path: &Path, config: &Config, device: Device) -> anyhow::Result<Self> {
        let writer = RecordWriter::append(path)?;
        Ok(Self { writer, path: path.to_owned(), case: case(config), environment: environment(device)? })
    }

    fn put(&mut self, step: u64, metrics: Vec<(&str, &str, Option<f64>)>) -> training::Result<()> {
        let case = self.case.clone().with("step", step);
        for (name, unit, value) in metrics {
            let metric = match value {
                None => continue,
                Some(value) if value.is_finite() => Metric::exact(name, unit, value),
                Some(value) => Metric::not_measured(name, unit, &format!("it is {value}")),
            };
            let (case, environment) = (case.clone(), self.environment.clone());
            let record = Record { experiment: "training".to_owned(), case, metric, environment };
            self.writer.write(&record).map_err(|cause| {
                let cause = std::io::Error::other(cause);
                training::Error::io(&self.path, cause)
            })?;
        }
        Ok(())
    }
}

/// Describes the device (`cpu` or the GPU's name), libtorch's version, the machine, and the implementations that
/// [`kernels::processor`] chose.
fn environment(device: Device) -> anyhow::Result<Environment> {
    let name = if device.is_cuda() { runtime::device::name(device)? } else { "cpu".to_owned() };
    let implementations = Some(kernels::processor::choices()?.to_string());
    Ok(Environment { implementations, ..Environment::detect(&name, Some(runtime::torch_version())) })
}

impl Observer for StepRecords {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        let metrics = vec![
            ("loss", "nat", Some(record.loss)),
            ("accuracy", "ratio", record.accuracy),
            ("router_aux_loss", "", record.router_aux_loss),
            ("chosen_reward", "", record.rewards.map(|[chosen, _]| chosen)),
            ("rejected_reward", "", record.rewards.map(|[_, rejected]| rejected)),
            ("reference_point", "nat", record.reference_point),
            ("reward", "", record.policy.map(|policy| policy.rollout.reward)),
            ("answer_tokens", "count", record.policy.map(|policy| policy.rollout.length)),
            ("divergence", "nat", record.policy.map(|policy| policy.divergence)),
            ("teacher_divergence", "nat", record.distilled.map(|own| own.divergence)),
            ("cross_entropy", "nat", record.distilled.map(|own| own.cross_entropy)),
            ("learning_rate", "", Some(record.learning_rate)),
            ("gradient_norm", "", record.gradient_norm),
            ("skipped", "count", Some(f64::from(u8::from(record.skipped)))),
            ("retries", "count", Some(f64::from(record.retries))),
            ("tokens", "count", Some(record.tokens as f64)),
            ("padding", "count", Some(record.padding as f64)),
            ("step_seconds", "s", Some(record.timings.total)),
        ];
        self.put(record.step, metrics)
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        let metrics = vec![
            ("validation_loss", "nat", Some(evaluation.loss)),
            ("validation_accuracy", "ratio", Some(evaluation.accuracy)),
            ("validation_teacher_divergence", "nat", evaluation.distilled.map(|own| own.divergence)),
            ("validation_cross_entropy", "nat", evaluation.distilled.map(|own| own.cross_entropy)),
            ("validation_seconds", "s", Some(evaluation.seconds)),
        ];
        self.put(evaluation.step, metrics)
    }
}

/// The case of a training in its records.
fn case(config: &Config) -> Case {
    let Config { model, data, optimizer, training, .. } = config;
    let shape = model.shape.clone().unwrap_or_default();
    let name = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
    let case = Case::new()
        .with("model", model.name.clone().unwrap_or_else(|| shape.family.name().to_owned()))
        .with("optimizer", name(&optimizer.rule))
        .with("schedule", name(&optimizer.schedule))
        .with("data", data.described());
    let case = match config.task {
        Task::Train if !data.is_synthetic() => case.with("strategy", data.strategy.as_str()),
        _ => case,
    };
    let case = case.with("batch", training.batch);
    let case = match data.max_length {
        Some(length) => case.with("length", length),
        None => case,
    };
    let case = if model.name.is_none() { case.with("width", shape.width) } else { case };
    case.with("seed", training.seed)
}
