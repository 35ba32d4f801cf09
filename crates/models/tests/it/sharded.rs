//! Weights in several files with an index: written, read, and broken in every way.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use expect_test::{Expect, expect};
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::state_dict::state_dict;
use models::{DecoderConfig, Llama, tensors_file};
use proptest::prelude::*;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const INDEX: &str = "model.safetensors.index.json";
const FIRST: &str = "model-00001-of-00003.safetensors";
const SECOND: &str = "model-00002-of-00003.safetensors";

fn model() -> Llama {
    let config = DecoderConfig { max_position_embeddings: 32, ..DecoderConfig::qwen2(40, 16, 24, 2, 4) };
    Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap()
}

/// A model in three shards.
fn folder() -> (Llama, tempfile::TempDir) {
    let (model, folder) = (model(), tempfile::tempdir().unwrap());
    hugging_face::save(&model, folder.path(), 9_000).unwrap();
    (model, folder)
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn index(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join(INDEX)).unwrap()).unwrap()
}

fn same(a: &Llama, b: &Llama) {
    let (a, b) = (state_dict(a), state_dict(b));
    assert_eq!(a.len(), b.len());
    for ((name, x), (other, y)) in a.iter().zip(&b) {
        assert_eq!(name, other);
        assert!(x.equal(y), "{name}");
    }
}

#[test]
fn shards_are_named_and_indexed_as_hugging_face_does() {
    let (model, folder) = folder();
    let third = "model-00003-of-00003.safetensors";
    assert_eq!(names(folder.path()), ["config.json", FIRST, SECOND, third, INDEX]);
    let index = index(folder.path());
    let mut tensors = BTreeMap::new();
    for shard in [FIRST, SECOND, third] {
        let read = tensors_file::read(&folder.path().join(shard), Device::Cpu).unwrap();
        let bytes: usize = read.iter().map(|(_, x)| x.numel() * 4).sum();
        assert!(bytes <= 9_000, "{shard} has {bytes}");
        tensors.extend(read.into_iter().map(|(name, _)| (name, shard)));
    }
    assert_eq!(index["weight_map"], json!(tensors));
    assert_eq!(index["metadata"]["total_size"], json!(model.decoder_config().parameter_count() * 4));
    same(&model, &Folder::open(folder.path()).unwrap().load(None, Device::Cpu).unwrap());
}

#[test]
fn any_limit_keeps_every_tensor() {
    let model = model();
    for limit in [1, 1_000, 4_000, 12_345, SHARD_BYTES] {
        let folder = tempfile::tempdir().unwrap();
        hugging_face::save(&model, folder.path(), limit).unwrap();
        if limit == 1 {
            assert_eq!(names(folder.path()).len(), state_dict(&model).len() + 2, "one tensor in each");
        }
        same(&model, &Folder::open(folder.path()).unwrap().load(None, Device::Cpu).unwrap());
    }
}

#[test]
fn saving_over_an_earlier_model_removes_it() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    for limit in [SHARD_BYTES, 4_000, 9_000, SHARD_BYTES] {
        let model = model();
        hugging_face::save(&model, folder.path(), limit).unwrap();
        same(&model, &Folder::open(folder.path()).unwrap().load(None, Device::Cpu).unwrap());
    }
    assert_eq!(names(folder.path()), ["config.json", "model.safetensors", "tokenizer.json"]);
}

/// The error of a changed folder, without its name.
fn refused(change: impl FnOnce(&Path), expected: Expect) {
    let (_, folder) = folder();
    change(folder.path());
    let error = Folder::open(folder.path()).unwrap_err().to_string();
    expected.assert_eq(&error.replace(&folder.path().display().to_string(), "DIR"));
}

fn change_index(folder: &Path, change: impl FnOnce(&mut Value)) {
    let mut json = index(folder);
    change(&mut json);
    fs::write(folder.join(INDEX), json.to_string()).unwrap();
}

