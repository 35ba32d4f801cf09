//! The training data of the experiments: texts as token stores, with their tokenizer.

mod source;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use dataloading::Samples;
use dataloading::records;
use dataloading::text::{Corpus as Files, Format};
use dataloading::token_store::{TokenStore, Writer, WriterConfig};
use dataloading::tokenizer::{Tokenizer, TrainConfig};
use report::cli::Scale;
use report::{Case, Metric};
use serde_json::Value;
use tempfile::TempDir;
use training::Error;

use crate::driver::Bench;

pub use source::{Data, Network, Texts, VARIABLE};

/// Samples for training and for validation.
#[derive(Debug)]
pub struct Corpus {
    /// Its name in reports.
    pub name: String,
    /// Lines to train on, tokenized.
    pub train: Arc<TokenStore>,
    /// The lines themselves.
    pub texts: Vec<String>,
    /// Lines to measure on.
    pub validation: Arc<TokenStore>,
    /// The tokenizer of both.
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
    /// Tokens of a tokenizer that is trained on the texts; the embedded texts have their own.
    pub vocabulary: usize,
}

/// The flag that names the texts.
#[derive(Args, Clone, Debug)]
pub struct DataArgs {
    /// Texts: auto, wikitext-103, wikitext-2, embedded, or a folder with train.txt and valid.txt. The named ones are looked for in
    /// the folder that FRUGAL_DATA names, then on the Hugging Face hub; auto takes the first on this machine
    #[arg(long, default_value_t)]
    pub data: Data,
}

impl Corpus {
    /// The embedded encyclopedia, with the embedded tokenizer.
    ///
    /// # Errors
    /// A checkout without `data/`.
    pub fn embedded(limits: &Limits) -> Result<Self> {
        Self::open(&Data::Embedded, limits)?.map_err(anyhow::Error::msg)
    }

    /// A data set, or why it cannot be had. The tokenizer is the embedded one for the embedded texts, else a byte-level BPE that is
    /// trained on the first lines to train on.
    ///
    /// # Errors
    /// Files that are empty or not UTF-8.
    pub fn open(data: &Data, limits: &Limits) -> Result<Result<Self, String>> {
        /// Lines that a tokenizer is trained on.
        const LINES: usize = 100_000;
        let texts = match data.texts(Network::IfMissing)? {
            Ok(texts) => texts,
            Err(why) => return Ok(Err(why)),
        };
        let tokenizer = if *data == Data::Embedded {
            Tokenizer::from_file(&dataloading::embedded::folder()?.join(dataloading::embedded::TOKENIZER))?
        } else {
            let options = TrainConfig { vocabulary: limits.vocabulary, ..TrainConfig::default() };
            Tokenizer::train(lines(&texts.train)?.take(LINES), &options)?
        };
        let folder = TempDir::new().map_err(|cause| Error::io(std::env::temp_dir(), cause))?;
        let store = |files: &[PathBuf], name: &str, tokens| {
            let path = folder.path().join(name);
            let mut writer = Writer::create(&path, &WriterConfig::new(tokenizer.vocabulary()))?;
            let texts = fill(&mut writer, files, &tokenizer, limits.max_length, tokens)?;
            Ok::<_, anyhow::Error>((texts, writer.finish()?))
        };
        let reading = || format!("reading {}", texts.name);
        let (train_texts, train) = store(&texts.train, "train", limits.train_tokens).with_context(reading)?;
        let (_, validation) =
            store(&texts.validation, "validation", limits.validation_tokens).with_context(reading)?;
        Ok(Ok(Self {
            name: texts.name,
            train: Arc::new(train),
            texts: train_texts,
            validation: Arc::new(validation),
            tokenizer,
            _folder: folder,
        }))
    }

    /// Number of tokens that the model has to know.
    pub fn vocabulary(&self) -> i64 {
        self.tokenizer.vocabulary() as i64
    }

    /// The token that pads: the tokenizer's own, or 0. It is never a label.
    pub fn pad(&self) -> u32 {
        self.tokenizer.padding().unwrap_or(0)
    }

