//! The projections that a configuration selects, their number of parameters, and their initial values.

use lora::{Layers, LoraConfig, LoraLinear, LoraLinearConfig, Names};
use models::module::{parameter_count, parameters};
use models::{DecoderConfig, Gpt2, Gpt2Config, Linear, Llama};
use runtime::random::Generator;
use serde_json::json;
use tch::{Device, Kind, Tensor, kind};

/// The shape that Qwen2.5 publishes, layers as given.
fn qwen(hidden: i64, feed: i64, layers: i64, heads: i64, key_heads: i64, vocabulary: i64) -> DecoderConfig {
    DecoderConfig {
        num_key_value_heads: key_heads,
        ..DecoderConfig::llama(vocabulary, hidden, feed, layers, heads)
    }
}

fn attention() -> LoraConfig {
    LoraConfig {
        r: 8,
        target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj"].into()),
        ..LoraConfig::default()
    }
}

#[test]
fn adapter_sizes_match_published_models() {
    let half = qwen(896, 4864, 24, 14, 2, 151_936);
    assert_eq!(attention().trainable_parameters(&half).unwrap(), 1_081_344);
    let seven = qwen(3584, 18_944, 28, 28, 4, 152_064);
    assert_eq!(attention().trainable_parameters(&seven).unwrap(), 5_046_272);
}

/// The counts are of Python's `re.fullmatch`, which PEFT uses, over the names of 12 layers and `lm_head`.
#[test]
fn patterns_may_look_around_and_refer_back() {
    let base = DecoderConfig::llama(61, 16, 40, 12, 2);
    for (pattern, count) in [
        (r"^(?!.*(?:visual|lm_head)).*_proj$", 84),
        (r"(?:.*?(?:language|text).*?)?.*(?<!k)(?<!v)_proj", 60),
        (r"model\.layers\.(\d)\1\..*\.q_proj", 1),
        (r".*\.(?=[0-9]*[02468]\.)\d+\..*(?:q|v)_proj", 12),
        (r"model\.layers\.(?!0\.|11\.)\d+\.mlp\.(?P<m>gate|up)_proj", 20),
    ] {
        let config = LoraConfig { target_modules: Some(Names::Pattern(pattern.to_owned())), ..attention() };
        config.check_matches(&base).unwrap();
        let mut model = Llama::new(&base, (Kind::Float, Device::Cpu)).unwrap();
        let adapters = config.install(&mut model).unwrap();
        assert_eq!(adapters.targets().len(), count, "{pattern}");
    }
}

#[test]
fn installed_adapters_match_accounting() {
    let base = qwen(16, 40, 3, 4, 2, 61);
    for config in [
        attention(),
        LoraConfig { use_dora: true, ..attention() },
        LoraConfig { target_modules: None, ..attention() },
        LoraConfig { target_modules: Some(Names::Pattern("all-linear".into())), ..attention() },
        LoraConfig { target_modules: Some(["lm_head"].into()), ..attention() },
        LoraConfig {
            rank_pattern: json!({ "q_proj": 2, "layers.0.*o_proj": 5 }).as_object().unwrap().clone(),
            ..attention()
        },
    ] {
        let mut model = Llama::new(&base, (Kind::Float, Device::Cpu)).unwrap();
        let of_base = parameter_count(&model).total;
        let adapters = config.install(&mut model).unwrap();
        let count = parameter_count(&model);
        assert_eq!(count.total, of_base + count.trainable);
        assert_eq!(count.trainable, config.trainable_parameters(&base).unwrap(), "{config:?}");
        assert_eq!(count.trainable, adapters.parameter_count("default").unwrap());
    }
}

#[test]
fn every_linear_layer_is_no_embedding() {
    let config = LoraConfig { target_modules: Some(Names::Pattern("all-linear".into())), ..attention() };
    let adapts = |name: &str| config.adapts(name).unwrap();
    assert!(adapts("model.layers.0.mlp.up_proj"));
    assert!(!adapts("model.embed_tokens") && !adapts("lm_head"));
    let saved = LoraConfig { modules_to_save: Some(vec!["embed_tokens".to_owned()]), ..config };
    assert!(saved.adapts("model.embed_tokens").unwrap());
}

