//! A model's folder that is made here, and problems for it.
#![allow(dead_code, reason = "each test file takes what it needs")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use models::module::tensors;
use models::{DecoderConfig, Llama, hugging_face};
use runtime::random::Generator;
use serde_json::{Value, json};
use tch::{Device, Kind};

/// A fine-tuning of the model on the problems, without its length and its output.
pub(crate) const FINETUNE: &str =
    "finetune --model model --data problems --r 4 --batch-size 4 --accumulation 1 --lr 0.03 --seed 3";

/// The values of JSON lines.
pub(crate) fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The steps' losses in what a training prints, or in its log.
pub(crate) fn losses(lines: &[Value]) -> Vec<f64> {
    lines.iter().filter_map(|line| line["loss"].as_f64()).collect()
}

/// A folder with a model, problems, and room for what is written.
pub(crate) struct Tiny {
    folder: tempfile::TempDir,
}

impl Tiny {
    /// A Qwen2 of two layers that knows the repository's tokenizer, and forty sums.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let tiny = Self { folder };
        tiny.write_model("model", 16, 1);
        let mut lines = String::new();
        for (a, b) in (0..40).map(|n| (n % 9, n / 4)) {
            let answer = format!("{a} + {b} = <<{a}+{b}={0}>>{0}\n#### {0}", a + b);
            let question = format!("Ann has {a} pears and buys {b} more. How many has she?");
            writeln!(lines, "{}", json!({ "question": question, "answer": answer })).unwrap();
        }
        std::fs::create_dir(tiny.path("problems")).unwrap();
        std::fs::write(tiny.path("problems/train.jsonl"), &lines).unwrap();
        std::fs::write(tiny.path("problems/test.jsonl"), &lines).unwrap();
        tiny
    }

    /// Writes a model of this width under a name.
    pub(crate) fn write_model(&self, name: &str, width: i64, seed: u64) {
        let config = DecoderConfig {
            num_key_value_heads: 2,
            max_position_embeddings: 200,
            tie_word_embeddings: true,
            ..DecoderConfig::qwen2(4096, width, 24, 2, 4)
        };
        let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
        let mut generator = Generator::new(seed).unwrap();
        for named in tensors(&model).into_iter().filter(|named| named.tensor.dim() == 2) {
            let noise = generator.normal(&named.tensor.size(), (Kind::Float, Device::Cpu)).unwrap() * 0.2;
            tch::no_grad(|| named.tensor.shallow_clone().copy_(&noise));
        }
        let folder = self.path(name);
        hugging_face::save(&model, &folder, hugging_face::SHARD_BYTES).unwrap();
        let tokenizer = dataloading::embedded::folder().unwrap().join("tokenizer.json");
        std::fs::copy(tokenizer, folder.join("tokenizer.json")).unwrap();
        std::fs::write(folder.join("generation_config.json"), r#"{"eos_token_id": 0}"#).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// The steps of a training's log, and their losses.
    pub(crate) fn losses(&self, out: &str) -> Vec<(u64, f64)> {
        let text = String::from_utf8(self.bytes(&format!("{out}/losses.jsonl"))).unwrap();
        let of = |line: Value| Some((line["step"].as_u64()?, line["loss"].as_f64()?));
        lines(&text).into_iter().filter_map(of).collect()
    }

    pub(crate) fn load(&self, folder: &str) -> Llama {
        hugging_face::Folder::open(&self.path(folder)).unwrap().load(None, Device::Cpu).unwrap()
    }

    /// A text without the folder's own path.
    pub(crate) fn without_path(&self, text: &str) -> String {
        let path: &Path = self.folder.path();
        text.replace(&format!("{}/", path.display()), "")
    }
}
