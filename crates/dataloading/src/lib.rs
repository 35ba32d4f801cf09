//! Data sets, tokenization, samplers, packing, and a loader that resumes.
//!
//! Text of varying length becomes batches with almost no padding. Worker threads make them ahead of time, in a sequence that
//! depends on a seed only: batch `i` of epoch `e` is a pure function of (seed, `e`, `i`), and every shuffle is a permutation
//! π of `0..n` that is computed, not stored ([`permutation`]). So the state of a loader is five integers, and resuming replays
//! nothing.
//!
//! ```
//! use std::sync::Arc;
//!
//! use dataloading::packing::PackingConfig;
//! use dataloading::text::{Corpus, Format};
//! use dataloading::token_store::{TokenizeConfig, WriterConfig, tokenize_to_store};
//! use dataloading::{Loader, LoaderConfig, PackedDataset, PackedConfig, Samples, TokenStore, Tokenizer, embedded};
//!
//! # let folder = tempfile::tempdir()?;
//! # let (text, tokens) = (folder.path().join("towns.txt"), folder.path().join("towns"));
//! std::fs::write(&text, "Arden is a town .\n\nBrill lies on a river , and is old .\n\nCorve is small .\n")?;
//!
//! // Once: text to token ids in a folder of memory-mapped files.
//! let tokenizer = Tokenizer::from_file(&embedded::folder()?.join(embedded::TOKENIZER))?;
//! let corpus = Corpus::new([text], Format::Paragraphs);
//! let ending = TokenizeConfig { end_of_text: Some(tokenizer.end_of_text()?), ..TokenizeConfig::default() };
//! let options = WriterConfig::new(tokenizer.vocabulary());
//! tokenize_to_store(&corpus, &tokenizer, &ending, &tokens, &options, |_| {})?;
//!
//! // For each training run: documents packed into rows of 32 tokens.
//! let store = TokenStore::open(&tokens)?;
//! assert_eq!(store.len(), 3);
//! let plan = PackingConfig { capacity: 32, ..PackingConfig::default() };
//! let packed = PackedDataset::new(store, &PackedConfig { plan, ..PackedConfig::default() })?;
//! let mut loader = Loader::new(Arc::new(packed), &LoaderConfig { epochs: None, ..LoaderConfig::default() })?;
//!
//! let batch = loader.next().expect("the epochs are unlimited")?;
//! assert_eq!(batch.tokens.size(), [1, 32]);
//! let packing = batch.packing.expect("rows are packed");
//! assert_eq!(packing.starts[0], 0);
//! assert_eq!(packing.starts.last(), Some(&32));
//! let state = serde_json::to_string(&loader.state())?;
//! assert!(state.starts_with(r#"{"seed":0,"epoch":"#), "{state}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `examples/packed_batches.rs` does the same for a corpus file, and resumes.
//!
//! # Modules
//!
//! | module | subject |
//! |---|---|
//! | [`records`] | rows of JSON, CSV and Parquet files, and the formats of fine-tuning data |
//! | [`chat`] | chat templates, and which tokens of a conversation are learned |
//! | [`text`], [`tokenizer`] | records of text files with their file and line; text to ids |
//! | [`token_store`] | ids in memory-mapped files, larger than memory |
//! | [`samples`] | the interface of data sets: lengths, and the tokens of a sample or a part of it |
//! | [`permutation`] | a random order that is computed, not stored |
//! | [`random_batch_sampler`], [`balanced_batch_sampler`] | which samples make a batch |
//! | [`packing`] | which documents make a row: best-fit and first-fit decreasing over the whole data set, best-fit for streams |
//! | [`datasets`], [`batch_source`], [`mod@fingerprint`] | batches as a function of (seed, epoch, index) |
//! | [`batch`], [`host_batch`] | the contents of a batch, and its host memory |
//! | [`loader`] | worker threads, order, ranks, resuming |
//! | [`length_statistics`] | lengths, and the padding that each strategy would waste, without reading a token |
//! | [`documents`] | tokenized documents from text, JSON lines or a token store |
//! | [`embedded`] | small data sets for offline tests and experiments |
//!
//! Readers, templates and tokenizers are the feature `readers`, on by default. Without it this crate has batches, samplers, packing and
//! the loader, over any [`Samples`], and compiles none of the packages that files need.
//!
//! # Strategies
//!
//! | strategy | data set |
//! |---|---|
//! | pad every sample to one length | [`BaseDataset`] |
//! | pad to the longest sample of the batch (a `collate_fn`) | [`StandardDataset`], [`collate`] |
//! | batches of samples whose lengths differ by at most *k* | [`BalancedBatchSampler`] in [`StandardDataset::balanced`] |
//! | concatenate the samples of a batch, truncate or drop at a capacity ([`Overflow`]) | [`SequencedDataset`] |
//! | pack documents into rows of one length, planned over the whole data set | [`PackedDataset`] |
//!
//! # Resuming
//!
//! [`LoaderState`] is the seed, the epoch, the position in it, the number of batches of that epoch, and a fingerprint that
//! detects other data or options.
//!
//! Guaranteed, and tested:
//!
//! - the batches and their order are the same for any number of workers and any prefetch depth;
//! - a resumed loader continues the sequence exactly, packed data sets included, and starts as fast as a new one;
//! - ranks divide the sequence without gap or overlap, even if their number changes between runs; in every round either all
//!   ranks get a batch or none;
//! - every sample is in exactly one batch of an epoch, except for what an option drops: tokens are counted in the batch
//!   ([`Counts::dropped`]), samples of dropped batches by [`BatchSampler::dropped_samples`] and [`PackedDataset::dropped_rows`];
//! - no label crosses from one document into the next.
//!
//! # Errors
//!
//! An invalid record names its file and line or its sample. An error or a panic in a worker is returned with epoch and batch,
//! after which the loader ends; dropping a loader waits for at most one batch per worker. A state of other data or options is
//! refused ([`enum@Error`]).
//!
//! # Compared with PyTorch and others
//!
//! - *PyTorch's `DataLoader`* stores a drawn list of sample indices, and its workers are processes that send tensors through
//!   shared memory. It has no state to save; `StatefulDataLoader` of `torchdata` saves the state of every worker, and replays
//!   data sets that have none. Here a batch is computed from its index, so workers have no state.
//! - *TRL* packs best-fit decreasing within each batch of a `map`, and truncates documents longer than a row by default. Here
//!   one plan covers all documents, and longer ones are split by default.
//! - *seqpacker* assigns document by document, and packs streams with next-fit or harmonic classes. Here equal rows move as one
//!   group, so the planning time hardly depends on the number of documents, and a stream takes the best of a bounded number of
//!   waiting documents.

