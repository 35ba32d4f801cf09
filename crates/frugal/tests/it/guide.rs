//! Every command of the guide runs, in the order of the pages, over a tiny model in the hub's cache under the name that it says.

use std::fmt::Write as _;

use crate::tiny_folder::Tiny;

/// The pages with commands, in the order of the guide.
const PAGES: [&str; 6] = [
    include_str!("../../src/guide/first_fine_tuning.md"),
    include_str!("../../src/guide/your_own_data.md"),
    include_str!("../../src/guide/how_a_plan_is_chosen.md"),
    include_str!("../../src/guide/larger_than_memory.md"),
    include_str!("../../src/guide/several_ranks.md"),
    include_str!("../../src/guide/where_every_byte_goes.md"),
];

/// The lines of the blocks of shell commands.
fn commands(page: &str) -> Vec<&str> {
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

/// A folder with the hub's cache, in which the model has the name that the guide uses, and data.
fn folder() -> Tiny {
    let tiny = Tiny::new();
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
    tiny
}

#[test]
fn every_command_of_the_guide_runs() {
    let tiny = folder();
    for command in PAGES.into_iter().flat_map(commands) {
        let (program, arguments) = command.split_once(' ').unwrap();
        assert_eq!(program, "frugal", "{command}");
        assert!(!arguments.contains('\''), "{command}: quote with \"");
        let mut parts = Vec::new();
        for (at, part) in arguments.split('"').enumerate() {
            if at % 2 == 1 { parts.push(part) } else { parts.extend(part.split_whitespace()) }
        }
        let output = tiny.command("").args(parts).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
