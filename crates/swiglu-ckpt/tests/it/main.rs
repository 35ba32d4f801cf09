//! The tests of `swiglu-ckpt` that need only its public interface: one binary, a module per behaviour.

mod autocast;
mod autocast_memory;
mod bad_input;
mod equivalence;
mod example;
mod flops;
mod install;
mod memory;
mod threads;
