//! Tokenized documents to learn from, whatever they come in: WikiText, JSON lines, a token store, the embedded corpus.
//!
//! Text becomes a token store in a temporary folder, which goes with the [`Documents`]: each line, or JSON object, is a
//! document with an end-of-text token, where the tokenizer has one. A document longer than asked becomes several.
//!
//! The vocabulary is the tokenizer's (a store's own, where there is no text). One that was asked for and differs is an error,
//! before anything is trained.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dataloading::text::{Corpus, Format};
use dataloading::token_store::{TokenStore, TokenizeOptions, WriterOptions, tokenize_to_store};
use dataloading::tokenizer::{Tokenizer, TrainOptions};
use tempfile::TempDir;

use crate::error::{Error, Result};

/// Tokens of a tokenizer that is trained on the spot, where nothing else is asked for.
pub const TRAINED_VOCABULARY: usize = 4096;

/// Where documents come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The embedded encyclopedia, with its tokenizer and its validation set.
    Embedded,
    /// A text file in WikiText's format, a `.jsonl` file, or the folder of a token store.
    Path(PathBuf),
}

/// What is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What to learn from.
    pub train: Origin,
    /// What to measure on, in any of the forms of [`Origin::Path`].
    pub validation: Option<PathBuf>,
    /// The field of a JSON object that holds its text.
    pub field: String,
    /// A `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
    /// The vocabulary that the model should have; of a tokenizer that is trained on the spot, the most that it may have.
    pub vocabulary: Option<usize>,
    /// Tokens of a document that is not cut in two.
    pub longest: usize,
}

/// Documents, and what a model has to know of them.
#[derive(Debug)]
pub struct Documents {
    /// To learn from.
    pub train: Arc<TokenStore>,
    /// To measure on.
    pub validation: Option<Arc<TokenStore>>,
    /// Number of tokens that the model has to know.
    pub vocabulary: usize,
    /// The token that pads. It is never a label.
    pub pad: u32,
    /// What tokenized them, where that is known.
    pub tokenizer: Option<Tokenizer>,
    /// Holds the stores that were made of text.
    _folder: TempDir,
}

/// A file, and how to read it.
#[derive(Debug)]
enum Held {
    Text(Corpus),
    Store(PathBuf),
}

impl Held {
    fn at(path: &Path, field: &str) -> Self {
        if path.is_dir() {
            return Self::Store(path.to_owned());
        }
        let format = match path.extension().is_some_and(|extension| extension == "jsonl") {
            true => Format::JsonLines(field.to_owned()),
            false => Format::Lines,
        };
        Self::Text(Corpus::new([path.to_owned()], format))
    }
}

impl Documents {
    /// Reads and tokenizes.
    ///
    /// # Errors
    /// Files that are missing, empty, or something else; a vocabulary that is not the tokenizer's or the store's; text to
    /// measure on beside a store without its tokenizer.
    pub fn read(request: &Request) -> Result<Self> {
        let (train, validation, tokenizer) = request.files()?;
        let tokenizer = request.tokenizer(&train, tokenizer.as_deref())?;
        let folder = TempDir::new().map_err(|cause| Error::Io { path: std::env::temp_dir(), cause })?;
        let open =
            |held: &Held, name: &str| request.open(held, tokenizer.as_ref(), &folder.path().join(name));
        let train = open(&train, "train")?;
        let validation = validation.map(|held| open(&held, "validation")).transpose()?;
        let vocabulary = train.vocabulary();
        if let Some(validation) = validation.as_ref().filter(|store| store.vocabulary() != vocabulary) {
            let reason = format!(
                "what to learn from ({}) has {vocabulary} tokens and what to measure on ({}) {}; tokenize both with one tokenizer",
                train.path().display(),
                validation.path().display(),
                validation.vocabulary()
            );
            return Err(Error::config("vocabulary", reason));
        }
        let known = tokenizer.as_ref();
        let pad = known.and_then(|tokenizer| tokenizer.padding().or_else(|_| tokenizer.end_of_text()).ok());
        Ok(Self {
            train: Arc::new(train),
            validation: validation.map(Arc::new),
            vocabulary,
            pad: pad.unwrap_or(0),
            tokenizer,
            _folder: folder,
        })
    }
}

