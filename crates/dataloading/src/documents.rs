//! Tokenized training documents from WikiText, JSON lines, a token store or the embedded corpus.
//!
//! Text is tokenized into a temporary token store, which the [`Documents`] own: each line, or JSON object, is a document with
//! an end-of-text token, if the tokenizer has one. A longer document is split.
//!
//! The vocabulary is the tokenizer's (or the store's, without text). Asking for a different one is an error before the training
//! starts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::text::{Corpus, Format};
use crate::token_store::{TokenStore, TokenizeConfig, WriterConfig, tokenize_to_store};
use crate::tokenizer::{Tokenizer, TrainConfig};
use tempfile::TempDir;

use crate::error::{Error, Result};

/// Vocabulary of a tokenizer that is trained on the data, by default.
pub const TRAINED_VOCABULARY: usize = 4096;

/// The source of documents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DocumentSource {
    /// The embedded encyclopedia, with its tokenizer and validation set.
    Embedded,
    /// A text file in WikiText's format, a `.jsonl` file, or the folder of a token store.
    Path(PathBuf),
}

/// Which documents to read, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocumentConfig {
    /// Training data.
    pub train: DocumentSource,
    /// Validation data, in any form of [`DocumentSource::Path`].
    pub validation: Option<PathBuf>,
    /// The JSON field that holds the text.
    pub field: String,
    /// A `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
    /// The model's vocabulary; for a tokenizer that is trained on the data, the maximum.
    pub vocabulary: Option<usize>,
    /// Maximum tokens of a document; longer ones are split.
    pub longest: usize,
}

/// Tokenized documents, and their vocabulary.
#[derive(Debug)]
pub struct Documents {
    /// Training data.
    pub train: Arc<TokenStore>,
    /// Validation data.
    pub validation: Option<Arc<TokenStore>>,
    /// Size of the vocabulary.
    pub vocabulary: usize,
    /// The padding token, which is never a label.
    pub pad: u32,
    /// The tokenizer, if known.
    pub tokenizer: Option<Tokenizer>,
    /// Holds the stores made from text.
    _folder: TempDir,
}

/// A file and its format.
#[derive(Debug)]
enum InputFile {
    Text(Corpus),
    Store(PathBuf),
}

impl InputFile {
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
    /// Reads and tokenizes the documents.
    ///
    /// # Errors
    /// Missing, empty or invalid files; a vocabulary that differs from the tokenizer's or the store's; validation text with a
    /// store that has no tokenizer.
    pub fn read(request: &DocumentConfig) -> Result<Self> {
        let (train, validation, tokenizer) = request.files()?;
        let tokenizer = request.tokenizer(&train, tokenizer.as_deref())?;
        let folder = TempDir::new().map_err(|cause| Error::Io { path: std::env::temp_dir(), cause })?;
        let open =
            |file: &InputFile, name: &str| request.open(file, tokenizer.as_ref(), &folder.path().join(name));
        let train = open(&train, "train")?;
        let validation = validation.map(|file| open(&file, "validation")).transpose()?;
        let vocabulary = train.vocabulary();
        if let Some(validation) = validation.as_ref().filter(|store| store.vocabulary() != vocabulary) {
            let reason = format!(
                "the training data ({}) has a vocabulary of {vocabulary} and the validation data ({}) of {}; tokenize both with one tokenizer",
                train.path().display(),
                validation.path().display(),
                validation.vocabulary()
            );
            return Err(Error::Config { what: "vocabulary", reason });
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

impl DocumentConfig {
    /// Training data, validation data, and the tokenizer's file.
    fn files(&self) -> Result<(InputFile, Option<InputFile>, Option<PathBuf>)> {
        let validation = self.validation.as_deref().map(|path| InputFile::at(path, &self.field));
        Ok(match &self.train {
            DocumentSource::Path(path) => {
                (InputFile::at(path, &self.field), validation, self.tokenizer.clone())
            }
            DocumentSource::Embedded => {
                let folder = crate::embedded::folder()?;
                let file = |name: &str| InputFile::at(&folder.join("corpus").join(name), &self.field);
                let tokenizer = self.tokenizer.clone().unwrap_or_else(|| folder.join("tokenizer.json"));
                (file("train.txt"), Some(validation.unwrap_or_else(|| file("valid.txt"))), Some(tokenizer))
            }
        })
    }

    /// Reads or trains the tokenizer; `None` for a store without one.
    fn tokenizer(&self, train: &InputFile, path: Option<&Path>) -> Result<Option<Tokenizer>> {
        match (path, train) {
            (Some(path), _) => {
                let tokenizer = Tokenizer::from_file(path)?;
                self.check(tokenizer.vocabulary(), "the tokenizer", path)?;
                Ok(Some(tokenizer))
            }
            (None, InputFile::Store(_)) => Ok(None),
            (None, InputFile::Text(corpus)) => {
                let vocabulary = self.vocabulary.unwrap_or(TRAINED_VOCABULARY);
                let options = TrainConfig { vocabulary, ..TrainConfig::default() };
                let texts = corpus.records()?.map(|record| Ok(record?.text));
                Ok(Some(Tokenizer::train(texts, &options)?))
            }
        }
    }

    fn open(&self, file: &InputFile, tokenizer: Option<&Tokenizer>, into: &Path) -> Result<TokenStore> {
        match (file, tokenizer) {
            (InputFile::Store(path), tokenizer) => {
                let store = TokenStore::open(path)?;
                match tokenizer.map(Tokenizer::vocabulary).filter(|&known| known != store.vocabulary()) {
                    None => self.check(store.vocabulary(), "the token store", path)?,
                    Some(known) => {
                        let (path, store_vocabulary) = (path.display(), store.vocabulary());
                        let reason = format!(
                            "the tokenizer has {known} tokens and the token store {path} has {store_vocabulary}; give the tokenizer that the store was made with"
                        );
                        return Err(Error::Config { what: "vocabulary", reason });
                    }
                }
                Ok(store)
            }
            (InputFile::Text(corpus), Some(tokenizer)) => {
                let options = TokenizeConfig {
                    end_of_text: tokenizer.end_of_text().ok(),
                    longest: Some(self.longest),
                    ..TokenizeConfig::default()
                };
                let writer = WriterConfig::new(tokenizer.vocabulary());
                let (store, _) = tokenize_to_store(corpus, tokenizer, &options, into, &writer, |_| ())?;
                Ok(store)
            }
            (InputFile::Text(corpus), None) => {
                let file = corpus.files.first().map_or_else(String::new, |path| path.display().to_string());
                let reason = format!(
                    "{file} is text, but the training data is a token store without a tokenizer; give the store's tokenizer.json"
                );
                Err(Error::Config { what: "tokenizer", reason })
            }
        }
    }

    /// Checks that a requested vocabulary is the actual one.
    fn check(&self, actual: usize, what: &str, path: &Path) -> Result<()> {
        match self.vocabulary.filter(|&wanted| wanted != actual) {
            None => Ok(()),
            Some(wanted) => {
                let path = path.display();
                let reason = format!(
                    "{wanted} was requested, but {what} {path} has {actual}; leave the vocabulary out, or request {actual}"
                );
                Err(Error::Config { what: "vocabulary", reason })
            }
        }
    }
}
