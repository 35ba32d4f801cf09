//! `frugal export` in every format.

use expect_test::{Expect, expect};
use gguf::Reader;
use models::tensors_file;
use serde_json::{Value, json};
use tch::{Device, Tensor};

use super::session::Session;

const TRAIN: &str =
    "finetune --model model --data problems --r 4 --batch-size 4 --accumulation 1 --steps 2 --quiet";

fn refused(tiny: &Session, arguments: &str, expected: Expect) {
    let ended = tiny.run(arguments);
    assert_eq!(ended.status, 1, "{arguments}");
    expected.assert_eq(&tiny.without_path(&ended.err));
}

fn result(out: &str) -> Value {
    serde_json::from_str::<Value>(out).unwrap()["result"].clone()
}

#[test]
fn a_fine_tuned_model_is_exported_in_every_format() {
    let tiny = Session::new();
    tiny.succeed(&format!("{TRAIN} --out adapter"));
    let (_, said) = tiny.succeed("export --format merged --model model --checkpoints adapter --out merged");
    assert_eq!(said, "exported to merged\n");
    tiny.succeed("merge --model model --adapter adapter --out expected --quiet");
    assert!(tiny.bytes("merged/model.safetensors") == tiny.bytes("expected/model.safetensors"));

    let (out, _) = tiny.succeed(
        "export --format gguf --type f32 --model model --adapter adapter --out new/tuned.gguf --json",
    );
    let fields = result(&out);
    assert_eq!((&fields["file"], &fields["notes"]), (&json!("new/tuned.gguf"), &json!([])));
    let file = Reader::open(&tiny.path("new/tuned.gguf")).unwrap();
    assert_eq!(file.header().get("general.name"), Some(&"tuned".into()));
    assert_eq!(fields["tensors"], file.header().tensors.len());
    // The values are the merged ones.
    let merged = tensors_file::read(&tiny.path("merged/model.safetensors"), Device::Cpu).unwrap();
    let (_, up) = merged.iter().find(|(name, _)| name == "model.layers.1.self_attn.v_proj.weight").unwrap();
    let found = file.rows(file.position("blk.1.attn_v.weight").unwrap(), 0..up.size()[0] as u64).unwrap();
    assert_eq!(Tensor::from_slice(&found).view_as(up), *up);
    let left = std::fs::read_dir(tiny.path("new")).unwrap().count();
    assert_eq!(left, 1, "temporary folders are removed");

    // What exists is replaced only on demand.
    tiny.succeed("export --format peft --adapter adapter --out peft");
    for (arguments, out) in [
        ("export --format peft --adapter adapter", "peft"),
        ("merge --model model --adapter adapter", "peft"),
    ] {
        refused(
            &tiny,
            &format!("{arguments} --out {out}"),
            expect![[r#"
                error: --out peft exists; give another, or --overwrite to replace what is there
            "#]],
        );
    }
    tiny.succeed("export --format peft --adapter adapter --out peft --overwrite");

    let template = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}\
                    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let config = json!({ "chat_template": template }).to_string();
    std::fs::write(tiny.path("model/tokenizer_config.json"), config).unwrap();
    tiny.succeed("export --format gguf-lora --model model --adapter adapter --out adapter.gguf");
    let file = Reader::open(&tiny.path("adapter.gguf")).unwrap();
    assert_eq!(file.header().tensors.len(), 2 * 4 * 2);

    let (_, said) = tiny.succeed("export --format ollama --model model --adapter adapter --out chat");
    // Of width 16, no row of this model is a multiple of 32 long.
    expect![[r#"
        note: 15 matrices are stored as f16, because their rows are not a multiple of 32 long: token_embd.weight, …
        not verified with llama.cpp: there is no Python with xllamacpp, which has it (pip install xllamacpp)
        to use it: cd chat && ollama create NAME -f Modelfile
        exported to chat
    "#]]
    .assert_eq(&said);
    expect![[r#"
        FROM ./model-q8_0.gguf
        ADAPTER ./adapter.gguf
        # The chat template is ChatML.
        TEMPLATE """{{- range $i, $_ := .Messages }}
        SYSTEM """Be kind."""
        PARAMETER stop "<|endoftext|>"
        # The model's context is 200 tokens; each takes memory.
        PARAMETER num_ctx 200
    "#]]
    .assert_eq(&{
        let text = String::from_utf8(tiny.bytes("chat/Modelfile")).unwrap();
        let lines = text.lines().filter(|line| !line.starts_with("{{-"));
        lines.map(|line| format!("{line}\n")).collect::<String>()
    });
}

/// A DoRA adapter is no product of two matrices on the base.
#[test]
fn an_adapter_that_gguf_cannot_hold_is_merged_for_ollama() {
    let tiny = Session::new();
    tiny.succeed(&format!("{TRAIN} --dora --out adapter"));
    let (_, said) =
        tiny.succeed("export --format ollama --type f16 --model model --checkpoints adapter --out chat");
    expect![[r#"
        the adapter is merged into the model: `use_dora` of an adapter in GGUF is not supported: true; merge it into the model, and export that as GGUF
        not verified with llama.cpp: there is no Python with xllamacpp, which has it (pip install xllamacpp)
        to use it: cd chat && ollama create NAME -f Modelfile
        exported to chat
    "#]]
    .assert_eq(&said);
    assert!(!tiny.path("chat/adapter.gguf").exists());
    refused(
        &tiny,
        "export --format gguf-lora --model model --adapter adapter --out adapter.gguf",
        expect![[r#"
            error: `use_dora` of an adapter in GGUF is not supported: true; merge it into the model, and export that as GGUF
        "#]],
    );
}

/// Merged and quantized in one command.
#[test]
fn a_run_is_merged_into_a_file_of_fewer_bits() {
    let tiny = Session::new();
    tiny.succeed(&format!("{TRAIN} --out adapter"));
    for (kind, number) in [("q6_k", 18), ("q5_k_m", 17), ("q4_k_m", 15), ("q4_0", 2)] {
        let out = format!("{kind}.gguf");
        tiny.succeed(&format!(
            "export --format gguf --type {kind} --no-verify --model model --checkpoints adapter --out {out}"
        ));
        let file = gguf::Reader::open(&tiny.path(&out)).unwrap();
        assert_eq!(file.header().get("general.file_type"), Some(&gguf::Value::U32(number)), "{kind}");
    }
}

/// A file that llama.cpp refuses does not get its name, and what was there before stays.
#[cfg(unix)]
#[test]
fn a_failed_verification_leaves_what_was_there() {
    use std::os::unix::fs::PermissionsExt as _;

    let tiny = Session::new();
    tiny.succeed(&format!("{TRAIN} --out adapter"));
    let python = tiny.path("python");
    std::fs::write(
        &python,
        "#!/bin/sh\ntest \"$2\" = 'import xllamacpp' && exit 0\ncat > /dev/null; echo 'no such rows' >&2\nexit 1\n",
    )
    .unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (format, out, file) in [
        ("gguf --model model", "out.gguf", "out.gguf"),
        ("gguf-lora --model model --adapter adapter", "lora.gguf", "lora.gguf"),
        ("ollama --model model", "ollama", "ollama/model-q8_0.gguf"),
    ] {
        let export = format!("export --format {format} --python ./python --out {out}");
        let error = tiny.fail(&export);
        assert!(error.contains(&format!("error: {out} is not written: ")), "{error}");
        assert!(error.contains("llama.cpp cannot run it: no such rows"), "{error}");
        assert!(!tiny.path(out).exists(), "{out}");
        if format.starts_with("ollama") {
            std::fs::create_dir(tiny.path(out)).unwrap();
            std::fs::write(tiny.path("ollama/Modelfile"), "FROM x\n").unwrap();
        }
        std::fs::write(tiny.path(file), "GGUF, an earlier one").unwrap();
        tiny.fail(&format!("{export} --overwrite"));
        assert_eq!(std::fs::read_to_string(tiny.path(file)).unwrap(), "GGUF, an earlier one");
        let hidden = |name: std::ffi::OsString| name.to_string_lossy().starts_with('.');
        let left = std::fs::read_dir(tiny.path(""))
            .unwrap()
            .filter(|entry| hidden(entry.as_ref().unwrap().file_name()));
        assert_eq!(left.count(), 0, "temporary files are removed");
    }
}
