//! GGUF files as models: what they compute, and what is refused.

use expect_test::expect;
use serde_json::Value;

use super::session::Session;

const EVAL: &str = "--data my.jsonl --json --quiet";

fn result(tiny: &Session, command: &str) -> Value {
    serde_json::from_str(&tiny.succeed(command).0).unwrap()
}

/// A file in fp32 has the loss and the texts of its folder, to the bit; it is fine-tuned, exported, and the run finds it again.
#[test]
fn a_gguf_file_is_a_model() {
    let tiny = Session::new();
    std::fs::write(tiny.path("my.jsonl"), "{\"text\": \"one two three\"}\n".repeat(4)).unwrap();
    tiny.succeed("export --format gguf --type f32 --model model --out model.gguf --no-verify");
    let loss = |model: &str| result(&tiny, &format!("eval --model {model} {EVAL}"))["loss"].clone();
    assert!(loss("model").is_number());
    assert_eq!(loss("model.gguf"), loss("model"));
    let text = |model: &str| {
        tiny.succeed(&format!("generate --model {model} --prompt Ann --max-new-tokens 8 --quiet")).0
    };
    assert_eq!(text("model.gguf"), text("model"));
    let count = |model: &str| result(&tiny, &format!("info {model} --json"))["parameters"].clone();
    assert_eq!(count("model.gguf"), count("model"));
    tiny.succeed("plan --model model.gguf --budget 1GiB --length 64");

    // The same training as over the folder.
    for (model, out) in [("model.gguf", "of-file"), ("model", "of-folder")] {
        tiny.succeed(&format!(
            "finetune --model {model} --data problems --r 4 --steps 2 --quiet --out {out}"
        ));
    }
    let adapter = |out: &str| tiny.bytes(&format!("{out}/adapter_model.safetensors"));
    assert!(adapter("of-file") == adapter("of-folder"));
    assert_eq!(loss("of-file"), loss("of-folder"));
    tiny.succeed("merge --model of-file --out merged");
    tiny.succeed("export --model of-file --format gguf --type q8_0 --out tuned.gguf --no-verify");
    assert!(loss("tuned.gguf").is_number());
}

#[test]
fn files_that_cannot_be_read_are_refused_by_name() {
    let tiny = Session::new();
    tiny.succeed("export --format gguf --type f16 --model model --out model.gguf --no-verify");
    let good = tiny.bytes("model.gguf");
    for (bytes, expected) in [
        (
            good[..good.len() / 2].to_vec(),
            expect![[r#"
            error: bad.gguf: the file ends within its header or its tensors; copy or export it again
        "#]],
        ),
        (
            b"PK\x03\x04 and so on".to_vec(),
            expect![[r#"
            error: bad.gguf: not a GGUF file: it does not start with `GGUF`
        "#]],
        ),
    ] {
        std::fs::write(tiny.path("bad.gguf"), bytes).unwrap();
        let ended = tiny.run("info bad.gguf");
        assert_eq!(ended.status, 1);
        expected.assert_eq(&tiny.without_path(&ended.err));
    }
    let ended = tiny.run("info ollama:nowhere:1b");
    assert!(
        ended.err.contains("Ollama's store has no such model")
            && ended.err.contains("`ollama pull nowhere:1b` gets it"),
        "{}",
        ended.err
    );
}
