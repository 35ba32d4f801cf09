//! The norms by libtorch's operators, for devices other than the CPU, and for recorded steps on it.

use runtime::Result;
use runtime::ops::{self, Value};
use tch::{Device, Tensor};

use super::cpu::compute_kind;
use super::{Gradients, Inputs, Norm, NormPass, Normalized, Requested, Saved};

/// libtorch's fused operators.
pub(super) struct Reference;

impl NormPass for Reference {
    /// Always returns the means of the layer norm.
    fn forward(&self, inputs: &Inputs<'_>) -> Result<Normalized> {
        let &Inputs { norm, x, residual, weight, bias, options, .. } = inputs;
        let sum = residual.map(|residual| x.f_add(residual)).transpose()?;
        let kind = options.output.unwrap_or(x.kind());
        let x = sum.as_ref().unwrap_or(x).f_to_kind(kind)?;
        // The kernels require parameters of the input's dtype; they compute in fp32.
        let alike = |p: Option<&Tensor>| p.map(|p| p.f_to_kind(kind)).transpose();
        let (weight, bias) = (alike(weight)?, alike(bias)?);
        let width = vec![x.size().last().copied().unwrap_or(1)];
        let (y, mean, rstd) = match norm {
            Norm::Layer => {
                let arguments = [
                    (&x).into(),
                    width.into(),
                    weight.as_ref().into(),
                    bias.as_ref().into(),
                    Value::Double(options.eps),
                ];
                let results = ops::call("aten::native_layer_norm", "", &arguments, &[])?;
                let [y, mean, rstd] = ops::tensors(results)?;
                (y, Some(mean), rstd)
            }
            Norm::Rms => {
                let (y, rstd) = ops::norm::fused_rms_norm(&x, &width, weight.as_ref(), Some(options.eps))?;
                let y = match bias {
                    Some(bias) => y.f_add(&bias)?,
                    None => y,
                };
                (y, None, rstd)
            }
        };
        Ok(Normalized { y, sum, mean, rstd })
    }

    /// From the saved input.
    fn backward(&self, saved: &Saved<'_>, upstream: Tensor, requested: Requested<'_>) -> Result<Gradients> {
        let Requested { norm, added, wanted, .. } = requested;
        let kind = upstream.kind();
        let x = saved.kept.f_to_kind(kind)?;
        let weight = saved.weight.map(|weight| weight.f_to_kind(kind)).transpose()?;
        let width = vec![x.size().last().copied().unwrap_or(1)];
        let bias_gradient =
            wanted.bias.then(|| super::function::summed(&upstream, compute_kind(saved.kind))).transpose()?;
        let results = match norm {
            Norm::Layer => {
                let arguments = [
                    (&upstream).into(),
                    (&x).into(),
                    width.into(),
                    saved.mean.into(),
                    saved.rstd.into(),
                    weight.as_ref().into(),
                    Value::None,
                    Value::BoolList(vec![wanted.x, wanted.weight && weight.is_some(), false]),
                ];
                ops::call("aten::native_layer_norm_backward", "", &arguments, &[])?
            }
            // libtorch has no such operator for the CPU, where this implementation is that of recorded steps.
            Norm::Rms if upstream.device() == Device::Cpu => {
                let (x_gradient, weight_gradient) = rms_backward(&upstream, &x, saved.rstd, weight.as_ref())?;
                vec![x_gradient.into(), weight_gradient.map_or(Value::None, Value::Tensor)]
            }
            Norm::Rms => {
                let arguments = [
                    (&upstream).into(),
                    (&x).into(),
                    width.into(),
                    saved.rstd.into(),
                    weight.as_ref().into(),
                    Value::BoolList(vec![wanted.x, wanted.weight && weight.is_some()]),
                ];
                ops::call("aten::_fused_rms_norm_backward", "", &arguments, &[])?
            }
        };
        let mut results = results.into_iter().map(|value| match value {
            Value::Tensor(tensor) if tensor.defined() => Some(tensor),
            _ => None,
        });
        let x_gradient = match results.next().flatten().filter(|_| wanted.x) {
            Some(grad) => {
                let grad = grad.f_to_kind(saved.kind)?;
                Some(added.map_or_else(|| Ok(grad.shallow_clone()), |added| grad.f_add(added))?)
            }
            None => None,
        };
        Ok(Gradients {
            x: x_gradient,
            weight: results.next().flatten().filter(|_| wanted.weight),
            bias: bias_gradient,
        })
    }
}

