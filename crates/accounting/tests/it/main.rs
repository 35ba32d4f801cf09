//! The tests of `accounting` that need only its public interface: one binary, a module per behaviour.

mod activation_plan;
mod bad_input;
mod command_line;
mod fixtures;
mod offload;
mod properties;

/// The program, where this was built, or where the variable says on another machine.
fn program() -> std::ffi::OsString {
    std::env::var_os("CARGO_BIN_EXE_accounting").unwrap_or_else(|| env!("CARGO_BIN_EXE_accounting").into())
}
