//! SwiGLU's elementwise part in one pass over memory: the checks that make the passes sound.

use half::bf16;
use tch::{Kind, Tensor};

use super::tensor::{Rows, apart, bump_version, rows, same};
use crate::error::{Error, Result};

mod kernel;

pub(crate) const NAME: &str = "fused swiglu";

/// Whether the passes take this dtype.
pub(crate) fn takes(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16)
}

/// See [`crate::fused::swiglu::forward`]; CPU tensors of a dtype that is taken.
pub(crate) fn forward(gate: &Tensor, up: &Tensor, silu: Option<&Tensor>, product: &Tensor) -> Result<()> {
    let matrices =
        Matrices::new(&[("gate", gate), ("up", up)], &[("product", Some(product)), ("silu", silu)])?;
    let (g, u, p) = (matrices.of(gate)?, matrices.of(up)?, matrices.of(product)?);
    let s = silu.map(|silu| matrices.of(silu)).transpose()?;
    if let Some(s) = s {
        // An output that is an input may be read after it is written, so only the last one written may be.
        if same(s, g) || same(s, u) {
            return Err(overlap("silu"));
        }
    }
    // SAFETY: all are views of one shape and dtype on the CPU; each output is an input itself or apart from every other
    // (`Matrices::new`).
    unsafe {
        match matrices.kind {
            Kind::Double => kernel::forward::<f64>(g, u, s, p),
            Kind::BFloat16 => kernel::forward::<bf16>(g, u, s, p),
            _ => kernel::forward::<f32>(g, u, s, p),
        }
    }?;
    silu.into_iter().chain([product]).try_for_each(bump_version)
}

/// See [`crate::fused::swiglu::backward`]; CPU tensors of a dtype that is taken.
pub(crate) fn backward(gate: &Tensor, up: &Tensor, silu: Option<&Tensor>, grad: &Tensor) -> Result<()> {
    let inputs: Vec<_> = silu.map(|silu| ("silu", silu)).into_iter().collect();
    let outputs = [("gate", Some(gate)), ("up", Some(up)), ("grad", Some(grad))];
    let matrices = Matrices::new(&inputs, &outputs)?;
    let (g, u, d) = (matrices.of(gate)?, matrices.of(up)?, matrices.of(grad)?);
    let s = silu.map(|silu| matrices.of(silu)).transpose()?;
    if s.is_some_and(|s| same(s, g) || same(s, u) || same(s, d)) {
        return Err(overlap("silu"));
    }
    // SAFETY: all are views of one shape and dtype on the CPU, apart from each other (`Matrices::new`, and above).
    unsafe {
        match matrices.kind {
            Kind::Double => kernel::backward::<f64>(g, u, s, d),
            Kind::BFloat16 => kernel::backward::<bf16>(g, u, s, d),
            _ => kernel::backward::<f32>(g, u, s, d),
        }
    }?;
    [gate, up, grad].into_iter().try_for_each(bump_version)
}

/// Views of one shape and dtype. Outputs are apart from each other, and each input is apart from an output or is it.
struct Matrices {
    kind: Kind,
}

impl Matrices {
    fn new(inputs: &[(&'static str, &Tensor)], outputs: &[(&'static str, Option<&Tensor>)]) -> Result<Self> {
        let outputs: Vec<_> = outputs.iter().filter_map(|(name, tensor)| Some((*name, (*tensor)?))).collect();
        let (first_name, first) = outputs[0];
        let kind = first.kind();
        let matrices = Self { kind };
        let size = kind.elt_size_in_bytes();
        for (name, tensor) in inputs.iter().chain(&outputs) {
            let view = rows(NAME, name, tensor, kind)?;
            if tensor.size() != first.size() {
                let reason = format!(
                    "`{name}` is {:?} and `{first_name}` is {:?}; they must be equal",
                    tensor.size(),
                    first.size()
                );
                return Err(Error::invalid(NAME, reason));
            }
            for (other_name, other) in &outputs {
                let other = rows(NAME, other_name, other, kind)?;
                let fits = other_name == name
                    || apart(view, other, size)
                    || (inputs.iter().any(|(input, _)| input == name) && same(view, other));
                if !fits {
                    return Err(overlap(name));
                }
            }
        }
        Ok(matrices)
    }

    fn of(&self, tensor: &Tensor) -> Result<Rows> {
        rows(NAME, "matrix", tensor, self.kind)
    }
}

fn overlap(name: &str) -> Error {
    Error::invalid(NAME, format!("`{name}` overlaps another tensor in memory; give it memory of its own"))
}
