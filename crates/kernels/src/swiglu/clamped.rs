//! gpt-oss's SwiGLU and its derivatives, each in one pass.
//!
//! With a slope α and a limit c, g′ = min(g, c), u′ = clamp(u, −c, c) and σ = 1/(1 + e^(−α·g′)):
//!
//! - h = (u′ + 1)·g′·σ
//! - ∂L/∂g = d·(u′ + 1)·σ·(1 + α·g′·(1 − σ)) where g ≤ c, else 0
//! - ∂L/∂u = d·g′·σ where |u| ≤ c, else 0
//!
//! The passes read and write as those of [`forward`](super::forward) and [`backward`](super::backward), in the same precision.

use runtime::ops::TryScalar;
use runtime::profile::kernel;
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use super::cpu::{self, Pass, at};
use super::tensors::{Backward, BackwardRows, Forward, ForwardRows};
use super::{Gradients, NAME, not_recorded, record};
use crate::operands::Rows;
use crate::processor::computes_on;
use crate::simd::{Element, Real, load, store};

/// The numbers of the activation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clamp {
    /// α.
    pub alpha: f64,
    /// c.
    pub limit: f64,
}

/// Writes `product = (clamp(up, −c, c) + 1)·g′·σ(α·g′)` with g′ = min(gate, c).
///
/// All are `[tokens, features]`, of one dtype and device, with dense rows. `product` may be `gate` or `up` itself; any other overlap is
/// refused.
///
/// ```
/// use kernels::swiglu::{Clamp, clamped_forward};
/// use tch::{Tensor, kind};
///
/// let (gate, up) = (Tensor::zeros([1, 2], kind::FLOAT_CPU) + 9.0, Tensor::zeros([1, 2], kind::FLOAT_CPU) - 9.0);
/// let mut product = Tensor::empty([1, 2], kind::FLOAT_CPU);
/// clamped_forward(Clamp { alpha: 1.702, limit: 7.0 }, &gate, &up, &mut product)?;
/// // (−7 + 1)·7·σ(11.9)
/// assert!((product.double_value(&[0, 0]) + 42.0).abs() < 1e-3);
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// Shapes, dtypes, devices or memory that do not fit; numbers that are not positive.
pub fn clamped_forward(clamp: Clamp, gate: &Tensor, up: &Tensor, product: &mut Tensor) -> Result<()> {
    not_recorded(&[gate, up])?;
    clamp.check()?;
    let tensors = Forward { gate, up, silu: None, product };
    if !(computes_on(gate.device()) && cpu::takes(gate.kind())) {
        let (result, ..) = clamp.by_operators(gate, up)?;
        product.f_copy_(&result)?;
        return Ok(());
    }
    let _scope = kernel("runtime::clamped_swiglu", [gate, up]);
    let rows = tensors.rows()?;
    // SAFETY: `rows` has checked that all are matrices of one shape and dtype, and that the output is an input itself or overlaps no other
    // matrix; the CPU's tensors alone come here.
    unsafe { cpu::run(tensors.product.kind(), ClampedForward { clamp, rows }) }?;
    bump_version(tensors.product)?;
    record("runtime::clamped_swiglu", tensors.product, 3)
}

/// Computes the gradients of `gate` and `up`, given the gradient `grad` of the product, and the product again. All three are overwritten by the
/// results where the device has a kernel.
///
/// All are `[tokens, features]`, of one dtype and device, with dense rows, without overlap.
///
/// # Errors
/// As [`clamped_forward`].
pub fn clamped_backward(clamp: Clamp, gate: Tensor, up: Tensor, grad: Tensor) -> Result<Gradients> {
    not_recorded(&[&gate, &up, &grad])?;
    clamp.check()?;
    if !(computes_on(gate.device()) && cpu::takes(gate.kind())) {
        let (product, of_gate, of_up) = clamp.by_operators(&gate, &up)?;
        let kind = grad.kind();
        let times = |slope: Tensor| -> Result<Tensor> { Ok(slope.f_mul(&grad)?.f_to_kind(kind)?) };
        return Ok(Gradients { gate: times(of_gate)?, up: times(of_up)?, product: product.f_to_kind(kind)? });
    }
    let outputs = [Some(&gate), Some(&up), Some(&grad)];
    let [gate_grad, up_grad, product] = outputs;
    let tensors = Backward { gate: &gate, up: &up, silu: None, grad: &grad, gate_grad, up_grad, product };
    {
        let _scope = kernel("runtime::clamped_swiglu_backward", [&gate, &up, &grad]);
        let rows = tensors.rows()?;
        // SAFETY: as in `clamped_forward`.
        unsafe { cpu::run(grad.kind(), ClampedBackward { clamp, rows }) }?;
        tensors.outputs().try_for_each(bump_version)?;
    }
    record("runtime::clamped_swiglu_backward", &grad, tensors.tensors().count())?;
    Ok(Gradients { gate, up, product: grad })
}

