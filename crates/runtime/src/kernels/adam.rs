//! Adam over many tensors as one CUDA kernel.

use tch::{Device, Kind, Tensor};

use super::{Argument, Source, are_ready, float, int, launch, optional, type_of, width};
use crate::error::{Error, Result};
use crate::ops::optimizer::AdamW;
use crate::sys::adam::{AdamTensors, NAME, check};
use crate::sys::tensor::bump_version;

pub(super) const SOURCE: Source = Source(include_str!("../../cpp/cuda/adam.cuh"));

/// Threads and numbers of a block, all of one tensor; the fastest on an H200.
const THREADS: u32 = 128;
const CHUNK: i64 = 1024;
/// Tensors per launch: the table is passed by value, in at most 4 KiB.
const ENTRIES: usize = 60;
/// 8-byte members of a table's entry.
const MEMBERS: usize = 8;

/// The properties that all tensors of a launch share.
type Launch = (Kind, Option<Kind>, i64);

/// See [`crate::fused::adam::adam_many`]; returns false, with nothing changed, if the kernel does not support the
/// tensors.
pub(crate) fn adam(
    tensors: &[AdamTensors<'_>],
    steps: &[Tensor],
    options: &AdamW,
    decoupled: bool,
    skip: Option<&Tensor>,
) -> Result<bool> {
    let Some(device) = tensors.first().map(|first| first.master.device()) else { return Ok(true) };
    if !are_ready(device) || options.maximize {
        return Ok(false);
    }
    for scalar in steps.iter().chain(skip) {
        if (scalar.kind(), scalar.device(), scalar.numel()) != (Kind::Float, device, 1) {
            let reason =
                format!("a step's number or flag is {scalar:?}; expected one fp32 number on {device:?}");
            return Err(Error::invalid(NAME, reason));
        }
    }
    let mut launches: Vec<(Launch, Vec<usize>)> = Vec::new();
    for (index, one) in tensors.iter().enumerate() {
        check(one, device)?;
        if one.master.numel() == 0 {
            continue;
        }
        let AdamTensors { gradient, master, exp_avg, exp_avg_sq, weight } = *one;
        let kinds: Vec<Kind> = [Some(gradient), weight].into_iter().flatten().map(Tensor::kind).collect();
        let all: Vec<&Tensor> = [Some(gradient), Some(master), Some(exp_avg), Some(exp_avg_sq), weight]
            .into_iter()
            .flatten()
            .collect();
        let alike = (gradient.kind(), weight.map(Tensor::kind), width(&kinds, &all, &[]));
        match launches.iter_mut().find(|(other, _)| *other == alike) {
            Some((_, indices)) => indices.push(index),
            None => launches.push((alike, vec![index])),
        }
    }
    for (alike, indices) in launches {
        for indices in indices.chunks(ENTRIES) {
            let entries: Vec<_> = indices.iter().map(|&index| (&tensors[index], &steps[index])).collect();
            queue(device, alike, &entries, options, decoupled, skip)?;
        }
    }
    let changed = tensors
        .iter()
        .flat_map(|one| [Some(one.master), Some(one.exp_avg), Some(one.exp_avg_sq), one.weight]);
    changed.flatten().try_for_each(bump_version)?;
    Ok(true)
}

fn queue(
    device: Device,
    (gradient, weight, width): Launch,
    entries: &[(&AdamTensors<'_>, &Tensor)],
    options: &AdamW,
    decoupled: bool,
    skip: Option<&Tensor>,
) -> Result<()> {
    let &AdamW { lr, beta1, beta2, weight_decay, eps, .. } = options;
    let mut table = vec![0; ENTRIES * MEMBERS];
    let mut blocks = 0;
    for ((one, step), entry) in entries.iter().zip(table.chunks_exact_mut(MEMBERS)) {
        let address = |tensor: &Tensor| tensor.data_ptr() as u64;
        let numbers = one.master.numel() as i64;
        entry.copy_from_slice(&[
            address(one.gradient),
            address(one.master),
            address(one.exp_avg),
            address(one.exp_avg_sq),
            one.weight.map_or(0, address),
            address(step),
            numbers as u64,
            blocks as u64,
        ]);
        blocks += (numbers + CHUNK - 1) / CHUNK;
    }
    let decay = if decoupled { (-lr).mul_add(weight_decay, 1.0) } else { weight_decay };
    let arguments = [
        Argument::Words(table.into()),
        int(NAME, "the number of tensors", entries.len() as i64)?,
        optional(skip),
        Argument::F64(lr),
        Argument::F64(beta1),
        Argument::F64(beta2),
        float(eps),
        float(decay),
    ];
    let types = type_of(gradient).zip(type_of(weight.unwrap_or(Kind::BFloat16)));
    let (of_gradient, of_weight) =
        types.ok_or_else(|| Error::invalid(NAME, format!("a gradient of {gradient:?}")))?;
    let expression = format!("adam<{of_gradient}, {of_weight}, {width}, {decoupled}, {THREADS}, {CHUNK}>");
    launch(SOURCE, &expression, device, (blocks, THREADS), &arguments)
}
