//! Tokenizers: text to token ids and back, through the `tokenizers` crate.
//!
//! A [`Tokenizer`] is read from a `tokenizer.json`, or trained ([`Tokenizer::train`]). Special tokens in a text are
//! recognised; none are added: the caller appends an end-of-text token if needed.
//!
//! ```
//! use dataloading::tokenizer::{Tokenizer, TrainConfig};
//!
//! let options = TrainConfig { vocabulary: 270, ..TrainConfig::default() };
//! let tokenizer = Tokenizer::train(["the cat and the hat", "the mat"].map(|t| Ok(t.to_owned())), &options)?;
//! let ids = tokenizer.encode("the rat")?;
//! assert_eq!(tokenizer.decode(&ids)?, "the rat");
//! assert_eq!(tokenizer.padding()?, 1);
//! # Ok::<(), dataloading::Error>(())
//! ```

mod added;
mod encoded;
mod pieces;
mod train;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use tokenizers::AddedToken;

use crate::error::{Error, Result};

pub use added::{AddedTokens, TokenToAdd};
pub use encoded::Encoded;
pub use pieces::LONGEST_PIECE;
pub use train::{END_OF_TEXT, PADDING, TrainConfig};

/// Names of padding tokens in use, the most common first.
const PADDING_NAMES: [&str; 7] =
    [PADDING, "<pad>", "[PAD]", "<|pad|>", "<PAD>", "<|pad_token|>", "<|finetune_right_pad_id|>"];

/// Names of end-of-text tokens in use, the most common first.
const END_NAMES: [&str; 7] =
    [END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "[SEP]", "<|im_end|>"];

/// A text before others, which shows how a tokenizer begins a text. Few vocabularies merge it with what follows.
const CARRIER: &str = "\n";

/// Sample texts that show what a tokenizer adds around a text: the first one that it has tokens for.
const SAMPLES: [&str; 4] = ["a", "the", "0", " "];

