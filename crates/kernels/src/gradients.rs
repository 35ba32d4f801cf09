//! Multiplies all gradients of a step by one factor, and finds in the same pass whether one of them is infinite or NaN, and their
//! 2-norm.
//!
//! g ← f·g, c = 1 if some f·g is not finite, and N² = Σ (f·g)². A gradient scaler's unscaling, its overflow check and the norm for
//! clipping then take one read and one write of each gradient; three operators take three reads and two writes. On the CPU the pass
//! is written in Rust and vectorized, and without the norm it is libtorch's `_amp_foreach_non_finite_check_and_unscale_`, which
//! does less work. On CUDA it is a kernel over many gradients, without synchronisation; where that cannot run, it is libtorch's
//! operator and, for the norm, `_foreach_norm`.
//!
//! Both passes add squares in fp32 only while they neither overflow nor vanish there, else in double, and add up in double: the norm of
//! gradients of 10³⁰ or 10⁻³⁰ is right, and it is infinite or NaN only if a gradient is. libtorch's operators square in fp32, so from
//! 2·10¹⁹ on their norm is infinite. The order of a sum depends on the gradients' sizes alone.

mod cpu;
pub(crate) mod cuda;
mod reference;
pub(crate) mod scale;

use std::borrow::Borrow;

use crate::processor::computes_on;
use runtime::Result;
use runtime::profile::kernel;
use tch::{Device, Kind, Tensor};

const NAME: &str = "fused unscale";

/// Computes `x *= factor`, where `factor` is a scalar on x's device, such as the upstream gradient of a loss. If it is 1, the pass
/// over x is skipped, on CUDA without waiting for the device.
///
/// # Errors
/// Errors of libtorch.
pub fn scale_(x: &mut Tensor, factor: &Tensor) -> Result<()> {
    // A trace shows reading the factor as part of this kernel: on a CPU nothing waits for it.
    let _scope = kernel("runtime::scale", [x, factor]);
    let is_done = match computes_on(x.device()) {
        true => factor.f_double_value(&[])? == 1.0,
        false => scale::scale(x, factor)?,
    };
    if !is_done {
        let _ = x.f_mul_(factor)?;
    }
    Ok(())
}

/// The results of [`unscale_`], on the gradients' device and not synchronised.
#[derive(Debug)]
pub struct Unscaled {
    /// Float, `[1]`: 1 if a gradient is infinite or NaN, else 0.
    pub found_inf: Tensor,
    /// Double (float where libtorch's operators compute it), no dimension: the 2-norm of all gradients as one vector, after the factor.
    /// Infinite or NaN if one of them is.
    pub norm: Option<Tensor>,
}

/// Multiplies every gradient by `factor` in place. All on one device; on the CPU fp32, fp64 or bf16, each filling its memory
/// without gaps or overlap (in any order of dimensions); on CUDA bf16 and the dtypes that libtorch accepts. Without gradients, all are finite
/// and the norm is 0.
///
/// `factor` is a float tensor of one element on the gradients' device; the host does not read it.
///
/// # Errors
/// [`Error::Invalid`](runtime::Error::Invalid) for a gradient of another device, dtype or layout; errors of libtorch.
pub fn unscale_(grads: &[impl Borrow<Tensor>], factor: &Tensor, norm: bool) -> Result<Unscaled> {
    let grads: Vec<&Tensor> = grads.iter().map(Borrow::borrow).collect();
    let device = grads.first().map_or(Device::Cpu, |grad| grad.device());
    pass_for(device).unscale(&grads, factor, norm)
}

/// The pass on one kind of device.
trait GradientPass {
    /// See [`unscale_`].
    fn unscale(&self, grads: &[&Tensor], factor: &Tensor, norm: bool) -> Result<Unscaled>;
}

/// Returns the fastest pass for gradients on `device`.
fn pass_for(device: Device) -> &'static dyn GradientPass {
    if computes_on(device) { &cpu::Cpu } else { &cuda::Cuda }
}

/// Returns the 2-norm of all gradients as one vector, double and without a dimension, from one read of them; `None` if the kernel cannot
/// run: on other devices than CUDA, without NVRTC, for other dtypes than fp32, bf16 and fp16, and for gradients with gaps in memory.
///
/// # Errors
/// Errors of libtorch and the driver.
pub fn norm_many(grads: &[impl Borrow<Tensor>]) -> Result<Option<Tensor>> {
    Ok(on_cuda(grads, None)?.map(|survey| survey.norm))
}

