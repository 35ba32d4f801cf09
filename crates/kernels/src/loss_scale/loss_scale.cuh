// The update of a dynamic loss scale; mathematics and contracts are in loss_scale.rs and loss_scale/cuda.rs.
#include "prelude.cuh"

// One thread. `state` has the scale, the growth tracker, the hysteresis tracker, the steps skipped in a row, and those of them at the
// minimum scale; `updated` is where the next one goes, and `factors` gets its scale and the scale's inverse.
__global__ void __launch_bounds__(32) update_loss_scale(
    const double* state, const float* found_inf, double growth_factor, double backoff_factor, double growth_interval,
    double min_scale, double max_scale, double hysteresis, double* updated, float* factors) {
  if (threadIdx.x != 0) return;
  double scale = state[0], growth_tracker = state[1], hysteresis_tracker = state[2], skipped = state[3], at_min_scale = state[4];
  // NaN counts as an overflow.
  if (*found_inf != 0.f) {
    if (scale <= min_scale) at_min_scale += 1.0;
    growth_tracker = 0.0;
    skipped += 1.0;
    hysteresis_tracker = hysteresis_tracker > 1.0 ? hysteresis_tracker - 1.0 : 0.0;
    if (hysteresis_tracker == 0.0) {
      const double fallen = (double)(float)(scale * backoff_factor);
      scale = fallen > min_scale ? fallen : min_scale;
    }
  } else {
    skipped = at_min_scale = 0.0;
    growth_tracker += 1.0;
    if (growth_tracker >= growth_interval) {
      growth_tracker = 0.0;
      hysteresis_tracker = hysteresis;
      const double grown = (double)(float)(scale * growth_factor);
      if (grown < (double)infinity()) scale = grown < max_scale ? grown : max_scale;
    }
  }
  updated[0] = scale;
  updated[1] = growth_tracker;
  updated[2] = hysteresis_tracker;
  updated[3] = skipped;
  updated[4] = at_min_scale;
  factors[0] = (float)scale;
  factors[1] = (float)(1.0 / scale);
}
