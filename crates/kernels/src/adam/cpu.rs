//! A step of Adam in one pass over memory, with its checks.
//!
//! The pass repeats the arithmetic of libtorch's kernel for processors with AVX2, so that both give the same bits. In that kernel the
//! compiler has fused products and sums, and not in the same way everywhere: the second moment is
//! fma((1−β₂)·g, g, β₂·v) in vectors of eight, and fma(β₂, v, (1−β₂)·g·g) for the last elements that fill no vector.

use std::marker::PhantomData;

use half::{bf16, f16};
use pulp::{Simd, WithSimd};
use runtime::parallel;
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::{AdamStep, AdamTensors};
use crate::operands::Operands;
use crate::simd::{self, Element, load, store};

pub(crate) const NAME: &str = "fused adam";

/// See [`super::adam`].
pub(crate) fn step(tensors: &AdamTensors<'_>, step: &AdamStep) -> Result<()> {
    let AdamTensors { gradient, master, exp_avg, exp_avg_sq, weight } = *tensors;
    check(tensors, Device::Cpu)?;
    let elements = master.numel();
    if elements == 0 {
        return Ok(());
    }
    let address = |tensor: &Tensor| tensor.data_ptr() as usize;
    let pass = Pass {
        elements,
        gradient: address(gradient),
        master: address(master),
        exp_avg: address(exp_avg),
        exp_avg_sq: address(exp_avg_sq),
        weight: weight.map_or(0, address),
        coefficients: Coefficients::new(step),
    };
    let out = weight.map_or(Kind::BFloat16, Tensor::kind);
    macro_rules! run {
        ($gradient:ty) => {
            // SAFETY: every tensor has this many dense elements of its type on the CPU, and written tensors overlap no other
            // (checked above); they outlive the call.
            unsafe {
                match out {
                    Kind::Half => run::<$gradient, f16>(pass),
                    _ => run::<$gradient, bf16>(pass),
                }
            }
        };
    }
    match gradient.kind() {
        Kind::BFloat16 => run!(bf16),
        Kind::Half => run!(f16),
        _ => run!(f32),
    }?;
    [Some(master), Some(exp_avg), Some(exp_avg_sq), weight].into_iter().flatten().try_for_each(bump_version)
}

/// Refuses tensors that differ in shape, are not contiguous, not on `device`, of unsupported dtypes, or overlap.
pub(crate) fn check(tensors: &AdamTensors<'_>, device: Device) -> Result<()> {
    let AdamTensors { gradient, master, exp_avg, exp_avg_sq, weight } = *tensors;
    expect_kind("master", master, &[Kind::Float])?;
    expect_kind("gradient", gradient, &[Kind::Float, Kind::BFloat16, Kind::Half])?;
    let size = &master.size()[..];
    let mut operands = Operands::new(NAME, device);
    operands.write("master", master, Kind::Float, size)?;
    operands.write("exp_avg", exp_avg, Kind::Float, size)?;
    operands.write("exp_avg_sq", exp_avg_sq, Kind::Float, size)?;
    if let Some(weight) = weight {
        expect_kind("weight", weight, &[Kind::BFloat16, Kind::Half])?;
        operands.write("weight", weight, weight.kind(), size)?;
    }
    operands.read("gradient", gradient, gradient.kind(), size)?;
    operands.check()
}

/// Refuses a tensor of another dtype than `kinds`.
fn expect_kind(name: &str, tensor: &Tensor, kinds: &[Kind]) -> Result<()> {
    if !tensor.defined() {
        return Err(Error::invalid(NAME, format!("`{name}` is undefined")));
    }
    let kind = tensor.kind();
    if kinds.contains(&kind) {
        return Ok(());
    }
    let remedy = if (name, kind) == ("weight", Kind::Float) {
        "; a weight in fp32 is the master itself, so give none"
    } else {
        ""
    };
    Err(Error::invalid(NAME, format!("`{name}` is {kind:?}; expected one of {kinds:?}{remedy}")))
}

