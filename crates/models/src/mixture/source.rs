//! Experts whose matrices are not in the device's memory: who brings them, and when.
//!
//! A mixture with a source asks it for the experts that have rows, once per forward and once per backward, and computes them in the order
//! in which the source gives them. An expert's rows are computed by themselves and go to slots of their own, so results have the same bits
//! in every order, whatever was in memory. Such experts are frozen: their matrices are no inputs of the graph, and nothing is saved of them.

use std::fmt::Debug;
use std::sync::Arc;

use runtime::Result;
use tch::Tensor;

use super::low_rank::ExpertTerm;
use crate::module::Module;

/// Loads experts of one mixture; see the [module](self).
pub trait ExpertSource: Debug + Send + Sync {
    /// Begins to load `experts`, ascending numbers.
    ///
    /// # Errors
    /// Values that changed since the source took them; a failed read.
    fn load(&self, experts: &[usize]) -> Result<Box<dyn ExpertLoads>>;
}

/// Loads that were begun: one for each requested expert.
pub trait ExpertLoads {
    /// Waits for an expert, and returns its index among the requested ones with its gate, up `[inner, hidden]` and down `[hidden, inner]`;
    /// `None` after the last. The tensors are valid until the next call, or until the loads are dropped.
    ///
    /// # Errors
    /// A failed read.
    fn next(&mut self) -> Result<Option<(usize, [Tensor; 3])>>;
}

/// Changes the experts of one mixture by low-rank terms; the tensors that it visits are the mixture's, in its `experts`.
pub trait ExpertChange: Module {
    /// Returns the terms of a forward.
    ///
    /// # Errors
    /// The change's own.
    fn terms(&self) -> Result<Vec<ExpertTerm<'_>>>;
}

/// What a technique may install in a mixture: a source that loads the experts if they are not in the device's memory, and a change of them.
#[derive(Debug)]
pub struct ExpertSlot {
    source: Option<Arc<dyn ExpertSource>>,
    /// The change of the experts, if there is one.
    pub change: Option<Box<dyn ExpertChange>>,
    has_gate_and_up_in_turns: bool,
}

impl ExpertSlot {
    pub(super) fn resident(has_gate_and_up_in_turns: bool) -> Self {
        Self { source: None, change: None, has_gate_and_up_in_turns }
    }

    /// Returns whether the family has a row of gate, then one of up, in turns, where it has both in one tensor.
    pub fn has_gate_and_up_in_turns(&self) -> bool {
        self.has_gate_and_up_in_turns
    }

    pub(super) fn source(&self) -> Option<&Arc<dyn ExpertSource>> {
        self.source.as_ref()
    }

    /// Returns whether a source loads the experts.
    pub fn is_streamed(&self) -> bool {
        self.source.is_some()
    }

    /// Loads experts from `source` from the next forward on. The mixture's own tensors keep their names and shapes.
    pub fn stream_from(&mut self, source: Arc<dyn ExpertSource>) {
        self.source = Some(source);
    }
}

/// Matrices in the device's memory, in the order of their numbers.
pub(super) struct Resident<'a> {
    matrices: &'a [&'a Tensor],
    number: usize,
}

impl<'a> Resident<'a> {
    /// `matrices` are three for each expert.
    pub(super) fn new(matrices: &'a [&'a Tensor]) -> Self {
        Self { matrices, number: 0 }
    }
}

impl ExpertLoads for Resident<'_> {
    fn next(&mut self) -> Result<Option<(usize, [Tensor; 3])>> {
        let number = self.number;
        self.number += 1;
        let matrices = self.matrices.get(3 * number..3 * number + 3);
        Ok(matrices.map(|three| (number, [0, 1, 2].map(|which| three[which].shallow_clone()))))
    }
}
