//! Checkpoints of a training: when one is written, what it contains, and how a training resumes from it.

use models::module;
use runtime::profile::range;
use runtime::random::RandomState;
use serde_json::json;
use tch::Device;

use super::description::Description;
use super::frozen::kept;
use super::{Best, FailedCheckpoint, Trainer};
use crate::batches::Batches;
use crate::checkpoint::{Checkpoint, Saved, Snapshot, matched};
use crate::clip;
use crate::divergence::DivergenceMonitor;
use crate::error::{Error, Result};

/// Why a checkpoint is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SaveReason {
    /// A regular interval has passed.
    Periodic,
    /// The training ends.
    End,
}

impl Trainer {
    /// Saves a checkpoint, unless this step is already saved or the run is diverging: a diverging run never evicts a good
    /// checkpoint.
    pub(super) fn save(&mut self, train: &dyn Batches, reason: SaveReason) -> Result<()> {
        if self.checkpoints.is_none() || self.saved == Some(self.step) {
            return Ok(());
        }
        let _range = range("checkpoint");
        self.refuse_interrupted()?;
        self.finish_updates()?;
        let bad = self.watch.bad();
        let troubled = bad > 0 && self.options.divergence.patience > 0;
        let reason = if !self.weights_are_finite()? {
            self.trouble.refuse("the weights are not finite");
            self.refused_checkpoint()
        } else if troubled && reason == SaveReason::Periodic {
            Some(format!("{bad} losses in a row are bad"))
        } else {
            None
        };
        if let Some(reason) = reason {
            let step = self.step;
            return self.warn(&format!("no checkpoint of step {step}: {reason}; {}", self.last_checkpoint()));
        }
        match self.outcome_of_all(self.write(train, troubled)) {
            Ok(None) => {
                self.trouble.save();
                self.saved = Some(self.step);
                Ok(())
            }
            Ok(Some(Saved { path, warnings })) => {
                let step = self.step;
                self.trouble.save();
                self.saved = Some(step);
                self.tell(|observer| observer.on_checkpoint(step, &path))?;
                warnings.iter().try_for_each(|warning| self.warn(warning))
            }
            Err(error @ Error::Save { .. })
                if self.options.failed_checkpoint == FailedCheckpoint::Continue =>
            {
                self.warn(&format!("{error}; the training continues without it"))
            }
            Err(error) => Err(error),
        }
    }

    /// Writes a checkpoint; while diverging, without removing earlier ones. `None` on a rank that leaves the writing to rank 0:
    /// it only gives its parts of the weights and of the optimizer's state.
    fn write(&self, train: &dyn Batches, troubled: bool) -> Result<Option<Saved>> {
        let checkpoints = self.checkpoints.as_ref().ok_or_else(|| {
            Error::config("checkpoints", "the training has no checkpoint folder; set Trainer::checkpoints")
        })?;
        // All ranks take part in what follows, in the same order.
        self.frozen_fingerprint()?;
        let optimizer = self.optimizer.lazy_state()?;
        let model = kept(self.model.as_ref(), self.options.frozen).into_iter();
        let model = model.map(|(name, tensor)| self.optimizer.lazy_weight(name, tensor)).collect();
        let state = json!({
            "run": Description::of(self)?,
            "rule": self.optimizer.rule().name(),
            "scaler": self.scaler.state(),
            "watch": self.watch,
            "best": self.best_so_far,
            "data": train.state(),
            "steps": self.options.steps,
        });
        let random = RandomState::capture_on(&self.devices())?;
        let mut snapshot = Snapshot::new(self.step, model, optimizer, random, state);
        if checkpoints.is_reader() {
            return snapshot.give().map(|()| None);
        }
        if troubled { checkpoints.add(snapshot) } else { checkpoints.save(snapshot) }.map(Some)
    }

    fn weights_are_finite(&self) -> Result<bool> {
        let finite = clip::norm(&self.optimizer.own_weights())?.read()?.is_finite();
        let [not_finite] = self.any_rank([!finite], "weights that are not finite")?;
        Ok(!not_finite)
    }

