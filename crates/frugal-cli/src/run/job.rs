//! The stages of a training, which `train` and `finetune` share: each is a type, and gives the next.
//!
//! [`Job`]: checked, with a device → [`Planned`]: its plan is printed → [`Opened`]: its output folder is open, its memory is limited and
//! its model has every technique → [`Ready`]: it has a trainer → [`Finished`]: trained, to be written and reported.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use frugal::config::Bytes;
use frugal::dataloading::Batch;
use frugal::lora::Adapters;
use frugal::models::module::{LanguageModel, ParameterCount};
use frugal::recipe::{Handles, Prepared};
use frugal::run_folder::MODEL;
use frugal::training::activations::LayerPlan;
use frugal::training::masked_rows::MaskedBatches;
use frugal::training::policy::{Policy, PolicyConfig, Rewards};
use frugal::training::preference::{InTurns, Switch, log_probabilities_of_rows};
use frugal::training::step_tracing::Loading;
use frugal::training::{Batches, Trainer};
use frugal::{Config, Recipe};
use runtime::memory::Limit;
use runtime::precision;
use serde_json::{Value, json};
use tch::Device;

use crate::common_flags::Common;
use crate::folder::best_weights::Writer;
use crate::folder::offload_folder;
use crate::folder::open::{Saving, as_begun};
use crate::folder::run_model::REVISION;
use crate::folder::run_record::{About, note_other_data, write_page};
use crate::output::ended_training::report;
use crate::output::summary::{self, Sample};
use crate::run::diagnosis::{Diagnose, diagnose};
use crate::run::plan::{PlannedTraining, RunPlan};
use crate::run::ranks;
use crate::run::training::{Run, Trained, name_budget, name_resume};

/// Numbers of a token, in widths of the model, that exist at a time while a layer reads a question.
const WIDTHS: u64 = 16;

/// How a training starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// In an empty folder.
    New,
    /// From the newest checkpoint, if there is one.
    Resume,
    /// Not at all: its plan is shown.
    DryRun,
}

impl Start {
    /// Returns the start that `--dry-run` and `--resume` ask for.
    pub(crate) fn from_flags(dry_run: bool, resume: bool) -> Self {
        match (dry_run, resume) {
            (true, _) => Self::DryRun,
            (false, true) => Self::Resume,
            (false, false) => Self::New,
        }
    }
}

/// Options of a training that are not in its configuration.
#[derive(Clone, Copy)]
pub(crate) struct RunOptions<'a> {
    /// The output folder, into which a dry run writes nothing.
    pub(crate) out: Option<&'a Path>,
    pub(crate) start: Start,
    /// Whether bottlenecks are reported.
    pub(crate) diagnosis: Option<&'a Diagnose>,
}

/// Runs a training in this process or over its ranks. Adds the remedy to an error.
///
/// # Errors
/// Any invalid setting. Errors that do not depend on weights are returned before weights are read.
pub(crate) fn run(
    common: &Common,
    config: &Config,
    options: RunOptions<'_>,
    training: impl FnOnce(Job<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    ranks::run(common, config, |common| {
        let trained = Job::open(common, config, options).and_then(training);
        trained.map_err(|error| name_resume(name_budget(error, config), options.out))
    })
}

/// A training whose configuration is checked, whose output folder can be taken, and whose device is chosen.
pub(crate) struct Job<'a> {
    pub(crate) common: &'a Common,
    config: Config,
    recipe: Recipe,
    options: RunOptions<'a>,
    pub(crate) device: Device,
}

impl<'a> Job<'a> {
    fn open(common: &'a Common, config: &Config, options: RunOptions<'a>) -> anyhow::Result<Self> {
        Diagnose::check(common, options.diagnosis)?;
        let config = match options.out.filter(|_| options.start == Start::Resume) {
            Some(out) => as_begun(config, out),
            None => config.clone(),
        };
        let recipe = ranks::recipe(common, &config)?;
        if let Some(out) = options.out {
            Saving::check(out, common, options.start == Start::Resume)?;
        }
        let device = match &common.ranks {
            Some(ranks) => ranks.mesh.device(),
            None => runtime::device::select(&config.training.device)?,
        };
        runtime::memory::track_cpu()?;
        runtime::memory::set_block_cache(true)?;
        runtime::random::seed(config.training.seed)?;
        Ok(Self { common, config, recipe, options, device })
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// The techniques of the configuration.
    pub(crate) fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The output folder; empty without one.
    pub(crate) fn out(&self) -> &'a Path {
        self.options.out.unwrap_or(Path::new(""))
    }

