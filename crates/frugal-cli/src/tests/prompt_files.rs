//! Prompts in files.

use super::session::Session;

#[test]
fn prompts_are_read_from_records() {
    let tiny = Session::new();
    std::fs::write(
        tiny.path("p.jsonl"),
        "{\"prompt\": \"Ann has\"}\n{\"prompt\": \"Two\\nlines\", \"id\": 3}\n",
    )
    .unwrap();
    std::fs::write(tiny.path("p.txt"), "Ann has\nTwo\\nlines\n").unwrap();
    let generate = "generate --model model --max-new-tokens 3 --json --prompts";
    let [records, text] = ["p.jsonl", "p.txt"].map(|file| tiny.succeed(&format!("{generate} {file}")).0);
    assert_eq!(records, text);
    std::fs::write(tiny.path("q.jsonl"), "{\"question\": \"Ann has\"}\n").unwrap();
    let said = tiny.fail(&format!("{generate} q.jsonl"));
    assert!(
        said.contains("line 1: no field `prompt`") && said.contains("the fields here are question"),
        "{said}"
    );
    std::fs::write(tiny.path("c.jsonl"), "{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}]}\n")
        .unwrap();
    assert!(tiny.fail(&format!("{generate} c.jsonl")).contains("`prompt` is no text"));
}
