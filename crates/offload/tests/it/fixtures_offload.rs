//! The reference models, offloaded: the results of transformers, and bit for bit those of the plain model.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::support::{alone, compare, steps, ways};
use models::generation::{GenerationConfig, generate};
use models::hugging_face::Folder;
use models::module::{Context, Input, LanguageModel};
use models::{Documents, Llama, tensors_file};
use offload::{Method, Offload, OffloadConfig, Tier};
use tch::{Device, Kind, Tensor};

const LOGITS: f64 = 1e-5;

fn folder(name: &str) -> PathBuf {
    let fixtures = std::env::var_os("FRUGAL_FIXTURES").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures")),
        PathBuf::from,
    );
    fixtures.join(name)
}

fn cases(name: &str) -> BTreeMap<String, Tensor> {
    tensors_file::read(&folder(name).join("cases.safetensors"), Device::Cpu).unwrap().into_iter().collect()
}

fn rows(tensor: &Tensor) -> Vec<Vec<i64>> {
    Vec::try_from(tensor).unwrap()
}

/// Logits of the file's tokens. Padding and text are separate documents.
fn logits(model: &Llama, cases: &BTreeMap<String, Tensor>) -> Tensor {
    let mask = &cases["attention_mask"];
    let runs = |row: &Vec<i64>| row.chunk_by(|a, b| a == b).map(<[i64]>::len).collect::<Vec<_>>();
    let documents = Documents::new(&rows(mask).iter().map(runs).collect::<Vec<_>>(), Device::Cpu).unwrap();
    let positions = (mask.cumsum(1, Kind::Int64) - 1).clamp_min(0);
    let context = Context { documents: Some(&documents), ..Context::default() };
    let _no_grad = tch::no_grad_guard();
    model.logits(&Input { tokens: &cases["input_ids"], positions: Some(&positions), context }).unwrap()
}

/// Prompts without their padding.
fn prompts(cases: &BTreeMap<String, Tensor>) -> Vec<Vec<i64>> {
    let real = |(ids, mask): (Vec<i64>, Vec<i64>)| {
        ids.into_iter().zip(mask).filter(|(_, real)| *real == 1).map(|(id, _)| id).collect()
    };
    rows(&cases["input_ids"]).into_iter().zip(rows(&cases["attention_mask"])).map(real).collect()
}

/// Calls `body` with the model for every method and tier: memory, written files, and the folder's own file.
fn offloaded(name: &str, body: &dyn Fn(&Llama, &Offload, &str)) {
    let opened = Folder::open(&folder(name)).unwrap();
    let room = tempfile::tempdir().unwrap();
    for method in Method::ALL {
        for tier in [Tier::Host, Tier::File(room.path().to_owned())] {
            let options = OffloadConfig { method, tier, ..OffloadConfig::default() };
            let case = format!("{name}, {}, {:?}", method.name(), options.tier);

            let (model, offload) = Offload::open(&opened, None, &options).unwrap();
            body(&model, &offload, &format!("{case}, opened"));
            drop(model);

            let mut model = opened.load(None, Device::Cpu).unwrap();
            models::module::freeze(&model, ".*", true).unwrap();
            let offload = options.install(&mut model).unwrap();
            body(&model, &offload, &format!("{case}, applied"));
        }
    }
}

fn check_inference(name: &str) {
    let _alone = alone();
    let cases = cases(name);
    let mask = cases["attention_mask"].unsqueeze(2).to_kind(Kind::Float);
    let own = logits(&Folder::open(&folder(name)).unwrap().load(None, Device::Cpu).unwrap(), &cases);
    offloaded(name, &|model, offload, case| {
        for pass in 0..2 {
            let found = logits(model, &cases);
            assert!(found.equal(&own), "{case}, pass {pass}: other bits than the model itself");
            let error = ((found - &cases["logits"]) * &mask).abs().max().double_value(&[]);
            assert!(error <= LOGITS, "{case}: {error}");
        }
        offload.check_on_host().unwrap();
        assert!(offload.counters().loads >= offload.blocks() as u64, "{case}: layers were loaded");
    });
}

fn check_generation(name: &str) {
    let _alone = alone();
    let cases = cases(name);
    let (prompts, expected) = (prompts(&cases), rows(&cases["greedy"]));
    offloaded(name, &|model, offload, case| {
        let options = GenerationConfig { max_new_tokens: expected[0].len(), ..GenerationConfig::default() };
        let _no_grad = tch::no_grad_guard();
        let found = generate(model, &prompts, &options, &mut ()).unwrap();
        let found: Vec<Vec<i64>> = found.into_iter().map(|row| row.tokens).collect();
        assert_eq!(found, expected, "{case}");
        offload.check_on_host().unwrap();
    });
}

fn check_training(name: &str) {
    let _alone = alone();
    let opened = Folder::open(&folder(name)).unwrap();
    let model = || Box::new(opened.load(None, Device::Cpu).unwrap());
    for micro in [1, 2] {
        let reference = steps(model(), None, 3, micro);
        for (way, options) in ways(opened.config().num_hidden_layers as usize) {
            let found = steps(model(), Some(options), 3, micro);
            compare(&reference, &found, &format!("{name}, {way}, {micro} micro-batches"));
        }
    }
}

#[test]
fn fixtures_qwen2_inference() {
    check_inference("qwen2");
}

#[test]
fn fixtures_llama_inference() {
    check_inference("llama");
}

#[test]
fn fixtures_qwen2_generation() {
    check_generation("qwen2");
}

#[test]
fn fixtures_llama_generation() {
    check_generation("llama");
}

#[test]
fn fixtures_qwen2_training() {
    check_training("qwen2");
}

#[test]
fn fixtures_llama_training() {
    check_training("llama");
}