    /// The validation loss in nats of a model that knows how often each token occurs in the training lines, and nothing else. Each
    /// token counts once more than it occurs, so that none is impossible.
    ///
    /// # Errors
    /// A line that cannot be read.
    pub fn unigram_loss(&self) -> Result<f64> {
        let mut counts = vec![1u64; self.tokenizer.vocabulary()];
        let mut ids = Vec::new();
        for line in 0..self.train.len() {
            ids.clear();
            self.train.read(line, &mut ids)?;
            ids.iter().for_each(|&id| counts[id as usize] += 1);
        }
        let total = (counts.iter().sum::<u64>() as f64).ln();
        let (mut sum, mut targets) = (0.0, 0u64);
        for line in 0..self.validation.len() {
            ids.clear();
            self.validation.read(line, &mut ids)?;
            // The first token of a line is never a target.
            for &id in ids.iter().skip(1) {
                sum += total - (counts[id as usize] as f64).ln();
                targets += 1;
            }
        }
        Ok(sum / targets.max(1) as f64)
    }

    /// Records what is trained on, and a row for each data set that is larger and not on this machine, with the reason.
    ///
    /// # Errors
    /// Errors of the corpus and of the records.
    pub(crate) fn put(&self, bench: &mut Bench) -> Result<()> {
        let case = |name: &str, used: &str| Case::new().with("data", name).with("used", used);
        let metrics = vec![
            Metric::exact("lines", "count", self.train.len() as f64),
            Metric::exact("train_tokens", "token", self.train.tokens() as f64),
            Metric::exact("validation_tokens", "token", self.validation.tokens() as f64),
            Metric::exact("vocabulary", "token", self.vocabulary() as f64),
            Metric::exact("unigram_loss", "nat", self.unigram_loss()?),
        ];
        bench.put(&case(&self.name, "yes"), metrics)?;
        for data in Data::NAMED {
            if self.name.starts_with(&data.title()) {
                break;
            }
            let why = match data.texts(Network::Never)? {
                Ok(_) if bench.scale == Scale::Smoke => "the scale smoke takes the embedded texts".to_owned(),
                Ok(_) => format!("not chosen at this scale; `--data {data}` of the program takes it"),
                Err(why) => format!(
                    "{why}; with it there, or with `--data {data}` of the program, which fetches it, this experiment trains on it"
                ),
            };
            let missing = Metric::not_measured("train_tokens", "token", &why);
            bench.put(&case(&data.title(), "no"), vec![missing])?;
        }
        Ok(())
    }
}

/// The column of the texts in Parquet files.
const TEXT: &str = "text";

/// The lines of files that are not blank, as the assignment reads them.
fn lines(files: &[PathBuf]) -> dataloading::Result<Box<dyn Iterator<Item = dataloading::Result<String>>>> {
    if files.iter().all(|file| file.extension().is_some_and(|extension| extension == "parquet")) {
        let texts = records::read_all(files)?.map(|record| {
            let record = record?;
            match record.fields.get(TEXT) {
                Some(Value::String(text)) => Ok(text.trim().to_owned()),
                Some(Value::Null) => Ok(String::new()),
                _ => Err(record
                    .location
                    .error(format!("no text in the column `{TEXT}`; give files of WikiText"))),
            }
        });
        return Ok(Box::new(texts.filter(|line| !line.as_ref().is_ok_and(String::is_empty))));
    }
    let records = Files::new(files.iter().cloned(), Format::Lines).records()?;
    Ok(Box::new(records.map(|record| Ok(record?.text))))
}

/// Writes lines, cut to `max_length` tokens, until there are `tokens`, and returns them.
fn fill(
    writer: &mut Writer,
    files: &[PathBuf],
    tokenizer: &Tokenizer,
    max_length: usize,
    tokens: usize,
) -> Result<Vec<String>> {
    /// Lines that are encoded in parallel.
    const CHUNK: usize = 256;
    let mut lines = lines(files)?;
    let (mut texts, mut written) = (Vec::new(), 0);
    while written < tokens {
        let chunk: Vec<String> = lines.by_ref().take(CHUNK).collect::<dataloading::Result<_>>()?;
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
    Ok(texts)
}
