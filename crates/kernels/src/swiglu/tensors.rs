//! The tensors of the passes: `[…, features]` of one shape, dtype and device, with dense rows at one distance.

use runtime::Result;
use runtime::tensor_layout::TensorLayout;
use tch::Tensor;

use super::NAME;
use crate::operands::{Access, Operands, Rows};

/// The tensors of a forward pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Forward<'a> {
    pub(super) gate: &'a Tensor,
    pub(super) up: &'a Tensor,
    /// The output of SiLU(gate), if requested.
    pub(super) silu: Option<&'a Tensor>,
    /// The output of SiLU(gate)·up, which may be `gate` or `up`.
    pub(super) product: &'a Tensor,
}

/// The checked matrices of a forward pass.
#[derive(Clone, Copy)]
pub(super) struct ForwardRows {
    pub(super) gate: Rows,
    pub(super) up: Rows,
    pub(super) silu: Option<Rows>,
    pub(super) product: Rows,
}

impl Forward<'_> {
    /// Checks the tensors: all like the product, and without overlap except that of the product with an input.
    pub(super) fn rows(&self) -> Result<ForwardRows> {
        let product = TensorLayout::of(self.product)?;
        let mut operands = Operands::new(NAME, product.device());
        let (kind, size) = (product.kind(), product.size());
        let mut rows = |access, name, tensor: &Tensor| operands.flat_rows(access, name, tensor, kind, size);
        let checked = ForwardRows {
            gate: rows(Access::Read, "gate", self.gate)?,
            up: rows(Access::Read, "up", self.up)?,
            silu: self.silu.map(|silu| rows(Access::Write, "silu", silu)).transpose()?,
            product: rows(Access::Overwrite(&["gate", "up"]), "product", self.product)?,
        };
        operands.check()?;
        Ok(checked)
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [self.gate, self.up, self.product].into_iter().chain(self.silu)
    }
}

/// The tensors of a backward pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backward<'a> {
    pub(super) gate: &'a Tensor,
    /// Read for the gradient of the gate and for the product.
    pub(super) up: &'a Tensor,
    /// SiLU(gate), if it was saved.
    pub(super) silu: Option<&'a Tensor>,
    /// The gradient of the product.
    pub(super) grad: &'a Tensor,
    /// The requested outputs; each may be an input.
    pub(super) gate_grad: Option<&'a Tensor>,
    pub(super) up_grad: Option<&'a Tensor>,
    pub(super) product: Option<&'a Tensor>,
}

/// The checked matrices of a backward pass.
#[derive(Clone, Copy)]
pub(super) struct BackwardRows {
    pub(super) gate: Rows,
    pub(super) up: Rows,
    pub(super) silu: Option<Rows>,
    pub(super) grad: Rows,
    pub(super) gate_grad: Option<Rows>,
    pub(super) up_grad: Option<Rows>,
    pub(super) product: Option<Rows>,
}

impl Backward<'_> {
    /// Checks the tensors: all like `grad`, and without overlap except that of an output with an input.
    pub(super) fn rows(&self) -> Result<BackwardRows> {
        const OUTPUT: Access = Access::Overwrite(&["gate", "up", "silu", "grad"]);
        let layout = TensorLayout::of(self.grad)?;
        let mut operands = Operands::new(NAME, layout.device());
        let (kind, size) = (layout.kind(), layout.size());
        let mut rows = |access, name, tensor: Option<&Tensor>| {
            tensor.map(|tensor| operands.flat_rows(access, name, tensor, kind, size)).transpose()
        };
        let (silu, gate_grad) =
            (rows(Access::Read, "silu", self.silu)?, rows(OUTPUT, "gate's gradient", self.gate_grad)?);
        let (up_grad, product) =
            (rows(OUTPUT, "up's gradient", self.up_grad)?, rows(OUTPUT, "product", self.product)?);
        let mut input = |name, tensor| operands.flat_rows(Access::Read, name, tensor, kind, size);
        let (gate, up, grad) = (input("gate", self.gate)?, input("up", self.up)?, input("grad", self.grad)?);
        operands.check()?;
        Ok(BackwardRows { gate, up, silu, grad, gate_grad, up_grad, product })
    }

    /// Returns the requested outputs.
    pub(super) fn outputs(&self) -> impl Iterator<Item = &Tensor> {
        [self.gate_grad, self.up_grad, self.product].into_iter().flatten()
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [self.gate, self.up, self.grad].into_iter().chain(self.silu).chain(self.outputs())
    }
}