fn change_shard(folder: &Path, shard: &str, change: impl FnOnce(&mut Vec<(String, Tensor)>)) {
    let path = folder.join(shard);
    let mut tensors = tensors_file::read(&path, Device::Cpu).unwrap();
    change(&mut tensors);
    tensors_file::write(&path, &tensors).unwrap();
}

#[test]
fn shards_and_index_that_contradict_each_other_are_refused() {
    refused(
        |folder| fs::remove_file(folder.join(SECOND)).unwrap(),
        expect![
            "DIR/model.safetensors.index.json: shards are missing: model-00002-of-00003.safetensors; the folder contains config.json, model-00001-of-00003.safetensors, model-00003-of-00003.safetensors, model.safetensors.index.json"
        ],
    );
    refused(
        |folder| change_shard(folder, FIRST, |tensors| tensors.retain(|(name, _)| !name.contains("embed"))),
        expect![
            "DIR/model.safetensors.index.json: `model.embed_tokens.weight` should be in model-00001-of-00003.safetensors, which does not contain it; copy or download both again"
        ],
    );
    refused(
        |folder| {
            let norm = ("model.embed_tokens.weight".to_owned(), Tensor::from(1f32));
            change_shard(folder, SECOND, |tensors| tensors.push(norm));
        },
        expect![
            "DIR/model-00002-of-00003.safetensors: `model.embed_tokens.weight` exists twice: it is also `model.embed_tokens.weight` of DIR/model-00001-of-00003.safetensors"
        ],
    );
    refused(
        |folder| change_index(folder, |json| json["weight_map"]["model.embed_tokens.weight"] = json!(SECOND)),
        expect![
            "DIR/model.safetensors.index.json: `model.embed_tokens.weight` should be in model-00002-of-00003.safetensors, which does not contain it; copy or download both again"
        ],
    );
    refused(
        |folder| {
            let text = fs::read_to_string(folder.join(INDEX)).unwrap();
            let twice = format!("\"weight_map\": {{ \"model.norm.weight\": {FIRST:?},");
            fs::write(folder.join(INDEX), text.replace("\"weight_map\": {", &twice)).unwrap();
        },
        expect![
            "DIR/model.safetensors.index.json: `model.norm.weight` is listed twice, in `model-00001-of-00003.safetensors` and `model-00003-of-00003.safetensors` at line 32 column 3"
        ],
    );
    refused(
        |folder| change_index(folder, |json| json["weight_map"]["x"] = json!("../x")),
        expect![
            "DIR/model.safetensors.index.json: `../x` is not a file name; expected a shard in the folder of the index"
        ],
    );
    refused(
        |folder| change_index(folder, |json| json["weight_map"] = json!({})),
        expect![
            "DIR/model.safetensors.index.json: `weight_map` is empty; expected the shard of every tensor"
        ],
    );
    refused(
        |folder| change_index(folder, |json| json["weight_map"] = json!([1])),
        expect![
            "DIR/model.safetensors.index.json: invalid type: sequence, expected a map from tensors to the file names of their shards at line 1 column 46"
        ],
    );
    refused(
        |folder| fs::write(folder.join(INDEX), "{}").unwrap(),
        expect!["DIR/model.safetensors.index.json: missing field `weight_map` at line 1 column 2"],
    );
    refused(
        |folder| {
            let bytes = fs::read(folder.join(SECOND)).unwrap();
            fs::write(folder.join(SECOND), &bytes[..bytes.len() - 1]).unwrap();
        },
        expect![
            "DIR/model-00002-of-00003.safetensors: not a complete safetensors file (incomplete metadata, file not fully covered); copy or download it again"
        ],
    );
    refused(
        |folder| fs::write(folder.join(SECOND), "").unwrap(),
        expect![
            "DIR/model-00002-of-00003.safetensors: not a complete safetensors file (header too small); copy or download it again"
        ],
    );
    refused(
        |folder| {
            let mut bytes = fs::read(folder.join(FIRST)).unwrap();
            bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
            fs::write(folder.join(FIRST), bytes).unwrap();
        },
        expect![
            "DIR/model-00001-of-00003.safetensors: not a complete safetensors file (header too large); copy or download it again"
        ],
    );
}

