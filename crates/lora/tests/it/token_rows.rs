//! Trained rows of tokens: PEFT's results and files, and what is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use lora::{Adapters, LoraConfig, TokenIndices};
use models::hugging_face::{self, Folder};
use models::module::{IGNORE_INDEX, Input, LanguageModel, parameter_count, trainable};
use models::state_dict::state_dict;
use models::{Llama, tensors_file};
use runtime::autograd::backward;
use tch::{Device, Kind, Tensor};

/// Each case with the family of its model, of 40 tokens and width 16.
const CASES: [(&str, &str); 4] =
    [("qwen2", "qwen2"), ("gemma3", "gemma3"), ("llama", "llama"), ("llama_embedding", "llama")];

/// Logits of replaced rows are a product of their own, whose sums are rounded in another order.
const ROUNDING: f64 = 1e-6;

fn fixture(case: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/token_rows")).join(case)
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
fn logits_loss_and_gradients_are_those_of_peft() {
    for (case, family) in CASES {
        let cases = tensors(&fixture(case).join("cases.safetensors"));
        let mut model = base(family);
        let before = model.logits(&Input::new(&cases["input_ids"])).unwrap();
        let adapters = Adapters::load(&mut model, &fixture(case).join("adapter")).unwrap();
        let input = Input::new(&cases["input_ids"]);
        let of_logits = largest(&(model.logits(&input).unwrap() - &cases["logits"]));
        assert!(of_logits <= 2e-5, "{case}: logits {of_logits}");
        let labels = next(&cases["labels"]);
        let targets = labels.ne(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]);
        let loss = model.loss(&input, &labels).unwrap().sum / targets;
        backward(&[&loss]).unwrap();
        let of_loss = (loss.double_value(&[]) - cases["loss"].double_value(&[0])).abs();
        assert!(of_loss <= 2e-6, "{case}: loss {of_loss}");
        let mut found = BTreeSet::new();
        for (parameter, tensor) in trainable(&model) {
            let key = format!("grad.base_model.model.{}", hugging_face::tensor_name(&parameter))
                .replace(".default", "");
            let expected = cases.get(&key).unwrap_or_else(|| panic!("{case}: PEFT does not train {key}"));
            let error = ((tensor.grad() - expected).norm() / expected.norm()).double_value(&[]);
            assert!(error <= 2e-5, "{case}: {key}: {error}");
            found.insert(key);
        }
        let all: BTreeSet<String> = cases.keys().filter(|key| key.starts_with("grad.")).cloned().collect();
        assert_eq!(found, all, "{case}: every gradient of PEFT, and no other");

        let base = {
            let _off = adapters.disable().unwrap();
            model.logits(&input).unwrap()
        };
        assert!(largest(&(base - &before)) <= ROUNDING, "{case}: a disabled adapter leaves the base's rows");
        let of_logits = largest(&(model.logits(&input).unwrap() - &cases["logits"]));
        assert!(of_logits <= 2e-5, "{case}: logits after a guard {of_logits}");
    }
}

#[test]
fn merged_tables_are_those_of_peft_and_tied_ones_stay_tied() {
    for (case, family) in CASES {
        let cases = tensors(&fixture(case).join("cases.safetensors"));
        let mut model = base(family);
        let adapters = Adapters::load(&mut model, &fixture(case).join("adapter")).unwrap();
        let unloaded = adapters.merge_and_unload(&mut model).unwrap();
        assert_eq!(unloaded.untied, Vec::<String>::new(), "{case}");
        let state: BTreeMap<String, Tensor> = state_dict(&model).into_iter().collect();
        assert_eq!(state["embed_tokens.weight"], cases["merged.embedding"], "{case}");
        // A tied head has no values of its own.
        let head = state.get("lm_head.weight").unwrap_or(&state["embed_tokens.weight"]);
        assert_eq!(*head, cases["merged.head"], "{case}");
        assert_eq!(
            !state.contains_key("lm_head.weight"),
            model.decoder_config().tie_word_embeddings,
            "{case}"
        );
        let of_logits =
            largest(&(model.logits(&Input::new(&cases["input_ids"])).unwrap() - &cases["logits"]));
        assert!(of_logits <= 2e-5, "{case}: merged logits {of_logits}");
        assert!(state.keys().all(|name| !name.contains("token_adapter")), "{case}");
    }
}