/// Elements computed at once: two AVX-512 registers of fp32.
const BLOCK: usize = 32;
/// Elements of one of libtorch's vectors.
const VECTOR: usize = 8;
/// Elements of one task: 256 KiB of each fp32 operand, long enough for the processor to read ahead.
const TASK: usize = 64 * 1024;

/// The factors of a step, computed in f64 and rounded once.
#[derive(Clone, Copy)]
struct Coefficients {
    /// Multiplied into the gradient, after rounding to the gradient's dtype, as libtorch does with a scalar.
    factor: Option<f32>,
    /// Multiplied into the parameter: 1 − lr·λ for decoupled decay, else 1.
    shrink: f32,
    /// λ if `λ·parameter` is added to the gradient.
    penalty: Option<f32>,
    /// m ← base + lerp·(g − m), where the base is m, or g if `from_gradient`.
    lerp: f32,
    from_gradient: bool,
    beta2: f32,
    rest2: f32,
    /// √(1 − β₂ᵗ), from 10⁻⁸ to 1.
    root: f32,
    eps: f32,
    /// −lr/(1 − β₁ᵗ).
    step: f32,
}

impl Coefficients {
    fn new(step: &AdamStep) -> Self {
        let AdamStep { lr, beta1, beta2, eps, weight_decay, decoupled, .. } = *step;
        // libtorch counts steps in fp32.
        let count = f64::from(step.step as f32);
        let rest1 = (1.0 - beta1) as f32;
        let from_gradient = rest1.abs() >= 0.5;
        Self {
            factor: step.gradient_factor.map(|factor| factor as f32),
            shrink: if decoupled && weight_decay != 0.0 {
                (-lr).mul_add(weight_decay, 1.0) as f32
            } else {
                1.0
            },
            penalty: (!decoupled && weight_decay != 0.0).then_some(weight_decay as f32),
            lerp: if from_gradient { rest1 - 1.0 } else { rest1 },
            from_gradient,
            beta2: beta2 as f32,
            rest2: (1.0 - beta2) as f32,
            root: (1.0 - beta2.powf(count)).sqrt() as f32,
            eps: eps as f32,
            step: (-(lr / (1.0 - beta1.powf(count)))) as f32,
        }
    }
}

/// Addresses; `weight` is 0 if there is none.
#[derive(Clone, Copy)]
struct Pass {
    elements: usize,
    gradient: usize,
    master: usize,
    exp_avg: usize,
    exp_avg_sq: usize,
    weight: usize,
    coefficients: Coefficients,
}

/// # Safety
/// This many elements lie at each address: of `G` at the gradient's, of `W` at the weight's, else of fp32. Only the caller uses
/// them during the call (others may read the gradient), and none overlap.
unsafe fn run<G, W>(pass: Pass) -> Result<()>
where
    G: Element<Compute = f32>,
    W: Element<Compute = f32>,
{
    let arch = simd::arch();
    parallel::for_each(pass.elements.div_ceil(TASK), |task| {
        let (from, to) = (task * TASK, pass.elements.min((task + 1) * TASK));
        arch.dispatch(Task::<G, W> { pass, from, to, types: PhantomData });
    })
}

struct Task<G, W> {
    pass: Pass,
    from: usize,
    to: usize,
    types: PhantomData<(G, W)>,
}

