//! Dropout whose mask is a function of a seed, so that it need not be kept.
//!
//! Element i (row-major) is kept if h(seed, i) ≥ p·2³², where h is half of SplitMix64's output (Steele, Lea & Flood 2014) at
//! counter ⌊i/2⌋ + 1, the lower half for an even i. The mask depends on neither the device nor the number of threads. PyTorch keeps
//! one byte per element until backward; this keeps eight bytes in total, and backward recomputes the mask. On CUDA a kernel computes
//! the mask and its product with the tensor in one launch.

pub(crate) mod cuda;

use crate::processor::computes_on;
use crate::stochastic_rounding::hash;
use runtime::ops::TryScalar;
use runtime::profile::kernel;
use runtime::random::{StepSeed, step_base, step_seed};
use runtime::tensor_memory::dense;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

/// SplitMix64's increment, and the shifts and factors of its first two rounds.
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const MIX: [(i64, u64); 2] = [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb)];

/// Pairs of elements that operators compute at a time, so that the integers of 64 bits on the way take at most 32 MiB.
pub(crate) const PAIRS: usize = 1 << 20;

/// The mask of a dropout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mask {
    /// p: the probability that an element is dropped, from 0 to below 1.
    pub rate: f64,
    /// Decides which elements are dropped.
    pub seed: Seed,
}

/// The seed of a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seed {
    /// Known to the host.
    Host(u64),
    /// SplitMix64's output at counter `call + 1`, seeded by the base of the training step that runs
    /// ([`StepSeeds`](runtime::random::StepSeeds)), which is read from the device: a graph that repeats the step gets another mask each time.
    Step {
        /// The number of the call in the step.
        call: u64,
    },
}

impl From<u64> for Seed {
    fn from(seed: u64) -> Self {
        Self::Host(seed)
    }
}

impl Mask {
    /// Draws a seed: within a training step from [`StepSeeds`](runtime::random::StepSeeds), else from libtorch's default generator.
    /// Recomputation restores both, so a recomputed segment draws the same seed. The mask of a step is the same, wherever its base is read.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn draw(rate: f64) -> Result<Self> {
        Ok(Self { rate, seed: Seed::draw()? })
    }

    /// Returns 1 for kept and 0 for dropped elements, in a floating dtype.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rate outside [0, 1); errors of libtorch and the driver.
    pub fn keep(self, shape: &[i64], (kind, device): (Kind, Device)) -> Result<Tensor> {
        self.check()?;
        // libtorch refuses a shape that no tensor has.
        let count =
            shape.iter().try_fold(1usize, |count, &size| count.checked_mul(usize::try_from(size).ok()?));
        let Some(count) = count.filter(|count| *count > 0) else {
            return Ok(Tensor::f_zeros(shape, (kind, device))?);
        };
        let seed = match self.seed {
            Seed::Host(seed) if computes_on(device) => Some(seed),
            _ => None,
        };
        let Some(seed) = seed else {
            if device.is_cuda() {
                let out = Tensor::f_empty(shape, (kind, device))?;
                if self.by_kernel(None, &out, 1.0)? {
                    return Ok(out);
                }
            }
            return Ok(self.by_operators(count, device)?.f_view(shape)?.f_to_kind(kind)?);
        };
        let bytes = self.bytes(seed, count);
        let mask = Tensor::f_from_data_size(&bytes, shape, Kind::Bool)?;
        drop(bytes);
        Ok(mask.f_to_device(device)?.f_to_kind(kind)?)
    }

    /// Returns x·mask·factor. [`Mask::scale`] is the factor that keeps the mean. Records no graph. A dropped infinity is NaN, as in
    /// PyTorch: 0·∞.
    ///
    /// # Errors
    /// As [`Mask::keep`].
    pub fn apply(self, x: &Tensor, factor: f64) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        self.check()?;
        if x.device().is_cuda() {
            let x = dense(x)?;
            let out = x.f_empty_like()?;
            if self.by_kernel(Some(&x), &out, factor)? {
                return Ok(out);
            }
        }
        let mut kept = self.keep(&x.size(), (x.kind(), x.device()))?.f_mul_(x)?;
        if factor != 1.0 {
            // A tensor, not a scalar: on a CPU, libtorch's in-place product rounds a scalar to the dtype of bf16 and fp16.
            let factor =
                if x.kind() == Kind::Double { Tensor::from(factor) } else { Tensor::from(factor as f32) };
            let _ = kept.f_mul_(&factor)?;
        }
        Ok(kept)
    }

    /// 1/(1 − p).
    pub fn scale(self) -> f64 {
        1.0 / (1.0 - self.rate)
    }

    fn check(self) -> Result<()> {
        if (0.0..1.0).contains(&self.rate) {
            return Ok(());
        }
        Err(Error::invalid("dropout", format!("the rate is {}; expected one from 0 to below 1", self.rate)))
    }

    /// A rate below 1 stays below 2³², so that something is always kept.
    pub(crate) fn threshold(self) -> u64 {
        (self.rate * 4_294_967_296.0) as u64
    }

    fn by_kernel(self, x: Option<&Tensor>, out: &Tensor, factor: f64) -> Result<bool> {
        let _scope = kernel("runtime::dropout", []);
        cuda::dropout(x, out, self, factor)
    }

    /// Returns the mask, a vector of bools, by libtorch's operators on a device: drawn on the host it takes longer than the rest of a
    /// step on a GPU.
    fn by_operators(self, count: usize, device: Device) -> Result<Tensor> {
        let _no_grad = tch::no_grad_guard();
        let mask = Tensor::f_empty([count as i64], (Kind::Bool, device))?;
        let seed = self.seed.on(device)?;
        for first in (0..count).step_by(2 * PAIRS) {
            let part = (count - first).min(2 * PAIRS);
            let (begin, pairs) = ((first / 2 + 1) as i64, part.div_ceil(2) as i64);
            let counters = Tensor::try_arange_start(begin, begin + pairs, (Kind::Int64, device))?;
            let _ = counters.try_mul_scalar_(STEP.cast_signed())?.f_add_(&seed)?;
            let z = mixed(counters)?;
            let halves = [z.try_bitwise_and(0xffff_ffffi64)?, upper_half(&z)?];
            let kept = Tensor::f_stack(&halves, 1)?.f_view([-1])?.f_narrow(0, 0, part as i64)?;
            let kept = kept.try_ge(self.threshold().cast_signed())?;
            mask.f_narrow(0, first as i64, part as i64)?.f_copy_(&kept)?;
        }
        Ok(mask)
    }

    fn bytes(self, seed: u64, count: usize) -> Vec<u8> {
        let threshold = self.threshold();
        let mut bytes = vec![0; count];
        for (pair, counter) in bytes.chunks_mut(2).zip(1u64..) {
            let z = hash(seed, counter);
            pair[0] = u8::from(z & 0xffff_ffff >= threshold);
            if let Some(second) = pair.get_mut(1) {
                *second = u8::from(z >> 32 >= threshold);
            }
        }
        bytes
    }
}

