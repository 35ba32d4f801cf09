//! h = SiLU(g) ⊙ u and its derivatives, each in one pass.
//!
//! With σ = 1/(1 + e⁻ᵍ), s = g·σ and an upstream gradient d of h:
//!
//! - ∂L/∂g = d·u·σ·(1 + g·(1 − σ))
//! - ∂L/∂u = d·s
//!
//! g, u, h: `[tokens, features]`. One pass reads g and u and writes h (12 bytes per element in fp32; SiLU and the
//! product as two operators move 20). The backward pass reads g, u, d, and overwrites them with ∂L/∂g, ∂L/∂u and h,
//! which the gradient of the down-projection needs: 24 bytes per element and no temporary; a chain of operators moves
//! 56. Computed in fp32 for fp32, bf16 and fp16 (rounded once), in f64 for f64.
//!
//! [`forward`] and [`backward`] are the passes for a hand-written function that owns g and u. [`silu_mul`] is a node of the graph
//! that saves only g and u: with the input and the product, which the projections around it save, an MLP of ordinary parts keeps H
//! + 3F elements per token; SiLU and a product as two operators keep H + 4F.

mod clamped;
mod cpu;
pub(crate) mod cuda;
mod function;
mod reference;
mod tensors;

use crate::processor::computes_on;
use runtime::autograd::{self, GradMode};
use runtime::profile::{Flops, is_counting, record_external};
use runtime::{Error, Result};
use tch::Tensor;

pub use clamped::{Clamp, clamped_backward, clamped_forward};
use tensors::Forward;

const NAME: &str = "fused swiglu";

/// Computes SiLU(gate)·up as a node of the graph, which saves `gate` and `up`. Tensors of one shape, of any floating-point dtype;
/// one pass forward and one backward, in which one gradient overwrites the upstream one if nothing else uses it.
///
/// Unlike [`backward`] it overwrites neither gate nor up, which other code may use. Two dtypes are promoted as in libtorch. Without
/// a kernel for the device it is a chain of libtorch's operators in fp32 or f64.
///
/// ```
/// use kernels::swiglu::silu_mul;
/// use tch::{Kind, Tensor, kind};
///
/// let gate = Tensor::zeros([2, 3], kind::FLOAT_CPU).set_requires_grad(true);
/// let up = Tensor::ones([2, 3], kind::FLOAT_CPU) * 4.0;
/// let product = silu_mul(&gate, &up)?;
/// assert_eq!(product.double_value(&[1, 2]), 0.0);
/// runtime::autograd::backward(&[&product.sum(Kind::Float)])?;
/// // SiLU has slope ½ at 0.
/// assert_eq!(gate.grad().double_value(&[1, 2]), 2.0);
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// A tensor that is undefined, sparse or not floating-point; two shapes or devices. In backward, a second derivative.
pub fn silu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let (kind, device) = function::check(gate, up)?;
    if !computes_on(device) && !cuda::are_ready_for(kind, device) {
        return reference::recorded_product(gate, up, kind);
    }
    let of_kind = |x: &Tensor| if x.kind() == kind { Ok(None) } else { x.f_to_kind(kind).map(Some) };
    let (wide_gate, wide_up) = (of_kind(gate)?, of_kind(up)?);
    let inputs = [wide_gate.as_ref().unwrap_or(gate), wide_up.as_ref().unwrap_or(up)];
    let [product] = autograd::apply(function::Product::default(), &inputs)?;
    Ok(product)
}

/// Writes `product = SiLU(gate)·up`, and `silu = SiLU(gate)` if given.
///
/// All are `[tokens, features]`, of one dtype and device, with dense rows. `product` may be `gate` or `up` itself; any
/// other overlap is refused.
///
/// # Errors
/// Shapes, dtypes, devices or memory that do not fit.
pub fn forward(gate: &Tensor, up: &Tensor, silu: Option<&Tensor>, product: &mut Tensor) -> Result<()> {
    not_recorded(&[gate, up])?;
    pass_for(gate).forward(&Forward { gate, up, silu, product })
}

