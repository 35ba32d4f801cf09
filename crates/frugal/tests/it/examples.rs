//! The examples run.

#[path = "../../examples/train_loop.rs"]
mod train_loop;

#[test]
fn a_training_loop_with_four_techniques_learns() {
    train_loop::main().unwrap();
}
