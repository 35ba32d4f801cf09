//! Rows to train on, and prompts to generate from: the same tokens.
//!
//! A row is the prompt's tokens, the answer's, and the end token; the labels are −100 over the prompt, and the tokens
//! themselves after it, the end token among them, so that the model learns to stop.
//!
//! **The text is encoded once**, and the answer's tokens are found by the part of the text that each is of. Generation sees the encoded
//! prompt, so these must be the tokens before the answer's first. They are, with [`PromptFormat`](super::PromptFormat)'s default: a
//! byte-level BPE as GPT-2's, Llama 3's or Qwen's divides the text before merging, and `:` never shares a piece with the space after
//! it, which belongs to the answer's first word; SentencePiece's `▁` is that space. An answer that is encoded apart would get a second
//! `▁` from a tokenizer that marks the start of a text.

use dataloading::Tokenizer;
use training::masked_rows::MaskedRow;

use super::error::{Error, Result};
use super::prompt::FewShot;
use super::records::Problem;

/// The label of a token that is not learned.
pub const IGNORE_INDEX: i64 = -100;

/// Handling of rows and prompts that are longer than the model's context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TooLong {
    /// It is an error.
    #[default]
    Refuse,
    /// It is left out, and counted.
    Skip,
}

/// Limits and end tokens of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodeConfig {
    /// Ids that the model knows: 0 to `vocabulary - 1`.
    pub vocabulary: usize,
    /// The model's context, in positions.
    pub context: usize,
    /// The token that begins every row, for models that were trained with one (Llama; not Qwen).
    pub begin: Option<u32>,
    /// The token after the answer.
    pub end: u32,
    /// Handling of longer rows.
    pub too_long: TooLong,
}

/// A row as the assignment's `tokenize` returns it. The three lists are of one length.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TrainingRow {
    /// Prompt, answer, end token.
    pub input_ids: Vec<i64>,
    /// 1 everywhere: padding is added when a batch is made.
    pub attention_mask: Vec<i64>,
    /// −100 over the prompt, then the tokens themselves. Not shifted: the model's loss compares position `t` with label `t + 1`.
    pub labels: Vec<i64>,
}

impl From<TrainingRow> for MaskedRow {
    fn from(row: TrainingRow) -> Self {
        Self::new(row.input_ids, row.labels)
    }
}

/// Rows of many problems.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TrainingRows {
    /// In the order of the problems.
    pub rows: Vec<TrainingRow>,
    /// Numbers of the problems that were too long and left out.
    pub skipped: Vec<usize>,
}

/// Makes rows and prompts for one model.
#[derive(Debug, Clone)]
pub struct Encoder {
    tokenizer: Tokenizer,
    options: EncodeConfig,
}

impl Encoder {
    /// Checks the options. A tokenizer may have ids beyond the model's vocabulary: a row or a prompt that uses one is an error.
    ///
    /// # Errors
    /// [`Error::Vocabulary`]: the end or begin token is beyond the model's vocabulary. A context of 0.
    pub fn new(tokenizer: Tokenizer, options: EncodeConfig) -> Result<Self> {
        if options.context == 0 {
            return Err(Error::Config {
                what: "context",
                reason: "0 positions; give the model's `max_position_embeddings`".into(),
            });
        }
        let encoder = Self { tokenizer, options };
        let special = [encoder.options.begin, Some(encoder.options.end)];
        encoder.check(&special.into_iter().flatten().collect::<Vec<_>>())?;
        Ok(encoder)
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns what the model asks of its rows.
    pub fn options(&self) -> &EncodeConfig {
        &self.options
    }

    fn check(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|id| **id as usize >= self.options.vocabulary) {
            None => Ok(()),
            Some(&id) => Err(Error::Vocabulary {
                id,
                token: self.tokenizer.token(id).unwrap_or_default(),
                vocabulary: self.options.vocabulary,
            }),
        }
    }

    /// Returns the tokens of a prompt: the begin token if there is one, and the text's.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn prompt(&self, text: &str) -> Result<Vec<i64>> {
        let ids = self.tokenizer.encode(text)?;
        self.check(&ids)?;
        Ok(self.begin_before(&ids).into_iter().chain(ids.iter().copied()).map(i64::from).collect())
    }

    /// The begin token, unless a text has it.
    fn begin_before(&self, ids: &[u32]) -> Option<u32> {
        self.options.begin.filter(|begin| ids.first() != Some(begin))
    }

    /// Returns the assignment's `tokenize(sample)`. `number` is the problem's index in its list, for errors. `None`: too long, and
    /// such rows are skipped.
    ///
    /// # Errors
    /// The row is too long and such rows are refused; those of [`FewShot::prompt`] and of the tokenizer.
    pub fn tokenize(
        &self,
        number: usize,
        problem: &Problem,
        few_shot: &FewShot,
    ) -> Result<Option<TrainingRow>> {
        let prompt = few_shot.prompt(&problem.question)?;
        let text = format!("{prompt}{}", few_shot.format().reply(&problem.answer));
        let encoded = self.tokenizer.encode_with_spans(&text)?;
        self.check(&encoded.ids)?;
        let begin = self.begin_before(&encoded.ids).map(|begin| (begin, false));
        let answer = encoded.is_within(std::slice::from_ref(&(prompt.len()..text.len())));
        let end = (encoded.ids.last() != Some(&self.options.end)).then_some((self.options.end, true));
        let tokens = begin.into_iter().chain(encoded.ids.into_iter().zip(answer)).chain(end);
        let (mut input_ids, mut labels) = (Vec::new(), Vec::new());
        for (id, is_learned) in tokens {
            input_ids.push(i64::from(id));
            labels.push(if is_learned { i64::from(id) } else { IGNORE_INDEX });
        }
        if !self.fits(number, input_ids.len(), 0)? {
            return Ok(None);
        }
        Ok(Some(TrainingRow { attention_mask: vec![1; input_ids.len()], input_ids, labels }))
    }

    /// Returns the rows of all problems.
    ///
    /// # Errors
    /// Errors of [`tokenize`](Self::tokenize).
    pub fn tokenize_all(&self, problems: &[Problem], few_shot: &FewShot) -> Result<TrainingRows> {
        let mut all = TrainingRows::default();
        for (number, problem) in problems.iter().enumerate() {
            match self.tokenize(number, problem, few_shot)? {
                Some(row) => all.rows.push(row),
                None => all.skipped.push(number),
            }
        }
        Ok(all)
    }

    /// Whether `tokens` and `new` ones after them fit the context.
    pub(super) fn fits(&self, number: usize, tokens: usize, new: usize) -> Result<bool> {
        let context = self.options.context;
        match self.options.too_long {
            _ if tokens.saturating_add(new) <= context => Ok(true),
            TooLong::Skip => Ok(false),
            TooLong::Refuse => Err(Error::TooLong { number, tokens, new, context }),
        }
    }
}
