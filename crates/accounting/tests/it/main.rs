//! The tests of `accounting` that need only its public interface: one binary, a module per behaviour.

mod activation_plan;
mod bad_input;
mod candidates;
mod candidates_over_ranks;
mod experts;
mod fixtures;
mod offload;
mod properties;
mod textbook;
