//! The tests of `offload` that need only its public interface: one binary, a module per behaviour.

mod cuda;
mod delays;
mod device_memory;
mod example;
mod experts;
mod failures;
mod file_failures;
mod fixtures_offload;
mod gradients;
mod host_adam_w;
mod nested;
mod peaks;
mod repeated_uses;
mod scaling_blocks;
mod support;
mod trace;
mod trainer;
