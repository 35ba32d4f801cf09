//! Results of transformers for a tiny model of each family with all of its options: logits, loss and gradients of left-padded rows,
//! packed documents, greedy tokens. Made by `xtask/peers/model_families.py --write`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use models::generation::{GenerationConfig, generate};
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::module::{Context, IGNORE_INDEX, Input, LanguageModel, parameter_count, trainable};
use models::{AttentionPath, DecoderConfig, Documents, Llama, tensors_file};
use runtime::autograd::backward;
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

const LOGITS: f64 = 1e-4;
const LOSS: f64 = 1e-5;
const GRADIENT: f64 = 1e-4;
const PATHS: [AttentionPath; 3] = [AttentionPath::Fused, AttentionPath::DenseMask, AttentionPath::Explicit];

struct Case {
    name: &'static str,
    folder: PathBuf,
    opened: Folder,
    tensors: BTreeMap<String, Tensor>,
}

fn case(name: &'static str) -> Case {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/families")).join(name);
    let tensors = tensors_file::read(&folder.join("cases.safetensors"), Device::Cpu).unwrap();
    Case { name, opened: Folder::open(&folder).unwrap(), tensors: tensors.into_iter().collect(), folder }
}

fn rows(tensor: &Tensor) -> Vec<Vec<i64>> {
    Vec::try_from(tensor).unwrap()
}

fn largest(x: &Tensor) -> f64 {
    x.abs().max().double_value(&[])
}

/// The norm of a gradient and its products with two vectors, as in the script.
fn summary(gradient: &Tensor) -> Tensor {
    let flat = gradient.to_kind(Kind::Double).flatten(0, -1);
    let index = Tensor::arange(flat.size()[0], (Kind::Double, Device::Cpu));
    let (sines, cosines) = ((&index + 1.0).sin(), (index * 0.7).cos());
    Tensor::stack(&[flat.norm(), flat.dot(&sines), flat.dot(&cosines)], 0)
}

