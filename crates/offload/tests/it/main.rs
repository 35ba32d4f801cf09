//! The tests of `offload` that need only its public interface: one binary, a module per behaviour.

#[cfg(feature = "program")]
mod command_line;
mod delays;
mod device_memory;
#[cfg(feature = "program")]
mod exchanged_memory;
mod failures;
mod file_failures;
mod fixtures_offload;
mod gradients;
mod host_adam_w;
mod nested;
mod peaks;
mod repeated_uses;
mod support;
mod trainer;

/// The program, where this was built, or where the variable says on another machine.
#[cfg(feature = "program")]
fn program() -> std::ffi::OsString {
    std::env::var_os("CARGO_BIN_EXE_offload").unwrap_or_else(|| env!("CARGO_BIN_EXE_offload").into())
}
