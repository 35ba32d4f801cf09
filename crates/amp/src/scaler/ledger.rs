//! Which optimizer stands where between two updates, and what its gradients had.
//!
//! Each optimizer goes ready → unscaled → stepped, and all go back to ready at an update. What is out of that order is an
//! error here, before a tensor is touched.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// What is known of an optimizer since the last update.
#[derive(Debug)]
struct Entry {
    /// `[1]`, on the gradients' device; `None` once it was read, which never happens where the device decides.
    found_inf: Option<Tensor>,
    overflow: bool,
    stepped: bool,
}

/// All optimizers that were unscaled since the last update.
#[derive(Debug, Default)]
pub(super) struct Ledger(BTreeMap<String, Entry>);

impl Ledger {
    /// Whether the gradients of an optimizer may be unscaled now.
    pub(super) fn may_unscale(&self, optimizer: &str) -> Result<()> {
        match self.0.get(optimizer) {
            None => Ok(()),
            Some(Entry { stepped: true, .. }) => Err(Error::SteppedTwice { optimizer: optimizer.into() }),
            Some(_) => Err(Error::UnscaledTwice { optimizer: optimizer.into() }),
        }
    }

    /// Whether they were.
    pub(super) fn is_unscaled(&self, optimizer: &str) -> bool {
        self.0.contains_key(optimizer)
    }

    /// They are now. `found_inf` stays on its device until somebody asks.
    pub(super) fn unscaled(&mut self, optimizer: &str, found_inf: Option<Tensor>) {
        self.0.insert(optimizer.into(), Entry { found_inf, overflow: false, stepped: false });
    }

    /// The optimizer steps, or does not because of an overflow: which of the two. Flags are read for all optimizers at once.
    pub(super) fn step(&mut self, optimizer: &str) -> Result<bool> {
        self.may_step(optimizer)?;
        self.read()?;
        let entry = self.entry(optimizer)?;
        entry.stepped = true;
        Ok(!entry.overflow)
    }

    /// The flag by which the optimizer's step is taken or left out, on its device.
    pub(super) fn step_on_device(&mut self, optimizer: &str) -> Result<Tensor> {
        self.may_step(optimizer)?;
        let entry = self.entry(optimizer)?;
        entry.stepped = true;
        Ok(entry.found_inf.as_ref().map_or_else(|| Tensor::from(0f32), Tensor::shallow_clone))
    }

    /// The step was not taken after all.
    pub(super) fn take_back(&mut self, optimizer: &str) {
        if let Some(entry) = self.0.get_mut(optimizer) {
            entry.stepped = false;
        }
    }

    fn may_step(&self, optimizer: &str) -> Result<()> {
        match self.0.get(optimizer) {
            None => Err(Error::NotUnscaled { optimizer: optimizer.into() }),
            Some(Entry { stepped: true, .. }) => Err(Error::SteppedTwice { optimizer: optimizer.into() }),
            Some(_) => Ok(()),
        }
    }

    fn entry(&mut self, optimizer: &str) -> Result<&mut Entry> {
        self.0.get_mut(optimizer).ok_or_else(|| Error::NotUnscaled { optimizer: optimizer.into() })
    }

    /// Whether any gradient of any optimizer overflowed; all are ready again.
    pub(super) fn settle(&mut self) -> Result<bool> {
        self.may_settle()?;
        self.read()?;
        let overflow = self.0.values().any(|entry| entry.overflow);
        self.0.clear();
        Ok(overflow)
    }

    /// The flags of all optimizers, each on its device; all are ready again.
    pub(super) fn settle_on_device(&mut self) -> Result<Vec<Tensor>> {
        self.may_settle()?;
        Ok(std::mem::take(&mut self.0).into_values().filter_map(|entry| entry.found_inf).collect())
    }

    fn may_settle(&self) -> Result<()> {
        if self.0.values().any(|entry| entry.stepped) { Ok(()) } else { Err(Error::NothingStepped) }
    }

    /// Forgets what was unscaled: the steps of this round are not taken.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Brings the flags that are still on a device to the host, in one copy.
    fn read(&mut self) -> Result<()> {
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
            // A flag that is NaN itself is no good sign either.
            entry.overflow = value != 0.0;
        }
        Ok(())
    }
}
