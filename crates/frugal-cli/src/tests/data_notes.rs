//! Data that are read in another way than their author may think: a note, a list of what is not read, or an error with the remedy.

use serde_json::{Value, json};

use super::session::Session;

/// A template that ends each answer with the tokenizer's end token.
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\
    {% if m.role == 'assistant' %} <|endoftext|>{% endif %}\n{% endfor %}\
    {% if add_generation_prompt %}assistant:\n{% endif %}";

fn write(tiny: &Session, name: &str, records: &[Value]) {
    let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
    std::fs::write(tiny.path(name), lines).unwrap();
}

/// Adds tokens to the model's tokenizer: the vocabulary has the ids already, as those of tokens that no text has here.
fn add_token(tiny: &Session, id: u32, text: &str) {
    let path = tiny.path("model/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let before = vocabulary.iter().find(|(_, one)| **one == id).unwrap().0.clone();
    vocabulary.shift_remove(&before);
    vocabulary.insert(text.to_owned(), id.into());
    let merges = tokenizer["model"]["merges"].as_array_mut().unwrap();
    merges.retain(|merge| {
        let joined: String = match merge {
            Value::String(pair) => pair.replace(' ', ""),
            pair => pair.as_array().unwrap().iter().filter_map(Value::as_str).collect(),
        };
        joined != before && !merge.to_string().contains(&before)
    });
    tokenizer["added_tokens"].as_array_mut().unwrap().push(json!({
        "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
    }));
    std::fs::write(&path, tokenizer.to_string()).unwrap();
}

#[test]
fn an_end_token_in_an_answer_beside_the_templates_is_noted() {
    let tiny = Session::new();
    std::fs::write(tiny.path("model/chat_template.jinja"), TEMPLATE).unwrap();
    let row = |output: &str| json!({ "instruction": "hi", "input": "", "output": output });
    write(&tiny, "twice.jsonl", &[row("there<|endoftext|>"), row("there"), row("here<|endoftext|>\n")]);
    let note = "note: an answer ends with `<|endoftext|>`, and the chat template writes an end after it, so two are learned; remove it \
                from the data (2 records, the first: twice.jsonl: line 1)\n";
    let (out, _) = tiny.succeed("data check twice.jsonl --model model");
    assert!(out.contains(note), "{out}");
    let (shown, _) = tiny.succeed("data show twice.jsonl --model model --number 1");
    assert!(shown.contains("⟦there<|endoftext|> <|endoftext|>⟧"), "the tokens stay: {shown}");
    let (_, said) = tiny.succeed("finetune --model model --data twice.jsonl --out run --steps 1 --samples 0");
    assert!(said.contains(note), "{said}");
    // Rows of a cache say the same.
    let (_, said) =
        tiny.succeed("finetune --model model --data twice.jsonl --out again --steps 1 --samples 0");
    assert!(said.contains("were prepared before") && said.contains(note), "{said}");
    write(&tiny, "once.jsonl", &[row("there"), row("<|endoftext|> is a token")]);
    let (out, _) = tiny.succeed("data check once.jsonl --model model");
    assert!(!out.contains("note:"), "{out}");
}

#[test]
fn fields_that_a_format_does_not_read_are_listed() {
    let tiny = Session::new();
    let plain =
        json!({ "prompt": "a", "completion": " b", "system": "s", "tools": [], "input": "i", "weight": 1 });
    write(&tiny, "plain.jsonl", &[plain]);
    let (_, said) = tiny.succeed("data check plain.jsonl --model model");
    assert_eq!(said, "data: plain.jsonl (prompt and completion; not read: system, tools, input)\n");
    let question = json!({ "question": "a", "answer": "b", "system": "s", "history": [] });
    write(&tiny, "question.jsonl", &[question]);
    let (_, said) = tiny.succeed("data check question.jsonl --model model");
    assert_eq!(said, "data: question.jsonl (question and answer; not read: history)\n");
}

/// Data for KTO: an undesirable answer must not be learned as if it were a desirable one.
#[test]
fn answers_with_a_label_are_not_learned_as_others() {
    let tiny = Session::new();
    let row =
        |completion: &str, label: Value| json!({ "prompt": "a", "completion": completion, "label": label });
    write(&tiny, "kto.jsonl", &[row(" b", true.into()), row(" c", false.into())]);
    let error = tiny.fail("finetune --model model --data kto.jsonl --out run --steps 1");
    assert!(
        error.contains("the data have answers with a `label`, true for desirable and false for undesirable ones")
            && error.contains("give --objective kto, or learn the desirable ones alone (`jq -c 'select(.label) | del(.label)' FILE`)"),
        "{error}"
    );
    let (_, said) = tiny.succeed("data check kto.jsonl --model model");
    assert_eq!(said, "data: kto.jsonl (answers with a label)\n");
    // A label of another meaning.
    write(&tiny, "class.jsonl", &[row(" b", 1.into()), row(" c", 0.into())]);
    let (_, said) = tiny.succeed("data check class.jsonl --model model");
    assert_eq!(said, "data: class.jsonl (prompt and completion; not read: label)\n");
    std::fs::write(tiny.path("kto.csv"), "prompt,completion,label\na,b,False\n").unwrap();
    let (_, said) = tiny.succeed("data check kto.csv --model model");
    assert_eq!(said, "data: kto.csv (answers with a label)\n");
}

/// The remedy makes the same rows.
#[test]
fn the_command_that_lists_wrong_records_has_the_flags_that_were_given() {
    let tiny = Session::new();
    std::fs::write(tiny.path("my.jinja"), TEMPLATE).unwrap();
    let row = json!({ "instruction": "hi", "input": "", "output": "there" });
    write(&tiny, "rows.jsonl", &[row]);
    let flags = "--model model --format instruction --max-length 5 --chat-template my.jinja";
    let command = format!("`frugal data check rows.jsonl {flags}`");
    let error = tiny.fail(&format!("data show rows.jsonl {flags}"));
    assert!(
        error.ends_with(&format!("no record is shown, because all are invalid; {command} lists why\n")),
        "{error}"
    );
    let error = tiny.fail(&format!("data stats rows.jsonl {flags}"));
    assert!(error.contains("no record can be read"), "{error}");
    let short = json!({ "instruction": "", "input": "", "output": "" });
    let long = json!({ "instruction": "hi ".repeat(99), "input": "", "output": "there" });
    write(&tiny, "rows.jsonl", &[short, long]);
    let (out, _) = tiny.succeed("data stats rows.jsonl --model model --max-length 99");
    assert!(
        out.contains("1 (`frugal data check rows.jsonl --model model --max-length 99` lists them)"),
        "{out}"
    );
}

#[test]
fn an_end_token_that_the_template_does_not_write_is_noted() {
    let tiny = Session::new();
    std::fs::write(tiny.path("model/chat_template.jinja"), TEMPLATE).unwrap();
    write(&tiny, "rows.jsonl", &[json!({ "instruction": "hi", "input": "", "output": "there" })]);
    add_token(&tiny, 4095, "<|other|>");
    let note = "note: --end-token <|other|> changes no row, because the chat template ends answers with `<|endoftext|>`";
    for (flag, is_noted) in
        [("--end-token <|other|>", true), ("--end-token <|endoftext|>", false), ("", false)]
    {
        for command in ["data check rows.jsonl", "finetune --dry-run --data rows.jsonl --steps 1"] {
            let (_, said) = tiny.succeed(&format!("{command} --model model {flag}"));
            assert_eq!(said.contains(note), is_noted, "{command} {flag}: {said}");
        }
    }
    // Without the template it ends the rows.
    std::fs::remove_file(tiny.path("model/chat_template.jinja")).unwrap();
    let (out, said) = tiny.succeed("data show rows.jsonl --model model --end-token <|other|>");
    assert!(out.contains("<|other|>⟧") && !said.contains("note:"), "{out}{said}");
}

/// `config.json` may list more than `generation_config.json`, and a text that ends with any of them has its end.
#[test]
fn no_end_follows_any_of_the_models_ends() {
    let tiny = Session::new();
    add_token(&tiny, 4095, "<|other|>");
    let path = tiny.path("model/config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["eos_token_id"] = json!([0, 4095]);
    std::fs::write(&path, config.to_string()).unwrap();
    let rows = ["a<|other|>", "a<|endoftext|>", "a"].map(|text| json!({ "text": text }));
    write(&tiny, "rows.jsonl", &rows);
    let (out, _) = tiny.succeed("data show rows.jsonl --model model --color never");
    let ends: Vec<&str> = out.lines().filter(|line| line.starts_with('a')).collect();
    assert_eq!(ends, ["a⟦<|other|>⟧", "a⟦<|endoftext|>⟧", "a⟦<|endoftext|>⟧"]);
}

#[test]
fn gsm8k_reads_json_lines() {
    let tiny = Session::new();
    for name in ["problems.parquet", "problems.csv"] {
        std::fs::write(tiny.path(name), [b'P', b'A', b'R', b'1', 0x15, 0xff, 0xfe]).unwrap();
        for command in ["data check", "data show"] {
            let error = tiny.fail(&format!("{command} {name} --model model --format gsm8k"));
            let words = format!("{name}: GSM8K's problems are read from JSON lines; convert the file");
            assert!(error.contains(&words), "{error}");
        }
    }
}
