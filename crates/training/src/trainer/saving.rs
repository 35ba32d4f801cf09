//! Checkpoints of a training: when one is written, what is in it, and how a training goes on from one.

use models::module;
use runtime::profile::range;
use runtime::random::RandomState;
use serde_json::json;
use tch::Device;

use super::description::Description;
use super::frozen::kept;
use super::{FailedCheckpoint, Trainer};
use crate::batches::Batches;
use crate::checkpoint::{Checkpoint, Saved, Snapshot, matched, put};
use crate::clip;
use crate::divergence::Watch;
use crate::error::{Error, Result};

/// Why a checkpoint is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Occasion {
    /// So many steps have passed.
    OnTheWay,
    /// The training ends.
    End,
}

impl Trainer {
    /// Saves, unless this step is saved, or is in trouble: what a diverging training writes must not push the last good
    /// checkpoint out.
    pub(super) fn save(&mut self, train: &dyn Batches, occasion: Occasion) -> Result<()> {
        if self.checkpoints.is_none() || self.saved == Some(self.step) {
            return Ok(());
        }
        let _range = range("checkpoint");
        self.optimizer.synchronize()?;
        let bad = self.watch.bad();
        let troubled = bad > 0 && self.options.divergence.patience > 0;
        let reason = if !self.weights_are_finite()? {
            Some("the weights are not finite".to_owned())
        } else if troubled && occasion == Occasion::OnTheWay {
            Some(format!("{bad} losses in a row are out of bounds"))
        } else {
            None
        };
        if let Some(reason) = reason {
            let step = self.step;
            return self.warn(&format!("no checkpoint of step {step}: {reason}; {}", self.last_checkpoint()));
        }
        match self.write(train, troubled) {
            Ok(Saved { path, warnings }) => {
                let step = self.step;
                self.saved = Some(step);
                self.tell(|observer| observer.on_checkpoint(step, &path))?;
                warnings.iter().try_for_each(|warning| self.warn(warning))
            }
            Err(error @ Error::Save { .. }) if self.options.failed_checkpoint == FailedCheckpoint::GoOn => {
                self.warn(&format!("{error}; the training goes on without it"))
            }
            Err(error) => Err(error),
        }
    }

    /// Writes a checkpoint; in trouble, without removing an earlier one.
    fn write(&self, train: &dyn Batches, troubled: bool) -> Result<Saved> {
        let checkpoints = self.checkpoints.as_ref().ok_or_else(|| {
            Error::config("checkpoints", "the training has no folder for them; set Trainer::checkpoints")
        })?;
        let state = json!({
            "run": Description::of(self)?,
            "rule": self.optimizer.rule().name(),
            "scaler": self.scaler.state(),
            "watch": self.watch,
            "data": train.state(),
        });
        let model: Vec<_> = kept(self.model.as_ref(), self.options.frozen)
            .into_iter()
            .map(|(name, tensor)| (name, tensor.detach()))
            .collect();
        let snapshot = Snapshot {
            step: self.step,
            model: &model,
            optimizer: &self.optimizer.state()?,
            random: &RandomState::capture_on(&self.devices())?,
            state: &state,
        };
        if troubled { checkpoints.add(&snapshot) } else { checkpoints.save(&snapshot) }
    }

    fn weights_are_finite(&self) -> Result<bool> {
        let groups = self.optimizer.groups().iter();
        let weights: Vec<_> =
            groups.flat_map(|group| &group.parameters).map(|(_, weight)| weight.shallow_clone()).collect();
        Ok(clip::norm(&weights)?.read()?.is_finite())
    }

    /// Those that the model lies on.
    fn devices(&self) -> Vec<Device> {
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
            || "there is none".to_owned(),
            |step| format!("the last checkpoint is that of step {step}"),
        )
    }

    /// A divergence, with what to go back to.
    pub(super) fn with_last_checkpoint(&self, error: Error) -> Error {
        match error {
            Error::Diverged { step, reason } if self.checkpoints.is_some() => {
                Error::Diverged { step, reason: format!("{reason}; {}", self.last_checkpoint()) }
            }
            error => error,
        }
    }

    /// Goes on from the newest valid checkpoint; one that is not valid becomes a warning, and so does each setting that is
    /// another than the checkpoint's: optimizer, schedule, accumulation, clipping, dropout. Returns the step, or `None`
    /// where there is no checkpoint.
    ///
    /// The random generators of the CPU and of the model's devices go on where they stood; those of other devices are left
    /// alone, so that a checkpoint can be used on a machine with fewer of them.
    ///
    /// # Errors
    /// Checkpoints of which none is valid; one of another model; one that does not fit the optimizer, the scaler or the
    /// data. The training is as it was then.
    pub fn resume(&mut self, train: &mut dyn Batches) -> Result<Option<u64>> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(None) };
        let found = checkpoints.latest()?;
        for reason in &found.refused {
            self.warn(&format!("a checkpoint was passed over: {reason}"))?;
        }
        let Some(checkpoint) = found.checkpoint else { return Ok(None) };
        let mut warnings = self.compare(&checkpoint)?;
        warnings.extend(self.load(&checkpoint, train)?);
        let step = checkpoint.step;
        self.watch = serde_json::from_value::<Watch>(checkpoint.state["watch"].clone()).unwrap_or_default();
        self.pending.clear();
        (self.step, self.saved) = (step, Some(step));
        let name = checkpoint.path.display();
        if self.watch.bad() > 0 {
            let bad = self.watch.bad();
            warnings.push(format!(
                "{name} was written when {bad} losses in a row were out of bounds; remove it to go on from one before"
            ));
        }
        let aside = self.checkpoints.as_ref().map(|checkpoints| checkpoints.go_on_from(step)).transpose()?;
        warnings.extend(aside.unwrap_or_default());
        warnings.iter().try_for_each(|warning| self.warn(warning))?;
        self.tell(|observer| observer.on_resume(step))?;
        Ok(Some(step))
    }

    /// What is another setting than the checkpoint's; an error where it is another model or optimizer.
    fn compare(&self, checkpoint: &Checkpoint) -> Result<Vec<String>> {
        let rule = &checkpoint.state["rule"];
        if rule != self.optimizer.rule().name() {
            let own = self.optimizer.rule().name();
            let reason = format!("it is of the optimizer {rule}; this run has {own}");
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
        Ok(settings.iter().map(|setting| format!("other settings than in {name}: {setting}")).collect())
    }

    /// Puts everything in its place, or nothing. Returns what could not be the same.
    fn load(&mut self, checkpoint: &Checkpoint, train: &mut dyn Batches) -> Result<Vec<String>> {
        let name = checkpoint.path.display().to_string();
        let devices = self.devices();
        let pairs = matched(kept(self.model.as_ref(), self.options.frozen), &checkpoint.model, &name)?;
        let (scaler, data) = (self.scaler.state(), train.state());
        let random = RandomState::capture_on(&devices)?;
        let mut load = || -> Result<Vec<Device>> {
            self.scaler.load_state(&checkpoint.state["scaler"])?;
            train.resume(&checkpoint.state["data"])?;
            let anew = checkpoint.random.restore_on(&devices)?;
            // Last, because it is all or nothing itself.
            self.optimizer.load_state(&checkpoint.optimizer)?;
            Ok(anew)
        };
        match load() {
            Ok(anew) => {
                put(&pairs)?;
                let line =
                    |device: &Device| format!("{name} has no random state of {device:?}, which starts anew");
                Ok(anew.iter().map(line).collect())
            }
            Err(error) => {
                // What fails here was wrong before; the first error is the one to tell.
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
