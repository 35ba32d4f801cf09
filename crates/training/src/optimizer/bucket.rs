//! A step over all parameters, in buckets of one group, device, dtype and step number, each of which takes one call.

use runtime::ops::foreach;
use tch::{Device, Kind, Tensor};

use super::group::{Group, OptimizedParameter};
use super::rule::{Hyperparameters, Rule, Tensors};
use super::{Implementation, work_kind};
use crate::error::Result;

/// The arguments of one call.
#[derive(Debug)]
struct Bucket {
    key: (usize, Device, Kind, u64),
    params: Vec<Tensor>,
    grads: Vec<Tensor>,
    slots: Vec<Vec<Tensor>>,
    steps: Vec<Tensor>,
    /// For each parameter the tensor that the model computes with, where that is another one.
    weights: Vec<Option<Tensor>>,
}

/// How to run a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct How<'a> {
    /// The optimizer's rule; a group may have its own.
    pub(super) rule: &'a dyn Rule,
    /// Factor of the learning rates.
    pub(super) factor: f64,
    pub(super) implementation: Implementation,
    /// Where this is 1 on the device, nothing changes. All rules have fused kernels then.
    pub(super) skip: Option<&'a Tensor>,
}

/// Steps every parameter in `live` once.
pub(super) fn step(
    live: Vec<(&mut OptimizedParameter, Tensor)>,
    groups: &[Group],
    how: How<'_>,
) -> Result<()> {
    let How { rule, implementation, skip, .. } = how;
    let mut buckets: Vec<Bucket> = Vec::new();
    for (parameter, grad) in live {
        let Some(state) = &mut parameter.state else { continue };
        let kind = work_kind(parameter.tensor.kind());
        let own = groups[parameter.group].rule.as_deref().unwrap_or(rule);
        let fused = implementation == Implementation::Fused && own.has_fused();
        if !fused {
            state.device_step = None;
        }
        state.step += 1;
        // A fused kernel gets each parameter's own step number.
        let key = (parameter.group, parameter.tensor.device(), kind, if fused { 0 } else { state.step });
        // A bucket of one parameter can run immediately, so that its temporaries are freed before the next one's.
        let at = buckets.iter().position(|bucket| bucket.key == key);
        let at = at.unwrap_or_else(|| {
            let slots = own.slots().iter().map(|_| Vec::new()).collect();
            let (params, grads, steps, weights) = Default::default();
            buckets.push(Bucket { key, params, grads, slots, steps, weights });
            buckets.len() - 1
        });
        let bucket = &mut buckets[at];
        let values = parameter.tensor.f_detach()?;
        let work = match &state.master {
            Some(master) => master.shallow_clone(),
            // The fused kernels treat memory as contiguous.
            None => values.f_to_kind(kind)?.f_contiguous()?,
        };
        bucket.weights.push((work.data_ptr() != values.data_ptr()).then_some(values));
        bucket.params.push(work);
        bucket.grads.push(grad.f_detach()?.f_contiguous()?);
        for (list, (_, tensor)) in bucket.slots.iter_mut().zip(&state.slots) {
            list.push(tensor.shallow_clone());
        }
        if fused {
            // The kernel increments it: it gets the number before this step.
            state.step -= 1;
            bucket.steps.push(state.device_step(&parameter.tensor)?);
            state.step += 1;
            state.uncertain |= skip.is_some();
        }
        if implementation == Implementation::ForLoop {
            run(buckets.pop().into_iter(), groups, how)?;
        }
    }
    run(buckets.into_iter(), groups, how)
}

fn run(buckets: impl Iterator<Item = Bucket>, groups: &[Group], how: How<'_>) -> Result<()> {
    for Bucket { key: (group, device, kind, step), params, grads, slots, steps, weights } in buckets {
        let group = &groups[group];
        let rule = group.rule.as_deref().unwrap_or(how.rule);
        let hyperparameters =
            Hyperparameters { lr: group.lr * how.factor, weight_decay: group.weight_decay, step };
        let skip = how.skip.map(|skip| skip.f_to_device(device)).transpose()?;
        let tensors = Tensors { params: &params, grads: &grads, slots: &slots };
        let mixed = match steps.is_empty() {
            true => None,
            false => rule.fused_mixed(&tensors, &weights, &steps, hyperparameters, skip.as_ref()),
        };
        if let Some(done) = mixed {
            done?;
            continue;
        }
        let grads: Vec<Tensor> =
            grads.into_iter().map(|grad| grad.f_to_kind(kind)).collect::<Result<_, _>>()?;
        let tensors = Tensors { params: &params, grads: &grads, slots: &slots };
        let fused = if steps.is_empty() {
            None
        } else {
            rule.fused(&tensors, &steps, hyperparameters, skip.as_ref())
        };
        fused.unwrap_or_else(|| rule.update(&tensors, hyperparameters))?;
        let rounded = weights
            .into_iter()
            .zip(&params)
            .filter_map(|(weight, param)| Some((weight?, param.shallow_clone())));
        let (targets, sources): (Vec<Tensor>, Vec<Tensor>) = rounded.unzip();
        foreach::copy_(&targets, &sources)?;
    }
    Ok(())
}
