//! The example runs.

#[path = "../../examples/packed_batches.rs"]
mod packed_batches;

#[test]
fn the_example_runs() {
    packed_batches::main().unwrap();
}
