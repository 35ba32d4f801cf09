//! Adam over many tensors as one CUDA kernel.

use runtime::ops::optimizer::AdamW;
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use super::AdamTensors;
use super::cpu::{NAME, check};
use crate::cuda::{Argument, Source, are_ready, float, launch, optional, table, type_of, width};

pub(crate) const SOURCE: Source = Source(include_str!("adam.cuh"));

/// Threads and numbers of a block, all of one tensor; the fastest on an H200.
const THREADS: u32 = 128;
const CHUNK: u64 = 1024;

/// See [`super::adam_many`]; returns false, with nothing changed, if the kernel does not support the
/// tensors.
pub(crate) fn adam(
    tensors: &[AdamTensors<'_>],
    steps: &[&Tensor],
    options: &AdamW,
    decoupled: bool,
    rate: Option<&Tensor>,
    skip: Option<&Tensor>,
) -> Result<bool> {
    let Some(device) = tensors.first().map(|first| first.master.device()) else { return Ok(true) };
    if !are_ready(device) || options.maximize {
        return Ok(false);
    }
    for scalar in steps.iter().copied().chain(skip) {
        if (scalar.kind(), scalar.device(), scalar.numel()) != (Kind::Float, device, 1) {
            let reason =
                format!("a step's number or flag is {scalar:?}; expected one fp32 number on {device:?}");
            return Err(Error::invalid(NAME, reason));
        }
    }
    if let Some(rate) = rate
        && (rate.kind(), rate.device(), rate.numel()) != (Kind::Double, device, 1)
    {
        let reason = format!("the learning rate is {rate:?}; expected one fp64 number on {device:?}");
        return Err(Error::invalid(NAME, reason));
    }
    tensors.iter().try_for_each(|one| check(one, device))?;
    let entries = tensors.iter().zip(steps).map(|(one, step)| {
        let &AdamTensors { gradient, master, exp_avg, exp_avg_sq, weight } = one;
        let all: Vec<&Tensor> = [gradient, master, exp_avg, exp_avg_sq].into_iter().chain(weight).collect();
        let kinds: Vec<Kind> = [gradient].into_iter().chain(weight).map(Tensor::kind).collect();
        let alike = (gradient.kind(), weight.map(Tensor::kind), width(&kinds, &all, &[]));
        let address = |tensor: &Tensor| tensor.data_ptr() as u64;
        let [gradient, master, exp_avg, exp_avg_sq] = [gradient, master, exp_avg, exp_avg_sq].map(address);
        let weight = weight.map_or(0, address);
        (alike, [gradient, master, exp_avg, exp_avg_sq, weight, address(step)], one.master.numel())
    });
    let &AdamW { lr, beta1, beta2, weight_decay, eps, .. } = options;
    for group in table::launches(entries, CHUNK) {
        let (gradient, weight, width) = group.kind;
        let types = type_of(gradient).zip(type_of(weight.unwrap_or(Kind::BFloat16)));
        let (gradient_type, weight_type) =
            types.ok_or_else(|| Error::invalid(NAME, format!("a gradient of {gradient:?}")))?;
        let expression =
            format!("adam<{gradient_type}, {weight_type}, {width}, {decoupled}, {THREADS}, {CHUNK}>");
        let [table, entries] = group.arguments();
        let arguments = [
            table,
            entries,
            optional(skip),
            optional(rate),
            Argument::F64(lr),
            Argument::F64(beta1),
            Argument::F64(beta2),
            float(eps),
            Argument::F64(weight_decay),
        ];
        launch(SOURCE, &expression, device, (group.blocks, THREADS), &arguments)?;
    }
    let changed = tensors
        .iter()
        .flat_map(|one| [Some(one.master), Some(one.exp_avg), Some(one.exp_avg_sq), one.weight]);
    changed.flatten().try_for_each(bump_version)?;
    Ok(true)
}