impl Clamp {
    fn check(self) -> Result<()> {
        let is_positive = |number: f64| number.is_finite() && number > 0.0;
        if is_positive(self.alpha) && is_positive(self.limit) {
            return Ok(());
        }
        let Self { alpha, limit } = self;
        let reason = format!("alpha is {alpha} and the limit {limit}; expected finite numbers above 0");
        Err(Error::invalid(NAME, reason))
    }

    /// Returns h, ∂h/∂g and ∂h/∂u by libtorch's operators, in fp32 or f64.
    fn by_operators(self, gate: &Tensor, up: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let Self { alpha, limit } = self;
        let wide = if gate.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let (gate, up) = (gate.f_to_kind(wide)?, up.f_to_kind(wide)?);
        let g = gate.try_clamp_max(limit)?;
        let u = up.try_clamp(-limit, limit)?.try_add_scalar(1.0)?;
        let sigmoid = g.try_mul_scalar(alpha)?.f_sigmoid()?;
        let silu = g.f_mul(&sigmoid)?;
        // σ·(1 + α·g′·(1 − σ)) = σ + α·s·(1 − σ)
        let rest = sigmoid.f_neg()?.try_add_scalar(1.0)?;
        let slope = sigmoid.f_add(&silu.f_mul(&rest)?.try_mul_scalar(alpha)?)?;
        let of_gate = slope.f_mul(&u)?.f_mul(&gate.try_le(limit)?)?;
        let of_up = silu.f_mul(&up.f_abs()?.try_le(limit)?)?;
        Ok((silu.f_mul(&u)?, of_gate, of_up))
    }

    /// Returns g′, u′ + 1, σ and 1 − σ.
    #[inline(always)]
    fn parts<R: Real>(self, gate: R, up: R) -> [R; 4] {
        let (alpha, limit) = (R::from_f64(self.alpha), R::from_f64(self.limit));
        // Comparisons with NaN are false, so it goes through.
        let g = if gate > limit { limit } else { gate };
        let u = if up > limit { limit } else { up };
        let u = if u < -limit { -limit } else { u };
        let (sigmoid, rest) = (alpha * g).sigmoid();
        [g, u + R::ONE, sigmoid, rest]
    }
}

#[derive(Clone, Copy)]
struct ClampedForward {
    clamp: Clamp,
    rows: ForwardRows,
}

impl Pass for ClampedForward {
    fn matrices(&self) -> impl Iterator<Item = Rows> {
        [self.rows.gate, self.rows.up, self.rows.product].into_iter()
    }

    /// # Safety
    /// As [`Pass::block`].
    #[inline(always)]
    unsafe fn block<T: Element, const N: usize>(&self, row: usize, column: usize) {
        let ForwardRows { gate, up, product, .. } = self.rows;
        // SAFETY: by this function's contract.
        unsafe {
            let mut g = load::<T, N>(at(gate, row, column));
            let u = load::<T, N>(at(up, row, column));
            for i in 0..N {
                let [clamped, factor, sigmoid, _] = self.clamp.parts(g[i], u[i]);
                g[i] = factor * (clamped * sigmoid);
            }
            store::<T, N>(at(product, row, column), &g);
        }
    }
}

#[derive(Clone, Copy)]
struct ClampedBackward {
    clamp: Clamp,
    rows: BackwardRows,
}

impl Pass for ClampedBackward {
    fn matrices(&self) -> impl Iterator<Item = Rows> {
        let BackwardRows { gate, up, grad, gate_grad, up_grad, product, .. } = self.rows;
        [gate, up, grad].into_iter().chain([gate_grad, up_grad, product].into_iter().flatten())
    }