/// Returns whether a tensor has an element that is infinite or NaN: float `[1]` on the first one's device, 1 if so, else 0. Each is read
/// once and none is written; nothing waits for a device. Integers are finite. Unlike a norm, it does not depend on sums.
///
/// # Errors
/// Errors of libtorch and the driver.
pub fn found_non_finite(tensors: &[impl Borrow<Tensor>]) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    if let Some(survey) = on_cuda(tensors, None)? {
        return Ok(survey.found_inf);
    }
    let _scope = kernel("runtime::found_non_finite", []);
    let device = tensors.first().map_or(Device::Cpu, |tensor| tensor.borrow().device());
    let (mut on_host, mut flags) = (false, Vec::new());
    for tensor in tensors.iter().map(Borrow::borrow).filter(|tensor| tensor.is_floating_point()) {
        match cpu::has_non_finite(tensor)? {
            Some(has) => on_host |= has,
            None => {
                let has = tensor.f_isfinite()?.f_all()?.f_logical_not()?;
                flags.push(has.f_to_kind(Kind::Float)?.f_reshape([1])?.f_to_device(device)?);
            }
        }
    }
    flags.push(Tensor::f_from_slice(&[f32::from(u8::from(on_host))])?.f_to_device(device)?);
    Ok(Tensor::f_stack(&flags, 0)?.f_amax([0], false)?)
}

/// Multiplies all gradients by `factor`, an fp32 scalar on their device, in place. If the factor is 1, which the host does not read, no
/// gradient is read or written. Returns false, with nothing changed, where [`norm_many`] returns `None`.
///
/// # Errors
/// Errors of libtorch and the driver.
pub fn scale_many_(grads: &[impl Borrow<Tensor>], factor: &Tensor) -> Result<bool> {
    let grads: Vec<&Tensor> = grads.iter().map(Borrow::borrow).collect();
    if !is_on_cuda(&grads) {
        return Ok(false);
    }
    let _scope = kernel("runtime::scale", []);
    cuda::scale_many(&grads, factor)
}

fn is_on_cuda(grads: &[&Tensor]) -> bool {
    grads.first().is_some_and(|grad| grad.device().is_cuda())
}

fn on_cuda(grads: &[impl Borrow<Tensor>], factor: Option<&Tensor>) -> Result<Option<cuda::Survey>> {
    let grads: Vec<&Tensor> = grads.iter().map(Borrow::borrow).collect();
    if !is_on_cuda(&grads) {
        return Ok(None);
    }
    let _scope = kernel(if factor.is_some() { "runtime::unscale" } else { "runtime::norm" }, []);
    cuda::survey(&grads, factor)
}

#[cfg(test)]
mod tests {
    use tch::kind;

    use super::*;

    fn factor(value: f32) -> Tensor {
        Tensor::from_slice(&[value])
    }

    #[test]
    fn one_pass_matches_three_operators() {
        tch::manual_seed(3);
        let sizes: [&[i64]; 6] = [&[1], &[63], &[129, 65], &[3, 5, 7], &[512, 700], &[0, 4]];
        for (kind, tolerance) in [(Kind::Float, 1e-6), (Kind::Double, 1e-13), (Kind::BFloat16, 5e-3)] {
            let grads: Vec<Tensor> =
                sizes.iter().map(|&size| Tensor::randn(size, kind::FLOAT_CPU).to_kind(kind)).collect();
            let wide = |t: &Tensor| t.to_kind(Kind::Double) * f64::from(0.37f32);
            let expected: Vec<Tensor> = grads.iter().map(wide).collect();
            let squares: f64 = expected.iter().map(|e| e.square().sum(Kind::Double).double_value(&[])).sum();
            let twins: Vec<Tensor> = grads.iter().map(Tensor::copy).collect();
            let unscaled = unscale_(&twins, &factor(0.37), false).unwrap();
            assert_eq!((unscaled.found_inf.double_value(&[0]), unscaled.norm.is_none()), (0.0, true));
            let unscaled = unscale_(&grads, &factor(0.37), true).unwrap();
            assert_eq!(unscaled.found_inf.double_value(&[0]), 0.0);
            assert_eq!(twins, grads, "{kind:?}: with the norm and without");
            let norm = unscaled.norm.unwrap().double_value(&[]);
            assert!((norm / squares.sqrt() - 1.0).abs() < tolerance, "{kind:?}: {norm} {}", squares.sqrt());
            for (grad, expected) in grads.iter().zip(&expected) {
                assert_eq!(grad, &expected.to_kind(kind), "{kind:?}");
            }
        }
    }