/// The largest error of a gradient relative to its norm, and its parameter. `expected` is in the order of Hugging Face's names.
fn worst_gradient(model: &Llama, expected: &Tensor) -> (f64, String) {
    let named = trainable(model).into_iter().map(|(name, tensor)| (hugging_face::tensor_name(&name), tensor));
    let named: BTreeMap<String, &Tensor> = named.collect();
    assert_eq!(expected.size(), [named.len() as i64, 3], "every gradient of the file, and no other");
    // Some gradients are 0 but for rounding: of a bias of keys that do not rotate, which shifts all scores of a query alike.
    let least = 1e-3 * expected.select(1, 0).max().double_value(&[]);
    let errors = named.into_iter().zip(0..).map(|((name, tensor), index)| {
        let expected = expected.get(index);
        (largest(&(summary(&tensor.grad()) - &expected)) / expected.double_value(&[0]).max(least), name)
    });
    errors.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

impl Case {
    fn model(&self, attention: AttentionPath) -> Llama {
        let config = DecoderConfig { attention, ..self.opened.config().clone() };
        let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
        self.opened.load_into(&model).unwrap();
        model
    }

    fn padded(&self, model: &Llama) {
        let mask = &self.tensors["attention_mask"];
        let runs = |row: &Vec<i64>| row.chunk_by(|a, b| a == b).map(<[i64]>::len).collect::<Vec<_>>();
        let documents =
            Documents::new(&rows(mask).iter().map(runs).collect::<Vec<_>>(), Device::Cpu).unwrap();
        let positions = (mask.cumsum(1, Kind::Int64) - 1).clamp_min(0);
        let context = Context { documents: Some(&documents), training: true, ..Context::default() };
        let input = Input { tokens: &self.tensors["input_ids"], positions: Some(&positions), context };
        let counts = mask.unsqueeze(2).to_kind(Kind::Float);
        let logits = largest(&((model.logits(&input).unwrap() - &self.tensors["logits"]) * &counts));

        let labels = &self.tensors["labels"];
        let last = Tensor::full([labels.size()[0], 1], IGNORE_INDEX, (Kind::Int64, Device::Cpu));
        let labels = Tensor::cat(&[labels.narrow(1, 1, labels.size()[1] - 1), last], 1);
        let targets = labels.ne(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]);
        let loss = model.loss(&input, &labels).unwrap().sum / targets;
        backward(&[&loss]).unwrap();
        let of_loss = (loss.double_value(&[]) - self.tensors["loss"].double_value(&[0])).abs();

        let worst = worst_gradient(model, &self.tensors["gradients"]);
        let name = self.name;
        eprintln!(
            "{name}: logits {:.1} % of the tolerance, loss {:.1} %, gradients {:.1} % at {}",
            logits / LOGITS * 100.0,
            of_loss / LOSS * 100.0,
            worst.0 / GRADIENT * 100.0,
            worst.1
        );
        assert!(logits <= LOGITS, "{name}: logits {logits}");
        assert!(of_loss <= LOSS, "{name}: loss {of_loss}");
        assert!(worst.0 <= GRADIENT, "{name}: {worst:?}");
    }

    fn packed(&self, model: &Llama) {
        let lengths: Vec<i64> = Vec::try_from(&self.tensors["lengths"]).unwrap();
        let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
        let positions: Vec<i64> = lengths.iter().flat_map(|&length| 0..length as i64).collect();
        let positions = Tensor::from_slice(&positions).unsqueeze(0);
        let documents = Documents::new(&[lengths], Device::Cpu).unwrap();
        let context = Context { documents: Some(&documents), ..Context::default() };
        let input = Input { tokens: &self.tensors["packed_ids"], positions: Some(&positions), context };
        let error = largest(&(model.logits(&input).unwrap() - &self.tensors["packed_logits"]));
        assert!(error <= LOGITS, "{}: packed logits {error}", self.name);
    }

    fn greedy(&self, model: &Llama) {
        let (ids, mask) = (rows(&self.tensors["input_ids"]), rows(&self.tensors["attention_mask"]));
        let real = |(ids, mask): (&Vec<i64>, &Vec<i64>)| -> Vec<i64> {
            ids.iter().zip(mask).filter(|(_, real)| **real == 1).map(|(id, _)| *id).collect()
        };
        let prompts: Vec<Vec<i64>> = ids.iter().zip(&mask).map(real).collect();
        let short: Vec<Vec<i64>> = ids.iter().map(|row| row[row.len() - 5..].to_vec()).collect();
        for (prompts, key) in [(prompts, "greedy"), (short, "short_greedy")] {
            let expected = rows(&self.tensors[key]);
            for cache in [true, false] {
                let options = GenerationConfig {
                    max_new_tokens: expected[0].len(),
                    cache,
                    ..GenerationConfig::default()
                };
                let found = generate(model, &prompts, &options, &mut ()).unwrap();
                let found: Vec<Vec<i64>> = found.into_iter().map(|row| row.tokens).collect();
                assert_eq!(found, expected, "{} {key}, cache: {cache}", self.name);
            }
        }
    }

    /// The tensors that `accounting` predicts, and the layers with a window.
    fn predicted(&self, model: &Llama) {
        let path = self.folder.join("config.json");
        let predicted = accounting::Decoder::read(&path).unwrap();
        let shape = |shape: &[u64]| shape.iter().map(|&size| size as i64).collect::<Vec<_>>();
        let config = model.decoder_config();
        // Layers that differ are counted, not listed.
        let are_alike = predicted.experts.is_none_or(|experts| experts.layers == predicted.layers);
        if are_alike && predicted.linear.is_none() && predicted.gemma4.is_none() {
            let listed = predicted.parameter_tensors().unwrap();
            let listed: BTreeSet<_> =
                listed.into_iter().map(|tensor| (tensor.name, shape(&tensor.shape))).collect();
            let own = |(name, shape): (String, Vec<i64>)| (hugging_face::tensor_name(&name), shape);
            assert_eq!(listed, config.shapes().into_iter().map(own).collect(), "{}", self.name);
        }
        assert_eq!(predicted.parameters().unwrap(), config.parameter_count(), "{}", self.name);
        assert_eq!(parameter_count(model).total, config.parameter_count(), "{}", self.name);
        let windowed = (0..config.num_hidden_layers as usize).filter(|&layer| config.window(layer).is_some());
        let windows = predicted.windows;
        assert_eq!(windows.map_or(0, |windows| windows.layers), windowed.count() as u64, "{}", self.name);
        assert!(windows.is_none_or(|windows| Some(windows.tokens as i64) == config.sliding_window));
    }

    /// What is saved has every field and every tensor of what was read.
    fn saved(&self, model: &Llama) {
        let out = tempfile::tempdir().unwrap();
        let path = out.path().join("again");
        hugging_face::save(model, &path, SHARD_BYTES).unwrap();
        let again = Folder::open(&path).unwrap();
        let fields = |of: &std::path::Path| -> Map<String, Value> {
            serde_json::from_slice(&std::fs::read(of.join("config.json")).unwrap()).unwrap()
        };
        let (theirs, ours) = (fields(&self.folder), fields(&path));
        for (name, value) in &theirs {
            // The dtype is the saved model's, and transformers' version is of who wrote the file.
            if !["dtype", "transformers_version"].contains(&name.as_str()) {
                assert_eq!(ours.get(name), Some(value), "{}: `{name}`", self.name);
            }
        }
        let read = |of: &Folder| of.load(Some(Kind::Float), Device::Cpu).unwrap();
        let (first, second) = (read(&self.opened), read(&again));
        let state = |model: &Llama| models::state_dict::state_dict(model);
        assert_eq!(state(&first), state(&second), "{}", self.name);
        assert_eq!(second.decoder_config(), first.decoder_config(), "{}", self.name);
        let stored = tensors_file::read(&self.folder.join("model.safetensors"), Device::Cpu).unwrap();
        let written = tensors_file::read(&path.join("model.safetensors"), Device::Cpu).unwrap();
        let names =
            |list: Vec<(String, Tensor)>| list.into_iter().map(|(name, _)| name).collect::<BTreeSet<_>>();
        assert_eq!(names(stored), names(written), "{}", self.name);
    }
}

fn check(name: &'static str) {
    let case = case(name);
    for path in PATHS {
        let model = case.model(path);
        case.padded(&model);
        case.packed(&model);
    }
    let model = case.model(AttentionPath::Fused);
    case.greedy(&model);
    case.saved(&model);
    case.predicted(&model);
}

macro_rules! families {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            check(stringify!($name));
        }
    )*};
}

families! {
    llama qwen2 qwen3 qwen3_yarn qwen3_moe qwen3_moe_some qwen3_5 qwen3_5_equal qwen3_5_moe gpt_oss mistral smollm3 granite olmo2 gemma3 gemma2 gemma4 gemma4_k_eq_v phi3 phi3_long
}
