//! The example runs.

#[path = "../../examples/adapters.rs"]
mod adapters;

#[test]
fn an_adapter_is_learned_saved_and_merged() {
    adapters::main().unwrap();
}