    #[test]
    fn an_infinity_or_nan_is_found_at_every_index() {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            for bad in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
                for (size, place) in [(1, 0), (64, 63), (65, 64), (100_000, 0), (100_000, 99_999)] {
                    let grads =
                        [Tensor::zeros([7], (kind, Device::Cpu)), Tensor::zeros([size], (kind, Device::Cpu))];
                    let _ = grads[1].get(place).fill_(bad);
                    for norm in [false, true] {
                        let unscaled = unscale_(&grads, &factor(0.5), norm).unwrap();
                        assert_eq!(
                            unscaled.found_inf.double_value(&[0]),
                            1.0,
                            "{kind:?} {bad} {size} {place}"
                        );
                        assert!(unscaled.norm.is_none_or(|norm| !norm.double_value(&[]).is_finite()));
                    }
                }
            }
        }
        // Their squares overflow fp32, but they do not.
        let grads = [Tensor::full([100], 1e30, kind::FLOAT_CPU)];
        let unscaled = unscale_(&grads, &factor(1.0), true).unwrap();
        assert_eq!(unscaled.found_inf.double_value(&[0]), 0.0);
        let norm = unscaled.norm.unwrap().double_value(&[]);
        assert!((norm / 1e31 - 1.0).abs() < 1e-6, "{norm}");
        // The factor itself may make a gradient overflow.
        let unscaled = unscale_(&grads, &factor(1e20), false).unwrap();
        assert_eq!(unscaled.found_inf.double_value(&[0]), 1.0);
    }

    #[test]
    fn a_number_that_is_not_finite_is_found_in_any_layout() {
        let has_non_finite =
            |tensors: &[Tensor]| found_non_finite(tensors).unwrap().double_value(&[0]) != 0.0;
        assert!(!has_non_finite(&[]));
        assert!(!has_non_finite(&[Tensor::from_slice(&[i64::MAX]), Tensor::zeros([0, 3], kind::FLOAT_CPU)]));
        for (kind, largest) in [
            (Kind::Float, f64::from(f32::MAX)),
            (Kind::Double, f64::MAX),
            (Kind::BFloat16, 3.3e38),
            (Kind::Half, 65504.0),
        ] {
            for (size, place) in [(1, 0), (64, 63), (65, 64), (100_000, 0), (100_000, 99_999)] {
                let one = Tensor::full([size], largest, (kind, Device::Cpu));
                let first = Tensor::full([3], -largest, (kind, Device::Cpu));
                assert!(!has_non_finite(&[first.shallow_clone(), one.shallow_clone()]), "{kind:?}");
                for bad in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
                    let _ = one.get(place).fill_(bad);
                    assert!(
                        has_non_finite(&[first.shallow_clone(), one.shallow_clone()]),
                        "{kind:?} {bad} {place}"
                    );
                }
            }
            let wide = Tensor::zeros([4, 6], (kind, Device::Cpu));
            let _ = wide.get(1).get(4).fill_(f64::NAN);
            let layouts = [wide.tr(), wide.narrow(1, 3, 3), wide.get(1).expand([3, 6], false)];
            layouts.into_iter().for_each(|layout| assert!(has_non_finite(&[layout])));
            assert!(!has_non_finite(&[wide.narrow(1, 0, 3)]), "{kind:?}: beside it");
        }
    }

    #[test]
    fn kernels_over_many_gradients_are_for_cuda() {
        let grads = [Tensor::ones([3], kind::FLOAT_CPU)];
        assert!(norm_many(&grads).unwrap().is_none());
        assert!(!scale_many_(&grads, &factor(2.0)).unwrap());
        assert_eq!(grads[0].sum(Kind::Float).double_value(&[]), 3.0);
    }

    #[test]
    fn any_dense_layout_is_supported_and_others_are_refused() {
        let whole = Tensor::ones([8, 6], kind::FLOAT_CPU);
        let unscaled = unscale_(&[whole.tr()], &factor(2.0), true).unwrap();
        assert_eq!(unscaled.norm.unwrap().double_value(&[]), (48.0f64 * 4.0).sqrt());
        assert_eq!(whole.sum(Kind::Float).double_value(&[]), 96.0);
        let none: [Tensor; 0] = [];
        let unscaled = unscale_(&none, &factor(2.0), true).unwrap();
        assert_eq!(
            (unscaled.found_inf.double_value(&[0]), unscaled.norm.unwrap().double_value(&[])),
            (0.0, 0.0)
        );
        for (grad, message) in [
            (whole.narrow(1, 0, 3), "with strides [6, 1]; expected Float without gaps or overlaps in memory"),
            (whole.select(0, 0).expand([4, 6], false), "with strides [0, 1]; expected Float without gaps"),
            (Tensor::ones([3], (Kind::Half, Device::Cpu)), "is Half; expected Float, Double or BFloat16"),
        ] {
            let error = unscale_(&[grad], &factor(1.0), false).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
