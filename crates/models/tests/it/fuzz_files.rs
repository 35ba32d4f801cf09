//! Randomly mutated files: each is refused, or read exactly as its bytes say.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use decoder::BiasOption;
use models::hugging_face::{self, Folder};
use models::{DecoderConfig, Llama, strict_json, tensors_file};
use runtime::memory::Region;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use testing::fuzz::{self, Outcome};

/// Heap that parsing a text may take: each value of a few bytes becomes one of some hundred.
fn heap(text: usize) -> usize {
    400 * text + (64 << 10)
}

/// JSON's object with every key, however often it comes.
struct Pairs(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = Pairs;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs: Vec<(String, Value)> = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    if pairs.iter().any(|(name, _)| *name == pair.0) {
                        return Err(A::Error::custom("a key comes twice"));
                    }
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }

        deserializer.deserialize_map(Collect)
    }
}

/// A tensor's dtype, shape and bytes.
type TensorLocation = (String, Vec<i64>, Vec<u8>);

/// Reads a file without this project's code: the dtype's name, the shape and the values of each tensor. `None` for
/// bytes that are no such file.
fn by_the_format(bytes: &[u8]) -> Option<BTreeMap<String, TensorLocation>> {
    let length = usize::try_from(u64::from_le_bytes(*bytes.first_chunk()?)).ok()?;
    let header = bytes.get(8..length.checked_add(8)?)?;
    let Pairs(entries) = serde_json::from_slice(header).ok()?;
    let mut tensors = BTreeMap::new();
    for (name, entry) in entries.into_iter().filter(|(name, _)| name != "__metadata__") {
        let shape: Option<Vec<i64>> = entry["shape"].as_array()?.iter().map(Value::as_i64).collect();
        let offset = |index: usize| usize::try_from(entry["data_offsets"].get(index)?.as_u64()?).ok();
        let values = bytes.get(8 + length + offset(0)?..8 + length + offset(1)?)?;
        tensors.insert(name, (entry["dtype"].as_str()?.to_owned(), shape?, values.to_vec()));
    }
    Some(tensors)
}

fn dtype(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "F32",
        Kind::BFloat16 => "BF16",
        Kind::Half => "F16",
        Kind::Double => "F64",
        Kind::Int64 => "I64",
        Kind::Int => "I32",
        Kind::Int16 => "I16",
        Kind::Int8 => "I8",
        Kind::Uint8 => "U8",
        Kind::Bool => "BOOL",
        _ => "another",
    }
}

#[test]
fn safetensors() {
    let tensor = |kind| Tensor::arange(6, (Kind::Int64, Device::Cpu)).view([2, 3]).to_kind(kind);
    let tensors: Vec<(String, Tensor)> = [Kind::Float, Kind::BFloat16, Kind::Bool, Kind::Int64]
        .map(|kind| (format!("{kind:?}"), tensor(kind)))
        .into_iter()
        .chain([("empty".to_owned(), Tensor::zeros([0, 3], (Kind::Half, Device::Cpu)))])
        .collect();
    let mut good = Vec::new();
    tensors_file::write_with(&mut good, &tensors, &[("format", "pt")]).unwrap();
    fuzz::run("safetensors", |random| {
        let bytes = fuzz::safetensors(random, &good);
        let region = Region::start(Device::Cpu).unwrap();
        let read = fuzz::within(heap(bytes.len()), || tensors_file::from_bytes(&bytes, Device::Cpu));
        let used = region.finish().unwrap().peak_above_start();
        // A header of 64 bytes for each tensor, which takes more than that in the file.
        assert!(used <= 2 * bytes.len() as u64 + 1024, "{used} bytes of tensors from {}", bytes.len());
        let Ok(tensors) = read else { return Outcome::Refused };
        let expected = by_the_format(&bytes).expect("the format's own reading refuses it");
        assert_eq!(tensors.len(), expected.len());
        for (name, tensor) in tensors {
            let (kind, shape, values) = &expected[&name];
            assert_eq!((dtype(tensor.kind()), &tensor.size()), (&**kind, shape), "{name}");
            let mut found = vec![0; values.len()];
            if !found.is_empty() {
                tensor.copy_data_u8(&mut found, tensor.numel());
            }
            assert_eq!(&found, values, "{name}");
        }
        Outcome::Read
    });
}

