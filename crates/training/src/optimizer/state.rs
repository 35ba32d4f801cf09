//! The optimizer state of a parameter: creating, saving and loading it.

use std::collections::BTreeMap;

use runtime::file_memory;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use super::group::OptimizedParameter;
use super::rule::{Extent, Rule, Slot};
use super::work_kind;
use crate::error::{Error, Result};

const STEP: &str = "step";
const MASTER: &str = "master";

/// The state of one parameter.
#[derive(Debug)]
pub(super) struct ParameterState {
    /// Completed steps, unless `uncertain`.
    pub(super) step: u64,
    /// The same as a float scalar on the device, which fused kernels increment.
    pub(super) device_step: Option<Tensor>,
    /// Whether only the device knows the number of steps, because it skipped some.
    pub(super) uncertain: bool,
    /// The slots, by the rule's names.
    pub(super) slots: Vec<(&'static str, Tensor)>,
    /// The fp32 copy of the parameter.
    pub(super) master: Option<Tensor>,
    /// The parameter as the last step has left it; `None` where that is not known.
    written: Option<WeightVersion>,
}

/// Identifies the values of a weight: the memory that it refers to, and the number of in-place changes. A change through
/// `Tensor::data` is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightVersion {
    memory: usize,
    version: i64,
}

impl WeightVersion {
    /// Returns the version of a weight's current values.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn of(weight: &Tensor) -> Result<Self> {
        Ok(Self { memory: weight.data_ptr() as usize, version: weight.f_internal_version()? })
    }
}

/// Updates the elements of a master copy that do not round to the weight any more, because other code wrote the weight, for example by
/// loading weights. Elements that do round to it keep their digits.
///
/// # Errors
/// Errors of libtorch; then nothing is changed.
pub fn follow_weight(master: &Tensor, weight: &Tensor) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let (mut master, weight) = (master.f_detach()?, weight.f_detach()?);
    let differs = master.f_to_kind(weight.kind())?.f_ne_tensor(&weight)?;
    let followed = weight.f_to_kind(master.kind())?.f_where_self(&differs, &master)?;
    Ok(master.f_copy_(&followed)?)
}

impl ParameterState {
    pub(super) fn new(rule: &dyn Rule, parameter: &Tensor, whole: i64, master: bool) -> Result<Self> {
        let kind = work_kind(parameter.kind());
        // In a file where the parameter is in one.
        let slot = |slot: Slot| {
            let tensor = file_memory::zeros_beside(parameter, &slot.shape, slot.kind_or(kind))?;
            if rule.initial() != 0.0 {
                let _ = tensor.try_fill_(rule.initial())?;
            }
            Ok::<_, Error>((slot.name, tensor))
        };
        let slots = rule.slots(Extent { shape: &parameter.size(), whole });
        let slots = slots.into_iter().map(slot).collect::<Result<_>>()?;
        let mut state =
            Self { step: 0, device_step: None, uncertain: false, slots, master: None, written: None };
        if master {
            state.keep_master(parameter)?;
        }
        Ok(state)
    }

