//! The decoder: `config.json`, names of weights, and the separation of packed documents.

use accounting::Decoder;
use decoder::BiasOption;
use decoder::rope::{Frequencies, Scaling};
use models::module::{
    Context, Input, LanguageModel, Mlp, Module, ModuleMapper, Projection, map_modules, parameter_count,
    parameters,
};
use models::state_dict::{load_state_dict, state_dict};
use models::{AttentionPath, DecoderConfig, Documents, Init, Llama, Swiglu, hugging_face, tensors_file};
use runtime::autograd::backward;
use runtime::memory::Region;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

fn small() -> DecoderConfig {
    DecoderConfig {
        num_key_value_heads: 2,
        max_position_embeddings: 32,
        ..DecoderConfig::llama(40, 24, 36, 2, 6)
    }
}

fn file() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
        "num_attention_heads": 6,
    })
}

fn with(fields: &Value) -> Value {
    let mut file = file();
    for (name, value) in fields.as_object().unwrap() {
        file[name] = value.clone();
    }
    file
}

fn parse(fields: &Value) -> Result<DecoderConfig, String> {
    serde_json::from_value(with(fields)).map_err(|error: serde_json::Error| error.to_string())
}

#[test]
fn both_forms_of_config_json_are_read() {
    let llama3 = Scaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: 8192.0,
    };
    let numbers = json!({
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    });
    let kind = |key: &str, kind: &str, theta: Option<f64>| {
        let mut rope = numbers.clone();
        rope[key] = json!(kind);
        if let Some(theta) = theta {
            rope["rope_theta"] = json!(theta);
        }
        rope
    };
    let cases = [
        (json!({}), Frequencies::default()),
        (
            json!({ "rope_theta": 5e5, "rope_scaling": null }),
            Frequencies { theta: 5e5, scaling: Scaling::None },
        ),
        (
            json!({ "rope_theta": 5e5, "rope_scaling": kind("rope_type", "llama3", None) }),
            Frequencies { theta: 5e5, scaling: llama3 },
        ),
        (
            json!({ "rope_theta": 1e4, "rope_scaling": kind("type", "linear", None) }),
            Frequencies { theta: 1e4, scaling: Scaling::Linear { factor: 8.0 } },
        ),
        (
            json!({ "rope_parameters": kind("rope_type", "llama3", Some(5e5)) }),
            Frequencies { theta: 5e5, scaling: llama3 },
        ),
        (
            json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 1e6 } }),
            Frequencies { theta: 1e6, scaling: Scaling::None },
        ),
    ];
    for (fields, expected) in cases {
        let config = parse(&fields).unwrap();
        assert_eq!(config.rope, expected, "{fields}");
        // What is written round-trips.
        let again: DecoderConfig = serde_json::from_value(serde_json::to_value(&config).unwrap()).unwrap();
        assert_eq!(again, config);
    }
    let config = parse(&json!({})).unwrap();
    assert_eq!((config.num_key_value_heads, config.head_dim, config.max_position_embeddings), (6, 4, 2048));
    assert!(!config.has_bias(BiasOption::QueriesKeysValues) && !config.tie_word_embeddings);
    let qwen2 = parse(&json!({ "model_type": "qwen2", "tie_word_embeddings": true })).unwrap();
    assert!(qwen2.has_bias(BiasOption::QueriesKeysValues) && !qwen2.has_bias(BiasOption::AttentionOutput));
    assert!(qwen2.tie_word_embeddings);
    assert_eq!(qwen2.max_position_embeddings, 32768);
}