impl<G: Element<Compute = f32>, W: Element<Compute = f32>> WithSimd for Task<G, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { pass, from, to, .. } = self;
        let c = pass.coefficients;
        let factor = c.factor.map(|factor| G::round(factor).widen());
        let gradient = (pass.gradient as *const G).wrapping_add(from);
        let weight = (pass.weight as *mut W).wrapping_add(from);
        // SAFETY: by the contract of `run`, which gives each element to one task.
        let (p, m, v) = unsafe {
            (slice(pass.master, from, to), slice(pass.exp_avg, from, to), slice(pass.exp_avg_sq, from, to))
        };
        let count = to - from;
        let blocks = count - count % BLOCK;
        for at in (0..blocks).step_by(BLOCK) {
            let (p, m, v) = (&mut p[at..at + BLOCK], &mut m[at..at + BLOCK], &mut v[at..at + BLOCK]);
            // SAFETY: the block lies within the task's elements of the gradient, which nobody writes.
            let raw = unsafe { std::slice::from_raw_parts(gradient.wrapping_add(at), BLOCK) };
            match (G::as_compute(raw), factor) {
                (Some(g), None) => block(simd, c, g, p, m, v),
                _ => {
                    // SAFETY: as above.
                    let mut g: [f32; BLOCK] = unsafe { load(raw.as_ptr()) };
                    if let Some(factor) = factor {
                        for g in &mut g {
                            *g = G::round(*g * factor).widen();
                        }
                    }
                    block(simd, c, &g, p, m, v);
                }
            }
            if pass.weight != 0 {
                let mut out = [0.0; BLOCK];
                out.copy_from_slice(p);
                // SAFETY: the block lies within the task's elements of the weight, which are this task's alone.
                unsafe { store(weight.wrapping_add(at), &out) };
            }
        }
        // Only the last task has such elements: the others are whole blocks.
        let vectors = count - count % VECTOR;
        for at in blocks..count {
            // SAFETY: as for a block.
            let [mut g] = unsafe { load(gradient.wrapping_add(at)) };
            if let Some(factor) = factor {
                g = G::round(g * factor).widen();
            }
            element(c, at < vectors, g, &mut p[at], &mut m[at], &mut v[at]);
            if pass.weight != 0 {
                // SAFETY: as for a block.
                unsafe { store(weight.wrapping_add(at), &[p[at]]) };
            }
        }
    }
}

/// # Safety
/// The elements lie there, outlive `'a`, and only the caller uses them.
#[inline(always)]
unsafe fn slice<'a>(address: usize, from: usize, to: usize) -> &'a mut [f32] {
    let start = (address as *mut f32).wrapping_add(from);
    // SAFETY: by this function's contract.
    unsafe { std::slice::from_raw_parts_mut(start, to - from) }
}

#[inline(always)]
fn block<S: Simd>(simd: S, c: Coefficients, g: &[f32], p: &mut [f32], m: &mut [f32], v: &mut [f32]) {
    let (g, _) = S::as_simd_f32s(g);
    let ((p, _), (m, _), (v, _)) = (S::as_mut_simd_f32s(p), S::as_mut_simd_f32s(m), S::as_mut_simd_f32s(v));
    let (shrink, lerp) = (simd.splat_f32s(c.shrink), simd.splat_f32s(c.lerp));
    let (beta2, rest2) = (simd.splat_f32s(c.beta2), simd.splat_f32s(c.rest2));
    let (eps, step) = (simd.splat_f32s(c.eps), simd.splat_f32s(c.step));
    for i in 0..BLOCK / S::F32_LANES {
        let mut gradient = g[i];
        let parameter = simd.mul_f32s(p[i], shrink);
        if let Some(penalty) = c.penalty {
            gradient = simd.mul_add_f32s(parameter, simd.splat_f32s(penalty), gradient);
        }
        let base = if c.from_gradient { gradient } else { m[i] };
        let first = simd.mul_add_f32s(simd.sub_f32s(gradient, m[i]), lerp, base);
        let squared = simd.mul_f32s(gradient, rest2);
        let second = simd.mul_add_f32s(gradient, squared, simd.mul_f32s(v[i], beta2));
        let denominator = simd.add_f32s(quotient(simd, simd.sqrt_f32s(second), c.root), eps);
        m[i] = first;
        v[i] = second;
        p[i] = simd.add_f32s(parameter, simd.div_f32s(simd.mul_f32s(step, first), denominator));
    }
}