    /// # Safety
    /// As [`Pass::block`].
    #[inline(always)]
    unsafe fn block<T: Element, const N: usize>(&self, row: usize, column: usize) {
        let BackwardRows { gate, up, grad, gate_grad, up_grad, product, .. } = self.rows;
        let (alpha, limit) = (T::Compute::from_f64(self.clamp.alpha), T::Compute::from_f64(self.clamp.limit));
        let (zero, one) = (T::Compute::ZERO, T::Compute::ONE);
        // SAFETY: by this function's contract.
        unsafe {
            let mut g = load::<T, N>(at(gate, row, column));
            let mut u = load::<T, N>(at(up, row, column));
            let mut d = load::<T, N>(at(grad, row, column));
            for i in 0..N {
                let [clamped, factor, sigmoid, rest] = self.clamp.parts(g[i], u[i]);
                let silu = clamped * sigmoid;
                let slope = sigmoid * (one + alpha * clamped * rest);
                g[i] = if g[i] > limit { zero } else { d[i] * factor * slope };
                let of_up = d[i] * silu;
                d[i] = factor * silu;
                u[i] = if u[i] > limit || u[i] < -limit { zero } else { of_up };
            }
            for (to, values) in [(gate_grad, &g), (up_grad, &u), (product, &d)] {
                if let Some(to) = to {
                    store::<T, N>(at(to, row, column), values);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, kind};

    use super::*;

    const CLAMP: Clamp = Clamp { alpha: 1.702, limit: 2.5 };

    /// Against libtorch's own operators and their derivatives, in f64.
    #[test]
    fn both_passes_are_those_of_libtorchs_operators() {
        tch::manual_seed(3);
        for (kind, tolerance) in
            [(Kind::Double, 1e-14), (Kind::Float, 2e-6), (Kind::BFloat16, 1e-2), (Kind::Half, 2e-3)]
        {
            for (tokens, features) in [(1, 1), (3, 65), (40, 4096), (0, 8)] {
                let random = || (Tensor::randn([tokens, features], kind::FLOAT_CPU) * 3.0).to_kind(kind);
                let (gate, up, grad) = (random(), random(), random());
                let leaf = |x: &Tensor| x.to_kind(Kind::Double).copy().set_requires_grad(true);
                let (g, u) = (leaf(&gate), leaf(&up));
                let clamped = g.clamp_max(CLAMP.limit);
                let factor = u.clamp(-CLAMP.limit, CLAMP.limit) + 1.0;
                let expected = factor * &clamped * (&clamped * CLAMP.alpha).sigmoid();
                (&expected * grad.to_kind(Kind::Double)).sum(Kind::Double).backward();

                let mut product = Tensor::empty([tokens, features], (kind, Device::Cpu));
                clamped_forward(CLAMP, &gate, &up, &mut product).unwrap();
                let (_, of_gate, of_up) = CLAMP.by_operators(&gate, &up).unwrap();
                let found = clamped_backward(CLAMP, gate.copy(), up.copy(), grad.copy()).unwrap();
                for (name, found, expected) in [
                    ("product", &product, &expected),
                    ("product again", &found.product, &expected),
                    ("gate", &found.gate, &g.grad()),
                    ("up", &found.up, &u.grad()),
                    ("gate by operators", &(of_gate * &grad), &g.grad()),
                    ("up by operators", &(of_up * &grad), &u.grad()),
                ] {
                    let error = (found.to_kind(Kind::Double) - expected).abs() / (expected.abs() + 1.0);
                    let worst = if error.numel() == 0 { 0.0 } else { error.max().double_value(&[]) };
                    assert!(worst <= tolerance, "{name} {kind:?} {tokens}×{features}: {worst}");
                }
            }
        }
    }

    /// As libtorch's `clamp`: a value on the bound passes its gradient, one beyond does not.
    #[test]
    fn a_value_on_the_bound_has_a_gradient_and_one_beyond_has_none() {
        let gate = Tensor::from_slice(&[2.5f32, 2.6, f32::NAN]).view([1, 3]);
        let up = Tensor::from_slice(&[-2.5f32, -2.6, 0.0]).view([1, 3]);
        let ones = Tensor::ones([1, 3], kind::FLOAT_CPU);
        let found = clamped_backward(CLAMP, gate, up, ones).unwrap();
        let [of_gate, of_up] = [found.gate, found.up].map(|x| Vec::<f32>::try_from(x.view([-1])).unwrap());
        assert!(of_gate[0] != 0.0 && of_gate[1] == 0.0 && of_gate[2].is_nan(), "{of_gate:?}");
        assert!(of_up[0] != 0.0 && of_up[1] == 0.0, "{of_up:?}");
    }

    #[test]
    fn numbers_that_are_not_positive_are_refused_by_name() {
        let x = Tensor::ones([1, 3], kind::FLOAT_CPU);
        let clamp = Clamp { limit: 0.0, ..CLAMP };
        let words = clamped_forward(clamp, &x, &x, &mut x.copy()).unwrap_err().to_string();
        assert_eq!(words, "fused swiglu: alpha is 1.702 and the limit 0; expected finite numbers above 0");
    }
}
