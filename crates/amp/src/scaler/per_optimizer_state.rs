//! The state of each optimizer between two updates of the scale, as `_per_optimizer_states` in PyTorch's `GradScaler`.
//!
//! Each optimizer goes ready → unscaled → stepped, and an update resets all to ready. A call out of this order is an error,
//! before a tensor is changed.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use crate::error::{Error, Result, refused};

/// The state of one optimizer since the last update.
#[derive(Debug)]
struct Entry {
    /// `[1]`, on the device of the gradients; `None` after the host has read it.
    found_inf: Option<Tensor>,
    overflow: bool,
    stepped: bool,
}

/// The optimizers whose gradients were unscaled since the last update, by name.
#[derive(Debug, Default)]
pub(super) struct PerOptimizerState(BTreeMap<String, Entry>);

impl PerOptimizerState {
    /// Checks that the gradients of an optimizer are neither unscaled nor used.
    pub(super) fn check_unscale(&self, optimizer: &str) -> Result<()> {
        match self.0.get(optimizer) {
            None => Ok(()),
            Some(Entry { stepped: true, .. }) => Err(stepped_twice(optimizer)),
            Some(_) => Err(refused(format!(
                "the gradients of optimizer `{optimizer}` are unscaled already; call `unscale_` once between two updates, after the \
                 backward pass of the last micro-batch"
            ))),
        }
    }

    /// Returns whether the gradients of an optimizer were unscaled.
    pub(super) fn is_unscaled(&self, optimizer: &str) -> bool {
        self.0.contains_key(optimizer)
    }

    /// Marks the gradients of an optimizer as unscaled. `found_inf` stays on its device until a step reads it.
    pub(super) fn mark_unscaled(&mut self, optimizer: &str, found_inf: Option<Tensor>) {
        self.0.insert(optimizer.into(), Entry { found_inf, overflow: false, stepped: false });
    }

    /// Marks an optimizer as stepped and returns whether it may step: its gradients did not overflow. Reads the flags of all
    /// optimizers at once.
    pub(super) fn step(&mut self, optimizer: &str) -> Result<bool> {
        self.check_step(optimizer)?;
        self.read_flags()?;
        let entry = self.entry(optimizer)?;
        entry.stepped = true;
        Ok(!entry.overflow)
    }

    /// Marks an optimizer as stepped and returns its overflow flag, on the device.
    pub(super) fn step_on_device(&mut self, optimizer: &str) -> Result<Tensor> {
        self.check_step(optimizer)?;
        let entry = self.entry(optimizer)?;
        entry.stepped = true;
        Ok(entry.found_inf.as_ref().map_or_else(|| Tensor::from(0f32), Tensor::shallow_clone))
    }

    /// Marks an optimizer as not stepped: its step failed.
    pub(super) fn undo_step(&mut self, optimizer: &str) {
        if let Some(entry) = self.0.get_mut(optimizer) {
            entry.stepped = false;
        }
    }

    fn check_step(&self, optimizer: &str) -> Result<()> {
        match self.0.get(optimizer) {
            None => Err(not_unscaled(optimizer)),
            Some(Entry { stepped: true, .. }) => Err(stepped_twice(optimizer)),
            Some(_) => Ok(()),
        }
    }

    fn entry(&mut self, optimizer: &str) -> Result<&mut Entry> {
        self.0.get_mut(optimizer).ok_or_else(|| not_unscaled(optimizer))
    }

    /// Returns whether any optimizer overflowed, and resets all to ready.
    pub(super) fn take_overflow(&mut self) -> Result<bool> {
        self.check_update()?;
        self.read_flags()?;
        let overflow = self.0.values().any(|entry| entry.overflow);
        self.0.clear();
        Ok(overflow)
    }

    /// Returns the overflow flags of all optimizers, each on its device, and resets all to ready.
    pub(super) fn take_flags(&mut self) -> Result<Vec<Tensor>> {
        self.check_update()?;
        Ok(std::mem::take(&mut self.0).into_values().filter_map(|entry| entry.found_inf).collect())
    }

    fn check_update(&self) -> Result<()> {
        if self.0.values().any(|entry| entry.stepped) {
            return Ok(());
        }
        Err(refused(
            "no optimizer has stepped since the last update; call `step` for each optimizer, then `update` once",
        ))
    }

    /// Resets all optimizers to ready.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Copies the flags that are still on a device to the host, all at once.
    fn read_flags(&mut self) -> Result<()> {
        let pending: Vec<&mut Entry> =
            self.0.values_mut().filter(|entry| entry.found_inf.is_some()).collect();
        let flags: Vec<Tensor> = pending
            .iter()
            .filter_map(|entry| entry.found_inf.as_ref())
            .map(|flag| Ok(flag.f_to_kind(Kind::Float)?.f_reshape([1])?))
            .collect::<Result<_>>()?;
        let Some(device) = flags.first().map(Tensor::device) else { return Ok(()) };
        let flags: Vec<Tensor> =
            flags.iter().map(|flag| flag.f_to_device(device)).collect::<Result<_, _>>()?;
        let values = runtime::ops::read(&Tensor::f_cat(&flags, 0)?)?;
        for (entry, value) in pending.into_iter().zip(values) {
            entry.found_inf = None;
            // A NaN flag counts as an overflow.
            entry.overflow = value != 0.0;
        }
        Ok(())
    }
}

fn stepped_twice(optimizer: &str) -> Error {
    refused(format!(
        "optimizer `{optimizer}` has stepped since the last update; call `update` once after all optimizers have stepped"
    ))
}

fn not_unscaled(optimizer: &str) -> Error {
    refused(format!(
        "the gradients of optimizer `{optimizer}` are not unscaled; call `unscale_` before the optimizer steps, or `step`, which does both"
    ))
}
