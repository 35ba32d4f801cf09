//! New tokens from a model, one after the other, for many prompts at once.
//!
//! ```text
//! read the prompts → the logits of each row's last token → a token for each row → read those tokens → …
//! ```
//!
//! A model with a [`CacheShape`] reads each token once: attention finds keys and values of the past in a [`KeyValueCache`]. Others
//! read their rows whole for each token. Rows are padded on the left, so that all end together, and padding is seen by nobody;
//! a row that has ended leaves the batch, so that what is left runs faster. What all prompts begin with, such as the
//! examples of a few-shot prompt, can be read once for all ([`Generator::with_prefix`]).
//!
//! Reading one token multiplies every weight by one vector, so its time is the weights' bytes over the memory's bandwidth.
//! On the CPU those products are [`runtime::matmul::matvec`], which reads weights of bf16 as bf16: half of fp32's time.
//!
//! What is generated depends on the prompt and its number, and on nothing else in the batch, up to the rounding of products
//! of another height.
//!
//! ```
//! use models::generation::{GenerateOptions, generate};
//! use models::{Llama, LlamaConfig};
//! use tch::{Device, Kind};
//!
//! let model = Llama::new(&LlamaConfig::qwen2(100, 16, 40, 2, 4), (Kind::Float, Device::Cpu))?;
//! let options = GenerateOptions { max_new_tokens: 5, ..GenerateOptions::default() };
//! let generated = generate(&model, &[vec![3, 1, 4], vec![1, 5, 9, 2, 6]], &options, &mut ())?;
//! assert_eq!(generated[1].tokens.len(), 5);
//! # Ok::<(), models::Error>(())
//! ```

mod batch;
mod key_value_cache;
mod sampling;
mod stored_weights;

use std::sync::Arc;

use runtime::precision;
use tch::Device;

use batch::{Reader, Row};
pub use key_value_cache::{CacheShape, Extension, KeyValueCache, Receipt};
pub use sampling::Sampling;
use stored_weights::StoredWeights;

use crate::error::{Error, Result};
use crate::module::{LanguageModel, tensors};

const WHAT: &str = "generation";

/// How to generate.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// New tokens of a row at most.
    pub max_new_tokens: usize,
    /// Which token is taken.
    pub sampling: Sampling,
    /// Tokens that end a row. They are not part of what was generated.
    pub end_tokens: Vec<i64>,
    /// Whether to use the model's cache where it has one. Without, each token costs the whole row again: the oracle of the cache.
    pub cache: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { max_new_tokens: 256, sampling: Sampling::Greedy, end_tokens: Vec::new(), cache: true }
    }
}

/// Sees tokens as they come: streams them, counts them, ends rows by what they say.
pub trait Watch {
    /// The row of prompt `row` has a new token, the last of `tokens` (all of its new ones). Returning true ends the row.
    fn token(&mut self, row: usize, tokens: &[i64]) -> bool;
}

/// Sees nothing, ends nothing.
impl Watch for () {
    fn token(&mut self, _: usize, _: &[i64]) -> bool {
        false
    }
}

/// Any function of the row's number and its new tokens.
impl<F: FnMut(usize, &[i64]) -> bool> Watch for F {
    fn token(&mut self, row: usize, tokens: &[i64]) -> bool {
        self(row, tokens)
    }
}

/// Why a row ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// One of [`GenerateOptions::end_tokens`] came.
    EndToken,
    /// The [`Watch`] said so.
    Watch,
    /// It has [`GenerateOptions::max_new_tokens`].
    Length,
    /// The model takes no longer rows.
    Context,
}

/// What was generated for a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// The new tokens, without an end token.
    pub tokens: Vec<i64>,
    /// Why there are no more.
    pub ended: Ended,
}

/// Generates for all prompts in one batch; see [`Generator`].
///
/// # Errors
/// Those of [`Generator::new`] and [`Generator::generate`].
pub fn generate(
    model: &dyn LanguageModel,
    prompts: &[Vec<i64>],
    options: &GenerateOptions,
    watch: &mut dyn Watch,
) -> Result<Vec<Generated>> {
    Generator::new(model, options)?.generate(prompts, watch)
}

/// A model, how to generate with it, and what all prompts begin with.
#[derive(Debug)]
pub struct Generator<'m> {
    model: &'m dyn LanguageModel,
    options: GenerateOptions,
    device: Device,
    prefix: Vec<i64>,
    read: Option<KeyValueCache>,
}

impl<'m> Generator<'m> {
    /// Without a common beginning.
    ///
    /// # Errors
    /// No new token to generate; options of sampling outside their ranges; an end token outside the vocabulary.
    pub fn new(model: &'m dyn LanguageModel, options: &GenerateOptions) -> Result<Self> {
        if options.max_new_tokens == 0 {
            let reason = "`max_new_tokens` is 0; expected at least 1".to_owned();
            return Err(Error::Config { what: WHAT, reason });
        }
        options.sampling.check()?;
        known(model, &options.end_tokens)?;
        let device = tensors(model).first().map_or(Device::Cpu, |named| named.tensor.device());
        Ok(Self { model, options: options.clone(), device, prefix: Vec::new(), read: None })
    }

    /// Reads once what every prompt begins with. Prompts are still given whole.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, a prefix as long as the model's longest row.
    pub fn with_prefix(mut self, prefix: &[i64]) -> Result<Self> {
        known(self.model, prefix)?;
        self.fits(prefix.len())?;
        (self.prefix, self.read) = (Vec::new(), None);
        let Some(shape) = self.model.cache_shape().filter(|_| self.options.cache && !prefix.is_empty())
        else {
            return Ok(self);
        };
        let _no_grad = tch::no_grad_guard();
        let mut cache = KeyValueCache::new(shape, 1, prefix.len() as i64)?;
        let row = Row::new(0, prefix, &self.options.sampling)?;
        let _logits = Reader::new(self.model, self.device).read(&mut cache, &[row], 0)?;
        (self.prefix, self.read) = (prefix.to_vec(), Some(cache));
        Ok(self)
    }