/// A tokenizer. It can be shared by threads, and clones share its vocabulary; encoding a batch uses all threads of the current rayon pool.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    vocabulary: usize,
    /// Whether the start of a text is marked in its tokens (SentencePiece's `▁`, a byte-level prefix space).
    marks_start: bool,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Truncation and padding in it are disabled: the loader does both.
    ///
    /// # Errors
    /// The file does not exist, or is not a tokenizer.
    pub fn from_file(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|cause| Error::Io { path: path.to_owned(), cause })?;
        Self::from_bytes(&bytes).map_err(|error| Error::File {
            path: path.to_owned(),
            reason: format!("{error}; use the tokenizer.json of the model"),
        })
    }

    /// Parses the content of a `tokenizer.json`.
    ///
    /// # Errors
    /// The content is not a tokenizer.
    pub fn from_bytes(json: &[u8]) -> Result<Self> {
        let inner = guarded(|| {
            // Compiled once, in `tokenizers`; its other constructors would be compiled again here.
            let mut inner = std::str::from_utf8(json)?.parse::<tokenizers::Tokenizer>()?;
            inner.with_truncation(None)?;
            inner.with_padding(None);
            Ok(Arc::new(inner))
        })?;
        let largest = inner.get_vocab(true).into_values().max();
        let mut tokenizer =
            Self { vocabulary: largest.map_or(0, |id| id as usize + 1), inner, marks_start: false };
        // A tokenizer that fails on a line break is one without these bytes, and marks nothing there.
        if let (Ok(alone), Ok(after)) = (tokenizer.encode("a"), tokenizer.encode(&format!("{CARRIER}a"))) {
            tokenizer.marks_start = !after.ends_with(&alone);
        }
        Ok(tokenizer)
    }

    /// Returns the tokenizer with these special tokens, each found as a whole in a text, that `tokenizer.json` has as ordinary ones. Texts
    /// without one are left out.
    #[must_use]
    pub fn with_special_tokens<'t>(mut self, texts: impl IntoIterator<Item = &'t str>) -> Self {
        let known = self.inner.get_added_tokens_decoder();
        let is_known = |text: &str| known.values().any(|token| token.content == text);
        let is_missing =
            |text: &&str| !text.is_empty() && self.inner.token_to_id(text).is_some() && !is_known(text);
        let missing: BTreeSet<&str> = texts.into_iter().filter(is_missing).collect();
        let missing: Vec<_> = missing.into_iter().map(|text| AddedToken::from(text, true)).collect();
        if !missing.is_empty() {
            Arc::make_mut(&mut self.inner).add_special_tokens(&missing);
        }
        self
    }

    /// Trains a byte-level BPE on texts; see [`train_json`](Self::train_json).
    ///
    /// # Errors
    /// Errors of [`train_json`](Self::train_json).
    pub fn train(texts: impl IntoIterator<Item = Result<String>>, options: &TrainConfig) -> Result<Self> {
        Self::from_bytes(Self::train_json(texts, options)?.as_bytes())
    }

    /// Trains a byte-level BPE on texts and returns the `tokenizer.json`. The same texts in any order give the same bytes,
    /// for any number of threads.
    ///
    /// # Errors
    /// The first error of `texts`; no text; a vocabulary too small for the 256 bytes and the special tokens.
    pub fn train_json(
        texts: impl IntoIterator<Item = Result<String>>,
        options: &TrainConfig,
    ) -> Result<String> {
        train::train(texts, options)
    }

    /// Returns the ids of a text.
    ///
    /// # Errors
    /// The tokenizer fails on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        guarded(|| Ok(self.inner.encode_fast(text, false)?.get_ids().to_vec()))
    }

    /// Returns the ids of a text that continues another one. They differ from those of [`encode`](Self::encode) for tokenizers that
    /// mark the start of a text: here it is not marked.
    ///
    /// # Errors
    /// The tokenizer fails on the text.
    pub fn encode_after(&self, text: &str) -> Result<Vec<u32>> {
        if !self.marks_start || text.is_empty() {
            return self.encode(text);
        }
        let (carrier, mut ids) = (self.encode(CARRIER)?, self.encode(&format!("{CARRIER}{text}"))?);
        if ids.starts_with(&carrier) {
            ids.drain(..carrier.len());
            return Ok(ids);
        }
        self.encode(text)
    }

    /// Returns the ids of a text as [`encode_long`](Self::encode_long) does, each with its part of the text.
    ///
    /// # Errors
    /// The tokenizer fails on the text.
    pub fn encode_with_spans(&self, text: &str) -> Result<Encoded> {
        if text.len() <= LONGEST_PIECE { self.encoded(text) } else { self.encode_long_with_spans(text) }
    }

    fn encoded(&self, text: &str) -> Result<Encoded> {
        guarded(|| {
            let encoding = self.inner.encode(text, false)?;
            Ok(Encoded::new(encoding.get_ids().to_vec(), encoding.get_offsets()))
        })
    }

    /// Returns what [`encode_after`](Self::encode_after) does, each id with its part of the text.
    fn encoded_after(&self, text: &str) -> Result<Encoded> {
        if self.marks_start && !text.is_empty() {
            let (carrier, mut encoded) = (self.encode(CARRIER)?, self.encoded(&format!("{CARRIER}{text}"))?);
            if encoded.ids.starts_with(&carrier) {
                encoded.cut_start(carrier.len(), CARRIER.len());
                return Ok(encoded);
            }
        }
        self.encoded(text)
    }

    /// Returns the ids of a text with the token that begins every text, if there is one; a text that begins with it gets no second.
    ///
    /// # Errors
    /// The tokenizer fails on the text.
    pub fn encode_with_begin(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text)?;
        if let Some(begin) = self.begin_of_text()?.filter(|begin| ids.first() != Some(begin)) {
            ids.insert(0, begin);
        }
        Ok(ids)
    }

    /// Returns the texts of the added tokens, such as `<|im_end|>`, special or not, without those of blanks alone, such as Gemma's line
    /// breaks: they mark nothing.
    pub fn added_tokens(&self) -> Vec<String> {
        let mut added: Vec<(u32, String)> = self
            .inner
            .get_added_tokens_decoder()
            .into_iter()
            .map(|(id, token)| (id, token.content))
            .filter(|(_, text)| !text.trim().is_empty())
            .collect();
        added.sort();
        added.into_iter().map(|(_, text)| text).collect()
    }

    /// Returns the ids of many texts, in order, on all threads of the current rayon pool.
    ///
    /// # Errors
    /// The tokenizer fails on a text.
    pub fn encode_batch<T: AsRef<str> + Sync>(&self, texts: &[T]) -> Result<Vec<Vec<u32>>> {
        texts.par_iter().map(|text| self.encode_long(text.as_ref())).collect()
    }

    /// Returns the text of ids, special tokens included.
    ///
    /// # Errors
    /// An id exceeds the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        if let Some(unknown) = ids.iter().find(|id| self.inner.id_to_token(**id).is_none()) {
            return Err(Error::Tokenizer(format!(
                "there is no token {unknown}: the vocabulary has {} ids; use the tokenizer that made the tokens",
                self.vocabulary
            )));
        }
        guarded(|| self.inner.decode(ids, false))
    }

    /// Returns the text of ids, special tokens included; ids without a token are skipped. A model may have more ids than its
    /// tokenizer has tokens, and generate one of them.
    ///
    /// # Errors
    /// The tokenizer fails on the ids.
    pub fn decode_known(&self, ids: &[u32]) -> Result<String> {
        guarded(|| self.inner.decode(ids, false))
    }

    /// Returns the special token that the tokenizer puts before every text, if any. A token that it puts after every text does not count.
    ///
    /// # Errors
    /// The tokenizer fails on a text.
    pub fn begin_of_text(&self) -> Result<Option<u32>> {
        for sample in SAMPLES {
            let alone = match self.encode(sample) {
                Ok(ids) if !ids.is_empty() => ids,
                _ => continue,
            };
            let added = guarded(|| Ok(self.inner.encode_fast(sample, true)?.get_ids().to_vec()))?;
            return Ok(added.first().copied().filter(|_| !added.starts_with(&alone)));
        }
        Ok(None)
    }

    /// Returns the vocabulary size: the largest id plus one, special tokens included.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Returns the id of a token by its exact name.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the name of an id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns it as a `tokenizer.json`.
    ///
    /// # Errors
    /// The tokenizer cannot be serialised.
    pub fn to_json(&self) -> Result<String> {
        guarded(|| self.inner.to_string(false))
    }

    /// Returns the id of the padding token.
    ///
    /// # Errors
    /// None of the common names is in the vocabulary.
    pub fn padding(&self) -> Result<u32> {
        self.named(
            "padding token",
            &PADDING_NAMES,
            "pass the id of the end-of-text token as padding id: padding has no label and is masked",
        )
    }

    /// Returns the id of the end-of-text token.
    ///
    /// # Errors
    /// None of the common names is in the vocabulary.
    pub fn end_of_text(&self) -> Result<u32> {
        self.named(
            "end-of-text token",
            &END_NAMES,
            "pass the id of the end token of the model, or append none",
        )
    }

    fn named(&self, what: &'static str, names: &[&str], remedy: &str) -> Result<u32> {
        names.iter().find_map(|name| self.id(name)).ok_or_else(|| Error::Config {
            what,
            reason: format!("the tokenizer has none of {}; {remedy}", names.join(" ")),
        })
    }
}

fn refused(cause: tokenizers::Error) -> Error {
    Error::Tokenizer(cause.to_string())
}

/// Calls the library, which panics if parts of a `tokenizer.json` are inconsistent.
fn guarded<T>(run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    // The caches of a tokenizer are behind their own locks, and a text that failed leaves nothing in them.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(refused),
        Err(_) => Err(Error::Tokenizer(
            "the tokenizer's parts contradict each other (the library `tokenizers` panicked); take the file from its \
             publisher again"
                .to_owned(),
        )),
    }
}
