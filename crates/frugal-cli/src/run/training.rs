//! A training that is ready to run: what a fine-tuning and a training from scratch share.

use std::path::Path;
use std::rc::Rc;

use crate::output::progress_bar::Display;
use anyhow::bail;
use frugal::config::{Config, Task};
use frugal::loss_log::{LossLog, LossSummary, Losses};
use frugal::models::module::{self, LanguageModel, ParameterCount};
use frugal::recipe::Handles;
use frugal::run_folder::{LOSSES, LossTable, Outcome, State, TABLE};
use frugal::training::interrupt;
use frugal::training::optimizer::Optimizer;
use frugal::training::trainer::StopReason;
use frugal::training::{Batches, Trainer};
use report::cli::Failure;
use tch::Device;

use crate::common_flags::Common;
use crate::folder::best_weights::{KeepBest, Writer, forget_best};
use crate::folder::open::Saving;
use crate::folder::run_record::Recorder;
use crate::output::Lines;
use crate::output::ended_training::Ended;
use crate::output::records::StepRecords;
use crate::output::shell_command::shell_word;
use crate::run::plan::{Expected, NOTHING_FITS};
use crate::run::ranks::{Interrupted, flatten};

/// The error of `--evaluate-every` without data.
pub(crate) const NO_VALIDATION: &str =
    "--evaluate-every, and no validation data; give some as --validation, or leave it out";

/// The words of a system that has no more memory, in its errors.
const NO_MORE: [&str; 2] = ["the system gives no more", "can't allocate memory"];

/// Names the budget in an error about memory that it caused.
pub(crate) fn name_budget(error: anyhow::Error, config: &Config) -> anyhow::Error {
    let text = format!("{error:#}");
    if NO_MORE.iter().any(|words| text.contains(words)) {
        let message = format!(
            "{text}; or give a --budget below what the system gives, for which a training is planned that takes less"
        );
        return Failure { status: NOTHING_FITS, message }.into();
    }
    if !text.contains("out of memory on the CPU") {
        return error;
    }
    let budget = config.training.budget.map_or_else(
        || "80 % of the memory that was free".to_owned(),
        |budget| format!("the budget of {budget}"),
    );
    let of_base = if config.adapter.is_some() { ", --dtype nf4" } else { "" };
    let message = format!(
        "the training needs more than {budget}; give a larger --budget, a smaller --batch-size, --activations recompute{of_base}, or \
         --offload file --ring 1"
    );
    Failure { status: NOTHING_FITS, message }.into()
}

/// Names the command that continues a training whose checkpoint could not be written.
pub(crate) fn name_resume(error: anyhow::Error, out: Option<&Path>) -> anyhow::Error {
    match (error.downcast_ref::<frugal::training::Error>(), out) {
        (Some(frugal::training::Error::Save { .. }), Some(out)) => {
            let out = shell_word(&out.display().to_string());
            anyhow::Error::msg(format!(
                "{error}; then continue with `frugal resume {out}`, where `--set training.keep=N` keeps fewer checkpoints"
            ))
        }
        _ => error,
    }
}

/// A training that is ready to run.
pub(crate) struct Run<'a> {
    pub(crate) trainer: Trainer,
    pub(crate) config: &'a Config,
    pub(crate) handles: Handles,
    pub(crate) train: Box<dyn Batches>,
    pub(crate) validation: Option<Box<dyn Batches>>,
    pub(crate) saving: Option<Saving<'a>>,
    /// Writes the weights of the best evaluation.
    pub(crate) writer: Option<Rc<dyn Writer>>,
    /// The predicted time of a step.
    pub(crate) expected: Option<Expected>,
}

/// The result of a training.
pub(crate) struct Trained {
    pub(crate) model: Box<dyn LanguageModel>,
    /// Gathers weights that are sharded over ranks.
    pub(crate) optimizer: Box<dyn Optimizer>,
    /// The techniques live until the weights are written.
    _handles: Handles,
    pub(crate) step: u64,
    pub(crate) losses: Losses,
    /// Whether all steps had been done before: a resume of a finished training.
    pub(crate) was_finished: bool,
    /// How it ended, if it has an output folder.
    pub(crate) outcome: Option<Outcome>,
}

