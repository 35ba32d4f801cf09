//! Our list of parameters against the headers of real checkpoints.
//!
//! A safetensors file begins with the header's length (8 bytes, little-endian) and the header, a JSON object from
//! tensor names to dtype, shape and offsets.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use accounting::Decoder;

fn fixtures() -> PathBuf {
    match std::env::var_os("FRUGAL_FIXTURES") {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fixtures"),
    }
}

/// Names and shapes of the tensors in a safetensors file.
fn header(path: &Path) -> BTreeMap<String, Vec<u64>> {
    let bytes = std::fs::read(path).unwrap_or_else(|cause| panic!("{}: {cause}", path.display()));
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let tensors = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    tensors
        .map(|(name, tensor)| {
            let shape = tensor["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
            (name.clone(), shape)
        })
        .collect()
}

fn listed(model: &Decoder) -> BTreeMap<String, Vec<u64>> {
    let tensors = model.parameter_tensors().unwrap();
    let count = tensors.len();
    let map: BTreeMap<_, _> = tensors.into_iter().map(|t| (t.name, t.shape)).collect();
    assert_eq!(map.len(), count, "two tensors have the same name");
    map
}

/// Runs `compare` on the models of `folders`, whose weights are in the file `name`.
fn for_each(folders: &[&str], name: &str, compare: impl Fn(&Decoder, BTreeMap<String, Vec<u64>>)) {
    for folder in folders {
        let folder = fixtures().join(folder);
        let model = Decoder::read(&folder.join("config.json")).unwrap();
        compare(&model, header(&folder.join(name)));
    }
}

#[test]
fn fixtures_checkpoints_have_the_listed_parameters() {
    for_each(&["llama", "qwen2"], "model.safetensors", |model, stored| {
        let elements: u64 = stored.values().map(|shape| shape.iter().product::<u64>()).sum();
        assert_eq!(listed(model), stored);
        assert_eq!(model.parameters().unwrap(), elements);
    });
}

#[test]
fn fixtures_gpt2_like_cases_have_the_listed_parameters() {
    for_each(&["gpt2_like"], "cases.safetensors", |model, stored| {
        let parameters: BTreeMap<_, _> = stored
            .into_iter()
            .filter_map(|(name, shape)| Some((name.strip_prefix("param.")?.to_owned(), shape)))
            .collect();
        assert_eq!(listed(model), parameters);
    });
}