#[test]
fn unsupported_configurations_are_refused_by_name() {
    let cases = [
        (
            json!({ "model_type": "mamba" }),
            "`model_type` is `mamba` (state-space layers are not supported); expected one of llama, qwen2, qwen3, qwen3_moe, qwen3_5_text, qwen3_5_moe_text, gpt_oss, mistral, smollm3, granite, olmo2, gemma3_text, gemma2, gemma4_text, phi3",
        ),
        (json!({ "hidden_act": "gelu" }), "`hidden_act` is `gelu`; expected silu"),
        (
            json!({ "rope_scaling": { "rope_type": "ntk", "factor": 4.0 } }),
            "the rotary embedding has the scaling `ntk`; expected default, linear, dynamic, yarn or llama3, longrope of Phi-3, or proportional of Gemma 4",
        ),
        (
            json!({ "rope_scaling": { "rope_type": "linear" } }),
            "the scaling of the rotary embedding needs the number `factor`",
        ),
        (
            json!({ "use_sliding_window": true }),
            "attention has a sliding window, which `llama` does not have; set `use_sliding_window` to false if every layer attends \
             in full",
        ),
        (
            json!({ "num_key_value_heads": 4 }),
            "`num_key_value_heads` 4 does not divide `num_attention_heads` 6; take a divisor",
        ),
        (
            json!({ "hidden_size": 25 }),
            "`num_attention_heads` 6 does not divide `hidden_size` 25; take a divisor, or give `head_dim`",
        ),
        (json!({ "vocab_size": 0 }), "`vocab_size` is 0; expected at least 1"),
        (json!({ "attention_dropout": 1.0 }), "`attention_dropout` is 1; expected a probability in [0, 1)"),
    ];
    for (fields, expected) in cases {
        assert_eq!(parse(&fields).unwrap_err(), format!("decoder: {expected}"));
    }
    let error = parse(&json!({ "hidden_size": "wide" })).unwrap_err();
    assert!(error.contains("invalid type: string \"wide\""), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, "{").unwrap();
    let error = DecoderConfig::read(&path).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: not JSON (EOF while parsing", path.display())), "{error}");
    let odd = Llama::new(&DecoderConfig { head_dim: 5, ..small() }, F32).unwrap_err().to_string();
    assert_eq!(
        odd,
        "decoder: `head_dim` is 5; expected an even width, since its halves rotate with each other"
    );
}

/// Each number of the file, with extreme values. A file must not be able to end the process, so each is refused before anything is
/// allocated, with the field's name and bound.
#[test]
fn extreme_numbers_are_refused_with_their_bound() {
    let sizes = [
        ("vocab_size", 1i64 << 28),
        ("hidden_size", 1 << 28),
        ("intermediate_size", 1 << 28),
        ("num_hidden_layers", 1 << 12),
        ("num_attention_heads", 1 << 16),
        ("num_key_value_heads", 1 << 16),
        ("head_dim", 1 << 16),
        ("max_position_embeddings", 1 << 24),
    ];
    for (name, largest) in sizes {
        // With its own width, so that no other check fails first.
        let read = |value: Value| parse(&json!({ "head_dim": 4, name: value })).unwrap_err();
        for below in [0, -1, i64::MIN] {
            assert_eq!(read(json!(below)), format!("decoder: `{name}` is {below}; expected at least 1"));
        }
        for beyond in [largest + 2, 1_000_000_000_000_000, i64::MAX] {
            let expected = format!("decoder: `{name}` is {beyond}; expected at most {largest}");
            assert_eq!(read(json!(beyond)), expected);
        }
        for other in
            [json!(2.5), json!(1e30), json!(u64::MAX), json!("6"), json!([6]), json!({}), json!(true)]
        {
            let error = read(other.clone());
            assert!(error.starts_with(&format!("`{name}`: invalid ")), "{other}: {error}");
        }
    }
    for (name, bounds) in
        [("rms_norm_eps", "0 to 1.0"), ("initializer_range", "0 to 1000.0"), ("rope_theta", "1 to 1e18")]
    {
        for value in [-1.0, -1e-300, 1e300] {
            let error = parse(&json!({ name: value })).unwrap_err();
            let expected = format!("decoder: `{name}` is {value:?}; expected a number from {bounds}");
            assert_eq!(error, expected);
        }
        assert!(parse(&json!({ name: "1" })).unwrap_err().starts_with(&format!("`{name}`: invalid type")));
    }
    let dropout = |value: f64| parse(&json!({ "attention_dropout": value })).unwrap_err();
    for value in [-1e-9, 1.0, 1e300] {
        let expected = "; expected a probability in [0, 1)";
        assert_eq!(dropout(value), format!("decoder: `attention_dropout` is {value}{expected}"));
    }
    for (name, value, expected) in [
        (
            "factor",
            json!(0),
            "the scaling of the rotary embedding: rotary embedding: the scaling's factor is 0",
        ),
        ("factor", json!(1e308), ""),
        ("factor", json!("8"), "`factor` of the rotary embedding is \"8\"; expected a number"),
        (
            "low_freq_factor",
            json!(-1.0),
            "the scaling of the rotary embedding: rotary embedding: low_freq_factor is -1",
        ),
        (
            "high_freq_factor",
            json!(0.5),
            "the scaling of the rotary embedding: rotary embedding: low_freq_factor is 1",
        ),
        ("rope_theta", json!([1e4]), "`rope_theta` of the rotary embedding is [10000.0]; expected a number"),
        ("rope_theta", json!(0), "`rope_theta` is 0.0; expected a number from 1 to 1e18"),
        (
            "original_max_position_embeddings",
            json!("8192"),
            "`original_max_position_embeddings` of the rotary embedding is \"8192\"; expected a number",
        ),
        (
            "original_max_position_embeddings",
            json!(0),
            "and the original positions are 0; expected numbers above 0",
        ),
    ] {
        let mut rope = json!({
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 1e4,
        });
        rope[name] = value;
        match parse(&json!({ "rope_parameters": rope })) {
            Err(error) => assert!(error.contains(expected) && !expected.is_empty(), "{rope}: {error}"),
            Ok(_) => assert_eq!(expected, "", "{rope}"),
        }
    }
    let text = r#"{ "vocab_size": 40, "rms_norm_eps": NaN }"#;
    assert!(serde_json::from_str::<DecoderConfig>(text).is_err());
    let text = with(&json!({})).to_string().replacen("{", r#"{ "rms_norm_eps": 1e999, "#, 1);
    let error = serde_json::from_str::<DecoderConfig>(&text).unwrap_err().to_string();
    assert!(error.contains("number out of range"), "{error}");
    // The maximum row length costs only memory for the positions that are used.
    let long = DecoderConfig { max_position_embeddings: 1 << 24, ..small() };
    let region = Region::start(Device::Cpu).unwrap();
    let model = Llama::new(&long, F32).unwrap();
    let tokens = Tensor::from_slice(&[1i64, 5, 9]).view([1, 3]);
    let short = Llama::new(&small(), F32).unwrap();
    load_state_dict(&model, &state_dict(&short), "the short model").unwrap();
    assert_eq!(model.logits(&Input::new(&tokens)).unwrap(), short.logits(&Input::new(&tokens)).unwrap());
    assert!(region.finish().unwrap().peak_above_start() < 4 << 20);
}

#[test]
fn parameter_counts_match_accounting() {
    let cases = [
        json!({}),
        json!({ "num_key_value_heads": 1, "attention_bias": true, "mlp_bias": true }),
        json!({ "tie_word_embeddings": true, "num_key_value_heads": 3 }),
        json!({ "head_dim": 10, "num_key_value_heads": 2 }),
        json!({ "model_type": "qwen2", "tie_word_embeddings": true, "num_key_value_heads": 2 }),
        json!({ "model_type": "qwen2" }),
    ];
    for fields in cases {
        let text = with(&fields).to_string();
        let expected = Decoder::parse("config.json".as_ref(), &text).unwrap().parameters().unwrap();
        let model = Llama::new(&serde_json::from_str(&text).unwrap(), F32).unwrap();
        assert_eq!(parameter_count(&model).total, expected, "{fields}");
    }
}

#[test]
fn weights_load_under_either_name_and_a_repeated_head_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    for tied in [false, true] {
        let config = DecoderConfig { tie_word_embeddings: tied, ..small() };
        let (model, tokens) =
            (Llama::new(&config, F32).unwrap(), Tensor::from_slice(&[1i64, 5, 9]).view([1, 3]));
        let logits = model.logits(&Input::new(&tokens)).unwrap();
        let own = state_dict(&model);
        let mut theirs: Vec<(String, Tensor)> =
            own.iter().map(|(name, x)| (hugging_face::tensor_name(name), x.shallow_clone())).collect();
        assert!(theirs.iter().any(|(name, _)| name == "model.layers.1.self_attn.k_proj.weight"));
        assert_eq!(theirs.iter().any(|(name, _)| name == "lm_head.weight"), !tied);
        if tied {
            theirs.push(("lm_head.weight".to_owned(), own[0].1.copy()));
        }
        for state in [own, theirs] {
            tensors_file::write(&path, &state).unwrap();
            let other = Llama::new(&config, F32).unwrap();
            hugging_face::load_weights(&other, &path).unwrap();
            assert_eq!(other.logits(&Input::new(&tokens)).unwrap(), logits);
        }
    }
    let qwen2 =
        Llama::new(&DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::qwen2(40, 24, 36, 2, 6) }, F32);
    let error = hugging_face::load_weights(&qwen2.unwrap(), &path).unwrap_err().to_string();
    assert!(
        error.contains("missing layers.0.self_attn.q_proj.bias, layers.0.self_attn.k_proj.bias"),
        "{error}"
    );
}

