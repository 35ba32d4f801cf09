//! `lora families`: models of every family that transformers made, with adapters of PEFT.
//!
//! With `--folder`, the middle of `xtask/peers/model_families.py`: each model and adapter there is read and compared, and is
//! written beside it, together with an adapter of our own. Without it, the cases of the tests are read and compared.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use lora::peft::CONFIG_FILE;
use lora::{Adapters, LoraConfig};
use models::generation::{GenerationConfig, generate};
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::module::{Context, IGNORE_INDEX, Input, LanguageModel, trainable};
use models::{Documents, Llama, tensors_file};
use report::{Case, Metric};
use runtime::autograd::backward;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use crate::driver::Bench;

#[derive(Args)]
pub(crate) struct Families {
    /// Folders that transformers wrote, one for each case
    #[arg(long, value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,
}

/// The cases of the tests.
const CASES: &str = "crates/models/tests/fixtures/families";

/// Reads and compares each model in `root`, and writes beside it what we read, an adapter of our own, and the differences.
pub(crate) fn exchange(root: &Path) -> anyhow::Result<()> {
    for folder in super::folders(root)? {
        let differences = beside(&folder, true).with_context(|| folder.display().to_string())?;
        std::fs::write(folder.join("ours.json"), serde_json::to_string(&differences)?)?;
    }
    Ok(())
}

/// The cases of the tests.
pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let label = |folder: &PathBuf| folder.display().to_string();
    bench.each(super::folders(Path::new(CASES))?, label, |bench, folder| {
        let differences = beside(&folder, false).with_context(|| folder.display().to_string())?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        for (comparison, difference) in differences {
            let case =
                Case::new().with("family", format!("{name} of the tests")).with("comparison", comparison);
            bench.put(&case, vec![Metric::exact("largest_difference", "", difference)])?;
        }
        Ok(())
    })
}

type Cases = BTreeMap<String, Tensor>;

/// Compares a folder, and if asked writes `ours`, `ours_adapter` and `ours.safetensors`. Returns the differences.
fn beside(folder: &Path, write: bool) -> anyhow::Result<BTreeMap<&'static str, f64>> {
    let read = |file: &str| -> anyhow::Result<Cases> {
        Ok(tensors_file::read(&folder.join(file), Device::Cpu)?.into_iter().collect())
    };
    let (inputs, adapted) = (read("cases.safetensors")?, read("adapter_cases.safetensors")?);
    let load =
        || -> anyhow::Result<Llama> { Ok(Folder::open(folder)?.load(Some(Kind::Float), Device::Cpu)?) };
    let model = load()?;
    let [logits, loss, gradients] = padded(&model, &inputs, &inputs, "")?;
    let packed = packed(&model, &inputs)?;
    for (key, from) in [("greedy", 0), ("short_greedy", 5)] {
        for cache in [true, false] {
            greedy(&model, &inputs, key, from, cache)?;
        }
    }
    if write {
        hugging_face::save(&model, &folder.join("ours"), SHARD_BYTES)?;
        own_adapter(folder, load()?, &inputs)?;
    }
    let mut model = load()?;
    Adapters::load(&mut model, &folder.join("adapter"))?;
    let [of_adapter, loss_of_adapter, gradients_of_adapter] =
        padded(&model, &inputs, &adapted, "base_model.model.")?;
    Ok(BTreeMap::from([
        ("logits", logits),
        ("loss", loss),
        ("gradients", gradients),
        ("packed logits", packed),
        ("logits with an adapter", of_adapter),
        ("loss with an adapter", loss_of_adapter),
        ("gradients of an adapter", gradients_of_adapter),
    ]))
}

/// Writes an adapter with random values and the configuration of PEFT's, and the logits with it.
fn own_adapter(folder: &Path, mut model: Llama, inputs: &Cases) -> anyhow::Result<()> {
    let theirs = LoraConfig::read(&folder.join("adapter").join(CONFIG_FILE))?;
    let adapters = LoraConfig { seed: 3, read: serde_json::Map::new(), ..theirs }.install(&mut model)?;
    let mut generator = Generator::new(4)?;
    for (_, tensor) in adapters.tensors("default")? {
        let _no_grad = tch::no_grad_guard();
        let noise = generator.normal(&tensor.size(), (tensor.kind(), Device::Cpu))? * 0.1;
        let _ = tensor.shallow_clone().f_add_(&noise)?;
    }
    adapters.save(&folder.join("ours_adapter"))?;
    let rows = Rows::new(inputs)?;
    let ours = [("logits".to_owned(), model.logits(&rows.input(inputs)?)?.detach())];
    Ok(tensors_file::write(&folder.join("ours.safetensors"), &ours)?)
}

fn of<'a>(cases: &'a Cases, name: &str) -> anyhow::Result<&'a Tensor> {
    cases.get(name).with_context(|| format!("no `{name}` among the cases"))
}

fn largest(x: &Tensor) -> f64 {
    x.abs().max().double_value(&[])
}

/// Left-padded rows: padding is a document of its own.
struct Rows {
    documents: Documents,
    positions: Tensor,
}

