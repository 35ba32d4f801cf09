//! Folders of models and tokenizers that cannot be used.

use expect_test::expect;

use super::{Tiny, refused};

const TRAIN: &str = "finetune --model @model --data @problems --steps 1 --out @out";

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
fn an_end_token_that_is_not_there_is_told() {
    let tiny = Tiny::new();
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
fn a_prompt_beyond_the_context_is_told() {
    let tiny = Tiny::new();
    refused(
        &tiny,
        &format!("{TRAIN} --shots 9"),
        expect![[r#"
        error: the training rows (--skip-long leaves long ones out): problem 0: 429 tokens are more than the context of 200; give fewer examples, a model with a longer context, or skip such problems
    "#]],
    );
    refused(
        &tiny,
        "eval --model @model --data @problems --shots 1 --max-new-tokens 190",
        expect![[r#"
        error: problem 0: 69 tokens and 190 to be generated are more than the context of 200; give fewer examples, a model with a longer context, or skip such problems
    "#]],
    );
    std::fs::write(tiny.path("long.txt"), "pears ".repeat(300)).unwrap();
    refused(
        &tiny,
        "generate --model @model --prompts @long.txt",
        expect![[r#"
        error: generation: prompt 0: 602 tokens leave no room for a new one in the model's 200 positions; shorten the prompt, or give fewer examples
    "#]],
    );
}
