//! PEFT's results with an adapter of every projection of each family, its gradients, and the bytes of its files. The models are in the
//! tests of `models`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use lora::{Adapters, LoraConfig};
use models::hugging_face::{self, Folder};
use models::module::{Context, IGNORE_INDEX, Input, LanguageModel, trainable};
use models::{Documents, Llama, tensors_file};
use runtime::autograd::backward;
use tch::{Device, Kind, Tensor};

const LOGITS: f64 = 1e-4;
const LOSS: f64 = 1e-5;
const GRADIENT: f64 = 1e-4;
const FAMILIES: [&str; 20] = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_yarn",
    "qwen3_moe",
    "qwen3_moe_some",
    "qwen3_5",
    "qwen3_5_equal",
    "qwen3_5_moe",
    "gpt_oss",
    "mistral",
    "smollm3",
    "granite",
    "olmo2",
    "gemma3",
    "gemma2",
    "gemma4",
    "gemma4_k_eq_v",
    "phi3",
    "phi3_long",
];

fn folder(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/families")).join(name)
}

fn tensors(path: &Path) -> BTreeMap<String, Tensor> {
    tensors_file::read(path, Device::Cpu).unwrap().into_iter().collect()
}

fn base(folder: &Path) -> Llama {
    Folder::open(folder).unwrap().load(Some(Kind::Float), Device::Cpu).unwrap()
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

#[test]
fn peft_adapters_of_every_family() {
    for name in FAMILIES {
        let folder = folder(name);
        let (inputs, cases) =
            (tensors(&folder.join("cases.safetensors")), tensors(&folder.join("adapter_cases.safetensors")));
        let mut model = base(&folder);
        let adapters = Adapters::load(&mut model, &folder.join("adapter")).unwrap();

        let mask = &inputs["attention_mask"];
        let rows = Vec::<Vec<i64>>::try_from(mask).unwrap();
        let runs = |row: &Vec<i64>| row.chunk_by(|a, b| a == b).map(<[i64]>::len).collect::<Vec<_>>();
        let documents = Documents::new(&rows.iter().map(runs).collect::<Vec<_>>(), Device::Cpu).unwrap();
        let positions = (mask.cumsum(1, Kind::Int64) - 1).clamp_min(0);
        let context = Context { documents: Some(&documents), ..Context::default() };
        let input = Input { tokens: &inputs["input_ids"], positions: Some(&positions), context };
        let counts = mask.unsqueeze(2).to_kind(Kind::Float);
        let error_of =
            |model: &Llama| largest(&((model.logits(&input).unwrap() - &cases["logits"]) * &counts));
        let of_logits = error_of(&model);

        let labels = &inputs["labels"];
        let last = Tensor::full([labels.size()[0], 1], IGNORE_INDEX, (Kind::Int64, Device::Cpu));
        let labels = Tensor::cat(&[labels.narrow(1, 1, labels.size()[1] - 1), last], 1);
        let targets = labels.ne(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]);
        let loss = model.loss(&input, &labels).unwrap().sum / targets;
        backward(&[&loss]).unwrap();
        let of_loss = (loss.double_value(&[]) - cases["loss"].double_value(&[0])).abs();

        let named = trainable(&model).into_iter().map(|(name, tensor)| {
            (format!("base_model.model.{}", hugging_face::tensor_name(&name)).replace(".default", ""), tensor)
        });
        let named: BTreeMap<String, &Tensor> = named.collect();
        let expected = &cases["gradients"];
        assert_eq!(expected.size(), [named.len() as i64, 3], "{name}: every gradient, and no other");
        // Some gradients are 0 but for rounding: of keys that do not rotate, in the direction that shifts all scores alike.
        let least = 1e-3 * expected.select(1, 0).max().double_value(&[]);
        let errors = named.into_iter().zip(0..).map(|((name, tensor), index)| {
            let expected = expected.get(index);
            (largest(&(summary(&tensor.grad()) - &expected)) / expected.double_value(&[0]).max(least), name)
        });
        let worst = errors.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();

        let out = tempfile::tempdir().unwrap();
        adapters.save(out.path()).unwrap();
        for file in [CONFIG_FILE, TENSORS_FILE] {
            let same = std::fs::read(folder.join("adapter").join(file)).unwrap()
                == std::fs::read(out.path().join(file)).unwrap();
            assert!(same, "{name}: {file} is written differently");
        }
        adapters.merge().unwrap();
        let of_merged = error_of(&model);
        eprintln!(
            "{name}: logits {:.1} % of the tolerance, merged {:.1} %, loss {:.1} %, gradients {:.1} % at {}",
            of_logits / LOGITS * 100.0,
            of_merged / LOGITS * 100.0,
            of_loss / LOSS * 100.0,
            worst.0 / GRADIENT * 100.0,
            worst.1
        );
        assert!(of_logits <= LOGITS && of_merged <= LOGITS, "{name}: logits {of_logits}, merged {of_merged}");
        assert!(of_loss <= LOSS, "{name}: loss {of_loss}");
        assert!(worst.0 <= GRADIENT, "{name}: {worst:?}");
    }
}

/// What an adapter trains is known from the configuration alone, and the default targets exist in every family.
#[test]
fn trainable_parameters_of_every_family() {
    for name in FAMILIES {
        let folder = folder(name);
        let config = Folder::open(&folder).unwrap().config().clone();
        let theirs = LoraConfig::read(&folder.join("adapter").join(CONFIG_FILE)).unwrap();
        for lora in [theirs, LoraConfig::default()] {
            let mut model = base(&folder);
            LoraConfig { seed: 3, ..lora.clone() }.install(&mut model).unwrap();
            let trained: usize = trainable(&model).iter().map(|(_, tensor)| tensor.numel()).sum();
            assert_eq!(lora.trainable_parameters(&config).unwrap(), trained as u64, "{name}");
            assert!(trained > 0, "{name}");
        }
    }
}