fn config() -> DecoderConfig {
    DecoderConfig {
        max_position_embeddings: 32,
        num_key_value_heads: 1,
        ..DecoderConfig::llama(40, 16, 24, 2, 4)
    }
}

#[test]
fn config_json() {
    let theirs = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "silu",
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false, "attention_dropout": 0.0,
        "initializer_range": 0.02, "torch_dtype": "bfloat16", "eos_token_id": [1, 2],
    });
    let ours = serde_json::to_value(config()).unwrap();
    let default = Value::Null;
    fuzz::run("config.json", |random| {
        let good = if random.once_in(2) { &theirs } else { &ours };
        let text = fuzz::json(random, good);
        let read = fuzz::within(heap(text.len()), || strict_json::from_str::<DecoderConfig>(&text));
        let Ok(config) = read else { return Outcome::Refused };
        // Each number is the file's, or its default's where the file has none.
        let Pairs(pairs) = serde_json::from_str(&text).expect("a key that comes twice was read");
        let file: BTreeMap<String, Value> = pairs.into_iter().collect();
        let field = |name: &str| file.get(name).filter(|value| !value.is_null()).unwrap_or(&default);
        for (name, value) in [
            ("vocab_size", config.vocab_size),
            ("hidden_size", config.hidden_size),
            ("intermediate_size", config.intermediate_size),
            ("num_hidden_layers", config.num_hidden_layers),
            ("num_attention_heads", config.num_attention_heads),
            ("num_key_value_heads", config.num_key_value_heads),
            ("head_dim", config.head_dim),
            ("max_position_embeddings", config.max_position_embeddings),
        ] {
            let absent = match name {
                "num_key_value_heads" => config.num_attention_heads,
                "head_dim" => config.hidden_size / config.num_attention_heads,
                "max_position_embeddings" => {
                    if config.has_bias(BiasOption::QueriesKeysValues)
                        && !config.has_bias(BiasOption::AttentionOutput)
                    {
                        32_768
                    } else {
                        2048
                    }
                }
                _ => i64::MIN,
            };
            assert_eq!(field(name).as_i64().unwrap_or(absent), value, "{name}");
            assert!((1..=1 << 28).contains(&value), "{name}");
        }
        let rope =
            if field("rope_parameters").is_null() { field("rope_scaling") } else { field("rope_parameters") };
        let theta = rope["rope_theta"].as_f64().or_else(|| field("rope_theta").as_f64()).unwrap_or(1e4);
        assert_eq!(theta, config.rope.theta);
        assert_eq!(field("rms_norm_eps").as_f64().unwrap_or(1e-6), config.rms_norm_eps);
        assert_eq!(field("attention_dropout").as_f64().unwrap_or(0.0), config.attention_dropout);
        // What was read round-trips.
        let again: DecoderConfig = serde_json::from_value(serde_json::to_value(&config).unwrap()).unwrap();
        assert_eq!(again, config);
        let angles = config.rope.angles(config.head_dim).unwrap();
        assert!(angles.iter().all(|angle| (0.0..=1.0).contains(angle)), "{angles:?}");
        Outcome::Read
    });
}

/// A folder in memory if possible: the tests write it tens of thousands of times.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// A model's folder of two shards, and one of its files.
fn folder(file: &str) -> (tempfile::TempDir, PathBuf, Value) {
    let folder = scratch();
    let model = Llama::new(&config(), (Kind::Float, Device::Cpu)).unwrap();
    hugging_face::save(&model, folder.path(), 12_000).unwrap();
    let generation = json!({ "eos_token_id": [2, 3], "pad_token_id": 0, "temperature": 0.7 });
    fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
    let path = folder.path().join(file);
    let good = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    (folder, path, good)
}

