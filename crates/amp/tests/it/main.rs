//! The tests of `amp` that need only its public interface: one binary, a module per behaviour.

mod activations;
mod autocast;
mod captured;
mod data;
mod device_loop;
mod device_scaler;
mod example;
mod fixtures_grad_scaler;
mod fp8;
mod host_reads;
mod misuse;
mod retry;
mod scalers;
mod training;
