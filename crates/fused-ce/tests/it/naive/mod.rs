//! The oracle of every option except vocabulary parallelism: all logits as one tensor, with libtorch's graph. In f64 it is
//! exact.

use fused_ce::{
    Denominator, EmptyMean, Inputs, LinearCrossEntropy, LogSumExp, Output, Reduction, Result, Targets,
};
use tch::{Kind, Tensor};

/// Computes the loss as [`LinearCrossEntropy::run`] does, from all logits at once.
pub(crate) fn run(inputs: &Inputs<'_>, options: &LinearCrossEntropy) -> Result<Output> {
    let leading = inputs.hidden.size()[..inputs.hidden.dim() - 1].to_vec();
    let x = inputs.hidden.f_reshape([-1, inputs.weight.size()[1]])?;
    let z = logits(&x, inputs, options)?;
    let tokens = Tokens::new(inputs, options)?;
    let loss = if is_pytorchs(inputs, options) {
        let reduction = match options.reduction {
            Reduction::Sum => tch::Reduction::Sum,
            _ => tch::Reduction::Mean,
        };
        let labels = tokens.labels.as_ref().expect("PyTorch's loss is of classes");
        let (ignored, smoothing) = (options.ignore_index, options.label_smoothing);
        let loss = z.f_cross_entropy_loss(labels, inputs.class_weights, reduction, ignored, smoothing)?;
        match options.empty_mean {
            // libtorch's mean over no token is NaN.
            EmptyMean::Zero if options.reduction == Reduction::Mean => {
                let none = tokens.labelled.f_sum(Kind::Int64)?.f_eq(0)?;
                z.f_sum(z.kind())?.f_mul_scalar(0.0)?.f_where_self(&none, &loss)?
            }
            _ => loss,
        }
    } else {
        let (losses, divisors) = tokens.losses(&z, inputs, options)?;
        reduce(&losses, &divisors, inputs, options, &leading)?
    };
    let per_token = |values: Tensor, absent: f64| -> Result<Tensor> {
        let absent = Tensor::f_full([0i64; 0], absent, (values.kind(), values.device()))?;
        Ok(values.f_where_self(&tokens.labelled, &absent)?.f_reshape(leading.as_slice())?)
    };
    let log_sum_exp = match options.log_sum_exp {
        LogSumExp::No => None,
        LogSumExp::Value => Some(per_token(z.f_logsumexp([1i64].as_slice(), false)?.f_detach()?, 0.0)?),
        LogSumExp::Differentiable => Some(per_token(z.f_logsumexp([1i64].as_slice(), false)?, 0.0)?),
    };
    let _no_grad = tch::no_grad_guard();
    let (mut predictions, mut correct, mut entropy) = (None, None, None);
    if options.predictions {
        let best = z.f_argmax(-1, false)?;
        correct = Some(match &tokens.labels {
            Some(labels) => best.f_eq_tensor(labels)?.f_logical_and(&tokens.labelled)?.f_sum(Kind::Int64)?,
            None => Tensor::f_zeros([0i64; 0], (Kind::Int64, z.device()))?,
        });
        predictions = Some(per_token(best, -1.0)?);
    }
    if options.entropy {
        let log_p = z.f_log_softmax(-1, None::<Kind>)?;
        let sum = log_p.f_exp()?.f_mul(&log_p)?.f_sum_dim_intlist(1, false, None::<Kind>)?.f_neg()?;
        entropy = Some(per_token(sum, 0.0)?);
    }
    Ok(Output { loss, log_sum_exp, predictions, correct, entropy, divergence: None, label_loss: None })
}

/// Returns the logits of rows of x `[n, h]`, in fp32 for low precision.
fn logits(x: &Tensor, inputs: &Inputs<'_>, options: &LinearCrossEntropy) -> Result<Tensor> {
    let mut z = x.f_linear(inputs.weight, inputs.bias)?;
    if let Some(adapter) = inputs.adapter {
        let low = x.f_matmul(&adapter.a.f_tr()?)?.f_mul_scalar(adapter.scale)?;
        z = z.f_add(&low.f_matmul(&adapter.b.f_tr()?)?)?;
    }
    let mut z = z.f_to_kind(tile_kind(z.kind()))?;
    if options.scale != 1.0 {
        z = z.f_mul_scalar(options.scale)?;
    }
    if let Some(cap) = options.softcap {
        z = z.f_div_scalar(cap)?.f_tanh()?.f_mul_scalar(cap)?;
    }
    Ok(z)
}

/// The targets of the tokens.
struct Tokens {
    /// `[n]`, shifted; the ignore index for tokens without a target.
    labels: Option<Tensor>,
    distributions: Option<Tensor>,
    labelled: Tensor,
    weights: Option<Tensor>,
}

