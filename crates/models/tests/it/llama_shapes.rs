//! Computed shapes of a model's tensors: equal to the model's and to published counts, without allocating them.

use accounting::Decoder;
use models::module::{parameter_count, tensors};
use models::{DecoderConfig, Llama};
use serde_json::{Value, json};
use tch::{Device, Kind};

fn config(fields: &Value) -> (DecoderConfig, String) {
    let mut file = json!({
        "model_type": "llama", "vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
        "num_attention_heads": 6,
    });
    for (name, value) in fields.as_object().unwrap() {
        file[name] = value.clone();
    }
    (serde_json::from_value(file.clone()).unwrap(), file.to_string())
}

#[test]
fn computed_shapes_match_the_model_for_every_option() {
    let mut cases = 0;
    for family in ["llama", "qwen2"] {
        for keys in [1, 2, 6] {
            for options in 0..16 {
                let bit = |at: i32| options >> at & 1 == 1;
                let fields = json!({
                    "model_type": family, "num_key_value_heads": keys, "tie_word_embeddings": bit(0),
                    "attention_bias": bit(1), "mlp_bias": bit(2), "head_dim": if bit(3) { 10 } else { 4 },
                });
                let (config, text) = config(&fields);
                let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
                let own: Vec<_> =
                    tensors(&model).into_iter().map(|named| (named.name, named.tensor.size())).collect();
                assert_eq!(config.shapes(), own, "{fields}");
                assert_eq!(config.parameter_count(), parameter_count(&model).total, "{fields}");
                // Qwen2 has no options for biases; it ignores those of the file.
                let on_paper = Decoder::parse("config.json".as_ref(), &text).unwrap().parameters().unwrap();
                assert_eq!(config.parameter_count(), on_paper, "{fields}");
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 96);
}

#[test]
fn published_models_have_the_published_parameter_counts() {
    let cases = [
        (
            "Qwen2.5-0.5B",
            json!({
                "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
                "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
                "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                "rope_theta": 1e6, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
                "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936,
            }),
            494_032_768,
        ),
        (
            "Qwen2.5-7B",
            json!({
                "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
                "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
                "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
                "rope_theta": 1e6, "sliding_window": 131072, "tie_word_embeddings": false,
                "use_sliding_window": false, "vocab_size": 152064,
            }),
            7_615_616_512,
        ),
        (
            "Llama-3.2-1B",
            json!({
                "architectures": ["LlamaForCausalLM"], "attention_bias": false, "head_dim": 64, "hidden_size": 2048,
                "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
                "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                "rope_scaling": {
                    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192, "rope_type": "llama3",
                },
                "rope_theta": 5e5, "tie_word_embeddings": true, "vocab_size": 128256,
            }),
            1_235_814_400,
        ),
    ];
    for (name, fields, expected) in cases {
        let (config, text) = config(&fields);
        assert_eq!(config.parameter_count(), expected, "{name}");
        assert_eq!(
            Decoder::parse("config.json".as_ref(), &text).unwrap().parameters().unwrap(),
            expected,
            "{name}"
        );
    }
}

#[test]
fn sizes_beyond_counting_do_not_overflow() {
    let config = DecoderConfig {
        num_hidden_layers: i64::MAX,
        ..DecoderConfig::llama(i64::MAX, i64::MAX, i64::MAX, 1, 1)
    };
    assert_eq!(config.parameter_count(), u64::MAX);
}
