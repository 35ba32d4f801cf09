//! The example runs.

#[path = "../../examples/linear_cross_entropy.rs"]
mod linear_cross_entropy;

#[test]
fn the_example_runs() {
    linear_cross_entropy::main().unwrap();
}
