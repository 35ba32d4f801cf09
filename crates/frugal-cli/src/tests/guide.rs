//! Every command of the README and of the guide runs, in the order of tasks and pages, over a tiny model in the hub's cache under the
//! name that they say. Commands that start processes or read the standard input are in `tests/it`.

use super::guide_commands::{commands, prepare, readme, words};
use super::session::Session;

/// The pages with commands, in the order of the guide.
const PAGES: [&str; 6] = [
    include_str!("../../../frugal/src/guide/first_fine_tuning.md"),
    include_str!("../../../frugal/src/guide/your_own_data.md"),
    include_str!("../../../frugal/src/guide/how_a_plan_is_chosen.md"),
    include_str!("../../../frugal/src/guide/larger_than_memory.md"),
    include_str!("../../../frugal/src/guide/from_scratch.md"),
    include_str!("../../../frugal/src/guide/where_every_byte_goes.md"),
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
    let session = Session::new();
    prepare(&session);
    for command in readme().iter().filter(|line| !line.contains(" chat ")) {
        let ended = session.run_words(&words(command));
        assert_eq!(ended.status, 0, "{command}: {}", ended.err);
    }
}

/// Times and sizes of a plan for named hardware depend on no machine.
#[test]
fn the_readmes_plan_is_the_programs() {
    let readme = include_str!("../../../../README.md");
    let (_, transcript) = readme.split_once("$ frugal plan ").unwrap();
    let (arguments, expected) = transcript.split("```").next().unwrap().split_once('\n').unwrap();
    let ended = Session::new().run_words(&words(&format!("frugal plan {arguments}")));
    let (_, printed) = ended.out.split_once("step  ").unwrap();
    let printed = format!("step  {printed}");
    assert!(printed.starts_with(expected), "the program prints\n{printed}\nand the README has\n{expected}");
}

/// The lines of the README's Rust are those of an example, which is compiled and run.
#[test]
fn the_rust_of_the_readme_is_compiled_elsewhere() {
    let compiled = [include_str!("../../../frugal/examples/train_loop.rs")];
    let lines: Vec<&str> = compiled
        .iter()
        .flat_map(|source| source.lines())
        .map(|line| line.trim_start_matches("//!").trim())
        .collect();
    let readme = include_str!("../../../../README.md");
    let blocks: Vec<&str> =
        readme.split("```rust\n").skip(1).map(|block| block.split("```").next().unwrap()).collect();
    assert_eq!(blocks.len(), 1);
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
