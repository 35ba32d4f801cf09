//! The example runs.

#[path = "../../examples/levels.rs"]
mod levels;

#[test]
fn each_level_keeps_less_and_gives_the_same_result() {
    levels::main().unwrap();
}
