//! SwiGLU's elementwise part as CUDA kernels.

use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::tensors::{Backward, BackwardRows, Forward, ForwardRows};
use super::{Gradients, NAME, SwigluPass, record};
use crate::cuda::{Argument, Source, are_ready, int, launch, type_of, width};
use crate::operands::Rows;

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

/// The kernels in CUDA C++, for tensors that [`take`] accepts.
pub(super) struct Cuda;

impl SwigluPass for Cuda {
    fn forward(&self, tensors: &Forward<'_>) -> Result<()> {
        forward(tensors)?;
        record("runtime::swiglu", tensors.product, tensors.tensors().count())
    }

    /// Computes SiLU(gate) again: reading it would take as long.
    fn backward(&self, gate: Tensor, up: Tensor, _silu: Option<&Tensor>, grad: Tensor) -> Result<Gradients> {
        let [gate_grad, up_grad, product] = [Some(&gate), Some(&up), Some(&grad)];
        let tensors = Backward { gate: &gate, up: &up, silu: None, grad: &grad, gate_grad, up_grad, product };
        backward(&tensors)?;
        record("runtime::swiglu_backward", &grad, tensors.tensors().count())?;
        Ok(Gradients { gate, up, product: grad })
    }
}

/// See [`super::forward`].
pub(super) fn forward(tensors: &Forward<'_>) -> Result<()> {
    let ForwardRows { gate, up, silu, product } = tensors.rows()?;
    let matrices = [Some(gate), Some(up), silu, Some(product)];
    launch_over("swiglu_forward", &matrices, &tensors.tensors().collect::<Vec<_>>())?;
    tensors.silu.into_iter().chain([tensors.product]).try_for_each(bump_version)
}

/// See [`super::backward`]; `silu` is not read.
pub(super) fn backward(tensors: &Backward<'_>) -> Result<()> {
    let BackwardRows { gate, up, grad, gate_grad, up_grad, product, .. } = tensors.rows()?;
    let matrices = [Some(gate), Some(up), Some(grad), gate_grad, up_grad, product];
    launch_over("swiglu_backward", &matrices, &tensors.tensors().collect::<Vec<_>>())?;
    tensors.outputs().try_for_each(bump_version)
}

/// Launches a kernel whose arguments are the address and row stride of each matrix (0 for an absent one), the features, and the
/// blocks of a row. `tensors` are the matrices, of one dtype and device.
fn launch_over(kernel: &str, matrices: &[Option<Rows>], tensors: &[&Tensor]) -> Result<()> {
    let (kind, device) = (tensors[0].kind(), tensors[0].device());
    let element = type_of(kind).ok_or_else(|| {
        Error::invalid(NAME, format!("no CUDA kernel for {kind:?}; expected Float, BFloat16 or Half"))
    })?;
    let Some(Rows { rows, columns, .. }) = matrices.iter().flatten().next().copied() else { return Ok(()) };
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let (rows, features) = (rows as i64, columns as i64);
    let strides = matrices.iter().flatten().map(|matrix| matrix.row_stride as i64);
    let width = width(&[kind], tensors, &strides.chain([features]).collect::<Vec<_>>());
    let block_features = width * i64::from(THREADS);
    let blocks = (features + block_features - 1) / block_features;
    let mut arguments = Vec::new();
    for matrix in matrices {
        let (pointer, stride) = matrix.map_or((0, 0), |matrix| (matrix.pointer, matrix.row_stride));
        arguments.extend([Argument::Pointer(pointer as u64), Argument::I64(stride as i64)]);
    }
    arguments.extend([int(NAME, "features", features)?, int(NAME, "the number of blocks", blocks)?]);
    let expression = format!("{kernel}<{element}, {width}, {THREADS}>");
    launch(SOURCE, &expression, device, (rows * blocks, THREADS), &arguments)
}
