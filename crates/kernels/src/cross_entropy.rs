//! The passes of a cross-entropy over a tile of logits: statistics of its rows, then its gradient.
//!
//! A tile `[n, c]` holds some columns of the logits of n tokens: r = x·Wᵀ for `c` entries of the vocabulary. With the bias
//! b, a scale s and a cap k, the logits are z = k·tanh(s·(r + b)/k), or s·(r + b) without a cap. A target distribution is
//! t (1 at one class, or given).
//!
//! [`LogitsPass::statistics`] turns r into z in place, and accumulates the statistics of each row:
//!
//! - m = max z and Σ e^(z − m), from which log Σ eᶻ = m + ln Σ e^(z − m)
//! - Σ t·z (for one class: its logit), and Σ t
//! - on request: Σ w·z (label smoothing; w the class weights), Σ e^(z − m)·z (entropy), argmax z
//!
//! Several tiles of one row, in any order, give the statistics of the whole row, so that no tile needs the whole vocabulary.
//!
//! [`LogitsPass::gradient`] turns z into ∂L/∂r. For all terms of the loss (smoothing, weights, z-loss, log-sum-exp as an output) it
//! has one form, with coefficients α, β, γ for each row:
//!
//! - ∂L/∂z = α·e^(z − m) − β·t − γ·w
//! - ∂L/∂r = ∂L/∂z · s·(1 − (z/k)²), the last factor with a cap only
//!
//! A row with a NaN has statistics and gradients of NaN; −∞ is an impossible class.
//!
//! A tile may be in bf16 or fp16, with everything beside it in fp32. Each number is computed in fp32 and rounded once where a pass
//! stores it: the logits if the transform changes them, and ∂L/∂r. The statistics are those of the stored, rounded logits. The
//! gradient reads these, so e^(z − m) is at most 1, the softmax of a row sums to 1, and the gradient is that of the loss of the
//! rounded logits. With statistics of unrounded logits each e^(z − m) would differ from its part of the sum by the rounding of z, a factor
//! of up to e^(2⁻⁸·|z|) in bf16, which is 8% for a logit of 20. Recomputed logits are rounded alike, so they fit the saved statistics.
//!
//! The fp32 pass over a row computes exponentials within two units in the last place, and sums blocks of 1024 in fp32, then the
//! blocks in f64.

mod arguments;
mod cpu;
pub(crate) mod cuda;
mod reference;
mod row;

use std::fmt::Debug;

use crate::processor::computes_on;
use runtime::Result;
use tch::{Device, Kind, Tensor};

use cuda::Cuda;

pub use arguments::{Coefficients, Statistics, Targets, TileInputs, Transform, Wanted};
pub use cpu::Cpu;
pub use reference::Reference;

/// The two passes over a tile. A tile without rows or columns has no effect.
pub trait LogitsPass: Debug + Send + Sync {
    /// Returns the maximum number of temporaries of the size of a tile in this dtype, for memory planning.
    fn temporaries(&self, tile: Kind) -> u64;

    /// Returns whether [`gradient_as`](Self::gradient_as) needs no memory for its result.
    fn narrows_in_place(&self) -> bool {
        false
    }

    /// Returns the distance between rows, in elements, with which a tile of this many columns and this dtype should be allocated: on CUDA
    /// a multiple of 16 bytes, so that every row is read 16 bytes at a time.
    fn row_stride(&self, columns: i64, _tile: Kind) -> i64 {
        columns
    }

    /// Turns products into logits, and accumulates their statistics. `tile` `[n, c]`, Float or Double, or BFloat16 or Half for passes
    /// other than [`Cpu`], with dense rows. Class weights, bias, target distributions and statistics are in the tile's dtype, or Float
    /// for a tile in BFloat16 or Half.
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not fit.
    fn statistics(
        &self,
        tile: &mut Tensor,
        inputs: TileInputs<'_>,
        statistics: &mut Statistics,
    ) -> Result<()>;

    /// Turns products into logits in place, without statistics: for recomputation.
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not fit.
    fn logits(&self, tile: &mut Tensor, transform: Transform<'_>) -> Result<()>;

    /// Turns logits into the gradient of the products, in place.
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not fit.
    fn gradient(
        &self,
        tile: &mut Tensor,
        inputs: TileInputs<'_>,
        coefficients: Coefficients<'_>,
    ) -> Result<()>;

    /// As [`gradient`](Self::gradient), in another dtype: returns a tensor `[n, c]` that may use the tile's memory. The tile's
    /// values are undefined afterwards. In the tile's dtype it is the tile.
    ///
    /// # Errors
    /// As [`gradient`](Self::gradient).
    fn gradient_as(
        &self,
        tile: &mut Tensor,
        inputs: TileInputs<'_>,
        coefficients: Coefficients<'_>,
        kind: Kind,
    ) -> Result<Tensor> {
        self.gradient(tile, inputs, coefficients)?;
        Ok(tile.f_to_kind(kind)?)
    }
}

/// Returns the fastest passes for tensors on `device`.
pub fn pass_for(device: Device) -> &'static dyn LogitsPass {
    if computes_on(device) { &Cpu } else { &Cuda }
}
