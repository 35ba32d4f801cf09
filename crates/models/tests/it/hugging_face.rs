//! A model's folder: reading, writing, and the errors of incomplete ones.

use std::fs;
use std::path::Path;

use expect_test::{Expect, expect};
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::module::{Input, LanguageModel, Mlp, ModuleMapper, map_modules};
use models::state_dict::state_dict;
use models::{DecoderConfig, Init, Llama, Swiglu, tensors_file};
use runtime::random::Generator;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

fn config() -> DecoderConfig {
    DecoderConfig {
        max_position_embeddings: 32,
        num_key_value_heads: 1,
        ..DecoderConfig::llama(40, 16, 24, 2, 4)
    }
}

/// A model with weights that a seed decides.
fn model(config: &DecoderConfig, kind: Kind) -> Llama {
    let model = Llama::new(config, (kind, Device::Cpu)).unwrap();
    let mut generator = Generator::new(7).unwrap();
    for (_, tensor) in state_dict(&model) {
        tensor.shallow_clone().copy_(&generator.normal(&tensor.size(), (Kind::Float, Device::Cpu)).unwrap());
    }
    model
}

fn logits(model: &Llama) -> Tensor {
    let tokens = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9]).view([2, 3]);
    model.logits(&Input::new(&tokens)).unwrap().detach()
}

/// A folder with a saved model, changed by `change`.
fn folder(config: &DecoderConfig, change: impl FnOnce(&Path)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    hugging_face::save(&model(config, Kind::Float), folder.path(), SHARD_BYTES).unwrap();
    change(folder.path());
    folder
}

fn change_config(folder: &Path, name: &str, value: Value) {
    let path = folder.join("config.json");
    let mut json: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    json[name] = value;
    fs::write(path, json.to_string()).unwrap();
}

/// Rewrites the weights.
fn change_weights(folder: &Path, change: impl FnOnce(&mut Vec<(String, Tensor)>)) {
    let path = folder.join("model.safetensors");
    let mut tensors = tensors_file::read(&path, Device::Cpu).unwrap();
    change(&mut tensors);
    tensors_file::write(&path, &tensors).unwrap();
}

/// The error of opening or loading a changed folder, without the folder's name.
fn refused(change: impl FnOnce(&Path), expected: Expect) {
    let folder = folder(&config(), change);
    let error = Folder::open(folder.path()).and_then(|opened| opened.load(None, Device::Cpu)).unwrap_err();
    expected.assert_eq(&error.to_string().replace(&folder.path().display().to_string(), "DIR"));
}

#[test]
fn a_model_round_trips_through_its_folder() {
    let configs = [
        config(),
        DecoderConfig { tie_word_embeddings: true, attention_bias: true, mlp_bias: true, ..config() },
        DecoderConfig { max_position_embeddings: 32, ..DecoderConfig::qwen2(40, 16, 24, 2, 4) },
        DecoderConfig { tie_word_embeddings: false, ..DecoderConfig::qwen2(40, 16, 24, 1, 2) },
    ];
    for config in configs {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double] {
            let model = model(&config, kind);
            let place = tempfile::tempdir().unwrap();
            let path = place.path().join("new/folder");
            hugging_face::save(&model, &path, SHARD_BYTES).unwrap();
            let folder = Folder::open(&path).unwrap();
            assert_eq!((folder.config(), folder.kind().unwrap()), (&config, kind));
            let back = folder.load(None, Device::Cpu).unwrap();
            for ((name, a), (other, b)) in state_dict(&model).into_iter().zip(state_dict(&back)) {
                assert_eq!((&name, b.kind()), (&other, kind));
                assert!(a.equal(&b), "{name}");
            }
            for wanted in [Kind::Float, Kind::BFloat16, Kind::Double] {
                let converted = folder.load(Some(wanted), Device::Cpu).unwrap();
                for ((name, a), (_, b)) in state_dict(&model).into_iter().zip(state_dict(&converted)) {
                    assert!(a.to_kind(wanted).equal(&b), "{name} from {kind:?} to {wanted:?}");
                    assert!(!name.is_empty() && b.kind() == wanted);
                }
            }
            let mut names: Vec<_> =
                fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            assert_eq!(names, ["config.json", "model.safetensors"]);
        }
    }
}

#[test]
fn weights_load_into_an_existing_model_from_a_folder_or_a_file() {
    let folder = folder(&config(), |_| ());
    let expected = logits(&model(&config(), Kind::Float));
    for path in [folder.path().to_owned(), folder.path().join("model.safetensors")] {
        let other = Llama::new(&config(), (Kind::Float, Device::Cpu)).unwrap();
        assert_ne!(logits(&other), expected);
        hugging_face::load_weights(&other, &path).unwrap();
        assert_eq!(logits(&other), expected);
    }
    let other = Llama::new(&config(), (Kind::Float, Device::Cpu)).unwrap();
    Folder::open(folder.path()).unwrap().load_into(&other).unwrap();
    assert_eq!(logits(&other), expected);
}

