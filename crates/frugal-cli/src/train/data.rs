//! The training and validation data of a configuration.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use frugal::Config;
use frugal::config::{DataConfig, nearest_name};
use frugal::dataloading::documents::{DocumentConfig, DocumentSource, Documents};
use frugal::dataloading::loader::LoaderConfig;
use frugal::dataloading::{BatchConfig, BatchSource, Order, Samples};
use frugal::training::batches::Synthetic;
use frugal::training::step_tracing::Loading;
use frugal::training::strategy::Strategy;
use frugal::training::{Batches, LoaderBatches};
use tch::Device;

use crate::common_flags::Common;
use crate::output::figures::counted;

/// Steps of a training by default.
const STEPS: u64 = 100;
/// The first file of a token store.
const FIRST_TOKENS: &str = "00000.tokens";
/// The names of data that are no path.
const SYNTHETIC: &str = "synthetic";
const EMBEDDED: &str = "embedded";
/// Tokens of the synthetic language.
const SYNTHETIC_VOCABULARY: usize = 128;

/// The opened data.
pub(super) struct Data {
    /// The documents and their tokenizer; `None` for the synthetic language.
    pub(super) documents: Option<Documents>,
    pub(super) train: Box<dyn Batches>,
    pub(super) validation: Option<Box<dyn Batches>>,
    pub(super) vocabulary: i64,
    pub(super) steps: u64,
    pub(super) loading: Loading,
}

impl Data {
    /// Opens the data of a configuration, in rows of `length` tokens.
    ///
    /// # Errors
    /// A missing or unreadable file; a vocabulary size that differs from the tokenizer's.
    pub(super) fn open(config: &Config, length: usize, device: Device) -> anyhow::Result<Self> {
        let source = Source { config, length };
        if config.data.source == SYNTHETIC { source.synthetic(device) } else { source.documents(device) }
    }

    /// Prints the data and the tokenizer.
    pub(super) fn print_summary(&self, common: &Common, config: &DataConfig) {
        let Some(documents) = &self.documents else {
            let vocabulary = self.vocabulary.unsigned_abs();
            let text =
                format!("data: {SYNTHETIC} (a generated language of {})", counted(vocabulary, "token"));
            return common.note(&text);
        };
        let is_embedded = config.source == EMBEDDED;
        let what = match (is_embedded, Path::new(&config.source)) {
            (true, _) => "the encyclopedia".to_owned(),
            (false, path) if path.is_dir() => "a token store".to_owned(),
            (false, path) if path.extension().is_some_and(|extension| extension == "jsonl") => {
                format!("the field `{}` of JSON lines", config.field)
            }
            (false, _) => "a document in each line".to_owned(),
        };
        let validation = config
            .validation
            .as_ref()
            .map_or_else(String::new, |path| format!("; validation: {}", path.display()));
        let tokens = counted(documents.train.tokens(), "token");
        common.note(&format!("data: {} ({what}; {tokens}){validation}", config.source));
        let tokenizer = match (&config.tokenizer, &documents.tokenizer) {
            (Some(path), _) => path.display().to_string(),
            (None, Some(_)) if is_embedded => "the embedded one".to_owned(),
            (None, Some(_)) => "trained on the data".to_owned(),
            (None, None) => "the one that made the token store".to_owned(),
        };
        common.note(&format!("tokenizer: {tokenizer}, {}", counted(documents.vocabulary as u64, "token")));
    }
}

/// The data of a configuration, and the length of a row.
struct Source<'a> {
    config: &'a Config,
    length: usize,
}

