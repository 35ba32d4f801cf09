//! The commands of a page of the guide, and a folder in which they run.

use std::fmt::Write as _;

use super::tiny_folder::Tiny;

/// The arguments of each command of a page.
pub(crate) fn commands(page: &str) -> Vec<Vec<&str>> {
    lines(page).into_iter().map(words).collect()
}

/// The lines of the blocks of shell commands.
fn lines(page: &str) -> Vec<&str> {
    let mut within = false;
    let mut commands = Vec::new();
    for line in page.lines() {
        match line {
            "```sh" => within = true,
            "```" => within = false,
            command if within => commands.push(command),
            _ => {}
        }
    }
    commands
}

fn words(command: &str) -> Vec<&str> {
    let (program, arguments) = command.split_once(' ').unwrap();
    assert_eq!(program, "frugal", "{command}");
    assert!(!arguments.contains('\''), "{command}: quote with \"");
    let mut parts = Vec::new();
    for (at, part) in arguments.split('"').enumerate() {
        if at % 2 == 1 { parts.push(part) } else { parts.extend(part.split_whitespace()) }
    }
    parts
}

/// Makes the folder one with the hub's cache, in which the model has the name that the guide uses, and with data.
pub(crate) fn prepare(tiny: &Tiny) {
    let cached = "no-cache/models--Qwen--Qwen2.5-0.5B";
    std::fs::create_dir_all(tiny.path(&format!("{cached}/refs"))).unwrap();
    std::fs::create_dir_all(tiny.path(&format!("{cached}/snapshots"))).unwrap();
    std::fs::write(tiny.path(&format!("{cached}/refs/main")), "0123abcd").unwrap();
    std::fs::rename(tiny.path("model"), tiny.path(&format!("{cached}/snapshots/0123abcd"))).unwrap();
    let mut rows = String::new();
    for (a, b) in (0..40).map(|n| (n % 9, n / 4)) {
        let question = format!("Ann has {a} pears and buys {b} more. How many has she?");
        writeln!(rows, "{}", serde_json::json!({ "question": question, "answer": (a + b).to_string() }))
            .unwrap();
    }
    std::fs::write(tiny.path("train.jsonl"), rows).unwrap();
    std::fs::write(tiny.path("pairs.csv"), "english,french\none,un\ntwo,deux\n").unwrap();
}