    /// Whether it continues an earlier training.
    pub(crate) fn resumes(&self) -> bool {
        self.options.start == Start::Resume
    }

    /// Replaces the configuration by one that the model or the data complete.
    ///
    /// # Errors
    /// Techniques that cannot be combined.
    pub(crate) fn complete(&mut self, config: Config) -> anyhow::Result<()> {
        if config != self.config {
            self.recipe = ranks::recipe(self.common, &config)?;
            self.config = config;
        }
        Ok(())
    }

    /// Predicts the training and prints its plan; `None` after a dry run.
    ///
    /// # Errors
    /// A schedule that does not fit the steps; a budget in which nothing fits.
    pub(crate) fn plan(self, planned: PlannedTraining<'_>) -> anyhow::Result<Option<Planned<'a>>> {
        let Self { common, config, recipe, options, device } = self;
        let steps = planned.steps;
        recipe.schedule(steps)?;
        let plan = RunPlan::of(common, &config, planned)?;
        if options.start == Start::DryRun {
            // It is the result, once.
            let common = Common { quiet: !common.is_first(), ..common.clone() };
            plan.print(&common);
            if !common.json && common.is_first() {
                plan.note_capture(&common, &config);
            }
            return Ok(None);
        }
        plan.print(common);
        let applied = with_base_revision(plan.applied(&config));
        offload_folder::note_memory(common, &applied);
        let recipe = ranks::recipe(common, &applied)?;
        let written = plan.written(&config);
        let common = RunPlan::with_origins(common, &config, &written);
        let run = PlannedRun { common, config: written, options, device, steps, plan };
        Ok(Some(Planned { run, recipe }))
    }
}

/// State that every stage after planning shares.
pub(crate) struct PlannedRun<'a> {
    pub(crate) common: Common,
    /// The configuration as it is written for a resume.
    pub(crate) config: Config,
    options: RunOptions<'a>,
    device: Device,
    steps: u64,
    plan: RunPlan,
}

/// A training whose plan is printed.
pub(crate) struct Planned<'a> {
    pub(crate) run: PlannedRun<'a>,
    /// The techniques as the plan has chosen them.
    recipe: Recipe,
}

impl<'a> Planned<'a> {
    /// Opens the output folder, if there is one, in which `record` writes what is trained on; limits the memory; and makes the model
    /// with `model`.
    ///
    /// # Errors
    /// A folder that cannot be written; a program that takes more than the budget; those of the closures.
    pub(crate) fn open(
        self,
        record: impl FnOnce(&mut About) -> anyhow::Result<()>,
        model: impl FnOnce(&Recipe) -> anyhow::Result<Prepared>,
    ) -> anyhow::Result<Opened<'a>> {
        let Self { run, recipe } = self;
        let (common, resumes) = (&run.common, run.options.start == Start::Resume);
        let mut saving =
            run.options.out.map(|out| Saving::open(out, common, &run.config, resumes)).transpose()?;
        if let Some(saving) = &mut saving {
            saving.about.plan = run.plan.json();
            if common.is_first() {
                record(&mut saving.about)?;
                note_other_data(common, &saving.about);
            }
        }
        let limit = run.plan.enforce()?;
        let prepared = model(&recipe)?;
        run.plan.apply(&prepared.handles)?;
        Ok(Opened { run, saving, prepared, limit })
    }
}

/// A training whose output folder is open and whose model has every technique.
pub(crate) struct Opened<'a> {
    run: PlannedRun<'a>,
    saving: Option<Saving<'a>>,
    prepared: Prepared,
    limit: Option<Limit>,
}