/// The results of [`backward`].
#[derive(Debug)]
pub struct Gradients {
    /// ∂L/∂gate.
    pub gate: Tensor,
    /// ∂L/∂up.
    pub up: Tensor,
    /// SiLU(gate)·up, recomputed.
    pub product: Tensor,
}

/// Computes the gradients of `gate` and `up`, given the gradient `grad` of the product. All three are overwritten by the results
/// (on the CPU without temporaries, on other devices with one for SiLU).
///
/// All are `[tokens, features]`, of one dtype and device, with dense rows, without overlap. `silu` is SiLU(gate) if it
/// was saved.
///
/// # Errors
/// Shapes, dtypes, devices or memory that do not fit.
pub fn backward(gate: Tensor, up: Tensor, silu: Option<&Tensor>, grad: Tensor) -> Result<Gradients> {
    not_recorded(&[&gate, &up, &grad])?;
    pass_for(&gate).backward(gate, up, silu, grad)
}

/// The passes on one kind of device.
trait SwigluPass {
    /// See [`forward`].
    fn forward(&self, tensors: &Forward<'_>) -> Result<()>;

    /// See [`backward`].
    fn backward(&self, gate: Tensor, up: Tensor, silu: Option<&Tensor>, grad: Tensor) -> Result<Gradients>;
}

/// Returns the fastest passes for tensors like `gate`.
fn pass_for(gate: &Tensor) -> &'static dyn SwigluPass {
    if computes_on(gate.device()) && cpu::takes(gate.kind()) {
        &cpu::Cpu
    } else if cuda::take(gate) {
        &cuda::Cuda
    } else {
        &reference::Reference
    }
}

/// Reports a pass that read and wrote `passes` matrices of this size to running counters. Elementwise work counts no FLOPs.
fn record(name: &str, matrix: &Tensor, passes: usize) -> Result<()> {
    if !is_counting() {
        return Ok(());
    }
    let bytes = matrix.numel() * matrix.kind().elt_size_in_bytes() * passes;
    record_external(name, Flops::default(), bytes as u64)
}

