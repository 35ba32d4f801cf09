//! A step over all parameters, in buckets of one group, device, dtype, step number and kind of state; a bucket takes one call.

use kernels::stochastic_rounding::{self, Rounding, StepNumber, Stream};
use runtime::file_memory;
use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::Dense;
use tch::{Device, Kind, Tensor};

use super::group::{Group, OptimizedParameter};
use super::rule::{FusedStep, Hyperparameters, Rule, Tensors, cast_gradients, write_weights};
use super::state::ParameterState;
use super::{Implementation, work_kind};
use crate::error::{Error, Result};

mod slices;

/// Bytes of weights and gradients in the dtype of the arithmetic that a bucket may hold as copies before it runs. Copies of all
/// parameters at once would take twice the memory of 16-bit weights and gradients. What a parameter becomes does not depend on its
/// bucket.
const CASTS: u64 = 64 << 20;

/// What an update reads and writes of a parameter, or of a slice of one.
#[derive(Debug)]
struct Part<'a> {
    values: &'a Tensor,
    layout: TensorLayout,
    grad: &'a Tensor,
    layout_of_grad: TensorLayout,
    master: Option<&'a Tensor>,
    /// In the order of the rule's slots.
    slots: Vec<&'a Tensor>,
    /// The number of steps on the device, for a fused kernel.
    step: Option<&'a Tensor>,
    /// The random numbers, if the values are rounded stochastically.
    stream: Option<Stream>,
}

impl Part<'_> {
    /// Returns the copies that a step makes in the dtype of the arithmetic: of the values, of the gradient, of both or none.
    fn copies(&self) -> u64 {
        let kind = work_kind(self.layout.kind());
        u64::from(self.master.is_none() && self.layout.kind() != kind)
            + u64::from(self.layout_of_grad.kind() != kind)
    }
}

/// The arguments of one call.
#[derive(Debug)]
struct Bucket<'a> {
    key: (usize, Device, Kind, u64),
    /// The names of the slots, which some rules choose by the parameter's shape.
    names: Vec<&'static str>,
    params: Vec<Dense<'a>>,
    grads: Vec<Dense<'a>>,
    slots: Vec<Vec<&'a Tensor>>,
    steps: Vec<&'a Tensor>,
    /// For each parameter the tensor that the model computes with, where that is another one.
    weights: Vec<Option<Tensor>>,
    /// For each of these tensors that is rounded stochastically, its random numbers.
    streams: Vec<Option<Stream>>,
    /// Bytes of its copies, those of the gradients included, which its run makes.
    casts: u64,
}

impl<'a> Bucket<'a> {
    fn new(key: (usize, Device, Kind, u64), slots: &[(&'static str, Tensor)]) -> Self {
        let names = slots.iter().map(|(name, _)| *name).collect();
        let slots = slots.iter().map(|_| Vec::new()).collect();
        let (params, grads, steps, weights, streams) = Default::default();
        Self { key, names, params, grads, slots, steps, weights, streams, casts: 0 }
    }

    fn push(&mut self, part: &Part<'a>) -> Result<()> {
        let (_, _, kind, _) = self.key;
        let layout = &part.layout;
        self.casts += part.copies() * layout.numel() as u64 * kind.elt_size_in_bytes() as u64;
        self.streams.push(part.stream);
        // The fused kernels treat memory as contiguous.
        let (work, weight) = match part.master {
            Some(master) => (Dense::Same(master), Some(part.values.shallow_clone())),
            None if layout.kind() == kind && layout.is_contiguous() => (Dense::Same(part.values), None),
            None => {
                let copy = part.values.f_detach()?.f_to_kind(kind)?.f_contiguous()?;
                (Dense::Copy(copy), Some(part.values.shallow_clone()))
            }
        };
        self.weights.push(weight);
        self.params.push(work);
        self.grads.push(match part.layout_of_grad.is_contiguous() {
            true => Dense::Same(part.grad),
            false => Dense::Copy(part.grad.f_detach()?.f_contiguous()?),
        });
        for (list, tensor) in self.slots.iter_mut().zip(&part.slots) {
            list.push(tensor);
        }
        self.steps.extend(part.step);
        Ok(())
    }
}

/// The arguments of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepArguments<'a> {
    /// The optimizer's rule; a group may have its own.
    pub(super) rule: &'a dyn Rule,
    /// Factor of the learning rates.
    pub(super) factor: f64,
    pub(super) implementation: Implementation,
    /// The learning rate of each group, fp64 on its device, for a step that a graph repeats.
    pub(super) rates: Option<&'a [Tensor]>,
    /// Where this is 1 on the device, nothing changes. All rules have fused kernels then.
    pub(super) skip: Option<&'a Tensor>,
    /// Whether to keep an fp32 copy of each bf16 or fp16 parameter.
    pub(super) master_weights: bool,
}

/// A parameter that has a gradient.
#[derive(Debug)]
pub(super) struct Live<'a> {
    pub(super) parameter: &'a mut OptimizedParameter,
    pub(super) grad: Tensor,
    /// Whether it has no state yet.
    pub(super) is_new: bool,
}