impl Seed {
    /// Draws a seed: see [`Mask::draw`].
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn draw() -> Result<Self> {
        Ok(match step_seed() {
            Some(StepSeed { call, on_device: true, .. }) => Self::Step { call },
            Some(StepSeed { base, call, .. }) => Self::Host(hash(base, call + 1)),
            None => {
                let drawn = Tensor::f_randint(i64::MAX, [1], (Kind::Int64, Device::Cpu))?;
                Self::Host(drawn.f_int64_value(&[0])?.cast_unsigned())
            }
        })
    }

    /// Returns the seed as an int64 `[1]` on a device.
    pub(crate) fn on(self, device: Device) -> Result<Tensor> {
        match self {
            Self::Host(seed) => Ok(Tensor::try_full([1], seed.cast_signed(), (Kind::Int64, device))?),
            Self::Step { call } => {
                let counter = (call + 1).wrapping_mul(STEP).cast_signed();
                mixed(base_of_step()?.f_to_device(device)?.try_add_scalar(counter)?)
            }
        }
    }
}

/// Returns the base of the step that runs, int64 `[1]` on its device.
fn base_of_step() -> Result<Tensor> {
    step_base().ok_or_else(|| Error::invalid("dropout", "the mask belongs to a training step that has ended"))
}

/// The last of SplitMix64's steps, on int64.
pub(crate) fn mixed(mut z: Tensor) -> Result<Tensor> {
    // Integers of 64 bits wrap around, and shifts keep the sign, which is masked out.
    let fold = |z: &Tensor, shift: i64| -> Result<Tensor> {
        let bits =
            z.try_bitwise_right_shift_tensor_scalar(shift)?.try_bitwise_and((1i64 << (64 - shift)) - 1)?;
        Ok(z.f_bitwise_xor_tensor(&bits)?)
    };
    for (shift, factor) in MIX {
        z = fold(&z, shift)?.try_mul_scalar(factor.cast_signed())?;
    }
    fold(&z, 31)
}

/// Returns the upper 32 bits.
pub(crate) fn upper_half(z: &Tensor) -> Result<Tensor> {
    Ok(z.try_bitwise_right_shift_tensor_scalar(32)?.try_bitwise_and(0xffff_ffffi64)?)
}

#[cfg(test)]
mod tests {
    use runtime::random::StepSeeds;
    use tch::kind;

    use super::*;

