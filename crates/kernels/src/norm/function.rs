//! The norms as autograd functions.

use runtime::autograd::{Backward, Forward, Function};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::cpu::compute_kind;
use super::{
    Dtypes, Gradients, Inputs, Keep, NAME, Norm, Options, Requested, Saved, Wanted, pass_for, recoverable,
};
use crate::processor::computes_on;

/// Inputs: x, then residual, weight and bias, if present. Outputs: y, and with a residual the sum.
pub(super) struct FusedNorm {
    norm: Norm,
    options: Options,
    device: Device,
    kind: Kind,
    residual: bool,
    weight: bool,
    bias: bool,
    /// The matrix that forward saved, and whether it saved the means.
    keep: Keep,
    mean: bool,
    /// The parameters' dtypes.
    kinds: [Kind; 2],
}

impl FusedNorm {
    pub(super) fn new(inputs: &Inputs<'_>, dtypes: Dtypes) -> Self {
        let &Inputs { norm, options, mean, .. } = inputs;
        let Dtypes { device, x: kind, parameters: kinds } = dtypes;
        let [_, residual, weight, bias] = inputs.tensors().map(|tensor| tensor.is_some());
        let keep = Keep::Input;
        Self { norm, options, device, kind, residual, weight, bias, keep, mean, kinds }
    }

    /// Returns the input index of the weight; the bias follows.
    fn weight_index(&self) -> usize {
        1 + usize::from(self.residual)
    }

    fn bias_index(&self) -> usize {
        self.weight_index() + usize::from(self.weight)
    }

    fn wanted(&self, needs: impl Fn(usize) -> bool) -> Wanted {
        Wanted {
            x: needs(0) || self.residual && needs(1),
            weight: self.weight && needs(self.weight_index()),
            bias: self.bias && needs(self.bias_index()),
        }
    }
}

impl Function for FusedNorm {
    fn name(&self) -> &'static str {
        match self.norm {
            Norm::Layer => "fused layer norm",
            Norm::Rms => "fused RMS norm",
        }
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let x = inputs[0];
        let residual = self.residual.then(|| inputs[1]);
        let weight = self.weight.then(|| inputs[self.weight_index()]);
        let bias = self.bias.then(|| inputs[self.bias_index()]);
        let wanted = self.wanted(|index| ctx.needs_input_grad(index));
        // The gradient of the bias needs only the upstream gradient.
        let matrix = wanted.x || wanted.weight;
        let output = self.options.output.unwrap_or(self.kind);
        if matrix
            && self.options.keep == Keep::Output
            && computes_on(self.device)
            && recoverable(weight, bias, output)?
        {
            self.keep = Keep::Output;
        }
        self.mean = matrix && self.norm == Norm::Layer && self.keep == Keep::Input;
        let (norm, options, mean) = (self.norm, self.options, self.mean);
        let inputs = Inputs { norm, x, residual, weight, bias, options, mean };
        let normalized = pass_for(self.device).forward(&inputs)?;
        if matrix {
            ctx.save(match self.keep {
                Keep::Output => &normalized.y,
                Keep::Input => normalized.sum.as_ref().unwrap_or(x),
            });
            ctx.save(&normalized.rstd);
            if let Some(mean) = normalized.mean.as_ref().filter(|_| self.mean) {
                ctx.save(mean);
            }
            if let Some(weight) = weight {
                ctx.save(weight);
            }
            if let Some(bias) = bias.filter(|_| self.keep == Keep::Output) {
                ctx.save(bias);
            }
        }
        Ok([Some(normalized.y), normalized.sum].into_iter().flatten().collect())
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let wanted = self.wanted(|index| ctx.needs_input_grad(index));
        let mut grads = grads.into_iter();
        let (upstream, sum_gradient) = (grads.next().flatten(), grads.next().flatten());
        let mut gradients = Gradients { x: None, weight: None, bias: None };
        match upstream {
            None => gradients.x = sum_gradient.filter(|_| wanted.x),
            Some(upstream) if !wanted.x && !wanted.weight => {
                gradients.bias =
                    wanted.bias.then(|| summed(&upstream, compute_kind(self.kind))).transpose()?;
            }
            Some(upstream) => {
                let tensors = ctx.take_saved();
                let mut rest = tensors.iter();
                let mut next = |there: bool| if there { rest.next() } else { None };
                let (kept, rstd) = (next(true), next(true));
                let (mean, weight) = (next(self.mean), next(self.weight));
                let bias = next(self.bias && self.keep == Keep::Output);
                let (Some(kept), Some(rstd)) = (kept, rstd) else {
                    return Err(Error::invalid(NAME, "forward saved nothing for a requested gradient"));
                };
                let (keep, kind) = (self.keep, self.kind);
                let saved = Saved { kept, keep, kind, mean, rstd, weight, bias };
                let (norm, added, kinds) = (self.norm, sum_gradient.as_ref(), self.kinds);
                let requested = Requested { norm, added, wanted, kinds };
                gradients = pass_for(self.device).backward(&saved, upstream, requested)?;
            }
        }
        let Gradients { x, weight, bias } = gradients;
        let mut result = Vec::with_capacity(4);
        result.push(x);
        if self.residual {
            result.push(result[0].as_ref().map(Tensor::shallow_clone));
        }
        for (there, gradient, kind) in
            [(self.weight, weight, self.kinds[0]), (self.bias, bias, self.kinds[1])]
        {
            if there {
                let cast = |gradient: Tensor| match gradient.kind() == kind {
                    true => Ok(gradient),
                    false => gradient.f_to_kind(kind),
                };
                result.push(gradient.map(cast).transpose()?);
            }
        }
        Ok(result)
    }
}

/// Returns the sum over all dimensions except the last.
pub(super) fn summed(matrix: &Tensor, kind: Kind) -> Result<Tensor> {
    let width = matrix.size().last().copied().unwrap_or(1);
    Ok(matrix.f_reshape([-1, width])?.f_sum_dim_intlist(0i64, false, kind)?)
}
