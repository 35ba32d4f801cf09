//! The example runs.

#[path = "../../examples/ranks.rs"]
mod ranks;

#[test]
fn gradients_and_optimizer_state_are_sharded() {
    ranks::main().unwrap();
}