    #[test]
    fn dropout_keeps_the_right_share_and_elements_are_independent() {
        for rate in [0.0, 0.05, 0.5, 0.9] {
            let kept = Mask { rate, seed: 7.into() }.keep(&[501, 401], kind::DOUBLE_CPU).unwrap();
            let share = kept.mean(Kind::Double).double_value(&[]);
            // Four standard deviations of the fraction in 200 901 draws.
            let bound = 4.0 * (rate * (1.0 - rate) / 200_901.0).sqrt() + 1e-12;
            assert!((share - (1.0 - rate)).abs() <= bound, "{rate}: {share}");
            let flat = kept.view([-1]) - share;
            let (a, b) = (flat.narrow(0, 0, 200_900), flat.narrow(0, 1, 200_900));
            let correlation = (a * b).mean(Kind::Double).double_value(&[]);
            assert!(correlation.abs() <= 4.0 * rate * (1.0 - rate) / 448.0 + 1e-12, "{rate}: {correlation}");
        }
    }

    #[test]
    fn operators_draw_the_same_mask() {
        for (rate, seed, count) in [
            (0.05, 7, 1),
            (0.5, u64::MAX, 2),
            (0.3, 1 << 63, 1001),
            (0.9, 0x0123_4567_89ab_cdef, 2 * PAIRS + 3),
        ] {
            let mask = Mask { rate, seed: Seed::Host(seed) };
            let drawn = mask.by_operators(count, Device::Cpu).unwrap().to_kind(Kind::Uint8);
            assert_eq!(Vec::<u8>::try_from(drawn).unwrap(), mask.bytes(seed, count), "{rate} {seed} {count}");
        }
    }

    #[test]
    fn a_rate_outside_its_range_is_refused() {
        let x = Tensor::ones([3], kind::FLOAT_CPU);
        for rate in [1.0, -0.1, f64::NAN] {
            let mask = Mask { rate, seed: 1.into() };
            let errors = [mask.keep(&[3], kind::FLOAT_CPU).unwrap_err(), mask.apply(&x, 1.0).unwrap_err()];
            for error in errors {
                assert_eq!(
                    error.to_string(),
                    format!("dropout: the rate is {rate}; expected one from 0 to below 1")
                );
            }
        }
    }

    #[test]
    fn a_shape_that_no_tensor_has_is_refused() {
        let mask = Mask { rate: 0.5, seed: 1.into() };
        for shape in [&[1 << 32, 1 << 32][..], &[i64::MAX, 2, 3], &[3, -1], &[-2, -2]] {
            assert!(mask.keep(shape, kind::FLOAT_CPU).is_err(), "{shape:?}");
        }
    }

    #[test]
    fn products_are_rounded_once() {
        tch::manual_seed(1);
        let mask = Mask { rate: 0.3, seed: 5.into() };
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
            let x = Tensor::randn([777], (kind, Device::Cpu));
            let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
            let keep = mask.keep(&[777], (wide, Device::Cpu)).unwrap();
            for factor in [1.0, mask.scale()] {
                let exact = x.to_kind(wide) * &keep * Tensor::from(factor).to_kind(wide);
                assert_eq!(mask.apply(&x, factor).unwrap(), exact.to_kind(kind), "{kind:?} {factor}");
            }
        }
    }

    #[test]
    fn a_seed_gives_one_mask_and_another_seed_another() {
        let of = |seed| Mask { rate: 0.5, seed: Seed::Host(seed) }.keep(&[33, 3], kind::FLOAT_CPU).unwrap();
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        assert_eq!(Mask { rate: 0.5, seed: 1.into() }.keep(&[0, 3], kind::FLOAT_CPU).unwrap().size(), [0, 3]);
    }

    /// A graph reads the base from the device; the bits are those of the base on the host, call by call, and other bases give other masks.
    #[test]
    fn a_step_has_the_same_masks_wherever_its_base_is() {
        let masks = |base: u64, on_device: bool| -> Vec<Tensor> {
            let tensor = Tensor::from_slice(&[base.cast_signed()]);
            let _step = StepSeeds::enter(base, on_device.then_some(&tensor));
            let draw = |_| Mask::draw(0.3).unwrap().keep(&[1001], kind::FLOAT_CPU).unwrap();
            (0..3).map(draw).collect()
        };
        let base = 0xfedc_ba98_7654_3210;
        let (host, device) = (masks(base, false), masks(base, true));
        assert_eq!(host, device);
        assert!(host[0] != host[1] && host[1] != host[2]);
        assert!(host.iter().zip(masks(base + 1, true)).all(|(a, b)| *a != b));
        let lost = {
            let tensor = Tensor::from_slice(&[1i64]);
            let _step = StepSeeds::enter(1, Some(&tensor));
            Mask::draw(0.3).unwrap()
        };
        let error = lost.keep(&[3], kind::FLOAT_CPU).unwrap_err().to_string();
        assert_eq!(error, "dropout: the mask belongs to a training step that has ended");
    }
}
