//! Results of transformers for tiny models of both architectures: logits, loss and every gradient, with left-padded rows.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use models::hugging_face::Folder;
use models::module::{Context, IGNORE_INDEX, Input, LanguageModel, trainable};
use models::{AttentionPath, DecoderConfig, Documents, Llama, hugging_face, tensors_file};
use runtime::autograd::{backward, set_grad};
use tch::{Device, Kind, Tensor};

const LOGITS: f64 = 1e-4;
const LOSS: f64 = 1e-5;
const GRADIENT: f64 = 1e-4;

fn folder(name: &str) -> PathBuf {
    let fixtures = std::env::var_os("FRUGAL_FIXTURES").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures")),
        PathBuf::from,
    );
    fixtures.join(name)
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

fn check(name: &str) {
    let folder = folder(name);
    let opened = Folder::open(&folder).unwrap();
    let config = opened.config();
    let cases: BTreeMap<String, Tensor> =
        tensors_file::read(&folder.join("cases.safetensors"), Device::Cpu).unwrap().into_iter().collect();
    for attention in [AttentionPath::Fused, AttentionPath::DenseMask, AttentionPath::Explicit] {
        // The default path; the others are set on the loaded model.
        let model = if attention == AttentionPath::default() {
            opened.load(None, Device::Cpu).unwrap()
        } else {
            let config = DecoderConfig { attention, ..config.clone() };
            let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
            opened.load_into(&model).unwrap();
            model
        };

        let mask = &cases["attention_mask"];
        let documents = documents(mask);
        let positions = (mask.cumsum(1, Kind::Int64) - 1).clamp_min(0);
        let context = Context { documents: Some(&documents), training: true, ..Context::default() };
        let input = Input { tokens: &cases["input_ids"], positions: Some(&positions), context };

        // The contents of padding do not matter.
        let counts = mask.unsqueeze(2).to_kind(Kind::Float);
        let of_logits = largest(&((model.logits(&input).unwrap() - &cases["logits"]) * &counts));

        let labels = next(&cases["labels"]);
        let targets = labels.ne(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]);
        let loss = model.loss(&input, &labels).unwrap().sum / targets;
        backward(&[&loss]).unwrap();
        let of_loss = (loss.double_value(&[]) - cases["loss"].double_value(&[0])).abs();

        let mut worst = (0f64, String::new());
        let mut found = BTreeSet::new();
        for (parameter, tensor) in trainable(&model) {
            let key = format!("grad.{}", hugging_face::tensor_name(&parameter));
            let expected = &cases[&key];
            let error = (tensor.grad() - expected).norm() / expected.norm();
            let error = error.double_value(&[]);
            if error.is_nan() || error > worst.0 {
                worst = (error, parameter);
            }
            set_grad(tensor, None).unwrap();
            found.insert(key);
        }
        let all: BTreeSet<String> = cases.keys().filter(|key| key.starts_with("grad.")).cloned().collect();
        assert_eq!(found, all, "{name}: every gradient of the file, and no other");

        let percent = |error: f64, tolerance: f64| error / tolerance * 100.0;
        eprintln!(
            "{name} {attention:?}: logits {of_logits:.1e} ({:.1} % of the tolerance), loss {of_loss:.1e} ({:.1} %), gradients \
             {:.1e} at {} ({:.1} %)",
            percent(of_logits, LOGITS),
            percent(of_loss, LOSS),
            worst.0,
            worst.1,
            percent(worst.0, GRADIENT)
        );
        assert!(of_logits <= LOGITS, "{name} {attention:?}: logits {of_logits}");
        assert!(of_loss <= LOSS, "{name} {attention:?}: loss {of_loss}");
        assert!(worst.0 <= GRADIENT, "{name} {attention:?}: {worst:?}");
    }
}

#[test]
fn fixtures_llama_logits_loss_and_gradients() {
    check("llama");
}

#[test]
fn fixtures_qwen2_logits_loss_and_gradients() {
    check("qwen2");
}