impl Request {
    /// What to learn from, what to measure on, and the tokenizer's file.
    fn files(&self) -> Result<(Held, Option<Held>, Option<PathBuf>)> {
        let validation = self.validation.as_deref().map(|path| Held::at(path, &self.field));
        Ok(match &self.train {
            Origin::Path(path) => (Held::at(path, &self.field), validation, self.tokenizer.clone()),
            Origin::Embedded => {
                let folder = dataloading::embedded::folder()?;
                let file = |name: &str| Held::at(&folder.join("corpus").join(name), &self.field);
                let tokenizer = self.tokenizer.clone().unwrap_or_else(|| folder.join("tokenizer.json"));
                (file("train.txt"), Some(validation.unwrap_or_else(|| file("valid.txt"))), Some(tokenizer))
            }
        })
    }

    /// Reads or trains the tokenizer; there is none for a store that came without.
    fn tokenizer(&self, train: &Held, path: Option<&Path>) -> Result<Option<Tokenizer>> {
        match (path, train) {
            (Some(path), _) => {
                let tokenizer = Tokenizer::from_file(path)?;
                self.check(tokenizer.vocabulary(), "the tokenizer", path)?;
                Ok(Some(tokenizer))
            }
            (None, Held::Store(_)) => Ok(None),
            (None, Held::Text(corpus)) => {
                let vocabulary = self.vocabulary.unwrap_or(TRAINED_VOCABULARY);
                let options = TrainOptions { vocabulary, ..TrainOptions::default() };
                let texts = corpus.records()?.map(|record| Ok(record?.text));
                Ok(Some(Tokenizer::train(texts, &options)?))
            }
        }
    }

    fn open(&self, held: &Held, tokenizer: Option<&Tokenizer>, into: &Path) -> Result<TokenStore> {
        match (held, tokenizer) {
            (Held::Store(path), tokenizer) => {
                let store = TokenStore::open(path)?;
                match tokenizer.map(Tokenizer::vocabulary).filter(|&known| known != store.vocabulary()) {
                    None => self.check(store.vocabulary(), "the token store", path)?,
                    Some(known) => {
                        let (path, own) = (path.display(), store.vocabulary());
                        let reason = format!(
                            "the tokenizer has {known} tokens and the token store {path} {own}; give the tokenizer that the store was made with"
                        );
                        return Err(Error::config("vocabulary", reason));
                    }
                }
                Ok(store)
            }
            (Held::Text(corpus), Some(tokenizer)) => {
                let options = TokenizeOptions {
                    end_of_text: tokenizer.end_of_text().ok(),
                    longest: Some(self.longest),
                    ..TokenizeOptions::default()
                };
                let writer = WriterOptions::new(tokenizer.vocabulary());
                let (store, _) = tokenize_to_store(corpus, tokenizer, &options, into, &writer, |_| ())?;
                Ok(store)
            }
            (Held::Text(corpus), None) => {
                let file = corpus.files.first().map_or_else(String::new, |path| path.display().to_string());
                let reason = format!(
                    "{file} is text beside a token store, and nothing says how to tokenize it; give the store's tokenizer.json"
                );
                Err(Error::config("tokenizer", reason))
            }
        }
    }

    /// That the vocabulary which was asked for is the one there is.
    fn check(&self, found: usize, of: &str, path: &Path) -> Result<()> {
        match self.vocabulary.filter(|&wanted| wanted != found) {
            None => Ok(()),
            Some(wanted) => {
                let path = path.display();
                let reason = format!(
                    "{wanted} tokens were asked for, and {of} {path} has {found}; leave the vocabulary out, or ask for {found}"
                );
                Err(Error::config("vocabulary", reason))
            }
        }
    }
}
