//! The rotary embedding in both spellings of `config.json`: what is read where a file has both, and what is written.
//!
//! The expected values are those that transformers 4.57.3 and 5.23.0 compute with; on the written files both give the same logits.

use decoder::rope::Scaling;
use models::DecoderConfig;
use serde_json::{Value, json};

fn read(family: &str, fields: &Value) -> Result<DecoderConfig, String> {
    let mut file = json!({
        "model_type": family, "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    });
    for (name, value) in fields.as_object().unwrap() {
        file[name] = value.clone();
    }
    serde_json::from_value(file).map_err(|error| error.to_string())
}

fn linear(factor: f64) -> Scaling {
    Scaling::Linear { factor }
}

#[test]
fn a_file_with_both_spellings_is_read_as_transformers_reads_it() {
    let default = json!({ "rope_type": "default", "rope_theta": 1e4 });
    for (fields, theta, scaling) in [
        // Files that transformers 4.43 to 4.57 saved.
        (
            json!({ "rope_scaling": { "type": "linear", "rope_type": "linear", "factor": 4.0 } }),
            1e4,
            linear(4.0),
        ),
        (json!({ "rope_scaling": { "type": "linear", "rope_type": null, "factor": 4 } }), 1e4, linear(4.0)),
        (
            json!({
                "rope_theta": 5e5, "rope_scaling": { "rope_type": "linear", "factor": 4.0 },
                "rope_parameters": { "rope_type": "linear", "factor": 4.0, "rope_theta": 5e5 },
            }),
            5e5,
            linear(4.0),
        ),
        // Where they contradict each other, all versions take the older one.
        (
            json!({ "rope_theta": 1e4, "rope_scaling": { "type": "linear", "factor": 4.0 }, "rope_parameters": default }),
            1e4,
            linear(4.0),
        ),
        (
            json!({
                "rope_scaling": { "rope_type": "default", "rope_theta": 2e4 },
                "rope_parameters": { "rope_type": "linear", "factor": 2.0, "rope_theta": 3e4 },
            }),
            2e4,
            Scaling::None,
        ),
        // transformers 5 reads the newer name; Qwen2.5-VL's files have `mrope` beside it.
        (
            json!({ "rope_scaling": { "type": "mrope", "rope_type": "default" }, "rope_theta": 3e4 }),
            3e4,
            Scaling::None,
        ),
        (json!({ "rope_scaling": {}, "rope_parameters": { "rope_theta": 3e4 } }), 3e4, Scaling::None),
        (json!({ "rope_theta": 3e4, "rope_parameters": { "rope_theta": 30000 } }), 3e4, Scaling::None),
    ] {
        let config = read("llama", &fields).unwrap();
        assert_eq!((config.rope.theta, config.rope.scaling), (theta, scaling), "{fields}");
    }
    for (fields, expected) in [
        (
            json!({ "rope_theta": 1e4, "rope_parameters": { "rope_theta": 5e5 } }),
            "`rope_theta` is 500000.0 in the rotary embedding's parameters, and `rope_theta` is 10000.0; they must agree",
        ),
        (
            json!({ "rope_scaling": { "rope_type": 3 } }),
            "`rope_type` of the rotary embedding is 3; expected a text",
        ),
    ] {
        let error = read("llama", &fields).unwrap_err();
        assert!(error.contains(expected), "{fields}: {error}");
    }
}

#[test]
fn gemma_3_has_a_spelling_for_each_kind_of_layer() {
    for fields in [
        json!({
            "rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": { "rope_type": "linear", "factor": 8.0 },
        }),
        json!({
            "rope_parameters": {
                "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 1e6 },
                "sliding_attention": { "rope_type": "default", "rope_theta": 5e3 },
            },
        }),
        json!({
            "rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": { "rope_type": "linear", "factor": 8.0 },
            "rope_parameters": {
                "full_attention": { "rope_type": "default", "rope_theta": 1e6 },
                "sliding_attention": { "rope_type": "default", "rope_theta": 5e3 },
            },
        }),
    ] {
        let config = read("gemma3_text", &fields).unwrap();
        let local = config.local_rope.as_ref().unwrap();
        assert_eq!((config.rope.theta, config.rope.scaling), (1e6, linear(8.0)), "{fields}");
        assert_eq!((local.theta, local.scaling), (5e3, Scaling::None), "{fields}");
    }
}

#[test]
fn what_is_written_has_both_spellings() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let with = |mut rope: Value, name: &str, value: Value| {
        rope[name] = value;
        rope
    };
    let factors = json!({ "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 2.5, 3.0, 3.5] });
    let longrope = with(factors.clone(), "type", json!("longrope"));
    let scaled = json!({ "rope_type": "linear", "factor": 8.0, "rope_theta": 1e6 });
    for (family, fields, expected) in [
        (
            "llama",
            json!({ "rope_theta": 5e5, "rope_scaling": llama3 }),
            json!({
                "rope_theta": 5e5, "rope_scaling": llama3, "rope_parameters": with(llama3.clone(), "rope_theta", json!(5e5)),
            }),
        ),
        (
            "qwen2",
            json!({ "rope_theta": 1e6 }),
            json!({
                "rope_theta": 1e6, "rope_scaling": null,
                "rope_parameters": { "rope_type": "default", "rope_theta": 1e6 },
            }),
        ),
        (
            "gemma3_text",
            json!({ "rope_local_base_freq": 5e3, "rope_scaling": { "rope_type": "linear", "factor": 8.0 } }),
            json!({
                "rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": { "rope_type": "linear", "factor": 8.0 },
                "rope_parameters": {
                    "full_attention": scaled, "sliding_attention": { "rope_type": "default", "rope_theta": 5e3 },
                },
            }),
        ),
        (
            "phi3",
            json!({ "partial_rotary_factor": 0.5 }),
            json!({
                "rope_theta": 1e4, "rope_scaling": null, "partial_rotary_factor": 0.5,
                "rope_parameters": { "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5 },
            }),
        ),
        (
            "phi3",
            json!({ "original_max_position_embeddings": 8, "rope_scaling": longrope }),
            json!({
                // transformers 4 demands these three fields alone.
                "rope_theta": 1e4, "rope_scaling": longrope, "original_max_position_embeddings": 8,
                "rope_parameters": {
                    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
                    "short_factor": factors["short_factor"], "long_factor": factors["long_factor"],
                    "original_max_position_embeddings": 8,
                },
            }),
        ),
    ] {
        let config = read(family, &fields).unwrap();
        let written = serde_json::to_value(&config).unwrap();
        for (name, value) in expected.as_object().unwrap() {
            assert_eq!(written[name], *value, "{family}: {name}");
        }
        let again: DecoderConfig = serde_json::from_value(written).unwrap();
        assert_eq!(again, config, "{family}");
    }
}
