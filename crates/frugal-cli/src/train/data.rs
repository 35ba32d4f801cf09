//! Opens the training and validation data of `frugal train`: documents in rows of tokens, or a synthetic language.

use std::sync::Arc;

use anyhow::bail;
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

use super::data_source::DataSource;

/// Default number of steps, without `training.steps` and `training.epochs`.
const STEPS: u64 = 100;
/// Default vocabulary size of the synthetic language.
const SYNTHETIC_VOCABULARY: usize = 128;

/// The opened data.
pub(super) struct Data {
    /// The documents and their tokenizer; `None` for the synthetic language.
    pub(super) documents: Option<Documents>,
    /// Training batches, without end unless epochs are set.
    pub(super) train: Box<dyn Batches>,
    /// Validation batches, which end; `None` without validation data.
    pub(super) validation: Option<Box<dyn Batches>>,
    /// The vocabulary size of the model.
    pub(super) vocabulary: i64,
    /// Optimizer steps.
    pub(super) steps: u64,
    /// How batches are loaded, for diagnoses.
    pub(super) loading: Loading,
}

impl Data {
    /// Opens the data of a configuration, in rows of `length` tokens.
    ///
    /// # Errors
    /// A missing or unreadable file; a vocabulary size that differs from the tokenizer's.
    pub(super) fn open(config: &Config, length: usize, device: Device) -> anyhow::Result<Self> {
        let request = Request { config, length };
        match DataSource::find(&config.data.source)?.documents() {
            None => request.open_synthetic(device),
            Some(documents) => request.open_documents(documents, device),
        }
    }

    /// Prints the data and the tokenizer.
    ///
    /// # Errors
    /// As [`Data::open`].
    pub(super) fn print_summary(&self, common: &Common, config: &DataConfig) -> anyhow::Result<()> {
        let source = DataSource::find(&config.source)?;
        let vocabulary = counted(self.vocabulary.unsigned_abs(), "token");
        let Some(documents) = &self.documents else {
            common.note(&format!("data: {source} (a generated language of {vocabulary})"));
            return Ok(());
        };
        let kind = match source {
            DataSource::Synthetic => "a generated language".to_owned(),
            DataSource::Embedded => "the encyclopedia".to_owned(),
            DataSource::TokenStore(_) => "a token store".to_owned(),
            DataSource::JsonLines(_) => format!("the field `{}` of JSON lines", config.field),
            DataSource::Text(_) => "a document in each line".to_owned(),
        };
        let validation = config
            .validation
            .as_ref()
            .map_or_else(String::new, |path| format!("; validation: {}", path.display()));
        let tokens = counted(documents.train.tokens(), "token");
        common.note(&format!("data: {source} ({kind}; {tokens}){validation}"));
        let tokenizer = match (&config.tokenizer, &documents.tokenizer) {
            (Some(path), _) => path.display().to_string(),
            (None, Some(_)) if source == DataSource::Embedded => "the embedded one".to_owned(),
            (None, Some(_)) => "trained on the data".to_owned(),
            (None, None) => "the one that made the token store".to_owned(),
        };
        common.note(&format!("tokenizer: {tokenizer}, {vocabulary}"));
        Ok(())
    }
}

/// A configuration, and the tokens of a row.
struct Request<'a> {
    config: &'a Config,
    length: usize,
}

impl Request<'_> {
    /// Opens the synthetic language, with another seed for validation.
    fn open_synthetic(&self, device: Device) -> anyhow::Result<Data> {
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

    /// Tokenizes documents, and opens batches of them by the strategy of the configuration.
    fn open_documents(&self, train: DocumentSource, device: Device) -> anyhow::Result<Data> {
        let Config { data, training, .. } = self.config;
        let seed = training.seed;
        let strategy: Strategy = data.strategy.parse().map_err(|error: frugal::training::Error| {
            let names = ["base", "standard", "balanced:64", "sequenced", "packed"];
            match nearest_name(&data.strategy, names.into_iter()) {
                Some(name) => anyhow::anyhow!("{error}; did you mean `{name}`?"),
                None => error.into(),
            }
        })?;
        // Read and tokenize the documents; they must fill a row.
        let max_length = self.length;
        let documents = Documents::read(&DocumentConfig {
            train,
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
        // Open the training batches. With `steps` and `epochs` the training ends at whichever comes first.
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
            (Some(steps), Some(steps_of_epochs)) => steps.min(steps_of_epochs),
            (Some(steps), None) | (None, Some(steps)) => steps,
            (None, None) => STEPS,
        };
        let train = Box::new(LoaderBatches::new(source, &loader)?);
        // Validation reads its documents once, in order.
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

/// Returns the optimizer steps of `epochs` epochs. An accumulation that an epoch's end interrupts continues in the next epoch.
fn steps(source: &dyn BatchSource, epochs: u64, accumulation: usize) -> u64 {
    let batches = (0..epochs).fold(0u64, |sum, epoch| sum.saturating_add(source.batches(epoch) as u64));
    batches.div_ceil(accumulation.max(1) as u64)
}
