//! Text generation: new tokens, one after the other, for many prompts at once.
//!
//! ```text
//! read the prompts → the logits of each row's last token → a token for each row → read those tokens → …
//! ```
//!
//! A model with a [`CacheShape`] reads each token once: attention reads earlier keys and values from a [`KeyValueCache`]. Other
//! models read whole rows again for each token. Rows are padded on the left, so that all end together; nothing attends to
//! padding. A finished row leaves the batch, so the remaining rows run faster. A common prefix of all prompts, such as few-shot
//! examples, is read only once ([`Generator::with_prefix`]), and so is a prompt that is given several times, for several samples.
//!
//! Reading one token multiplies every weight by one vector, so its time is the weights' bytes over the memory bandwidth. On the
//! CPU those products use [`kernels::matmul::matvec`], which reads bf16 weights as bf16: half the time of fp32.
//!
//! The generated tokens depend on the prompt and its number, not on the rest of the batch, up to the rounding of products with
//! another number of rows.
//!
//! ```
//! use models::generation::{GenerationConfig, generate};
//! use models::{Llama, DecoderConfig};
//! use tch::{Device, Kind};
//!
//! let model = Llama::new(&DecoderConfig::qwen2(100, 16, 40, 2, 4), (Kind::Float, Device::Cpu))?;
//! let options = GenerationConfig { max_new_tokens: 5, ..GenerationConfig::default() };
//! let generated = generate(&model, &[vec![3, 1, 4], vec![1, 5, 9, 2, 6]], &options, &mut ())?;
//! assert_eq!(generated[1].tokens.len(), 5);
//! # Ok::<(), models::Error>(())
//! ```

mod batch;
mod sampling;
mod stored_weights;

use std::collections::HashMap;
use std::sync::Arc;

use runtime::precision;
use tch::{Device, Tensor};

use batch::{Reader, Row};
pub use sampling::Sampling;
use stored_weights::StoredWeights;

use crate::error::{Error, Result, unknown_token};
pub use crate::key_value_cache::{CacheShape, CacheWrites, Extension, KeyValueCache, RecurrentShape};
use crate::module::{LanguageModel, first_non_finite, tensors};

const WHAT: &str = "generation";

/// Options of generation.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    /// Maximum number of new tokens per row.
    pub max_new_tokens: usize,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// Tokens that end a row. They are not part of the result.
    pub end_tokens: Vec<i64>,
    /// Whether to use the model's cache, if it has one. Without it each token costs a forward pass over the whole row: the
    /// oracle of the cache.
    pub cache: bool,
}

impl Default for GenerationConfig {
    fn default() -> Self {
        Self { max_new_tokens: 256, sampling: Sampling::Greedy, end_tokens: Vec::new(), cache: true }
    }
}

/// A callback for new tokens: to stream or count them, or to stop a row by its text.
pub trait TokenCallback {
    /// Called when row `row` gets a new token, the last of `tokens` (all of the row's new tokens). Returning true stops the
    /// row.
    fn token(&mut self, row: usize, tokens: &[i64]) -> bool;
}

/// Does nothing, stops nothing.
impl TokenCallback for () {
    fn token(&mut self, _: usize, _: &[i64]) -> bool {
        false
    }
}

/// Any function of the row's number and its new tokens.
impl<F: FnMut(usize, &[i64]) -> bool> TokenCallback for F {
    fn token(&mut self, row: usize, tokens: &[i64]) -> bool {
        self(row, tokens)
    }
}

/// Why a row ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// One of [`GenerationConfig::end_tokens`].
    EndToken,
    /// The [`TokenCallback`] stopped it.
    Callback,
    /// [`GenerationConfig::max_new_tokens`] is reached.
    MaxNewTokens,
    /// The model's maximum sequence length is reached.
    MaxSequence,
}

/// The result for one prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// The new tokens, without an end token.
    pub tokens: Vec<i64>,
    /// The end token, for [`FinishReason::EndToken`].
    pub end_token: Option<i64>,
    /// Why the row ended.
    pub finish_reason: FinishReason,
}

/// Generates for all prompts in one batch; see [`Generator`].
///
/// # Errors
/// Errors of [`Generator::new`] and [`Generator::generate`].
pub fn generate(
    model: &dyn LanguageModel,
    prompts: &[Vec<i64>],
    options: &GenerationConfig,
    callback: &mut dyn TokenCallback,
) -> Result<Vec<Generated>> {
    Generator::new(model, options)?.generate(prompts, callback)
}

/// A model with options of generation and an optional prefix that all prompts share.
#[derive(Debug)]
pub struct Generator<'m> {
    model: &'m dyn LanguageModel,
    options: GenerationConfig,
    device: Device,
    prefix: Vec<i64>,
    read: Option<KeyValueCache>,
}

