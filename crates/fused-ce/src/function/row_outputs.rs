//! Results of forward, one value per row: the losses, the statistics that backward needs, and the outputs that the options add to the loss.

use kernels::cross_entropy::Statistics;
use runtime::Result;
use runtime::autograd::Forward;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use super::Fused;
use crate::options::{LogSumExp, Reduction};

/// Tensors `[n]` over the rows that are computed, filled chunk by chunk; `None` where neither the options nor backward need them. All but the
/// predictions are in the dtype of the logits' arithmetic.
pub(super) struct RowOutputs {
    losses: Tensor,
    log_sum_exp: Option<Tensor>,
    /// The class of the largest logit, in int64.
    predictions: Option<Tensor>,
    entropy: Option<Tensor>,
    /// The divergence from a teacher, and the loss of the labels.
    taught: Option<[Tensor; 2]>,
    /// Maximum and sum of each row; its mass too if the targets are distributions.
    statistics: [Option<Tensor>; 3],
}

impl RowOutputs {
    /// Allocates the outputs of `fused` on the device of `hidden`; the statistics if `saves_statistics`.
    pub(super) fn new(fused: &Fused, hidden: &Tensor, saves_statistics: bool) -> Result<Self> {
        let (options, compute) = (&fused.options, fused.plan.compute);
        let per_row = |is_needed: bool, kind: Kind| {
            is_needed.then(|| Tensor::f_empty([fused.rows.count], (kind, hidden.device()))).transpose()
        };
        let with_mass = saves_statistics && fused.distributions.is_some();
        Ok(Self {
            losses: Tensor::f_empty([fused.rows.count], (compute, hidden.device()))?,
            log_sum_exp: per_row(options.log_sum_exp != LogSumExp::No, compute)?,
            predictions: per_row(options.predictions, Kind::Int64)?,
            entropy: per_row(options.entropy, compute)?,
            taught: match &fused.taught {
                Some(_) => {
                    let part = || Tensor::f_empty([fused.rows.count], (compute, hidden.device()));
                    Some([part()?, part()?])
                }
                None => None,
            },
            statistics: [
                per_row(saves_statistics, compute)?,
                per_row(saves_statistics, compute)?,
                per_row(with_mass, compute)?,
            ],
        })
    }

    /// Stores the results of a chunk, whose rows begin at `start`.
    pub(super) fn store(&self, start: i64, losses: &Tensor, rows: &Statistics) -> Result<()> {
        let store = |output: &Option<Tensor>, value: &Tensor| -> Result<()> {
            if let Some(output) = output {
                output.f_narrow(0, start, value.size()[0])?.f_copy_(value)?;
            }
            Ok(())
        };
        self.losses.f_narrow(0, start, losses.size()[0])?.f_copy_(losses)?;
        if self.log_sum_exp.is_some() {
            store(&self.log_sum_exp, &rows.log_sum_exp()?)?;
        }
        if self.entropy.is_some() {
            store(&self.entropy, &rows.entropy()?)?;
        }
        let values = [Some(&rows.maximum), Some(&rows.sum), rows.mass.as_ref()];
        for (output, value) in self.statistics.iter().zip(values) {
            value.map_or(Ok(()), |value| store(output, value))?;
        }
        rows.best.as_ref().map_or(Ok(()), |best| store(&self.predictions, best))
    }

    /// [`store`](Self::store) of a chunk with a teacher: the losses are these by this weight, and the divergences by what is left of 1.
    pub(super) fn store_taught(
        &self,
        start: i64,
        (weight, of_labels): (f64, &Tensor),
        divergence: &Tensor,
        rows: &Statistics,
    ) -> Result<()> {
        let mixed = of_labels.try_mul_scalar(weight)?.f_add(&divergence.try_mul_scalar(1.0 - weight)?)?;
        for (output, value) in self.taught.iter().flatten().zip([divergence, of_labels]) {
            output.f_narrow(0, start, value.size()[0])?.f_copy_(value)?;
        }
        self.store(start, &mixed, rows)
    }

    /// Takes the statistics for backward: maximum, sum and mass.
    pub(super) fn take_statistics(&mut self) -> [Option<Tensor>; 3] {
        std::mem::take(&mut self.statistics)
    }

    /// Returns the function's outputs in this order: the reduced loss, then, if the options ask for them, the log-sum-exp, the predictions with
    /// the number of correct ones, the entropy, and with a teacher the divergence and the loss of the labels, reduced as the loss. Of these the loss is differentiable, and the log-sum-exp unless it is a value alone.
    ///
    /// `factors` `[n]` multiply the losses of the rows, and `divisor` divides their sum.
    pub(super) fn finish(
        self,
        fused: &Fused,
        ctx: &mut Forward<'_>,
        factors: Option<&Tensor>,
        divisor: Option<&Tensor>,
    ) -> Result<Vec<Tensor>> {
        let reduced = |losses: Tensor| -> Result<Tensor> {
            let weighted = match factors {
                // A NaN of an ignored token does not reach the loss.
                Some(factors) => {
                    let zeros = losses.f_zeros_like()?;
                    losses.f_mul(factors)?.f_where_self(&factors.try_ne(0.0)?, &zeros)?
                }
                None => losses,
            };
            match (fused.options.reduction, divisor) {
                (Reduction::None, _) => fused.scatter(&weighted, 0.0),
                (_, Some(divisor)) => Ok(weighted.f_sum(fused.plan.compute)?.f_div(divisor)?),
                (_, None) => Ok(weighted.f_sum(fused.plan.compute)?),
            }
        };
        let device = self.losses.device();
        let mut outputs = vec![reduced(self.losses)?];
        if let Some(values) = self.log_sum_exp {
            if fused.options.log_sum_exp == LogSumExp::Value {
                ctx.mark_non_differentiable(outputs.len());
            }
            outputs.push(fused.scatter(&values, 0.0)?);
        }
        if let Some(predictions) = self.predictions {
            // The number of labelled tokens whose class is predicted; an empty tensor if the targets are distributions.
            let correct = match (&fused.rows.classes, &fused.rows.labelled) {
                (Some(classes), Some(labelled)) => {
                    let correct = predictions.f_eq_tensor(classes)?;
                    correct.f_logical_and(&labelled.try_ne(0.0)?)?.f_sum(Kind::Int64)?
                }
                (Some(classes), None) => predictions.f_eq_tensor(classes)?.f_sum(Kind::Int64)?,
                (None, _) => Tensor::f_zeros([0i64; 0], (Kind::Int64, device))?,
            };
            for tensor in [fused.scatter(&predictions, -1.0)?, correct] {
                ctx.mark_non_differentiable(outputs.len());
                outputs.push(tensor);
            }
        }
        if let Some(entropy) = self.entropy {
            ctx.mark_non_differentiable(outputs.len());
            outputs.push(fused.scatter(&entropy, 0.0)?);
        }
        for part in self.taught.into_iter().flatten() {
            ctx.mark_non_differentiable(outputs.len());
            outputs.push(reduced(part)?);
        }
        Ok(outputs)
    }
}
