//! Every command of the guide's page about ranks runs, and the README's chat, which reads the standard input. The others are in the
//! program's own tests.

use std::process::Stdio;

use crate::conversations::TEMPLATE;
use crate::guide_commands::{commands, prepare, readme, words};
use crate::tiny_folder::Tiny;

#[test]
fn every_command_over_ranks_runs() {
    let tiny = Tiny::new();
    prepare(&tiny);
    for words in commands(include_str!("../../../frugal/src/guide/several_ranks.md")) {
        let output = tiny.command("").args(&words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn the_readme_is_true_of_chats() {
    let tiny = Tiny::new();
    std::fs::write(tiny.path("model/chat_template.jinja"), TEMPLATE).unwrap();
    prepare(&tiny);
    let all = readme();
    for verb in [" finetune ", " chat "] {
        let command = all.iter().find(|line| line.contains(verb)).unwrap();
        let output = tiny.command("").args(words(command)).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