impl<'a> Opened<'a> {
    /// Chooses what layers keep by measuring one of them on the largest batch, where the step is not predicted and the configuration
    /// asks for a plan; and makes the trainer.
    ///
    /// # Errors
    /// No plan fits the budget; those of the batch.
    pub(crate) fn ready(
        mut self,
        largest: impl FnOnce() -> anyhow::Result<Option<Batch>>,
    ) -> anyhow::Result<Ready<'a>> {
        if !self.run.plan.is_predicted()
            && let Some(batch) = largest()?
        {
            self.measure(&batch)?;
        }
        let Self { run, saving, prepared, limit } = self;
        let (mut trainer, handles) = prepared.trainer(run.steps)?;
        let limits = [run.plan.enforce_beside_offloaded()?, limit];
        trainer.cheaper_plans = run.plan.cheaper_plans(&handles)?;
        Ok(Ready { run, saving, trainer, handles, limits })
    }

    fn measure(&mut self, batch: &Batch) -> anyhow::Result<()> {
        let Some(chosen) = self.prepared.plan_activations(batch)? else { return Ok(()) };
        let layers: Vec<String> = chosen.layers.iter().map(|plan| format!("{plan:?}")).collect();
        let kept = chosen.layers.iter().filter(|plan| **plan == LayerPlan::KeepAll).count();
        let text = format!(
            "activation plan: {kept} of {} layers keep their activations; predicted peak {}",
            layers.len(),
            Bytes(chosen.peak_bytes)
        );
        if let Some(saving) = &mut self.saving {
            saving.about.plan =
                json!({ "layers": layers, "peak_bytes": chosen.peak_bytes, "seconds": chosen.seconds });
        }
        self.run.common.note(&text);
        Ok(())
    }
}

/// The batches of a training, and how its weights are written.
pub(crate) struct Feed {
    pub(crate) train: Box<dyn Batches>,
    pub(crate) validation: Option<Box<dyn Batches>>,
    pub(crate) loading: Loading,
    pub(crate) writer: Option<Rc<dyn Writer>>,
}

/// A training that has its trainer.
pub(crate) struct Ready<'a> {
    pub(crate) run: PlannedRun<'a>,
    saving: Option<Saving<'a>>,
    trainer: Trainer,
    pub(crate) handles: Handles,
    limits: [Option<Limit>; 2],
}

impl<'a> Ready<'a> {
    /// How many numbers the model has, and how many of them are trained.
    pub(crate) fn parameters(&self) -> ParameterCount {
        frugal::models::module::parameter_count(self.trainer.model.as_ref())
    }

    /// The rows at a time with which an evaluation fits the budget; `None` where it is not predicted.
    pub(crate) fn evaluation_rows(&self) -> Option<usize> {
        self.run.plan.evaluation_rows()
    }

    /// The answers that can be generated at a time, each with a question as a row of `longest` positions: their caches and the work on
    /// them take what the budget leaves beside the weights and the optimizer's state.
    ///
    /// # Errors
    /// A system that does not count.
    pub(crate) fn rows_generated(&self, longest: usize, samples: usize) -> anyhow::Result<usize> {
        let model = self.trainer.model.as_ref();
        let left = self.run.plan.left_of(self.parameters().trainable)?;
        let (shape, vocabulary) = (model.cache_shape(), model.vocabulary().unsigned_abs());
        let of_cache = shape.map_or(0, |shape| shape.bytes_per_token()) * longest as u64;
        // Logits in fp32, their copy and their probabilities; and a layer's activations of a question that several answers share.
        let of_logits = 3 * 4 * vocabulary;
        let width = model.config()["hidden_size"].as_u64().unwrap_or(0);
        let of_prompt = 4 * WIDTHS * width * longest as u64 / samples.max(1) as u64;
        Ok(usize::try_from(left / (of_cache + of_logits + of_prompt).max(1)).unwrap_or(usize::MAX).max(1))
    }

    /// Learns from rewards.
    ///
    /// # Errors
    /// An option outside its range.
    pub(crate) fn learn_from(
        &mut self,
        config: PolicyConfig,
        rewards: Box<dyn Rewards>,
    ) -> anyhow::Result<()> {
        let switch = self.handles.adapters.as_ref().map(Adapters::switch);
        let switch = switch.map(|switch| -> Switch { Box::new(move || Ok(Box::new(switch.disable()?))) });
        self.trainer.policy = Some(Policy::new(config, rewards, switch)?);
        Ok(())
    }

