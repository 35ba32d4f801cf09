//! Gemma 4 beyond `fixtures_families`: FLOPs, the cache, files as they are published, and what is refused.

use std::path::PathBuf;

use accounting::Dtype;
use accounting::decoder_flops::{Recomputation, Workload, step};
use accounting::memory::kv_cache;
use kernels::nf4::{Scales, is_nf4};
use models::generation::KeyValueCache;
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::module::{Context, Input, LanguageModel, Role, parameters, tensors};
use models::state_dict::state_dict;
use models::{Llama, tensors_file};
use runtime::autograd::backward;
use runtime::profile::Counter;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const NAMES: [&str; 2] = ["gemma4", "gemma4_k_eq_v"];

fn folder(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/families")).join(name)
}

fn load(name: &str, kind: Kind) -> Llama {
    Folder::open(&folder(name)).unwrap().load(Some(kind), Device::Cpu).unwrap()
}

fn tokens(batch: i64, sequence: i64) -> Tensor {
    (Tensor::arange(batch * sequence, (Kind::Int64, Device::Cpu)) * 7).remainder(37).view([batch, sequence])
}

#[test]
fn a_step_has_exactly_the_predicted_flops() {
    for name in NAMES {
        for (batch, sequence) in [(2, 21), (1, 4), (1, 130)] {
            let model = load(name, Kind::Float);
            let tokens = tokens(batch, sequence);
            let counter = Counter::on_this_thread().unwrap();
            backward(&[&model.loss(&Input::training(&tokens), &tokens).unwrap().sum]).unwrap();
            let counts = counter.finish().unwrap();
            let work = Workload { batch: batch as u64, sequence: sequence as u64 };
            let decoder = accounting::Decoder::from_config(model.decoder_config()).unwrap();
            let expected = step(&decoder, work, &Recomputation::default()).unwrap();
            let (flops, hardware) = (counts.total.flops, expected.hardware().unwrap());
            assert_eq!(
                (u128::from(flops.dense), u128::from(flops.causal)),
                (hardware.dense, hardware.causal),
                "{name}, {sequence}: {expected:#?}\n{counts}"
            );
            assert_eq!(counts.unknown, Vec::<String>::new());
        }
    }
}

/// A row in pieces of one and several tokens, longer than the window, has the logits of the whole row, and the cache has the keys of the
/// layers that have some.
#[test]
fn a_cache_continues_from_any_token() {
    for (name, layers) in
        [("gemma4", vec![[2, 8], [2, 16], [2, 8]]), ("gemma4_k_eq_v", vec![[2, 8], [1, 16], [1, 16]])]
    {
        let model = load(name, Kind::Double);
        let shape = model.cache_shape().unwrap();
        assert_eq!(shape.layers, layers, "{name}");
        let decoder = accounting::Decoder::from_config(model.decoder_config()).unwrap();
        assert_eq!(kv_cache::token_bytes(&decoder, Dtype::Fp64).unwrap(), shape.bytes_per_token());
        let _no_grad = tch::no_grad_guard();
        let tokens = tokens(1, 24);
        let whole = model.logits(&Input::new(&tokens)).unwrap();
        let mut cache = KeyValueCache::new(shape, 1, 24).unwrap();
        let mut start = 0;
        for length in [1, 6, 1, 1, 9, 2, 1, 3] {
            let writes = {
                let extension = cache.extend(length, None).unwrap();
                let positions =
                    Tensor::arange_start(start, start + length, (Kind::Int64, Device::Cpu)).view([1, length]);
                let piece = tokens.narrow(1, start, length);
                let context = Context { extension: Some(&extension), ..Context::default() };
                let logits =
                    model.logits(&Input { tokens: &piece, positions: Some(&positions), context }).unwrap();
                let error = (logits - whole.narrow(1, start, length)).abs().max().double_value(&[]);
                assert!(error < 1e-12, "{name}, {length} tokens from {start}: {error}");
                extension.finish()
            };
            cache.commit(writes).unwrap();
            start += length;
        }
    }
}