    /// Generates for all prompts in one batch: tokens and their ends, in the prompts' order.
    ///
    /// `watch` sees each new token; the row's number is the prompt's.
    ///
    /// # Errors
    /// A prompt that is empty, does not begin with the prefix and go on, has tokens outside the vocabulary, or is as long as the
    /// model's longest row; logits that are not numbers; too little memory for the cache.
    pub fn generate(&self, prompts: &[Vec<i64>], watch: &mut dyn Watch) -> Result<Vec<Generated>> {
        for (number, prompt) in prompts.iter().enumerate() {
            let of = |error: Error| match error {
                Error::Config { what, reason } => {
                    Error::Config { what, reason: format!("prompt {number}: {reason}") }
                }
                other => other,
            };
            if prompt.len() <= self.prefix.len() || !prompt.starts_with(&self.prefix) {
                let reason = match self.prefix.len() {
                    0 => format!("prompt {number} is empty; expected a token at least"),
                    prefix => {
                        format!("prompt {number} does not begin with the prefix of {prefix} tokens and go on")
                    }
                };
                return Err(Error::Config { what: WHAT, reason });
            }
            known(self.model, prompt)?;
            self.fits(prompt.len()).map_err(of)?;
        }
        let _no_grad = tch::no_grad_guard();
        let current = precision::current();
        let _policy = precision::enter(Some(current.unwrap_or_else(|| Arc::new(StoredWeights))));
        let rows = prompts.iter().enumerate();
        let rows: Vec<Row> = rows
            .map(|(number, prompt)| Row::new(number, prompt, &self.options.sampling))
            .collect::<Result<_>>()?;
        let mut results: Vec<Option<Generated>> = prompts.iter().map(|_| None).collect();
        if !rows.is_empty() {
            self.run(rows, &mut results, watch)?;
        }
        Ok(results.into_iter().flatten().collect())
    }

    fn run(
        &self,
        mut rows: Vec<Row>,
        results: &mut [Option<Generated>],
        watch: &mut dyn Watch,
    ) -> Result<()> {
        let prefix = self.prefix.len();
        let longest = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(0);
        let reader = Reader::new(self.model, self.device);
        let shape = self.model.cache_shape().filter(|_| self.options.cache);
        let mut cache = match shape {
            Some(shape) => {
                let new = |row: &Row| self.options.max_new_tokens.min(self.longest() - row.tokens.len());
                let last = (longest + rows.iter().map(new).max().unwrap_or(0)) as i64;
                let number = rows.len() as i64;
                Some(match &self.read {
                    Some(read) => read.repeat(number, last)?,
                    None => KeyValueCache::new(shape, number, last)?,
                })
            }
            None => None,
        };
        let mut logits_bv = match &mut cache {
            Some(cache) => reader.read(cache, &rows, prefix)?,
            None => reader.read_whole(&rows)?,
        };
        loop {
            let tokens = self.options.sampling.pick(&logits_bv, &mut rows)?;
            let ended = rows.iter_mut().zip(tokens).map(|(row, token)| self.place(row, token, watch));
            let ended: Vec<Option<Ended>> = ended.collect();
            // From the end on, so that a row that takes another's place goes on.
            for (index, ended) in ended.into_iter().enumerate().rev() {
                let Some(ended) = ended else { continue };
                let done = rows.swap_remove(index);
                let tokens = done.tokens[done.prompt..].to_vec();
                results[done.number] = Some(Generated { tokens, ended });
                if let Some(cache) = cache.as_mut().filter(|_| !rows.is_empty()) {
                    cache.swap_remove(index as i64)?;
                }
            }
            if rows.is_empty() {
                return Ok(());
            }
            logits_bv = match &mut cache {
                Some(cache) => reader.read_last(cache, &rows)?,
                None => reader.read_whole(&rows)?,
            };
        }
    }

    /// Gives a row its new token, and says whether that ends it.
    fn place(&self, row: &mut Row, token: i64, watch: &mut dyn Watch) -> Option<Ended> {
        if self.options.end_tokens.contains(&token) {
            return Some(Ended::EndToken);
        }
        row.tokens.push(token);
        let new = &row.tokens[row.prompt..];
        if watch.token(row.number, new) {
            Some(Ended::Watch)
        } else if new.len() >= self.options.max_new_tokens {
            Some(Ended::Length)
        } else if row.tokens.len() >= self.longest() {
            Some(Ended::Context)
        } else {
            None
        }
    }

    /// The longest row that the model takes.
    fn longest(&self) -> usize {
        usize::try_from(self.model.max_sequence()).unwrap_or(0)
    }

    fn fits(&self, tokens: usize) -> Result<()> {
        let longest = self.longest();
        if tokens >= longest {
            let reason = format!(
                "{tokens} tokens leave no room for a new one in the model's rows of {longest}; shorten the prompt, or give fewer examples"
            );
            return Err(Error::Config { what: WHAT, reason });
        }
        Ok(())
    }
}

/// Refuses tokens that the model does not know.
fn known(model: &dyn LanguageModel, tokens: &[i64]) -> Result<()> {
    let vocabulary = model.vocabulary();
    match tokens.iter().find(|token| !(0..vocabulary).contains(*token)) {
        Some(&token) => Err(Error::Token { token, vocabulary }),
        None => Ok(()),
    }
}
