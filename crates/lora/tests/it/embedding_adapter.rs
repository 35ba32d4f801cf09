//! Adapters on the embedding: PEFT's results and files, merging, and what is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use lora::{Adapters, LoraConfig};
use models::hugging_face::{self, Folder};
use models::module::{IGNORE_INDEX, Input, LanguageModel, parameter_count, trainable};
use models::state_dict::state_dict;
use models::{Llama, tensors_file};
use runtime::autograd::backward;
use serde_json::json;
use tch::{Device, Kind, Tensor};

const FAMILIES: [&str; 3] = ["qwen2", "gemma3", "llama"];

fn fixture(family: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/embedding_adapter")).join(family)
}

fn base(family: &str) -> Llama {
    let families = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/families");
    Folder::open(&Path::new(families).join(family)).unwrap().load(Some(Kind::Float), Device::Cpu).unwrap()
}

fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    tensors_file::read(path, Device::Cpu).unwrap().into_iter().collect()
}

fn largest(x: &Tensor) -> f64 {
    x.abs().max().double_value(&[])
}

/// The next token of each position, if it counts.
fn next(labels: &Tensor) -> Tensor {
    let last = Tensor::full([labels.size()[0], 1], IGNORE_INDEX, (Kind::Int64, Device::Cpu));
    Tensor::cat(&[labels.narrow(1, 1, labels.size()[1] - 1), last], 1)
}

#[test]
fn logits_loss_gradients_and_merged_rows_are_those_of_peft() {
    for family in FAMILIES {
        let cases = tensors(&fixture(family).join("cases.safetensors"));
        let input = Input::new(&cases["input_ids"]);
        let mut model = base(family);
        let before = model.logits(&input).unwrap();
        let adapters = Adapters::load(&mut model, &fixture(family).join("adapter")).unwrap();
        let of_logits = |model: &Llama| largest(&(model.logits(&input).unwrap() - &cases["logits"]));
        assert!(of_logits(&model) <= 2e-5, "{family}: logits {}", of_logits(&model));
        let labels = next(&cases["labels"]);
        let targets = labels.ne(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]);
        let loss = model.loss(&input, &labels).unwrap().sum / targets;
        backward(&[&loss]).unwrap();
        let of_loss = (loss.double_value(&[]) - cases["loss"].double_value(&[0])).abs();
        assert!(of_loss <= 2e-6, "{family}: loss {of_loss}");
        let mut found = BTreeSet::new();
        for (parameter, tensor) in trainable(&model) {
            let key = format!("grad.base_model.model.{}", hugging_face::tensor_name(&parameter))
                .replace(".default", "");
            let expected = cases.get(&key).unwrap_or_else(|| panic!("{family}: PEFT does not train {key}"));
            let error = ((tensor.grad() - expected).norm() / expected.norm()).double_value(&[]);
            assert!(error <= 2e-5, "{family}: {key}: {error}");
            found.insert(key);
        }
        let all: BTreeSet<String> = cases.keys().filter(|key| key.starts_with("grad.")).cloned().collect();
        assert_eq!(found, all, "{family}: every gradient of PEFT, and no other");

        let disabled = || {
            let _off = adapters.disable().unwrap();
            model.logits(&input).unwrap()
        };
        assert_eq!(disabled(), before, "{family}");
        adapters.merge().unwrap();
        assert!(of_logits(&model) <= 2e-5, "{family}: merged logits {}", of_logits(&model));
        assert_eq!(adapters.merged(), ["default"], "{family}");
        assert_eq!(disabled(), before, "{family}: a disabled merged adapter");
        adapters.unmerge().unwrap();
        assert!(of_logits(&model) <= 2e-5, "{family}");
        let unloaded = adapters.merge_and_unload(&mut model).unwrap();
        let is_tied = model.decoder_config().tie_word_embeddings;
        let untied: &[&str] = if is_tied { &["model.embed_tokens.weight"] } else { &[] };
        assert_eq!(unloaded.untied, untied, "{family}");
        let state: BTreeMap<String, Tensor> = state_dict(&model).into_iter().collect();
        assert!(largest(&(&state["embed_tokens.weight"] - &cases["merged.embedding"])) <= 1e-6, "{family}");
        assert!(of_logits(&model) <= 2e-5, "{family}: unloaded");
    }
}

