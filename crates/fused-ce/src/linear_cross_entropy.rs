//! The entry point: checks the inputs, plans the chunks and applies the autograd function.

use kernels::cross_entropy::{LogitsPass, pass_for};
use kernels::quantized::is_quantized;
use runtime::autograd::{GradMode, apply_any};
use runtime::ops::TryScalar;
use runtime::precision;
use tch::{Device, Kind, Tensor};

use crate::chunk_plan::{ChunkPlan, Planned};
use crate::error::Result;
use crate::function::{Differentiable, Fused, State, Taught};
use crate::inputs::{Adapter, Denominator, Inputs, Sizes, Targets, check, compute_kind};
use crate::options::{LinearCrossEntropy, LogSumExp};
use crate::rows::Rows;
use crate::teacher::taught;

/// The result of [`LinearCrossEntropy::run`]. Outputs that were not requested are `None`. Per-token outputs have the shape of
/// the targets (`hidden` without its last dimension).
#[derive(Debug)]
pub struct Output {
    /// The loss in nats, fp32 (fp64 for fp64 inputs): a scalar, or one number per token with [`Reduction::None`](crate::Reduction::None).
    pub loss: Tensor,
    /// log Σ eᶻ per token; 0 for ignored tokens.
    pub log_sum_exp: Option<Tensor>,
    /// The argmax of the logits per token, int64, the lowest class of a tie; −1 for ignored tokens.
    pub predictions: Option<Tensor>,
    /// The number of predictions equal to the target, an int64 scalar; 0 if the targets are distributions.
    pub correct: Option<Tensor>,
    /// The entropy of the softmax in nats per token; 0 for ignored tokens.
    pub entropy: Option<Tensor>,
    /// The divergence from a teacher, reduced as the loss, without a graph.
    pub divergence: Option<Tensor>,
    /// The loss of the labels beside that of a teacher, reduced as the loss, without a graph.
    pub label_loss: Option<Tensor>,
}