    /// The devices of the model.
    pub(super) fn devices(&self) -> Vec<Device> {
        let mut devices = Vec::new();
        for named in module::tensors(self.model.as_ref()) {
            let device = named.tensor.device();
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        devices
    }

    fn last_checkpoint(&self) -> String {
        self.saved.map_or_else(
            || "there is no checkpoint".to_owned(),
            |step| format!("the last checkpoint is of step {step}"),
        )
    }

    /// Adds the last checkpoint to a divergence.
    pub(super) fn with_last_checkpoint(&self, error: Error) -> Error {
        match error {
            Error::Diverged { step, mut reason } => {
                if let Some(first) = self.first_non_finite().filter(|first| first.step < step) {
                    reason = format!("{reason}: {first}");
                }
                // Its own failure would hide the error.
                let weight = self.first_non_finite().and_then(|_| self.non_finite_weight().ok().flatten());
                if let Some(weight) = weight {
                    reason = format!("{reason}; `{weight}` has an infinity or a NaN");
                }
                if self.checkpoints.is_some() {
                    reason = format!("{reason}; {}", self.last_checkpoint());
                }
                Error::Diverged { step, reason }
            }
            error => error,
        }
    }

    /// Resumes from the newest valid checkpoint. Reports a warning for each invalid checkpoint and for each setting that
    /// differs from the checkpoint's: optimizer, schedule, accumulation, clipping, dropout. Returns the step, or `None` without
    /// any checkpoint.
    ///
    /// Restores the random generators of the CPU and of the model's devices, but not of others, so that a checkpoint can be
    /// used on a machine with fewer devices.
    ///
    /// # Errors
    /// No valid checkpoint among several; one of another model; one that does not match the optimizer, the scaler or the data.
    /// Then the training is unchanged. [`Error::Interrupted`] for a weight that cannot be set: the training is refused until it has resumed.
    pub fn resume(&mut self, train: &mut dyn Batches) -> Result<Option<u64>> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(None) };
        let latest = checkpoints.latest()?;
        // No rank changes the folder before all have read it, and all have read the same: they share the folder, or each machine has a copy.
        if let Some(ranks) = self.optimizer.ranks() {
            let (step, digest) = match &latest.checkpoint {
                Some(checkpoint) => (checkpoint.step.to_string(), checkpoint.digest()?),
                None => ("none".to_owned(), "none".to_owned()),
            };
            let newest =
                "step of the newest valid checkpoint in the output folder (each machine needs a copy)";
            ranks.all().agree(&[(newest, &step), ("manifest of it", &digest)])?;
        }
        for reason in &latest.refused {
            self.warn(&format!("a checkpoint was skipped: {reason}"))?;
        }
        let Some(checkpoint) = latest.checkpoint else { return Ok(None) };
        let mut warnings = self.compare(&checkpoint)?;
        warnings.extend(self.load(&checkpoint, train)?);
        let step = checkpoint.step;
        self.watch = serde_json::from_value::<DivergenceMonitor>(checkpoint.state["watch"].clone())
            .unwrap_or_default();
        // A checkpoint of an earlier version has none.
        self.best_so_far =
            serde_json::from_value::<Option<Best>>(checkpoint.state["best"].clone()).unwrap_or_default();
        self.pending.clear();
        (self.step, self.saved, self.interrupted) = (step, Some(step), None);
        let name = checkpoint.path.display();
        if self.watch.bad() > 0 {
            let bad = self.watch.bad();
            warnings.push(format!(
                "{name} was written after {bad} bad losses in a row; remove it to resume from an earlier one"
            ));
        }
        let writer = self.checkpoints.as_ref().filter(|checkpoints| !checkpoints.is_reader());
        let aside = writer.map(|checkpoints| checkpoints.abandon_after(step)).transpose()?;
        warnings.extend(aside.unwrap_or_default());
        warnings.iter().try_for_each(|warning| self.warn(warning))?;
        self.tell(|observer| observer.on_resume(step))?;
        Ok(Some(step))
    }

    /// Returns the settings that differ from the checkpoint's; refuses another model or optimizer.
    fn compare(&self, checkpoint: &Checkpoint) -> Result<Vec<String>> {
        let rule = &checkpoint.state["rule"];
        if rule != self.optimizer.rule().name() {
            let current = self.optimizer.rule().name();
            let reason = format!("it was saved by the optimizer {rule}, but this run uses {current}");
            return Err(Error::file(&checkpoint.path, reason));
        }
        let Ok(before) = serde_json::from_value::<Description>(checkpoint.state["run"].clone()) else {
            return Ok(Vec::new());
        };
        let (model, settings) = Description::of(self)?.differences(&before);
        if !model.is_empty() {
            let reason = format!(
                "it is of another model: {}; resume with that model, or start again in an empty folder",
                model.join("; ")
            );
            return Err(Error::file(&checkpoint.path, reason));
        }
        let name = checkpoint.path.display();
        Ok(settings.iter().map(|setting| format!("settings differ from {name}: {setting}")).collect())
    }

    /// Restores everything, or nothing; after a weight that cannot be set, the training goes no further ([`Error::Interrupted`]). Returns
    /// warnings about what could not be restored.
    fn load(&mut self, checkpoint: &Checkpoint, train: &mut dyn Batches) -> Result<Vec<String>> {
        let name = checkpoint.path.display().to_string();
        let devices = self.devices();
        let pairs = matched(kept(self.model.as_ref(), self.options.frozen), &checkpoint.model, &name)?;
        let (scaler, data) = (self.scaler.state(), train.state());
        let random = RandomState::capture_on(&devices)?;
        // The state gets other memory.
        self.captured.drop_graphs();
        let mut load = || -> Result<Vec<Device>> {
            self.scaler.load_state(&checkpoint.state["scaler"])?;
            train.resume(&checkpoint.state["data"])?;
            let anew = checkpoint.random.restore_on(&devices)?;
            // Last, because it changes everything or nothing.
            self.optimizer.load_state(&checkpoint.optimizer)?;
            Ok(anew)
        };
        match load() {
            Ok(anew) => {
                // The optimizer is the checkpoint's by now, so a weight that cannot be set leaves a training of two steps.
                pairs
                    .iter()
                    .try_for_each(|(tensor, values)| self.optimizer.set_weight(tensor, values))
                    .map_err(|error| self.interrupt(checkpoint.step, error))?;
                let line = |device: &Device| {
                    format!("{name} has no random state of {device:?}, which is not restored")
                };
                Ok(anew.iter().map(line).collect())
            }
            Err(error) => {
                // A failure here was one before; the first error is the one to report.
                let _: [Result<()>; 3] = [
                    self.scaler.load_state(&scaler),
                    train.resume(&data),
                    random.restore().map_err(Into::into),
                ];
                Err(error)
            }
        }
    }
}
