//! Datasets, samplers, packing, and loaders that resume.

pub mod balanced_batch_sampler;
pub mod batch;
pub mod batch_source;
pub mod bench;
pub mod datasets;
pub mod embedded;
pub mod error;
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
pub use loader::{Loader, LoaderOptions, LoaderState, LoaderStats};
pub use random_batch_sampler::{BatchOptions, BatchSampler, Incomplete, Order, RandomBatchSampler};
pub use samples::Samples;
pub use token_store::TokenStore;
pub use tokenizer::Tokenizer;
