//! What the program says where it cannot go on: one line, what came, what was expected, what to do.

use crate::tiny_folder::Tiny;
use expect_test::{Expect, expect};

fn refused(tiny: &Tiny, arguments: &str, expected: Expect) {
    let output = tiny.run(arguments);
    let said = tiny.without_path(&String::from_utf8(output.stderr).unwrap());
    // What the data are is said before they are read.
    let said: String = said.split_inclusive('\n').filter(|line| !line.starts_with("data: ")).collect();
    assert_eq!(output.status.code(), Some(1), "{arguments}: {said}");
    assert_eq!(said.lines().count(), 1, "one line: {said}");
    expected.assert_eq(&said);
}

const TRAIN: &str = "finetune --model model --data problems --steps 1 --out out";

#[test]
fn a_folder_that_is_no_model_is_named() {
    let tiny = Tiny::new();
    let check = |arguments: &str, expected| refused(&tiny, arguments, expected);
    check(
        "info nowhere --offline",
        expect![[r#"
        error: `nowhere`: no folder has that name, and on the hub: the cache has no model of this name at revision `main`, and the network is switched off (offline, or HF_HUB_OFFLINE); fetch it once with the network
    "#]],
    );
    std::fs::remove_file(tiny.path("model/tokenizer.json")).unwrap();
    check(
        TRAIN,
        expect![[r#"
        error: model: tokenizer.json is missing; put there the one that came with the model
    "#]],
    );
    std::fs::write(tiny.path("model/tokenizer.json"), "{").unwrap();
    check(
        TRAIN,
        expect![[r#"
            error: model/tokenizer.json: tokenizer: EOF while parsing an object at line 1 column 1; use the tokenizer.json of the model
        "#]],
    );
    std::fs::remove_file(tiny.path("model/model.safetensors")).unwrap();
    check(
        TRAIN,
        expect![[r#"
        error: model: neither model.safetensors nor model.safetensors.index.json exists; the folder contains config.json, generation_config.json, tokenizer.json
    "#]],
    );
    std::fs::remove_file(tiny.path("model/config.json")).unwrap();
    check(
        TRAIN,
        expect![[r#"
        error: model: config.json is missing; the folder contains generation_config.json, tokenizer.json
    "#]],
    );
}

#[test]
fn a_tokenizer_that_does_not_fit_is_told() {
    let tiny = Tiny::new();
    let path = tiny.path("model/tokenizer.json");
    let text = String::from_utf8(tiny.bytes("model/tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["added_tokens"][1]["id"] = 5000.into();
    json["added_tokens"][1]["content"] = "<|beyond|>".into();
    std::fs::write(&path, json.to_string()).unwrap();
    refused(
        &tiny,
        TRAIN,
        expect![[r#"
        error: the tokenizer does not fit the model: it gives the id 4096 ("<|beyond|>") and the model's vocabulary is 4096 (0 to 4095); take the tokenizer.json that came with the model
    "#]],
    );
    std::fs::write(&path, text).unwrap();
    refused(
        &tiny,
        &format!("{TRAIN} --end-token <eos>"),
        expect![[r#"
        error: --end-token <eos>: the tokenizer has no such token; give one of its tokens, as `<|endoftext|>`
    "#]],
    );
    std::fs::remove_file(tiny.path("model/generation_config.json")).unwrap();
    refused(
        &tiny,
        TRAIN,
        expect![[r#"
        error: model: neither generation_config.json nor config.json has `eos_token_id`; say with --end-token which token ends an answer
    "#]],
    );
}

#[test]
fn an_adapter_that_cannot_be_is_told() {
    let tiny = Tiny::new();
    let check = |flags: &str, expected| refused(&tiny, &format!("{TRAIN} {flags}"), expected);
    check(
        "--r 0",
        expect![[r#"
        error: `r` is 0; expected a rank of at least 1; without an adapter there is no rank
    "#]],
    );
    check(
        "--dropout 1",
        expect![[r#"
        error: `lora_dropout` is 1; expected a probability in [0, 1)
    "#]],
    );
    check(
        "--targets query",
        expect![[r#"
        error: `target_modules` ["query"] matches none of the model's projections; they are `model.layers.0.self_attn.q_proj`, `model.layers.0.self_attn.k_proj`, `model.layers.0.self_attn.v_proj`, `model.layers.0.self_attn.o_proj`, `model.layers.0.mlp.gate_proj`, `model.layers.0.mlp.up_proj`, `model.layers.0.mlp.down_proj`, `model.layers.1.self_attn.q_proj`, `model.layers.1.self_attn.k_proj`, `model.layers.1.self_attn.v_proj`, `model.layers.1.self_attn.o_proj`, `model.layers.1.mlp.gate_proj` and 3 more. Name some of them, whole or by their last part
    "#]],
    );
    check(
        "--target-pattern (",
        expect![[r#"
        error: the pattern `(`: unclosed group; patterns are Python's without look-around and back-references
    "#]],
    );
    check(
        "--init zeros",
        expect![[r#"
        error: `init_lora_weights` is "zeros", which is not supported; take true, false, "gaussian", "pissa", "olora" or "orthogonal", or convert the adapter to one that leaves the base as it is (PEFT: path_initial_model_for_weight_conversion)
    "#]],
    );
    assert!(!tiny.path("out").exists(), "nothing is made before it is known to be possible");
    let into_base = "finetune --model model --data problems --steps 1 --out model";
    refused(
        &tiny,
        into_base,
        expect![[r#"
        error: --out model is the model's own folder; give another
    "#]],
    );
    check(
        "--warmup -0.1",
        expect![[r#"
            error: `optimizer.warmup` (--warmup) is -0.1; expected a share of the steps below 1, or a number of steps
        "#]],
    );
    check(
        "--ring 2",
        expect![[r#"
        error: --ring and --resident are about offloaded layers; give --offload host or --offload file
    "#]],
    );
    check(
        "--optimizer-on host",
        expect![[r#"
        error: `optimizer.place = "host"` (--optimizer-on host) and weights on the device do not go together: the update on the host is that of offloaded layers; add `offload` (--offload), or take `optimizer.place = "device"` (--optimizer-on device)
    "#]],
    );
    check(
        "--validation problems/test.jsonl",
        expect![[r#"
        error: --validation: GSM8K has a validation split of its own; leave it out
    "#]],
    );
    check(
        "--packing 10",
        expect![[r#"
            error: training rows: row 0 has 41 positions, but packed rows have 10; use longer packed rows, or leave such rows out
        "#]],
    );
}

#[test]
fn values_that_leave_nothing_to_do_are_refused() {
    let tiny = Tiny::new();
    std::fs::write(tiny.path("rows.jsonl"), "{\"text\": \"\"}\n{\"text\": \"a pear\"}\n").unwrap();
    let check = |flags: &str, expected| {
        refused(&tiny, &format!("finetune --model model --data rows.jsonl --out out {flags}"), expected);
    };
    check(
        "--steps 0",
        expect![[r#"
        error: `training.steps` (--steps) is 0; expected 1 or more
    "#]],
    );
    check(
        "--limit 0",
        expect![[r#"
        error: `data.limit` (--limit) is 0; expected 1 or more
    "#]],
    );
    check(
        "--keep 0",
        expect![[r#"
        error: `training.keep` (--keep) is 0; expected 1 or more
    "#]],
    );
    check(
        "--evaluate-every 1 --held-out 0",
        expect![[r#"
        error: --evaluate-every, and no validation data; give some as --validation, or leave it out
    "#]],
    );
    check(
        "--max-length 1 --skip-long",
        expect![[r#"
        error: rows.jsonl: 1 rows are longer than 1 tokens, and no other is left; shorten them, or raise the longest row
    "#]],
    );
    assert!(!tiny.path("out").exists());
    let output = tiny.run("finetune --model model --data rows.jsonl --out out --budget 1KiB");
    assert_eq!(output.status.code(), Some(3), "as where nothing fits");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("error: a budget of 1.00 KiB is less than the program takes by itself"), "{said}");
    refused(
        &tiny,
        "resume model",
        expect![[r#"
        error: model: no config.toml in it; give the --out folder of a training
    "#]],
    );
    refused(
        &tiny,
        "info model/config.json",
        expect![[r#"
        error: `model/config.json`: it is a file; give the folder of a model
    "#]],
    );

    let (_, said) = tiny.succeed("finetune --model model --data rows.jsonl --out rows --steps 1");
    assert!(
        said.starts_with("data: rows.jsonl (text)\n")
            && said.contains("\n1 of 2 training rows have no text to learn and are left out\n"),
        "{said}"
    );
    let (out, said) = tiny.succeed("merge --model model --adapter rows --out merged --json");
    assert_eq!((out.as_str(), said.as_str()), ("{\"result\":{\"model\":\"merged\"}}\n", ""));
    let (out, said) = tiny.succeed("export --adapter rows --out exported --json");
    assert_eq!(
        (out.as_str(), said.as_str()),
        ("{\"result\":{\"adapter\":\"exported\",\"tensors\":16}}\n", "")
    );
    let (_, said) = tiny.succeed("export --adapter rows --out exported --overwrite --quiet");
    assert_eq!(said, "");
}

#[test]
fn an_adapter_of_another_base_is_told() {
    let tiny = Tiny::new();
    tiny.succeed(TRAIN);
    tiny.write_model("wide", 32, 1);
    refused(
        &tiny,
        "merge --model wide --adapter out --out merged",
        expect![[r#"
        error: the adapter out: out/adapter_model.safetensors does not fit this model: of another shape `model.layers.0.self_attn.q_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.0.self_attn.q_proj.lora_B.weight [16, 8] (expected [32, 8])`, `model.layers.0.self_attn.k_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.0.self_attn.k_proj.lora_B.weight [8, 8] (expected [16, 8])`, `model.layers.0.self_attn.v_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.0.self_attn.v_proj.lora_B.weight [8, 8] (expected [16, 8])`, `model.layers.0.self_attn.o_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.0.self_attn.o_proj.lora_B.weight [16, 8] (expected [32, 8])`, `model.layers.1.self_attn.q_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.1.self_attn.q_proj.lora_B.weight [16, 8] (expected [32, 8])`, `model.layers.1.self_attn.k_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.1.self_attn.k_proj.lora_B.weight [8, 8] (expected [16, 8])` and 4 more; it belongs to another base model, or its configuration was changed later
    "#]],
    );
    assert!(!tiny.path("merged").exists());
    refused(
        &tiny,
        "generate --model model --adapter problems --prompt a",
        expect![[r#"
        error: the adapter problems: problems/adapter_config.json: No such file or directory (os error 2); an adapter's folder contains adapter_config.json and adapter_model.safetensors
    "#]],
    );
    let output = tiny.run("generate --model out --prompt a");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.starts_with("error: out: config.json is missing; the folder contains adapter_config.json, "),
        "{said}"
    );
    assert!(
        said.ends_with("; this is an adapter's folder: give it as --adapter, and its base as --model\n"),
        "{said}"
    );
    refused(
        &tiny,
        "export --checkpoints problems --out exported",
        expect![[r#"
        error: problems: no checkpoint in it; give the --out of a training
    "#]],
    );
}

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
        error: problems/train.jsonl: line 41: the answer has no `#### NUMBER` (it ends with "It is 5."); write the result in a last line, as `#### 42`
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
        "finetune --model model --data nothing.jsonl --out out",
        expect![[r#"
            error: nothing.jsonl is not there; give a file of records (.jsonl, .json, .csv, .parquet), a text file, or a folder with train.*
        "#]],
    );
    refused(
        &tiny,
        "finetune --model model --data model --out out",
        expect![[r#"
        error: model: no training data: expected a file such as train.jsonl, train.parquet or train.csv, with validation.* and test.* beside it if there are any; the folder has config.json, generation_config.json, model.safetensors, tokenizer.json
    "#]],
    );
    refused(
        &tiny,
        "eval --model model --data problems/test.jsonl --split official",
        expect![[r#"
        error: problems/test.jsonl: a file has no official test set; give the folder with test.jsonl
    "#]],
    );
}

#[test]
fn a_prompt_beyond_the_context_is_told() {
    let tiny = Tiny::new();
    refused(
        &tiny,
        &format!("{TRAIN} --shots 9"),
        expect![[r#"
        error: the training rows (--skip-long leaves long ones out): problem 0: 429 tokens are more than the context of 200; take fewer examples, a model with a longer context, or skip such problems
    "#]],
    );
    refused(
        &tiny,
        "eval --model model --data problems --shots 1 --max-new-tokens 190",
        expect![[r#"
        error: problem 0: 69 tokens and 190 to be generated are more than the context of 200; take fewer examples, a model with a longer context, or skip such problems
    "#]],
    );
    std::fs::write(tiny.path("long.txt"), "pears ".repeat(300)).unwrap();
    refused(
        &tiny,
        "generate --model model --prompts long.txt",
        expect![[r#"
        error: generation: prompt 0: 602 tokens leave no room for a new one in the model's 200 positions; shorten the prompt, or give fewer examples
    "#]],
    );
    let (_, err) = tiny.succeed(
        "eval --model model --data problems --shots 1 --max-new-tokens 190 --skip-long --limit 1 --json",
    );
    assert_eq!(err, "");
}

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
    ] {
        assert_eq!(tiny.run(arguments).status.code(), Some(2), "{arguments}");
    }
}
