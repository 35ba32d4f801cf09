//! The example runs.

#[path = "../../examples/loss.rs"]
mod loss;

#[test]
fn the_example_runs() {
    loss::main().unwrap();
}
