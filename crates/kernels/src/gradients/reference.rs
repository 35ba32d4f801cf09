//! The pass over the gradients by libtorch's operators, for devices and dtypes without a kernel.

use runtime::Result;
use runtime::ops;
use tch::{Device, Kind, Tensor};

use super::{GradientPass, Unscaled};

/// libtorch's operators, any device.
pub(super) struct Reference;

impl GradientPass for Reference {
    fn unscale(&self, grads: &[&Tensor], factor: &Tensor, norm: bool) -> Result<Unscaled> {
        let device = grads.first().map_or(Device::Cpu, |grad| grad.device());
        let found_inf = unscale_(grads, factor, device)?;
        let norm = norm.then(|| -> Result<Tensor> {
            let norms = ops::foreach::norm(grads, 2.0)?;
            let norms: Vec<Tensor> =
                norms.iter().map(|n| n.f_to_kind(Kind::Float)).collect::<Result<_, _>>()?;
            Ok(Tensor::f_stack(&norms, 0)?.f_norm()?)
        });
        Ok(Unscaled { found_inf, norm: norm.transpose()? })
    }
}

/// Returns whether a gradient is not finite, float `[1]`. libtorch's operator has no bf16 on CUDA.
fn unscale_(grads: &[&Tensor], factor: &Tensor, device: Device) -> Result<Tensor> {
    let (narrow, others): (Vec<&Tensor>, Vec<&Tensor>) =
        grads.iter().copied().partition(|grad| grad.kind() == Kind::BFloat16);
    let found_inf = Tensor::f_zeros([1], (Kind::Float, device))?;
    ops::amp::non_finite_check_and_unscale_(&others, &found_inf, factor)?;
    let mut flags = vec![found_inf];
    for grad in narrow {
        let is_finite = grad.f_isfinite()?.f_all()?;
        flags.push(is_finite.f_logical_not()?.f_to_kind(Kind::Float)?.f_reshape([1])?);
        // By the factor in fp32: a bf16 tensor would round it.
        grad.shallow_clone().f_copy_(&grad.f_to_kind(Kind::Float)?.f_mul(factor)?)?;
    }
    Ok(Tensor::f_stack(&flags, 0)?.f_amax([0], false)?)
}
