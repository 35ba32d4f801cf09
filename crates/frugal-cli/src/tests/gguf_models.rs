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

/// The blocks of layers are moved as they are: no token and no loss changes, wherever they are.
#[test]
fn layers_in_blocks_are_offloaded() {
    let tiny = Session::new();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures/gguf_merge/base.gguf");
    std::fs::copy(fixture, tiny.path("base.gguf")).unwrap();
    let train = "finetune --model base.gguf --dtype gguf --data problems --r 4 --batch-size 4 --accumulation 1 --steps 3 --quiet";
    let losses = |out: &str, flags: &str| -> Vec<Value> {
        tiny.succeed(&format!("{train} --out {out} {flags}"));
        let log = String::from_utf8(tiny.bytes(&format!("{out}/losses.jsonl"))).unwrap();
        let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].clone());
        lines.filter(Value::is_number).collect()
    };
    let whole = losses("run", "");
    assert_eq!(whole.len(), 3);
    let places = ["--offload file", "--offload host --ring 1"];
    for (out, flags) in ["in-files", "in-host-memory"].into_iter().zip(places) {
        assert_eq!(losses(out, flags), whole, "{flags}");
    }
    for model in ["--model base.gguf", "--model base.gguf --adapter run"] {
        let generate = format!("generate {model} --dtype gguf --prompt The --max-new-tokens 12");
        let (text, _) = tiny.succeed(&generate);
        assert!(!text.trim().is_empty());
        let others = ["--budget 2GiB", "--budget 2GiB --offload host", "--offload file --resident 0"];
        for flags in places.into_iter().chain(others) {
            let (moved, said) = tiny.succeed(&format!("{generate} {flags}"));
            assert_eq!(moved, text, "{model} {flags}");
            // Within a budget this machine's rates decide.
            let resident = match flags.contains("--budget") {
                true => " held",
                false if flags.contains("--resident") => "; 1 of 1 layers resident",
                false => "; 0 of 1 layers resident",
            };
            assert!(said.contains(" of 1 layers resident") && said.contains(resident), "{flags}: {said}");
        }
    }
    let error = tiny.fail("generate --model base.gguf --dtype gguf --prompt The --offload-experts 1GiB");
    assert!(error.contains("experts in the blocks of a GGUF file are not streamed"), "{error}");
    let error = tiny.fail("generate --model model --dtype gguf --prompt The --offload file");
    assert!(error.contains("give the GGUF file, or another dtype"), "{error}");
}