impl Trained {
    /// The figures that are reported.
    pub(crate) fn ended(&self) -> Ended<'_> {
        Ended {
            counted: module::parameter_count(self.model.as_ref()),
            step: self.step,
            losses: self.losses,
            was_finished: self.was_finished,
            outcome: self.outcome.as_ref(),
        }
    }
}

impl Run<'_> {
    /// How many numbers the model has, and how many of them are trained.
    pub(crate) fn parameters(&self) -> ParameterCount {
        module::parameter_count(self.trainer.model.as_ref())
    }

    /// Resumes if that is asked for, trains to the end and saves; `before` is called after the observers are set.
    ///
    /// # Errors
    /// A training that was interrupted: the error names the command that resumes it. Those of the training.
    pub(crate) fn run(
        self,
        common: &Common,
        device: Device,
        before: impl FnOnce(&mut Trainer, &mut dyn Batches, Option<&mut dyn Batches>) -> anyhow::Result<()>,
    ) -> anyhow::Result<Trained> {
        let counted = self.parameters();
        let Self { mut trainer, config, handles, mut train, mut validation, saving, writer, expected } = self;
        let mut fields = Vec::new();
        flatten("data", &train.state(), &mut fields);
        for (name, _) in &mut fields {
            name.push_str(" (each machine needs the same data)");
        }
        fields.extend([
            ("steps".to_owned(), trainer.options.steps.to_string()),
            ("resume".to_owned(), saving.as_ref().is_some_and(|saving| saving.resume).to_string()),
        ]);
        common.agree(&fields)?;
        let summary = LossSummary::default();
        trainer.observers.push(Box::new(summary.clone()));
        observe(common, config, device, &mut trainer)?;
        trainer.stop = interrupt::on_signals()?;
        let out = saving.as_ref().map(|saving| saving.out.to_owned());
        let begun = Beginning { common, config, device, counted, writer };
        let (recorder, was_finished) = match saving {
            Some(saving) => begun.in_folder(saving, &mut trainer, train.as_mut())?,
            None => (None, false),
        };

        // The steps.
        let steps = || -> anyhow::Result<StopReason> {
            before(&mut trainer, train.as_mut(), lend(&mut validation))?;
            if let Some(expected) = expected {
                expected.calibrate(common, &mut trainer, train.as_mut(), lend(&mut validation))?;
            }
            Ok(trainer.run(train.as_mut(), lend(&mut validation))?)
        };
        let ended = match steps() {
            Ok(ended) => ended,
            Err(error) => {
                if let (Some(reason), Some(recorder)) = (failure(&error), recorder) {
                    recorder.end(common, (State::Failed, Some(reason)), trainer.step())?;
                }
                return Err(error);
            }
        };

        // The last evaluation.
        let step = trainer.step();
        let evaluated = trainer.options.evaluate_every.is_some_and(|every| step.is_multiple_of(every));
        let is_due = ended != StopReason::Interrupted && !evaluated && !was_finished;
        if let Some(validation) = validation.as_mut().filter(|_| is_due && config.task == Task::Finetune) {
            trainer.evaluate(validation.as_mut())?;
        }
        // Bars and files are closed before the result is reported.
        trainer.observers.clear();
        if let Some(offload) = &handles.offload {
            offload.synchronize()?;
        }

        // The outcome.
        let failure = NothingLearned::of(&trainer);
        let state = match ended {
            StopReason::Interrupted => State::Interrupted,
            _ if failure.is_some() => State::Failed,
            StopReason::Completed | StopReason::OutOfData => State::Finished,
            StopReason::StoppedEarly => State::StoppedEarly,
        };
        let outcome = recorder.map(|recorder| recorder.end(common, (state, None), step)).transpose()?;
        finish(common, &trainer, (ended, failure), out.as_deref())?;
        // The log has the losses before a resume too.
        let losses = match out {
            Some(out) if common.is_first() => Losses::read(&out.join(LOSSES))?,
            _ => summary.get(),
        };
        let Trainer { model, optimizer, .. } = trainer;
        Ok(Trained { model, optimizer, _handles: handles, step, losses, was_finished, outcome })
    }
}

