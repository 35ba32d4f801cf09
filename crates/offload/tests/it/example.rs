//! The example runs.

#[path = "../../examples/offloaded_training.rs"]
mod offloaded_training;

#[test]
fn an_offloaded_training_has_the_losses_of_a_plain_one() {
    offloaded_training::main().unwrap();
}
