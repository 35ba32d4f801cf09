//! The passes by libtorch's operators, for devices and dtypes without a kernel.

use runtime::Result;
use tch::{Kind, Tensor};

use super::tensors::Forward;
use super::{Gradients, SwigluPass};

/// Chains of libtorch's operators.
pub(super) struct Reference;

impl SwigluPass for Reference {
    fn forward(&self, tensors: &Forward<'_>) -> Result<()> {
        let silu = tensors.gate.f_silu()?;
        let _ = silu.f_mul_out(tensors.product, tensors.up)?;
        if let Some(output) = tensors.silu {
            output.shallow_clone().f_copy_(&silu)?;
        }
        Ok(())
    }

    /// In the memory of the inputs, with one temporary for SiLU: the product in that of `up`, whose gradient is in that of `grad`.
    fn backward(&self, gate: Tensor, up: Tensor, silu: Option<&Tensor>, grad: Tensor) -> Result<Gradients> {
        let silu = silu.map_or_else(|| gate.f_silu(), |silu| Ok(silu.shallow_clone()))?;
        let mut gate = gate;
        let _ = gate.f_silu_backward_grad_input(&gate, &grad)?;
        let _ = gate.f_mul_(&up)?;
        let product = up;
        let _ = product.f_mul_out(&product, &silu)?;
        let mut up = grad;
        let _ = up.f_mul_(&silu)?;
        Ok(Gradients { gate, up, product })
    }
}

/// Computes SiLU(gate)·up in `kind` by operators that record the graph: in fp32 or f64, rounded once.
pub(super) fn recorded_product(gate: &Tensor, up: &Tensor, kind: Kind) -> Result<Tensor> {
    let compute = if kind == Kind::Double { Kind::Double } else { Kind::Float };
    let (gate, up) = (gate.f_to_kind(compute)?, up.f_to_kind(compute)?);
    let product = gate.f_mul(&gate.f_sigmoid()?)?.f_mul(&up)?;
    Ok(product.f_to_kind(kind)?.f_contiguous()?)
}