impl<'m> Generator<'m> {
    /// Creates a generator without a prefix.
    ///
    /// # Errors
    /// `max_new_tokens` of 0; sampling options outside their ranges; an end token outside the vocabulary.
    pub fn new(model: &'m dyn LanguageModel, options: &GenerationConfig) -> Result<Self> {
        if options.max_new_tokens == 0 {
            let reason = "`max_new_tokens` is 0; expected at least 1".to_owned();
            return Err(Error::invalid(WHAT, reason));
        }
        options.sampling.check()?;
        check_tokens(model, &options.end_tokens)?;
        let device = tensors(model).first().map_or(Device::Cpu, |named| named.tensor.device());
        Ok(Self { model, options: options.clone(), device, prefix: Vec::new(), read: None })
    }

    /// Reads a prefix that every prompt starts with, once. Prompts still include it.
    ///
    /// # Errors
    /// Tokens outside the vocabulary; a prefix as long as the model's maximum sequence.
    pub fn with_prefix(mut self, prefix: &[i64]) -> Result<Self> {
        check_tokens(self.model, prefix)?;
        self.fits(prefix.len(), "")?;
        (self.prefix, self.read) = (Vec::new(), None);
        let Some(shape) = self.model.cache_shape().filter(|_| self.options.cache && !prefix.is_empty())
        else {
            return Ok(self);
        };
        let _no_grad = tch::no_grad_guard();
        let mut cache = KeyValueCache::new(shape, 1, prefix.len() as i64)?;
        let row = Row::new(0, 0, prefix, &self.options.sampling)?;
        let _logits = Reader::new(self.model, self.device).read(&mut cache, &[row], 0)?;
        (self.prefix, self.read) = (prefix.to_vec(), Some(cache));
        Ok(self)
    }

    /// Generates for all prompts in one batch. Returns tokens and finish reasons in the prompts' order.
    ///
    /// `callback` is called for each new token, with the prompt's number.
    ///
    /// # Errors
    /// A prompt that is empty, does not start with the prefix, has nothing after it, has tokens outside the vocabulary, or is
    /// as long as the model's maximum sequence; logits that are NaN or infinite, with the weight that is; too little memory for the cache.
    pub fn generate(&self, prompts: &[Vec<i64>], callback: &mut dyn TokenCallback) -> Result<Vec<Generated>> {
        self.generate_numbered(prompts, 0, callback)
    }

    /// [`Generator::generate`] of prompts that are some of many: row i is sampled as number `first + i`, so that its tokens do not depend on
    /// how many are generated at a time.
    ///
    /// # Errors
    /// Errors of [`Generator::generate`].
    pub fn generate_numbered(
        &self,
        prompts: &[Vec<i64>],
        first: usize,
        callback: &mut dyn TokenCallback,
    ) -> Result<Vec<Generated>> {
        for (number, prompt) in prompts.iter().enumerate() {
            if prompt.len() <= self.prefix.len() || !prompt.starts_with(&self.prefix) {
                let reason = match self.prefix.len() {
                    0 => format!("prompt {number} is empty; expected at least one token"),
                    prefix => {
                        format!(
                            "prompt {number} does not start with the prefix of {prefix} tokens, or has nothing after it"
                        )
                    }
                };
                return Err(Error::invalid(WHAT, reason));
            }
            check_tokens(self.model, prompt)?;
            self.fits(prompt.len(), &format!("prompt {number}: "))?;
        }
        let _no_grad = tch::no_grad_guard();
        let current = precision::current();
        let _policy = precision::enter(Some(current.unwrap_or_else(|| Arc::new(StoredWeights))));
        let rows = prompts.iter().enumerate();
        let rows: Vec<Row> = rows
            .map(|(number, prompt)| Row::new(number, first + number, prompt, &self.options.sampling))
            .collect::<Result<_>>()?;
        let mut results: Vec<Option<Generated>> = prompts.iter().map(|_| None).collect();
        if !rows.is_empty() {
            self.run(rows, &mut results, callback)?;
        }
        Ok(results.into_iter().flatten().collect())
    }

