//! Repeats a step with another activation plan when memory is short.
//!
//! The activations that layers keep change no bit of a gradient, so a step whose allocation is refused can be computed again by a plan that needs
//! less: its gradients so far are dropped, the random generators are set back, and the same micro-batches run again. The training
//! ends with the bits of one whose memory was never short. It does not go back to a plan that needs more.
//!
//! Only activation plans are changed. Fewer rows at a time would change the order of sums; a step of a
//! [host optimizer](crate::optimizer::Optimizer), which may have updated layers already, is not repeated; nor is a step over ranks, which
//! would have to be repeated by all of them.

use std::collections::VecDeque;
use std::fmt;

use accounting::quantity::bytes_text;
use runtime::memory;
use runtime::random::RandomState;
use tch::Device;

use super::Trainer;
use super::captured::memory_note;
use crate::activations::{Activations, LayerPlan};
use crate::error::{Error, Result};

/// An activation plan that needs less memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheaperPlan {
    /// Its name in a note.
    pub name: String,
    /// The plan of each layer.
    pub layers: Vec<LayerPlan>,
    /// Predicted bytes of tensors on the device at the peak of a step, if known.
    pub peak_bytes: Option<u64>,
}

/// Activation plans in the order in which a training changes to them when memory is short.
pub struct CheaperPlans {
    activations: Activations,
    /// The peak of the current plan.
    peak_bytes: Option<u64>,
    plans: VecDeque<CheaperPlan>,
}

impl CheaperPlans {
    /// Creates a list for the layers of `activations`, whose current plan has the predicted peak `peak_bytes`.
    pub fn new(activations: Activations, peak_bytes: Option<u64>, plans: Vec<CheaperPlan>) -> Self {
        Self { activations, peak_bytes, plans: plans.into() }
    }

    /// Returns plans that recompute a quarter, half, three quarters and all of `layers` layers, without predictions.
    pub fn by_quarters(layers: usize) -> Vec<CheaperPlan> {
        let plan = |quarters: usize| {
            let again = (layers * quarters).div_ceil(4);
            let plan_of = |layer| if layer < again { LayerPlan::RecomputeAll } else { LayerPlan::KeepAll };
            let name = format!("recompute {again} of {layers} layers");
            CheaperPlan { name, layers: (0..layers).map(plan_of).collect(), peak_bytes: None }
        };
        let mut plans: Vec<CheaperPlan> = (1..=4).map(plan).collect();
        plans.dedup_by(|a, b| a.layers == b.layers);
        plans
    }

    /// Changes to the next plan whose peak is at most `most`, or else the last one. Returns its name; `None` if no plan is left.
    fn change(&mut self, most: u64) -> Result<Option<String>> {
        while let Some(plan) = self.plans.pop_front() {
            if !self.plans.is_empty() && plan.peak_bytes.is_some_and(|peak| peak > most) {
                continue;
            }
            self.activations.change(&plan.layers)?;
            self.peak_bytes = plan.peak_bytes;
            return Ok(Some(plan.name));
        }
        Ok(None)
    }

    /// Bytes that the current plan still needs and the device does not have.
    fn missing(&self, device: Device) -> Result<Option<u64>> {
        let Some(peak) = self.peak_bytes.filter(|_| !self.plans.is_empty()) else { return Ok(None) };
        let free = runtime::device::memory_info(device)?.free.saturating_add(memory::cached_bytes(device)?);
        let needed = peak.saturating_sub(memory::live_bytes(device)?);
        Ok(needed.checked_sub(free).filter(|missing| *missing > 0))
    }
}

impl fmt::Debug for CheaperPlans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.plans.iter().map(|plan| plan.name.as_str()).collect();
        f.debug_struct("CheaperPlans").field("plans", &names).finish_non_exhaustive()
    }
}

impl Trainer {
    /// Changes the plan if the machine has less free memory than it needs.
    pub(super) fn fit_into_memory(&mut self, device: Device) -> Result<()> {
        if self.optimizer.ranks().is_some() {
            return Ok(());
        }
        let Some(plans) = &mut self.cheaper_plans else { return Ok(()) };
        if let Some(missing) = plans.missing(device)? {
            let most = plans.peak_bytes.unwrap_or(0).saturating_sub(missing);
            if let Some(name) = plans.change(most)? {
                self.captured.drop_graphs();
                let step = self.step + 1;
                self.note(&format!(
                    "step {step}: {} that the plan needs are not free any more; from now on: {name} (the result keeps its bits)\n",
                    bytes_text(missing)
                ))?;
            }
        }
        Ok(())
    }

    /// Prepares the repetition of a step that ran out of memory, with the generators at `random`: without the memory of graphs, if there
    /// are any, else by a cheaper plan. Returns `error` if it is another one, or no plan is left.
    pub(super) fn repeat_with_less(
        &mut self,
        error: Error,
        device: Device,
        random: &RandomState,
    ) -> Result<()> {
        let is_interrupted = self.interrupted.is_some();
        if is_interrupted || self.optimizer.ranks().is_some() || !error.is_out_of_memory() {
            return Err(error);
        }
        // Graphs keep the memory of other steps, which this one may need.
        let note = if self.captured.release_memory() {
            memory_note(self.step + 1)
        } else {
            let Some(plans) = &mut self.cheaper_plans else { return Err(error) };
            // Whatever was predicted, the current plan needs more than there is.
            let most = plans.peak_bytes.map_or(u64::MAX, |peak| peak.saturating_sub(1));
            let Some(name) = plans.change(most)? else { return Err(error) };
            self.captured.drop_graphs();
            let step = self.step + 1;
            format!(
                "step {step}: an allocation was refused; the step is repeated, and from now on: {name} (the result keeps its bits)\n"
            )
        };
        if !self.optimizer.abandon(self.options.zero_grad)? {
            return Err(self.interrupt(self.step + 1, error));
        }
        memory::empty_cache(device)?;
        random.restore()?;
        self.note(&note)
    }
}
