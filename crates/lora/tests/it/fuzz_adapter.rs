//! Randomly mutated adapter files: each is refused, or read as it says.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use lora::peft::{CONFIG_FILE, PREFIX, TENSORS_FILE};
use lora::{Adapters, LoraConfig};
use models::{DecoderConfig, Llama, tensors_file};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use testing::fuzz::{self, Outcome};

/// A folder in memory if possible: the tests write it tens of thousands of times.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

fn model() -> Llama {
    Llama::new(&DecoderConfig::llama(20, 8, 12, 1, 2), (Kind::Float, Device::Cpu)).unwrap()
}

#[test]
fn adapter_config() {
    let config = LoraConfig {
        r: 4,
        lora_alpha: 16.0,
        lora_dropout: 0.05,
        target_modules: Some(["q_proj", "v_proj"].into()),
        rank_pattern: json!({ "q_proj": 2 }).as_object().unwrap().clone(),
        ..LoraConfig::default()
    };
    let good: Value = serde_json::from_str(&config.to_json()).unwrap();
    fuzz::run("adapter_config.json", |random| {
        let text = fuzz::json(random, &good);
        // A pattern becomes a program of up to 10 MiB, whatever its length: the bound of the library.
        let read = fuzz::within(400 * text.len() + (24 << 20), || LoraConfig::from_json(&text));
        let Ok(config) = read else { return Outcome::Refused };
        let file: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(config.r, file["r"].as_i64().unwrap_or(8));
        assert_eq!(config.lora_alpha, file["lora_alpha"].as_f64().unwrap_or(8.0));
        assert_eq!(config.lora_dropout, file["lora_dropout"].as_f64().unwrap_or(0.0));
        assert_eq!(config.use_rslora, file["use_rslora"].as_bool().unwrap_or(false));
        assert_eq!(config.use_dora, file["use_dora"].as_bool().unwrap_or(false));
        assert!(config.r >= 1 && (0.0..1.0).contains(&config.lora_dropout) && config.lora_alpha.is_finite());
        // A file that is written again is the same JSON, and means the same.
        let again = config.to_json();
        let same: Value = serde_json::from_str(&again).unwrap();
        // One without any field has the defaults, and is written with all fields.
        assert!(same == file || file == json!({}), "{same}");
        let again = LoraConfig::from_json(&again).unwrap();
        assert_eq!((again.r, again.target_modules), (config.r, config.target_modules));
        Outcome::Read
    });
}

#[test]
fn adapter_weights() {
    let folder = scratch();
    let mut base = model();
    let config = LoraConfig { r: 2, target_modules: Some(["q_proj"].into()), ..LoraConfig::default() };
    LoraConfig { seed: 3, ..config.clone() }.install(&mut base).unwrap().save(folder.path()).unwrap();
    let path = folder.path().join(TENSORS_FILE);
    let good = fs::read(&path).unwrap();
    let mut model = model();
    fuzz::run("adapter_model.safetensors", |random| {
        let bytes = fuzz::safetensors(random, &good);
        // A new file each time, because a mapped file must not be truncated.
        fs::remove_file(&path).unwrap();
        fs::write(&path, &bytes).unwrap();
        let read = fuzz::within(400 * bytes.len() + (2 << 20), || Adapters::load(&mut model, folder.path()));
        let Ok(adapters) = read else { return Outcome::Refused };
        let file: BTreeMap<String, Tensor> = tensors_file::from_bytes(&bytes, Device::Cpu)
            .unwrap()
            .into_iter()
            .map(|(name, tensor)| (name.strip_prefix(PREFIX).unwrap_or(&name).to_owned(), tensor))
            .collect();
        let tensors = adapters.tensors("default").unwrap();
        assert_eq!(tensors.len(), 2);
        for (name, tensor) in tensors {
            let expected = file[&name].to_kind(Kind::Float);
            assert_eq!(tensor.size(), expected.size());
            // Compared by bits, because NaNs are values too.
            let bits = |x: &Tensor| x.detach().contiguous().view_dtype(Kind::Int);
            assert!(bits(&tensor).equal(&bits(&expected)), "{name}");
        }
        model = self::model();
        Outcome::Read
    });
    assert!(LoraConfig::read(&folder.path().join(CONFIG_FILE)).is_ok());
}
