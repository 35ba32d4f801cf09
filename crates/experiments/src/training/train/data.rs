//! What a training learns from and is measured on, from the flags.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::bail;
use clap::Args;
use dataloading::loader::LoaderOptions;
use dataloading::{BatchOptions, BatchSource, Order, Samples};
use report::Case;
use tch::Device;
use training::batches::Synthetic;
use training::documents::{Documents, Origin, Request};
use training::strategy::Strategy;
use training::tracing::Loading;
use training::{Batches, LoaderBatches};

/// Steps of a training of which nothing else is said.
const STEPS: u64 = 100;
/// Tokens of the made-up language.
const SYNTHETIC_VOCABULARY: usize = 128;

#[derive(Args)]
pub(super) struct DataArgs {
    /// What to learn from: `synthetic` (a made-up language), `embedded` (the encyclopedia in data/), or a PATH: a text file
    /// in WikiText's format, a .jsonl file, the folder of a token store
    #[arg(long, default_value = "synthetic", value_name = "synthetic|embedded|PATH")]
    data: String,
    /// What to measure on, like --data [default: the embedded validation set for embedded data]
    #[arg(long, value_name = "PATH")]
    validation: Option<PathBuf>,
    /// The field of a .jsonl file's objects that holds the text
    #[arg(long, default_value = "text")]
    field: String,
    /// A tokenizer.json [default: the embedded one for embedded data, else one that is trained on the spot]
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Number of tokens that the model knows [default: the tokenizer's; 128 of the made-up language; at most 4096 of a
    /// tokenizer that is trained on the spot]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    vocabulary: Option<u32>,
    /// How batches are made: base, standard, balanced:K, sequenced, packed
    #[arg(long, default_value = "packed")]
    strategy: Strategy,
    /// Documents of a batch; packed batches have as many tokens on average
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Tokens of a row, and of the longest document
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(2..))]
    length: u32,
    /// Threads that make batches; 0 makes them in the training thread
    #[arg(long, default_value_t = 1)]
    workers: usize,
    /// How often the data is gone through [default: as often as the steps need]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: Option<u64>,
    /// Steps of the whole training [default: 100, or as many as the epochs have]
    #[arg(long)]
    steps: Option<u64>,
}

/// All that comes from the data.
pub(super) struct Data {
    pub(super) train: Box<dyn Batches>,
    pub(super) validation: Option<Box<dyn Batches>>,
    pub(super) vocabulary: i64,
    pub(super) steps: u64,
    pub(super) loading: Loading,
    /// Holds the files.
    _documents: Option<Documents>,
}

impl DataArgs {
    pub(super) fn length(&self) -> i64 {
        self.length.into()
    }

    /// What records say of the data.
    pub(super) fn describe(&self, case: Case) -> Case {
        let case = case.with("data", self.data.as_str());
        let case = match &*self.data {
            "synthetic" => case,
            _ => case.with("strategy", self.strategy.to_string()),
        };
        case.with("batch", self.batch).with("length", self.length)
    }

    pub(super) fn open(&self, seed: u64, accumulation: usize, device: Device) -> anyhow::Result<Data> {
        if self.data == "synthetic" {
            self.synthetic(seed, device)
        } else {
            self.documents(seed, accumulation, device)
        }
    }

    fn synthetic(&self, seed: u64, device: Device) -> anyhow::Result<Data> {
        let given = [
            ("--validation", self.validation.is_some()),
            ("--tokenizer", self.tokenizer.is_some()),
            ("--epochs", self.epochs.is_some()),
        ];
        if let Some((flag, _)) = given.iter().find(|(_, given)| *given) {
            bail!(
                "{flag} has no meaning for the made-up language, which has no files and no end; leave it out, or name --data"
            );
        }
        let vocabulary = self.vocabulary.map_or(SYNTHETIC_VOCABULARY, |size| size as usize) as i64;
        let batches = |seed, batches| Synthetic {
            seed,
            vocabulary,
            rows: self.batch,
            length: self.length as usize,
            noise: 3,
            batches,
            device,
            position: 0,
        };
        Ok(Data {
            train: Box::new(batches(seed, None)),
            validation: Some(Box::new(batches(seed.wrapping_add(1), Some(4)))),
            vocabulary,
            steps: self.steps.unwrap_or(STEPS),
            loading: Loading { workers: 0, pinned: false },
            _documents: None,
        })
    }

    fn documents(&self, seed: u64, accumulation: usize, device: Device) -> anyhow::Result<Data> {
        if self.data != "embedded" && !Path::new(&self.data).exists() {
            bail!(
                "--data {}: there is no such file or folder; expected synthetic, embedded, or a path",
                self.data
            );
        }
        let max_length = self.length as usize;
        let documents = Documents::read(&Request {
            train: match &*self.data {
                "embedded" => Origin::Embedded,
                path => Origin::Path(path.into()),
            },
            validation: self.validation.clone(),
            field: self.field.clone(),
            tokenizer: self.tokenizer.clone(),
            vocabulary: self.vocabulary.map(|size| size as usize),
            longest: max_length,
        })?;
        let options = BatchOptions {
            batch_size: self.batch,
            max_length,
            pad: documents.pad,
            seed,
            ..Default::default()
        };
        let loader =
            LoaderOptions { workers: self.workers, device, epochs: self.epochs, ..Default::default() };
        let source = self.strategy.source(documents.train.clone() as Arc<dyn Samples>, &options)?;
        let steps = match (self.steps, self.epochs.map(|epochs| steps(&*source, epochs, accumulation))) {
            (Some(steps), Some(of_epochs)) => steps.min(of_epochs),
            (Some(steps), None) | (None, Some(steps)) => steps,
            (None, None) => STEPS,
        };
        let train = Box::new(LoaderBatches::new(source, &loader)?);
        let measure = |store: Arc<dyn Samples>| -> anyhow::Result<Box<dyn Batches>> {
            let options = BatchOptions { order: Order::Sequential, ..options };
            let source = Strategy::Standard.source(store, &options)?;
            Ok(Box::new(LoaderBatches::new(source, &LoaderOptions { epochs: Some(1), ..loader })?))
        };
        let validation = documents.validation.clone().map(|store| measure(store)).transpose()?;
        Ok(Data {
            train,
            validation,
            vocabulary: i64::try_from(documents.vocabulary)?,
            steps,
            // The loader's buffers are page-locked wherever the device is a CUDA device.
            loading: Loading { workers: self.workers, pinned: true },
            _documents: Some(documents),
        })
    }
}

/// Steps of so many epochs: micro-batches are taken across their ends.
fn steps(source: &dyn BatchSource, epochs: u64, accumulation: usize) -> u64 {
    let batches = (0..epochs).fold(0u64, |sum, epoch| sum.saturating_add(source.batches(epoch) as u64));
    batches.div_ceil(accumulation.max(1) as u64)
}
