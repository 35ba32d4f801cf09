//! Every command of the guide's page about ranks runs, and those of the README that start processes or read the standard input. The
//! others are in the program's own tests.

use std::process::Stdio;

use crate::conversations::TEMPLATE;
use crate::guide_commands::{commands, prepare, tasks, words};
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

#[test]
fn the_readme_is_true_of_chats_and_ranks() {
    let tiny = Tiny::new();
    std::fs::write(tiny.path("model/chat_template.jinja"), TEMPLATE).unwrap();
    prepare(&tiny);
    let all: Vec<String> = tasks().into_iter().flatten().collect();
    let chat = all.iter().position(|line| line.contains(" chat ")).unwrap();
    let before = all[..chat].iter().filter(|line| line.contains(" finetune "));
    let launches = all.iter().filter(|line| line.contains(" launch "));
    for (number, command) in before.chain([&all[chat]]).chain(launches).enumerate() {
        // Each training has an output folder of its own.
        let command = if command.contains(" launch ") {
            command.replace("--out run", &format!("--out run{number} --steps 2"))
        } else {
            command.clone()
        };
        let output = tiny.command("").args(words(&command)).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