/// `a / divisor`, rounded as a division rounds it, for a root `a` of an fp32 number that is not −0 and a divisor from 10⁻⁸ to 1.
///
/// The pass is bound by the processor's divider, which takes a root and two divisions; one of them is by a constant. With
/// r = 1/divisor rounded, a·r is within 2⁻²³ of the quotient, a correction by r·(a − q·divisor) brings that to 2⁻⁴⁷ before
/// it is rounded, so that q is one of the quotient's two neighbours, and another correction of such a q gives the
/// correctly rounded quotient (Markstein, IBM J. Res. Dev. 34, 1990). No intermediate overflows or underflows: roots lie
/// between 10⁻²³ and 10²⁰, or are 0; infinity divided is infinity.
#[inline(always)]
fn quotient<S: Simd>(simd: S, a: S::f32s, divisor: f32) -> S::f32s {
    let (r, minus) = (simd.splat_f32s(1.0 / divisor), simd.splat_f32s(-divisor));
    let rough = simd.mul_f32s(a, r);
    let close = simd.mul_add_f32s(simd.mul_add_f32s(rough, minus, a), r, rough);
    let exact = simd.mul_add_f32s(simd.mul_add_f32s(close, minus, a), r, close);
    let finite = simd.less_than_f32s(a, simd.splat_f32s(f32::INFINITY));
    simd.select_f32s(finite, exact, rough)
}

#[inline(always)]
fn element(c: Coefficients, vector: bool, g: f32, p: &mut f32, m: &mut f32, v: &mut f32) {
    let parameter = *p * c.shrink;
    let gradient = c.penalty.map_or(g, |penalty| parameter.mul_add(penalty, g));
    let base = if c.from_gradient { gradient } else { *m };
    *m = (gradient - *m).mul_add(c.lerp, base);
    let squared = gradient * c.rest2;
    *v =
        if vector { gradient.mul_add(squared, *v * c.beta2) } else { v.mul_add(c.beta2, squared * gradient) };
    *p = parameter + c.step * *m / (v.sqrt() / c.root + c.eps);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the first element of `from..to`, as bits, whose result differs from a division.
    struct Differs {
        from: u32,
        to: u32,
        divisor: f32,
    }

    impl WithSimd for Differs {
        type Output = Option<f32>;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Option<f32> {
            let mut values = [0.0f32; BLOCK];
            for first in (self.from..self.to).step_by(BLOCK) {
                for (value, bits) in values.iter_mut().zip(first..) {
                    *value = f32::from_bits(bits);
                }
                let mut ours = values;
                for x in S::as_mut_simd_f32s(&mut ours).0 {
                    *x = quotient(simd, *x, self.divisor);
                }
                for i in 0..BLOCK {
                    if ours[i].to_bits() != (values[i] / self.divisor).to_bits() {
                        return Some(values[i]);
                    }
                }
            }
            None
        }
    }

    #[test]
    fn the_quotient_equals_the_division() {
        // All significands: a power of two more or less changes nothing.
        let (one, two) = (1.0f32.to_bits(), 2.0f32.to_bits());
        let root = |beta: f64, step: f64| (1.0 - beta.powf(step)).sqrt() as f32;
        let worst = f32::from_bits(one - 1);
        let odd = f32::from_bits(0.5f32.to_bits() + 1);
        for divisor in [root(0.999, 1.0), root(0.999, 2.0), root(0.95, 7.0), worst, odd, 1.0, 1e-8] {
            assert_eq!(simd::arch().dispatch(Differs { from: one, to: two, divisor }), None, "of {divisor}");
        }
        // The least root and the largest.
        for end in [f32::from_bits(1).sqrt(), f32::MAX.sqrt()] {
            for divisor in [root(0.999, 1.0), 1e-8, 0.7] {
                let (from, to) = (end.to_bits() - 31, end.to_bits() + 1);
                assert_eq!(simd::arch().dispatch(Differs { from, to, divisor }), None, "of {divisor}");
            }
        }
    }
}
