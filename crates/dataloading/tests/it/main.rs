//! The tests of `dataloading` that need only its public interface: one binary, a module per behaviour.

mod balanced_batch_sampler;
mod datasets;
mod example;
mod fuzz_files;
mod loader;
mod loader_cuda;
mod loader_epochs;
mod packing;
mod strategies;
mod text;
mod token_store;
mod tokenize;