impl Source<'_> {
    fn synthetic(&self, device: Device) -> anyhow::Result<Data> {
        let Config { data, training, .. } = self.config;
        let seed = training.seed;
        let given = [
            ("--validation", data.validation.is_some()),
            ("--tokenizer", data.tokenizer.is_some()),
            ("--epochs", training.epochs.is_some()),
        ];
        if let Some((flag, _)) = given.iter().find(|(_, given)| *given) {
            bail!(
                "{flag} has no meaning for synthetic data, which has no files and no end; leave it out, or name --data"
            );
        }
        let vocabulary = data.vocabulary.map_or(SYNTHETIC_VOCABULARY, |size| size as usize) as i64;
        let batches = |seed, batches| Synthetic {
            seed,
            vocabulary,
            rows: training.batch,
            length: self.length,
            noise: 3,
            batches,
            device,
            position: 0,
        };
        Ok(Data {
            train: Box::new(batches(seed, None)),
            validation: Some(Box::new(batches(seed.wrapping_add(1), Some(4)))),
            vocabulary,
            steps: training.steps.unwrap_or(STEPS),
            loading: Loading { workers: 0, pinned: false },
            documents: None,
        })
    }

    fn documents(&self, device: Device) -> anyhow::Result<Data> {
        let Config { data, training, .. } = self.config;
        let seed = training.seed;
        // The path.
        let path = Path::new(&data.source);
        if data.source != EMBEDDED && !path.exists() {
            bail!(
                "--data {}: there is no such file or folder; expected synthetic, embedded, or a path",
                data.source
            );
        }
        if path.is_dir() && !path.join(FIRST_TOKENS).is_file() {
            bail!("{}", not_a_token_store(path)?);
        }
        let strategy: Strategy = data.strategy.parse().map_err(|error: frugal::training::Error| {
            let names = ["base", "standard", "balanced:64", "sequenced", "packed"];
            match nearest_name(&data.strategy, names.into_iter()) {
                Some(name) => anyhow::anyhow!("{error}; did you mean `{name}`?"),
                None => error.into(),
            }
        })?;
        // The tokens.
        let max_length = self.length;
        let documents = Documents::read(&DocumentConfig {
            train: match &*data.source {
                EMBEDDED => DocumentSource::Embedded,
                path => DocumentSource::Path(path.into()),
            },
            validation: data.validation.clone(),
            field: data.field.clone(),
            tokenizer: data.tokenizer.clone(),
            vocabulary: data.vocabulary.map(|size| size as usize),
            longest: max_length,
        })?;
        let tokens = documents.train.tokens();
        if max_length as u64 > tokens {
            bail!(
                "--length {max_length}: the training data has {tokens} tokens; give at most that many, or more data"
            );
        }
        // The loaders, and how many steps they have.
        let options = BatchConfig {
            batch_size: training.batch,
            max_length,
            pad: documents.pad,
            seed,
            ..Default::default()
        };
        let loader =
            LoaderConfig { workers: data.workers, device, epochs: training.epochs, ..Default::default() };
        let source = strategy.source(documents.train.clone() as Arc<dyn Samples>, &options)?;
        let steps = match (
            training.steps,
            training.epochs.map(|epochs| steps(&*source, epochs, training.accumulation)),
        ) {
            (Some(steps), Some(of_epochs)) => steps.min(of_epochs),
            (Some(steps), None) | (None, Some(steps)) => steps,
            (None, None) => STEPS,
        };
        let train = Box::new(LoaderBatches::new(source, &loader)?);
        let sequential = |store: Arc<dyn Samples>| -> anyhow::Result<Box<dyn Batches>> {
            let options = BatchConfig { order: Order::Sequential, ..options };
            let source = Strategy::Standard.source(store, &options)?;
            Ok(Box::new(LoaderBatches::new(source, &LoaderConfig { epochs: Some(1), ..loader })?))
        };
        let validation = documents.validation.clone().map(|store| sequential(store)).transpose()?;
        Ok(Data {
            train,
            validation,
            vocabulary: i64::try_from(documents.vocabulary)?,
            steps,
            // The loader's buffers are page-locked wherever the device is a CUDA device.
            loading: Loading { workers: data.workers, pinned: true },
            documents: Some(documents),
        })
    }
}

/// Explains why a folder is not a token store, with the files that it has.
fn not_a_token_store(folder: &Path) -> anyhow::Result<String> {
    let mut names = Vec::new();
    for entry in folder.read_dir().with_context(|| folder.display().to_string())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        names.push(name);
    }
    names.sort();
    let is_text =
        |name: &&String| [".txt", ".jsonl", ".txt.gz", ".jsonl.gz"].iter().any(|end| name.ends_with(end));
    let shown = folder.display();
    let problem =
        format!("--data {shown} is a folder, so it must be a token store, but it has no {FIRST_TOKENS}");
    Ok(match names.iter().find(is_text) {
        Some(file) => format!("{problem}; name one of its files, as --data {}", folder.join(file).display()),
        None if names.is_empty() => format!("{problem}: it is empty; give a text file or a .jsonl file"),
        None => {
            let (first, more) = (names[..names.len().min(3)].join(", "), names.len().saturating_sub(3));
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{problem}: it has {first}{more}; give a text file (.txt) or a .jsonl file")
        }
    })
}

/// Returns the steps of `epochs` epochs; accumulation crosses their ends.
fn steps(source: &dyn BatchSource, epochs: u64, accumulation: usize) -> u64 {
    let batches = (0..epochs).fold(0u64, |sum, epoch| sum.saturating_add(source.batches(epoch) as u64));
    batches.div_ceil(accumulation.max(1) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_data_says_what_was_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let message = || not_a_token_store(folder.path()).unwrap();
        assert!(message().contains("it has no 00000.tokens: it is empty; give a text file"), "{}", message());
        for name in ["d", "c", "a.md", "b.py"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        assert!(
            message().contains("it has no 00000.tokens: it has a.md, b.py, c and 1 more; give a text file"),
            "{}",
            message()
        );
        let file = folder.path().join("wiki.txt");
        std::fs::write(&file, "").unwrap();
        assert!(
            message().ends_with(&format!("; name one of its files, as --data {}", file.display())),
            "{}",
            message()
        );
    }
}
