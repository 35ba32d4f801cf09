//! Fine-tuning on conversations: the program from the file to the adapter, and `frugal data`.

use std::fmt::Write as _;

use crate::tiny_folder::Tiny;
use expect_test::expect;
use lora::peft::TENSORS_FILE;
use serde_json::{Value, json};

/// Turns end with the tokenizer's end token; earlier answers lose what is between brackets, as Qwen3 removes its reasoning.
const TEMPLATE: &str = "{{ strftime_now('%d %b %Y') }}\n\
    {% for m in messages %}\
    {% set text = m.content.split(']')[-1] if m.role == 'assistant' and not loop.last else m.content %}\
    {{ m.role }}: {{ text }}<|endoftext|>\n\
    {% endfor %}\
    {% if add_generation_prompt %}assistant: {% endif %}";

fn conversations(tiny: &Tiny) {
    let mut lines = String::new();
    for n in 0..24 {
        let (a, b) = (n % 5, n % 7);
        let weight = i32::from(n % 3 != 0);
        let messages = json!([
            { "role": "user", "content": format!("Ann has {a} pears and buys {b} more.") },
            { "role": "assistant", "content": format!("[{a} + {b}] She has {}.", a + b), "weight": weight },
            { "role": "user", "content": "And one more?" },
            { "role": "assistant", "content": format!("[+ 1] {}.", a + b + 1) },
        ]);
        writeln!(lines, "{}", json!({ "messages": messages, "id": n })).unwrap();
    }
    std::fs::write(tiny.path("chat.jsonl"), lines).unwrap();
    std::fs::write(tiny.path("model/chat_template.jinja"), TEMPLATE).unwrap();
}

const TRAIN: &str = "finetune --model model --data chat.jsonl --r 4 --batch-size 2 --accumulation 2 --lr 0.03 --seed 3 \
                     --packing 100 --dropout 0.2 --steps 12 --checkpoint-every 3 --json";

/// Conversations × packing × accumulation × a kill.
#[test]
fn a_killed_training_on_conversations_goes_on_to_the_same_bytes() {
    let tiny = Tiny::new();
    conversations(&tiny);
    let (_, err) = tiny.succeed(&format!("{TRAIN} --out unbroken"));
    assert!(err.starts_with("data: chat.jsonl (messages; not read: id)\n"), "{err}");
    tiny.kill_at_step(&format!("{TRAIN} --out broken"), 4);
    assert!(!tiny.path("broken").join(TENSORS_FILE).exists(), "it was not done");

    // The date of the first start is that of the resumed one.
    let config = String::from_utf8(tiny.bytes("broken/config.toml")).unwrap();
    assert!(config.contains("\ndate = \"20"), "{config}");
    tiny.succeed("resume broken");
    assert!(tiny.bytes(&format!("unbroken/{TENSORS_FILE}")) == tiny.bytes(&format!("broken/{TENSORS_FILE}")));
    let losses = |out: &str| String::from_utf8(tiny.bytes(&format!("{out}/losses.jsonl"))).unwrap();
    let of = |text: String| -> Vec<(Value, Value)> {
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|line| (line["step"].clone(), line["loss"].clone())).collect()
    };
    let (one, other) = (of(losses("unbroken")), of(losses("broken")));
    assert_eq!(one, other);
    assert_eq!(one.iter().filter(|(step, _)| step.is_u64()).count(), 12);
}

#[test]
fn data_is_shown_as_the_model_reads_it() {
    let tiny = Tiny::new();
    conversations(&tiny);
    let template = TEMPLATE.replace("{{ strftime_now('%d %b %Y') }}\n", "");
    std::fs::write(tiny.path("plain.jinja"), template).unwrap();
    let show = |flags: &str| {
        tiny.succeed(&format!("data show chat.jsonl --model model --chat-template plain.jinja {flags}"))
    };
    let (out, err) = show("--number 2");
    assert_eq!(err, "data: chat.jsonl (messages; not read: id)\n");
    expect![[r#"
        ── chat.jsonl: line 1: 48 tokens, 8 learned
        user: Ann has 0 pears and buys 0 more.<|endoftext|>
        assistant:  She has 0.<|endoftext|>
        user: And one more?<|endoftext|>
        assistant: ⟦[+ 1] 1.<|endoftext|>
        ⟧
    "#]]
    .assert_eq(out.split("── chat.jsonl: line 2").next().unwrap());
    assert_eq!(out.matches("──").count(), 3, "the history of the second changes: a row for each answer");
    let (out, _) = show("--number 1 --skip 1 --color always");
    assert!(out.contains("\u{1b}[7;32m<|endoftext|>\u{1b}[0m"), "{out:?}");
    let (out, _) = show("--number 1 --mask all --json");
    let row: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(row["labels"], row["input_ids"]);

    let (out, _) = tiny.succeed("data stats chat.jsonl --model model --json");
    let stats: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&stats["records"], &stats["rows"]), (&24.into(), &40.into()));
    let (out, _) = tiny.succeed("data check chat.jsonl --model model");
    assert!(out.starts_with("24 records, 40 rows, "), "{out}");
}

#[test]
fn every_wrong_record_is_listed() {
    let tiny = Tiny::new();
    std::fs::write(tiny.path("model/chat_template.jinja"), TEMPLATE).unwrap();
    let lines = [
        json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }] }).to_string(),
        "{".to_owned(),
        json!({ "messages": [{ "role": "user", "content": "a" }] }).to_string(),
        json!({ "messages": [{ "role": "assistant", "content": "b", "weight": 7 }] }).to_string(),
        json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b ".repeat(300) }] })
            .to_string(),
        json!({ "text": "t" }).to_string(),
    ];
    std::fs::write(tiny.path("chat.jsonl"), lines.join("\n")).unwrap();
    let output = tiny.run("data check chat.jsonl --model model --format messages");
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert_eq!(output.status.code(), Some(1), "{said:?}");
    expect![[r#"
        chat.jsonl: line 2: not JSON (EOF while parsing an object, column 1); correct or remove the line
        chat.jsonl: line 3: nothing of it is learned; it is left out
        chat.jsonl: line 4: `messages`, message 1: `weight` is 7; expected 0 (not learned) or 1
        chat.jsonl: line 5: 319 tokens are more than the longest row of 200; shorten it, or choose what happens to long rows: --overlong skip, truncate or split
        chat.jsonl: line 6: the record has text, and the data's format is messages; correct or remove it
    "#]]
    .assert_eq(&said[0]);
    assert!(said[1].ends_with("error: 4 of 6 records are wrong\n"), "{said:?}");
}

#[test]
fn long_conversations_are_cut_or_divided_where_that_is_asked_for() {
    let tiny = Tiny::new();
    conversations(&tiny);
    let asked = json!({ "messages": [{ "role": "user", "content": "a" }] });
    let long = json!({ "messages": [
        { "role": "user", "content": "a" }, { "role": "assistant", "content": "b ".repeat(300) },
    ] });
    std::fs::write(tiny.path("long.jsonl"), format!("{asked}\n{long}\n")).unwrap();
    for (overlong, word, rows) in [("truncate", "cut", "1 batch"), ("split", "divided", "2 batches")] {
        let flags = format!("--overlong {overlong} --batch-size 1 --steps 1 --out {overlong} --samples 0");
        let (_, said) = tiny.succeed(&format!("finetune --model model --data long.jsonl {flags}"));
        assert!(
            said.contains(&format!("rows are too long and are {word}\n")) && said.contains(rows),
            "{said}"
        );
    }
}