impl LinearCrossEntropy {
    /// Returns the loss of the logits x·Wᵀ: x `[…, h]`, W `[v, h]`, also [quantized](kernels::quantized), `targets` `[…]` int64.
    ///
    /// # Errors
    /// Shapes, dtypes or devices that do not match, a target outside the vocabulary, an option outside its range, a budget
    /// smaller than one row of logits.
    pub fn loss(&self, hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Tensor> {
        Ok(self.run(&Inputs::new(hidden, weight, targets))?.loss)
    }

    /// Returns the loss and the other outputs requested.
    ///
    /// Under a policy of [`runtime::precision`] the operands are cast to its dtype. On a CPU, where the products are computed in
    /// fp32, the hidden states are cast to the dtype of the weight instead.
    ///
    /// # Errors
    /// As [`LinearCrossEntropy::loss`].
    pub fn run(&self, inputs: &Inputs<'_>) -> Result<Output> {
        if precision::current().is_none() || !inputs.hidden.defined() || !inputs.weight.defined() {
            return self.run_without_policy(inputs);
        }
        if inputs.hidden.device() == Device::Cpu {
            if is_quantized(inputs.weight) {
                return self.run_without_policy(inputs);
            }
            let hidden = inputs.hidden.f_to_kind(inputs.weight.kind())?;
            return self.run_without_policy(&Inputs { hidden: &hidden, ..inputs.clone() });
        }
        let (hidden, weight) = (precision::operand(inputs.hidden)?, precision::weight(inputs.weight)?);
        let bias = inputs.bias.map(precision::operand).transpose()?;
        let adapter = inputs.adapter;
        let ab =
            adapter.map(|of| Ok::<_, runtime::Error>((precision::operand(of.a)?, precision::operand(of.b)?)));
        let ab = ab.transpose()?;
        let adapter = adapter.zip(ab.as_ref()).map(|(of, (a, b))| Adapter { a, b, scale: of.scale });
        self.run_without_policy(&Inputs {
            hidden: &hidden,
            weight: &weight,
            bias: bias.as_ref(),
            adapter,
            ..inputs.clone()
        })
    }

    fn run_without_policy(&self, inputs: &Inputs<'_>) -> Result<Output> {
        let sizes = check(inputs, self)?;
        let (kind, device) = (inputs.hidden.kind(), inputs.hidden.device());
        let pass = pass_for(device);
        let rows = Rows::new(inputs, self, sizes)?;
        let trains = |tensor: &Tensor| GradMode::enabled() && tensor.requires_grad();
        // The gradient of a bias is summed from a tile in fp32, and the tile is then copied. Shards agree on their chunks.
        let trains_weight =
            trains(inputs.weight) && !inputs.bias.is_some_and(trains) && inputs.shard.is_none();
        let taught = inputs.teacher.map(|teacher| taught(&teacher, sizes, compute_kind(kind))).transpose()?;
        let planned =
            Planned { sizes, kind, device, trains_weight, tiles: taught.as_ref().map_or(0, Taught::tiles) };
        let plan = ChunkPlan::new(self, planned, pass)?;
        self.run_planned(inputs, sizes, (plan, pass), rows, taught)
    }

    /// Applies the function with a plan, a pass and rows already chosen for the device.
    fn run_planned(
        &self,
        inputs: &Inputs<'_>,
        sizes: Sizes,
        (plan, pass): (ChunkPlan, &'static dyn LogitsPass),
        rows: Rows,
        taught: Option<Taught>,
    ) -> Result<Output> {
        let (kind, device) = (inputs.hidden.kind(), inputs.hidden.device());
        let low_rank = match inputs.adapter {
            Some(Adapter { a, scale, .. }) => {
                let x = rows.zero_unlabelled(&inputs.hidden.f_reshape([sizes.tokens, sizes.hidden])?)?;
                Some(x.f_matmul(&a.f_tr()?)?.try_mul_scalar(scale)?)
            }
            None => None,
        };
        // Operands of one product; the gradient is rounded as those of the other operands are.
        let replaced = inputs.replaced_rows.map(|replaced| replaced.rows.f_to_kind(kind)).transpose()?;
        let flat = |tensor: &Tensor| tensor.f_detach()?.f_reshape([-1]);
        let differentiable: Differentiable<'_> = [
            Some(inputs.hidden),
            Some(inputs.weight),
            inputs.bias,
            low_rank.as_ref(),
            inputs.adapter.map(|adapter| adapter.b),
            replaced.as_ref(),
        ];
        let targets_shape = inputs.hidden.size()[..inputs.hidden.dim() - 1].to_vec();
        let function = Fused {
            options: self.clone(),
            sizes,
            plan,
            pass,
            rows,
            distributions: match inputs.targets {
                Targets::Classes(_) => None,
                Targets::Distributions(targets) => {
                    Some(targets.f_detach()?.f_reshape([sizes.tokens, sizes.columns])?.f_contiguous()?)
                }
            },
            token_weights: inputs.token_weights.map(flat).transpose()?,
            class_weights: inputs.class_weights.map(flat).transpose()?,
            replaced_classes: inputs.replaced_rows.map(|replaced| flat(replaced.classes)).transpose()?,
            denominator: match inputs.denominator {
                None => None,
                Some(Denominator::Tensor(tensor)) => Some(tensor.f_detach()?),
                Some(Denominator::Number(number)) => {
                    Some(Tensor::try_full([0i64; 0], number, (compute_kind(kind), device))?)
                }
            },
            shard: inputs.shard.clone(),
            taught,
            targets_shape,
            hidden_shape: inputs.hidden.size(),
            given: differentiable.map(|tensor| tensor.is_some()),
            state: State::default(),
        };
        let given: Vec<&Tensor> = differentiable.into_iter().flatten().collect();
        let mut outputs = apply_any(function, &given)?.into_iter();
        let mut next = |wanted: bool| if wanted { outputs.next() } else { None };
        let loss = next(true).unwrap_or_else(|| Tensor::from(f64::NAN).to_kind(Kind::Double));
        Ok(Output {
            loss,
            log_sum_exp: next(self.log_sum_exp != LogSumExp::No),
            predictions: next(self.predictions),
            correct: next(self.predictions),
            entropy: next(self.entropy),
            divergence: next(inputs.teacher.is_some()),
            label_loss: next(inputs.teacher.is_some()),
        })
    }
}

#[cfg(test)]
mod rounded_logits;

#[cfg(test)]
mod tests {
    use kernels::cross_entropy::Reference;
    use runtime::random::Generator;

