//! The load-balancing loss against transformers': value, loss and every gradient, for padded and packed rows. The cases are made by
//! `xtask/peers/router_loss.py`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use models::hugging_face::Folder;
use models::module::{Context, IGNORE_INDEX, Input, LanguageModel, freeze, parameters};
use models::{Documents, Llama, RouterBalance, tensors_file};
use runtime::autograd::backward;
use tch::{Device, Kind, Tensor};

const FAMILIES: [&str; 4] = ["qwen3_moe", "qwen3_moe_some", "qwen3_5_moe", "gpt_oss"];
const COEFFICIENT: f64 = 0.5;
const LOSS: f64 = 1e-5;
const GRADIENT: f64 = 1e-4;

fn fixtures() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures"))
}

fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    tensors_file::read(path, Device::Cpu).unwrap().into_iter().collect()
}

fn load(name: &str) -> Llama {
    Folder::open(&fixtures().join("families").join(name))
        .unwrap()
        .load(Some(Kind::Float), Device::Cpu)
        .unwrap()
}

/// A batch: its rows, the next token of each position, and its documents.
struct Rows {
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor,
    documents: Documents,
    /// `[n, 1]`.
    mask: Tensor,
}

impl Rows {
    fn padded(cases: &BTreeMap<String, Tensor>) -> Self {
        let mask = &cases["attention_mask"];
        let rows = Vec::<Vec<i64>>::try_from(mask).unwrap();
        let runs = |row: &Vec<i64>| row.chunk_by(|a, b| a == b).map(<[i64]>::len).collect::<Vec<_>>();
        let labels = &cases["labels"];
        let last = Tensor::full([labels.size()[0], 1], IGNORE_INDEX, (Kind::Int64, Device::Cpu));
        Self {
            tokens: cases["input_ids"].shallow_clone(),
            labels: Tensor::cat(&[labels.narrow(1, 1, labels.size()[1] - 1), last], 1),
            positions: (mask.cumsum(1, Kind::Int64) - 1).clamp_min(0),
            documents: Documents::new(&rows.iter().map(runs).collect::<Vec<_>>(), Device::Cpu).unwrap(),
            mask: mask.to_kind(Kind::Float).view([-1, 1]),
        }
    }

    /// One row of all documents and three positions of padding.
    fn packed(cases: &BTreeMap<String, Tensor>) -> Self {
        let lengths = Vec::<i64>::try_from(&cases["lengths"]).unwrap();
        let count: i64 = lengths.iter().sum();
        let padding = Tensor::full([1, 3], 7, (Kind::Int64, Device::Cpu));
        let mut labels = Vec::<i64>::try_from(cases["packed_ids"].view([-1])).unwrap();
        labels.rotate_left(1);
        let (mut at, mut positions) = (0, Vec::new());
        for length in &lengths {
            at += length;
            labels[at as usize - 1] = IGNORE_INDEX;
            positions.extend(0..*length);
        }
        labels.extend([IGNORE_INDEX; 3]);
        positions.extend(0..3);
        let sizes: Vec<usize> = lengths.iter().map(|length| *length as usize).chain([3]).collect();
        let mask: Vec<f32> =
            (0..count + 3).map(|position| if position < count { 1.0 } else { 0.0 }).collect();
        Self {
            tokens: Tensor::cat(&[&cases["packed_ids"], &padding], 1),
            labels: Tensor::from_slice(&labels).view([1, -1]),
            positions: Tensor::from_slice(&positions).view([1, -1]),
            documents: Documents::new(&[sizes], Device::Cpu).unwrap(),
            mask: Tensor::from_slice(&mask).view([-1, 1]),
        }
    }

    /// The loss with the load-balancing loss, and that loss alone.
    fn loss(&self, model: &Llama, balance: &RouterBalance) -> [Tensor; 2] {
        let context =
            Context { documents: Some(&self.documents), balance: Some(balance), ..Context::default() };
        let input = Input { tokens: &self.tokens, positions: Some(&self.positions), context };
        let targets = self.labels.ne(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]);
        let loss = model.loss(&input, &self.labels).unwrap().sum / targets;
        balance.add_to(&loss, COEFFICIENT).unwrap()
    }
}