/// The fixture has blocks of seven types.
#[test]
fn a_file_is_described_by_its_architecture_types_tokenizer_and_template() {
    let tiny = Session::new();
    let fixture =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fixtures/gguf_merge/base.gguf");
    std::fs::copy(fixture, tiny.path("base.gguf")).unwrap();
    expect![[r#"
        file           base.gguf, 146 KiB
        architecture   llama
        types          q6_K in 2 tensors, 66.4 KiB; q5_1 in 1 tensor, 24.0 KiB; q4_K in 2 tensors, 22.5 KiB; q5_K in 1 tensor, 11.0 KiB; q8_0 in 1 tensor, 8.50 KiB; q5_0 in 1 tensor, 5.50 KiB; f32 in 3 tensors, 3.00 KiB
        tokenizer      gpt2 (splits text as gpt-2), 260 tokens, ends with </s>
        chat template  none
        model          LlamaForCausalLM
        parameters     190,208
        dtype          bfloat16
        bytes          372 KiB
        layers         1
        hidden size    256
        heads          2 query, 1 key-value
        output head    tied to the embedding
        vocabulary     260
        context        128
        trainable      11,264 of 201,472 (5.59 %) with adapters of rank 8 on q_proj, k_proj, v_proj, o_proj
    "#]].assert_eq(&tiny.succeed("info base.gguf").0.replace(&*tiny.path("").to_string_lossy(), ""));
    let fields = result(&tiny, "info base.gguf --json");
    expect![[r#"
        {
          "q6_K": {
            "tensors": 2,
            "bytes": 68040
          },
          "q5_1": {
            "tensors": 1,
            "bytes": 24576
          },
          "q4_K": {
            "tensors": 2,
            "bytes": 23040
          },
          "q5_K": {
            "tensors": 1,
            "bytes": 11264
          },
          "q8_0": {
            "tensors": 1,
            "bytes": 8704
          },
          "q5_0": {
            "tensors": 1,
            "bytes": 5632
          },
          "f32": {
            "tensors": 3,
            "bytes": 3072
          }
        }
        {
          "model": "gpt2",
          "pre": "gpt-2",
          "tokens": 260,
          "begin": null,
          "ends": [
            "</s>"
          ]
        }
    "#]]
    .assert_eq(&format!("{:#}\n{:#}\n", fields["types"], fields["tokenizer"]));
    // With a template, and a matrix that the file holds twice.
    std::fs::write(tiny.path("model/chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    tiny.succeed("export --format gguf --type q8_0 --model model --out model.gguf --no-verify");
    let fields = result(&tiny, "info model.gguf --json");
    assert_eq!((&fields["architecture"], &fields["model"]), (&"qwen2".into(), &"Qwen2ForCausalLM".into()));
    assert_eq!(
        (&fields["chat_template"], &fields["output_head"]),
        (&"{{ messages[0].content }}".into(), &"tied".into())
    );
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

/// A file that an environment variable's folder has.
#[allow(clippy::print_stderr, reason = "output of a test")]
fn of_folder(variable: &str, name: &str, remedy: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os(variable).map(|folder| std::path::PathBuf::from(folder).join(name));
    let path = path.filter(|path| path.is_file()).and_then(|path| path.canonicalize().ok());
    if path.is_none() {
        eprintln!("skipped: no {name} in {variable}; {remedy}");
    }
    path
}

/// Rows of 512 tokens of WikiText-2's test split: the mean loss that transformers computes in fp32 on the same tokens
/// (`xtask/peers/gguf_models.py`; measured: 6e-7 nats). A difference of 1e-5 is one of 1e-5 of the perplexity.
#[test]
fn perplexity_of_pretrained_models_on_wikitext_is_that_of_transformers() {
    let Some(wikitext) = of_folder("FRUGAL_DATA", "wikitext-2/test.txt", "see data/README.md") else {
        return;
    };
    let tiny = Session::new();
    for name in ["smollm2", "gemma3", "qwen2.5"] {
        let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/real_models");
        let text = std::fs::read_to_string(data.join(format!("{name}.json"))).unwrap();
        let expected: Value = serde_json::from_str(&text).unwrap();
        let file = expected["file"].as_str().unwrap();
        let Some(model) = of_folder("FRUGAL_MODELS", file, "`cargo xtask setup --models` gets it") else {
            continue;
        };
        for flag in ["", "--untied"] {
            let computed = &expected[if flag.is_empty() { "tied" } else { "untied" }];
            let Some(losses) = computed["losses"].as_array() else { continue };
            let out = tiny.succeed(
                &format!(
                    "eval --model {} {flag} --data {} --max-length 512 --limit {} --batch-size 1 --dtype float32 --json --quiet",
                    model.display(),
                    wikitext.display(),
                    losses.len()
                ),
            );
            // The process of the sessions says on its output that it has run for a minute.
            let out = &out.0[out.0.find('{').unwrap()..];
            let measured: Value = serde_json::from_str(out).unwrap();
            let targets = 511 * losses.len() as u64;
            assert_eq!((&measured["tokens"], &measured["rows"]), (&targets.into(), &losses.len().into()));
            let mean = losses.iter().map(|loss| loss.as_f64().unwrap()).sum::<f64>() / targets as f64;
            let loss = measured["loss"].as_f64().unwrap();
            assert!((loss - mean).abs() <= 1e-5, "{name} {flag}: {loss}, transformers {mean}");
        }
    }
}
