//! Adapters, values and flags of a fine-tuning that cannot be.

use expect_test::expect;
use lora::LoraConfig;
use models::hugging_face::Folder;
use tch::Device;

use super::{Tiny, contains, ending, refused};

const TRAIN: &str = "finetune --model @model --data @problems --steps 1 --out @out";

#[test]
fn an_adapter_that_cannot_be_is_told() {
    let tiny = Tiny::new();
    let check = |flags: &str, expected| refused(&tiny, &format!("{TRAIN} {flags}"), expected);
    check(
        "--r 0",
        expect![[r#"
        error: `r` (--r) is 0; expected a rank of at least 1
    "#]],
    );
    check(
        "--dropout 1",
        expect![[r#"
        error: `lora_dropout` (--dropout) is 1; expected a probability in [0, 1)
    "#]],
    );
    for flags in ["--method qlora", "--load-in-4bit"] {
        check(
            flags,
            expect![[r#"
                error: a frozen base in four bits (QLoRA) is --method lora with --dtype nf4
            "#]],
        );
    }
    check(
        "--targets query",
        expect![[r#"
        error: `target_modules` (--targets) ["query"] matches none of the model's projections; they are `model.layers.0.self_attn.q_proj`, `model.layers.0.self_attn.k_proj`, `model.layers.0.self_attn.v_proj`, `model.layers.0.self_attn.o_proj`, `model.layers.0.mlp.gate_proj`, `model.layers.0.mlp.up_proj`, `model.layers.0.mlp.down_proj`, `model.layers.1.self_attn.q_proj`, `model.layers.1.self_attn.k_proj`, `model.layers.1.self_attn.v_proj`, `model.layers.1.self_attn.o_proj`, `model.layers.1.mlp.gate_proj` and 3 more. Name some of them, whole or by their last part
    "#]],
    );
    check(
        "--target-pattern (",
        expect![[r#"
        error: the pattern `(`: opening parenthesis without closing parenthesis
    "#]],
    );
    check(
        "--init zeros",
        expect![[r#"
        error: `init_lora_weights` (--init) is "zeros", which is not supported; take true, false, "gaussian", "pissa", "olora" or "orthogonal", or convert the adapter to one that leaves the base as it is (PEFT: path_initial_model_for_weight_conversion)
    "#]],
    );
    assert!(!tiny.path("out").exists(), "nothing is made before it is known to be possible");
    let into_base = "finetune --model @model --data @problems --steps 1 --out @model";
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
        error: --ring and --resident apply to offloaded layers only; give --offload host or --offload file
    "#]],
    );
    check(
        "--optimizer-on host",
        expect![[r#"
        error: `optimizer.place = "host"` (--optimizer-on host) and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload` (--offload), or use `optimizer.place = "device"` (--optimizer-on device)
    "#]],
    );
    check(
        "--validation @problems/test.jsonl",
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
        refused(&tiny, &format!("finetune --model @model --data @rows.jsonl --out @out {flags}"), expected);
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
    let (status, said) = ending(&tiny, &format!("{TRAIN} --budget 1KiB"));
    assert_eq!(status, 3, "as where nothing fits: {said}");
    assert!(said.contains("error: nothing fits a budget of 1.00 KiB; the least is "), "{said}");
    refused(
        &tiny,
        "resume @model",
        expect![[r#"
        error: model: no config.toml in it; give the --out folder of a training
    "#]],
    );
    refused(
        &tiny,
        "info @model/config.json",
        expect![[r#"
        error: `model/config.json`: it is a file; give the folder of a model
    "#]],
    );
}

#[test]
fn an_adapter_of_another_base_is_told() {
    let tiny = Tiny::new();
    let mut model = Folder::open(&tiny.path("model")).unwrap().load(None, Device::Cpu).unwrap();
    let targets = Some(["q_proj", "k_proj", "v_proj", "o_proj"].into());
    let config = LoraConfig { target_modules: targets, ..LoraConfig::default() };
    let adapters = LoraConfig { seed: 3, ..config.clone() }.install(&mut model).unwrap();
    adapters.save(&tiny.path("out")).unwrap();
    tiny.write_model("wide", 32, 1);
    refused(
        &tiny,
        "merge --model @wide --adapter @out --out @merged",
        expect![[r#"
        error: the adapter out: out/adapter_model.safetensors does not fit this model: of another shape `model.layers.0.self_attn.q_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.0.self_attn.q_proj.lora_B.weight [16, 8] (expected [32, 8])`, `model.layers.0.self_attn.k_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.0.self_attn.k_proj.lora_B.weight [8, 8] (expected [16, 8])`, `model.layers.0.self_attn.v_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.0.self_attn.v_proj.lora_B.weight [8, 8] (expected [16, 8])`, `model.layers.0.self_attn.o_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.0.self_attn.o_proj.lora_B.weight [16, 8] (expected [32, 8])`, `model.layers.1.self_attn.q_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.1.self_attn.q_proj.lora_B.weight [16, 8] (expected [32, 8])`, `model.layers.1.self_attn.k_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.1.self_attn.k_proj.lora_B.weight [8, 8] (expected [16, 8])` and 4 more; it belongs to another base model, or its configuration was changed later
    "#]],
    );
    assert!(!tiny.path("merged").exists());
    refused(
        &tiny,
        "generate --model @model --adapter @problems --prompt a",
        expect![[r#"
        error: the adapter problems: problems/adapter_config.json: No such file or directory (os error 2); an adapter's folder contains adapter_config.json and adapter_model.safetensors
    "#]],
    );
    // It does not name its model.
    contains(
        &tiny,
        "generate --model @out --prompt a",
        1,
        "error: out does not name its base model; give that as --model, and this folder as --adapter",
    );
    refused(
        &tiny,
        "export --checkpoints @problems --out @exported",
        expect![[r#"
        error: problems: no checkpoint in it; give the --out of a training
    "#]],
    );
}

#[test]
fn what_does_not_go_together_is_refused_before_a_weight_is_read() {
    let tiny = Tiny::new();
    std::fs::write(tiny.path("model/model.safetensors"), "no weights").unwrap();
    for (flags, words) in [
        ("--optimizer-on host", "(--optimizer-on host) and weights on the device cannot be combined"),
        ("--activations plan", "(--activations plan) and no budget cannot be combined"),
        (
            "--method full --offload file",
            "(--optimizer-on device) cannot be combined: the optimizer's state of trained layers in files is in files, too",
        ),
        (
            "--mlp input-only --targets all-linear",
            "and an adapter on the MLP's projections cannot be combined",
        ),
        ("--zero-stage 2", "start it with `frugal launch"),
    ] {
        contains(&tiny, &format!("{TRAIN} {flags}"), 1, words);
    }
    assert!(!tiny.path("out").exists());
}

#[test]
fn values_that_cannot_be_set_are_refused_before_anything_is_made() {
    let tiny = Tiny::new();
    std::fs::write(tiny.path("bad.toml"), "[training]\nstep = 5\n").unwrap();
    for (flags, words) in [
        ("--set optimizer.rl=1", "error: --set `optimizer.rl=1`: unknown field `rl`"),
        ("--set optimizer.rl=1", "did you mean `lr`?"),
        ("--set training.steps", "expected KEY=VALUE"),
        (
            "--patience 2",
            "`training.patience` (--patience) is 2; expected `training.evaluate_every` (--evaluate-every)",
        ),
        ("--held-out 0.7", "`data.held_out` (--held-out) is 0.7; expected a share from 0 to 0.5"),
        ("--config @bad.toml", "line 2 (`step = 5`): unknown field `step`"),
    ] {
        contains(&tiny, &format!("{TRAIN} {flags}"), 1, words);
    }
    assert!(!tiny.path("out").exists());
}

#[test]
fn a_base_in_nf4_is_not_trained_itself() {
    let tiny = Tiny::new();
    for (flags, words) in [
        ("--method full", "and full fine-tuning cannot be combined"),
        ("--mlp input-only", "cannot be combined: the recomputed MLP is one function"),
    ] {
        contains(&tiny, &format!("{TRAIN} --dtype nf4 {flags}"), 1, words);
    }
}
