//! The update of a dynamic loss scale on a GPU, in one launch and without synchronisation.
//!
//! With s the scale, t the growth tracker (steps without overflow since s last changed), h the hysteresis tracker (overflows until s
//! falls), n the steps skipped in a row and m those of them at the minimum scale:
//!
//! - after an overflow: m ← m + 1 if s ≤ min_scale, n ← n + 1, t ← 0, h ← max(h − 1, 0), and if h = 0, s ← max(s·backoff_factor, min_scale);
//! - after any other step: n ← m ← 0, t ← t + 1; at t = growth_interval, t ← 0, h ← hysteresis, and s ← min(s·growth_factor, max_scale)
//!   if that is finite.
//!
//! Products are rounded to fp32 once, from fp64. libtorch's operators take about thirty launches for it, and its own
//! `_amp_update_scale_` has neither bounds nor hysteresis.

pub(crate) mod cuda;

use runtime::Result;
use tch::Tensor;

/// Options of a dynamic loss scale. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dynamic {
    /// Above 1.
    pub growth_factor: f64,
    /// Between 0 and 1.
    pub backoff_factor: f64,
    /// At least 1.
    pub growth_interval: u32,
    /// Above 0.
    pub min_scale: f32,
    /// Not below `min_scale`.
    pub max_scale: f32,
    /// At least 1.
    pub hysteresis: u32,
}

/// The state after a step, on its device.
#[derive(Debug)]
pub struct Updated {
    /// Double, `[5]`: s, t, h, n, m.
    pub state: Tensor,
    /// Float, `[2]`: s and 1/s.
    pub factors: Tensor,
}

/// Computes the state after a step from `state` `[5]` (double: s, t, h, n, m) and `found_inf` `[1]` (float: 0, or anything else after an
/// overflow). Changes neither. `None` where the kernel cannot run, whatever the tensors: on other devices than
/// CUDA, without NVRTC, below compute capability 8.0, and with `FRUGAL_CUDA_KERNELS=off`.
///
/// # Errors
/// [`Error::Invalid`](runtime::Error::Invalid) for tensors of other shapes, dtypes or devices; errors of the driver.
pub fn update(state: &Tensor, found_inf: &Tensor, options: &Dynamic) -> Result<Option<Updated>> {
    cuda::update(state, found_inf, options)
}
