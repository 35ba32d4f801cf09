//! The assignment's sanity check, with meaningful tolerances.
//!
//! The assignment compares gradients with `allclose(atol = 1e-2)` where they are of the order of 1e-4: gradients of zero would
//! pass. Here each error is the norm of the difference over the norm of the exact value, computed in f64 from the same rounded
//! inputs, and its limit is the error of libtorch's composition in the same dtype.

use anyhow::Result;
use fused_ce::{Chunk, Reduction};
use tch::{Kind, Tensor};

use super::baselines::Implementation;
use super::shapes::{Shape, Tensors};

/// The values that are compared.
pub(crate) const TENSORS: [&str; 3] = ["loss", "hidden", "weight"];

/// The assignment's absolute tolerance.
pub(crate) const ASSIGNMENTS_TOLERANCE: f64 = 1e-2;

/// The exact values of a shape, and its inputs.
#[derive(Debug)]
pub(crate) struct Exact {
    tensors: Tensors,
    values: [Tensor; 3],
}

impl Exact {
    /// Computes the loss and both gradients in f64, from inputs in the shape's dtype.
    ///
    /// # Errors
    /// Too little memory.
    pub(crate) fn new(shape: &Shape, seed: u64, device: tch::Device) -> Result<Self> {
        let tensors = Tensors::new(shape, seed, device)?;
        let wide = |tensor: &Tensor| tensor.f_detach()?.f_to_kind(Kind::Double)?.f_set_requires_grad(true);
        let (hidden, weight) = (wide(&tensors.hidden)?, wide(&tensors.weight)?);
        let values = run(&hidden, &weight, &tensors.targets, Implementation::Naive, None)?;
        Ok(Self { tensors, values })
    }

    /// ‖found − exact‖ / ‖exact‖ of [`TENSORS`] for one implementation, with so many tokens a chunk.
    ///
    /// # Errors
    /// Errors of the implementation.
    pub(crate) fn errors(&self, implementation: Implementation, chunk: Option<i64>) -> Result<[f64; 3]> {
        let Tensors { hidden, weight, targets } = &self.tensors;
        let results = run(hidden, weight, targets, implementation, chunk.map(Chunk::Tokens))?;
        let mut errors = [0.0; 3];
        for ((error, results), exact) in errors.iter_mut().zip(&results).zip(&self.values) {
            let difference = results.f_to_kind(Kind::Double)?.f_sub(exact)?;
            *error = difference.f_norm()?.double_value(&[]) / exact.f_norm()?.double_value(&[]);
        }
        Ok(errors)
    }

    /// The largest element of each gradient over the assignment's tolerance: where it is below 1, zeros would pass.
    ///
    /// # Errors
    /// None in practice.
    pub(crate) fn zeros_under_the_assignments_tolerance(&self) -> Result<[f64; 2]> {
        let largest = |value: &Tensor| -> Result<f64> {
            Ok(value.f_abs()?.f_max()?.double_value(&[]) / ASSIGNMENTS_TOLERANCE)
        };
        Ok([largest(&self.values[1])?, largest(&self.values[2])?])
    }
}

fn run(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    implementation: Implementation,
    chunk: Option<Chunk>,
) -> Result<[Tensor; 3]> {
    let loss = implementation.loss([hidden, weight, targets], None, Reduction::Mean, chunk)?;
    runtime::autograd::backward(&[&loss])?;
    let gradients = [hidden.f_grad()?, weight.f_grad()?];
    for leaf in [hidden, weight] {
        runtime::autograd::set_grad(leaf, None)?;
    }
    let [of_hidden, of_weight] = gradients;
    Ok([loss.f_detach()?, of_hidden, of_weight])
}
