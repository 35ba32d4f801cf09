//! Greedy generation of transformers with tiny models of both architectures.

use std::collections::BTreeMap;
use std::path::PathBuf;

use models::generation::{GenerationConfig, generate};
use models::{DecoderConfig, Llama, hugging_face, tensors_file};
use tch::{Device, Kind, Tensor};

fn folder(name: &str) -> PathBuf {
    let fixtures = std::env::var_os("FRUGAL_FIXTURES").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures")),
        PathBuf::from,
    );
    fixtures.join(name)
}

fn rows(tensor: &Tensor) -> Vec<Vec<i64>> {
    Vec::try_from(tensor).unwrap()
}

fn check(name: &str) {
    let folder = folder(name);
    let config = DecoderConfig::read(&folder.join("config.json")).unwrap();
    let cases: BTreeMap<String, Tensor> =
        tensors_file::read(&folder.join("cases.safetensors"), Device::Cpu).unwrap().into_iter().collect();
    let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    hugging_face::load_weights(&model, &folder.join("model.safetensors")).unwrap();

    let prompts: Vec<Vec<i64>> = rows(&cases["input_ids"])
        .into_iter()
        .zip(rows(&cases["attention_mask"]))
        .map(|(ids, mask)| {
            ids.into_iter().zip(mask).filter(|(_, real)| *real == 1).map(|(id, _)| id).collect()
        })
        .collect();
    assert!(prompts.iter().any(|prompt| prompt.len() < prompts[1].len()), "a row is padded");
    let expected = rows(&cases["greedy"]);
    for cache in [true, false] {
        let options =
            GenerationConfig { max_new_tokens: expected[0].len(), cache, ..GenerationConfig::default() };
        let found = generate(&model, &prompts, &options, &mut ()).unwrap();
        let found: Vec<Vec<i64>> = found.into_iter().map(|row| row.tokens).collect();
        assert_eq!(found, expected, "{name}, cache: {cache}");
    }
}

#[test]
fn fixtures_qwen2_greedy() {
    check("qwen2");
}

#[test]
fn fixtures_llama_greedy() {
    check("llama");
}
