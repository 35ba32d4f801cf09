//! The tests of `training` that need only its public interface: one binary, a module per behaviour.

mod activations;
mod activations_memory;
mod checkpoints;
mod diagnose;
mod diagnose_cuda;
mod fixtures_gpt2_like;
mod fixtures_optimizers;
mod frozen;
mod fuzz_manifest;
mod kill;
mod llama;
mod optimizers;
mod packed_equals_separate;
mod parts;
mod planted;
mod resume;
mod train_command;
mod trainer;

/// The program, where this was built, or where the variable says on another machine.
fn program() -> std::ffi::OsString {
    std::env::var_os("CARGO_BIN_EXE_training").unwrap_or_else(|| env!("CARGO_BIN_EXE_training").into())
}
