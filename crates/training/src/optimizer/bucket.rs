//! A step over all parameters, in buckets that one call can take: of one group, device, dtype and step number.

use runtime::ops::foreach;
use tch::{Device, Kind, Tensor};

use super::group::{Group, Held};
use super::rule::{Hyper, Rule, Tensors};
use super::{Implementation, work_kind};
use crate::error::Result;

/// What one call needs, built up parameter by parameter.
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

/// How a step runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct How<'a> {
    /// Of the optimizer; a group may have its own.
    pub(super) rule: &'a dyn Rule,
    /// Of the learning rates.
    pub(super) factor: f64,
    pub(super) implementation: Implementation,
    /// Where this is 1 on the device, nothing changes. All rules are fused then.
    pub(super) skip: Option<&'a Tensor>,
}

/// One step of every parameter in `live`.
pub(super) fn step(live: Vec<(&mut Held, Tensor)>, groups: &[Group], how: How<'_>) -> Result<()> {
    let How { rule, implementation, skip, .. } = how;
    let mut buckets: Vec<Bucket> = Vec::new();
    for (held, grad) in live {
        let Some(state) = &mut held.state else { continue };
        let kind = work_kind(held.tensor.kind());
        let own = groups[held.group].rule.as_deref().unwrap_or(rule);
        let fused = implementation == Implementation::Fused && own.has_fused();
        if !fused {
            state.device_step = None;
        }
        state.step += 1;
        // A fused kernel is given each parameter's own step.
        let key = (held.group, held.tensor.device(), kind, if fused { 0 } else { state.step });
        // A parameter by itself may be run at once, so that its temporaries are gone before the next one's.
        let at = buckets.iter().position(|bucket| bucket.key == key);
        let at = at.unwrap_or_else(|| {
            let slots = own.slots().iter().map(|_| Vec::new()).collect();
            let (params, grads, steps, weights) = Default::default();
            buckets.push(Bucket { key, params, grads, slots, steps, weights });
            buckets.len() - 1
        });
        let bucket = &mut buckets[at];
        let parameter = held.tensor.f_detach()?;
        let work = match &state.master {
            Some(master) => master.shallow_clone(),
            // The fused kernels run over memory as if it were contiguous.
            None => parameter.f_to_kind(kind)?.f_contiguous()?,
        };
        bucket.weights.push((work.data_ptr() != parameter.data_ptr()).then_some(parameter));
        bucket.params.push(work);
        bucket.grads.push(grad.f_detach()?.f_contiguous()?);
        for (list, (_, tensor)) in bucket.slots.iter_mut().zip(&state.slots) {
            list.push(tensor.shallow_clone());
        }
        if fused {
            // The kernel raises it: it is given the number before this step.
            state.step -= 1;
            bucket.steps.push(state.device_step(&held.tensor)?);
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
        let hyper = Hyper { lr: group.lr * how.factor, weight_decay: group.weight_decay, step };
        let skip = how.skip.map(|skip| skip.f_to_device(device)).transpose()?;
        let tensors = Tensors { params: &params, grads: &grads, slots: &slots };
        let mixed = match steps.is_empty() {
            true => None,
            false => rule.fused_mixed(&tensors, &weights, &steps, hyper, skip.as_ref()),
        };
        if let Some(done) = mixed {
            done?;
            continue;
        }
        let grads: Vec<Tensor> =
            grads.into_iter().map(|grad| grad.f_to_kind(kind)).collect::<Result<_, _>>()?;
        let tensors = Tensors { params: &params, grads: &grads, slots: &slots };
        let fused = if steps.is_empty() { None } else { rule.fused(&tensors, &steps, hyper, skip.as_ref()) };
        fused.unwrap_or_else(|| rule.update(&tensors, hyper))?;
        let rounded = weights
            .into_iter()
            .zip(&params)
            .filter_map(|(weight, param)| Some((weight?, param.shallow_clone())));
        let (targets, sources): (Vec<Tensor>, Vec<Tensor>) = rounded.unzip();
        foreach::copy_(&targets, &sources)?;
    }
    Ok(())
}
