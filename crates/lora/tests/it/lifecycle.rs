//! Merge, unmerge, switch, disable, delete, unload: the model's results after each, and the restoration of the base.

use lora::{Adapters, BiasTraining, LoraConfig, LoraLinear, LoraLinearConfig};
use models::module::{Context, Input, LanguageModel, Projection, parameter_count, tensors, trainable};
use models::{DecoderConfig, Llama};
use runtime::random::Generator;
use serde_json::json;
use tch::{Device, Kind, Tensor};

fn model_of(tied: bool, kind: Kind) -> Llama {
    let config = DecoderConfig {
        num_key_value_heads: 2,
        tie_word_embeddings: tied,
        attention_bias: true,
        ..DecoderConfig::llama(61, 16, 40, 2, 4)
    };
    let model = Llama::new(&config, (kind, Device::Cpu)).unwrap();
    let mut generator = Generator::new(1).unwrap();
    let _no_grad = tch::no_grad_guard();
    for named in tensors(&model) {
        let noise = generator.normal(&named.tensor.size(), (Kind::Float, Device::Cpu)).unwrap() * 0.2;
        named.tensor.shallow_clone().copy_(&(noise + if named.tensor.dim() == 1 { 1.0 } else { 0.0 }));
    }
    model
}

fn config() -> LoraConfig {
    LoraConfig {
        r: 3,
        lora_alpha: 7.0,
        target_modules: Some(["q_proj", "v_proj", "down_proj"].into()),
        ..LoraConfig::default()
    }
}

/// Moves every number that an adapter has.
fn perturb(adapters: &Adapters, name: &str, seed: u64) {
    let mut generator = Generator::new(seed).unwrap();
    let _no_grad = tch::no_grad_guard();
    for (_, tensor) in adapters.tensors(name).unwrap() {
        let noise = generator.normal(&tensor.size(), (Kind::Float, Device::Cpu)).unwrap() * 0.2;
        let _ = tensor.shallow_clone().f_add_(&noise).unwrap();
    }
}

fn logits(model: &Llama) -> Tensor {
    let tokens = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6, 5, 35]).view([2, 5]);
    tch::no_grad(|| model.logits(&Input::new(&tokens)).unwrap())
}

fn apart(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().to_kind(Kind::Double).double_value(&[])
}

fn values(model: &Llama) -> Vec<(String, Tensor)> {
    tensors(model).into_iter().map(|named| (named.name, named.tensor.detach().copy())).collect()
}

/// Every variant, in every state, on an untied and a tied base.
#[test]
fn every_adapter_state_is_correct_and_the_base_is_restored_bit_for_bit() {
    let variants = [
        config(),
        LoraConfig { use_rslora: true, lora_dropout: 0.3, ..config() },
        LoraConfig { use_dora: true, ..config() },
        LoraConfig {
            use_dora: true,
            lora_dropout: 0.3,
            target_modules: Some(["v_proj", "lm_head"].into()),
            ..config()
        },
        LoraConfig { init_lora_weights: json!("pissa"), ..config() },
        LoraConfig { init_lora_weights: json!("olora"), use_dora: true, ..config() },
        LoraConfig { target_modules: Some(["q_proj", "lm_head"].into()), ..config() },
        LoraConfig { bias: BiasTraining::All, ..config() },
        LoraConfig { modules_to_save: Some(vec!["lm_head".into(), "norm".into()]), ..config() },
        LoraConfig { modules_to_save: Some(vec!["lm_head".into()]), ensure_weight_tying: true, ..config() },
    ];
    for (index, variant) in variants.iter().enumerate() {
        for tied in [false, true] {
            let what = format!("variant {index}, tied {tied}");
            let mut model = model_of(tied, Kind::Float);
            let (before, base) = (values(&model), logits(&model));
            let count = parameter_count(&model).total;
            let mut adapters = LoraConfig { seed: 7, ..variant.clone() }.install(&mut model).unwrap();
            assert!(apart(&logits(&model), &base) < 1e-4, "{what}: a new adapter changes nothing");

            perturb(&adapters, "default", 8);
            let adapted = logits(&model);
            assert!(apart(&adapted, &base) > 1e-2, "{what}: the adapter does something");
            for _ in 0..2 {
                adapters.merge().unwrap();
                adapters.merge().unwrap();
                assert_eq!(adapters.merged(), ["default"]);
                assert!(apart(&logits(&model), &adapted) < 1e-4, "{what}: merged");
                assert_eq!(logits_when_disabled(&model, &adapters), base, "{what}: merged, disabled");
                adapters.unmerge().unwrap();
                adapters.unmerge().unwrap();
                assert_eq!(logits(&model), adapted, "{what}: unmerged");
            }
            assert_eq!(logits_when_disabled(&model, &adapters), base, "{what}: disabled");
            assert_eq!(logits(&model), adapted, "{what}: the guard is gone");

            // A second one, switched to and back.
            adapters.add(&mut model, "other", &LoraConfig { seed: 9, ..variant.clone() }).unwrap();
            assert_eq!(logits(&model), adapted, "{what}: an adapter that was added rests");
            adapters.set_active(&["other"]).unwrap();
            assert!(apart(&logits(&model), &base) < 1e-4, "{what}: the other is new");
            let of_other = trainable(&model).iter().filter(|(name, _)| name.contains(".default.")).count();
            assert_eq!(of_other, 0, "{what}: the one that rests is not trained");
            perturb(&adapters, "other", 10);
            let other = logits(&model);
            assert!(apart(&other, &adapted) > 1e-3, "{what}: the other is another");
            adapters.set_active(&["default"]).unwrap();
            assert_eq!(logits(&model), adapted, "{what}: back");
            adapters.delete(&mut model, "default").unwrap();
            assert_eq!((adapters.names(), adapters.active()), (vec!["other".to_owned()], vec![]), "{what}");
            assert_eq!(logits(&model), base, "{what}: nothing is active");
            adapters.set_active(&["other"]).unwrap();
            assert_eq!(logits(&model), other, "{what}: the other is left");

            adapters.unload(&mut model).unwrap();
            assert_eq!(logits(&model), base, "{what}: unloaded");
            assert_eq!(values(&model), before, "{what}: the base's numbers");
            assert_eq!(parameter_count(&model).total, count, "{what}: and no more of them");
        }
    }
}

