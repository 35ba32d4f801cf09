//! Error messages for users; failed calls change nothing.

use std::path::Path;

use expect_test::{Expect, expect};
use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use lora::{Adapters, Layers, LoraConfig, LoraLinear, LoraLinearConfig, Names};
use models::module::{parameter_count, trainable};
use models::{DecoderConfig, Linear, Llama, tensors_file};
use serde_json::json;
use tch::{Device, Kind, Tensor, kind};

fn model(layers: usize, hidden: i64) -> Llama {
    Llama::new(&DecoderConfig::llama(61, hidden, 40, layers as i64, 4), (Kind::Float, Device::Cpu)).unwrap()
}

fn attention() -> LoraConfig {
    LoraConfig { target_modules: Some(["q_proj", "v_proj"].into()), ..LoraConfig::default() }
}

fn check(config: &LoraConfig, expected: Expect) {
    let mut model = model(1, 16);
    let count = parameter_count(&model);
    let error = config.install(&mut model).unwrap_err();
    expected.assert_eq(&error.to_string());
    assert_eq!(parameter_count(&model), count, "nothing is frozen, nothing added");
}

#[test]
fn options_outside_their_range_are_refused() {
    check(&LoraConfig { r: 0, ..attention() }, expect!["`r` is 0; expected a rank of at least 1"]);
    check(
        &LoraConfig { lora_alpha: f64::NAN, ..attention() },
        expect!["`lora_alpha` is NaN; expected a finite number, such as twice the rank"],
    );
    check(
        &LoraConfig { lora_dropout: 1.0, ..attention() },
        expect!["`lora_dropout` is 1; expected a probability in [0, 1)"],
    );
    check(
        &LoraConfig { r: 3, init_lora_weights: json!("orthogonal"), ..attention() },
        expect!["`r` is 3; expected an even rank, which orthogonal initialisation needs"],
    );
    check(
        &LoraConfig { lora_alpha: 0.0, init_lora_weights: json!("pissa"), ..attention() },
        expect!["`lora_alpha` is 0; expected a positive number, because PiSSA and OLoRA divide by it"],
    );
    check(
        &LoraConfig { init_lora_weights: json!("corda"), ..attention() },
        expect![[
            r#"`init_lora_weights` is "corda", which is not supported; take true, false, "gaussian", "pissa", "olora" or "orthogonal", or convert the adapter to one that leaves the base as it is (PEFT: path_initial_model_for_weight_conversion)"#
        ]],
    );
    check(
        &LoraConfig { rank_pattern: json!({ "q_proj": 0 }).as_object().unwrap().clone(), ..attention() },
        expect!["`rank_pattern` is 0; expected a rank of at least 1"],
    );
    check(
        &LoraConfig { rank_pattern: json!({ "q_proj": "8" }).as_object().unwrap().clone(), ..attention() },
        expect![[r#"`rank_pattern` is "8"; expected a whole number for each pattern"#]],
    );
    check(
        &LoraConfig { fan_in_fan_out: true, ..attention() },
        expect![
            "`fan_in_fan_out` is true, which is not supported; projections here are [out, in]; set it to false"
        ],
    );
}

#[test]
fn targets_without_a_projection_are_refused() {
    let targets = |targets: Names| LoraConfig { target_modules: Some(targets), ..LoraConfig::default() };
    check(
        &targets(["c_attn"].into()),
        expect![[
            r#"`target_modules` ["c_attn"] matches none of the model's projections; they are `model.layers.0.self_attn.q_proj`, `model.layers.0.self_attn.k_proj`, `model.layers.0.self_attn.v_proj`, `model.layers.0.self_attn.o_proj`, `model.layers.0.mlp.gate_proj`, `model.layers.0.mlp.up_proj`, `model.layers.0.mlp.down_proj`, `lm_head`. Name some of them, whole or by their last part"#
        ]],
    );
    check(
        &targets(Names::Pattern("q_proj".into())),
        expect![
            "`target_modules` `q_proj` matches none of the model's projections; they are `model.layers.0.self_attn.q_proj`, `model.layers.0.self_attn.k_proj`, `model.layers.0.self_attn.v_proj`, `model.layers.0.self_attn.o_proj`, `model.layers.0.mlp.gate_proj`, `model.layers.0.mlp.up_proj`, `model.layers.0.mlp.down_proj`, `lm_head`. Name some of them, whole or by their last part"
        ],
    );
    check(
        &targets(Names::Pattern("(".into())),
        expect!["the pattern `(`: opening parenthesis without closing parenthesis"],
    );
    check(
        &targets(["q_proj", "norm"].into()),
        expect![
            "the target `model.norm` is not a linear projection of this model, so it cannot be adapted; the projections are `model.layers.0.self_attn.q_proj`, `model.layers.0.self_attn.k_proj`, `model.layers.0.self_attn.v_proj`, `model.layers.0.self_attn.o_proj`, `model.layers.0.mlp.gate_proj`, `model.layers.0.mlp.up_proj`, `model.layers.0.mlp.down_proj`, `lm_head`. Train it whole by `modules_to_save`, or leave it out by `exclude_modules`"
        ],
    );
    check(
        &LoraConfig { layers_to_transform: Some(Layers::One(7)), ..attention() },
        expect![[
            r#"`target_modules` ["q_proj", "v_proj"] in layer 7 matches none of the model's projections; they are `model.layers.0.self_attn.q_proj`, `model.layers.0.self_attn.k_proj`, `model.layers.0.self_attn.v_proj`, `model.layers.0.self_attn.o_proj`, `model.layers.0.mlp.gate_proj`, `model.layers.0.mlp.up_proj`, `model.layers.0.mlp.down_proj`, `lm_head`. Name some of them, whole or by their last part"#
        ]],
    );
    check(
        &LoraConfig { modules_to_save: Some(vec!["classifier".into()]), ..attention() },
        expect![
            "`modules_to_save`: the model has no module that ends with `classifier`; it has `lm_head`, `model`, `model.embed_tokens`, `model.layers`, `model.layers.0`, `model.layers.0.input_layernorm`, `model.layers.0.mlp`, `model.layers.0.mlp.down_proj`, `model.layers.0.mlp.gate_proj`, `model.layers.0.mlp.up_proj`, `model.layers.0.post_attention_layernorm`, `model.layers.0.self_attn` and 5 more"
        ],
    );
}

#[test]
fn an_invalid_layer_is_refused() {
    let linear = || Linear::new(4, 3, true, kind::FLOAT_CPU).unwrap();
    let error =
        LoraLinear::new(linear(), &LoraLinearConfig { r: -1, ..LoraLinearConfig::default() }).unwrap_err();
    expect!["`r` is -1; expected a rank of at least 1"].assert_eq(&error.to_string());
    let layer = LoraLinear::new(linear(), &LoraLinearConfig::default()).unwrap();
    let context = models::module::Context::default();
    let of = |x: &Tensor| models::module::Projection::forward(&layer, x, &context).unwrap_err().to_string();
    expect!["lora linear: `x` has shape [2, 5]; expected […, 4]"]
        .assert_eq(&of(&Tensor::zeros([2, 5], kind::FLOAT_CPU)));
    expect!["lora linear: `x` is Double on Cpu; expected Float on Cpu, as the weight has"]
        .assert_eq(&of(&Tensor::zeros([2, 4], kind::DOUBLE_CPU)));
}

#[test]
fn missing_and_duplicate_adapters_are_refused() {
    let mut model = model(1, 16);
    let mut adapters = attention().install(&mut model).unwrap();
    let error = adapters.set_active(&["math"]).unwrap_err();
    expect!["there is no adapter `math`; expected one of: `default`"].assert_eq(&error.to_string());
    for name in ["default", "a.b", ""] {
        assert!(adapters.add(&mut model, name, &attention()).is_err(), "{name}");
    }
    let error = attention().install(&mut model).unwrap_err();
    expect!["`model.layers.0.self_attn.q_proj` is no plain projection: it has tensors beside its weight and bias, perhaps of adapters that were installed before; add to those with `Adapters::add`, or unload them first"].assert_eq(&error.to_string());
    adapters.add(&mut model, "dora", &LoraConfig { use_dora: true, ..attention() }).unwrap();
    let error = adapters.set_active(&["default", "dora"]).unwrap_err();
    expect!["a DoRA adapter computes alone: it learns the length of the base's rows with its own change; activate one at a time, or merge one and unload it first"].assert_eq(&error.to_string());
    adapters.merge().unwrap();
    let error = adapters.set_active(&[]).unwrap_err();
    expect!["default is merged into the base; call `unmerge` before you switch adapters"]
        .assert_eq(&error.to_string());
}

fn saved(folder: &Path) {
    attention().install(&mut model(2, 16)).unwrap().save(folder).unwrap();
}

fn loaded(folder: &Path, mut model: Llama) -> String {
    let learned = trainable(&model).len();
    let error = Adapters::load(&mut model, folder).unwrap_err().to_string();
    assert_eq!(trainable(&model).len(), learned, "nothing was changed");
    error.replace(&folder.display().to_string(), "FOLDER")
}

#[test]
fn an_adapter_of_another_base_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    saved(folder.path());
    expect!["FOLDER/adapter_model.safetensors does not fit this model: unexpected `model.layers.1.self_attn.q_proj.lora_A.weight`, `model.layers.1.self_attn.q_proj.lora_B.weight`, `model.layers.1.self_attn.v_proj.lora_A.weight`, `model.layers.1.self_attn.v_proj.lora_B.weight`; it belongs to another base model, or its configuration was changed later"].assert_eq(&loaded(folder.path(), model(1, 16)));
    expect!["FOLDER/adapter_model.safetensors does not fit this model: missing `model.layers.2.self_attn.q_proj.lora_A.weight`, `model.layers.2.self_attn.q_proj.lora_B.weight`, `model.layers.2.self_attn.v_proj.lora_A.weight`, `model.layers.2.self_attn.v_proj.lora_B.weight`; it belongs to another base model, or its configuration was changed later"].assert_eq(&loaded(folder.path(), model(3, 16)));
    expect!["FOLDER/adapter_model.safetensors does not fit this model: of another shape `model.layers.0.self_attn.q_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.0.self_attn.q_proj.lora_B.weight [16, 8] (expected [32, 8])`, `model.layers.0.self_attn.v_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.0.self_attn.v_proj.lora_B.weight [16, 8] (expected [32, 8])`, `model.layers.1.self_attn.q_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.1.self_attn.q_proj.lora_B.weight [16, 8] (expected [32, 8])`, `model.layers.1.self_attn.v_proj.lora_A.weight [8, 16] (expected [8, 32])`, `model.layers.1.self_attn.v_proj.lora_B.weight [16, 8] (expected [32, 8])`; it belongs to another base model, or its configuration was changed later"].assert_eq(&loaded(folder.path(), model(2, 32)));
}

#[test]
fn folders_without_an_adapter_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    expect!["FOLDER/adapter_config.json: No such file or directory (os error 2); an adapter's folder contains adapter_config.json and adapter_model.safetensors"].assert_eq(&loaded(folder.path(), model(2, 16)));
    saved(folder.path());
    let (config, tensors) = (folder.path().join(CONFIG_FILE), folder.path().join(TENSORS_FILE));
    let bytes = std::fs::read(&tensors).unwrap();
    std::fs::write(&tensors, &bytes[..bytes.len() - 1]).unwrap();
    expect!["FOLDER/adapter_model.safetensors: not a complete safetensors file (incomplete metadata, file not fully covered); copy or download it again"].assert_eq(&loaded(folder.path(), model(2, 16)));
    std::fs::remove_file(&tensors).unwrap();
    expect!["FOLDER/adapter_model.safetensors: No such file or directory (os error 2)"]
        .assert_eq(&loaded(folder.path(), model(2, 16)));
    tensors_file::write(&tensors, &[]).unwrap();
    assert!(
        loaded(folder.path(), model(2, 16))
            .contains("missing `model.layers.0.self_attn.q_proj.lora_A.weight`")
    );
    std::fs::write(&config, "{\"r\": 8,").unwrap();
    expect!["FOLDER/adapter_config.json: not an adapter configuration: EOF while parsing a value at line 1 column 8"].assert_eq(&loaded(folder.path(), model(2, 16)));
    std::fs::write(&config, "{\"r\": \"eight\"}").unwrap();
    expect![[r#"FOLDER/adapter_config.json: not an adapter configuration: invalid type: string "eight", expected i64"#]].assert_eq(&loaded(folder.path(), model(2, 16)));
}

#[test]
fn settings_that_would_change_the_result_are_refused_by_name() {
    for (field, value) in [
        ("peft_type", json!("LOHA")),
        ("layer_replication", json!([[0, 1], [0, 1]])),
        ("alora_invocation_tokens", json!([1, 2])),
        ("megatron_config", json!({ "a": 1 })),
        ("use_qalora", json!(true)),
        ("lora_bias", json!(true)),
        ("use_bdlora", json!({ "nblocks": 2 })),
        ("use_what_comes_next", json!(true)),
        ("init_lora_weights", json!("loftq")),
    ] {
        let text = json!({ "peft_type": "LORA", "target_modules": ["q_proj"], field: value }).to_string();
        let error = LoraConfig::from_json(&text).unwrap_err().to_string();
        assert!(error.contains(&format!("`{field}` is ")) && error.contains("not supported"), "{error}");
    }
    let kept = json!({ "peft_type": "LORA", "target_modules": ["q_proj"], "note": { "by": "hand" }, "r": 4 });
    let config = LoraConfig::from_json(&kept.to_string()).unwrap();
    let changed = LoraConfig { lora_alpha: 32.0, ..config }.to_json();
    expect![[r#"
        {
          "lora_alpha": 32,
          "note": {
            "by": "hand"
          },
          "peft_type": "LORA",
          "r": 4,
          "target_modules": [
            "q_proj"
          ]
        }"#]]
    .assert_eq(&changed);
}
