//! The output projection with a cross-entropy over all of its logits.

use runtime::ops::TryScalar;
use tch::{Kind, Reduction, Tensor};

use crate::distillation::{DistillationConfig, DistilledLoss, OutputProjection, Teacher};
use crate::error::{Error, Result, wrong_shape};
use crate::module::{
    Context, IGNORE_INDEX, LogitTransform, LossHead, LossOutput, Module, Projection, Visitor, VisitorMut,
    tensors,
};
use crate::token_rows::TokenRows;

/// Computes all logits, then their cross-entropy, as every framework does: the baseline for better heads.
///
/// Keeps the log-softmax, `[batch·sequence, vocabulary]`, for backward, which allocates a gradient of the same size.
#[derive(Debug)]
pub struct ProjectionHead {
    projection: Box<dyn Projection>,
    transform: LogitTransform,
    token_rows: Option<TokenRows>,
}

impl ProjectionHead {
    /// Creates a head over this projection. Its parameters have the head's name.
    pub fn new(projection: impl Projection + 'static) -> Self {
        Self::with_transform(projection, LogitTransform::default())
    }

    /// Creates a head that also transforms the projection's results.
    pub fn with_transform(projection: impl Projection + 'static, transform: LogitTransform) -> Self {
        Self { projection: Box::new(projection), transform, token_rows: None }
    }

    /// Computes the logits of hidden states of any leading shape.
    fn transformed(&self, hidden: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let mut products = self.projection.forward(hidden, context)?;
        if let Some(rows) = &self.token_rows {
            rows.project(&mut products, hidden)?;
        }
        self.transform.apply(products)
    }
}

impl Module for ProjectionHead {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("", &*self.projection);
        if let Some(rows) = &self.token_rows {
            visitor.part("", rows);
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.projection("", &mut self.projection)?;
        self.token_rows.as_mut().map_or(Ok(()), |rows| visitor.part("", rows))
    }
}

impl LossHead for ProjectionHead {
    fn logits(&self, hidden_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        self.transformed(hidden_btd, context)
    }

    fn transform(&self) -> LogitTransform {
        self.transform
    }

    fn token_rows(&self) -> Option<&TokenRows> {
        self.token_rows.as_ref()
    }

    fn set_token_rows(&mut self, rows: Option<TokenRows>) -> Result<()> {
        if rows.is_some() && tensors(&*self.projection).iter().any(|named| named.name != "weight") {
            let reason = "the output projection has more than a weight, such as a bias or an adapter, which would be \
                          left out for the replaced rows; leave the head out of the adapter's targets";
            return Err(Error::invalid("token rows", reason));
        }
        self.token_rows = rows;
        Ok(())
    }

    fn loss(&self, hidden_btd: &Tensor, labels_bt: &Tensor, context: &Context<'_>) -> Result<LossOutput> {
        let (logits, labels) = self.logits_and_labels(hidden_btd, labels_bt, context)?;
        let reduced =
            |reduction| logits.f_cross_entropy_loss(&labels, None::<&Tensor>, reduction, IGNORE_INDEX, 0.0);
        let sum = match context.label_weights {
            None => reduced(Reduction::Sum)?,
            Some(weights) => {
                let losses = reduced(Reduction::None)?;
                let weights = weights.f_reshape([-1])?.f_to_kind(losses.kind())?;
                losses.f_mul(&weights)?.f_sum(losses.kind())?
            }
        };
        let correct = if context.accuracy {
            let _no_grad = tch::no_grad_guard();
            Some(logits.f_argmax(-1, false)?.f_eq_tensor(&labels)?.f_sum(Kind::Int64)?)
        } else {
            None
        };
        Ok(LossOutput { sum, correct })
    }

    fn token_losses(&self, hidden_btd: &Tensor, labels_bt: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let (logits, labels) = self.logits_and_labels(hidden_btd, labels_bt, context)?;
        let losses =
            logits.f_cross_entropy_loss(&labels, None::<&Tensor>, Reduction::None, IGNORE_INDEX, 0.0)?;
        Ok(losses.f_reshape(labels_bt.size().as_slice())?)
    }

