//! Datasets, samplers, packing, and loaders that resume.
//!
//! Text of uneven length becomes batches with next to no padding, made by worker threads ahead of time, in a sequence
//! that depends on a seed alone. Where a loader stands in it is five integers; to resume replays nothing.
//!
//! ```
//! use std::sync::Arc;
//!
//! use dataloading::packing::PlanOptions;
//! use dataloading::text::{Corpus, Format};
//! use dataloading::token_store::{TokenizeOptions, WriterOptions, tokenize_to_store};
//! use dataloading::{Loader, LoaderOptions, PackedDataset, PackedOptions, Samples, TokenStore, Tokenizer, embedded};
//!
//! # let folder = tempfile::tempdir()?;
//! # let (text, tokens) = (folder.path().join("towns.txt"), folder.path().join("towns"));
//! std::fs::write(&text, "Arden is a town .\n\nBrill lies on a river , and is old .\n\nCorve is small .\n")?;
//!
//! // Once: text to token ids in a folder.
//! let tokenizer = Tokenizer::from_file(&embedded::folder()?.join(embedded::TOKENIZER))?;
//! let corpus = Corpus::new([text], Format::Paragraphs);
//! let ending = TokenizeOptions { end_of_text: Some(tokenizer.end_of_text()?), ..TokenizeOptions::default() };
//! let options = WriterOptions::new(tokenizer.vocabulary());
//! tokenize_to_store(&corpus, &tokenizer, &ending, &tokens, &options, |_| {})?;
//!
//! // Whenever it is trained on: documents packed into rows of 32.
//! let store = TokenStore::open(&tokens)?;
//! assert_eq!(store.len(), 3);
//! let plan = PlanOptions { capacity: 32, ..PlanOptions::default() };
//! let packed = PackedDataset::new(store, &PackedOptions { plan, ..PackedOptions::default() })?;
//! let mut loader = Loader::new(Arc::new(packed), &LoaderOptions { epochs: None, ..LoaderOptions::default() })?;
//!
//! let batch = loader.next().expect("there is no end")?;
//! assert_eq!(batch.tokens.size(), [1, 32]);
//! let packing = batch.packing.expect("rows are packed");
//! assert_eq!(packing.starts[0], 0);
//! assert_eq!(packing.starts.last(), Some(&32));
//! let state = serde_json::to_string(&loader.state())?;
//! assert!(state.starts_with(r#"{"seed":0,"epoch":"#), "{state}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The parts
//!
//! | module | subject |
//! |---|---|
//! | [`text`], [`tokenizer`] | records of text files with their places; text to ids |
//! | [`token_store`] | ids in mapped files: opened at once, larger than memory |
//! | [`samples`] | what is asked of any data set: lengths, and the tokens of a sample or a part of it |
//! | [`permutation`] | a shuffled order that is computed, not stored |
//! | [`random_batch_sampler`], [`balanced_batch_sampler`] | which samples make a batch |
//! | [`packing`] | which documents make a row: best-fit and first-fit decreasing over the whole data set, best-fit for streams |
//! | [`datasets`], [`batch_source`], [`mod@fingerprint`] | batches as a function of (seed, epoch, index) |
//! | [`batch`], [`host_batch`] | what a batch holds, and the memory that it is written to |
//! | [`loader`] | worker threads, order, ranks, resuming |
//! | [`length_statistics`] | lengths, and what padding them would waste, without reading a token |
//! | [`embedded`] | small data sets that make everything work offline |
//!
//! # The assignment's names
//!
//! | assignment | here |
//! |---|---|
//! | `BaseDataset`: all padded to one length | [`BaseDataset`] |
//! | `StandardDataset` and `collate_fn`: padded to the batch's longest | [`StandardDataset`], [`collate`] |
//! | `BalancedBatchSampler`: lengths of a batch differ by at most *k* | [`BalancedBatchSampler`], used by [`StandardDataset::balanced`] |
//! | `SequencedDataset`: the samples of a batch joined | [`SequencedDataset`], the one that reaches over the end cut or dropped ([`Overflow`]) |
//! | beyond it | [`PackedDataset`]: rows of one length, planned over the whole data set |
//!
//! # What a loader's state is
//!
//! [`LoaderState`] is the seed, the epoch, the position in it, the number of batches of that epoch, and a fingerprint of the data
//! and of how they are batched, by which other data and other options are recognised.
//!
//! Guaranteed, and tested:
//!
//! - the batches and their order are the same for any number of workers and any prefetch;
//! - a loader that resumes goes on as if it had not stopped, packed data sets included, in the time it takes to begin;
//! - ranks divide the sequence without gap or overlap, also when their number changes between runs; none gets a batch in a
//!   round in which another gets none;
//! - every sample is in exactly one batch of an epoch, but for what an option says is dropped: tokens are counted in the batch
//!   ([`Counts::dropped`]), samples of dropped batches by [`BatchSampler::dropped_samples`] and [`PackedDataset::dropped_rows`];
//! - no label crosses from a document into the next;
//! - a bad record or a panic in a worker is an error with epoch and batch, after which the loader ends; whoever drops a loader
//!   waits for no more than the batch at hand.
//!
//! # What differs elsewhere
//!
//! - *PyTorch's `DataLoader`* keeps a drawn list of sample numbers, and its workers are processes that send tensors through
//!   shared memory. It has no state to save: `StatefulDataLoader` of `torchdata` asks every worker for its own, and data
//!   sets that cannot give one are replayed. Here a batch is computed of its number, so that workers have no state.
//! - *TRL* packs best-fit decreasing within each batch of a `map`, and its default cuts off what is longer than a row.
//!   Here one plan covers all documents, and longer ones are divided unless asked otherwise.
//! - *seqpacker* assigns document by document; streams are packed with next-fit or harmonic classes. Here equal rows
//!   move as one group, so that planning hardly depends on the number of documents, and a stream takes the best of a bounded
//!   number that wait.

pub mod balanced_batch_sampler;
pub mod batch;
pub mod batch_source;
pub mod datasets;
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
pub mod samples;
pub mod text;
pub mod token_store;
pub mod tokenizer;

pub use balanced_batch_sampler::{BalancedBatchSampler, BalancedOptions, BatchSize};
pub use batch::{Batch, Counts, IGNORED, Packing};
pub use batch_source::BatchSource;
pub use datasets::{
    BaseDataset, Capacity, Overflow, PackedDataset, PackedOptions, SequencedDataset, StandardDataset, collate,
};
pub use error::{Error, Result};
pub use host_batch::HostBatch;
pub use length_order::Usable;
pub use length_statistics::LengthStatistics;
pub use loader::{Loader, LoaderOptions, LoaderState, LoaderStats};
pub use packing::{Plan, PlanOptions, StreamingBestFit};
pub use random_batch_sampler::{BatchOptions, BatchSampler, Incomplete, Order, RandomBatchSampler};
pub use samples::Samples;
pub use token_store::TokenStore;
pub use tokenizer::Tokenizer;