/// The factor of a layer is saved and not trained.
#[test]
fn the_factor_of_a_layer_is_a_buffer() {
    let model = load("gemma4", Kind::Float);
    let all = tensors(&model);
    let scalars: Vec<_> = all.iter().filter(|one| one.name.ends_with("layer_scalar")).collect();
    assert_eq!(scalars.len(), 5);
    assert!(scalars.iter().all(|one| one.role == Role::Buffer && !one.tensor.requires_grad()));
    assert!(scalars.iter().any(|one| one.tensor.double_value(&[0]) != 1.0));
    assert!(parameters(&model).iter().all(|(name, _)| !name.ends_with("layer_scalar")));
    // It multiplies the layer's result.
    let _no_grad = tch::no_grad_guard();
    let tokens = tokens(1, 6);
    let before = model.logits(&Input::new(&tokens)).unwrap();
    let _ = scalars[2].tensor.shallow_clone().fill_(0.5);
    assert_ne!(model.logits(&Input::new(&tokens)).unwrap(), before);
}

/// A published file nests its text model, has the parts that read images and hear sounds beside it, and keys of layers that do not use them.
#[test]
fn a_published_folder_is_read() {
    let plain = load("gemma4", Kind::Float);
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("published");
    std::fs::create_dir(&path).unwrap();
    let text: Value =
        serde_json::from_slice(&std::fs::read(folder("gemma4").join("config.json")).unwrap()).unwrap();
    let file = json!({
        "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text,
        "vision_config": { "model_type": "gemma4_vision" }, "tie_word_embeddings": true,
    });
    std::fs::write(path.join("config.json"), file.to_string()).unwrap();
    let stored = tensors_file::read(&folder("gemma4").join("model.safetensors"), Device::Cpu).unwrap();
    let mut named: Vec<(String, Tensor)> = stored
        .into_iter()
        .map(|(name, tensor)| (name.replace("model.", "model.language_model."), tensor))
        .collect();
    let zeros = |size: &[i64]| Tensor::zeros(size, (Kind::BFloat16, Device::Cpu));
    for (name, size) in [
        ("model.language_model.layers.3.self_attn.k_proj.weight", &[16, 16][..]),
        ("model.language_model.layers.4.self_attn.v_proj.weight", &[32, 16]),
        ("model.language_model.layers.3.self_attn.k_norm.weight", &[8]),
        ("model.vision_tower.encoder.weight", &[3, 3]),
        ("model.audio_tower.encoder.weight", &[3, 3]),
    ] {
        named.push((name.to_owned(), zeros(size)));
    }
    Tensor::write_safetensors(&named, path.join("model.safetensors")).unwrap();
    let opened = Folder::open(&path).unwrap();
    assert_eq!(opened.parts_not_read(), ["the part that hears sounds", "the part that reads images"]);
    let read = opened.load(Some(Kind::Float), Device::Cpu).unwrap();
    assert_eq!(state_dict(&read), state_dict(&plain));
}

/// Every projection of the blocks is quantized, and the files of such a model are read again.
#[test]
fn a_model_in_nf4_computes_and_is_saved() {
    let opened = Folder::open(&folder("gemma4")).unwrap();
    let model = opened.load(Some(Scales::Nested.kind()), Device::Cpu).unwrap();
    let quantized: Vec<String> =
        tensors(&model).iter().filter(|one| is_nf4(one.tensor)).map(|one| one.name.clone()).collect();
    let of_layer =
        |layer: usize| quantized.iter().filter(|name| name.starts_with(&format!("layers.{layer}."))).count();
    // q, k, v, o, gate, up, down, and two of the layer's input; a layer that shares keys has no k and v.
    assert_eq!([0, 1, 2, 3, 4].map(of_layer), [9, 9, 9, 7, 7]);
    let tokens = tokens(1, 5);
    let logits = model.logits(&Input::new(&tokens)).unwrap();
    assert!(bool::try_from(logits.isfinite().all()).unwrap());
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("nf4");
    hugging_face::save(&model, &path, SHARD_BYTES).unwrap();
    let again = Folder::open(&path).unwrap().load(None, Device::Cpu).unwrap();
    assert_eq!(again.logits(&Input::new(&tokens)).unwrap(), logits);
}
