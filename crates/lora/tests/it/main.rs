//! The tests of `lora` that need only its public interface: one binary, a module per behaviour.

mod bad_input;
mod embedding_adapter;
mod equivalence;
mod example;
mod expert_adapter;
mod fixtures_adapter;
mod fixtures_families;
mod fuzz_adapter;
mod lifecycle;
mod lora_memory;
mod nf4;
mod on_cuda;
mod operators_on_gpu;
mod peft_low_precision;
mod recompute;
mod targets;
mod token_rows;
mod writers;
