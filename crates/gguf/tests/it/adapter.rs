//! Adapters: names, the interleaved rows of B, scales, and what is refused.

use expect_test::{Expect, expect};
use gguf::{Adapter, Value};
use serde_json::json;

use crate::tiny_model::{HEAD, HEADS, HIDDEN, KEYS, ROWS, Tiny, value, values, write_tensors, written};

const RANK: u64 = 4;

/// An adapter of q and k of layer 1, and of `down_proj` of layer 0.
fn adapter(tiny: &Tiny, own: serde_json::Value) {
    let (queries, keys) = (HEADS * HEAD, KEYS * HEAD);
    std::fs::create_dir_all(tiny.path("adapter")).unwrap();
    let mut config = json!({
        "peft_type": "LORA", "r": RANK, "lora_alpha": 12, "bias": "none", "use_dora": false, "modules_to_save": null,
        "init_lora_weights": true, "target_modules": ["q_proj", "k_proj", "down_proj"], "fan_in_fan_out": false
    });
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    tiny.write("adapter/adapter_config.json", &config.to_string());
    let name =
        |module: &str, half: &str| format!("base_model.model.model.layers.{module}.lora_{half}.weight");
    write_tensors(
        &tiny.path("adapter/adapter_model.safetensors"),
        &[
            (name("1.self_attn.q_proj", "A"), vec![RANK, HIDDEN]),
            (name("1.self_attn.q_proj", "B"), vec![queries, RANK]),
            (name("1.self_attn.k_proj", "A"), vec![RANK, HIDDEN]),
            (name("1.self_attn.k_proj", "B"), vec![keys, RANK]),
            (name("0.mlp.down_proj", "A"), vec![RANK, 96]),
            (name("0.mlp.down_proj", "B"), vec![HIDDEN, RANK]),
        ],
    );
}

fn open(tiny: &Tiny) -> gguf::Result<Adapter> {
    Adapter::open(&tiny.path("adapter"), tiny.folder.path())
}

#[test]
fn an_adapter_has_the_rows_and_names_of_its_model() {
    for (family, is_interleaved) in [("llama", true), ("qwen2", false)] {
        let tiny = Tiny::of(family);
        adapter(&tiny, json!({}));
        let adapter = open(&tiny).unwrap();
        let conversion = adapter.convert(&|_, rank| Ok(12.0 / rank as f64)).unwrap();
        let file = written(&conversion, &tiny.path("adapter.gguf"));
        let names: Vec<&str> = file.header().tensors.iter().map(|tensor| &*tensor.name).collect();
        assert_eq!(
            names,
            [
                "blk.0.ffn_down.weight.lora_a",
                "blk.0.ffn_down.weight.lora_b",
                "blk.1.attn_k.weight.lora_a",
                "blk.1.attn_k.weight.lora_b",
                "blk.1.attn_q.weight.lora_a",
                "blk.1.attn_q.weight.lora_b"
            ]
        );
        let own = |key: &str| file.header().get(key).cloned();
        assert_eq!(own("general.architecture"), Some(family.into()));
        assert_eq!((own("general.type"), own("adapter.type")), (Some("adapter".into()), Some("lora".into())));
        assert_eq!(own("adapter.lora.alpha"), Some(Value::F32(12.0)));
        for (at, x) in (0u64..).zip(values(&file, "blk.1.attn_q.weight.lora_b")) {
            let (row, column) = (at / RANK, at % RANK);
            let within = row % HEAD;
            let source = match is_interleaved {
                true => row - within + within / 2 + (within % 2) * (HEAD / 2),
                false => row,
            };
            assert_eq!(x, value(1, source * RANK + column), "{family} {row}");
        }
        let a = values(&file, "blk.1.attn_q.weight.lora_a");
        assert!((0u64..).zip(a).all(|(at, x)| x == value(0, at)));
    }
}

/// llama.cpp multiplies by α/r; any other scale is in B. Where α is 0 it would multiply by 1.
#[test]
fn other_scales_are_multiplied_into_b() {
    let tiny = Tiny::of("qwen2");
    for (alpha, scale, written_alpha) in [(12.0, 6.0, 12.0f32), (0.0, 0.0, 1.0)] {
        adapter(&tiny, json!({ "lora_alpha": alpha, "use_rslora": true }));
        let adapter = open(&tiny).unwrap();
        let only = |module: &str, _: u64| Ok(if module.ends_with("q_proj") { scale } else { alpha / 4.0 });
        let file = written(&adapter.convert(&only).unwrap(), &tiny.path("adapter.gguf"));
        assert_eq!(file.header().get("adapter.lora.alpha"), Some(&Value::F32(written_alpha)));
        let product = |seed: usize, meant: f64, name: &str| {
            for (at, x) in (0u64..).zip(values(&file, &format!("blk.1.{name}.weight.lora_b"))) {
                let applied = f64::from(written_alpha) / RANK as f64 * f64::from(x);
                assert!(
                    (applied - meant * f64::from(value(seed, at))).abs() < 1e-5,
                    "{name} {at}: {applied}"
                );
            }
        };
        product(1, scale, "attn_q");
        product(3, alpha / 4.0, "attn_k");
    }
}

