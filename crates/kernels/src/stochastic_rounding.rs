//! Stochastic rounding of fp32 to bf16 or fp16: of the two neighbours of a number, each with the probability of its nearness.
//!
//! For |p| between the neighbours a < b (the target's numbers), with a uniform integer u in [0, 2¹⁶):
//!
//! - |p| becomes b if ⌊2¹⁶·(|p| − a)/(b − a)⌋ + u ≥ 2¹⁶, else a
//!
//! so that the expectation of the result is p: exactly for bf16, whose numbers lack 16 bits of fp32's, and for fp16's normal numbers;
//! within 2⁻¹⁶ of the distance for fp16's subnormal ones. A weight thus follows updates far below its last digit on average, where
//! rounding to nearest drops all of them, without an fp32 copy (4 bytes per parameter). The price is a noise of at most one
//! unit in the last place per step. For bf16 it is the sum of the bits of p and u, truncated to 16 bits. A number that the target has is
//! not changed. Numbers from the target's largest on, infinities and NaN are rounded to nearest: a carry makes no infinity.
//!
//! u is a function of a [`Stream`] and of the element's index, and so depends on neither threads nor the device nor the division
//! of a tensor among processes: 16 bits of SplitMix64's output (Steele, Lea & Flood 2014) at counter ⌊index/4⌋ + 1, the lowest for
//! the first of four. On CUDA a kernel rounds many tensors in a launch; without NVRTC libtorch's operators give the same bits.
//!
//! Sources: Gupta et al., arXiv:1502.02551; Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192.

mod cpu;
pub(crate) mod cuda;

use runtime::ops::TryScalar;
use runtime::profile::{Flops, kernel, record_external};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

pub(crate) const NAME: &str = "stochastic rounding";

/// SplitMix64's increment, and the shifts and factors of its first two rounds.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;
const MIX: [(i64, u64); 2] = [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb)];

/// Elements that operators round at a time, so that their integers of 64 bits take at most 32 MiB each.
const PART: i64 = 1 << 22;

/// SplitMix64's output at a counter.
#[inline(always)]
pub(crate) fn hash(seed: u64, counter: u64) -> u64 {
    let mut z = seed.wrapping_add(counter.wrapping_mul(INCREMENT));
    z = (z ^ (z >> MIX[0].0)).wrapping_mul(MIX[0].1);
    z = (z ^ (z >> MIX[1].0)).wrapping_mul(MIX[1].1);
    z ^ (z >> 31)
}

/// The random numbers of a parameter: one for each of its elements at each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// Of the seed and the parameter.
    key: u64,
    /// The index, in the whole parameter, of a tensor's first element.
    first: u64,
}

impl Stream {
    /// Returns the stream of a parameter by its name. Other seeds and other names give independent streams.
    pub fn new(seed: u64, name: &str) -> Self {
        let fold = |key, byte: &u8| hash(key, 1 + u64::from(*byte));
        Self { key: name.as_bytes().iter().fold(hash(seed, 1), fold), first: 0 }
    }

    /// Returns the stream for a part of the parameter, whose first element has this index in the whole.
    #[must_use]
    pub fn from_element(self, first: u64) -> Self {
        Self { first, ..self }
    }

    /// The seed of a step's hashes.
    pub(crate) fn at(self, step: u64) -> u64 {
        hash(self.key, step)
    }

    /// Returns the bits of the seed and the name.
    pub fn key(self) -> u64 {
        self.key
    }

    pub(crate) fn first(self) -> u64 {
        self.first
    }
}

/// The number of a step, which distinguishes its random numbers from those of the others.
#[derive(Debug, Clone, Copy)]
pub enum StepNumber<'a> {
    /// Known to the host.
    Host(u64),
    /// An fp32 scalar on the tensors' device, which the host does not read.
    Device(&'a Tensor),
}

/// What is rounded.
#[derive(Debug, Clone, Copy)]
pub struct Rounding<'a> {
    /// In fp32, contiguous; read.
    pub source: &'a Tensor,
    /// In bf16 or fp16, of the source's shape and on its device; written. Its elements have the indices of a contiguous tensor.
    pub target: &'a Tensor,
    /// The random numbers.
    pub stream: Stream,
    /// The step.
    pub step: StepNumber<'a>,
}