#[test]
fn files_of_peft_are_written_again_byte_for_byte() {
    for (case, family) in CASES {
        let out = tempfile::tempdir().unwrap();
        let adapter = fixture(case).join("adapter");
        let mut model = base(family);
        let adapters = Adapters::load(&mut model, &adapter).unwrap();
        adapters.save(out.path()).unwrap();
        for file in [CONFIG_FILE, TENSORS_FILE] {
            let same =
                std::fs::read(adapter.join(file)).unwrap() == std::fs::read(out.path().join(file)).unwrap();
            assert!(same, "{case}: {file} is written differently");
        }
        let before = base(family);
        adapters.unload(&mut model).unwrap();
        let names = |model: &Llama| state_dict(model).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(&model), names(&before), "{case}");
        let input = tensors(&fixture(case).join("cases.safetensors")).remove("input_ids").unwrap();
        let logits = |model: &Llama| model.logits(&Input::new(&input)).unwrap();
        assert_eq!(logits(&model), logits(&before), "{case}: unloading restores the base");
    }
}

fn config(tokens: TokenIndices) -> LoraConfig {
    LoraConfig { r: 2, trainable_token_indices: Some(tokens), ..LoraConfig::default() }
}

#[test]
fn a_new_adapter_changes_nothing_and_trains_the_predicted_numbers() {
    for (family, rows) in [("qwen2", 2), ("llama", 4)] {
        let mut model = base(family);
        let tokens = Tensor::from_slice2(&[[39i64, 5, 1, 39]]);
        let before = model.logits(&Input::new(&tokens)).unwrap();
        let list = vec![39i64, 5];
        let modules = [("embed_tokens".to_owned(), list.clone()), ("lm_head".to_owned(), list)].into();
        let config = config(TokenIndices::ByModule(modules));
        let predicted = config.trainable_parameters(model.decoder_config()).unwrap();
        assert_eq!(config.token_rows(model.decoder_config()).unwrap(), rows, "{family}");
        let adapters = config.install(&mut model).unwrap();
        let after = model.logits(&Input::new(&tokens)).unwrap();
        assert!(largest(&(after - &before)) <= ROUNDING, "{family}");
        assert_eq!(parameter_count(&model).trainable, predicted, "{family}");
        assert_eq!(adapters.parameter_count("default").unwrap(), predicted, "{family}");
    }
}

#[test]
fn adapters_with_the_same_tokens_have_their_own_rows() {
    let mut model = base("qwen2");
    let tokens = Tensor::from_slice2(&[[39i64, 5, 1]]);
    let config = config(TokenIndices::Embedding(vec![39, 5]));
    let mut adapters = config.install(&mut model).unwrap();
    let first = model.logits(&Input::new(&tokens)).unwrap();
    adapters.add(&mut model, "other", &config).unwrap();
    let rows =
        adapters.tensors("other").unwrap().into_iter().find(|(name, _)| name.contains("token_adapter"));
    let _ = rows.unwrap().1.fill_(0.5);
    assert_eq!(model.logits(&Input::new(&tokens)).unwrap(), first);
    adapters.set_active(&["other"]).unwrap();
    assert_ne!(model.logits(&Input::new(&tokens)).unwrap(), first);
    adapters.delete(&mut model, "other").unwrap();
    adapters.set_active(&["default"]).unwrap();
    assert_eq!(model.logits(&Input::new(&tokens)).unwrap(), first);
    let other = LoraConfig { trainable_token_indices: Some(TokenIndices::Embedding(vec![5, 39])), ..config };
    let error = adapters.add(&mut model, "third", &other).unwrap_err().to_string();
    assert!(error.contains("give both adapters the same tokens in the same order"), "{error}");
}

#[test]
fn tokens_that_cannot_be_trained_are_refused() {
    let error = |family: &str, config: &LoraConfig| {
        let mut model = base(family);
        let error = config.install(&mut model).unwrap_err().to_string();
        assert!(trainable(&model).len() > 20, "nothing was changed");
        error
    };
    let list = |tokens: &[i64]| config(TokenIndices::Embedding(tokens.to_vec()));
    assert!(error("qwen2", &list(&[40])).contains("token 40 is outside the embedding's 40 rows; resize"));
    assert!(error("qwen2", &list(&[3, 3])).contains("token 3 is there twice"));
    let modules = [("wte".to_owned(), vec![1i64])].into();
    let found = error("qwen2", &config(TokenIndices::ByModule(modules)));
    assert!(
        found.contains("`wte` is neither the embedding `model.embed_tokens` nor the head `lm_head`"),
        "{found}"
    );
    let saved = LoraConfig { modules_to_save: Some(vec!["embed_tokens".to_owned()]), ..list(&[3]) };
    assert!(error("qwen2", &saved).contains("which is trained as a whole"));
    let adapted = LoraConfig { target_modules: Some(["q_proj", "lm_head"].into()), ..list(&[3]) };
    assert!(error("qwen2", &adapted).contains("which is adapted too"));
    // An empty list trains no row, as in PEFT.
    assert_eq!(list(&[]).token_rows(base("qwen2").decoder_config()).unwrap(), 0);
}
