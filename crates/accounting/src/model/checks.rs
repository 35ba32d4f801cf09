//! Models that some answers are not given for.

use decoder::{Family, NormPlacement};

use super::Decoder;
use crate::Error;

impl Decoder {
    /// Refuses a model if the memory of its passes over rows of `sequence` tokens is not modelled operation by operation. `has_kernel` says
    /// whether one kernel computes attention with windows and sinks, as on a CPU; then they take no memory of their own.
    ///
    /// # Errors
    /// [`Error::Shape`] with the family or the window.
    pub fn check_passes(&self, sequence: u64, has_kernel: bool) -> Result<(), Error> {
        let is_modelled = has_modelled_passes(self.family);
        if is_modelled && !has_kernel && self.family.facts().has_sinks {
            return Err(not_modelled(format!(
                "the activations of {}, whose attention has sinks, are not modelled on a GPU",
                self.family.model_type()
            )));
        }
        self.check_modelled(is_modelled, if has_kernel { 0 } else { sequence })
    }

    pub(crate) fn check_modelled(&self, is_modelled: bool, sequence: u64) -> Result<(), Error> {
        if !is_modelled {
            let what = format!("the activations of {} are not modelled", self.family.model_type());
            return Err(not_modelled(what));
        }
        match self.sizes.windows {
            Some(windows) if windows.tokens < sequence => Err(not_modelled(format!(
                "the activations of {sequence} tokens in windows of {} are not modelled",
                windows.tokens
            ))),
            _ => Ok(()),
        }
    }

    /// Returns an error with linear attention, in a Gemma 4, or with the mixture of experts that only some layers have.
    pub(crate) fn check_uniform(&self) -> Result<(), Error> {
        if let Some(linear) = self.linear {
            return Err(Error::Shape {
                what: format!("{} of {} layers have linear attention", linear.layers, self.layers),
                remedy: "this is answered for a model whose layers are alike".into(),
            });
        }
        self.check_widths()?;
        self.check_experts()
    }

    /// Returns an error for layers of different widths: those of a Gemma 4.
    pub(crate) fn check_widths(&self) -> Result<(), Error> {
        if self.gemma4.is_some() {
            return Err(Error::Shape {
                what: format!("the layers of {} differ", self.family.model_type()),
                remedy: "its parameters, FLOPs and cache are predicted; measure a step instead".into(),
            });
        }
        Ok(())
    }

    /// Returns an error with the mixture of experts that only some layers have.
    pub(crate) fn check_experts(&self) -> Result<(), Error> {
        match self.experts.filter(|experts| experts.layers < self.layers) {
            None => Ok(()),
            Some(experts) => Err(Error::Shape {
                what: format!("{} of {} layers have experts", experts.layers, self.layers),
                remedy: "only its number of parameters is predicted; give a model whose layers are alike"
                    .into(),
            }),
        }
    }
}

fn not_modelled(what: String) -> Error {
    Error::Shape { what, remedy: "its parameters, FLOPs and KV cache are; measure a step instead".into() }
}

/// Returns whether the memory of a family's blocks is modelled operation by operation, as `models` runs them; windows and sinks where one
/// kernel computes them ([`Decoder::check_passes`]).
pub const fn has_modelled_passes(family: Family) -> bool {
    family.is_swiglu()
        && family.has_separate_projections()
        && matches!(family.facts().norms, NormPlacement::Pre)
}