fn logits_when_disabled(model: &Llama, adapters: &Adapters) -> Tensor {
    let _off = adapters.disable().unwrap();
    logits(model)
}

#[test]
fn a_merged_model_is_plain_and_untied_weights_are_reported() {
    let head = |save: bool, tying: bool| LoraConfig {
        target_modules: Some(if save { ["q_proj", "v_proj"].into() } else { ["q_proj", "lm_head"].into() }),
        modules_to_save: save.then(|| vec!["lm_head".into()]),
        ensure_weight_tying: tying,
        ..config()
    };
    let saved = |names: &[&str], targets: &[&str]| LoraConfig {
        target_modules: Some(lora::Names::List(targets.iter().map(|name| (*name).to_owned()).collect())),
        modules_to_save: Some(names.iter().map(|name| (*name).to_owned()).collect()),
        ..config()
    };
    let (embedding, weight) = ("model.embed_tokens.weight", "lm_head.weight");
    for (variant, tied, untied) in [
        (saved(&["embed_tokens"], &["q_proj"]), true, vec![embedding]),
        (saved(&["embed_tokens", "lm_head"], &["q_proj"]), true, vec![embedding, weight]),
        (saved(&["embed_tokens"], &["q_proj", "lm_head"]), true, vec![weight, embedding]),
        (saved(&["embed_tokens", "lm_head"], &["q_proj"]), false, vec![]),
        (config(), true, vec![]),
        (head(false, false), false, vec![]),
        (head(false, false), true, vec!["lm_head.weight"]),
        (head(true, false), true, vec!["lm_head.weight"]),
        (head(true, false), false, vec![]),
        (head(true, true), true, vec![]),
    ] {
        let mut model = model_of(tied, Kind::Float);
        let names: Vec<String> = values(&model).into_iter().map(|(name, _)| name).collect();
        let before = model_of(tied, Kind::Float);
        let before = &values(&before)[0].1;
        let adapters = LoraConfig { seed: 7, ..variant.clone() }.install(&mut model).unwrap();
        perturb(&adapters, "default", 8);
        let adapted = logits(&model);
        let left = adapters.merge_and_unload(&mut model).unwrap();
        assert_eq!(left.untied, untied);
        assert!(trainable(&model).is_empty());
        assert!(apart(&logits(&model), &adapted) < 1e-4);
        let mut expected = names;
        expected.extend((!untied.is_empty()).then(|| weight.to_owned()));
        assert_eq!(values(&model).into_iter().map(|(name, _)| name).collect::<Vec<_>>(), expected);
        let saves = |name: &str| variant.modules_to_save.iter().flatten().any(|saved| saved == name);
        let changed = variant.ensure_weight_tying && tied || saves("embed_tokens");
        assert_eq!(
            values(&model)[0].1 != *before,
            changed,
            "the embedding changes alone or with a tied head"
        );
    }
}

#[test]
fn several_adapters_sum_and_a_low_precision_base_is_restored() {
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        let mut model = model_of(false, kind);
        let before = values(&model);
        let mut adapters = LoraConfig { seed: 7, ..config() }.install(&mut model).unwrap();
        adapters.add(&mut model, "other", &LoraConfig { r: 2, seed: 9, ..config() }).unwrap();
        perturb(&adapters, "default", 8);
        perturb(&adapters, "other", 10);
        let each = ["default", "other"].map(|name| {
            adapters.set_active(&[name]).unwrap();
            logits(&model)
        });
        adapters.set_active(&["default", "other"]).unwrap();
        let both = logits(&model);
        assert!(each.iter().all(|one| apart(one, &both) > 1e-2), "{kind:?}");
        adapters.merge().unwrap();
        let tolerance = match kind {
            Kind::Float => 1e-4,
            // The rounding of W to its dtype.
            _ => 0.02 * both.abs().max().to_kind(Kind::Double).double_value(&[]),
        };
        assert!(apart(&logits(&model), &both) < tolerance, "{kind:?}");
        adapters.unmerge().unwrap();
        adapters.unload(&mut model).unwrap();
        assert_eq!(values(&model), before, "{kind:?}");
    }
}

