//! The tests of `gguf`: one binary, a module per behaviour.

mod adapter;
mod blocks;
mod container;
mod fuzz_files;
mod fuzz_models;
mod gemma4;
mod memory;
mod mixtures;
mod model;
mod model_file;
mod ollama;
mod real_models;
mod refused;
mod tiny_model;
mod tokenizer;
mod value_heads;