/// llama.cpp looks up rows of A, so the file has Aᵀ; with a tied head it would multiply by A for the logits.
#[test]
fn an_adapter_of_an_embedding_has_a_row_of_a_for_each_token() {
    let of_embedding = |family: &str| {
        let tiny = Tiny::of(family);
        adapter(&tiny, json!({}));
        let name = |half: &str| format!("base_model.model.model.embed_tokens.lora_embedding_{half}");
        write_tensors(
            &tiny.path("adapter/adapter_model.safetensors"),
            &[(name("A"), vec![RANK, ROWS]), (name("B"), vec![HIDDEN, RANK])],
        );
        tiny
    };
    let tiny = of_embedding("llama");
    let conversion = open(&tiny).unwrap();
    let conversion = conversion.convert(&|_, _| Ok(3.0)).unwrap();
    let file = written(&conversion, &tiny.path("adapter.gguf"));
    let shapes: Vec<(&str, &[u64])> =
        file.header().tensors.iter().map(|tensor| (&*tensor.name, &*tensor.shape)).collect();
    assert_eq!(
        shapes,
        [("token_embd.weight.lora_a", &[ROWS, RANK][..]), ("token_embd.weight.lora_b", &[HIDDEN, RANK])]
    );
    for (at, x) in (0u64..).zip(values(&file, "token_embd.weight.lora_a")) {
        let (token, r) = (at / RANK, at % RANK);
        assert_eq!(x, value(0, r * ROWS + token), "{token} {r}");
    }
    let b = values(&file, "token_embd.weight.lora_b");
    assert!((0u64..).zip(b).all(|(at, x)| x == value(1, at)));

    // This family is tied.
    let error = open(&of_embedding("qwen2")).map(drop).unwrap_err().to_string();
    assert!(
        error
            .starts_with("an adapter in GGUF is not supported: of `embed_tokens`, to which the head is tied"),
        "{error}"
    );
}

#[test]
fn what_a_file_cannot_hold_is_refused_by_name() {
    let tiny = Tiny::of("llama");
    let refuse = |own: serde_json::Value, expected: Expect| {
        adapter(&tiny, own);
        expected.assert_eq(&open(&tiny).map(drop).unwrap_err().to_string());
    };
    refuse(
        json!({ "use_dora": true }),
        expect![
            "`use_dora` of an adapter in GGUF is not supported: true; merge it into the model, and export that as GGUF"
        ],
    );
    refuse(
        json!({ "modules_to_save": ["lm_head"] }),
        expect![[
            r#"`modules_to_save` of an adapter in GGUF is not supported: ["lm_head"]; merge it into the model, and export that as GGUF"#
        ]],
    );
    refuse(
        json!({ "init_lora_weights": "pissa" }),
        expect![[
            r#"`init_lora_weights` of an adapter in GGUF is not supported: "pissa"; merge it into the model, and export that as GGUF"#
        ]],
    );
    refuse(
        json!({ "bias": "all" }),
        expect![[
            r#"`bias` of an adapter in GGUF is not supported: "all"; merge it into the model, and export that as GGUF"#
        ]],
    );
    refuse(
        json!({ "peft_type": "LOHA" }),
        expect![[
            r#"`peft_type` of an adapter in GGUF is not supported: "LOHA"; merge it into the model, and export that as GGUF"#
        ]],
    );

    adapter(&tiny, json!({}));
    let path = tiny.path("adapter/adapter_model.safetensors");
    let q = "base_model.model.model.layers.1.self_attn.q_proj.lora_";
    let convert = || open(&tiny).unwrap().convert(&|_, _| Ok(1.0)).map(drop).unwrap_err().to_string();
    write_tensors(&path, &[(format!("{q}A.weight"), vec![RANK, HIDDEN])]);
    assert!(convert().ends_with("`model.layers.1.self_attn.q_proj` has only one of lora_A and lora_B"));
    write_tensors(
        &path,
        &[(format!("{q}A.weight"), vec![RANK, HIDDEN]), (format!("{q}B.weight"), vec![7, RANK])],
    );
    assert!(convert().contains("has A [4, 64] and B [7, 4], which do not fit the base's [64, 64]"));
    write_tensors(&path, &[("base_model.model.lm_head.weight".to_owned(), vec![300, HIDDEN])]);
    assert!(
        convert().starts_with("a tensor of an adapter is not supported: `base_model.model.lm_head.weight`")
    );
}