/// Steps every parameter in `live` once. Sets `changed` as soon as a parameter or its state may differ; a failure before leaves all of
/// them as they were.
pub(super) fn step(
    live: &mut [Live<'_>],
    groups: &[Group],
    arguments: StepArguments<'_>,
    changed: &mut bool,
) -> Result<()> {
    let done = update(live, groups, arguments, changed);
    for Live { parameter, is_new, .. } in &mut *live {
        match (&done, &mut parameter.state) {
            (Ok(()), Some(state)) => {
                state.wrote(&parameter.tensor);
                state.step += 1;
                state.uncertain |= arguments.skip.is_some();
            }
            (Err(_), _) if *is_new && !*changed => parameter.state = None,
            // It may have been incremented.
            (Err(_), Some(state)) if !state.uncertain => state.device_step = None,
            _ => {}
        }
    }
    // State in files is not used until the next step.
    let states = live.iter().filter_map(|one| one.parameter.state.as_ref());
    done.and_then(|()| Ok(states.flat_map(ParameterState::tensors).try_for_each(file_memory::release)?))
}

fn update(
    live: &mut [Live<'_>],
    groups: &[Group],
    arguments: StepArguments<'_>,
    changed: &mut bool,
) -> Result<()> {
    let StepArguments { rule, implementation, master_weights, .. } = arguments;
    let rule_of = |group: usize| groups[group].rule.as_deref().unwrap_or(rule);
    let is_fused = |rule: &dyn Rule| implementation == Implementation::Fused && rule.has_fused();
    // All of them before the first update, because memory may be short for the last.
    for Live { parameter, .. } in &mut *live {
        let rule = rule_of(parameter.group);
        let tensor = &parameter.tensor;
        let state = match parameter.state.take() {
            None => ParameterState::new(rule, tensor, parameter.whole, master_weights),
            Some(state) => Ok(state),
        };
        let state = parameter.state.insert(state?);
        if master_weights {
            // The state may have been loaded from a run without master weights, or the weights from elsewhere.
            state.keep_master(tensor)?;
        }
        if is_fused(rule) {
            state.keep_device_step(tensor)?;
        } else {
            state.device_step = None;
        }
    }
    let mut buckets: Vec<Bucket<'_>> = Vec::new();
    for Live { parameter, grad, .. } in &*live {
        let Some(state) = &parameter.state else { continue };
        let values = &parameter.tensor;
        let (layout, layout_of_grad) = (TensorLayout::of(values)?, TensorLayout::of(grad)?);
        let kind = work_kind(layout.kind());
        let own = rule_of(parameter.group);
        let is_half = matches!(layout.kind(), Kind::BFloat16 | Kind::Half);
        let device = layout.device();
        let part = Part {
            values,
            layout,
            grad,
            layout_of_grad,
            master: state.master.as_ref(),
            slots: state.slots.iter().map(|(_, tensor)| tensor).collect(),
            // The kernel increments it: it gets the number before this step.
            step: state.device_step.as_ref().filter(|_| is_fused(own)),
            // A master copy is rounded to nearest: it keeps what the rounding drops.
            stream: parameter.stream.filter(|_| is_half && state.master.is_none()),
        };
        // A fused kernel gets each parameter's own step number.
        let number = if part.step.is_some() { 0 } else { state.step + 1 };
        let key = (parameter.group, device, kind, number);
        if let Some(slices) = slices::of(&part, own, parameter.whole)? {
            for slice in &slices {
                let mut bucket = Bucket::new(key, &state.slots);
                bucket.push(&slice.part()?)?;
                run(std::iter::once(bucket), groups, arguments, changed)?;
            }
            continue;
        }
        let has_slots_of =
            |bucket: &Bucket<'_>| bucket.names.iter().eq(state.slots.iter().map(|(name, _)| name));
        let at = buckets.iter().position(|bucket| bucket.key == key && has_slots_of(bucket));
        let at = at.unwrap_or_else(|| {
            buckets.push(Bucket::new(key, &state.slots));
            buckets.len() - 1
        });
        buckets[at].push(&part)?;
        // A bucket of one parameter can run immediately, so that its temporaries are freed before the next one's.
        if implementation == Implementation::ForLoop || buckets[at].casts >= CASTS {
            run(Some(buckets.swap_remove(at)).into_iter(), groups, arguments, changed)?;
        }
    }
    run(buckets.into_iter(), groups, arguments, changed)
}

fn run<'a>(
    buckets: impl Iterator<Item = Bucket<'a>>,
    groups: &[Group],
    arguments: StepArguments<'_>,
    changed: &mut bool,
) -> Result<()> {
    for bucket in buckets {
        let Bucket {
            key: (number, device, _, step), params, grads, slots, steps, mut weights, streams, ..
        } = bucket;
        let group = &groups[number];
        let rule = group.rule.as_deref().unwrap_or(arguments.rule);
        let hyperparameters =
            Hyperparameters { lr: group.lr * arguments.factor, weight_decay: group.weight_decay, step };
        let skip = arguments.skip.map(|skip| skip.f_to_device(device)).transpose()?;
        let rate = arguments.rates.map(|rates| rates[number].f_to_device(device)).transpose()?;
        let [params, grads] = [&params, &grads].map(|list| list.iter().map(|one| &**one).collect::<Vec<_>>());
        let tensors = Tensors { params: &params, grads: &grads, slots: &slots };
        let take =
            |(weight, stream): (&mut Option<Tensor>, &Option<Stream>)| stream.and_then(|_| weight.take());
        let stochastic: Vec<Option<Tensor>> = weights.iter_mut().zip(&streams).map(take).collect();
        let (weights, steps, rate, skip) = (&weights, &steps, rate.as_ref(), skip.as_ref());
        let fused = match steps.is_empty() {
            true => None,
            false => rule.fused(&FusedStep { tensors, weights, steps, hyperparameters, rate, skip }),
        };
        if let Some(done) = fused {
            // What it allocates, it allocates before it changes anything.
            *changed |= !done.as_ref().is_err_and(Error::is_out_of_memory);
            done?;
            // The kernel has incremented the numbers. Where it skipped the step, the parameters are numbers of the weights' dtype still,
            // which no rounding changes.
            round(&stochastic, &params, &streams, |index| StepNumber::Device(steps[index]))?;
            continue;
        }
        let casts = cast_gradients(&params, &grads)?;
        let grads = casts.as_ref().map_or(grads, |casts| casts.iter().collect());
        *changed = true;
        rule.update(&Tensors { params: &params, grads: &grads, slots: &slots }, hyperparameters)?;
        write_weights(weights, &params)?;
        round(&stochastic, &params, &streams, |_| StepNumber::Host(step))?;
    }
    Ok(())
}

/// Rounds parameters stochastically into the weights that are given.
fn round<'a>(
    weights: &[Option<Tensor>],
    params: &[&Tensor],
    streams: &[Option<Stream>],
    step_of: impl Fn(usize) -> StepNumber<'a>,
) -> Result<()> {
    let all = weights.iter().zip(params).zip(streams).enumerate();
    let all: Vec<Rounding<'_>> = all
        .filter_map(|(index, ((target, source), stream))| {
            Some(Rounding { source, target: target.as_ref()?, stream: (*stream)?, step: step_of(index) })
        })
        .collect();
    Ok(stochastic_rounding::round(&all)?)
}
