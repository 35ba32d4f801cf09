//! The tests of `dataloading` that need only its public interface: one binary, a module per behaviour.

mod balanced_batch_sampler;
mod chat_masks;
mod chat_templates;
mod datasets;
mod example;
mod fuzz_files;
mod fuzz_records;
mod jinja_snippets;
mod loader;
mod loader_cuda;
mod loader_epochs;
mod long_texts;
mod packing;
mod records;
mod splits;
mod strategies;
mod text;
mod token_store;
mod tokenize;
