//! The commands of the README and of a page of the guide, and a folder in which they run.

use std::fmt::Write as _;

use super::tiny_folder::Tiny;

/// The arguments of each command of a page.
pub(crate) fn commands(page: &str) -> Vec<Vec<&str>> {
    lines(page).into_iter().map(words).collect()
}

/// The README's commands, in its order.
pub(crate) fn readme() -> Vec<String> {
    let readme = include_str!("../../../../README.md");
    let indented = readme.lines().filter_map(|line| line.strip_prefix("    "));
    let commands = indented.filter(|line| line.starts_with("frugal "));
    let commands: Vec<String> =
        commands.map(|line| line.split(" #").next().unwrap_or(line).trim_end().to_owned()).collect();
    assert_eq!(commands.len(), 6, "{commands:?}");
    commands
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

pub(crate) fn words(command: &str) -> Vec<&str> {
    let (program, arguments) = command.split_once(' ').unwrap();
    assert_eq!(program, "frugal", "{command}");
    assert!(!arguments.contains('\''), "{command}: quote with \"");
    let mut parts = Vec::new();
    for (at, part) in arguments.split('"').enumerate() {
        if at % 2 == 1 { parts.push(part) } else { parts.extend(part.split_whitespace()) }
    }
    parts
}

/// Makes the folder one with the hub's cache, in which the model has the names that README and guide use, and with data.
pub(crate) fn prepare(tiny: &Tiny) {
    for size in ["7B", "0.5B"] {
        let cached = format!("no-cache/models--Qwen--Qwen2.5-{size}");
        let snapshot = tiny.path(&format!("{cached}/snapshots/0123abcd"));
        std::fs::create_dir_all(tiny.path(&format!("{cached}/refs"))).unwrap();
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::write(tiny.path(&format!("{cached}/refs/main")), "0123abcd").unwrap();
        for file in std::fs::read_dir(tiny.path("model")).unwrap().map(Result::unwrap) {
            std::fs::copy(file.path(), snapshot.join(file.file_name())).unwrap();
        }
    }
    std::fs::remove_dir_all(tiny.path("model")).unwrap();
    let mut rows = String::new();
    for (a, b) in (0..40).map(|n| (n % 9, n / 4)) {
        let question = format!("Ann has {a} pears and buys {b} more. How many has she?");
        writeln!(rows, "{}", serde_json::json!({ "question": question, "answer": (a + b).to_string() }))
            .unwrap();
    }
    for name in ["train.jsonl", "my.jsonl", "test.jsonl", "questions.jsonl", "chat.jsonl", "code.jsonl"] {
        std::fs::write(tiny.path(name), &rows).unwrap();
    }
    let article = " = Rivers = \n \n The river is long and the town is small . \n The bridge is old . \n";
    std::fs::write(tiny.path("corpus.txt"), article.repeat(200)).unwrap();
    std::fs::write(tiny.path("tokens.txt"), "<|call|>\n<|end_call|>\n").unwrap();
    let mut pairs = String::new();
    for (a, b) in (0..20).map(|n| (n % 9, n / 4)) {
        let (chosen, rejected) = ((a + b).to_string(), (a + b + 1).to_string());
        let prompt = format!("{a} and {b} is ");
        writeln!(
            pairs,
            "{}",
            serde_json::json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected })
        )
        .unwrap();
    }
    std::fs::write(tiny.path("preferences.jsonl"), pairs).unwrap();
    std::fs::write(tiny.path("pairs.csv"), "english,french\none,un\ntwo,deux\n").unwrap();
}
