//! The example runs.

#[path = "../../examples/mixed_precision.rs"]
mod mixed_precision;

#[test]
fn the_example_runs() {
    mixed_precision::main().unwrap();
}
