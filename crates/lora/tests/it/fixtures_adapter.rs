//! PEFT's results with adapters of tiny models, and the exact bytes of its files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use lora::Adapters;
use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use models::module::{Context, IGNORE_INDEX, Input, LanguageModel, trainable};
use models::{DecoderConfig, Documents, Llama, hugging_face, tensors_file};
use runtime::autograd::{backward, set_grad};
use tch::{Device, Kind, Tensor};

const LOGITS: f64 = 1e-4;
const LOSS: f64 = 1e-5;
const GRADIENT: f64 = 1e-4;

/// The fixtures with an adapter.
fn folders() -> Vec<PathBuf> {
    let fixtures = std::env::var_os("FRUGAL_FIXTURES").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures")),
        PathBuf::from,
    );
    ["llama", "qwen2"].map(|name| fixtures.join(name)).to_vec()
}

fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    tensors_file::read(path, Device::Cpu).unwrap().into_iter().collect()
}

fn base(folder: &Path) -> Llama {
    let config = DecoderConfig::read(&folder.join("config.json")).unwrap();
    let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    hugging_face::load_weights(&model, &folder.join("model.safetensors")).unwrap();
    model
}

/// Padding and text as separate documents.
fn documents(mask: &Tensor) -> Documents {
    let rows = Vec::<Vec<i64>>::try_from(mask).unwrap();
    let runs = |row: &Vec<i64>| row.chunk_by(|a, b| a == b).map(<[i64]>::len).collect::<Vec<_>>();
    Documents::new(&rows.iter().map(runs).collect::<Vec<_>>(), Device::Cpu).unwrap()
}

/// The next token of each position, if it counts.
fn next(labels: &Tensor) -> Tensor {
    let last = Tensor::full([labels.size()[0], 1], IGNORE_INDEX, (Kind::Int64, Device::Cpu));
    Tensor::cat(&[labels.narrow(1, 1, labels.size()[1] - 1), last], 1)
}

fn largest(x: &Tensor) -> f64 {
    x.abs().max().double_value(&[])
}

#[test]
fn fixtures_adapter_logits_loss_and_gradients() {
    for folder in folders() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let (inputs, cases) =
            (tensors(&folder.join("cases.safetensors")), tensors(&folder.join("adapter_cases.safetensors")));
        let mut model = base(&folder);
        let adapters = Adapters::load(&mut model, &folder.join("adapter")).unwrap();

        let mask = &inputs["attention_mask"];
        let documents = documents(mask);
        let positions = (mask.cumsum(1, Kind::Int64) - 1).clamp_min(0);
        let context = Context { documents: Some(&documents), ..Context::default() };
        let input = Input { tokens: &inputs["input_ids"], positions: Some(&positions), context };

        let counts = mask.unsqueeze(2).to_kind(Kind::Float);
        let error_of =
            |model: &Llama| largest(&((model.logits(&input).unwrap() - &cases["logits"]) * &counts));
        let of_logits = error_of(&model);

        let labels = next(&inputs["labels"]);
        let targets = labels.ne(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]);
        let loss = model.loss(&input, &labels).unwrap().sum / targets;
        backward(&[&loss]).unwrap();
        let of_loss = (loss.double_value(&[]) - cases["loss"].double_value(&[0])).abs();

        let mut worst = (0f64, String::new());
        let mut found = BTreeSet::new();
        for (parameter, tensor) in trainable(&model) {
            let key = format!("grad.base_model.model.{}", hugging_face::tensor_name(&parameter))
                .replace(".default", "");
            let expected = cases.get(&key).unwrap_or_else(|| panic!("{name}: PEFT does not train {key}"));
            let error = ((tensor.grad() - expected).norm() / expected.norm()).double_value(&[]);
            if error.is_nan() || error > worst.0 {
                worst = (error, parameter);
            }
            set_grad(tensor, None).unwrap();
            found.insert(key);
        }
        let all: BTreeSet<String> = cases.keys().filter(|key| key.starts_with("grad.")).cloned().collect();
        assert_eq!(found, all, "{name}: every gradient of the file, and no other");

        adapters.merge().unwrap();
        let of_merged = error_of(&model);
        let percent = |error: f64, tolerance: f64| error / tolerance * 100.0;
        eprintln!(
            "{name}: logits {of_logits:.1e} ({:.1} % of the tolerance), merged {of_merged:.1e} ({:.1} %), loss {of_loss:.1e} \
             ({:.1} %), gradients {:.1e} at {} ({:.1} %)",
            percent(of_logits, LOGITS),
            percent(of_merged, LOGITS),
            percent(of_loss, LOSS),
            worst.0,
            worst.1,
            percent(worst.0, GRADIENT)
        );
        assert!(of_logits <= LOGITS, "{name}: logits {of_logits}");
        assert!(of_merged <= LOGITS, "{name}: merged {of_merged}");
        assert!(of_loss <= LOSS, "{name}: loss {of_loss}");
        assert!(worst.0 <= GRADIENT, "{name}: {worst:?}");
    }
}

#[test]
fn fixtures_adapter_files_round_trip_byte_for_byte() {
    for folder in folders() {
        let out = tempfile::tempdir().unwrap();
        let adapters = Adapters::load(&mut base(&folder), &folder.join("adapter")).unwrap();
        adapters.save(out.path()).unwrap();
        for file in [CONFIG_FILE, TENSORS_FILE] {
            let (read, written) = (folder.join("adapter").join(file), out.path().join(file));
            let same = std::fs::read(&read).unwrap() == std::fs::read(&written).unwrap();
            assert!(same, "{} is written differently", read.display());
        }
    }
}
