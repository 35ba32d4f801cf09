//! The tests of `lora` that need only its public interface: one binary, a module per behaviour.

mod accounting;
mod bad_input;
mod command_line;
mod command_line_errors;
mod equivalence;
mod fixtures_adapter;
mod flops;
mod fuzz_adapter;
mod gsm8k_data;
mod gsm8k_evaluate;
mod gsm8k_graders;
mod gsm8k_records;
mod gsm8k_split;
mod gsm8k_stop_texts;
mod gsm8k_tokenize;
mod lifecycle;
mod lora_memory;
mod recompute;
mod targets;
mod tiny_folder;
mod writers;

/// The program, where this was built, or where the variable says on another machine.
fn program() -> std::ffi::OsString {
    std::env::var_os("CARGO_BIN_EXE_lora").unwrap_or_else(|| env!("CARGO_BIN_EXE_lora").into())
}