/// Adds the observers that print and record steps.
fn observe(common: &Common, config: &Config, device: Device, trainer: &mut Trainer) -> anyhow::Result<()> {
    if !common.quiet {
        let display = Display::new(trainer.options.steps, device);
        trainer.observers.push(Box::new(display.with_budget(config.training.budget.map(|budget| budget.0))));
    }
    if common.json {
        trainer.observers.push(Box::new(Lines));
    }
    if let Some(path) = &common.records {
        trainer.observers.push(Box::new(StepRecords::append(path, config, device)?));
    }
    Ok(())
}

/// The beginning of a training in its output folder.
struct Beginning<'a> {
    common: &'a Common,
    config: &'a Config,
    device: Device,
    counted: ParameterCount,
    writer: Option<Rc<dyn Writer>>,
}

impl Beginning<'_> {
    /// Resumes if that is asked for, and gives the trainer the folder's checkpoints and logs. Returns the record of the run, which rank 0 has
    /// unless all steps were done before, and whether they were.
    fn in_folder<'out>(
        self,
        saving: Saving<'out>,
        trainer: &mut Trainer,
        train: &mut dyn Batches,
    ) -> anyhow::Result<(Option<Recorder<'out>>, bool)> {
        let Self { common, config, device, counted, writer } = self;
        let Saving { out, checkpoints, resume, about } = saving;
        if common.is_first() {
            trainer.observers.push(Box::new(LossLog::open(&out.join(LOSSES), resume)?));
            trainer.observers.push(Box::new(LossTable::open(&out.join(TABLE), resume)?));
            trainer.observers.push(Box::new(crate::output::curves::Curves::new(out)));
        }
        if let Some(writer) = writer.filter(|_| trainer.options.evaluate_every.is_some()) {
            let (common, out) = (common.clone(), out.to_owned());
            trainer.best = Some(Box::new(KeepBest { common, writer, out }));
        }
        trainer.checkpoints = Some(checkpoints);
        let was_finished = resume && {
            trainer.resume(train)?;
            note_resume(common, trainer);
            trainer.step() >= trainer.options.steps
        };
        // Only after the checkpoint is known to belong to this training.
        if !common.is_first() || was_finished {
            return Ok((None, was_finished));
        }
        if trainer.step() == 0 {
            forget_best(out)?;
        }
        let progress = (counted, trainer.step(), trainer.options.steps, train.state());
        let config = with_absolute_paths(config);
        let recorder = Recorder::start(out, common, &config, about, progress, device)?;
        trainer.observers.extend(recorder.watch_memory());
        Ok((Some(recorder), false))
    }
}

/// Prints the step at which a training goes on.
fn note_resume(common: &Common, trainer: &Trainer) {
    let (step, steps) = (trainer.step(), trainer.options.steps);
    let text = match step {
        0 => "there is no checkpoint yet; the training starts at the beginning".to_owned(),
        _ if step > steps => format!("{step} steps are done, more than the {steps} that are asked for"),
        _ => format!("resumes after step {step} of {steps}"),
    };
    if !common.json {
        common.note(&text);
    }
}

/// The remedy for a loss that is not finite from the beginning.
const BROKEN: &str = "; the files of the model, or of the adapter, are broken: get them again";

/// The remedy for a loss that is not finite.
const DIVERGED: &str = "; give a lower --lr, a longer --warmup, or --clip 1";

/// Why a training has failed by an error after which it would fail again: its losses are not finite, or far from what they were, or it
/// has too little memory.
fn failure(error: &anyhow::Error) -> Option<&'static str> {
    use frugal::training::Error;
    match error.downcast_ref() {
        Some(Error::NonFiniteWeight { .. } | Error::Diverged { .. }) => Some("diverged"),
        _ if is_out_of_memory(error) => Some("out of memory"),
        _ => None,
    }
}

/// Whether an allocation was refused.
fn is_out_of_memory(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(frugal::training::Error::is_out_of_memory)
        || error.downcast_ref().is_some_and(frugal::Error::is_out_of_memory)
        || error.downcast_ref().is_some_and(runtime::Error::is_out_of_memory)
}

/// Why a training that came to its end has learned nothing.
struct NothingLearned {
    reason: String,
    /// The weight that is the reason, as the end of a sentence.
    weight: String,
    remedy: &'static str,
}