#[test]
fn names_match_as_in_peft() {
    let q = |layers: &[i64]| -> Vec<String> {
        layers.iter().map(|layer| format!("model.layers.{layer}.self_attn.q_proj")).collect()
    };
    let list = |names: Names| LoraConfig { target_modules: Some(names), ..LoraConfig::default() };
    let pattern = |pattern: &str| list(Names::Pattern(pattern.into()));
    let cases = [
        (list(["q_proj"].into()), q(&[0, 1, 2])),
        (list(["self_attn.q_proj"].into()), q(&[0, 1, 2])),
        (list(["model.layers.1.self_attn.q_proj"].into()), q(&[1])),
        // A layer's number does not hold back what is named in full.
        (
            LoraConfig {
                layers_to_transform: Some(Layers::One(0)),
                ..list(["model.layers.1.self_attn.q_proj"].into())
            },
            q(&[1]),
        ),
        (
            LoraConfig { layers_to_transform: Some(Layers::Several(vec![0, 2])), ..list(["q_proj"].into()) },
            q(&[0, 2]),
        ),
        (
            LoraConfig {
                layers_to_transform: Some(Layers::One(2)),
                layers_pattern: Some(Names::Pattern("layers".into())),
                ..list(["q_proj"].into())
            },
            q(&[2]),
        ),
        (pattern(r".*\.q_proj"), q(&[0, 1, 2])),
        (pattern(r"model\.layers\.[01]\.self_attn\.q_proj"), q(&[0, 1])),
        (
            LoraConfig {
                exclude_modules: Some(["layers.1.self_attn.q_proj"].into()),
                ..list(["q_proj"].into())
            },
            q(&[0, 2]),
        ),
        (
            LoraConfig {
                exclude_modules: Some(Names::Pattern(r".*\.0\..*".into())),
                ..list(["q_proj"].into())
            },
            q(&[1, 2]),
        ),
        (
            LoraConfig {
                modules_to_save: Some(vec!["layers.0.self_attn.q_proj".into()]),
                ..list(["q_proj"].into())
            },
            q(&[1, 2]),
        ),
        (
            LoraConfig {
                exclude_modules: Some(
                    ["k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"].into(),
                ),
                ..pattern("All-Linear")
            },
            q(&[0, 1, 2]),
        ),
    ];
    for (config, expected) in cases {
        let mut model = Llama::new(&qwen(16, 40, 3, 4, 2, 61), (Kind::Float, Device::Cpu)).unwrap();
        let adapters = config.install(&mut model).unwrap();
        assert_eq!(adapters.targets(), expected, "{config:?}");
    }
}

#[test]
fn models_of_other_families_use_their_own_names() {
    let config = Gpt2Config {
        vocabulary: 50,
        max_sequence: 16,
        hidden: 8,
        heads: 2,
        layers: 2,
        ..Gpt2Config::small()
    };
    let mut model = Gpt2::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let adapted = LoraConfig { target_modules: Some(["c_attn"].into()), ..LoraConfig::default() };
    let adapters = adapted.install(&mut model).unwrap();
    assert_eq!(adapters.targets(), ["h.0.attn.c_attn", "h.1.attn.c_attn"]);
}

