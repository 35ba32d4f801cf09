//! The tests of `frugal` that need only its public interface: one binary, a module per behaviour.

mod blocks_file;
mod captured;
mod cast_cache;
mod config;
mod conversation_tokens;
mod examples;
mod exchanged_memory;
mod families;
mod gsm8k_data;
mod gsm8k_evaluate;
mod gsm8k_graders;
mod gsm8k_records;
mod gsm8k_split;
mod gsm8k_stop_texts;
mod gsm8k_tokenize;
mod joint_projections;
mod layers_over_ranks;
mod mixtures;
mod pairs;
mod predicted_peaks;
mod predicted_peaks_over_ranks;
mod quantized_base;
mod real_models;
mod recipe;
mod refused_allocations;
mod rows;
mod sequence_over_ranks;
mod shared_keys_over_ranks;
mod stage_three;
mod techniques;
mod techniques_over_ranks;
mod triples;
#[cfg(target_os = "linux")]
mod unused_fields;
