//! A step of Lion in one pass over memory.
//!
//! With the parameter p, its gradient g, the momentum m, learning rate η and weight decay λ (Chen et al., arXiv:2302.06675):
//!
//! - c = β₁·m + (1 − β₁)·g
//! - p ← (1 − η·λ)·p − η·sign(c), where the sign of 0 is 0
//! - m ← β₂·m + (1 − β₂)·g
//!
//! All have one shape and dtype. An element depends on its own operands only, and each product and sum is rounded, so that on a CPU the bits
//! depend on neither threads nor the division of a tensor. Bytes moved per parameter in fp32: 20 (g, p, m in; p, m out). On other
//! devices, and in fp64, libtorch's operators compute it part by part.

use pulp::{Simd, WithSimd};
use runtime::ops::{TryScalar, call, foreach, single};
use runtime::parallel;
use runtime::profile::{Flops, kernel, record_external};
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use crate::operands::Operands;
use crate::processor::computes_on;
use crate::simd;

const NAME: &str = "lion";
/// Elements of one task: 256 KiB of each operand.
const TASK: usize = 64 * 1024;
/// Elements whose temporaries libtorch's operators allocate at a time.
const PART: i64 = 1 << 22;

/// The hyperparameters of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionStep {
    /// Learning rate: the change of each element, but for the decay.
    pub lr: f64,
    /// The share of the momentum in the update, in [0, 1).
    pub beta1: f64,
    /// Decay of the momentum, in [0, 1).
    pub beta2: f64,
    /// λ, the weight decay.
    pub weight_decay: f64,
}

/// Runs one step in place and without a graph; on the CPU in parallel on libtorch's threads. It increments the version counters of the
/// tensors that it writes.
///
/// ```
/// use kernels::lion::{LionStep, lion};
/// use tch::{Device, Kind, Tensor};
///
/// let parameter = Tensor::ones([3], (Kind::Float, Device::Cpu));
/// let momentum = parameter.zeros_like();
/// let gradient = Tensor::from_slice(&[0.1f32, -20.0, 0.0]);
/// let step = LionStep { lr: 0.25, beta1: 0.9, beta2: 0.99, weight_decay: 0.0 };
/// lion(&parameter, &gradient, &momentum, &step)?;
/// assert_eq!(parameter, Tensor::from_slice(&[0.75f32, 1.25, 1.0]));
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] for tensors of different shapes, dtypes or devices, that are not contiguous, or overlap; errors of libtorch.
pub fn lion(parameter: &Tensor, gradient: &Tensor, momentum: &Tensor, step: &LionStep) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let (kind, device, size) = (parameter.kind(), parameter.device(), parameter.size());
    if !matches!(kind, Kind::Float | Kind::Double) {
        return Err(Error::invalid(NAME, format!("`parameter` is {kind:?}; expected fp32 or fp64")));
    }
    let mut operands = Operands::new(NAME, device);
    let p = operands.write("parameter", parameter, kind, &size[..])?;
    let m = operands.write("momentum", momentum, kind, &size[..])?;
    let g = operands.read("gradient", gradient, kind, &size[..])?;
    operands.check()?;
    let _scope = kernel("runtime::lion", []);
    if !computes_on(device) || kind != Kind::Float {
        return by_operators(parameter, gradient, momentum, step);
    }
    let elements = parameter.numel();
    let pass = Pass { elements, p, g, m, coefficients: Coefficients::new(step) };
    let arch = simd::arch();
    parallel::for_each(elements.div_ceil(TASK), |task| {
        arch.dispatch(Task { pass, from: task * TASK, to: elements.min((task + 1) * TASK) });
    })?;
    [parameter, momentum].into_iter().try_for_each(bump_version)?;
    record_external("runtime::lion", Flops::default(), 20 * elements as u64)
}

/// Computes the step by libtorch's operators, on any device.
fn by_operators(parameter: &Tensor, gradient: &Tensor, momentum: &Tensor, step: &LionStep) -> Result<()> {
    let LionStep { lr, beta1, beta2, weight_decay } = *step;
    let [p, g, m] = [parameter, gradient, momentum].map(|tensor| tensor.f_view([-1]));
    let (p, g, m) = (p?, g?, m?);
    let elements = p.numel() as i64;
    for from in (0..elements).step_by(PART as usize) {
        let of = |tensor: &Tensor| tensor.f_narrow(0, from, PART.min(elements - from));
        let (p, g, m) = (of(&p)?, of(&g)?, of(&m)?);
        let c = call("aten::lerp", "Scalar", &[(&m).into(), (&g).into(), (1.0 - beta1).into()], &[])?;
        let sign = single(c)?.f_sign_()?;
        let _ = p.try_mul_scalar_(1.0 - lr * weight_decay)?;
        foreach::add_scaled_(&[&p], &[&sign], -lr)?;
        foreach::lerp_(&[&m], &[&g], 1.0 - beta2)?;
    }
    Ok(())
}

