//! `frugal chat` as a process: turns on standard input, answers on standard output.

use std::io::Write;
use std::process::Stdio;

use frugal::dataloading::Tokenizer;

use crate::tiny_folder::{self, Tiny};
use serde_json::Value;

const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}<|endoftext|>\n{% endfor %}\
    {% if add_generation_prompt %}assistant:\n{% endif %}";

/// The answers to lines, and what was said beside them.
fn chat(tiny: &Tiny, arguments: &str, lines: &str) -> (Vec<Value>, String) {
    let mut command = tiny.command(&format!("chat {arguments} --json --max-new-tokens 6"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    (tiny_folder::lines(&out), err)
}

#[test]
fn a_conversation_has_a_history_until_it_is_reset() {
    let tiny = Tiny::new();
    // Without a template there is no conversation.
    let (answers, err) = chat(&tiny, "model", "hello\n");
    assert!(answers.is_empty() && err.contains("`frugal generate --model model --prompt TEXT`"), "{err}");

    std::fs::write(tiny.path("model/chat_template.jinja"), TEMPLATE).unwrap();
    let (answers, err) = chat(
        &tiny,
        "model",
        "How many pears?\n\nHow many pears?\n/reset\nHow many pears?\n/what\n/exit\nnot read\n",
    );
    assert_eq!(answers.len(), 3, "{answers:?} {err}");
    assert!(answers.iter().all(|answer| answer["tokens"] == 6 && answer["ended"] == "length"), "{answers:?}");
    assert_eq!(answers[0]["content"], answers[2]["content"]);
    assert_ne!(answers[0]["content"], answers[1]["content"], "the second answer reads the first");
    assert_eq!(err, "the conversation begins anew\n/what is no command; there are /help, /reset and /exit\n");

    // A context of 200 tokens is full after a few turns: the first ones are left out.
    let turns = "Ann has seven pears and buys three more. How many has she?\n".repeat(9);
    let (answers, err) = chat(&tiny, "model --system short", &turns);
    assert_eq!(answers.len(), 9, "{err}");
    assert!(err.contains("the context is full: the first 2 messages were left out"), "{err}");
    let (_, err) = chat(&tiny, "model", &format!("{}\n", "pears ".repeat(300)));
    assert!(err.contains("tokens with its template, and the model reads 150 besides the answer"), "{err}");

    // The folder of a training names its model, and its template ends an answer.
    std::fs::write(tiny.path("chat.jsonl"), conversations()).unwrap();
    let train = "finetune --model model --data chat.jsonl --method full --lr 0.05 --epochs 10 --batch-size 4 --accumulation 1 --samples 0";
    let (_, err) = tiny.succeed(&format!("{train} --out run"));
    assert!(err.contains("next:\n  frugal chat run\n"), "{err}");
    let (answers, _) = chat(&tiny, "run", "Say it.\n");
    assert_eq!(
        (&answers[0]["content"], &answers[0]["ended"]),
        (&"yes".into(), &"end token".into()),
        "{answers:?}"
    );
    let (base, _) = chat(&tiny, "model", "Say it.\n");
    assert_ne!(base[0]["content"], "yes");
    // The last weights, because nothing was evaluated.
    let (_, err) = chat(&tiny, "run", "Say it.\n");
    assert!(err.contains("run: the last model (run/model)\n"), "{err}");
}

fn conversations() -> String {
    let line =
        r#"{"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "yes"}]}"#;
    format!("{line}\n").repeat(16)
}

/// As Llama 2's template: the blank is in the prompt once, and not in the message.
#[test]
fn blanks_that_a_template_writes_before_answers_are_no_part_of_them() {
    const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %} {{ m.content }}<|endoftext|>\
        {% endif %}{% endfor %}";
    let tiny = Tiny::new();
    std::fs::write(tiny.path("chat.jsonl"), conversations()).unwrap();
    std::fs::write(tiny.path("own.jinja"), TEMPLATE).unwrap();
    let train = "finetune --model model --data chat.jsonl --method full --lr 0.05 --epochs 10 --batch-size 4 --accumulation 1 --samples 0";
    tiny.succeed(&format!("{train} --chat-template own.jinja --out run"));
    let (answers, err) = chat(&tiny, "run", "Say it.\nSay it.\n");
    assert_eq!((answers.len(), &answers[0]["content"]), (2, &"yes".into()), "{answers:?} {err}");
    let tokenizer = Tokenizer::from_file(&tiny.path("model/tokenizer.json")).unwrap();
    let expected = [
        tokenizer.encode("[Say it.]").unwrap(),
        tokenizer.encode("[Say it.] yes<|endoftext|>[Say it.]").unwrap(),
    ];
    for (answer, expected) in answers.iter().zip(expected) {
        assert_eq!(answer["prompt_tokens"], serde_json::json!(expected));
    }
}