#[test]
fn a_merge_that_is_not_finite_changes_nothing() {
    let mut model = model_of(false, Kind::Float);
    let adapters = LoraConfig { seed: 7, ..config() }.install(&mut model).unwrap();
    perturb(&adapters, "default", 8);
    let adapted = logits(&model);
    let broken =
        adapters.tensors("default").unwrap().into_iter().find(|(name, _)| name.contains("layers.1")).unwrap();
    let kept = broken.1.copy();
    let _ = tch::no_grad(|| broken.1.shallow_clone().fill_(f64::NAN));
    let error = adapters.merge().unwrap_err();
    assert!(error.to_string().starts_with("merging default into `model.layers.1."), "{error}");
    assert_eq!(adapters.merged(), Vec::<String>::new());
    tch::no_grad(|| broken.1.shallow_clone().copy_(&kept));
    assert_eq!(logits(&model), adapted);
}

#[test]
fn a_graph_from_before_a_merge_is_refused() {
    let mut model = model_of(false, Kind::Float);
    let adapters = LoraConfig { seed: 7, ..config() }.install(&mut model).unwrap();
    let tokens = Tensor::from_slice(&[3i64, 1, 4]).view([1, 3]);
    let loss = model.logits(&Input::new(&tokens)).unwrap().sum(Kind::Float);
    adapters.merge().unwrap();
    let error = runtime::autograd::backward(&[&loss]).unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

#[test]
fn adapters_load_from_their_folders_under_any_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = model_of(false, Kind::Float);
    let mut adapters = LoraConfig { seed: 7, ..config() }.install(&mut model).unwrap();
    let other = LoraConfig { use_dora: true, bias: BiasTraining::LoraOnly, ..config() };
    adapters.add(&mut model, "other", &LoraConfig { seed: 9, ..other.clone() }).unwrap();
    perturb(&adapters, "default", 8);
    perturb(&adapters, "other", 10);
    let of_default = logits(&model);
    adapters.set_active(&["other"]).unwrap();
    let of_other = logits(&model);
    adapters.save(folder.path()).unwrap();

    let mut model = model_of(false, Kind::Float);
    let mut adapters = Adapters::load(&mut model, &folder.path().join("other")).unwrap();
    assert_eq!(logits(&model), of_other);
    adapters.add_from(&mut model, "first", folder.path()).unwrap();
    assert_eq!(logits(&model), of_other, "what is added rests");
    adapters.set_active(&["first"]).unwrap();
    assert_eq!(logits(&model), of_default);
}

/// As offloading does: a fully trained tensor gets other memory, and is trained there.
#[test]
fn fully_trained_tensors_are_used_by_the_model_wherever_their_memory_is() {
    let mut model = model_of(false, Kind::Float);
    let config = LoraConfig { bias: BiasTraining::All, ..config() };
    let adapters = LoraConfig { seed: 7, ..config.clone() }.install(&mut model).unwrap();
    let of_model = || {
        let (_, bias) =
            trainable(&model).into_iter().find(|(name, _)| name == "layers.0.self_attn.q_proj.bias").unwrap();
        bias.shallow_clone()
    };
    let saved = || {
        let named = adapters.tensors("default").unwrap().into_iter();
        named
            .into_iter()
            .find(|(name, _)| name.ends_with("layers.0.self_attn.q_proj.base_layer.bias"))
            .unwrap()
            .1
    };
    let base = of_model().detach().copy();
    let _no_grad = tch::no_grad_guard();
    for round in 1..=2 {
        let moved = of_model().detach().copy();
        of_model().set_data(&moved);
        let _ = of_model().g_add_scalar_(1.0);
        let expected = &base + f64::from(round);
        assert_eq!(saved(), expected);
        let bias = of_model();
        {
            let _off = adapters.disable().unwrap();
            assert_eq!(bias, base);
            assert_eq!(saved(), expected);
        }
        assert_eq!(bias, expected);
        assert_eq!(saved(), expected);
    }
}

#[test]
fn any_projection_with_a_weight_can_be_wrapped() {
    let linear = models::Linear::new(6, 5, true, tch::kind::FLOAT_CPU).unwrap();
    let (x, context) = (Tensor::ones([2, 6], tch::kind::FLOAT_CPU), Context::default());
    let layer = LoraLinear::of(&linear, &LoraLinearConfig::default()).unwrap();
    assert_eq!(layer.forward(&x, &context).unwrap(), linear.forward(&x, &context).unwrap());
    assert!(LoraLinear::of(&layer, &LoraLinearConfig::default()).is_err(), "not one that is adapted already");
}