#[test]
fn initial_values_match_their_distributions_and_seeds() {
    let begun = |init: &str, seed: u64| -> Vec<Tensor> {
        let config =
            LoraConfig { init_lora_weights: serde_json::from_str(init).unwrap(), ..LoraConfig::default() };
        let weight = Generator::new(1).unwrap().normal(&[300, 400], kind::FLOAT_CPU).unwrap();
        let options = LoraLinearConfig {
            r: 16,
            alpha: 8.0,
            init: config.init().unwrap(),
            seed,
            ..LoraLinearConfig::default()
        };
        let layer = LoraLinear::new(Linear { weight, bias: None }, &options).unwrap();
        let learned = parameters(&layer).into_iter().filter(|(name, _)| name.starts_with("lora_"));
        learned.map(|(_, tensor)| tensor.detach()).collect()
    };
    let deviation = |tensor: &Tensor| tensor.std(false).double_value(&[]);
    let largest = |tensor: &Tensor| tensor.abs().max().double_value(&[]);
    let near =
        |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 0.05, "{found} {expected}");

    let [a, b] = &begun("true", 1)[..] else { panic!() };
    assert!(largest(a) <= 1.0 / 20.0 && largest(b) == 0.0);
    near(deviation(a), 1.0 / 20.0 / 3f64.sqrt());
    let [a, b] = &begun("false", 1)[..] else { panic!() };
    assert!(largest(a) <= 1.0 / 20.0 && largest(b) <= 1.0 / 4.0);
    near(deviation(b), 1.0 / 4.0 / 3f64.sqrt());
    let [a, b] = &begun("\"gaussian\"", 1)[..] else { panic!() };
    near(deviation(a), 1.0 / 16.0);
    assert_eq!(largest(b), 0.0);
    let [a, b] = &begun("\"orthogonal\"", 1)[..] else { panic!() };
    assert!(largest(a) > 0.01 && largest(b) > 0.01 && largest(&b.matmul(a)) < 1e-5);
    // The principal part: the rest of W has the other singular values.
    let [a, b] = &begun("\"pissa\"", 1)[..] else { panic!() };
    let weight = Generator::new(1).unwrap().normal(&[300, 400], kind::FLOAT_CPU).unwrap();
    let (_, before, _) = weight.svd(true, true);
    let (_, after, _) = (weight - b.matmul(a) * 0.5).svd(true, true);
    let off = largest(&(before.narrow(0, 16, 284) - after.narrow(0, 0, 284)));
    assert!(off < 1e-3 && largest(&after.narrow(0, 284, 16)) < 1e-3, "{off}");

    for init in ["true", "false", "\"gaussian\"", "\"orthogonal\""] {
        assert_eq!(begun(init, 1)[0], begun(init, 1)[0], "{init}");
        assert_ne!(begun(init, 1)[0], begun(init, 2)[0], "{init}");
    }
}

#[test]
fn entries_that_match_nothing_are_named_with_the_nearest() {
    let model = qwen(16, 40, 2, 4, 2, 61);
    let check = |config: LoraConfig, words: &str| {
        let error = config.check_matches(&model).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    };
    let names = |names: &[&str]| Some(Names::List(names.iter().map(|name| (*name).to_owned()).collect()));
    let pattern = |name: &str, value: i64| [(name.to_owned(), json!(value))].into_iter().collect();
    check(
        LoraConfig { target_modules: names(&["q_proj", "dwon_proj"]), ..attention() },
        "`target_modules`: `dwon_proj` matches none of the model's projections; did you mean `down_proj`?",
    );
    check(
        LoraConfig { target_modules: names(&["q_proj", "norm"]), ..attention() },
        "`target_modules`: `norm` matches none of the model's projections;",
    );
    check(
        LoraConfig { exclude_modules: Some(Names::Pattern(".*zzz".to_owned())), ..attention() },
        "`exclude_modules`: `.*zzz` matches none",
    );
    check(
        LoraConfig { layers_to_transform: Some(Layers::Several(vec![1, 9])), ..attention() },
        "`layers_to_transform`: `9` matches none of the model's layers; they are `0`, `1`",
    );
    check(
        LoraConfig {
            layers_pattern: names(&["blocks"]),
            layers_to_transform: Some(Layers::One(1)),
            ..attention()
        },
        "`target_modules`",
    );
    check(
        LoraConfig { rank_pattern: pattern("up_proj", 2), ..attention() },
        "`rank_pattern`: `up_proj` matches none of the adapted projections",
    );
    check(
        LoraConfig { rank_pattern: pattern("q_proj", 0), ..attention() },
        "`rank_pattern` is 0; expected a rank of at least 1",
    );
    check(
        LoraConfig { r: 17, ..attention() },
        "`r` is 17, and `model.layers.0.self_attn.q_proj` is 16 by 16",
    );
    check(
        LoraConfig { r: i64::MAX, ..attention() },
        "`r` is 9223372036854775807; expected a rank of at most",
    );
    for config in [
        attention(),
        LoraConfig { target_modules: None, ..attention() },
        LoraConfig { rank_pattern: pattern(r"layers\.1\..*q_proj", 2), ..attention() },
        LoraConfig {
            layers_to_transform: Some(Layers::One(1)),
            layers_pattern: names(&["layers"]),
            ..attention()
        },
        LoraConfig { exclude_modules: names(&["up_proj"]), ..attention() },
    ] {
        config.check_matches(&model).unwrap();
    }
}
