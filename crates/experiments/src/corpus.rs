//! The training data of the experiments: texts as token stores, with their tokenizer.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use dataloading::text::{Corpus as Files, Format};
use dataloading::token_store::{TokenStore, Writer, WriterOptions};
use dataloading::tokenizer::{Tokenizer, TrainOptions};
use tempfile::TempDir;
use training::Error;

/// Samples for training and for validation.
#[derive(Debug)]
pub struct Corpus {
    /// Its name in records.
    pub name: String,
    /// Lines to train on, tokenized.
    pub train: Arc<TokenStore>,
    /// The lines themselves.
    pub texts: Vec<String>,
    /// Lines to measure on.
    pub validation: Arc<TokenStore>,
    /// What tokenized both.
    pub tokenizer: Tokenizer,
    /// Holds the stores; goes with the corpus.
    _folder: TempDir,
}

/// How much of a corpus is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of a line that are kept.
    pub max_length: usize,
    /// Tokens to train on; no further line is read beyond them.
    pub train_tokens: usize,
    /// Tokens to measure on.
    pub validation_tokens: usize,
}

impl Corpus {
    /// The embedded encyclopedia, with the embedded tokenizer.
    ///
    /// # Errors
    /// A checkout without `data/`.
    pub fn embedded(limits: &Limits) -> Result<Self> {
        let folder = dataloading::embedded::folder()?;
        let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json"))?;
        let file = |name: &str| folder.join("corpus").join(name);
        Self::new("embedded", &file("train.txt"), &file("valid.txt"), tokenizer, limits)
    }

    /// Two files in WikiText's format. The tokenizer is a `tokenizer.json`, or a byte-level BPE of `vocabulary` tokens that
    /// is trained on the first file on the spot.
    ///
    /// # Errors
    /// Files that are missing, empty, or not UTF-8; a file that is no tokenizer.
    pub fn of_files(
        name: &str,
        train: &Path,
        validation: &Path,
        tokenizer: Option<&Path>,
        vocabulary: usize,
        limits: &Limits,
    ) -> Result<Self> {
        let tokenizer = match tokenizer {
            Some(path) => Tokenizer::from_file(path)?,
            None => {
                let records = Files::new([train.to_owned()], Format::Lines).records()?;
                let options = TrainOptions { vocabulary, ..TrainOptions::default() };
                Tokenizer::train(records.map(|record| Ok(record?.text)), &options)?
            }
        };
        Self::new(name, train, validation, tokenizer, limits)
    }

    fn new(
        name: &str,
        train: &Path,
        validation: &Path,
        tokenizer: Tokenizer,
        limits: &Limits,
    ) -> Result<Self> {
        let folder = TempDir::new().map_err(|cause| Error::Io { path: std::env::temp_dir(), cause })?;
        let store = |file: &Path, name: &str, tokens| {
            store(file, &folder.path().join(name), &tokenizer, limits.max_length, tokens)
        };
        let (texts, train) = store(train, "train", limits.train_tokens)?;
        let (_, validation) = store(validation, "validation", limits.validation_tokens)?;
        Ok(Self {
            name: name.to_owned(),
            train: Arc::new(train),
            texts,
            validation: Arc::new(validation),
            tokenizer,
            _folder: folder,
        })
    }

    /// Number of tokens that the model has to know.
    pub fn vocabulary(&self) -> i64 {
        self.tokenizer.vocabulary() as i64
    }

    /// The token that pads: the tokenizer's own, or 0. It is never a label.
    pub fn pad(&self) -> u32 {
        self.tokenizer.padding().unwrap_or(0)
    }
}

/// Lines of a file, cut to `max_length` tokens, until there are `tokens`.
fn store(
    file: &Path,
    path: &Path,
    tokenizer: &Tokenizer,
    max_length: usize,
    tokens: usize,
) -> Result<(Vec<String>, TokenStore)> {
    /// Lines that are encoded in parallel.
    const CHUNK: usize = 256;
    let mut records = Files::new([file.to_owned()], Format::Lines).records()?;
    let mut writer = Writer::create(path, &WriterOptions::new(tokenizer.vocabulary()))?;
    let (mut texts, mut written) = (Vec::new(), 0);
    while written < tokens {
        let chunk: Vec<String> =
            records.by_ref().take(CHUNK).map(|record| Ok(record?.text)).collect::<Result<_>>()?;
        if chunk.is_empty() {
            break;
        }
        for (text, mut ids) in chunk.iter().zip(tokenizer.encode_batch(&chunk)?) {
            ids.truncate(max_length);
            if written >= tokens || ids.is_empty() {
                continue;
            }
            written += ids.len();
            writer.push(&ids)?;
            texts.push(text.clone());
        }
    }
    Ok((texts, writer.finish()?))
}