impl Tokens {
    fn new(inputs: &Inputs<'_>, options: &LinearCrossEntropy) -> Result<Self> {
        let flat = |tensor: &Tensor| tensor.f_reshape([-1]);
        let weights = inputs.token_weights.map(flat).transpose()?;
        let (labels, distributions) = match inputs.targets {
            Targets::Classes(classes) => {
                let sequence = classes.size().last().copied().unwrap_or(1);
                let shift = options.shift.min(sequence);
                let labels = if shift > 0 {
                    let padding = classes.f_narrow(-1, 0, shift)?.f_full_like(options.ignore_index)?;
                    Tensor::f_cat(&[classes.f_narrow(-1, shift, sequence - shift)?, padding], -1)?
                } else {
                    classes.shallow_clone()
                };
                (Some(flat(&labels)?), None)
            }
            Targets::Distributions(all) => (None, Some(all.f_reshape([-1, inputs.weight.size()[0]])?)),
        };
        let labelled = match &labels {
            Some(labels) => labels.f_ne(options.ignore_index)?,
            None => {
                let count = inputs.hidden.size()[..inputs.hidden.dim() - 1].iter().product::<i64>();
                Tensor::f_ones([count], (Kind::Bool, inputs.hidden.device()))?
            }
        };
        Ok(Self { labels, distributions, labelled, weights })
    }

    /// Returns the loss of each token, and its share of a mean's denominator.
    fn losses(
        &self,
        z: &Tensor,
        inputs: &Inputs<'_>,
        options: &LinearCrossEntropy,
    ) -> Result<(Tensor, Tensor)> {
        let (kind, sum) = (z.kind(), |x: Tensor| x.f_sum_dim_intlist(1, false, None::<Kind>));
        let log_p = z.f_log_softmax(-1, None::<Kind>)?;
        let weights = match inputs.class_weights {
            Some(weights) => weights.shallow_clone(),
            None => Tensor::f_ones([z.size()[1]], (kind, z.device()))?,
        };
        let (likely, mut divisors) = match (&self.labels, &self.distributions) {
            (Some(labels), _) => {
                let labels = labels.f_where_self(&self.labelled, &labels.f_zeros_like()?)?;
                let of_label = weights.f_index_select(0, &labels)?;
                let log_p = log_p.f_gather(1, &labels.f_unsqueeze(1)?, false)?.f_squeeze_dim(1)?;
                (log_p.f_neg()?.f_mul(&of_label)?, of_label)
            }
            (None, Some(distributions)) => {
                let expected = sum(log_p.f_mul(distributions)?.f_mul(&weights)?)?.f_neg()?;
                let ones = expected.f_detach()?.f_ones_like()?;
                (expected, ones)
            }
            (None, None) => unreachable!("a loss has targets"),
        };
        let mut losses = likely;
        if options.label_smoothing > 0.0 {
            let smooth = sum(log_p.f_mul(&weights)?)?.f_neg()?;
            let share = options.label_smoothing / z.size()[1] as f64;
            losses =
                losses.f_mul_scalar(1.0 - options.label_smoothing)?.f_add(&smooth.f_mul_scalar(share)?)?;
        }
        if options.z_loss > 0.0 {
            let squares = z.f_logsumexp([1i64].as_slice(), false)?.f_square()?;
            losses = losses.f_add(&squares.f_mul_scalar(options.z_loss)?)?;
        }
        if let Some(weights) = &self.weights {
            losses = losses.f_mul(weights)?;
            divisors = divisors.f_mul(weights)?;
        }
        let zero = Tensor::f_zeros([0i64; 0], (kind, z.device()))?;
        Ok((losses.f_where_self(&self.labelled, &zero)?, divisors.f_where_self(&self.labelled, &zero)?))
    }
}

/// Returns the dtype of logits: fp32, or f64 for f64.
fn tile_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Returns whether libtorch's own cross-entropy computes this loss.
fn is_pytorchs(inputs: &Inputs<'_>, options: &LinearCrossEntropy) -> bool {
    matches!(inputs.targets, Targets::Classes(_))
        && inputs.token_weights.is_none()
        && inputs.denominator.is_none()
        && options.z_loss == 0.0
        && options.reduction != Reduction::None
        && options.log_sum_exp == LogSumExp::No
}

/// Reduces the losses `[n]` of the tokens.
fn reduce(
    losses: &Tensor,
    divisors: &Tensor,
    inputs: &Inputs<'_>,
    options: &LinearCrossEntropy,
    leading: &[i64],
) -> Result<Tensor> {
    let kind = losses.kind();
    Ok(match options.reduction {
        Reduction::None => losses.f_reshape(leading)?,
        Reduction::Sum => losses.f_sum(kind)?,
        Reduction::Mean => {
            let (divisor, counted) = match inputs.denominator {
                Some(Denominator::Number(number)) => return Ok(losses.f_sum(kind)?.f_div_scalar(number)?),
                Some(Denominator::Tensor(tensor)) => {
                    let given = tensor.f_to_kind(kind)?.f_reshape([0i64; 0])?;
                    let counted = given.f_ne(0.0)?;
                    (given, counted)
                }
                None => (divisors.f_sum(kind)?, divisors.f_ne(0.0)?.f_any()?),
            };
            let divisor = match options.empty_mean {
                EmptyMean::Nan => divisor,
                EmptyMean::Zero => divisor.f_where_self(&counted, &divisor.f_ones_like()?)?,
            };
            losses.f_sum(kind)?.f_div(&divisor)?
        }
    })
}
