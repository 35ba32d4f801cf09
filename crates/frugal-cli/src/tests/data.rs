//! Data that cannot be learned.

use expect_test::expect;
use serde_json::{Value, json};

use super::{Tiny, contains, refused};

const TRAIN: &str = "finetune --model @model --data @problems --steps 1 --out @out";

#[test]
fn bad_problems_are_named_by_their_line() {
    let tiny = Tiny::new();
    let good = String::from_utf8(tiny.bytes("problems/train.jsonl")).unwrap();
    let check = |lines: &str, expected| {
        std::fs::write(tiny.path("problems/train.jsonl"), format!("{good}{lines}\n")).unwrap();
        refused(&tiny, TRAIN, expected);
    };
    check(
        "{\"question\": \"How many?\", \"answer\": \"#### 1\"",
        expect![[r#"
        error: problems/train.jsonl: line 41: not JSON (EOF while parsing an object, column 44); fix or remove the line
    "#]],
    );
    check(
        r#"{"question": "How many?", "answer": "It is 5."}"#,
        expect![[r#"
        error: problems/train.jsonl: line 41: the answer has no `#### NUMBER` (it ends with "It is 5."); write the result in a last line, as `#### 42`; other questions and answers are read by --format question-answer
    "#]],
    );
    check(
        r#"{"question": "How many?"}"#,
        expect![[r#"
        error: problems/train.jsonl: line 41: no field 'answer'; the fields here are: question
    "#]],
    );
    std::fs::write(tiny.path("problems/train.jsonl"), good.lines().take(3).collect::<Vec<_>>().join("\n"))
        .unwrap();
    refused(
        &tiny,
        TRAIN,
        expect![[r#"
        error: split: 1 problems cannot be divided with a test share of 0.5: a part would be empty; give more problems
    "#]],
    );
    refused(
        &tiny,
        "finetune --model @model --data @nothing.jsonl --out @out",
        expect![[r#"
            error: nothing.jsonl does not exist; give a file of records (.jsonl, .json, .csv, .parquet), a text file, or a folder with train.*
        "#]],
    );
    refused(
        &tiny,
        "finetune --model @model --data @model --out @out",
        expect![[r#"
        error: model: no training data: expected a file such as train.jsonl, train.parquet or train.csv, with validation.* and test.* beside it if there are any, or shards of JSON lines, Parquet, CSV or TSV; the folder has config.json, generation_config.json, model.safetensors, tokenizer.json
    "#]],
    );
    refused(
        &tiny,
        "eval --model @model --data @problems/test.jsonl --split official",
        expect![[r#"
        error: problems/test.jsonl: a file has no official test set; give the folder with test.jsonl
    "#]],
    );
}

#[test]
fn conversations_that_cannot_be_learned_are_an_error_before_the_first_step() {
    let tiny = Tiny::new();
    let template = tiny.path("model/chat_template.jinja");
    let check = |messages: &[Value], flags: &str, words: &str| {
        let lines: String = messages.iter().map(|one| format!("{}\n", json!({ "messages": one }))).collect();
        std::fs::write(tiny.path("bad.jsonl"), lines).unwrap();
        let arguments = format!("finetune --model @model --data @bad.jsonl --steps 1 --out @out {flags}");
        contains(&tiny, &arguments, 1, words);
        assert!(!tiny.path("out").exists(), "nothing is made before");
    };
    let asked = json!([{ "role": "user", "content": "a" }]);
    let said =
        |text: &str| json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": text }]);
    let long = [asked.clone(), said(&"b ".repeat(300))];
    check(
        &[asked],
        "",
        "bad.jsonl: line 1: the record is a conversation, and the model has no chat template",
    );

    std::fs::write(
        &template,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}",
    )
    .unwrap();
    check(&long[..1], "", "none of its 1 rows has a text to learn: no answer, every answer with weight 0");
    check(&long, "", "error: bad.jsonl: line 2: 312 tokens are more than the longest row of 200");
    check(&long, "", "; `frugal data check bad.jsonl --model model` lists all wrong records\n");
    check(&long, "--overlong skip", "1 rows are longer than 200 tokens, and no other is left");
    check(&long, "--max-length 4 --overlong truncate", "none of its 2 rows has a text to learn");

    std::fs::write(&template, "{{ raise_exception('no users') }}").unwrap();
    check(
        &[said("b")],
        "",
        "bad.jsonl: line 1: model/chat_template.jinja, line 1: the template refuses the conversation: no users",
    );
}