    use super::*;
    use crate::options::{Chunk, Gradients, Reduction};
    use crate::rows::unread_rows;

    fn planned(sizes: Sizes) -> Planned {
        Planned { sizes, kind: Kind::Double, device: Device::Cpu, trains_weight: true, tiles: 0 }
    }

    /// Ignored tokens may hold any values: hidden states, token weights and upstream gradients.
    #[test]
    fn tokens_without_a_label_may_be_infinite() {
        let mut generator = Generator::new(2).unwrap();
        let mut normal = |size: &[i64]| generator.normal(size, (Kind::Double, Device::Cpu)).unwrap();
        let given = [normal(&[6, 4]), normal(&[7, 4]), normal(&[2, 4]), normal(&[7, 2])];
        let (token_weights, upstream) = (normal(&[6]).abs(), normal(&[6]));
        let targets = Tensor::from_slice(&[3i64, -100, 6, -100, 0, -100]);
        for value in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e308] {
            for token in [1, 3, 5] {
                let _ = given[0].get(token).fill_(value);
                let _ = token_weights.get(token).fill_(value);
                let _ = upstream.get(token).fill_(value);
            }
            for bits in 0..48 {
                let on = |bit: i32| bits >> bit & 1 == 1;
                let options = LinearCrossEntropy {
                    reduction: [Reduction::Mean, Reduction::Sum, Reduction::None][bits as usize >> 4],
                    gradients: if on(0) { Gradients::Forward } else { Gradients::Backward },
                    label_smoothing: if on(1) { 0.1 } else { 0.0 },
                    z_loss: if on(2) { 0.02 } else { 0.0 },
                    chunk: Some(Chunk::Tokens(2)),
                    log_sum_exp: if on(3) { LogSumExp::Differentiable } else { LogSumExp::No },
                    ..LinearCrossEntropy::default()
                };
                let run = |sorted: Option<Option<i64>>| {
                    let leaves = given.each_ref().map(|tensor| tensor.copy().set_requires_grad(true));
                    let inputs = Inputs {
                        adapter: on(2).then_some(Adapter { a: &leaves[2], b: &leaves[3], scale: 0.5 }),
                        token_weights: on(1).then_some(&token_weights),
                        ..Inputs::new(&leaves[0], &leaves[1], &targets)
                    };
                    let sizes = check(&inputs, &options).unwrap();
                    let output = match sorted {
                        None => options.run(&inputs).unwrap(),
                        Some(labelled) => {
                            let rows = unread_rows(&targets, &options, labelled, 6, Kind::Double).unwrap();
                            let plan = ChunkPlan::new(&options, planned(sizes), &Reference).unwrap();
                            options.run_planned(&inputs, sizes, (plan, &Reference), rows, None).unwrap()
                        }
                    };
                    let loss = output.loss.sum(Kind::Double).double_value(&[]);
                    let mut total = match options.reduction {
                        Reduction::None => (&output.loss * &upstream).sum(Kind::Double),
                        _ => &output.loss * 3.0,
                    };
                    if let Some(log_sum_exp) = &output.log_sum_exp {
                        total += (log_sum_exp * &upstream).sum(Kind::Double);
                    }
                    runtime::autograd::backward(&[&total]).unwrap();
                    let gradients =
                        leaves.iter().map(Tensor::grad).filter(Tensor::defined).collect::<Vec<_>>();
                    (loss, gradients)
                };
                let (expected_loss, expected) = run(None);
                for sorted in [None, Some(None), Some(Some(3)), Some(Some(5))] {
                    let (loss, found) = run(sorted);
                    assert!(
                        (loss - expected_loss).abs() <= 1e-12,
                        "{value}: {options:?}, {sorted:?}: {loss}"
                    );
                    assert_eq!(found.len(), expected.len());
                    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let error = (found - expected).abs().max().double_value(&[]);
                        assert!(
                            error <= 1e-12,
                            "{value}: gradient {index} of {options:?}, {sorted:?}: {error:e}"
                        );
                    }
                }
            }
        }
    }

    /// The implementation for other devices (libtorch's operators over rows sorted without reading the targets), run on CPU
    /// tensors, against the implementation for the CPU.
    #[test]
    fn the_implementation_for_other_devices_matches() {
        let mut generator = Generator::new(1).unwrap();
        let mut normal = |size: &[i64]| generator.normal(size, (Kind::Double, Device::Cpu)).unwrap();
        let given = [normal(&[2, 5, 4]), normal(&[7, 4]), normal(&[7]), normal(&[2, 4]), normal(&[7, 2])];
        let (token_weights, class_weights) = (normal(&[2, 5]).abs(), normal(&[7]).abs());
        let upstream = normal(&[2, 5]);
        let targets = Tensor::from_slice2(&[[3i64, -100, 6, 0, -100], [-100, 5, 5, 2, 1]]);
        let nothing = targets.full_like(-100);
        for (targets, labelled) in [(&targets, 7), (&nothing, 0)] {
            for bits in 0..96 {
                let on = |bit: i32| bits >> bit & 1 == 1;
                let options = LinearCrossEntropy {
                    reduction: [Reduction::Mean, Reduction::Sum, Reduction::None][bits as usize >> 5],
                    gradients: if on(0) { Gradients::Forward } else { Gradients::Backward },
                    label_smoothing: if on(1) { 0.1 } else { 0.0 },
                    z_loss: if on(2) { 0.02 } else { 0.0 },
                    softcap: on(3).then_some(2.0),
                    scale: if on(4) { 1.3 } else { 1.0 },
                    shift: i64::from(on(1)),
                    chunk: Some(Chunk::Tokens(3)),
                    log_sum_exp: if on(2) { LogSumExp::Differentiable } else { LogSumExp::Value },
                    predictions: true,
                    entropy: true,
                    ..LinearCrossEntropy::default()
                };
                let run = |sorted: Option<Option<i64>>| {
                    let leaves = given.each_ref().map(|tensor| tensor.copy().set_requires_grad(true));
                    let inputs = Inputs {
                        bias: on(0).then_some(&leaves[2]),
                        adapter: on(3).then_some(Adapter { a: &leaves[3], b: &leaves[4], scale: 0.5 }),
                        token_weights: on(4).then_some(&token_weights),
                        class_weights: on(2).then_some(&class_weights),
                        ..Inputs::new(&leaves[0], &leaves[1], targets)
                    };
                    let output = match sorted {
                        None => options.run(&inputs).unwrap(),
                        Some(labelled) => {
                            let sizes = check(&inputs, &options).unwrap();
                            let flat = targets.reshape([-1]);
                            let rows = unread_rows(&flat, &options, labelled, 5, Kind::Double).unwrap();
                            let plan = ChunkPlan::new(&options, planned(sizes), &Reference).unwrap();
                            options.run_planned(&inputs, sizes, (plan, &Reference), rows, None).unwrap()
                        }
                    };
                    let mut total = match options.reduction {
                        Reduction::None => (&output.loss * &upstream).sum(Kind::Double),
                        _ => &output.loss * 3.0,
                    };
                    let log_sum_exp = output.log_sum_exp.unwrap();
                    if on(2) {
                        total += (&log_sum_exp * &upstream).sum(Kind::Double);
                    }
                    runtime::autograd::backward(&[&total]).unwrap();
                    let gradients = leaves.map(|leaf| leaf.grad()).into_iter().filter(Tensor::defined);
                    let outputs = [
                        Some(output.loss),
                        Some(log_sum_exp),
                        output.predictions,
                        output.correct,
                        output.entropy,
                    ];
                    let outputs = outputs.into_iter().flatten().map(|tensor| tensor.detach());
                    outputs.chain(gradients).map(|tensor| tensor.to_kind(Kind::Double)).collect::<Vec<_>>()
                };
                let expected = run(None);
                // The number of labelled tokens is unknown, known (before the shift), or too large.
                for labelled in [None, Some(labelled), Some(9)] {
                    let loss = run(Some(labelled));
                    assert_eq!(loss.len(), expected.len());
                    for (index, (loss, expected)) in loss.iter().zip(&expected).enumerate() {
                        let error = (loss - expected).abs().max().double_value(&[]);
                        assert!(error <= 1e-12, "{index} of {options:?}, {labelled:?}: {error:e}");
                    }
                }
            }
        }
    }
}
