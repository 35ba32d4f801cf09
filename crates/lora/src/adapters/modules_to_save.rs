//! Tensors of the base that an adapter trains as a whole: modules to save, and biases.
//!
//! The model's tensor keeps its handle, which optimizers and other parts of the model share. Only its memory changes: the
//! base's, or that of the active adapter. So the base is restored bit for bit, and in-place training changes the adapter's own
//! values.
//!
//! Others may exchange the handle's memory too, as offloading does. So the current values are always read from the handle, and
//! are recorded when another adapter becomes active.

use tch::Tensor;

use crate::error::Result;
use crate::linear::exchange;
use crate::switch::Setting;

#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) paths: Vec<String>,
    pub(crate) names: Vec<String>,
    pub(crate) keys: Vec<String>,
    /// The tensor that the model computes with.
    pub(crate) live: Tensor,
    /// The model's original tensor: `live` itself, or one shared with others.
    pub(crate) original: Tensor,
    /// The base's values in the base's memory, while others are active.
    base: Tensor,
    /// Each adapter's values, except the active one's.
    values: Vec<(String, Tensor)>,
    shown: Option<String>,
}

impl Whole {
    pub(crate) fn new(planned: super::plan::PlannedWhole) -> Result<Self> {
        let super::plan::PlannedWhole { paths, names, keys, tensor, split } = planned;
        let base = tensor.f_detach()?;
        let live = if split { tensor.f_detach()? } else { tensor.shallow_clone() };
        Ok(Self { paths, names, keys, live, original: tensor, base, values: Vec::new(), shown: None })
    }

    /// Gives an adapter a copy of the base's values.
    pub(crate) fn push(&mut self, adapter: &str) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let base = self.base()?;
        let mut copy = base.f_empty_like()?;
        copy.f_copy_(&base)?;
        self.values.push((adapter.to_owned(), copy));
        Ok(())
    }

    fn has(&self, adapter: &str) -> bool {
        self.values.iter().any(|(name, _)| name == adapter)
    }

    /// Returns an adapter's values, sharing memory, if it has any: the model's own tensor if it is active.
    pub(crate) fn handle(&self, adapter: &str) -> Result<Option<Tensor>> {
        if self.shown.as_deref() == Some(adapter) {
            return Ok(Some(self.live.shallow_clone()));
        }
        self.of(adapter)
    }

    /// Returns an adapter's values, sharing memory, if it has any.
    pub(crate) fn of(&self, adapter: &str) -> Result<Option<Tensor>> {
        if self.shown.as_deref() == Some(adapter) {
            return Ok(Some(self.live.f_detach()?));
        }
        let values = self.values.iter().find(|(name, _)| name == adapter);
        Ok(values.map(|(_, values)| values.f_detach()).transpose()?)
    }

    /// Returns the base's values, sharing memory.
    pub(crate) fn base(&self) -> Result<Tensor> {
        Ok(if self.shown.is_none() { self.live.f_detach()? } else { self.base.f_detach()? })
    }

    /// Removes an adapter, which is not active.
    pub(crate) fn remove(&mut self, adapter: &str) {
        self.values.retain(|(name, _)| name != adapter);
    }

    /// Activates the values of the last active adapter that has any, or the base's, which are never trained.
    pub(crate) fn show(&mut self, setting: &Setting) -> Result<()> {
        let active = setting.active.iter().rev().filter(|_| setting.disabled == 0);
        let wanted = active.into_iter().find(|name| self.has(name)).cloned();
        let _ = self.live.f_set_requires_grad(wanted.is_some())?;
        if wanted == self.shown {
            return Ok(());
        }
        let next = match &wanted {
            Some(name) => self.of(name)?,
            None => None,
        };
        let next = next.map_or_else(|| self.base(), Ok)?;
        let now = self.live.f_detach()?;
        exchange(&self.live, &next)?;
        match &self.shown {
            Some(shown) => {
                self.values.iter_mut().filter(|(name, _)| name == shown).for_each(|(_, values)| {
                    *values = now.shallow_clone();
                });
            }
            None => self.base = now,
        }
        self.shown = wanted;
        Ok(())
    }
}