/// Returns the gradients of x and of the weight of RMS norm, in fp32 (f64 for f64).
///
/// With x̂ = x/σ and h = w·g: ∂L/∂x = (h − x̂·mean(h·x̂))/σ and ∂L/∂w = Σ g·x̂.
fn rms_backward(
    upstream: &Tensor,
    x: &Tensor,
    rstd: &Tensor,
    weight: Option<&Tensor>,
) -> Result<(Tensor, Option<Tensor>)> {
    let kind = compute_kind(x.kind());
    let (upstream, x) = (upstream.f_to_kind(kind)?, x.f_to_kind(kind)?);
    let rstd = rstd.f_to_kind(kind)?.f_reshape([&x.size()[..x.dim() - 1], &[1]].concat())?;
    let normalized = x.f_mul(&rstd)?;
    let weighted = match weight {
        Some(weight) => upstream.f_mul(&weight.f_to_kind(kind)?)?,
        None => upstream.shallow_clone(),
    };
    let mean = weighted.f_mul(&normalized)?.f_mean_dim([-1i64].as_slice(), true, kind)?;
    let x_gradient = weighted.f_sub(&normalized.f_mul(&mean)?)?.f_mul(&rstd)?;
    let summed = |_| super::function::summed(&upstream.f_mul(&normalized)?, kind);
    Ok((x_gradient, weight.map(summed).transpose()?))
}

#[cfg(test)]
mod tests {
    use runtime::random::Generator;
    use tch::{Device, Kind};

    use super::*;
    use crate::norm::cpu::Cpu;
    use crate::norm::{Keep, Options, Wanted};

    /// The operators run on a CPU too, so they are compared with the pass in Rust.
    #[test]
    fn operators_match_the_pass() {
        for norm in [Norm::Layer, Norm::Rms] {
            let mut generator = Generator::new(11).unwrap();
            let mut normal = |shape: &[i64]| generator.normal(shape, (Kind::Double, Device::Cpu)).unwrap();
            let (x, residual, upstream, added) =
                (normal(&[5, 3, 17]), normal(&[5, 3, 17]), normal(&[5, 3, 17]), normal(&[5, 3, 17]));
            let (weight, bias) = (normal(&[17]), normal(&[17]));
            let wanted = Wanted { x: true, weight: true, bias: true };
            let inputs = Inputs {
                norm,
                x: &x,
                residual: Some(&residual),
                weight: Some(&weight),
                bias: Some(&bias),
                options: Options::default(),
                mean: norm == Norm::Layer,
            };
            let (ours, theirs) = (Cpu.forward(&inputs).unwrap(), Reference.forward(&inputs).unwrap());
            let close = |a: &Tensor, b: &Tensor| {
                let worst = (a - b.view_as(a)).abs().max().double_value(&[]);
                assert!(worst < 1e-12, "{norm:?}: {worst}");
            };
            close(&ours.y, &theirs.y);
            close(ours.sum.as_ref().unwrap(), theirs.sum.as_ref().unwrap());
            close(&ours.rstd, &theirs.rstd);
            let gradients = |normalized: &Normalized, pass: &dyn NormPass| {
                let saved = Saved {
                    kept: normalized.sum.as_ref().unwrap(),
                    keep: Keep::Input,
                    kind: Kind::Double,
                    mean: normalized.mean.as_ref(),
                    rstd: &normalized.rstd,
                    weight: Some(&weight),
                    bias: None,
                };
                let kinds = [Kind::Double; 2];
                let requested = Requested { norm, added: Some(&added), wanted, kinds };
                let gradients = pass.backward(&saved, upstream.copy(), requested).unwrap();
                [gradients.x.unwrap(), gradients.weight.unwrap(), gradients.bias.unwrap()]
            };
            for (ours, theirs) in gradients(&ours, &Cpu).iter().zip(&gradients(&theirs, &Reference)) {
                close(ours, theirs);
            }
        }
    }
}
