//! One pass over the gradients of a step: scales them, checks that they are finite, and computes their norm.

use crate::processor::computes_on;
use half::bf16;
use runtime::ops;
use runtime::parallel;
use runtime::profile::kernel;
use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::{bump_version, memory_range};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::{GradientPass, NAME, Unscaled};
use crate::operands::{Access, Operands, has_no_gaps};
use crate::simd;

/// One pass over memory, vectorized for the processor, on libtorch's threads; without the norm, libtorch's operator, which does less work.
pub(super) struct Cpu;

impl GradientPass for Cpu {
    fn unscale(&self, grads: &[&Tensor], factor: &Tensor, norm: bool) -> Result<Unscaled> {
        let _scope = kernel("runtime::unscale", []);
        let value = read_factor(factor)?;
        if !norm && value.abs() <= 1.0 {
            // libtorch checks g and not f·g, which is equivalent for such a factor.
            stretches(grads)?;
            let found_inf = Tensor::f_zeros([1], (Kind::Float, Device::Cpu))?;
            ops::amp::non_finite_check_and_unscale_(grads, &found_inf, factor)?;
            return Ok(Unscaled { found_inf, norm: None });
        }
        let survey = survey(&stretches(grads)?, value)?;
        grads.iter().try_for_each(|grad| bump_version(grad))?;
        let flag = f32::from(u8::from(survey.non_finite));
        let norm =
            norm.then(|| Tensor::f_from_slice(&[survey.sum_of_squares.sqrt()])?.f_reshape([] as [i64; 0]));
        Ok(Unscaled { found_inf: Tensor::f_from_slice(&[flag])?, norm: norm.transpose()? })
    }
}

/// Elements computed at once: four AVX-512 registers of fp32.
const BLOCK: usize = 64;
/// Elements of one task: 128 KiB of fp32.
const TASK: usize = 32 * 1024;

/// The result of a pass.
#[derive(Clone, Copy, Debug, Default)]
struct Survey {
    non_finite: bool,
    sum_of_squares: f64,
}

impl Survey {
    fn and(self, other: Self) -> Self {
        Self {
            non_finite: self.non_finite || other.non_finite,
            sum_of_squares: self.sum_of_squares + other.sum_of_squares,
        }
    }
}

/// A part of a gradient's memory, for one task only.
#[derive(Clone, Copy)]
struct Stretch {
    pointer: usize,
    count: usize,
    kind: Kind,
}

/// Returns whether a CPU tensor has an element that is infinite or NaN, from one read of it; `None` for a dtype or layout that the pass
/// does not support.
pub(crate) fn has_non_finite(tensor: &Tensor) -> Result<Option<bool>> {
    let layout = TensorLayout::of(tensor)?;
    let (kind, count) = (layout.kind(), layout.numel());
    let fits = computes_on(layout.device()) && layout.is_strided() && has_no_gaps(&layout);
    if !fits || !matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half) {
        return Ok(None);
    }
    if count == 0 {
        return Ok(Some(false));
    }
    let range = memory_range(tensor)?;
    let run = |task: usize| {
        let (start, length) = (task * TASK, TASK.min(count - task * TASK));
        let pointer = range.start + start * kind.elt_size_in_bytes();
        // SAFETY: the tensor is alive, dense, on the CPU, and has `length` elements of the dtype's size from here on; any bits are a
        // valid unsigned number. As with every operation of libtorch, the caller ensures that no thread writes it meanwhile.
        simd::arch().dispatch(|| unsafe {
            match kind {
                Kind::Double => has_exponent(pointer as *const u64, length, 0x7ff0_0000_0000_0000),
                Kind::Float => has_exponent(pointer as *const u32, length, 0x7f80_0000),
                Kind::BFloat16 => has_exponent(pointer as *const u16, length, 0x7f80),
                _ => has_exponent(pointer as *const u16, length, 0x7c00),
            }
        })
    };
    let (tasks, threads) = (count.div_ceil(TASK), usize::try_from(tch::get_num_threads()).unwrap_or(1));
    if threads < 2 || tasks <= 2 {
        return Ok(Some((0..tasks).any(run)));
    }
    Ok(Some(parallel::map(tasks, run)?.into_iter().any(|has| has)))
}

/// Returns whether one of the numbers has all bits of the exponent `mask`, as infinities and NaNs have.
///
/// # Safety
/// `count` numbers lie at `pointer`, and no other code writes them meanwhile.
unsafe fn has_exponent<T>(pointer: *const T, count: usize, mask: T) -> bool
where
    T: Copy + Default + Eq + std::ops::BitAnd<Output = T> + std::ops::BitOr<Output = T> + From<bool>,
{
    // SAFETY: by this function's contract.
    let values = unsafe { std::slice::from_raw_parts(pointer, count) };
    let mut flags = [T::default(); BLOCK];
    let (blocks, rest) = values.as_chunks::<BLOCK>();
    for block in blocks {
        for i in 0..BLOCK {
            flags[i] = flags[i] | T::from(block[i] & mask == mask);
        }
    }
    rest.iter().any(|value| *value & mask == mask) || flags.iter().any(|flag| *flag != T::default())
}