/// Inconsistent headers: a shape, a dtype, or offsets other than the values'.
#[test]
fn an_inconsistent_header_is_refused() {
    let (_, folder) = folder();
    let whole = fs::read(folder.path().join(FIRST)).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&whole[8..8 + length]).unwrap();
    let name = "model.embed_tokens.weight";
    let (start, end) = (&header[name]["data_offsets"][0], &header[name]["data_offsets"][1]);
    let (start, end) = (start.as_u64().unwrap(), end.as_u64().unwrap());
    let lies = [
        ("shape", json!([40, 17])),
        ("shape", json!([-40, 16])),
        ("shape", json!([u64::MAX, u64::MAX])),
        ("dtype", json!("F64")),
        ("dtype", json!("F8_E4M3")),
        ("dtype", json!("F1000")),
        ("data_offsets", json!([start, end + 4])),
        ("data_offsets", json!([end, start])),
        ("data_offsets", json!([start, u64::MAX])),
        ("data_offsets", Value::Null),
    ];
    for (field, lie) in lies {
        let mut header = header.clone();
        header[name][field] = lie.clone();
        let text = header.to_string();
        let bytes = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &whole[8 + length..]].concat();
        fs::write(folder.path().join(FIRST), bytes).unwrap();
        let error = Folder::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(FIRST), "{field} {lie}: {error}");
        assert!(error.contains("not a complete safetensors file"), "{field} {lie}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Changed, removed or inserted bytes in the index or in a shard's header: never a panic, and an error names a file of the
    /// folder.
    #[test]
    fn a_broken_file_is_an_error_that_names_it(
        in_index in any::<bool>(), at in 0.0..1.0f64, value in any::<u8>(), cut in any::<bool>(),
    ) {
        let (model, folder) = SHARED.with(|shared| (shared.0.decoder_config().clone(), shared.1.path().to_owned()));
        let place = tempfile::tempdir().unwrap();
        for name in names(&folder) {
            fs::copy(folder.join(&name), place.path().join(&name)).unwrap();
        }
        let path = place.path().join(if in_index { INDEX } else { SECOND });
        let mut bytes = fs::read(&path).unwrap();
        let changing = if in_index { bytes.len() } else { 8 + 900 };
        let position = (at * changing as f64) as usize;
        let (before, length) = (bytes[position], bytes.len());
        if cut {
            bytes.truncate(position);
        } else {
            bytes[position] = value;
        }
        fs::write(&path, &bytes).unwrap();
        match Folder::open(place.path()) {
            // A byte that means the same, or nothing (the total size, a space).
            Ok(opened) => {
                // The final newline is optional.
                prop_assert!(!cut || position + 1 == length);
                prop_assert!(opened.load(None, Device::Cpu).is_ok());
                prop_assert_eq!(opened.config(), &model);
            }
            Err(error) => {
                prop_assert!(cut || before != value);
                prop_assert!(error.to_string().contains(&place.path().display().to_string()), "{}", error);
            }
        }
    }
}

thread_local! {
    static SHARED: (Llama, tempfile::TempDir) = folder();
}

#[test]
fn stored_frequencies_in_an_index_are_ignored() {
    let (model, folder) = folder();
    let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
    change_shard(folder.path(), FIRST, |tensors| tensors.push((name.to_owned(), Tensor::from(1f32))));
    change_index(folder.path(), |json| json["weight_map"][name] = json!(FIRST));
    let opened = Folder::open(folder.path()).unwrap();
    same(&model, &opened.load(None, Device::Cpu).unwrap());
    let shards: BTreeSet<String> =
        names(folder.path()).into_iter().filter(|name| name.starts_with("model-")).collect();
    assert_eq!(shards.len(), 3);
}
