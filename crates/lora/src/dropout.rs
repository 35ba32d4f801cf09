//! Dropout whose mask is a function of a seed, so that it need not be kept.
//!
//! Element i (row-major) is kept if h(seed, i) ≥ p·2³², where h is half of SplitMix64's output (Steele, Lea & Flood 2014) at
//! counter ⌊i/2⌋. The mask depends on neither the device nor the number of threads. PyTorch keeps one byte per element until
//! backward; this keeps eight bytes in total, and backward recomputes the mask.

use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

/// The dropout mask of a low-rank path.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Mask {
    pub(crate) rate: f64,
    pub(crate) seed: u64,
}

impl Mask {
    /// Draws a seed from libtorch's default generator. Recomputation restores the generator, so a recomputed segment draws the
    /// same seed.
    pub(crate) fn draw(rate: f64) -> runtime::Result<Self> {
        let drawn = Tensor::f_randint(i64::MAX, [1], (Kind::Int64, Device::Cpu))?;
        Ok(Self { rate, seed: drawn.f_int64_value(&[0])?.cast_unsigned() })
    }

    /// Returns 1 for kept and 0 for dropped elements, in `kind`.
    pub(crate) fn keep(self, shape: &[i64], (kind, device): (Kind, Device)) -> runtime::Result<Tensor> {
        let count = usize::try_from(shape.iter().product::<i64>()).unwrap_or(0);
        if count == 0 {
            return Ok(Tensor::f_zeros(shape, (kind, device))?);
        }
        let bytes = self.bytes(count);
        let mask = Tensor::f_from_data_size(&bytes, shape, Kind::Bool)?;
        drop(bytes);
        Ok(mask.f_to_device(device)?.f_to_kind(kind)?)
    }

    /// Returns x with elements dropped and the rest scaled.
    pub(crate) fn apply(self, x: &Tensor) -> runtime::Result<Tensor> {
        let mut kept = self.keep(&x.size(), (x.kind(), x.device()))?;
        let _ = kept.f_mul_(x)?.try_mul_scalar_(self.scale())?;
        Ok(kept)
    }

    /// 1/(1 − p).
    pub(crate) fn scale(self) -> f64 {
        1.0 / (1.0 - self.rate)
    }

    fn bytes(self, count: usize) -> Vec<u8> {
        // A rate below 1 stays below 2³², so that something is always kept.
        let threshold = (self.rate * 4_294_967_296.0) as u64;
        let mut bytes = vec![0; count];
        for (pair, counter) in bytes.chunks_mut(2).zip(1u64..) {
            let mut z = self.seed.wrapping_add(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
            pair[0] = u8::from(z & 0xffff_ffff >= threshold);
            if let Some(second) = pair.get_mut(1) {
                *second = u8::from(z >> 32 >= threshold);
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use tch::kind;

    use super::*;

    #[test]
    fn dropout_keeps_the_right_share_and_elements_are_independent() {
        for rate in [0.0, 0.05, 0.5, 0.9] {
            let kept = Mask { rate, seed: 7 }.keep(&[501, 401], kind::DOUBLE_CPU).unwrap();
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
    fn a_seed_gives_one_mask_and_another_seed_another() {
        let of = |seed| Mask { rate: 0.5, seed }.keep(&[33, 3], kind::FLOAT_CPU).unwrap();
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        assert_eq!(Mask { rate: 0.5, seed: 1 }.keep(&[0, 3], kind::FLOAT_CPU).unwrap().size(), [0, 3]);
    }
}