    fn run(
        &self,
        mut rows: Vec<Row>,
        results: &mut [Option<Generated>],
        callback: &mut dyn TokenCallback,
    ) -> Result<()> {
        let longest = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(0);
        let limit = self.model.cache_limit().unwrap_or(i64::MAX);
        // What was read of short rows does not hold for longer ones.
        let read = self.read.as_ref().filter(|read| read.len() > limit || longest as i64 <= limit);
        let prefix = if read.is_some() { self.prefix.len() } else { 0 };
        let reader = Reader::new(self.model, self.device);
        let shape = self.model.cache_shape().filter(|_| self.options.cache);
        let (mut cache, mut logits_bv) = match shape {
            None => (None, reader.read_whole(&rows)?),
            Some(shape) => {
                let new = |row: &Row| self.options.max_new_tokens.min(self.longest() - row.tokens.len());
                let last = (longest + rows.iter().map(new).max().unwrap_or(0)) as i64;
                let (cache, logits_bv) = match read {
                    Some(read) => {
                        let mut cache = read.select(&vec![0; rows.len()], last)?;
                        let logits_bv = reader.read(&mut cache, &rows, prefix)?;
                        (cache, logits_bv)
                    }
                    None => read_distinct(&reader, shape, &rows, [longest as i64, last])?,
                };
                (Some(cache), logits_bv)
            }
        };
        loop {
            let broken_weight = || first_non_finite(self.model).ok().flatten();
            let tokens = self.options.sampling.sample(&logits_bv, &mut rows, broken_weight)?;
            let ended =
                rows.iter_mut().zip(&tokens).map(|(row, token)| self.push_token(row, *token, callback));
            let ended: Vec<Option<FinishReason>> = ended.collect();
            // From the last row on, so that a row that takes a finished row's index is not skipped.
            for (index, (ended, token)) in ended.into_iter().zip(tokens).enumerate().rev() {
                let Some(ended) = ended else { continue };
                let done = rows.swap_remove(index);
                let tokens = done.tokens[done.prompt..].to_vec();
                let end_token = (ended == FinishReason::EndToken).then_some(token);
                results[done.number] = Some(Generated { tokens, end_token, finish_reason: ended });
                if let Some(cache) = cache.as_mut().filter(|_| !rows.is_empty()) {
                    cache.swap_remove(index as i64)?;
                }
            }
            if rows.is_empty() {
                return Ok(());
            }
            logits_bv = match &mut cache {
                Some(cache) if cache.len() == limit => {
                    *cache = cache.emptied()?;
                    reader.read(cache, &rows, 0)?
                }
                Some(cache) => reader.read_last(cache, &rows)?,
                None => reader.read_whole(&rows)?,
            };
        }
    }

    /// Appends a row's new token, and returns why the row ends, if it does.
    fn push_token(
        &self,
        row: &mut Row,
        token: i64,
        callback: &mut dyn TokenCallback,
    ) -> Option<FinishReason> {
        if self.options.end_tokens.contains(&token) {
            return Some(FinishReason::EndToken);
        }
        row.tokens.push(token);
        let new = &row.tokens[row.prompt..];
        if callback.token(row.number, new) {
            Some(FinishReason::Callback)
        } else if new.len() >= self.options.max_new_tokens {
            Some(FinishReason::MaxNewTokens)
        } else if row.tokens.len() >= self.longest() {
            Some(FinishReason::MaxSequence)
        } else {
            None
        }
    }

    /// Returns the model's maximum sequence length.
    fn longest(&self) -> usize {
        usize::try_from(self.model.max_sequence()).unwrap_or(0)
    }

    /// Refuses a prompt that leaves no room for a token. `prompt` names it in the error.
    fn fits(&self, tokens: usize, prompt: &str) -> Result<()> {
        let longest = self.longest();
        if tokens >= longest {
            let reason = format!(
                "{prompt}{tokens} tokens leave no room for a new one in the model's {longest} positions; shorten the prompt, or give fewer examples"
            );
            return Err(Error::invalid(WHAT, reason));
        }
        Ok(())
    }
}

/// Reads the prompts, each distinct one once, and returns a cache of `last` tokens and the logits of each row's last token.
fn read_distinct(
    reader: &Reader<'_>,
    shape: CacheShape,
    rows: &[Row],
    [longest, last]: [i64; 2],
) -> Result<(KeyValueCache, Tensor)> {
    let (mut first, mut distinct, mut numbers) = (HashMap::new(), Vec::new(), Vec::new());
    for row in rows {
        let next = distinct.len() as i64;
        let number = *first.entry(row.tokens.as_slice()).or_insert(next);
        if number == next {
            distinct.push(Row::new(distinct.len(), 0, &row.tokens, &Sampling::Greedy)?);
        }
        numbers.push(number);
    }
    if distinct.len() == rows.len() {
        let mut cache = KeyValueCache::new(shape, rows.len() as i64, last)?;
        let logits_bv = reader.read(&mut cache, rows, 0)?;
        return Ok((cache, logits_bv));
    }
    let mut read = KeyValueCache::new(shape, distinct.len() as i64, longest)?;
    let logits_bv = reader.read(&mut read, &distinct, 0)?;
    let index = Tensor::f_from_slice(&numbers)?.f_to_device(logits_bv.device())?;
    Ok((read.select(&numbers, last)?, logits_bv.f_index_select(0, &index)?))
}

/// Refuses tokens outside the vocabulary.
fn check_tokens(model: &dyn LanguageModel, tokens: &[i64]) -> Result<()> {
    let vocabulary = model.vocabulary();
    match tokens.iter().find(|token| !(0..vocabulary).contains(*token)) {
        Some(&token) => Err(unknown_token(token, vocabulary)),
        None => Ok(()),
    }
}
