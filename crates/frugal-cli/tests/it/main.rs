//! The program as a person and a shell run it: one binary, a module per behaviour.

mod chat_command;
mod chat_data;
mod command_line;
mod command_line_errors;
mod conversations;
mod eval_command;
mod event_reader;
mod expert_adapters;
mod export_gguf;
mod finetune_diagnosis;
mod gemma4;
mod generate_budget;
mod guide;
mod guide_commands;
mod hub_commits;
mod ignored_signals;
mod interrupted_export;
mod large_data;
mod launch;
mod launch_training;
mod linear_attention;
mod machines;
mod master_weights;
mod mixture;
#[path = "../../../experiments/src/sharding/machines.rs"]
mod network;
mod nf4;
mod non_finite;
mod run_folder;
mod shell_and_set;
mod standard_output;
mod texts;
mod tiny_folder;
mod tiny_program;
mod train_command;
mod train_data;
mod train_kill;
mod training_budget;
mod waiting_threads;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// The program, where this was built, or where the variable says on another machine.
fn program() -> std::ffi::OsString {
    default_signals();
    std::env::var_os("CARGO_BIN_EXE_frugal").unwrap_or_else(|| env!("CARGO_BIN_EXE_frugal").into())
}

/// Has the programs that tests start begin with the default of each signal, also where a script runs the tests in the background and
/// so ignores SIGINT: a signal that is handled here has its default again in a new program.
fn default_signals() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            if runtime::signals::not_ignored(&[signal]).is_empty() {
                signal_hook::flag::register(signal, std::sync::Arc::default()).unwrap();
            }
        }
    });
}