    fn distilled_loss(
        &self,
        hidden_btd: &Tensor,
        labels_bt: &Tensor,
        (teacher, options): (&Teacher<'_>, &DistillationConfig),
        context: &Context<'_>,
    ) -> Result<DistilledLoss> {
        options.check()?;
        let (logits, labels) = self.logits_and_labels(hidden_btd, labels_bt, context)?;
        let losses =
            logits.f_cross_entropy_loss(&labels, None::<&Tensor>, Reduction::None, IGNORE_INDEX, 0.0)?;
        let divergences = match teacher {
            Teacher::Hidden { hidden_btd, projection } => {
                let _no_grad = tch::no_grad_guard();
                let logits_of_teacher = projection.logits(&hidden_btd.f_flatten(0, 1)?)?;
                drop(_no_grad);
                options.divergences(&logits, &logits_of_teacher)?
            }
            Teacher::TopK { tokens_btk, log_probabilities_btk } => options.top_k_divergences(
                &logits,
                &tokens_btk.f_flatten(0, 1)?,
                &log_probabilities_btk.f_flatten(0, 1)?,
            )?,
        };
        let is_labelled = labels.try_ne(IGNORE_INDEX)?;
        let of_labelled = divergences.f_where_self(&is_labelled, &divergences.f_zeros_like()?)?;
        let weights = context.label_weights.map(|weights| weights.f_reshape([-1])?.f_to_kind(logits.kind()));
        let weights = weights.transpose()?;
        let sum = |values: &Tensor| match &weights {
            Some(weights) => values.f_mul(weights)?.f_sum(logits.kind()),
            None => values.f_sum(logits.kind()),
        };
        let [divergence, cross_entropy] = [sum(&of_labelled)?, sum(&losses)?];
        let weight = options.label_weight;
        let sum = cross_entropy.try_mul_scalar(weight)?.f_add(&divergence.try_mul_scalar(1.0 - weight)?)?;
        let correct = context
            .accuracy
            .then(|| {
                let _no_grad = tch::no_grad_guard();
                logits.f_argmax(-1, false)?.f_eq_tensor(&labels)?.f_sum(Kind::Int64)
            })
            .transpose()?;
        Ok(DistilledLoss {
            sum,
            divergence: divergence.f_detach()?,
            cross_entropy: cross_entropy.f_detach()?,
            correct,
        })
    }

    fn output_projection(&self) -> Option<OutputProjection<'_>> {
        let named = tensors(&*self.projection);
        let find = |name: &str| named.iter().find(|own| own.name == name).map(|own| own.tensor);
        let (weight, bias) = (find("weight")?, find("bias"));
        let is_all = named.len() == 1 + usize::from(bias.is_some());
        is_all.then_some(OutputProjection {
            weight,
            bias,
            transform: self.transform,
            token_rows: self.token_rows.as_ref(),
        })
    }
}

impl ProjectionHead {
    /// Returns logits `[positions, vocabulary]`, in fp32 at least, and labels `[positions]`.
    fn logits_and_labels(
        &self,
        hidden_btd: &Tensor,
        labels_bt: &Tensor,
        context: &Context<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let (rows, size) = (hidden_btd.size(), labels_bt.size());
        if rows.len() != 3 || size != rows[..2] {
            let expected = format!("{:?}, one label per position", &rows[..rows.len().min(2)]);
            return Err(wrong_shape("loss", "labels", size, expected));
        }
        let logits = self.transformed(&hidden_btd.f_flatten(0, 1)?, context)?;
        // Sums and exponentials in low precision are too inexact; every framework computes them in fp32.
        let logits = match logits.kind() {
            Kind::Half | Kind::BFloat16 => logits.f_to_kind(Kind::Float)?,
            _ => logits,
        };
        Ok((logits, labels_bt.f_reshape([-1])?))
    }
}