impl Rows {
    fn new(inputs: &Cases) -> anyhow::Result<Self> {
        let mask = of(inputs, "attention_mask")?;
        let rows = Vec::<Vec<i64>>::try_from(mask)?;
        let runs = |row: &Vec<i64>| row.chunk_by(|a, b| a == b).map(<[i64]>::len).collect::<Vec<_>>();
        let documents = Documents::new(&rows.iter().map(runs).collect::<Vec<_>>(), Device::Cpu)?;
        Ok(Self { documents, positions: (mask.cumsum(1, Kind::Int64) - 1).clamp_min(0) })
    }

    fn input<'a>(&'a self, inputs: &'a Cases) -> anyhow::Result<Input<'a>> {
        let context = Context { documents: Some(&self.documents), ..Context::default() };
        Ok(Input { tokens: of(inputs, "input_ids")?, positions: Some(&self.positions), context })
    }
}

/// Returns the differences of logits, loss and gradients from those of `expected`.
fn padded(model: &Llama, inputs: &Cases, expected: &Cases, prefix: &str) -> anyhow::Result<[f64; 3]> {
    let rows = Rows::new(inputs)?;
    let input = rows.input(inputs)?;
    let counts = of(inputs, "attention_mask")?.unsqueeze(2).to_kind(Kind::Float);
    let logits = largest(&((model.logits(&input)? - of(expected, "logits")?) * counts));
    let labels = of(inputs, "labels")?;
    let last = Tensor::full([labels.size()[0], 1], IGNORE_INDEX, (Kind::Int64, Device::Cpu));
    let labels = Tensor::cat(&[labels.narrow(1, 1, labels.size()[1] - 1), last], 1);
    let targets = labels.ne(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]);
    let loss = model.loss(&input, &labels)?.sum / targets;
    backward(&[&loss])?;
    // In the order of their names.
    let named = trainable(model).into_iter().map(|(name, tensor)| {
        (format!("{prefix}{}", hugging_face::tensor_name(&name)).replace(".default", ""), tensor)
    });
    let named: BTreeMap<String, &Tensor> = named.collect();
    let theirs = of(expected, "gradients")?;
    ensure!(theirs.size() == [named.len() as i64, 3], "{} trained tensors; {:?}", named.len(), theirs.size());
    // Some gradients are 0 but for rounding: of a bias of keys that do not rotate, which shifts all scores of a query alike.
    let least = 1e-3 * theirs.select(1, 0).max().double_value(&[]);
    let differences = named.values().zip(0..).map(|(tensor, index)| {
        let theirs = theirs.get(index);
        largest(&(summary(&tensor.grad()) - &theirs)) / theirs.double_value(&[0]).max(least)
    });
    let gradients = differences.max_by(f64::total_cmp).unwrap_or(0.0);
    let loss = (loss.double_value(&[]) - of(expected, "loss")?.double_value(&[0])).abs();
    Ok([logits, loss, gradients])
}

/// The norm of a gradient and its products with two vectors, as in the script.
fn summary(gradient: &Tensor) -> Tensor {
    let flat = gradient.to_kind(Kind::Double).flatten(0, -1);
    let index = Tensor::arange(flat.size()[0], (Kind::Double, Device::Cpu));
    let (sines, cosines) = ((&index + 1.0).sin(), (index * 0.7).cos());
    Tensor::stack(&[flat.norm(), flat.dot(&sines), flat.dot(&cosines)], 0)
}

fn packed(model: &Llama, inputs: &Cases) -> anyhow::Result<f64> {
    let lengths: Vec<i64> = Vec::try_from(of(inputs, "lengths")?)?;
    let positions: Vec<i64> = lengths.iter().flat_map(|&length| 0..length).collect();
    let positions = Tensor::from_slice(&positions).unsqueeze(0);
    let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
    let documents = Documents::new(&[lengths], Device::Cpu)?;
    let context = Context { documents: Some(&documents), ..Context::default() };
    let input = Input { tokens: of(inputs, "packed_ids")?, positions: Some(&positions), context };
    Ok(largest(&(model.logits(&input)? - of(inputs, "packed_logits")?)))
}

/// Compares greedy tokens after the prompts, or after their last `last` tokens.
fn greedy(model: &Llama, inputs: &Cases, key: &str, last: usize, cache: bool) -> anyhow::Result<()> {
    let rows = |name: &str| -> anyhow::Result<Vec<Vec<i64>>> { Ok(Vec::try_from(of(inputs, name)?)?) };
    let (ids, mask, expected) = (rows("input_ids")?, rows("attention_mask")?, rows(key)?);
    let real = |(ids, mask): (&Vec<i64>, &Vec<i64>)| -> Vec<i64> {
        let real = ids.iter().zip(mask).filter(|(_, real)| **real == 1).map(|(id, _)| *id);
        let real: Vec<i64> = real.collect();
        if last > 0 { real[real.len() - last..].to_vec() } else { real }
    };
    let prompts: Vec<Vec<i64>> = ids.iter().zip(&mask).map(real).collect();
    let new = expected.first().map_or(0, Vec::len);
    let options = GenerationConfig { max_new_tokens: new, cache, ..GenerationConfig::default() };
    let generated = generate(model, &prompts, &options, &mut ())?;
    let generated: Vec<Vec<i64>> = generated.into_iter().map(|row| row.tokens).collect();
    if generated != expected {
        bail!("{key}, cache {cache}: tokens {generated:?}; transformers has {expected:?}");
    }
    Ok(())
}
