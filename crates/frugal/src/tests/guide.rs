//! Every command of the README and of the guide runs, in the order of tasks and pages, over a tiny model in the hub's cache under the
//! name that they say. Commands that start processes or read the standard input are in `tests/it`.

use super::guide_commands::{commands, prepare, tasks, words};
use super::session::Session;

/// The pages with commands, in the order of the guide.
const PAGES: [&str; 5] = [
    include_str!("../guide/first_fine_tuning.md"),
    include_str!("../guide/your_own_data.md"),
    include_str!("../guide/how_a_plan_is_chosen.md"),
    include_str!("../guide/larger_than_memory.md"),
    include_str!("../guide/where_every_byte_goes.md"),
];

#[test]
fn every_command_of_the_guide_runs() {
    let session = Session::new();
    prepare(&session);
    for words in PAGES.into_iter().flat_map(commands) {
        let ended = session.run_words(&words);
        assert_eq!(ended.status, 0, "{words:?}: {}", ended.err);
    }
}

#[test]
fn every_command_of_the_readme_runs() {
    for task in tasks() {
        let session = Session::new();
        prepare(&session);
        let commands = task.iter().filter(|line| !line.contains(" launch ") && !line.contains(" chat "));
        for command in commands {
            let ended = session.run_words(&words(command));
            assert_eq!(ended.status, 0, "{command}: {}", ended.err);
        }
    }
}

/// The lines of the README's Rust are those of a documentation test and of an example, which are compiled and run.
#[test]
fn the_rust_of_the_readme_is_compiled_elsewhere() {
    let compiled =
        [include_str!("../../examples/train_loop.rs"), include_str!("../../../swiglu-ckpt/src/lib.rs")];
    let lines: Vec<&str> = compiled
        .iter()
        .flat_map(|source| source.lines())
        .map(|line| line.trim_start_matches("//!").trim())
        .collect();
    let readme = include_str!("../../../../README.md");
    let blocks: Vec<&str> =
        readme.split("```rust\n").skip(1).map(|block| block.split("```").next().unwrap()).collect();
    assert_eq!(blocks.len(), 2);
    for line in blocks.iter().flat_map(|block| block.lines()).filter(|line| !line.is_empty()) {
        let code = line.split(" //").next().unwrap().trim();
        assert!(
            lines
                .iter()
                .any(|compiled| *compiled == code || code.starts_with("use ") && compiled.starts_with(code)),
            "{code:?} is in no compiled source"
        );
    }
}
