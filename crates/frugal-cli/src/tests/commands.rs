//! Wrong flags, and what each command but a training refuses.

use expect_test::expect;

use super::{Tiny, contains, end, ending, refused};

#[test]
fn wrong_flags_are_a_usage_error() {
    let tiny = Tiny::new();
    for arguments in [
        "finetune --model model",
        "generate --model model",
        "generate --model model --prompt a --prompts b",
        "eval --model model --data problems --split all",
        "export --out out",
        "merge --model model --adapter a --out b --dtype int8",
        "finetune --model model --data problems --out out --activations recompute --recompute",
        "train --optimizer shampoo",
        "train --schedule step",
    ] {
        let (status, said) = ending(&tiny, arguments);
        assert_eq!(status, 2, "{arguments}: {said}");
    }
}

#[test]
fn wrong_values_are_told_in_words() {
    let tiny = Tiny::new();
    let train = "finetune --model @model --data @problems --out @out";
    let generate = "generate --model @model --prompt The";
    for (arguments, words) in [
        (format!("{train} --lr abc"), "error: invalid value 'abc' for '--lr <LR>': expected a number\n"),
        (format!("{train} --epochs x"), "for '--epochs <EPOCHS>': expected a whole number\n"),
        (
            format!("{train} --epochs 99999999999999999999"),
            "for '--epochs <EPOCHS>': the number is too large\n",
        ),
        (format!("{generate} --temperature -1"), "expected a number above 0, or 0 for greedy decoding\n"),
        (format!("{generate} --temperature NaN"), "expected a number above 0, or 0 for greedy decoding\n"),
    ] {
        contains(&tiny, &arguments, 2, words);
    }
    contains(&tiny, &format!("{train} --set lr=1"), 1, "did you mean `optimizer.lr`?");
    let (status, said) =
        end(["generate", "--model", &tiny.path("model").display().to_string(), "--prompt", ""]);
    assert_eq!((status, &*said), (1, "error: --prompt is empty; give a text to continue\n"));
    for command in ["resume", "runs show"] {
        contains(
            &tiny,
            &format!("{command} @nowhere"),
            1,
            "nowhere: no such folder; give the --out folder of a training",
        );
    }
}

#[test]
fn an_impossible_budget_of_a_generation_is_refused() {
    let tiny = Tiny::new();
    for (flags, status, words) in [
        ("--budget 1MiB", 3, "error: a budget of 1.00 MiB is below the "),
        ("--budget 2Gi", 2, "write for example 80GB or 24GiB"),
        ("--ring 0", 2, "0 is not in 1..=64"),
        (
            "--ring 2",
            1,
            "--ring and --resident apply to offloaded layers only; give --offload host or --offload file",
        ),
        ("--budget 2GiB --resident 1", 2, "cannot be used with"),
    ] {
        contains(&tiny, &format!("generate --model @model --prompt The {flags}"), status, words);
    }
}

#[test]
fn flags_of_another_format_and_missing_parts_of_an_export_are_refused() {
    let tiny = Tiny::new();
    for (arguments, words) in [
        ("gguf --adapter @problems --out @x.gguf", "--format gguf needs the base model; give --model"),
        ("gguf-lora --model @model --out @x.gguf", "there is no adapter; give --adapter or --checkpoints"),
        (
            "merged --model @model --out @x",
            "there is nothing to merge; give --adapter or --checkpoints (the model of a training of all weights is whole: it is the folder model of the training's output)",
        ),
        (
            "gguf --model @model --out @problems",
            "--out problems is a folder; give a file, such as problems/model.gguf",
        ),
        (
            "peft --adapter @problems --out @x.gguf",
            "--out x.gguf names a GGUF file, and --format peft writes a folder; give --format gguf or gguf-lora, or another --out",
        ),
        ("peft --adapter @problems --out @x --type f16", "--format peft has no --type"),
        ("gguf --model @model --out @x.gguf --dtype bf16", "--format gguf has no --dtype"),
        ("merged --model @model --adapter @problems --out @x --verify", "--format merged has no --verify"),
        (
            "nf4 --model @model --adapter @problems --out @x",
            "--format nf4 writes a whole model; merge the adapter first, `frugal merge --model model --adapter problems --out merged`, \
             then export that: --model merged",
        ),
        (
            "peft --model @model --out @x",
            "model is a model, and --format peft writes an adapter; choose --format gguf, nf4 or ollama",
        ),
        (
            "peft --model @model --adapter @problems --out @x",
            "--format peft writes the adapter alone; leave out --model",
        ),
        (
            "gguf --model @model --out @x.gguf --verify --python no-python",
            "no-python: No such file or directory (os error 2); give a Python with --python",
        ),
    ] {
        let (status, said) = ending(&tiny, &format!("export --format {arguments}"));
        assert_eq!((status, &*said), (1, &*format!("error: {words}\n")), "{arguments}");
    }
    let config = String::from_utf8(tiny.bytes("model/config.json")).unwrap();
    std::fs::write(tiny.path("model/config.json"), config.replace("\"qwen2\"", "\"mamba\"")).unwrap();
    let (status, said) = ending(&tiny, "export --format ollama --model @model --out @new/x");
    assert!(status == 1 && said.contains("`mamba`"), "{said}");
    assert!(!tiny.path("new").exists(), "a refused export makes no folder");
    refused(
        &tiny,
        "export --format gguf --model @model --out @x.gguf",
        expect![[r#"
            error: the `model_type` is not supported: `mamba`; the families that can be converted are llama, mistral, granite, smollm3, qwen2, qwen3, qwen3_moe, gpt_oss, qwen3_5_moe_text, qwen3_5_text, olmo2, phi3, gemma2, gemma3_text, gemma4_text
        "#]],
    );
    assert!(!tiny.path("x.gguf").exists() && !tiny.path("x").exists());
}
