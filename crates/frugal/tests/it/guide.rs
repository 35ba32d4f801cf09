//! Every command of the guide's page about ranks runs. Those of the other pages are in the program's own tests.

use crate::guide_commands::{commands, prepare};
use crate::tiny_folder::Tiny;

#[test]
fn every_command_over_ranks_runs() {
    let tiny = Tiny::new();
    prepare(&tiny);
    for words in commands(include_str!("../../src/guide/several_ranks.md")) {
        let output = tiny.command("").args(&words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
