//! SwiGLU's elementwise part as CUDA kernels.

use runtime::tensor_memory::{bump_version, memory_range};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::cpu::NAME;
use crate::cuda::{Argument, Matrix, Source, are_ready, int, launch, matrix, pointer, type_of, width};

pub(crate) const SOURCE: Source = Source(include_str!("swiglu.cuh"));

const THREADS: u32 = 256;

/// Returns whether the kernels support the tensor.
pub(crate) fn take(gate: &Tensor) -> bool {
    gate.dim() == 2 && are_ready_for(gate.kind(), gate.device())
}

/// Returns whether the kernels support matrices of this dtype on this device.
pub(crate) fn are_ready_for(kind: Kind, device: Device) -> bool {
    type_of(kind).is_some() && are_ready(device)
}

/// See [`super::forward`].
pub(crate) fn forward(gate: &Tensor, up: &Tensor, silu: Option<&Tensor>, product: &Tensor) -> Result<()> {
    let names = [("gate", gate), ("up", up), ("product", product)];
    let all: Vec<(&str, &Tensor)> = names.into_iter().chain(silu.map(|silu| ("silu", silu))).collect();
    let Some(grid) = Grid::new(&all)? else { return Ok(()) };
    // An output may be an input, because each element is read before it is written; silu is stored while the others are
    // still needed.
    for (index, (name, output)) in all.iter().enumerate().skip(2) {
        for (other, tensor) in &all[..index] {
            let same = *name == "product"
                && output.data_ptr() == tensor.data_ptr()
                && output.stride() == tensor.stride();
            if !same && overlap(output, tensor)? {
                return Err(Error::invalid(NAME, format!("`{name}` overlaps `{other}`")));
            }
        }
    }
    let none = (Argument::Pointer(0), Argument::I64(0));
    let (silu_at, silu_stride) = silu.map_or(none, |silu| (pointer(silu), Argument::I64(silu.stride()[0])));
    let stride = |tensor: &Tensor| Argument::I64(tensor.stride()[0]);
    let [features, blocks] = grid.numbers()?;
    let arguments = [
        pointer(gate),
        stride(gate),
        pointer(up),
        stride(up),
        silu_at,
        silu_stride,
        pointer(product),
        stride(product),
        features,
        blocks,
    ];
    grid.launch("swiglu_forward", &arguments)?;
    silu.into_iter().chain([product]).try_for_each(bump_version)
}

/// Computes the gradients of `gate` and `up` from that of the product, and the product, each if requested. Each may be one of the
/// inputs; any other overlap with them or with another output is refused.
pub(crate) fn backward(
    [gate, up, grad]: [&Tensor; 3],
    [gate_grad, up_grad, product]: [Option<&Tensor>; 3],
) -> Result<()> {
    let outputs = [("gate's gradient", gate_grad), ("up's gradient", up_grad), ("product", product)];
    let inputs = [("gate", gate), ("up", up), ("grad", grad)];
    let wanted = outputs.iter().filter_map(|(name, output)| Some((*name, (*output)?)));
    let all: Vec<(&str, &Tensor)> = inputs.into_iter().chain(wanted).collect();
    let Some(grid) = Grid::new(&all)? else { return Ok(()) };
    for (index, (name, output)) in all.iter().enumerate().skip(inputs.len()) {
        for (before, (other, tensor)) in all[..index].iter().enumerate() {
            let same = before < inputs.len()
                && output.data_ptr() == tensor.data_ptr()
                && output.stride() == tensor.stride();
            if !same && overlap(output, tensor)? {
                return Err(Error::invalid(NAME, format!("`{name}` overlaps `{other}`")));
            }
        }
    }
    let [features, blocks] = grid.numbers()?;
    let none = [Argument::Pointer(0), Argument::I64(0)];
    let at = |tensor: &Tensor| [pointer(tensor), Argument::I64(tensor.stride()[0])];
    let mut arguments: Vec<Argument> = inputs.iter().flat_map(|(_, tensor)| at(tensor)).collect();
    arguments.extend(outputs.iter().flat_map(|(_, output)| output.map_or(none.clone(), at)));
    arguments.extend([features, blocks]);
    grid.launch("swiglu_backward", &arguments)?;
    outputs.iter().filter_map(|(_, output)| *output).try_for_each(bump_version)
}

struct Grid {
    kind: &'static str,
    device: Device,
    rows: i64,
    features: i64,
    width: i64,
    blocks: i64,
}

impl Grid {
    /// Checks matrices of one shape, dtype and device; `None` if they have no elements.
    fn new(all: &[(&str, &Tensor)]) -> Result<Option<Self>> {
        let first = all[0].1;
        let options = (first.kind(), first.device());
        let kind = type_of(first.kind()).ok_or_else(|| {
            Error::invalid(NAME, format!("{:?}; expected Float, BFloat16 or Half", first.kind()))
        })?;
        let mut strides = Vec::new();
        for (name, tensor) in all {
            let Matrix { stride, .. } = matrix(NAME, name, tensor, options)?;
            if tensor.size() != first.size() {
                let reason = format!("`{name}` is {:?} and `{}` {:?}", tensor.size(), all[0].0, first.size());
                return Err(Error::invalid(NAME, format!("{reason}; expected one shape")));
            }
            strides.push(stride);
        }
        let Matrix { rows, columns: features, .. } = matrix(NAME, all[0].0, first, options)?;
        if rows == 0 || features == 0 {
            return Ok(None);
        }
        strides.push(features);
        let tensors: Vec<&Tensor> = all.iter().map(|(_, tensor)| *tensor).collect();
        let width = width(&[first.kind()], &tensors, &strides);
        let of_block = width * i64::from(THREADS);
        let blocks = (features + of_block - 1) / of_block;
        Ok(Some(Self { kind, device: first.device(), rows, features, width, blocks }))
    }

    fn numbers(&self) -> Result<[Argument; 2]> {
        Ok([int(NAME, "features", self.features)?, int(NAME, "the number of blocks", self.blocks)?])
    }

    fn launch(&self, kernel: &str, arguments: &[Argument]) -> Result<()> {
        let expression = format!("{kernel}<{}, {}, {THREADS}>", self.kind, self.width);
        launch(SOURCE, &expression, self.device, (self.rows * self.blocks, THREADS), arguments)
    }
}

/// Returns whether they overlap; disjoint columns of one larger matrix do not.
fn overlap(a: &Tensor, b: &Tensor) -> Result<bool> {
    let (first, second) = (memory_range(a)?, memory_range(b)?);
    if first.end <= second.start || second.end <= first.start {
        return Ok(false);
    }
    let shift = (first.start.abs_diff(second.start) / a.kind().elt_size_in_bytes()) as i64;
    let (columns, stride) = (a.size()[1], a.stride()[0]);
    Ok(stride != b.stride()[0] || shift < columns || shift + columns > stride)
}
