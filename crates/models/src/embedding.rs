//! Token embeddings.

use kernels::dropout::Seed;
use kernels::quantized::{dequantize, is_quantized};
use kernels::uniform::noise;
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result, unknown_token, wrong_placement, wrong_shape};
use crate::init::Init;
use crate::linear::positive;
use crate::module::{Context, Module, Visitor, VisitorMut};
use crate::token_rows::TokenRows;

/// Changes what an [`Embedding`] looks up: a technique's part of it, such as a low-rank term.
pub trait EmbeddingChange: Module {
    /// Maps the rows `[batch, sequence, width]` that were looked up for `tokens_bt` `[batch, sequence]` to others of the same shape.
    ///
    /// # Errors
    /// A tensor of the wrong shape, dtype or device.
    fn apply(&self, looked_up: Tensor, tokens_bt: &Tensor) -> Result<Tensor>;
}

/// A lookup table with one row per token.
#[derive(Debug)]
pub struct Embedding {
    /// `[vocabulary, width]`, or the same matrix quantized ([`kernels::quantized`]), whose rows are read in bf16.
    pub weight: Tensor,
    /// Rows that are looked up in place of the table's.
    pub token_rows: Option<TokenRows>,
    /// A change of the rows that are looked up.
    pub change: Option<Box<dyn EmbeddingChange>>,
}

impl Embedding {
    /// Creates a table with the given initialisation; PyTorch's `nn.Embedding` uses a standard normal.
    ///
    /// # Errors
    /// A size below 1, too little memory.
    pub fn new(vocabulary: i64, width: i64, init: Init, options: (Kind, Device)) -> Result<Self> {
        positive("embedding", &[("vocabulary", vocabulary), ("width", width)])?;
        Ok(Self::from(init.parameter(&[vocabulary, width], options)?))
    }

    /// Maps int64 tokens `[batch, sequence]` to `[batch, sequence, width]`.
    ///
    /// On the CPU a token outside the vocabulary is an error. On CUDA it makes the process's CUDA context unusable, because a
    /// check would synchronise with the device: check a data set once before training.
    ///
    /// # Errors
    /// A token outside the vocabulary; tokens of another shape or dtype, or on another device than the weights.
    pub fn forward(&self, tokens_bt: &Tensor) -> Result<Tensor> {
        let operation = "embedding";
        if tokens_bt.dim() != 2 {
            let expected = "[batch, sequence]".to_owned();
            return Err(wrong_shape(operation, "tokens", tokens_bt.size(), expected));
        }
        if tokens_bt.kind() != Kind::Int64 || tokens_bt.device() != self.weight.device() {
            return Err(wrong_placement(
                operation,
                "tokens",
                (tokens_bt.kind(), tokens_bt.device()),
                format!("Int64 on {:?}, the device of the weights", self.weight.device()),
            ));
        }
        let rows = look_up(&self.weight, tokens_bt);
        let mut rows = rows.map_err(|error| self.unknown_token(tokens_bt).unwrap_or_else(|| error.into()))?;
        if let Some(change) = &self.change {
            rows = change.apply(rows, tokens_bt)?;
        }
        match &self.token_rows {
            Some(replaced) => replaced.embed(&rows, tokens_bt),
            None => Ok(rows),
        }
    }

    /// Explains a failed lookup if a token was outside the vocabulary. Called only after a failure, so that a successful lookup
    /// costs nothing more.
    fn unknown_token(&self, tokens_bt: &Tensor) -> Option<Error> {
        let vocabulary = self.weight.size()[0];
        let (least, most) = tokens_bt.f_aminmax(None, false).ok()?;
        let ends = [least.f_int64_value(&[]).ok()?, most.f_int64_value(&[]).ok()?];
        let token = ends.into_iter().find(|token| !(0..vocabulary).contains(token))?;
        Some(unknown_token(token, vocabulary))
    }
}

/// Adds noise to embeddings `[batch, sequence, width]`: u·s/√width with u uniform in (−1, 1), where s is `strength` `[batch, sequence]`, and
/// with u a function of a seed of the training step ([`kernels::dropout::Seed::draw`]). NEFTune (Jain et al., arXiv:2310.05914) has s = α/√L, with
/// L the tokens of the example. The noise is computed in fp32 (fp64 for fp64 embeddings), rounded to their dtype, and has no gradient.
///
/// # Errors
/// Errors of libtorch.
pub fn add_noise(x_btd: &Tensor, strength: &Tensor) -> Result<Tensor> {
    let noise = {
        let _no_grad = tch::no_grad_guard();
        let size = x_btd.size();
        let width = size.last().copied().unwrap_or(1) as f64;
        let wide = if x_btd.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let bounds = strength.f_to_kind(wide)?.try_div_scalar(width.sqrt())?.f_unsqueeze(-1)?;
        let drawn = noise(Seed::draw()?, &size, x_btd.device())?;
        drawn.f_to_kind(wide)?.f_mul(&bounds)?.f_to_kind(x_btd.kind())?
    };
    Ok(x_btd.f_add(&noise)?)
}

/// Returns embeddings with the noise of a context, if it has any.
pub(crate) fn noisy(x_btd: Tensor, context: &Context<'_>) -> Result<Tensor> {
    match context.embedding_noise {
        None => Ok(x_btd),
        Some(strength) => add_noise(&x_btd, strength),
    }
}

/// Returns the rows of a table, also of a quantized one, for int64 tokens of any shape, without a check of the tokens.
///
/// # Errors
/// A token outside the table; errors of libtorch.
pub fn look_up(table: &Tensor, tokens: &Tensor) -> std::result::Result<Tensor, tch::TchError> {
    if !is_quantized(table) {
        return Tensor::f_embedding(table, tokens, -1, false, false);
    }
    let _no_grad = tch::no_grad_guard();
    // Rows of a quantized matrix are one.
    let rows = table.f_index_select(0, &tokens.f_reshape([-1])?)?;
    let values =
        dequantize(&rows, Kind::BFloat16).map_err(|error| tch::TchError::Torch(error.to_string()))?;
    values.f_view([&tokens.size()[..], &[values.size()[1]]].concat().as_slice())
}

impl From<Tensor> for Embedding {
    /// Creates a lookup in a table `[vocabulary, width]`.
    fn from(weight: Tensor) -> Self {
        Self { weight, token_rows: None, change: None }
    }
}

impl Module for Embedding {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
        if let Some(change) = &self.change {
            visitor.part("", &**change);
        }
        if let Some(rows) = &self.token_rows {
            visitor.part("", rows);
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter("weight", &mut self.weight)?;
        self.change.as_mut().map_or(Ok(()), |change| visitor.part("", &mut **change))?;
        self.token_rows.as_mut().map_or(Ok(()), |rows| visitor.part("", rows))
    }
}