/// Divides the memory of the gradients into tasks. Refuses tensors that the pass does not support.
fn stretches(grads: &[&Tensor]) -> Result<Vec<Stretch>> {
    let mut operands = Operands::new(NAME, Device::Cpu);
    let mut stretches = Vec::new();
    for (index, grad) in grads.iter().enumerate() {
        let (kind, count) = (grad.kind(), grad.numel());
        if !matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16) {
            let reason = format!("`gradient {index}` is {kind:?}; expected Float, Double or BFloat16");
            return Err(Error::invalid(NAME, reason));
        }
        let start = operands.without_gaps(Access::Write, ("gradient", index), grad, kind)?;
        stretches.extend((0..count).step_by(TASK).map(|first| Stretch {
            pointer: start + first * kind.elt_size_in_bytes(),
            count: TASK.min(count - first),
            kind,
        }));
    }
    operands.check()?;
    Ok(stretches)
}

/// Returns the one element of a float tensor on the CPU.
fn read_factor(tensor: &Tensor) -> Result<f64> {
    let (kind, device, size) = (tensor.kind(), tensor.device(), tensor.size());
    if kind != Kind::Float || device != Device::Cpu || tensor.numel() != 1 || tensor.is_neg() {
        let factor = format!("`factor` is {kind:?} {size:?} on {device:?}");
        return Err(Error::invalid(
            NAME,
            format!("{factor}; expected one element, Float, where the gradients are"),
        ));
    }
    let range = memory_range(tensor)?;
    // SAFETY: the tensor is alive, dense, on the CPU, and has one element of this type at the start of its memory.
    Ok(f64::from(unsafe { *(range.start as *const f32) }))
}

fn survey(stretches: &[Stretch], factor: f64) -> Result<Survey> {
    let run = |stretch: &Stretch| {
        // SAFETY: the parts do not overlap and lie in tensors that the caller holds (`Cpu::unscale`).
        simd::arch().dispatch(|| unsafe {
            match stretch.kind {
                Kind::Double => scale::<f64>(*stretch, factor),
                Kind::BFloat16 => scale::<bf16>(*stretch, factor as f32),
                _ => scale::<f32>(*stretch, factor as f32),
            }
        })
    };
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1);
    let all: usize = stretches.iter().map(|stretch| stretch.count).sum();
    if threads < 2 || all <= 2 * TASK {
        return Ok(stretches.iter().map(run).fold(Survey::default(), Survey::and));
    }
    // Summed in a fixed order, so that the norm has the same bits in every run.
    let surveys = parallel::map(stretches.len(), |task| run(&stretches[task]))?;
    Ok(surveys.into_iter().fold(Survey::default(), Survey::and))
}

trait Element: Copy + Default {
    type Compute: Copy + Default + Into<f64>;
    fn times(self, factor: Self::Compute) -> Self;
    fn wide(self) -> Self::Compute;
    fn add_square(sum: Self::Compute, value: Self::Compute) -> Self::Compute;
}

impl Element for f32 {
    type Compute = f32;
    #[inline(always)]
    fn times(self, factor: f32) -> f32 {
        self * factor
    }
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
    #[inline(always)]
    fn add_square(sum: f32, value: f32) -> f32 {
        sum + value * value
    }
}

impl Element for f64 {
    type Compute = f64;
    #[inline(always)]
    fn times(self, factor: f64) -> f64 {
        self * factor
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }
    #[inline(always)]
    fn add_square(sum: f64, value: f64) -> f64 {
        sum + value * value
    }
}

impl Element for bf16 {
    type Compute = f32;
    #[inline(always)]
    fn times(self, factor: f32) -> bf16 {
        bf16::from_f32(self.to_f32() * factor)
    }
    #[inline(always)]
    fn wide(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn add_square(sum: f32, value: f32) -> f32 {
        sum + value * value
    }
}

/// # Safety
/// The part is memory of `T`, and no other code reads or writes it meanwhile.
unsafe fn scale<T: Element>(stretch: Stretch, factor: T::Compute) -> Survey {
    let pointer = stretch.pointer as *mut T;
    // SAFETY: by this function's contract.
    let values = unsafe { std::slice::from_raw_parts_mut(pointer, stretch.count) };
    // One sum for each element of a block: independent, and each of at most 512 squares.
    let mut sums = [T::Compute::default(); BLOCK];
    let (blocks, rest) = values.as_chunks_mut::<BLOCK>();
    for block in blocks {
        for i in 0..BLOCK {
            block[i] = block[i].times(factor);
            sums[i] = T::add_square(sums[i], block[i].wide());
        }
    }
    for (value, sum) in rest.iter_mut().zip(&mut sums) {
        *value = value.times(factor);
        *sum = T::add_square(*sum, value.wide());
    }
    let sum_of_squares: f64 = sums.into_iter().map(Into::into).sum();
    if sum_of_squares.is_finite() {
        return Survey { non_finite: false, sum_of_squares };
    }
    // A value is not finite, or its square overflows: rare, so a second pass decides.
    let wide = values.iter().map(|value| -> f64 { value.wide().into() });
    let (mut non_finite, mut sum_of_squares) = (false, 0.0);
    for value in wide {
        non_finite |= !value.is_finite();
        sum_of_squares += value * value;
    }
    Survey { non_finite, sum_of_squares }
}