fn not_recorded(tensors: &[&Tensor]) -> Result<()> {
    if tensors.iter().any(|tensor| tensor.requires_grad()) && GradMode::enabled() {
        let reason = "a tensor requires a gradient, which is not recorded here; use libtorch's operators";
        return Err(Error::invalid(NAME, reason));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, kind};

    use super::*;

    /// Against f64, from tails to sizes for several threads; contiguous and as halves of one storage.
    #[test]
    fn both_passes_match_f64_to_the_last_places_of_their_dtype() {
        tch::manual_seed(7);
        for (kind, tolerance) in
            [(Kind::Float, 4e-7), (Kind::Double, 1e-15), (Kind::BFloat16, 8e-3), (Kind::Half, 5e-3)]
        {
            for (tokens, features) in [(1, 1), (3, 65), (7, 300), (40, 4096), (0, 8), (5, 0)] {
                for halves in [false, true] {
                    let both = (Tensor::randn([tokens, 2 * features], kind::FLOAT_CPU) * 6.0).to_kind(kind);
                    let part = |index| {
                        let part = both.narrow(1, index * features, features);
                        if halves { part } else { part.contiguous().copy() }
                    };
                    let (gate, up) = (part(0), part(1));
                    let grad = Tensor::randn([tokens, features], kind::FLOAT_CPU).to_kind(kind);
                    let wide = |t: &Tensor| t.to_kind(Kind::Double);
                    let (g, u, d) = (wide(&gate), wide(&up), wide(&grad));
                    let sigmoid = g.sigmoid();
                    let silu = &g * &sigmoid;
                    let expected =
                        [&silu * &u, &d * &u * &sigmoid * (&g * (1.0 - &sigmoid) + 1.0), &d * &silu];
                    let close = |name: &str, found: &Tensor, expected: &Tensor| {
                        // 1 + g·(1 − σ) cancels near g = −1.28, so the error is measured against the terms, not their sum.
                        let allowed = ((&d * &u).abs() + expected.abs() + 1.0) * tolerance;
                        let worst = ((wide(found) - expected).abs() / allowed).flatten(0, -1);
                        let worst = if worst.numel() == 0 { 0.0 } else { worst.max().double_value(&[]) };
                        assert!(
                            worst <= 1.0,
                            "{name} {kind:?} {tokens}×{features} halves {halves}: {worst} of the tolerance"
                        );
                    };

                    let empty = || Tensor::empty([tokens, features], (kind, Device::Cpu));
                    let (mut product, kept) = (empty(), empty());
                    forward(&gate, &up, Some(&kept), &mut product).unwrap();
                    close("product", &product, &expected[0]);
                    close("silu", &kept, &silu);
                    for silu in [None, Some(&kept)] {
                        let (g, u, d) = if halves {
                            let both = both.copy();
                            (both.narrow(1, 0, features), both.narrow(1, features, features), grad.copy())
                        } else {
                            (gate.copy(), up.copy(), grad.copy())
                        };
                        let found = backward(g, u, silu, d).unwrap();
                        close("gate gradient", &found.gate, &expected[1]);
                        close("up gradient", &found.up, &expected[2]);
                        close("product again", &found.product, &expected[0]);
                    }
                    if !halves {
                        forward(&gate, &up, None, &mut up.shallow_clone()).unwrap();
                        close("product in place", &up, &expected[0]);
                    }
                }
            }
        }
    }

    #[test]
    fn extremes_stay_finite_and_nan_stays_nan() {
        let gate = Tensor::from_slice(&[-1e30f32, -100.0, -0.0, 0.0, 100.0, 1e30, f32::NAN]).view([1, 7]);
        let up = Tensor::ones([1, 7], kind::FLOAT_CPU);
        let mut product = Tensor::empty([1, 7], kind::FLOAT_CPU);
        forward(&gate, &up, None, &mut product).unwrap();
        let found = Vec::<f32>::try_from(product.view([-1])).unwrap();
        assert!(found[..6].iter().all(|x| x.is_finite()) && found[6].is_nan(), "{found:?}");
        assert_eq!(found[..6], [0.0, 0.0, 0.0, 0.0, 100.0, 1e30]);
        let ones = || Tensor::ones([1, 7], kind::FLOAT_CPU);
        let slope = backward(gate.copy(), ones(), None, ones()).unwrap().gate;
        let slope = Vec::<f32>::try_from(slope.view([-1])).unwrap();
        assert_eq!((slope[3], slope[4], slope[5]), (0.5, 1.0, 1.0));
        assert!(slope[0].abs() < 1e-6 && slope[6].is_nan(), "{slope:?}");
    }

    #[test]
    fn overlap_and_mismatch_are_refused_by_name() {
        let t = |rows, columns| Tensor::zeros([rows, columns], kind::FLOAT_CPU);
        let whole = t(4, 12);
        let window = |start| whole.narrow(1, start, 6);
        let cases: [(&Tensor, &Tensor, Tensor, &str); 4] = [
            (&window(0), &window(6), window(3), "`product` overlaps `gate` in memory"),
            (
                &t(4, 6),
                &t(4, 5),
                t(4, 6),
                "`up` is Float [4, 5] on Cpu; expected Float [4, 6] with dense rows on Cpu",
            ),
            (
                &t(4, 6),
                &t(4, 6).to_kind(Kind::Double),
                t(4, 6),
                "`up` is Double [4, 6] on Cpu; expected Float [4, 6] with dense rows on Cpu",
            ),
            (&t(4, 6), &t(6, 4).tr(), t(4, 6), "with strides [1, 4]; expected Float [4, 6] with dense rows"),
        ];
        for (gate, up, mut product, message) in cases {
            let error = forward(gate, up, None, &mut product).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
