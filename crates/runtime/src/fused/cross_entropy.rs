//! What a cross-entropy needs of a tile of logits: statistics of its rows, then its gradient, each in one pass.
//!
//! A tile `[n, c]` holds some columns of the logits of n tokens: r = x·Wᵀ for `c` entries of the vocabulary. With the bias
//! b, a scale s and a cap k, the logits are z = k·tanh(s·(r + b)/k), or s·(r + b) without a cap. A target distribution is
//! t (1 at one class, or given).
//!
//! [`LogitsPass::statistics`] turns r into z where it lies, and folds the tile into what is known of each row:
//!
//! - m = max z and Σ e^(z − m), from which log Σ eᶻ = m + ln Σ e^(z − m)
//! - Σ t·z (for one class: its logit), and Σ t
//! - where wanted: Σ w·z (label smoothing; w the class weights), Σ e^(z − m)·z (entropy), argmax z
//!
//! Statistics of several tiles of one row, in any order, give those of the whole row, so that neither the whole row nor the
//! whole vocabulary need be in one place.
//!
//! [`LogitsPass::gradient`] turns z into ∂L/∂r. Whatever the loss is made of (smoothing, weights, z-loss, log-sum-exp as an
//! output), it has one form, with numbers α, β, γ for each row:
//!
//! - ∂L/∂z = α·e^(z − m) − β·t − γ·w
//! - ∂L/∂r = ∂L/∂z · s·(1 − (z/k)²), the last factor with a cap only
//!
//! A row with a NaN has statistics and gradients of NaN; −∞ is a class that cannot be.
//!
//! The fp32 pass over a row computes exponentials within two units in the last place, and adds each 1024 of them up in fp32,
//! those sums in f64.

use std::fmt::Debug;

use tch::{Device, Kind, Tensor};

use crate::autograd::GradMode;
use crate::error::{Error, Result};
use crate::kernels::cross_entropy::Cuda;
use crate::profile::{Flops, kernel, record_external};
use crate::sys::cross_entropy as sys;

mod operators;

pub use crate::sys::cross_entropy::{Coefficients, Statistics, Targets, Transform, Wanted};
pub use operators::Operators;

/// The two passes over a tile. One without rows or without columns adds nothing and changes nothing.
pub trait LogitsPass: Debug + Send + Sync {
    /// Tensors as large as the tile that a pass makes on the way, at most: what a plan of memory counts in.
    fn temporaries(&self) -> u64;

    /// Whether [`gradient_as`](Self::gradient_as) needs no memory for its result.
    fn narrows_in_place(&self) -> bool {
        false
    }

    /// Products to logits, and their statistics. `tile` `[n, c]`, Float or Double, rows dense, whose first column is column
    /// `first` of the vocabulary; `class_weights` `[c]` in its dtype.
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not fit.
    fn statistics(
        &self,
        tile: &mut Tensor,
        first: i64,
        transform: Transform<'_>,
        targets: Targets<'_>,
        class_weights: Option<&Tensor>,
        statistics: &mut Statistics,
    ) -> Result<()>;

    /// Products to logits, where they lie, without statistics: for a second computation.
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not fit.
    fn logits(&self, tile: &mut Tensor, transform: Transform<'_>) -> Result<()>;

    /// Logits to the gradient of the products, where they lie.
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not fit.
    fn gradient(
        &self,
        tile: &mut Tensor,
        transform: Transform<'_>,
        targets: Targets<'_>,
        class_weights: Option<&Tensor>,
        coefficients: Coefficients<'_>,
    ) -> Result<()>;

    /// [`gradient`](Self::gradient) in another dtype, for a product: a tensor `[n, c]` that may lie in the tile's memory. What the
    /// tile holds afterwards is not said.
    ///
    /// # Errors
    /// As [`gradient`](Self::gradient).
    fn gradient_as(
        &self,
        tile: &mut Tensor,
        transform: Transform<'_>,
        targets: Targets<'_>,
        class_weights: Option<&Tensor>,
        coefficients: Coefficients<'_>,
        kind: Kind,
    ) -> Result<Tensor> {
        self.gradient(tile, transform, targets, class_weights, coefficients)?;
        Ok(tile.f_to_kind(kind)?)
    }
}

/// The best passes there are for tensors on `device`.
pub fn pass_for(device: Device) -> &'static dyn LogitsPass {
    if device == Device::Cpu { &Simd } else { &Cuda }
}

/// One pass over memory, vectorized for the processor, on libtorch's threads. CPU tensors only.
#[derive(Clone, Copy, Debug)]
pub struct Simd;

impl LogitsPass for Simd {
    fn temporaries(&self) -> u64 {
        0
    }

    fn statistics(
        &self,
        tile: &mut Tensor,
        first: i64,
        transform: Transform<'_>,
        targets: Targets<'_>,
        class_weights: Option<&Tensor>,
        statistics: &mut Statistics,
    ) -> Result<()> {
        not_recorded(tile)?;
        let _scope = kernel("runtime::cross_entropy_statistics");
        sys::statistics(tile, first, transform, targets, class_weights, statistics)?;
        let passes = 1 + u64::from(transform.changes()) + u64::from(matches!(targets, Targets::Dense(_)));
        record_external("runtime::cross_entropy_statistics", Flops::from(0), passes * bytes_of(tile))
    }

    fn logits(&self, tile: &mut Tensor, transform: Transform<'_>) -> Result<()> {
        not_recorded(tile)?;
        if !transform.changes() {
            return Ok(());
        }
        let _scope = kernel("runtime::cross_entropy_logits");
        sys::logits(tile, transform)?;
        record_external("runtime::cross_entropy_logits", Flops::from(0), 2 * bytes_of(tile))
    }

    fn gradient(
        &self,
        tile: &mut Tensor,
        transform: Transform<'_>,
        targets: Targets<'_>,
        class_weights: Option<&Tensor>,
        coefficients: Coefficients<'_>,
    ) -> Result<()> {
        not_recorded(tile)?;
        let _scope = kernel("runtime::cross_entropy_gradient");
        sys::gradient(tile, transform, targets, class_weights, coefficients)?;
        let passes = 2 + u64::from(matches!(targets, Targets::Dense(_)));
        record_external("runtime::cross_entropy_gradient", Flops::from(0), passes * bytes_of(tile))
    }
}

fn not_recorded(tile: &Tensor) -> Result<()> {
    if GradMode::enabled() && tile.requires_grad() {
        let reason = "the tile requires a gradient, which is not recorded here; work on a detached one";
        return Err(Error::invalid(sys::NAME, reason));
    }
    Ok(())
}

fn bytes_of(tile: &Tensor) -> u64 {
    tile.numel() as u64 * tile.kind().elt_size_in_bytes() as u64
}