pub mod balanced_batch_sampler;
pub mod batch;
pub mod batch_source;
#[cfg(feature = "readers")]
pub mod chat;
pub mod datasets;
#[cfg(feature = "readers")]
pub mod documents;
#[cfg(feature = "readers")]
pub mod embedded;
pub mod error;
pub mod fingerprint;
pub mod host_batch;
mod length_order;
pub mod length_statistics;
pub mod loader;
pub mod packing;
pub mod permutation;
pub mod random_batch_sampler;
#[cfg(feature = "readers")]
pub mod records;
pub mod samples;
#[cfg(feature = "readers")]
pub mod text;
#[cfg(feature = "readers")]
pub mod token_store;
#[cfg(feature = "readers")]
pub mod tokenizer;

pub use balanced_batch_sampler::{BalancedBatchSampler, BalancedConfig, BatchSize};
pub use batch::{Batch, Counts, ExampleWeights, IGNORE_INDEX, Packing, Ratings, Sequences, TopK};
pub use batch_source::BatchSource;
pub use datasets::{
    BaseDataset, Capacity, Overflow, PackedConfig, PackedDataset, SequencedDataset, StandardDataset, collate,
};
pub use error::{Error, Result};
pub use host_batch::HostBatch;
pub use length_order::UsableSamples;
pub use length_statistics::LengthStatistics;
pub use loader::{Loader, LoaderConfig, LoaderState, LoaderStats};
pub use packing::{PackingConfig, PackingPlan, StreamingBestFit};
pub use random_batch_sampler::{BatchConfig, BatchSampler, Incomplete, Order, RandomBatchSampler};
pub use samples::Samples;
#[cfg(feature = "readers")]
pub use token_store::TokenStore;
#[cfg(feature = "readers")]
pub use tokenizer::Tokenizer;
