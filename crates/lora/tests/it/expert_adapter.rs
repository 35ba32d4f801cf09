//! Adapters on the experts of mixtures: PEFT's results, gradients and files, merging, several adapters, and what is refused. The cases are
//! made by `xtask/peers/expert_adapters.py`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use lora::{Adapters, LoraConfig};
use models::hugging_face::{self, Folder};
use models::module::{Context, IGNORE_INDEX, Input, LanguageModel, tensors as tensors_of, trainable};
use models::{DecoderConfig, Documents, Llama, tensors_file};
use runtime::autograd::backward;
use serde_json::json;
use tch::{Device, Kind, Tensor};
use training::activations::{Activations, LayerPlan};

/// Name of the case and of its base.
const CASES: [(&str, &str); 4] = [
    ("qwen3_moe", "qwen3_moe"),
    ("qwen3_moe_down", "qwen3_moe_some"),
    ("qwen3_5_moe_gate_up", "qwen3_5_moe"),
    ("gpt_oss", "gpt_oss"),
];
const LOGITS: f64 = 1e-4;
const LOSS: f64 = 1e-5;
const GRADIENT: f64 = 1e-4;

fn fixture(case: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/expert_adapter")).join(case)
}

fn family(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/families")).join(name)
}

fn base(name: &str, kind: Kind) -> Llama {
    Folder::open(&family(name)).unwrap().load(Some(kind), Device::Cpu).unwrap()
}

fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    tensors_file::read(path, Device::Cpu).unwrap().into_iter().collect()
}

fn largest(x: &Tensor) -> f64 {
    x.abs().max().double_value(&[])
}

/// The rows of a case, with padding as a document of its own.
struct Rows {
    tokens: Tensor,
    labels: Tensor,
    mask: Tensor,
    positions: Tensor,
    documents: Documents,
}

impl Rows {
    fn of(name: &str) -> Self {
        let inputs = tensors(&family(name).join("cases.safetensors"));
        let mask = inputs["attention_mask"].shallow_clone();
        let rows = Vec::<Vec<i64>>::try_from(&mask).unwrap();
        let runs = |row: &Vec<i64>| row.chunk_by(|a, b| a == b).map(<[i64]>::len).collect::<Vec<_>>();
        let documents = Documents::new(&rows.iter().map(runs).collect::<Vec<_>>(), Device::Cpu).unwrap();
        let labels = &inputs["labels"];
        let last = Tensor::full([labels.size()[0], 1], IGNORE_INDEX, (Kind::Int64, Device::Cpu));
        Self {
            tokens: inputs["input_ids"].shallow_clone(),
            labels: Tensor::cat(&[labels.narrow(1, 1, labels.size()[1] - 1), last], 1),
            positions: (mask.cumsum(1, Kind::Int64) - 1).clamp_min(0),
            mask,
            documents,
        }
    }

    fn input(&self) -> Input<'_> {
        let context = Context { documents: Some(&self.documents), ..Context::default() };
        Input { tokens: &self.tokens, positions: Some(&self.positions), context }
    }

    fn loss(&self, model: &Llama) -> Tensor {
        let targets = self.labels.ne(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]);
        model.loss(&self.input(), &self.labels).unwrap().sum / targets
    }

    /// Every gradient after a backward of the loss.
    fn gradients(&self, model: &Llama) -> Vec<(String, Tensor)> {
        let named = trainable(model);
        for (_, tensor) in &named {
            runtime::autograd::set_grad(tensor, None).unwrap();
        }
        backward(&[&self.loss(model)]).unwrap();
        named.into_iter().map(|(name, tensor)| (name, tensor.grad().copy())).collect()
    }
}

