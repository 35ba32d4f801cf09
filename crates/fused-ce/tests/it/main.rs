//! The tests of `fused-ce` that need only its public interface: one binary, a module per behaviour.

mod bad_input;
mod bad_options;
mod chunks;
mod cuda;
mod empty_means;
mod example;
mod example_weights;
mod gradcheck;
mod low_precision;
mod memory;
mod model;
mod naive;
mod options;
mod precision_policy;
mod quantized_weight;
mod replaced_rows;
mod semantics;
mod teacher;
mod threads;
mod token_gradients;
mod vocabulary_parallel;
mod vocabulary_parallel_processes;
