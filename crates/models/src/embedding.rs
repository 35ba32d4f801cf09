//! Token embeddings.

use kernels::quantized::{dequantize, is_quantized};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result, unknown_token, wrong_placement, wrong_shape};
use crate::init::Init;
use crate::linear::positive;
use crate::module::{Module, Visitor, VisitorMut};

/// A lookup table with one row per token.
#[derive(Debug)]
pub struct Embedding {
    /// `[vocabulary, width]`, or the same matrix quantized ([`kernels::quantized`]), whose rows are read in bf16.
    pub weight: Tensor,
}

impl Embedding {
    /// Creates a table with the given initialisation; PyTorch's `nn.Embedding` uses a standard normal.
    ///
    /// # Errors
    /// A size below 1, too little memory.
    pub fn new(vocabulary: i64, width: i64, init: Init, options: (Kind, Device)) -> Result<Self> {
        positive("embedding", &[("vocabulary", vocabulary), ("width", width)])?;
        Ok(Self { weight: init.parameter(&[vocabulary, width], options)? })
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
        self.rows(tokens_bt).map_err(|error| self.unknown_token(tokens_bt).unwrap_or_else(|| error.into()))
    }

    fn rows(&self, tokens_bt: &Tensor) -> std::result::Result<Tensor, tch::TchError> {
        if !is_quantized(&self.weight) {
            return Tensor::f_embedding(&self.weight, tokens_bt, -1, false, false);
        }
        let _no_grad = tch::no_grad_guard();
        // Rows of a quantized matrix are one.
        let rows = self.weight.f_index_select(0, &tokens_bt.f_reshape([-1])?)?;
        let values =
            dequantize(&rows, Kind::BFloat16).map_err(|error| tch::TchError::Torch(error.to_string()))?;
        values.f_view([&tokens_bt.size()[..], &[values.size()[1]]].concat().as_slice())
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

impl Module for Embedding {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter("weight", &mut self.weight)
    }
}