#[test]
fn the_header_has_what_transformers_requires() {
    let folder = folder(&config(), |_| ());
    let bytes = fs::read(folder.path().join("model.safetensors")).unwrap();
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    let config: Value =
        serde_json::from_str(&fs::read_to_string(folder.path().join("config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], json!(["LlamaForCausalLM"]));
    assert_eq!((&config["dtype"], &config["model_type"]), (&json!("float32"), &json!("llama")));
}

#[test]
fn redundant_tensors_of_older_files_are_ignored() {
    let tied = DecoderConfig { tie_word_embeddings: true, ..config() };
    let folder = folder(&tied, |folder| {
        change_weights(folder, |tensors| {
            let embedding =
                tensors.iter().find(|(name, _)| name == "model.embed_tokens.weight").unwrap().1.copy();
            tensors.push(("lm_head.weight".to_owned(), embedding));
            for layer in 0..2 {
                let name = format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq");
                tensors.push((name, Tensor::ones([2], (Kind::Float, Device::Cpu))));
            }
        });
    });
    let loaded = Folder::open(folder.path()).unwrap().load(None, Device::Cpu).unwrap();
    assert_eq!(logits(&loaded), logits(&model(&tied, Kind::Float)));
}

/// As transformers 5 does, which warns and does not tie; a single matrix is the embedding under either name.
#[test]
fn a_head_with_other_values_is_not_tied() {
    let tied = DecoderConfig { tie_word_embeddings: true, ..config() };
    let own = folder(&config(), |folder| change_config(folder, "tie_word_embeddings", json!(true)));
    let opened = Folder::open(own.path()).unwrap();
    assert!(opened.has_own_head() && !opened.config().tie_word_embeddings);
    assert_eq!(logits(&opened.load(None, Device::Cpu).unwrap()), logits(&model(&config(), Kind::Float)));
    // Into a model whose head is the embedding it does not fit.
    let error = hugging_face::load_weights(&model(&tied, Kind::Float), own.path()).unwrap_err().to_string();
    assert!(
        error.contains("its head has other values than the embedding, and the model ties them"),
        "{error}"
    );

    let named = folder(&tied, |folder| {
        change_weights(folder, |tensors| {
            let embedding = tensors.iter_mut().find(|(name, _)| name == "model.embed_tokens.weight").unwrap();
            "lm_head.weight".clone_into(&mut embedding.0);
        });
    });
    let opened = Folder::open(named.path()).unwrap();
    assert!(!opened.has_own_head() && opened.config().tie_word_embeddings);
    assert_eq!(logits(&opened.load(None, Device::Cpu).unwrap()), logits(&model(&tied, Kind::Float)));
    // A head of another shape is not the embedding, and not one of this model either.
    let wider = folder(&tied, |folder| {
        change_weights(folder, |tensors| {
            tensors.push(("lm_head.weight".to_owned(), Tensor::ones([41, 16], (Kind::Float, Device::Cpu))));
        });
    });
    let error = Folder::open(wider.path()).unwrap_err().to_string();
    assert!(error.contains("lm_head.weight [41, 16] (expected [40, 16])"), "{error}");
}

#[test]
fn irrelevant_fields_are_accepted() {
    let qwen2 = DecoderConfig { max_position_embeddings: 32, ..DecoderConfig::qwen2(40, 16, 24, 2, 4) };
    for dtype in ["dtype", "torch_dtype"] {
        let folder = folder(&qwen2, |folder| {
            change_config(folder, "sliding_window", json!(32768));
            change_config(folder, "use_sliding_window", json!(false));
            change_config(folder, "max_window_layers", json!(21));
            change_config(folder, dtype, json!("bfloat16"));
        });
        let opened = Folder::open(folder.path()).unwrap();
        // The tensors' own dtype decides.
        assert_eq!(opened.kind().unwrap(), Kind::Float);
        let read = opened.config();
        assert_eq!(read.other_fields["max_window_layers"], 21, "they are written again");
        assert_eq!(DecoderConfig { other_fields: Map::new(), ..read.clone() }, qwen2);
    }
    // A file with only `architectures` is recognised by that.
    let folder = folder(&qwen2, |folder| change_config(folder, "model_type", Value::Null));
    assert_eq!(Folder::open(folder.path()).unwrap().config(), &qwen2);
}

#[test]
fn end_tokens_come_from_the_generation_config_before_the_config() {
    let open = |config_says: Value, generation: Option<Value>| {
        let folder = folder(&config(), |folder| {
            change_config(folder, "eos_token_id", config_says);
            change_config(folder, "pad_token_id", json!(9));
            if let Some(generation) = &generation {
                fs::write(folder.join("generation_config.json"), generation.to_string()).unwrap();
            }
        });
        let opened = Folder::open(folder.path()).unwrap();
        assert_eq!(opened.generation_config().is_some(), generation.is_some());
        assert_eq!(opened.tokenizer(), None);
        fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
        assert_eq!(opened.tokenizer(), Some(folder.path().join("tokenizer.json")));
        (opened.end_tokens().to_vec(), opened.pad_token())
    };
    assert_eq!(open(json!(2), None), (vec![2], Some(9)));
    assert_eq!(open(Value::Null, None), (vec![], Some(9)));
    assert_eq!(open(json!(2), Some(json!({}))), (vec![2], Some(9)));
    let generation = json!({ "eos_token_id": [151645, 151643], "pad_token_id": 151643 });
    assert_eq!(open(json!(2), Some(generation)), (vec![151645, 151643], Some(151643)));
}

#[test]
fn an_incomplete_folder_is_refused() {
    let gone = |name: &'static str| move |folder: &Path| fs::remove_file(folder.join(name)).unwrap();
    refused(
        gone("config.json"),
        expect!["DIR: config.json is missing; the folder contains model.safetensors"],
    );
    refused(
        gone("model.safetensors"),
        expect![
            "DIR: neither model.safetensors nor model.safetensors.index.json exists; the folder contains config.json"
        ],
    );
    refused(|folder| fs::remove_dir_all(folder).unwrap(), expect!["DIR: the folder does not exist"]);
    refused(
        |folder| {
            fs::remove_dir_all(folder).unwrap();
            fs::write(folder, "").unwrap();
        },
        expect!["DIR: a file; expected the folder that contains config.json"],
    );
    refused(
        |folder| fs::write(folder.join("config.json"), "{\n\"vocab_size\": ").unwrap(),
        expect!["DIR/config.json: `vocab_size`: EOF while parsing a value at line 2 column 14"],
    );
    refused(
        |folder| change_config(folder, "architectures", json!(["MixtralForCausalLM"])),
        expect![
            "DIR/config.json: decoder: `architectures` names `MixtralForCausalLM` (of the mixtures of experts, qwen3_moe, qwen3_5_moe_text and gpt_oss are supported); expected one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, GptOssForCausalLM, MistralForCausalLM, SmolLM3ForCausalLM, GraniteForCausalLM, Olmo2ForCausalLM, Gemma3ForCausalLM, Gemma2ForCausalLM, Gemma4ForCausalLM, Phi3ForCausalLM"
        ],
    );
    refused(
        |folder| change_config(folder, "model_type", json!("mixtral")),
        expect![
            "DIR/config.json: decoder: `model_type` is `mixtral` (of the mixtures of experts, qwen3_moe, qwen3_5_moe_text and gpt_oss are supported); expected one of llama, qwen2, qwen3, qwen3_moe, qwen3_5_text, qwen3_5_moe_text, gpt_oss, mistral, smollm3, granite, olmo2, gemma3_text, gemma2, gemma4_text, phi3"
        ],
    );
    refused(
        |folder| change_config(folder, "model_type", json!("qwen2")),
        expect![
            "DIR/config.json: decoder: `model_type` is `qwen2`, but `architectures` names `LlamaForCausalLM`; they must agree"
        ],
    );
    refused(
        |folder| {
            change_config(folder, "model_type", Value::Null);
            change_config(folder, "architectures", Value::Null);
        },
        expect![
            "DIR/config.json: decoder: `model_type` is missing; expected one of llama, qwen2, qwen3, qwen3_moe, qwen3_5_text, qwen3_5_moe_text, gpt_oss, mistral, smollm3, granite, olmo2, gemma3_text, gemma2, gemma4_text, phi3"
        ],
    );
    for kind in ["proportional", "ntk"] {
        let folder = folder(&config(), |folder| {
            change_config(folder, "rope_parameters", Value::Null);
            change_config(folder, "rope_scaling", json!({ "type": kind, "factor": 4.0 }));
        });
        let error = Folder::open(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains(&format!(
                "has the scaling `{kind}`; expected default, linear, dynamic, yarn or llama3, longrope of Phi-3, or proportional of Gemma 4"
            )),
            "{error}"
        );
    }
    refused(
        |folder| fs::write(folder.join("generation_config.json"), r#"{ "eos_token_id": "</s>" }"#).unwrap(),
        expect![[
            r#"DIR/generation_config.json: `eos_token_id` is "</s>"; expected a token or a list of tokens"#
        ]],
    );
}

#[test]
fn mismatched_weights_are_listed() {
    refused(
        |folder| change_weights(folder, |tensors| tensors.retain(|(name, _)| name != "lm_head.weight")),
        expect!["DIR does not fit the model: missing lm_head.weight"],
    );
    refused(
        |folder| {
            change_weights(folder, |tensors| {
                tensors.retain(|(name, _)| !name.ends_with("input_layernorm.weight"));
                tensors.push(("model.extra".to_owned(), Tensor::from(1f32)));
                let norm = tensors.iter_mut().find(|(name, _)| name == "model.norm.weight").unwrap();
                norm.1 = Tensor::zeros([4, 4], (Kind::Float, Device::Cpu));
            });
        },
        expect![
            "DIR does not fit the model: missing layers.0.input_layernorm.weight, layers.1.input_layernorm.weight; unexpected extra; of another shape norm.weight [4, 4] (expected [16])"
        ],
    );
    refused(
        |folder| change_config(folder, "num_hidden_layers", json!(4000)),
        expect![
            "DIR/config.json: `num_hidden_layers` is 4000, but the weights are 21 tensors; these files belong to different models"
        ],
    );
    refused(
        |folder| change_config(folder, "max_position_embeddings", json!(1_000_000_000_000_000i64)),
        expect![
            "DIR/config.json: decoder: `max_position_embeddings` is 1000000000000000; expected at most 16777216"
        ],
    );
    refused(
        |folder| {
            change_weights(folder, |tensors| {
                let twice = tensors.iter().find(|(name, _)| name == "model.norm.weight").unwrap().1.copy();
                tensors.push(("norm.weight".to_owned(), twice));
            });
        },
        expect![
            "DIR/model.safetensors: `norm.weight` exists twice: it is also `model.norm.weight` of DIR/model.safetensors"
        ],
    );
    refused(
        |folder| change_weights(folder, |tensors| tensors[0].1 = tensors[0].1.to_kind(Kind::Int8)),
        expect![
            "DIR/model.safetensors: `model.embed_tokens.weight` is int8; expected a floating dtype (of quantized weights, those of bitsandbytes in NF4 are supported)"
        ],
    );
    refused(
        |folder| change_weights(folder, |tensors| tensors[0].1 = tensors[0].1.to_kind(Kind::Half)),
        expect![
            "DIR: the tensors have several dtypes (1 in float16, 20 in float32); choose one as the model's dtype"
        ],
    );
    let mixed = folder(&config(), |folder| {
        change_weights(folder, |tensors| tensors[0].1 = tensors[0].1.to_kind(Kind::Half));
    });
    let folder = Folder::open(mixed.path()).unwrap();
    assert!(folder.load(Some(Kind::BFloat16), Device::Cpu).is_ok());
    expect!["hugging_face: a model in int64; expected float32, bfloat16, float16, float64 or NF4"]
        .assert_eq(&folder.load(Some(Kind::Int64), Device::Cpu).unwrap_err().to_string());
}

#[test]
fn a_mismatched_state_changes_nothing() {
    let folder = folder(&config(), |folder| {
        change_weights(folder, |tensors| tensors.retain(|(name, _)| name != "model.norm.weight"));
    });
    let other = Llama::new(&config(), (Kind::Float, Device::Cpu)).unwrap();
    let before = logits(&other);
    assert!(hugging_face::load_weights(&other, folder.path()).is_err());
    assert_eq!(logits(&other), before);
}

/// Puts an MLP with biases into the first block.
struct WithBias;

impl ModuleMapper for WithBias {
    fn mlp(&mut self, name: &str, slot: &mut Box<dyn Mlp>) -> models::Result<()> {
        if name == "layers.0.mlp" {
            *slot = Box::new(Swiglu::new(16, 24, true, Init::Constant(0.5), (Kind::Float, Device::Cpu))?);
        }
        Ok(())
    }
}

#[test]
fn a_model_with_other_parts_is_not_saved() {
    let mut other = model(&config(), Kind::Float);
    map_modules(&mut other, &mut WithBias).unwrap();
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("other");
    let error = hugging_face::save(&other, &path, SHARD_BYTES).unwrap_err();
    expect![
        "the saved model does not fit the model: unexpected layers.0.mlp.down_proj.bias, layers.0.mlp.gate_proj.bias, layers.0.mlp.up_proj.bias"
    ]
    .assert_eq(&error.to_string());
    assert!(!path.exists());
    let error = hugging_face::save(&model(&config(), Kind::Float), &path, 0).unwrap_err();
    expect!["hugging_face::save: `max_shard_bytes` is 0; expected at least 1"].assert_eq(&error.to_string());
    // A file where the folder should be.
    fs::write(&path, "").unwrap();
    let error = hugging_face::save(&model(&config(), Kind::Float), &path, 1).unwrap_err().to_string();
    assert!(error.contains("other: cannot be written: "), "{error}");
}