#[test]
fn files_of_peft_are_written_again_byte_for_byte_and_unloading_restores_the_base() {
    for family in FAMILIES {
        let out = tempfile::tempdir().unwrap();
        let adapter = fixture(family).join("adapter");
        let mut model = base(family);
        let adapters = Adapters::load(&mut model, &adapter).unwrap();
        adapters.save(out.path()).unwrap();
        for file in [CONFIG_FILE, TENSORS_FILE] {
            let same =
                std::fs::read(adapter.join(file)).unwrap() == std::fs::read(out.path().join(file)).unwrap();
            assert!(same, "{family}: {file} is written differently");
        }
        adapters.unload(&mut model).unwrap();
        let tokens = Tensor::from_slice2(&[[39i64, 5, 1]]);
        let logits = |model: &Llama| model.logits(&Input::new(&tokens)).unwrap();
        assert_eq!(logits(&model), logits(&base(family)), "{family}");
        let state: BTreeMap<String, Tensor> = state_dict(&model).into_iter().collect();
        // A tied head has no values of its own.
        let is_tied = !state.contains_key("lm_head.weight");
        assert_eq!(is_tied, model.decoder_config().tie_word_embeddings, "{family}");
    }
}

#[test]
fn a_new_adapter_changes_nothing_and_trains_the_predicted_numbers() {
    for family in FAMILIES {
        let mut model = base(family);
        let tokens = Tensor::from_slice2(&[[39i64, 5, 1, 39]]);
        let before = model.logits(&Input::new(&tokens)).unwrap();
        for targets in [vec!["embed_tokens"], vec!["q_proj", "embed_tokens"]] {
            let target_modules = serde_json::from_value(json!(targets)).unwrap();
            let config = LoraConfig { r: 2, target_modules, ..LoraConfig::default() };
            config.check_matches(model.decoder_config()).unwrap();
            let predicted = config.trainable_parameters(model.decoder_config()).unwrap();
            let adapters = config.install(&mut model).unwrap();
            assert_eq!(model.logits(&Input::new(&tokens)).unwrap(), before, "{family}");
            assert_eq!(parameter_count(&model).trainable, predicted, "{family}");
            assert_eq!(adapters.targets().len(), if targets.len() == 1 { 1 } else { 3 });
            adapters.unload(&mut model).unwrap();
        }
    }
}

#[test]
fn an_adapter_that_an_embedding_does_not_have_is_refused() {
    let target_modules = || Some(["q_proj", "embed_tokens"].into());
    let error = |config: LoraConfig| {
        let config = LoraConfig { target_modules: target_modules(), ..config };
        config.install(&mut base("qwen2")).unwrap_err().to_string()
    };
    assert!(
        error(LoraConfig { use_dora: true, ..LoraConfig::default() })
            .contains("`use_dora` is true with an adapter on an embedding")
    );
    let pissa = error(LoraConfig { init_lora_weights: json!("pissa"), ..LoraConfig::default() });
    assert!(pissa.contains("with an adapter on an embedding"), "{pissa}");
    let tied = error(LoraConfig { ensure_weight_tying: true, ..LoraConfig::default() });
    assert!(tied.contains("`ensure_weight_tying` is true with an adapter on `model.embed_tokens`"), "{tied}");
    let both = LoraConfig { target_modules: target_modules(), ..LoraConfig::default() };
    let mut model = base("qwen2");
    let _adapters = both.install(&mut model).unwrap();
    let again = both.install(&mut model).unwrap_err().to_string();
    assert!(again.contains("`Adapters::add`"), "{again}");
}