#[test]
fn index_of_shards() {
    let (folder, path, good) = folder("model.safetensors.index.json");
    fuzz::run("model.safetensors.index.json", |random| {
        let text = fuzz::json(random, &good);
        fs::write(&path, &text).unwrap();
        let Ok(_) = fuzz::within(heap(text.len() + 8192), || Folder::open(folder.path())) else {
            return Outcome::Refused;
        };
        // An accepted index maps each tensor as the valid one does; names with and without the prefix are the same, and one entry may
        // be missing.
        let Pairs(pairs) = serde_json::from_str(&text).expect("a key that comes twice was read");
        let map = pairs.iter().find(|(name, _)| name == "weight_map").unwrap().1.as_object().unwrap();
        for (tensor, shard) in map {
            let known = |name: &str| good["weight_map"].get(name) == Some(shard);
            assert!(
                known(tensor) || known(&format!("model.{tensor}")) || tensor.ends_with("inv_freq"),
                "{tensor}"
            );
        }
        Outcome::Read
    });
}

#[test]
fn generation_config() {
    let (folder, path, good) = folder("generation_config.json");
    fuzz::run("generation_config.json", |random| {
        let text = fuzz::json(random, &good);
        fs::write(&path, &text).unwrap();
        let Ok(opened) = fuzz::within(heap(text.len() + 8192), || Folder::open(folder.path())) else {
            return Outcome::Refused;
        };
        let Pairs(pairs) = serde_json::from_str(&text).expect("a key that comes twice was read");
        let tokens = |field: &str| match pairs.iter().find(|(name, _)| name == field).map(|(_, value)| value)
        {
            None | Some(Value::Null) => vec![],
            Some(Value::Array(tokens)) => tokens.iter().map(|token| token.as_i64().unwrap()).collect(),
            Some(token) => vec![token.as_i64().unwrap()],
        };
        assert_eq!(opened.end_tokens(), tokens("eos_token_id"));
        assert_eq!(opened.pad_token(), tokens("pad_token_id").first().copied());
        Outcome::Read
    });
}

/// A file with blocks of seven types, loaded in fp32 and kept in its blocks.
#[cfg(feature = "gguf")]
#[test]
fn gguf_files_as_models() {
    use kernels::quantized::blocks;

    let good = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures/gguf_merge/base.gguf");
    let good = fs::read(good).unwrap();
    // Where its tensors begin.
    let header = 5184;
    let scratch = scratch();
    let (path, cache) = (scratch.path().join("x.gguf"), scratch.path().join("cache"));
    fuzz::run("GGUF files as models", |random| {
        let bytes = match random.below(4) {
            0 => fuzz::bytes(random, &good),
            _ => [fuzz::bytes(random, &good[..header]), good[header..].to_vec()].concat(),
        };
        fs::write(&path, &bytes).unwrap();
        // Two files of one length may have the same time.
        let _ = fs::remove_dir_all(&cache);
        let open = || {
            let folder = gguf::folder::make(&path, gguf::ReadOptions::default(), &cache).ok()?;
            Folder::open(&folder).ok()
        };
        let Some(folder) = fuzz::within(64 * bytes.len() + (1 << 20), open) else { return Outcome::Refused };
        for kind in [Kind::Float, blocks::KIND] {
            let region = Region::start(Device::Cpu).unwrap();
            let model = fuzz::within(64 * bytes.len() + (1 << 20), || folder.load(Some(kind), Device::Cpu));
            assert!(model.is_ok_and(|model| model.decoder_config() == folder.config()), "{kind:?}");
            let used = region.finish().unwrap().peak_above_start();
            assert!(
                used <= 32 * bytes.len() as u64 + (1 << 20),
                "{used} bytes of tensors from {}",
                bytes.len()
            );
        }
        Outcome::Read
    });
}
