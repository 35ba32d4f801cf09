//! Tensors of the base that an adapter trains whole: modules to save, and biases.
//!
//! The model's tensor keeps its handle, which optimizers and other parts of the model hold. What changes is whose memory it shows:
//! the base's, or that of the adapter that computes. So the base comes back bit for bit, and what is trained in place is the
//! adapter's own.

use tch::Tensor;

use crate::error::Result;
use crate::linear::exchange;
use crate::switch::Setting;

#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) paths: Vec<String>,
    pub(crate) names: Vec<String>,
    pub(crate) keys: Vec<String>,
    /// What the model computes with.
    pub(crate) live: Tensor,
    /// What stood in the model before: `live` itself, or the one that others share.
    pub(crate) original: Tensor,
    /// The base's values, in the base's memory.
    pub(crate) base: Tensor,
    /// Each adapter's.
    pub(crate) values: Vec<(String, Tensor)>,
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
        let mut copy = self.base.f_empty_like()?;
        copy.f_copy_(&self.base)?;
        self.values.push((adapter.to_owned(), copy));
        Ok(())
    }

    pub(crate) fn of(&self, adapter: &str) -> Option<&Tensor> {
        self.values.iter().find(|(name, _)| name == adapter).map(|(_, values)| values)
    }

    /// Shows the values of the last adapter that computes and has some, or the base's, which are never trained.
    pub(crate) fn show(&mut self, setting: &Setting) -> Result<()> {
        let active = setting.active.iter().rev().filter(|_| setting.disabled == 0);
        let wanted = active.into_iter().find(|name| self.of(name).is_some()).cloned();
        let _ = self.live.f_set_requires_grad(wanted.is_some())?;
        if wanted == self.shown {
            return Ok(());
        }
        let values = wanted.as_deref().and_then(|name| self.of(name));
        exchange(&self.live, values.unwrap_or(&self.base))?;
        self.shown = wanted;
        Ok(())
    }
}