impl NothingLearned {
    /// Its last loss is not finite, or it has skipped every step. All ranks call it.
    fn of(trainer: &Trainer) -> Option<Self> {
        let (weight, remedy) = match trainer.first_non_finite() {
            // A failure to look would hide the reason.
            Some(first) => match trainer.non_finite_weight() {
                Ok(Some(weight)) => {
                    let remedy = if first.step == 1 { BROKEN } else { DIVERGED };
                    (format!("; `{weight}` has an infinity or a NaN"), remedy)
                }
                _ => (String::new(), DIVERGED),
            },
            None => (String::new(), DIVERGED),
        };
        let reason = match trainer.first_non_finite() {
            Some(first) => first.to_string(),
            None if trainer.has_skipped_all() => {
                "every step was skipped, because a gradient was not finite".to_owned()
            }
            None => return None,
        };
        Some(Self { reason, weight, remedy })
    }
}

/// Checks the end of a training: a loss that is not finite, or a last step that is not on the disk, is a failure.
fn finish(
    common: &Common,
    trainer: &Trainer,
    (ended, failure): (StopReason, Option<NothingLearned>),
    out: Option<&Path>,
) -> anyhow::Result<()> {
    let (step, steps) = (trainer.step(), trainer.options.steps);
    let resume = out.map_or_else(String::new, |out| common.resume_command(out));
    let why = trainer.refused_checkpoint().map_or_else(String::new, |why| format!(", because {why}"));
    let kept = match trainer.saved() {
        _ if out.is_none() => "nothing is saved without --out".to_owned(),
        Some(saved) if saved == step && ended == StopReason::Interrupted => {
            let text =
                format!("interrupted after step {step} of {steps}, which is saved; resume with {resume}");
            return Err(Interrupted(text).into());
        }
        Some(saved) if saved == step && failure.is_none() => return Ok(()),
        Some(saved) if saved == step => "its weights are in the checkpoint of that step".to_owned(),
        Some(saved) => {
            format!(
                "its checkpoint was not written{why}, and the last is that of step {saved}; resume from it with {resume}"
            )
        }
        None => format!("its checkpoint was not written{why}, and there is no earlier one"),
    };
    let remedy = match &failure {
        Some(failure) => failure.remedy,
        None if why.is_empty() => "",
        None => DIVERGED,
    };
    match (ended, out, failure) {
        (StopReason::Interrupted, ..) => {
            Err(Interrupted(format!("interrupted after step {step} of {steps}; {kept}")).into())
        }
        (_, None, None) => Ok(()),
        (_, None, Some(NothingLearned { reason, weight, .. })) => {
            bail!("trained up to step {step}: {reason}{weight}{remedy}")
        }
        (_, Some(_), Some(NothingLearned { reason, weight, .. })) if trainer.saved() == Some(step) => {
            bail!("trained up to step {step}: {reason}{weight}; {kept}{remedy}")
        }
        (_, Some(_), Some(failure)) => bail!("trained up to step {step}; {kept}{}{remedy}", failure.weight),
        (_, Some(_), _) => bail!("trained up to step {step}; {kept}{remedy}"),
    }
}

/// A validation for one call of the loop.
fn lend(validation: &mut Option<Box<dyn Batches>>) -> Option<&mut dyn Batches> {
    validation.as_mut().map(|validation| validation.as_mut() as &mut dyn Batches)
}

/// The configuration as a resume from any folder finds what it names.
fn with_absolute_paths(config: &Config) -> Config {
    let mut config = config.clone();
    let absolute = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let text = |path: &mut String| {
        if Path::new(path.as_str()).exists() {
            *path = absolute(Path::new(path.as_str())).display().to_string();
        }
    };
    let objective = &mut config.objective;
    let others = objective.teacher.iter_mut().chain(&mut objective.reference_model);
    config.model.name.iter_mut().chain(others).for_each(text);
    text(&mut config.data.source);
    config.data.mixture.iter_mut().for_each(|source| text(&mut source.source));
    let data = &mut config.data;
    let paths = [&mut data.validation, &mut data.tokenizer, &mut data.chat_template];
    for path in paths.into_iter().flatten() {
        *path = absolute(path);
    }
    config
}
