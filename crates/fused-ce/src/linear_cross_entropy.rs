//! The entry: checks, choices, and the call of the function.

use runtime::autograd::apply;
use runtime::fused::cross_entropy::pass_for;
use runtime::precision;
use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::function::{Differentiable, Fused, State};
use crate::inputs::{Adapter, Denominator, Inputs, Targets, check, tile_kind};
use crate::options::{LinearCrossEntropy, LogSumExp};
use crate::plan::Plan;
use crate::rows::Rows;

/// What was computed. Tensors that were not asked for are `None`. Those with one number for each token have the shape of the
/// targets (of `hidden` without its last dimension).
#[derive(Debug)]
pub struct Output {
    /// The loss in nats, fp32 (fp64 for fp64 inputs): a scalar, or one number for each token.
    pub loss: Tensor,
    /// log Σ eᶻ of each token, 0 where it is ignored.
    pub log_sum_exp: Option<Tensor>,
    /// The most likely class of each token, int64, the first of equal ones; −1 where it is ignored.
    pub predictions: Option<Tensor>,
    /// How many predictions are the target, an int64 scalar; 0 where targets are distributions.
    pub correct: Option<Tensor>,
    /// The entropy of each token's softmax in nats, 0 where it is ignored.
    pub entropy: Option<Tensor>,
}

impl LinearCrossEntropy {
    /// The loss of x·Wᵀ for `targets`: x `[…, h]`, W `[v, h]`, targets `[…]` int64.
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not fit, a target outside the vocabulary, an option outside its range, a budget below
    /// one row of logits.
    pub fn loss(&self, hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
        Ok(self.run(&Inputs::new(hidden, weight, targets))?.loss)
    }

    /// The loss, and what else was asked for.
    ///
    /// Under a policy of [`runtime::precision`] the operands are in its dtype. On a CPU hidden states are taken to the weight's
    /// dtype instead, as the products are computed in fp32 there.
    ///
    /// # Errors
    /// As [`LinearCrossEntropy::loss`].
    pub fn run(&self, inputs: &Inputs<'_>) -> Result<Output> {
        if precision::current().is_none() || !inputs.hidden.defined() || !inputs.weight.defined() {
            return self.run_as_is(inputs);
        }
        if inputs.hidden.device() == Device::Cpu {
            let hidden = inputs.hidden.f_to_kind(inputs.weight.kind())?;
            return self.run_as_is(&Inputs { hidden: &hidden, ..inputs.clone() });
        }
        let (hidden, weight) = (precision::operand(inputs.hidden)?, precision::weight(inputs.weight)?);
        let bias = inputs.bias.map(precision::operand).transpose()?;
        let adapter = inputs.adapter;
        let ab =
            adapter.map(|of| Ok::<_, runtime::Error>((precision::operand(of.a)?, precision::operand(of.b)?)));
        let ab = ab.transpose()?;
        let adapter = adapter.zip(ab.as_ref()).map(|(of, (a, b))| Adapter { a, b, scale: of.scale });
        self.run_as_is(&Inputs {
            hidden: &hidden,
            weight: &weight,
            bias: bias.as_ref(),
            adapter,
            ..inputs.clone()
        })
    }

    fn run_as_is(&self, inputs: &Inputs<'_>) -> Result<Output> {
        let sizes = check(inputs, self)?;
        let (kind, device) = (inputs.hidden.kind(), inputs.hidden.device());
        let plan = Plan::new(self.chunk, sizes, kind, device, pass_for(device))?;
        let rows = Rows::new(inputs, self, sizes)?;
        let low = match inputs.adapter {
            Some(Adapter { a, scale, .. }) => {
                let x = inputs.hidden.f_reshape([sizes.tokens, sizes.hidden])?;
                Some(x.f_matmul(&a.f_tr()?)?.f_mul_scalar(scale)?)
            }
            None => None,
        };
        let flat = |tensor: &Tensor| tensor.f_detach()?.f_reshape([-1]);
        let differentiable: Differentiable<'_> = [
            Some(inputs.hidden),
            Some(inputs.weight),
            inputs.bias,
            low.as_ref(),
            inputs.adapter.map(|adapter| adapter.b),
        ];
        let targets_shape = inputs.hidden.size()[..inputs.hidden.dim() - 1].to_vec();
        let function = Fused {
            options: self.clone(),
            sizes,
            plan,
            rows,
            distributions: match inputs.targets {
                Targets::Classes(_) => None,
                Targets::Distributions(all) => {
                    Some(all.f_detach()?.f_reshape([sizes.tokens, sizes.columns])?.f_contiguous()?)
                }
            },
            token_weights: inputs.token_weights.map(flat).transpose()?,
            class_weights: inputs.class_weights.map(flat).transpose()?,
            denominator: match inputs.denominator {
                None => None,
                Some(Denominator::Tensor(tensor)) => Some(tensor.f_detach()?),
                Some(Denominator::Number(number)) => {
                    Some(Tensor::f_full([0i64; 0], number, (tile_kind(kind), device))?)
                }
            },
            shard: inputs.shard.clone(),
            targets_shape,
            hidden_shape: inputs.hidden.size(),
            given: differentiable.map(|tensor| tensor.is_some()),
            state: State::default(),
        };
        let given: Vec<&Tensor> = differentiable.into_iter().flatten().collect();
        let mut outputs = apply(function, &given)?.into_iter();
        let mut next = |wanted: bool| if wanted { outputs.next() } else { None };
        let loss = next(true).unwrap_or_else(|| Tensor::from(f64::NAN).to_kind(Kind::Double));
        Ok(Output {
            loss,
            log_sum_exp: next(self.log_sum_exp != LogSumExp::No),
            predictions: next(self.predictions),
            correct: next(self.predictions),
            entropy: next(self.entropy),
        })
    }
}
