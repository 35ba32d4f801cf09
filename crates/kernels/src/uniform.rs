//! Uniform noise that is a function of a seed.
//!
//! Element i (row-major) is u = (2·h₂₄(seed, i) + 1 − 2²⁴)·2⁻²⁴, where h₂₄ are the upper 24 bits of the half of SplitMix64's output that
//! decides about element i of a [dropout mask](crate::dropout): one of 2²⁴ numbers in (−1, 1), as far apart as fp32 has them near 1, with the mean 0
//! and the variance (1 − 2⁻⁴⁸)/3. The values are exact, so the noise depends on neither the device nor the number of threads.

use runtime::ops::TryScalar;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use crate::dropout::{PAIRS, STEP, Seed, mixed, upper_half};
use crate::processor::computes_on;
use crate::stochastic_rounding::hash;

const BITS: u32 = 24;

/// Returns noise of a shape in fp32, uniform in (−1, 1). See the [module](self). Records no graph.
///
/// ```
/// use kernels::uniform::noise;
/// use tch::Device;
///
/// let drawn = noise(7.into(), &[2, 3], Device::Cpu)?;
/// assert_eq!(drawn.size(), [2, 3]);
/// assert!(drawn.abs().max().double_value(&[]) < 1.0);
/// assert_eq!(noise(7.into(), &[2, 3], Device::Cpu)?, drawn);
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// A shape that no tensor has; errors of libtorch.
pub fn noise(seed: Seed, shape: &[i64], device: Device) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let count = shape.iter().try_fold(1usize, |count, &size| count.checked_mul(usize::try_from(size).ok()?));
    let Some(count) = count else {
        return Err(Error::invalid("uniform noise", format!("the shape {shape:?} is of no tensor")));
    };
    let drawn = match seed {
        Seed::Host(seed) if computes_on(device) => Tensor::f_from_slice(&values(seed, count))?,
        _ => by_operators(seed, count, device)?,
    };
    Ok(drawn.f_view(shape)?)
}

fn value(half: u64) -> f32 {
    let drawn = (half >> (32 - BITS)) as i64;
    (2 * drawn + 1 - (1 << BITS)) as f32 / (1_u32 << BITS) as f32
}

fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    for (pair, counter) in values.chunks_mut(2).zip(1u64..) {
        let z = hash(seed, counter);
        pair[0] = value(z & 0xffff_ffff);
        if let Some(second) = pair.get_mut(1) {
            *second = value(z >> 32);
        }
    }
    values
}

/// The same by libtorch's operators, on any device.
fn by_operators(seed: Seed, count: usize, device: Device) -> Result<Tensor> {
    let values = Tensor::f_empty([count as i64], (Kind::Float, device))?;
    let seed = seed.on(device)?;
    for first in (0..count).step_by(2 * PAIRS) {
        let part = (count - first).min(2 * PAIRS);
        let (begin, pairs) = ((first / 2 + 1) as i64, part.div_ceil(2) as i64);
        let counters = Tensor::try_arange_start(begin, begin + pairs, (Kind::Int64, device))?;
        let _ = counters.try_mul_scalar_(STEP.cast_signed())?.f_add_(&seed)?;
        let z = mixed(counters)?;
        let halves = [z.try_bitwise_and(0xffff_ffffi64)?, upper_half(&z)?];
        let halves = Tensor::f_stack(&halves, 1)?.f_view([-1])?.f_narrow(0, 0, part as i64)?;
        let drawn = halves.try_bitwise_right_shift_tensor_scalar(i64::from(32 - BITS))?;
        let drawn = drawn.try_mul_scalar(2)?.try_add_scalar(1 - (1i64 << BITS))?;
        let drawn = drawn.f_to_kind(Kind::Float)?.try_mul_scalar(1.0 / f64::from(1_u32 << BITS))?;
        values.f_narrow(0, first as i64, part as i64)?.f_copy_(&drawn)?;
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use runtime::random::StepSeeds;

    use super::*;

    #[test]
    fn noise_is_uniform_and_elements_are_independent() {
        let drawn = noise(7.into(), &[501, 401], Device::Cpu).unwrap().to_kind(Kind::Double).view([-1]);
        let count = drawn.numel() as f64;
        let mean = |values: &Tensor| values.mean(Kind::Double).double_value(&[]);
        assert!(drawn.abs().max().double_value(&[]) < 1.0);
        // Four standard deviations: of the mean, of the variance (whose fourth moment is 1/5), and of each tenth's share.
        assert!(mean(&drawn).abs() < 4.0 * (1.0 / (3.0 * count)).sqrt());
        assert!(
            (mean(&(&drawn * &drawn)) - 1.0 / 3.0).abs() < 4.0 * ((1.0 / 5.0 - 1.0 / 9.0) / count).sqrt()
        );
        for tenth in 0..10 {
            let (low, high) = (-1.0 + 0.2 * f64::from(tenth), -0.8 + 0.2 * f64::from(tenth));
            let share = mean(&drawn.ge(low).logical_and(&drawn.lt(high)).to_kind(Kind::Double));
            assert!((share - 0.1).abs() < 4.0 * (0.09 / count).sqrt(), "{tenth}: {share}");
        }
        for lag in [1, 2, 401] {
            let length = drawn.numel() as i64 - lag;
            let product = drawn.narrow(0, 0, length) * drawn.narrow(0, lag, length);
            assert!(mean(&product).abs() < 4.0 / (3.0 * count.sqrt()), "{lag}");
        }
    }

    #[test]
    fn operators_draw_the_same_noise() {
        for (seed, count) in [(7, 1), (u64::MAX, 2), (1 << 63, 1001), (5, 2 * PAIRS + 3)] {
            let drawn = by_operators(Seed::Host(seed), count, Device::Cpu).unwrap();
            assert_eq!(Vec::<f32>::try_from(drawn).unwrap(), values(seed, count), "{seed} {count}");
        }
        let base = 0x1234_5678_9abc_def0_u64;
        let of = |on_device: bool| {
            let tensor = Tensor::from_slice(&[base.cast_signed()]);
            let _step = StepSeeds::enter(base, on_device.then_some(&tensor));
            [(), ()].map(|()| noise(Seed::draw().unwrap(), &[33, 7], Device::Cpu).unwrap())
        };
        let [first, second] = of(false);
        assert_eq!(of(true), [first.shallow_clone(), second.shallow_clone()]);
        assert_ne!(first, second);
    }

    #[test]
    fn a_shape_that_no_tensor_has_is_refused() {
        assert!(noise(1.into(), &[3, -1], Device::Cpu).unwrap_err().to_string().contains("[3, -1]"));
        assert_eq!(noise(1.into(), &[0, 3], Device::Cpu).unwrap().size(), [0, 3]);
    }
}
