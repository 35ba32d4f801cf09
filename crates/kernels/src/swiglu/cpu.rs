//! SwiGLU's elementwise part in one pass over memory: the checks that make the passes sound.

use half::{bf16, f16};
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use crate::operands::{Rows, apart, rows, same};

mod kernel;

pub(crate) const NAME: &str = "fused swiglu";

/// Whether the passes support this dtype.
pub(crate) fn takes(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half)
}

/// See [`super::forward`]; for CPU tensors of a supported dtype.
pub(crate) fn forward(gate: &Tensor, up: &Tensor, silu: Option<&Tensor>, product: &Tensor) -> Result<()> {
    let outputs = [("product", Some(product)), ("silu", silu)];
    let matrices = Matrices::new(&[("gate", Some(gate)), ("up", Some(up))], &outputs)?;
    // SAFETY: `Matrices::new` has checked that all are views of one shape and dtype on the CPU, and that each output is an input
    // itself or overlaps no other matrix.
    unsafe {
        matrices.run(kernel::Forward {
            gate: matrices.of(gate)?,
            up: matrices.of(up)?,
            silu: silu.map(|silu| matrices.of(silu)).transpose()?,
            product: matrices.of(product)?,
        })
    }?;
    silu.into_iter().chain([product]).try_for_each(bump_version)
}

/// The inputs and outputs of a backward pass: CPU tensors of a supported dtype; an output may be an input's memory, element for element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward<'a> {
    pub(crate) gate: &'a Tensor,
    /// Read for the gradient of the gate and for the product.
    pub(crate) up: &'a Tensor,
    /// SiLU(gate), if it was saved.
    pub(crate) silu: Option<&'a Tensor>,
    pub(crate) grad: &'a Tensor,
    /// The requested outputs.
    pub(crate) gate_grad: Option<&'a Tensor>,
    pub(crate) up_grad: Option<&'a Tensor>,
    pub(crate) product: Option<&'a Tensor>,
}

/// See [`super::backward`].
pub(crate) fn backward(pass: Backward<'_>) -> Result<()> {
    let Backward { gate, up, silu, grad, gate_grad, up_grad, product } = pass;
    let inputs = [("gate", Some(gate)), ("up", Some(up)), ("grad", Some(grad)), ("silu", silu)];
    let outputs = [("gate's gradient", gate_grad), ("up's gradient", up_grad), ("product", product)];
    let matrices = Matrices::new(&inputs, &outputs)?;
    let of = |tensor: Option<&Tensor>| tensor.map(|tensor| matrices.of(tensor)).transpose();
    // SAFETY: as in `forward`.
    unsafe {
        matrices.run(kernel::Backward {
            gate: matrices.of(gate)?,
            up: matrices.of(up)?,
            silu: of(silu)?,
            grad: matrices.of(grad)?,
            gate_grad: of(gate_grad)?,
            up_grad: of(up_grad)?,
            product: of(product)?,
        })
    }?;
    [gate_grad, up_grad, product].into_iter().flatten().try_for_each(bump_version)
}

type Named<'a> = (&'static str, Option<&'a Tensor>);

/// Views of one shape and dtype. Outputs do not overlap each other, and an input overlaps no output unless it is that output.
struct Matrices {
    kind: Kind,
}

impl Matrices {
    fn new(inputs: &[Named<'_>], outputs: &[Named<'_>]) -> Result<Self> {
        let given = |named: &Named<'_>| Some((named.0, named.1?.shallow_clone()));
        let inputs: Vec<(&str, Tensor)> = inputs.iter().filter_map(given).collect();
        let outputs: Vec<(&str, Tensor)> = outputs.iter().filter_map(given).collect();
        let (first_name, first) = outputs.first().unwrap_or(&inputs[0]);
        let kind = first.kind();
        for (index, (name, tensor)) in inputs.iter().chain(&outputs).enumerate() {
            let matrix = rows(NAME, name, tensor, kind)?;
            if tensor.size() != first.size() {
                let (found, expected) = (tensor.size(), first.size());
                let reason =
                    format!("`{name}` is {found:?} and `{first_name}` is {expected:?}; they must be equal");
                return Err(Error::invalid(NAME, reason));
            }
            for (other_index, (other_name, other)) in outputs.iter().enumerate() {
                let itself = index == inputs.len() + other_index;
                let other = rows(NAME, other_name, other, kind)?;
                let fits = itself
                    || apart(matrix, other, kind.elt_size_in_bytes())
                    || index < inputs.len() && same(matrix, other);
                if !fits {
                    let reason =
                        format!("`{name}` overlaps another tensor in memory; give it memory of its own");
                    return Err(Error::invalid(NAME, reason));
                }
            }
        }
        Ok(Self { kind })
    }

    fn of(&self, tensor: &Tensor) -> Result<Rows> {
        rows(NAME, "matrix", tensor, self.kind)
    }

    /// # Safety
    /// The pass is over the matrices that were checked.
    unsafe fn run(&self, pass: impl kernel::Pass) -> Result<()> {
        // SAFETY: by this function's contract; `rows` has compared each dtype with the kind.
        unsafe {
            match self.kind {
                Kind::Double => kernel::run::<f64>(pass),
                Kind::BFloat16 => kernel::run::<bf16>(pass),
                Kind::Half => kernel::run::<f16>(pass),
                _ => kernel::run::<f32>(pass),
            }
        }
    }
}
