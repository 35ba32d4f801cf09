//! The example runs.

#[path = "../../examples/levels.rs"]
mod levels;

#[test]
fn each_level_holds_less_and_computes_the_same() {
    levels::main().unwrap();
}