/// The model's output at each position, and the gradient of its sum.
fn run(model: &Llama, input: &Input<'_>) -> (Tensor, Vec<Tensor>) {
    let logits = model.logits(input).unwrap();
    let weights = Tensor::arange(40, F64).sin();
    backward(&[&(&logits * weights).sum(Kind::Double)]).unwrap();
    let gradients = parameters(model).into_iter().map(|(_, tensor)| {
        let grad = tensor.grad().copy();
        runtime::autograd::set_grad(tensor, None).unwrap();
        grad
    });
    (logits.detach(), gradients.collect())
}

#[test]
fn a_packed_row_equals_its_documents_alone() {
    let lengths = [5usize, 1, 7, 3];
    for config in [small(), DecoderConfig::qwen2(40, 24, 36, 2, 6)] {
        for attention in [AttentionPath::Fused, AttentionPath::DenseMask, AttentionPath::Explicit] {
            let model = Llama::new(&DecoderConfig { attention, ..config.clone() }, F64).unwrap();
            let tokens = (Tensor::arange(16, (Kind::Int64, Device::Cpu)) * 7).remainder(40).view([1, 16]);
            let positions: Vec<i64> = lengths.iter().flat_map(|&length| 0..length as i64).collect();
            let positions = Tensor::from_slice(&positions).view([1, 16]);
            let documents = Documents::new(&[&lengths[..]], Device::Cpu).unwrap();
            let context = Context { documents: Some(&documents), ..Context::default() };
            let packed = run(&model, &Input { tokens: &tokens, positions: Some(&positions), context });
            let unmoved = run(&model, &Input { tokens: &tokens, positions: None, context });
            let (mut start, mut sums): (i64, Option<Vec<Tensor>>) = (0, None);
            for length in lengths.map(|length| length as i64) {
                let (logits, gradients) = run(&model, &Input::new(&tokens.narrow(1, start, length)));
                let distance = (&logits - packed.0.narrow(1, start, length)).abs().max().double_value(&[]);
                assert!(distance < 1e-12, "{attention:?} at {start}: {distance}");
                sums = Some(match sums {
                    None => gradients,
                    Some(sums) => sums.iter().zip(&gradients).map(|(sum, gradient)| sum + gradient).collect(),
                });
                start += length;
            }
            for (sum, together) in sums.unwrap().iter().zip(&packed.1) {
                let distance = ((sum - together).norm() / sum.norm()).double_value(&[]);
                assert!(distance < 1e-12, "{attention:?}: {distance}");
            }
            // Rotation depends on differences of positions only, so that a document is the same without a restart...
            let shifted = (&unmoved.0 - &packed.0).abs().max().double_value(&[]);
            assert!(shifted < 1e-5, "{shifted}");
            // ... and without the documents it is not.
            let mixed = run(
                &model,
                &Input { tokens: &tokens, positions: Some(&positions), context: Context::default() },
            );
            assert!((mixed.0 - &packed.0).abs().max().double_value(&[]) > 1e-3);
        }
    }
}