/// Rounds each source into its target, without a graph; on the CPU in parallel on libtorch's threads. Version counters of the targets
/// are incremented.
///
/// ```
/// use kernels::stochastic_rounding::{Rounding, StepNumber, Stream, round};
/// use tch::{Device, Kind, Tensor};
///
/// // A quarter of the way from 1 to bf16's next number, 1 + 2⁻⁷.
/// let source = Tensor::full([10_000], 1.0 + 2f64.powi(-9), (Kind::Float, Device::Cpu));
/// let target = source.to_kind(Kind::BFloat16);
/// assert_eq!(target.mean(Kind::Double).double_value(&[]), 1.0);
/// let stream = Stream::new(42, "lm_head.weight");
/// round(&[Rounding { source: &source, target: &target, stream, step: StepNumber::Host(1) }])?;
/// let error = target.mean(Kind::Double).double_value(&[]) - (1.0 + 2f64.powi(-9));
/// assert!(error.abs() < 2e-4);
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] for another dtype, shape, device or layout; those of libtorch and the driver.
pub fn round(all: &[Rounding<'_>]) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    all.iter().try_for_each(check)?;
    let _scope = kernel("runtime::stochastic_rounding", []);
    // Where a target has gaps, a dense one is rounded and copied.
    let dense = all.iter().map(|one| match one.target.is_contiguous() {
        true => Ok(one.target.shallow_clone()),
        false => Ok(Tensor::f_empty(one.target.size(), (one.target.kind(), one.target.device()))?),
    });
    let dense: Vec<Tensor> = dense.collect::<Result<_>>()?;
    let of_dense: Vec<Rounding<'_>> =
        all.iter().zip(&dense).map(|(one, target)| Rounding { target, ..*one }).collect();
    match all.first().map(|one| one.source.device()) {
        None => return Ok(()),
        Some(Device::Cpu) => of_dense.iter().try_for_each(cpu::round)?,
        Some(_) if cuda::round(&of_dense)? => {}
        Some(_) => of_dense.iter().try_for_each(by_operators)?,
    }
    for (one, dense) in all.iter().zip(&dense).filter(|(one, _)| !one.target.is_contiguous()) {
        runtime::ops::foreach::copy_(&[one.target], &[dense])?;
    }
    let bytes = all.iter().map(|one| one.source.numel() as u64 * 6).sum();
    record_external("runtime::stochastic_rounding", Flops::default(), bytes)
}

fn check(one: &Rounding<'_>) -> Result<()> {
    let refuse = |reason: String| Err(Error::invalid(NAME, reason));
    let Rounding { source, target, step, .. } = one;
    if source.kind() != Kind::Float || !source.is_contiguous() || source.is_sparse() || source.is_neg() {
        return refuse(format!("`source` is {source:?}; expected a contiguous fp32 tensor"));
    }
    if !matches!(target.kind(), Kind::BFloat16 | Kind::Half) || target.is_sparse() || target.is_neg() {
        return refuse(format!("`target` is {target:?}; expected a bf16 or fp16 tensor"));
    }
    if source.size() != target.size() || source.device() != target.device() {
        let (found, expected) = (format!("{target:?}"), format!("{source:?}"));
        return refuse(format!("`target` is {found} and `source` {expected}; expected one shape and device"));
    }
    match step {
        StepNumber::Device(number)
            if (number.kind(), number.device(), number.numel()) != (Kind::Float, source.device(), 1) =>
        {
            refuse(format!(
                "the step's number is {number:?}; expected one fp32 number on the source's device"
            ))
        }
        _ => Ok(()),
    }
}

/// Rounds by libtorch's operators, on any device, without reading it.
fn by_operators(one: &Rounding<'_>) -> Result<()> {
    let Rounding { source, target, stream, step } = one;
    let device = source.device();
    // The seed of the step's hashes, an int64 of one element. Integers of 64 bits wrap around.
    let mut seed = match step {
        StepNumber::Host(step) => Tensor::f_from_slice(&[step.cast_signed()])?.f_to_device(device)?,
        StepNumber::Device(step) => step.f_detach()?.f_reshape([1])?.f_to_kind(Kind::Int64)?,
    };
    seed = seed.try_mul_scalar(INCREMENT.cast_signed())?.try_add_scalar_(stream.key.cast_signed())?;
    seed = mixed(seed)?;
    let (source, target) = (source.f_view([-1])?, target.f_view([-1])?);
    let numbers = source.numel() as i64;
    for from in (0..numbers).step_by(PART as usize) {
        let count = PART.min(numbers - from);
        let begin = stream.first.cast_signed() + from;
        let (first, last) = (begin / 4, (begin + count - 1) / 4);
        let counters = Tensor::try_arange_start(first + 1, last + 2, (Kind::Int64, device))?;
        let _ = counters.try_mul_scalar_(INCREMENT.cast_signed())?.f_add_(&seed)?;
        let hashes = mixed(counters)?;
        let quarters = (0..4).map(|quarter| {
            Ok(hashes.try_bitwise_right_shift_tensor_scalar(16 * quarter)?.try_bitwise_and(0xffffi64)?)
        });
        let quarters: Vec<Tensor> = quarters.collect::<Result<_>>()?;
        let random = Tensor::f_stack(&quarters, 1)?.f_view([-1])?.f_narrow(0, begin - 4 * first, count)?;
        let (p, mut to) = (source.f_narrow(0, from, count)?, target.f_narrow(0, from, count)?);
        let (candidate, largest) = match target.kind() {
            Kind::BFloat16 => (candidate_in_bf16(&p, &random)?, LARGEST_BF16),
            _ => (candidate_in_f16(&p, &random)?, LARGEST_F16),
        };
        let is_below = p.f_abs()?.try_lt(f64::from(largest))?;
        to.f_copy_(&candidate.f_where_self(&is_below, &p)?)?;
    }
    Ok(())
}

/// The last of SplitMix64's steps, on int64.
fn mixed(mut z: Tensor) -> Result<Tensor> {
    // A shift keeps the sign, which is masked away.
    let fold = |z: &Tensor, shift: i64| -> Result<Tensor> {
        let bits =
            z.try_bitwise_right_shift_tensor_scalar(shift)?.try_bitwise_and((1i64 << (64 - shift)) - 1)?;
        Ok(z.f_bitwise_xor_tensor(&bits)?)
    };
    for (shift, factor) in MIX {
        z = fold(&z, shift)?;
        let _ = z.try_mul_scalar_(factor.cast_signed())?;
    }
    fold(&z, 31)
}

/// Numbers that bf16 has, in fp32, for those below its largest.
fn candidate_in_bf16(p: &Tensor, random: &Tensor) -> Result<Tensor> {
    let mut bits = p.f_view_dtype(Kind::Int)?.f_to_kind(Kind::Int64)?;
    Ok(bits.f_add_(random)?.try_bitwise_and(!0xffffi64)?.f_to_kind(Kind::Int)?.f_view_dtype(Kind::Float)?)
}

/// The same for fp16.
fn candidate_in_f16(p: &Tensor, random: &Tensor) -> Result<Tensor> {
    let magnitude = p.f_abs()?;
    let mut bits = magnitude.f_view_dtype(Kind::Int)?.f_to_kind(Kind::Int64)?;
    let of_13_bits = random.try_bitwise_right_shift_tensor_scalar(3i64)?;
    let normal = bits.f_add_(&of_13_bits)?.try_bitwise_and(!0x1fffi64)?;
    let normal = normal.f_to_kind(Kind::Int)?.f_view_dtype(Kind::Float)?;
    let scaled = magnitude.try_mul_scalar(F16_SUBNORMALS)?;
    let whole = scaled.f_floor()?;
    let mut rest = scaled.f_sub(&whole)?.try_mul_scalar(65536.0)?.f_to_kind(Kind::Int64)?;
    let up = rest.f_add_(random)?.try_bitwise_right_shift_tensor_scalar(16i64)?;
    let subnormal = whole.f_add(&up)?.try_mul_scalar(1.0 / F16_SUBNORMALS)?;
    let is_small = magnitude.try_lt(f64::from(f32::from_bits(LEAST_NORMAL_F16)))?;
    Ok(subnormal.f_where_self(&is_small, &normal)?.f_copysign(p)?)
}

/// The largest numbers of the targets.
const LARGEST_BF16: f32 = f32::from_bits(0x7f7f_0000);
const LARGEST_F16: f32 = 65504.0;
/// fp16's least normal number, 2⁻¹⁴, as bits of fp32; and the subnormal numbers in 1.
pub(crate) const LEAST_NORMAL_F16: u32 = 0x3880_0000;
const F16_SUBNORMALS: f64 = 16_777_216.0;

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of every magnitude, with both signs, and the special ones.
    fn numbers(count: i64) -> Tensor {
        tch::manual_seed(3);
        let exponents = Tensor::randint_low(-150, 128, [count], (Kind::Float, Device::Cpu));
        let x = Tensor::randn([count], (Kind::Double, Device::Cpu)) * exponents.to_kind(Kind::Double).exp2();
        let x = x.to_kind(Kind::Float);
        let small = Tensor::randn([count], (Kind::Float, Device::Cpu)) * 1e-5;
        let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, f32::MAX, f32::MIN];
        let ends = [65503.9, 65504.0, -65519.9, 65520.0, 6e-8, 3e-8, 3.39e38, f32::from_bits(0x7fff_ffff)];
        Tensor::cat(&[x, small, Tensor::from_slice(&special), Tensor::from_slice(&ends)], 0)
    }

    fn bits(tensor: &Tensor) -> Vec<i16> {
        let nan = tensor.isnan();
        Vec::try_from(tensor.view_dtype(Kind::Int16).masked_fill(&nan, 0x7fff)).unwrap()
    }

    /// The operators, which only a GPU without NVRTC uses, give the bits of the CPU's pass, wherever a part begins.
    #[test]
    fn operators_round_to_the_same_bits() {
        let source = numbers(1001);
        for kind in [Kind::BFloat16, Kind::Half] {
            for (first, step) in [(0, 1), (1, 2), (7, 1 << 20), ((1 << 40) + 2, 3)] {
                let stream = Stream::new(u64::MAX - first, "w").from_element(first);
                let [a, b, c] = [(); 3].map(|()| source.to_kind(kind));
                let counted = Tensor::from(step as f32);
                let of = |target, step| Rounding { source: &source, target, stream, step };
                round(&[of(&a, StepNumber::Host(step))]).unwrap();
                by_operators(&of(&b, StepNumber::Host(step))).unwrap();
                by_operators(&of(&c, StepNumber::Device(&counted))).unwrap();
                assert_eq!(bits(&a), bits(&b), "{kind:?} from {first}");
                assert_eq!(bits(&a), bits(&c), "{kind:?} from {first}");
            }
        }
    }
}