/// The factors of a step, computed in f64 and rounded once.
#[derive(Clone, Copy)]
struct Coefficients {
    shrink: f32,
    lr: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
}

impl Coefficients {
    fn new(step: &LionStep) -> Self {
        let LionStep { lr, beta1, beta2, weight_decay } = *step;
        Self {
            shrink: (1.0 - lr * weight_decay) as f32,
            lr: lr as f32,
            beta1: beta1 as f32,
            rest1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            rest2: (1.0 - beta2) as f32,
        }
    }
}

/// Addresses of fp32 elements on the CPU.
#[derive(Clone, Copy)]
struct Pass {
    elements: usize,
    p: usize,
    g: usize,
    m: usize,
    coefficients: Coefficients,
}

struct Task {
    pass: Pass,
    from: usize,
    to: usize,
}

impl WithSimd for Task {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { pass, from, to } = self;
        debug_assert!(to <= pass.elements);
        let (count, c) = (to - from, pass.coefficients);
        // SAFETY: `lion` has checked that this many dense fp32 elements lie at each address on the CPU, and that written operands overlap no
        // other; the tensors outlive the call, and each element is one task's.
        let (p, g, m) = unsafe {
            (
                std::slice::from_raw_parts_mut((pass.p as *mut f32).wrapping_add(from), count),
                std::slice::from_raw_parts((pass.g as *const f32).wrapping_add(from), count),
                std::slice::from_raw_parts_mut((pass.m as *mut f32).wrapping_add(from), count),
            )
        };
        for ((p, g), m) in p.iter_mut().zip(g).zip(m) {
            let update = c.beta1 * *m + c.rest1 * g;
            let sign = f32::from(i8::from(update > 0.0) - i8::from(update < 0.0));
            *p = *p * c.shrink - c.lr * sign;
            *m = c.beta2 * *m + c.rest2 * g;
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn tensors(elements: i64, kind: Kind) -> [Tensor; 3] {
        let x = Tensor::arange(elements, (Kind::Double, Device::Cpu));
        [(&x * 0.37).cos(), (&x * 0.71).sin(), (&x * 0.13).sin()].map(|tensor| tensor.to_kind(kind))
    }

    const STEP: LionStep = LionStep { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };

    #[test]
    fn operators_compute_the_same_step() {
        for elements in [1, 7, 1000, 200_001] {
            let [p, g, m] = tensors(elements, Kind::Float);
            let [q, _, n] = tensors(elements, Kind::Float);
            lion(&p, &g, &m, &STEP).unwrap();
            by_operators(&q, &g, &n, &STEP).unwrap();
            for (ours, theirs) in [(&p, &q), (&m, &n)] {
                let off = (ours - theirs).abs().max().double_value(&[]);
                assert!(off <= 2.4e-7, "{elements}: {off:e}");
            }
        }
    }

    /// Wherever a tensor is divided, and on any number of threads.
    #[test]
    fn parts_have_the_bits_of_the_whole() {
        let elements = 3 * TASK as i64 + 5;
        let [p, g, m] = tensors(elements, Kind::Float);
        lion(&p, &g, &m, &STEP).unwrap();
        let [q, _, n] = tensors(elements, Kind::Float);
        for (from, to) in [(0, 13), (13, TASK as i64 + 1), (TASK as i64 + 1, elements)] {
            let [q, g, n] = [&q, &g, &n].map(|tensor| tensor.narrow(0, from, to - from));
            lion(&q, &g, &n, &STEP).unwrap();
        }
        assert_eq!((p, m), (q, n));
    }

    #[test]
    fn operands_are_checked() {
        let [p, g, m] = tensors(4, Kind::Float);
        let refusals = [
            lion(&p, &g.narrow(0, 0, 3), &m, &STEP),
            lion(&p, &g, &p, &STEP),
            lion(&p, &g.to_kind(Kind::BFloat16), &m, &STEP),
            lion(&p.to_kind(Kind::Half), &g, &m, &STEP),
        ];
        for refusal in refusals {
            let error = refusal.unwrap_err().to_string();
            assert!(error.starts_with("lion: "), "{error}");
        }
    }
}