#[test]
fn logits_loss_gradients_files_and_merged_weights_are_those_of_peft() {
    for (case, name) in CASES {
        let (rows, cases) = (Rows::of(name), tensors(&fixture(case).join("cases.safetensors")));
        let mut model = base(name, Kind::Float);
        let adapters = Adapters::load(&mut model, &fixture(case).join("adapter")).unwrap();
        let counts = rows.mask.unsqueeze(2).to_kind(Kind::Float);
        let error_of = |model: &Llama, expected: &str| {
            largest(&((model.logits(&rows.input()).unwrap() - &cases[expected]) * &counts))
        };
        let of_logits = error_of(&model, "logits");
        let loss = rows.loss(&model);
        let of_loss = (loss.double_value(&[]) - cases["loss"].double_value(&[0])).abs();
        backward(&[&loss]).unwrap();

        let mut found = BTreeSet::new();
        let mut worst = (0f64, String::new());
        for (name, tensor) in trainable_as_in_files(&adapters, &model) {
            let expected = &cases[&format!("grad.base_model.model.{name}")];
            let error = ((tensor.grad() - expected).norm() / expected.norm()).double_value(&[]);
            if error.is_nan() || error > worst.0 {
                worst = (error, name.clone());
            }
            found.insert(format!("grad.base_model.model.{name}"));
        }
        let all: BTreeSet<String> = cases.keys().filter(|key| key.starts_with("grad.")).cloned().collect();
        assert_eq!(found, all, "{case}: every gradient, and no other");

        let out = tempfile::tempdir().unwrap();
        adapters.save(out.path()).unwrap();
        for file in [CONFIG_FILE, TENSORS_FILE] {
            let same = std::fs::read(fixture(case).join("adapter").join(file)).unwrap()
                == std::fs::read(out.path().join(file)).unwrap();
            assert!(same, "{case}: {file} is written differently");
        }

        let before = bits(&model);
        adapters.merge().unwrap();
        let of_merged = error_of(&model, "merged_logits");
        adapters.unmerge().unwrap();
        assert!(before == bits(&model), "{case}: unmerging restores the base bit for bit");
        let _ = adapters.merge_and_unload(&mut model).unwrap();
        let unloaded = error_of(&model, "merged_logits");
        assert!(trainable(&model).is_empty(), "{case}");
        eprintln!(
            "{case}: logits {of_logits:.1e}, merged {of_merged:.1e}, loss {of_loss:.1e}, gradients {worst:?}"
        );
        assert!(
            of_logits <= LOGITS && of_merged <= LOGITS && unloaded <= LOGITS,
            "{case}: {of_logits} {of_merged} {unloaded}"
        );
        assert!(of_loss <= LOSS, "{case}: loss {of_loss}");
        assert!(worst.0 <= GRADIENT, "{case}: {worst:?}");
    }
}

/// The model's trained tensors under their names in files.
fn trainable_as_in_files(adapters: &Adapters, model: &Llama) -> Vec<(String, Tensor)> {
    let own = trainable(model);
    let of_file = |(name, tensor): (String, Tensor)| {
        let same = own.iter().find(|(_, own)| own.data_ptr() == tensor.data_ptr());
        (name, same.expect("a tensor of the model").1.shallow_clone())
    };
    let named: Vec<_> = adapters.tensors("default").unwrap().into_iter().map(of_file).collect();
    assert_eq!(named.len(), own.len());
    named
}

fn bits(model: &Llama) -> Vec<(String, Tensor)> {
    let frozen = tensors_of(model).into_iter().filter(|named| !named.tensor.requires_grad());
    frozen.map(|named| (named.name, named.tensor.copy())).collect()
}

/// Experts alone, attention alone, and both.
fn configs() -> [LoraConfig; 3] {
    let experts = Some(vec!["experts.gate_up_proj".to_owned(), "experts.down_proj".to_owned()]);
    let attention = Some(["q_proj", "v_proj"].into());
    let base = LoraConfig { r: 3, seed: 7, init_lora_weights: json!(false), ..LoraConfig::default() };
    [
        LoraConfig { target_parameters: experts.clone(), ..base.clone() },
        LoraConfig { target_modules: attention.clone(), ..base.clone() },
        LoraConfig { target_modules: attention, target_parameters: experts, ..base },
    ]
}

#[test]
fn every_plan_of_the_activations_gives_the_same_bits_in_every_dtype() {
    for (_, name) in CASES {
        let rows = Rows::of(name);
        for kind in [Kind::Float, Kind::BFloat16] {
            let mut expected: Option<Vec<(String, Tensor)>> = None;
            for plan in [
                LayerPlan::KeepAll,
                LayerPlan::RecomputeMlp,
                LayerPlan::RecomputeAll,
                LayerPlan::RecomputeElementwise,
            ] {
                let mut model = base(name, kind);
                let layers = model.decoder_config().num_hidden_layers as usize;
                configs()[2].install(&mut model).unwrap();
                let _plan = Activations::install(&mut model, &vec![plan; layers]).unwrap();
                let found = rows.gradients(&model);
                assert!(found.iter().any(|(name, grad)| name.contains("experts") && largest(grad) > 0.0));
                let expected = expected.get_or_insert_with(|| {
                    found.iter().map(|(name, grad)| (name.clone(), grad.copy())).collect()
                });
                for ((name, expected), (_, found)) in expected.iter().zip(&found) {
                    assert!(expected.equal(found), "{name}, {kind:?}, {plan}");
                }
            }
        }
    }
}

/// The adapters and their gradients are in fp32 over a base in 16 bits, whose gradients are near to those of the base in fp32.
#[test]
fn adapters_are_in_fp32_over_a_base_in_16_bits() {
    let rows = Rows::of("qwen3_moe");
    let [wide, half] = [Kind::Float, Kind::BFloat16].map(|kind| {
        let mut model = base("qwen3_moe", kind);
        configs()[0].install(&mut model).unwrap();
        assert!(trainable(&model).iter().all(|(_, tensor)| tensor.kind() == Kind::Float));
        rows.gradients(&model)
    });
    for ((name, wide), (_, half)) in wide.iter().zip(&half) {
        assert_eq!(half.kind(), Kind::Float);
        let similarity = wide.flatten(0, -1).dot(&half.flatten(0, -1)) / (wide.norm() * half.norm());
        assert!(similarity.double_value(&[]) > 0.9, "{name}: {similarity}");
    }
}