/// The norm of a gradient and its products with two vectors, as in the script.
fn summary(gradient: &Tensor) -> Tensor {
    let flat = gradient.to_kind(Kind::Double).flatten(0, -1);
    let index = Tensor::arange(flat.size()[0], (Kind::Double, Device::Cpu));
    let (sines, cosines) = ((&index + 1.0).sin(), (index * 0.7).cos());
    Tensor::stack(&[flat.norm(), flat.dot(&sines), flat.dot(&cosines)], 0)
}

fn largest(x: &Tensor) -> f64 {
    x.abs().max().double_value(&[])
}

#[test]
fn value_and_gradients_are_those_of_transformers_for_padded_and_packed_rows() {
    for name in FAMILIES {
        let cases = tensors(&fixtures().join("families").join(name).join("cases.safetensors"));
        let theirs = tensors(&fixtures().join("router_loss").join(format!("{name}.safetensors")));
        for (prefix, rows) in [("", Rows::padded(&cases)), ("packed_", Rows::packed(&cases))] {
            let expected = |what: &str| &theirs[&format!("{prefix}{what}")];
            let model = load(name);
            let balance = RouterBalance::with_mask(Some(rows.mask.shallow_clone()));
            let [total, aux] = rows.loss(&model, &balance);
            backward(&[&total]).unwrap();
            let differs = |found: &Tensor, what: &str| (found - expected(what)).abs().max().double_value(&[]);
            assert!(differs(&aux, "aux") <= LOSS, "{name}, {prefix}: aux {}", differs(&aux, "aux"));
            assert!(differs(&total, "loss") <= LOSS, "{name}, {prefix}: loss {}", differs(&total, "loss"));

            let named: BTreeMap<String, Tensor> = parameters(&model)
                .into_iter()
                .map(|(name, tensor)| (models::hugging_face::tensor_name(&name), tensor.shallow_clone()))
                .collect();
            let expected = expected("gradients");
            assert_eq!(expected.size(), [named.len() as i64, 3], "{name}, {prefix}");
            let least = 1e-3 * expected.select(1, 0).max().double_value(&[]);
            for ((parameter, tensor), index) in named.into_iter().zip(0..) {
                let gradient = tensor.grad();
                // An expert without tokens has no gradient here, and one of zeros there.
                let found = if gradient.defined() {
                    summary(&gradient)
                } else {
                    Tensor::zeros([3], tch::kind::DOUBLE_CPU)
                };
                let expected = expected.get(index);
                let error = largest(&(found - &expected)) / expected.double_value(&[0]).max(least);
                assert!(error <= GRADIENT, "{name}, {prefix}: {parameter} {error}");
            }
        }
    }
}

/// The gradient reaches what is trained before a frozen router, with the same bits as where all is trained.
#[test]
fn a_frozen_router_passes_the_gradient_on() {
    let cases = tensors(&fixtures().join("families/qwen3_moe/cases.safetensors"));
    let rows = Rows::padded(&cases);
    let of = |frozen: bool| {
        let model = load("qwen3_moe");
        if frozen {
            freeze(&model, r".*(mlp|lm_head|embed|norm).*", true).unwrap();
        }
        let balance = RouterBalance::with_mask(Some(rows.mask.shallow_clone()));
        let [total, _] = rows.loss(&model, &balance);
        backward(&[&total]).unwrap();
        let query = "layers.0.self_attn.q_proj.weight";
        let query = parameters(&model).into_iter().find(|(name, _)| name == query).unwrap().1;
        query.grad().copy()
    };
    assert_eq!(of(true), of(false));
}

#[test]
fn a_loss_without_a_router_or_a_mask_of_another_batch_is_refused() {
    let cases = tensors(&fixtures().join("families/qwen3/cases.safetensors"));
    let rows = Rows::padded(&cases);
    let model = load("qwen3");
    let balance = RouterBalance::with_mask(None);
    let input = Input::new(&rows.tokens);
    let input = Input { context: Context { balance: Some(&balance), ..input.context }, ..input };
    let loss = model.loss(&input, &rows.labels).unwrap().sum;
    let error = balance.add_to(&loss, 0.1).unwrap_err().to_string();
    assert!(error.contains("no router has run"), "{error}");

    let model = load("qwen3_moe");
    let balance = RouterBalance::new(&[1, 2], 3, Device::Cpu).unwrap();
    let input = Input { context: Context { balance: Some(&balance), ..input.context }, ..input };
    let error = model.loss(&input, &rows.labels).unwrap_err().to_string();
    assert!(error.contains("give the padding of this batch"), "{error}");
}
