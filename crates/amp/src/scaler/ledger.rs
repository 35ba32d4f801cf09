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
    /// `[1]`, on the gradients' device; `None` once it was read.
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
        match self.0.get(optimizer) {
            None => return Err(Error::NotUnscaled { optimizer: optimizer.into() }),
            Some(Entry { stepped: true, .. }) => {
                return Err(Error::SteppedTwice { optimizer: optimizer.into() });
            }
            Some(_) => {}
        }
        self.read()?;
        let entry =
            self.0.get_mut(optimizer).ok_or_else(|| Error::NotUnscaled { optimizer: optimizer.into() })?;
        entry.stepped = true;
        Ok(!entry.overflow)
    }

    /// Whether any gradient of any optimizer overflowed; all are ready again.
    pub(super) fn settle(&mut self) -> Result<bool> {
        if !self.0.values().any(|entry| entry.stepped) {
            return Err(Error::NothingStepped);
        }
        self.read()?;
        let overflow = self.0.values().any(|entry| entry.overflow);
        self.0.clear();
        Ok(overflow)
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
        let values = Vec::<f32>::try_from(Tensor::f_cat(&flags, 0)?)?;
        for (entry, value) in pending.into_iter().zip(values) {
            entry.found_inf = None;
            // A flag that is NaN itself is no good sign either.
            entry.overflow = value != 0.0;
        }
        Ok(())
    }
}