#[test]
fn parameters_are_counted_from_the_configuration() {
    for (_, name) in CASES {
        let decoder: DecoderConfig = Folder::open(&family(name)).unwrap().config().clone();
        for config in configs() {
            config.check_matches(&decoder).unwrap();
            let mut model = base(name, Kind::Float);
            config.install(&mut model).unwrap();
            let trained: usize = trainable(&model).iter().map(|(_, tensor)| tensor.numel()).sum();
            assert_eq!(config.trainable_parameters(&decoder).unwrap(), trained as u64, "{name}");
        }
    }
}

#[test]
fn several_adapters_are_switched_disabled_and_deleted() {
    let rows = Rows::of("qwen3_moe");
    let mut model = base("qwen3_moe", Kind::Float);
    let logits = |model: &Llama| tch::no_grad(|| model.logits(&rows.input()).unwrap());
    let plain = logits(&model);
    let mut adapters = configs()[0].install(&mut model).unwrap();
    let first = logits(&model);
    adapters.add(&mut model, "other", &LoraConfig { seed: 8, ..configs()[0].clone() }).unwrap();
    assert_eq!(logits(&model), first);
    adapters.set_active(&["other"]).unwrap();
    let other = logits(&model);
    assert!(largest(&(&other - &first)) > 1e-3 && largest(&(&first - &plain)) > 1e-3);
    assert!(trainable(&model).iter().all(|(name, _)| name.contains(".other.")));
    {
        let _off = adapters.disable().unwrap();
        assert_eq!(logits(&model), plain);
    }
    adapters.set_active(&["default", "other"]).unwrap();
    let both = logits(&model);
    adapters.merge().unwrap();
    assert!(largest(&(logits(&model) - &both)) < 1e-4);
    adapters.unmerge().unwrap();
    let one = vec!["experts.down_proj".to_owned()];
    let refused = LoraConfig { target_parameters: Some(one), ..configs()[0].clone() };
    let error = adapters.add(&mut model, "third", &refused).unwrap_err().to_string();
    assert!(error.contains("give each the same `target_parameters`"), "{error}");
    adapters.delete(&mut model, "other").unwrap();
    assert_eq!(logits(&model), first);
    adapters.unload(&mut model).unwrap();
    assert_eq!(logits(&model), plain);
}

#[test]
fn what_cannot_be_adapted_is_refused_by_name() {
    let experts = || Some(vec!["experts.down_proj".to_owned()]);
    let base_config = LoraConfig { target_parameters: experts(), ..LoraConfig::default() };
    let cases: [(LoraConfig, &str); 7] = [
        (
            LoraConfig { lora_dropout: 0.1, ..base_config.clone() },
            "`lora_dropout` is 0.1 with `target_parameters`",
        ),
        (LoraConfig { use_dora: true, ..base_config.clone() }, "`use_dora` is true with `target_parameters`"),
        (
            LoraConfig { init_lora_weights: json!("pissa"), ..base_config.clone() },
            "`init_lora_weights` is pissa with",
        ),
        (
            LoraConfig { target_parameters: Some(vec!["q_proj.weight".to_owned()]), ..base_config.clone() },
            "`q_proj.weight` is none of the tensors of this model's experts",
        ),
        (
            LoraConfig { target_parameters: Some(vec!["experts.down".to_owned()]), ..base_config.clone() },
            "`experts.down` is none of the tensors",
        ),
        (
            LoraConfig { target_modules: Some(["down_proj"].into()), ..LoraConfig::default() },
            "name those by `target_parameters`: `mlp.experts.gate_up_proj`",
        ),
        (LoraConfig { target_parameters: experts(), r: 0, ..base_config }, "`r` is 0"),
    ];
    for (config, expected) in cases {
        let mut model = base("qwen3_moe", Kind::Float);
        let before = trainable(&model).len();
        let error = config.install(&mut model).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(trainable(&model).len(), before, "nothing is changed");
    }
    let mut dense = base("qwen3", Kind::Float);
    let config = LoraConfig { target_parameters: experts(), ..LoraConfig::default() };
    let error = config.install(&mut dense).unwrap_err().to_string();
    assert!(error.contains("is none of the tensors of this model's experts; they are none"), "{error}");
    let decoder = hugging_face::Folder::open(&family("qwen3_moe")).unwrap().config().clone();
    let typo =
        LoraConfig { target_parameters: Some(vec!["gate_up_prj".to_owned()]), ..LoraConfig::default() };
    let error = typo.check_matches(&decoder).unwrap_err().to_string();
    assert!(error.contains("did you mean `gate_up_proj`?"), "{error}");
}
