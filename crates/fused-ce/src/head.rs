//! A loss head for models that computes the loss without all logits.

use kernels::linear::linear;
use models::distillation::{DistillationConfig, DistilledLoss, OutputProjection, Teacher};
use models::module::{
    Context, IGNORE_INDEX, LogitTransform, LossHead, LossOutput, Module, ModuleMapper, Visitor, VisitorMut,
    map_modules,
};
use models::token_rows::{TOKEN_ROWS, TokenRows};
use tch::Tensor;

use crate::error::{Error, Result, refused};
use crate::inputs::{Inputs, ReplacedRows, compute_kind};
use crate::linear_cross_entropy::Output;
use crate::options::{LinearCrossEntropy, LogSumExp, Reduction};

/// A [`LossHead`] over the weight of the output projection, which may be shared (a tied embedding).
///
/// Its tensors keep the names of the projection, so checkpoints load with either head.
#[derive(Debug)]
pub struct LinearCrossEntropyHead {
    weight: Tensor,
    bias: Option<Tensor>,
    loss: LinearCrossEntropy,
    /// The model's own operations on the products, without the options.
    own: LogitTransform,
    token_rows: Option<TokenRows>,
}

impl LinearCrossEntropyHead {
    /// Creates a head from a weight `[vocabulary, hidden]` and a bias `[vocabulary]`. The reduction is a sum and the labels are
    /// those of `models`, whatever `loss` says; the other options apply.
    ///
    /// # Errors
    /// An option outside its range.
    pub fn new(weight: Tensor, bias: Option<Tensor>, loss: LinearCrossEntropy) -> Result<Self> {
        loss.check()?;
        let loss = LinearCrossEntropy {
            reduction: Reduction::Sum,
            ignore_index: IGNORE_INDEX,
            shift: 0,
            log_sum_exp: LogSumExp::No,
            entropy: false,
            ..loss
        };
        Ok(Self { weight, bias, loss, own: LogitTransform::default(), token_rows: None })
    }
}

impl Module for LinearCrossEntropyHead {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
        visitor.optional_parameter("bias", self.bias.as_ref());
        if let Some(rows) = &self.token_rows {
            visitor.part("", rows);
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        visitor.parameter("weight", &mut self.weight)?;
        visitor.optional_parameter("bias", self.bias.as_mut())?;
        self.token_rows.as_mut().map_or(Ok(()), |rows| visitor.part("", rows))
    }
}

impl LossHead for LinearCrossEntropyHead {
    fn logits(&self, hidden_btd: &Tensor, _: &Context<'_>) -> models::Result<Tensor> {
        let mut products = linear(hidden_btd, &self.weight, self.bias.as_ref())?;
        if let Some(rows) = &self.token_rows {
            rows.project(&mut products, hidden_btd)?;
        }
        LogitTransform { scale: self.loss.scale, softcap: self.loss.softcap }.apply(products)
    }

    fn transform(&self) -> LogitTransform {
        self.own
    }

    fn token_rows(&self) -> Option<&TokenRows> {
        self.token_rows.as_ref()
    }

    fn set_token_rows(&mut self, rows: Option<TokenRows>) -> models::Result<()> {
        if rows.is_some() && self.bias.is_some() {
            let reason = "the head has a bias, which would be left out for the replaced rows";
            return Err(models::Error::invalid("token rows", reason));
        }
        self.token_rows = rows;
        Ok(())
    }

    fn loss(
        &self,
        hidden_btd: &Tensor,
        labels_bt: &Tensor,
        context: &Context<'_>,
    ) -> models::Result<LossOutput> {
        let loss = LinearCrossEntropy { predictions: context.accuracy, ..self.loss.clone() };
        let weights = label_weights(hidden_btd, context)?;
        let output = self.run(&loss, hidden_btd, (labels_bt, weights.as_ref()), context)?;
        Ok(LossOutput { sum: output.loss, correct: output.correct })
    }

    fn token_losses(
        &self,
        hidden_btd: &Tensor,
        labels_bt: &Tensor,
        context: &Context<'_>,
    ) -> models::Result<Tensor> {
        let loss = LinearCrossEntropy {
            reduction: Reduction::None,
            label_smoothing: 0.0,
            z_loss: 0.0,
            // A sum over a row of rounded logits would err by nats.
            round_logits: false,
            ..self.loss.clone()
        };
        Ok(self.run(&loss, hidden_btd, (labels_bt, None), context)?.loss)
    }

    fn distilled_loss(
        &self,
        hidden_btd: &Tensor,
        labels_bt: &Tensor,
        (teacher, options): (&Teacher<'_>, &DistillationConfig),
        context: &Context<'_>,
    ) -> models::Result<DistilledLoss> {
        let loss = LinearCrossEntropy {
            predictions: context.accuracy,
            // Differences of log-probabilities are smaller than what rounded logits err by.
            round_logits: false,
            ..self.loss.clone()
        };
        let weights = label_weights(hidden_btd, context)?;
        let inputs = self.inputs(hidden_btd, (labels_bt, weights.as_ref()), context);
        let output = loss.run(&Inputs { teacher: Some((*teacher, *options)), ..inputs })?;
        let part = |of: Option<Tensor>| of.ok_or_else(|| refused("a teacher's loss has no parts"));
        Ok(DistilledLoss {
            sum: output.loss,
            divergence: part(output.divergence)?,
            cross_entropy: part(output.label_loss)?,
            correct: output.correct,
        })
    }

    fn output_projection(&self) -> Option<OutputProjection<'_>> {
        Some(OutputProjection {
            weight: &self.weight,
            bias: self.bias.as_ref(),
            transform: LogitTransform { scale: self.loss.scale, softcap: self.loss.softcap },
            token_rows: self.token_rows.as_ref(),
        })
    }
}

