//! The tests of `experiments`: one binary, a module per behaviour.

mod accounting_sections;
mod activation_plan_memory;
mod dataloading_lengths;
mod embedded;
mod fused_ce_baselines;
mod injected_slowdowns;
mod lora_flops;
mod lora_memory;
mod offload_command_line;
mod predicted_peaks;
mod sharding;
mod step_calls;
mod swiglu_ckpt_peak;
mod vocabulary_parallel_bytes;

use std::process::Command;

/// The program where this was built, or where the variable says on another machine, for the verbs of one crate.
fn program(measured: &str) -> Command {
    let path = std::env::var_os("CARGO_BIN_EXE_experiments");
    let mut command = Command::new(path.unwrap_or_else(|| env!("CARGO_BIN_EXE_experiments").into()));
    command.arg(measured);
    command
}
