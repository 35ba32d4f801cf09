//! The tests of `models` that need only its public interface: one binary, a module per behaviour.

mod attention;
mod delta_net;
mod families_config;
mod fixtures;
mod fixtures_families;
mod fixtures_generation;
mod fixtures_llama;
mod functional_call;
mod fuzz_files;
mod gemma4;
mod generation;
mod gpt_oss;
mod hub;
#[cfg(feature = "hub")]
mod hub_server;
mod hugging_face;
mod hugging_face_memory;
mod llama;
mod llama_memory;
mod llama_shapes;
mod mixture;
mod nf4;
mod parts;
mod rope_spellings;
mod router_loss;
mod sharded;
#[cfg(feature = "gguf")]
mod stored_blocks;
mod tensors_file;
mod token_rows;
mod windowed_attention;
mod writers;