/// Returns the weights of the labels in the dtype of the loss.
fn label_weights(hidden_btd: &Tensor, context: &Context<'_>) -> models::Result<Option<Tensor>> {
    let weights = context.label_weights.map(|weights| weights.f_to_kind(compute_kind(hidden_btd.kind())));
    weights.transpose().map_err(models::Error::from)
}

impl LinearCrossEntropyHead {
    fn run(
        &self,
        loss: &LinearCrossEntropy,
        hidden_btd: &Tensor,
        (labels_bt, token_weights): (&Tensor, Option<&Tensor>),
        context: &Context<'_>,
    ) -> Result<Output> {
        loss.run(&self.inputs(hidden_btd, (labels_bt, token_weights), context))
    }

    fn inputs<'a>(
        &'a self,
        hidden_btd: &'a Tensor,
        (labels_bt, token_weights): (&'a Tensor, Option<&'a Tensor>),
        context: &Context<'_>,
    ) -> Inputs<'a> {
        let replaced = self.token_rows.as_ref();
        Inputs {
            bias: self.bias.as_ref(),
            token_weights,
            replaced_rows: replaced
                .map(|replaced| ReplacedRows { classes: replaced.tokens(), rows: &replaced.rows }),
            labelled_tokens: context.labelled_tokens.map(|number| number.min(labels_bt.numel() as i64)),
            ..Inputs::new(hidden_btd, &self.weight, labels_bt)
        }
    }
}

impl LinearCrossEntropy {
    /// Replaces the head of `model` by a [`LinearCrossEntropyHead`] over the same weight, with the scale and the cap of the model's logits;
    /// [`LinearCrossEntropy::scale`] is a further factor.
    ///
    /// ```
    /// use fused_ce::LinearCrossEntropy;
    /// use models::{Gpt2, Gpt2Config};
    /// use tch::{Device, Kind};
    ///
    /// let config = Gpt2Config { vocabulary: 100, max_sequence: 16, hidden: 8, heads: 2, layers: 1, ..Gpt2Config::small() };
    /// let mut model = Gpt2::new(&config, (Kind::Float, Device::Cpu))?;
    /// LinearCrossEntropy::default().install(&mut model)?;
    /// # Ok::<(), fused_ce::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a head that is not one projection with a weight and perhaps a bias; the model has no head, an option is
    /// outside its range, or the options' cap is not the model's.
    pub fn install(&self, model: &mut dyn Module) -> Result<()> {
        struct Install<'a> {
            loss: &'a LinearCrossEntropy,
            done: Result<usize>,
        }
        impl ModuleMapper for Install<'_> {
            fn loss_head(&mut self, name: &str, slot: &mut Box<dyn LossHead>) -> models::Result<()> {
                let count = match &self.done {
                    Ok(count) => *count,
                    Err(_) => return Ok(()),
                };
                self.done = replaced(name, &**slot, self.loss).map(|head| {
                    *slot = Box::new(head);
                    count + 1
                });
                Ok(())
            }
        }
        let mut install = Install { loss: self, done: Ok(0) };
        map_modules(model, &mut install)?;
        match install.done? {
            0 => Err(refused("the model has no loss head to replace; pass a language model")),
            _ => Ok(()),
        }
    }
}

fn replaced(name: &str, head: &dyn LossHead, loss: &LinearCrossEntropy) -> Result<LinearCrossEntropyHead> {
    let own = head.transform();
    let softcap = match (own.softcap, loss.softcap) {
        (Some(own), Some(other)) if own != other => {
            return Err(refused(format!(
                "softcap is {other}, and the model limits its logits to {own}; leave the option out"
            )));
        }
        (own, other) => own.or(other),
    };
    let loss = LinearCrossEntropy { scale: loss.scale * own.scale, softcap, ..loss.clone() };
    let mut tensors = models::module::tensors(head);
    let token_rows = head.token_rows().map(TokenRows::shallow_clone);
    tensors.retain(|named| token_rows.is_none() || named.name != TOKEN_ROWS);
    let names: Vec<String> = tensors.iter().map(|named| named.name.clone()).collect();
    tensors.sort_by_key(|named| named.name != "weight");
    let (weight, bias) = match tensors.as_slice() {
        [weight] if weight.name == "weight" => (weight.tensor, None),
        [weight, bias] if weight.name == "weight" && bias.name == "bias" => {
            (weight.tensor, Some(bias.tensor))
        }
        _ => {
            return Err(Error::Unsupported(format!(
                "linear cross-entropy cannot replace the head `{name}` with the tensors {names:?}; expected `weight` [vocabulary, hidden], \
                 with or without `bias`"
            )));
        }
    };
    let head = LinearCrossEntropyHead::new(weight.shallow_clone(), bias.map(Tensor::shallow_clone), loss)?;
    Ok(LinearCrossEntropyHead { own, token_rows, ..head })
}
