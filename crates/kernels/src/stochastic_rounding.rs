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
mod reference;

use crate::processor::computes_on;
use runtime::profile::{Flops, kernel, record_external};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

pub(crate) const NAME: &str = "stochastic rounding";

/// SplitMix64's increment, and the shifts and factors of its first two rounds.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;
const MIX: [(i64, u64); 2] = [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb)];

/// fp16's least normal number, 2⁻¹⁴, as bits of fp32.
const LEAST_NORMAL_F16: u32 = 0x3880_0000;

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

    /// Returns the seed of a step's hashes.
    pub(crate) fn at(self, step: u64) -> u64 {
        hash(self.key, step)
    }

    /// Returns the bits of the seed and the name.
    pub fn key(self) -> u64 {
        self.key
    }

    /// Returns the index in the whole parameter of the first element.
    pub fn first(self) -> u64 {
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

/// A tensor to round.
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
/// [`Error::Invalid`] for another dtype, shape, device or layout; errors of libtorch and the driver.
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
    let dense_roundings: Vec<Rounding<'_>> =
        all.iter().zip(&dense).map(|(one, target)| Rounding { target, ..*one }).collect();
    let Some(first) = all.first() else { return Ok(()) };
    pass_for(first.source.device()).round(&dense_roundings)?;
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
        let (actual, expected) = (format!("{target:?}"), format!("{source:?}"));
        return refuse(format!(
            "`target` is {actual} and `source` {expected}; expected one shape and device"
        ));
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

/// The pass on one kind of device.
trait RoundingPass {
    /// Rounds contiguous sources into contiguous targets; see [`round`].
    fn round(&self, all: &[Rounding<'_>]) -> Result<()>;
}

/// Returns the fastest pass for tensors on `device`.
fn pass_for(device: Device) -> &'static dyn RoundingPass {
    if computes_on(device) { &cpu::Cpu } else { &cuda::Cuda }
}

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
                let rounding = |target, step| Rounding { source: &source, target, stream, step };
                round(&[rounding(&a, StepNumber::Host(step))]).unwrap();
                let operators = reference::Reference;
                operators.round(&[rounding(&b, StepNumber::Host(step))]).unwrap();
                operators.round(&[rounding(&c, StepNumber::Device(&counted))]).unwrap();
                assert_eq!(bits(&a), bits(&b), "{kind:?} from {first}");
                assert_eq!(bits(&a), bits(&c), "{kind:?} from {first}");
            }
        }
    }
}
