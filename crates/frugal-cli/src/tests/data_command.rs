//! `frugal data`, and conversations that are cut.

use expect_test::expect;
use serde_json::{Value, json};

use super::conversations::{TEMPLATE, conversations};
use super::session::Session;

/// The template without the day, which has another number of tokens tomorrow.
fn template_without_date() -> String {
    TEMPLATE.replace("{{ strftime_now('%d %b %Y') }}\n", "")
}

#[test]
fn data_is_shown_as_the_model_reads_it() {
    let tiny = Session::new();
    conversations(&tiny);
    std::fs::write(tiny.path("plain.jinja"), template_without_date()).unwrap();
    let show = |flags: &str| {
        tiny.succeed(&format!("data show chat.jsonl --model model --chat-template plain.jinja {flags}"))
    };
    let (out, err) = show("--number 2");
    assert_eq!(err, "data: chat.jsonl (messages; not read: id)\n");
    expect![[r#"
        ── chat.jsonl: line 1: 51 tokens, 8 learned
        user:
        Ann has 0 pears and buys 0 more.<|endoftext|>
        assistant:
         She has 0.<|endoftext|>
        user:
        And one more?<|endoftext|>
        assistant:
        ⟦[+ 1] 1.<|endoftext|>
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
    let tiny = Session::new();
    std::fs::write(tiny.path("model/chat_template.jinja"), template_without_date()).unwrap();
    let lines = [
        json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }] }).to_string(),
        "{".to_owned(),
        json!({ "messages": [{ "role": "user", "content": "a" }] }).to_string(),
        json!({ "messages": [{ "role": "assistant", "content": "b", "weight": 7 }] }).to_string(),
        json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b ".repeat(300) }] })
            .to_string(),
        json!({ "text": "t" }).to_string(),
        json!({ "messages": [{ "role": "human", "content": "a" }, { "role": "gpt", "content": "b" }] }).to_string(),
        json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "" }] }).to_string(),
        json!({ "messages": [{ "role": "user", "content": "b" }] }).to_string(),
        "caf\u{e9}".to_owned(),
        "th\u{e9}".to_owned(),
    ];
    let mut bytes = Vec::new();
    for line in lines {
        // As Latin-1.
        bytes.extend(line.chars().map(|c| c as u8).chain([b'\n']));
    }
    std::fs::write(tiny.path("chat.jsonl"), bytes).unwrap();
    let ended = tiny.run("data check chat.jsonl --model model --format messages");
    let said = [ended.out, ended.err];
    assert_eq!(ended.status, 1, "{said:?}");
    expect![[r#"
        chat.jsonl: line 2: not JSON (EOF while parsing an object, column 1); an object is on one line in such a file (`jq -c . FILE` writes it so); join its lines, or correct the line
        chat.jsonl: line 3: nothing of it is learned; it is left out
        chat.jsonl: line 4: `messages`, message 1: `weight` is 7; expected 0 (not learned) or 1
        chat.jsonl: line 5: 314 tokens are more than the longest row of 200; shorten it, or choose what happens to long rows: --overlong skip, truncate or split
        chat.jsonl: line 6: the record has text, and the data's format is messages; correct or remove it
        chat.jsonl: line 7: `messages`, message 1: `role` is "human"; expected "user"
        chat.jsonl: line 8: an answer is empty; the model learns to end at once
        chat.jsonl: line 10, byte 1082 of the file (0xe9): not UTF-8; convert the file (iconv -f LATIN1 -t UTF-8)
        the same in 1 record more (chat.jsonl: line 9): nothing of it is learned; it is left out
        the same in 1 record more (chat.jsonl: line 11, byte 1086 of the file (0xe9)): not UTF-8; convert the file (iconv -f LATIN1 -t UTF-8)
    "#]]
    .assert_eq(&said[0]);
    assert!(said[1].ends_with("error: 7 of 11 records are wrong\n"), "{said:?}");
}

#[test]
fn records_that_are_read_otherwise_than_most_are_named() {
    let tiny = Session::new();
    let good = json!({ "prompt": "Ann has", "completion": " 5 pears." });
    let lines = format!(
        "{good}\n{good}\n{}\n{}\n",
        json!({ "prompt": "Bob has", "completion": " 6." }),
        json!({ "text": "t" })
    );
    std::fs::write(tiny.path("mixed.jsonl"), &lines).unwrap();
    let (out, said) = tiny.succeed("data check mixed.jsonl --model model");
    assert_eq!(said, "data: mixed.jsonl (prompt and completion in 3 records, text in 1 record)\n");
    expect![[r#"
        warning: 1 record has text, and 3 prompt and completion: mixed.jsonl: line 4
        warning: 1 of 4 rows is a duplicate: mixed.jsonl: line 2 repeats mixed.jsonl: line 1
        4 records, 4 rows, 27 tokens, 14 of them learned
    "#]]
    .assert_eq(&out);
    std::fs::write(
        tiny.path("wrong.jsonl"),
        format!("{lines}{{\"msgs\": 1}}\n{{\"prompt\": 5, \"completion\": \"a\"}}\n"),
    )
    .unwrap();
    let ended = tiny.run("data check wrong.jsonl --model model");
    assert!(
        ended.status == 1 && ended.err.contains("2 of 6 records are wrong"),
        "{} {}",
        ended.out,
        ended.err
    );
    assert!(
        ended.out.contains("line 5: the fields are msgs; expected ") && ended.out.contains("line 6: "),
        "{} {}",
        ended.out,
        ended.err
    );
    std::fs::write(tiny.path("mixed"), &lines).unwrap();
    let warned =
        "although its first line is a JSON object; to read records, give it a name that ends with .jsonl)";
    for (flags, is_warned) in [("", true), ("--format text", false)] {
        let (_, said) = tiny.succeed(&format!("data check mixed --model model {flags}"));
        assert_eq!(said.contains(warned), is_warned, "{said}");
    }
    let (_, said) = tiny.succeed("data check mixed.jsonl --model model --max-length 5000");
    assert!(said.contains("rows have at most 200 tokens, the model's context\n"), "{said}");
    // What a row is left out for.
    let long = json!({ "prompt": "a", "completion": "b ".repeat(300) });
    std::fs::write(tiny.path("long.jsonl"), format!("{long}\n{}\n", json!({ "text": "" }))).unwrap();
    let (_, said) = tiny.succeed("data show long.jsonl --model model --overlong skip");
    assert!(said.contains("line 1: left out: it is too long\n"), "{said}");
    assert!(said.contains("line 2: left out: nothing of it is learned\n"), "{said}");
}

#[test]
fn long_conversations_are_cut_or_divided_where_that_is_asked_for() {
    let tiny = Session::new();
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

/// Fields of any names become a prompt and an answer; the templates are kept for a resume.
#[test]
fn templates_name_the_fields_of_a_prompt() {
    let tiny = Session::new();
    let rows: String = (0..12).map(|n| format!("\"How much is {n} + 1?\",{}\n", n + 1)).collect();
    std::fs::write(tiny.path("sums.csv"), format!("query,response\n{rows}")).unwrap();
    let refused = tiny.run("data check sums.csv --model model").err;
    assert!(
        refused.contains("--prompt-template '{query}' --completion-template '{response}'"),
        "the fields of the file: {refused}"
    );
    std::fs::write(tiny.path("numbered.csv"), "id,query,response\na1,Is it so?,\"Yes, it is.\"\n").unwrap();
    let refused = tiny.run("data check numbered.csv --model model").err;
    assert!(
        refused.contains("--prompt-template '{query}' --completion-template '{response}'"),
        "a number or a name is no prompt: {refused}"
    );
    // The remedy has the flags that rows were made with; nothing but wrong records is a failure.
    let refused =
        tiny.fail("finetune --model model --data numbered.csv --max-length 50 --format messages --out wrong");
    let remedy = "`frugal data check numbered.csv --model model --format messages --max-length 50` lists all wrong records";
    assert!(refused.contains(remedy), "{refused}");
    let said = tiny.fail("data show numbered.csv --model model --format messages --json --quiet");
    assert!(said.contains("no record is shown, because all are invalid"), "{said}");
    let templates = ["--prompt-template", "Q: {query} A:", "--completion-template", " {response}"];
    let shown = ["data", "show", "sums.csv", "--model", "model", "--number", "1", "--color", "never"];
    let ended = tiny.run_words(&[&shown[..], &templates].concat());
    assert_eq!(ended.status, 0, "{}", ended.err);
    expect![[r#"
        ── sums.csv: line 2: 13 tokens, 2 learned
        Q: How much is 0 + 1? A:⟦ 1<|endoftext|>⟧
    "#]]
    .assert_eq(&ended.out);
    let train = "finetune --model model --data sums.csv --accumulation 1 --steps 2 --out run";
    let words: Vec<&str> = train.split(' ').chain(templates).collect();
    let ended = tiny.run_words(&words);
    assert_eq!(ended.status, 0, "{}", ended.err);
    tiny.succeed("resume run --set training.steps=3");
    let config = std::fs::read_to_string(tiny.path("run/config.toml")).unwrap();
    assert!(config.contains("prompt_template = \"Q: {query} A:\""), "{config}");
    let one =
        tiny.run_words(&["data", "check", "sums.csv", "--model", "model", "--prompt-template", "{query}"]);
    assert_eq!(one.status, 2, "{}", one.err);
}

#[test]
fn data_without_a_readable_record_have_no_figures() {
    let tiny = Session::new();
    let template = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}<|over|>{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}";
    std::fs::write(tiny.path("model/chat_template.jinja"), template).unwrap();
    let record =
        json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }] });
    std::fs::write(tiny.path("chat.jsonl"), format!("{record}\n").repeat(3)).unwrap();
    let error = tiny.fail("data stats chat.jsonl --model model");
    assert!(error.contains("no record can be read; the first error of 3: chat.jsonl: line 1"), "{error}");
    assert!(
        error.contains("it ends an answer with `<|over|>`, which is not a special token of the tokenizer"),
        "{error}"
    );
    assert!(error.contains("give it as --chat-template"), "{error}");
    // The remedy is one.
    std::fs::write(tiny.path("ends.jinja"), template.replace("<|over|>", "<|endoftext|>")).unwrap();
    tiny.succeed("data stats chat.jsonl --model model --chat-template ends.jinja");
}

/// Only a row that uses an id beyond the model's vocabulary is wrong, and an end token beyond it is named.
#[test]
fn ids_beyond_the_vocabulary_are_refused_where_they_are_used() {
    let tiny = Session::new();
    let path = tiny.path("model/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let added = json!({
        "id": 4096, "content": "<|far|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    });
    tokenizer["added_tokens"].as_array_mut().unwrap().push(added);
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    std::fs::write(tiny.path("texts.jsonl"), "{\"text\": \"a pear\"}\n{\"text\": \"a <|far|> pear\"}\n")
        .unwrap();
    let ended = tiny.run("data check texts.jsonl --model model");
    assert_eq!(ended.status, 1, "{}", ended.err);
    let expected = "texts.jsonl: line 2: token 4096 (`<|far|>`) is beyond the model's vocabulary of 4096";
    assert!(ended.out.contains(expected) && !ended.out.contains("line 1"), "{}", ended.out);
    std::fs::write(tiny.path("texts.jsonl"), "{\"text\": \"a pear\"}\n").unwrap();
    let (out, _) = tiny.succeed("data check texts.jsonl --model model");
    assert!(out.starts_with("1 record, 1 row, "), "{out}");
    std::fs::write(tiny.path("plain.txt"), "a pear <|far|>\n").unwrap();
    let error = tiny.fail("data check plain.txt --model model");
    assert!(error.contains("token 4096 is beyond"), "{error}");

    std::fs::write(tiny.path("model/generation_config.json"), r#"{"eos_token_id": 99999}"#).unwrap();
    let error = tiny.fail("data check texts.jsonl --model model");
    let expected = "`eos_token_id` is 99999 (generation_config.json, else config.json), and the model's vocabulary is 4096";
    assert!(error.contains(expected), "{error}");
    tiny.succeed("data check texts.jsonl --model model --end-token <|endoftext|>");
}

/// A template whose prompt opens the reasoning has a variant for training, which is named.
#[test]
fn a_variant_for_training_is_named() {
    let tiny = Session::new();
    let template = "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- 'assistant:\r\n' + m.content.split('</think>')[-1] }}\
                    {%- else %}{{- m.role + ':\r\n' + m.content }}{%- endif %}{{- '<|endoftext|>\r\n' }}{%- endfor %}\r\n\
                    {%- if add_generation_prompt %}{{- 'assistant:\r\n<think>\r\n' }}{%- endif %}\r\n";
    std::fs::write(tiny.path("model/chat_template.jinja"), template).unwrap();
    let record = json!({ "messages": [
        { "role": "user", "content": "q", "mood": "glad" }, { "role": "assistant", "content": "a" },
    ] });
    std::fs::write(tiny.path("chat.jsonl"), format!("{record}\n")).unwrap();
    let (out, err) = tiny.succeed("data show chat.jsonl --model model");
    let expected = "chat template for training: opened-reasoning: the template's prompt ends with `<think>`";
    assert!(err.contains(expected), "{err}");
    let text = out.split_once('\n').unwrap().1;
    // Line breaks of the template are `\n`, as Jinja2 reads them.
    assert_eq!(text, "user:\nq<|endoftext|>\nassistant:\n<think>\n⟦</think>\n\na<|endoftext|>\n⟧\n");
    let (out, _) = tiny.succeed("data check chat.jsonl --model model");
    let note = "note: `mood` of messages: the chat template leaves it out, so the model does not see it (1 record: chat.jsonl: line 1)";
    assert!(out.contains(note), "{out}");
}