    /// Keeps an fp32 copy of the parameter from now on, if it has half precision. One that is kept follows what others have written
    /// to the parameter since the last step.
    pub(super) fn keep_master(&mut self, parameter: &Tensor) -> Result<()> {
        let kind = work_kind(parameter.kind());
        match &self.master {
            _ if kind == parameter.kind() => {}
            None => self.master = Some(copied(parameter, kind)?),
            Some(master) if self.written != Some(WeightVersion::of(parameter)?) => {
                follow_weight(master, parameter)?;
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Notes that a step has written the parameter.
    pub(super) fn wrote(&mut self, parameter: &Tensor) {
        self.written = self.master.as_ref().and_then(|_| WeightVersion::of(parameter).ok());
    }

    /// Creates the float scalar of the step number, if there is none.
    pub(super) fn keep_device_step(&mut self, parameter: &Tensor) -> Result<()> {
        if self.device_step.is_none() {
            let options = (Kind::Float, parameter.device());
            self.device_step = Some(Tensor::try_full([] as [i64; 0], self.step as f64, options)?);
        }
        Ok(())
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.slots.iter().map(|(_, tensor)| tensor).chain(&self.master)
    }

    pub(super) fn named(&self, parameter: &str) -> Vec<(String, Tensor)> {
        let slots = self.slots.iter().map(|(slot, tensor)| (*slot, tensor.shallow_clone()));
        let master = self.master.iter().map(|tensor| (MASTER, tensor.shallow_clone()));
        let step = match &self.device_step {
            Some(step) if self.uncertain => step.to_kind(Kind::Int64),
            _ => Tensor::from(self.step as i64),
        };
        let step = (STEP, step);
        let all = std::iter::once(step).chain(slots).chain(master);
        all.map(|(slot, tensor)| (format!("{parameter}.{slot}"), tensor)).collect()
    }
}

/// Returns a state for each parameter; `None` for one without any tensor.
pub(super) fn read<'a>(
    parameters: impl Iterator<Item = (&'a OptimizedParameter, &'a dyn Rule)>,
    tensors: &[(String, Tensor)],
) -> Result<Vec<Option<ParameterState>>> {
    let mut given: BTreeMap<&str, &Tensor> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let (mut missing, mut mismatched, mut states) = (Vec::new(), Vec::new(), Vec::new());
    for (OptimizedParameter { name, tensor: parameter, whole, .. }, rule) in parameters {
        // Take this parameter's tensors from those that are given.
        let expected = rule.slots(Extent { shape: &parameter.size(), whole: *whole });
        let mut take = |slot: &str| given.remove(format!("{name}.{slot}").as_str());
        let step = take(STEP);
        let saved: Vec<Option<&Tensor>> = expected.iter().map(|slot| take(slot.name)).collect();
        let master = take(MASTER);
        if step.is_none() && saved.iter().all(Option::is_none) && master.is_none() {
            states.push(None);
            continue;
        }
        let kind = work_kind(parameter.kind());
        // Collects a tensor of another shape or dtype, so that the error names all of them.
        let mut check = |slot: &str, tensor: &Tensor, shape: &[i64], kind: Kind| {
            let fits = tensor.size() == shape && tensor.kind() == kind;
            if !fits {
                let (size, dtype) = (tensor.size(), tensor.kind());
                mismatched.push(format!("{name}.{slot} ({dtype:?} {size:?}, expected {kind:?} {shape:?})"));
            }
            fits
        };
        let (mut slots, mut is_complete) = (Vec::new(), true);
        let step = match step {
            None => {
                missing.push(format!("{name}.{STEP}"));
                is_complete = false;
                0
            }
            Some(tensor) if check(STEP, tensor, &[], Kind::Int64) => tensor.f_int64_value(&[])?,
            Some(_) => {
                is_complete = false;
                0
            }
        };
        for (slot, tensor) in expected.into_iter().zip(saved) {
            let Some(tensor) = tensor else {
                missing.push(format!("{name}.{}", slot.name));
                is_complete = false;
                continue;
            };
            is_complete &= check(slot.name, tensor, &slot.shape, slot.kind_or(kind));
            slots.push((slot.name, copied_beside(tensor, parameter)?));
        }
        let master = match master {
            Some(tensor) if check(MASTER, tensor, &parameter.size(), kind) => {
                Some(copied_beside(tensor, parameter)?)
            }
            _ => None,
        };
        let step = u64::try_from(step).unwrap_or_else(|_| {
            mismatched.push(format!("{name}.step ({step}, expected a number of at least 0)"));
            0
        });
        states.push(is_complete.then_some(ParameterState {
            step,
            device_step: None,
            uncertain: false,
            slots,
            master,
            written: None,
        }));
    }
    // No parameter has taken what is left.
    let unexpected: Vec<String> = given.into_keys().map(str::to_owned).collect();
    if missing.is_empty() && unexpected.is_empty() && mismatched.is_empty() {
        return Ok(states);
    }
    Err(Error::state("the optimizer's state", "the parameters", &missing, &unexpected, &mismatched))
}

/// Copies a tensor to where the parameter is.
fn copied_beside(tensor: &Tensor, parameter: &Tensor) -> Result<Tensor> {
    let copy = file_memory::zeros_beside(parameter, &tensor.size(), tensor.kind())?;
    runtime::ops::foreach::copy_(&[&copy], &[tensor])?;
    Ok(copy)
}

/// Copies a parameter in another dtype to where it is.
fn copied(parameter: &Tensor, kind: Kind) -> Result<Tensor> {
    let copy = file_memory::zeros_beside(parameter, &parameter.size(), kind)?;
    runtime::ops::foreach::copy_(&[&copy], &[&parameter.f_detach()?])?;
    Ok(copy)
}
