//! The tests of `training` that need only its public interface: one binary, a module per behaviour.

mod activations;
mod captured;
mod captured_cuda;
mod captured_memory;
mod checkpoints;
mod diagnose;
mod diagnose_cuda;
mod failing_observers;
mod fixtures_gpt2_like;
mod fixtures_optimizers;
mod frozen;
mod fuzz_manifest;
mod llama;
mod non_finite;
mod optimizers;
mod packed_equals_separate;
mod parts;
mod probe;
mod repeated_steps;
mod replan;
mod resume;
mod split;
mod stochastic_rounding;
mod trainer;