    /// The log-probabilities of rows by the model as it is before a checkpoint is read.
    ///
    /// # Errors
    /// Errors of the rows and of the model.
    pub(crate) fn log_probabilities(&self, rows: &MaskedBatches) -> anyhow::Result<Arc<[f32]>> {
        let _precision = self.trainer.precision.clone().map(|policy| precision::enter(Some(policy)));
        let (ranks, together) = (self.trainer.optimizer.ranks(), self.trainer.optimizer.passes_communicate());
        let turns = ranks.as_ref().map(|ranks| InTurns { ranks, together });
        Ok(log_probabilities_of_rows(self.trainer.model.as_ref(), rows, turns)?)
    }

    /// Trains to the end. `before` is called before the first step.
    ///
    /// # Errors
    /// As [`Run::run`].
    pub(crate) fn train(
        self,
        feed: Feed,
        before: impl FnOnce(
            &Common,
            &mut Trainer,
            &mut dyn Batches,
            Option<&mut dyn Batches>,
        ) -> anyhow::Result<()>,
    ) -> anyhow::Result<Finished<'a>> {
        let Self { run, saving, trainer, handles, limits } = self;
        let Feed { train, validation, loading, writer } = feed;
        let (common, config, expected) = (&run.common, &run.config, run.plan.expected());
        let training =
            Run { trainer, config, handles, train, validation, saving, writer: writer.clone(), expected };
        let trained = training.run(common, run.device, |trainer, train, mut validation| {
            // A mutable reference is used twice only through a new borrow.
            let lent = validation.as_mut().map(|validation| &mut **validation as &mut dyn Batches);
            before(common, trainer, train, lent)?;
            match run.options.diagnosis {
                Some(settings) => diagnose(trainer, train, validation, loading, settings, common.json),
                None => Ok(()),
            }
        })?;
        Ok(Finished { run, trained, writer, _limits: limits })
    }
}

/// A training that has ended.
pub(crate) struct Finished<'a> {
    run: PlannedRun<'a>,
    trained: Trained,
    writer: Option<Rc<dyn Writer>>,
    /// The memory stays limited until the weights are written.
    _limits: [Option<Limit>; 2],
}

impl Finished<'_> {
    /// Writes what was trained, and reports the result.
    ///
    /// # Errors
    /// Weights that cannot be written.
    pub(crate) fn write(&self) -> anyhow::Result<()> {
        let result = self.result();
        if let (Some(writer), Some((what, path))) = (&self.writer, &result) {
            let saved = writer.write(self.trained.model.as_ref(), self.trained.optimizer.as_ref(), path);
            self.run.common.first_failure(what, saved)?;
        }
        if self.run.common.is_first() {
            let result = result.as_ref().map(|(what, path)| (*what, path.as_path()));
            report(&self.run.common, self.run.options.out, &self.trained.ended(), result);
        }
        Ok(())
    }

    /// The kind of the trained weights, and their path.
    fn result(&self) -> Option<(&'static str, PathBuf)> {
        let (writer, out) = (self.writer.as_ref()?, self.run.options.out?);
        let path = if writer.what() == "adapter" { out.to_owned() } else { out.join(MODEL) };
        Some((writer.what(), path))
    }

    /// The trained model, if this process prints how its training ended.
    pub(crate) fn shown_model(&self) -> Option<&dyn LanguageModel> {
        let is_shown = self.run.common.is_first() && !self.trained.was_finished;
        is_shown.then_some(self.trained.model.as_ref())
    }

    /// Prints how the training ended, with answers of its model, and what to do next.
    pub(crate) fn print(&self, samples: &[Sample], is_chat: bool) {
        let (Some(out), true) = (self.run.options.out, self.shown_model().is_some()) else { return };
        let outcome = self.trained.outcome.as_ref();
        if let Some(outcome) = outcome.filter(|_| !samples.is_empty()) {
            write_page(&self.run.common, out, outcome.state);
        }
        if !self.run.common.json {
            let next = match &self.writer {
                Some(_) => summary::next_commands(&self.run.config, out, is_chat),
                None => Vec::new(),
            };
            summary::print(&self.run.common, &self.run.config, out, outcome, samples, &next);
        }
    }
}

/// The configuration whose adapter names the commit of its base, in the field that PEFT's files have for it.
fn with_base_revision(mut config: Config) -> Config {
    if let (Some(adapter), Some(revision)) = (&mut config.adapter, &config.model.revision) {
        adapter.read.insert(REVISION.to_owned(), Value::from(revision.clone()));
    }
    config
}