#[test]
fn attention_is_causal_and_positions_matter() {
    let model = Llama::new(&small(), F64).unwrap();
    let logits = |tokens: &[i64]| {
        model.logits(&Input::new(&Tensor::from_slice(tokens).view([1, -1]))).unwrap().detach()
    };
    let (a, b) = (logits(&[5, 6, 7, 8]), logits(&[5, 6, 9, 1]));
    assert_eq!(a.narrow(1, 0, 2), b.narrow(1, 0, 2));
    assert_ne!(a.narrow(1, 2, 2), b.narrow(1, 2, 2));
    // Swapping two tokens changes what the third one attends to.
    assert_ne!(logits(&[5, 6, 7]).get(0).get(2), logits(&[6, 5, 7]).get(0).get(2));
    let error = model.logits(&Input::new(&Tensor::zeros([1, 33], (Kind::Int64, Device::Cpu)))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "rotary embedding: position 32 is outside the table's 32 positions (0 to 31); cut the rows, or make the table longer"
    );
}

/// Records the replaceable parts, and puts its own MLP into the first block.
#[derive(Default)]
struct Parts(Vec<String>);

impl ModuleMapper for Parts {
    fn projection(&mut self, name: &str, _: &mut Box<dyn Projection>) -> models::Result<()> {
        self.0.push(name.to_owned());
        Ok(())
    }

    fn mlp(&mut self, name: &str, slot: &mut Box<dyn Mlp>) -> models::Result<()> {
        if name == "layers.0.mlp" {
            *slot = Box::new(Swiglu::new(24, 10, true, Init::Constant(0.5), F64)?);
        }
        Ok(())
    }
}

#[test]
fn parts_are_replaced_by_name() {
    let mut model = Llama::new(&DecoderConfig { num_hidden_layers: 1, ..small() }, F64).unwrap();
    let mut parts = Parts::default();
    map_modules(&mut model, &mut parts).unwrap();
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("layers.0.self_attn.{name}"));
    let mlp = ["gate_proj", "up_proj", "down_proj"].map(|name| format!("layers.0.mlp.{name}"));
    assert_eq!(parts.0, [&attention[..], &mlp, &["lm_head".to_owned()]].concat());
    let bias = parameters(&model).into_iter().find(|(name, _)| name == "layers.0.mlp.gate_proj.bias");
    assert_eq!(bias.unwrap().1.size(), [10]);
    let tokens = Tensor::from_slice(&[1i64, 2]).view([1, 2]);
    assert_eq!(model.logits(&Input::new(&tokens)).unwrap().size(), [1, 2, 40]);
    let _: &dyn Module = &model;
}
