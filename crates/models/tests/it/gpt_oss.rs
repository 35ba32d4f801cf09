//! gpt-oss beyond `fixtures_families`: files in MXFP4, FLOPs, generation in pieces, files by shards, and what is refused.

use std::path::{Path, PathBuf};

use accounting::decoder_flops::{Recomputation, Workload, step};
use kernels::nf4::{Scales, is_nf4};
use models::generation::KeyValueCache;
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::module::{Context, Input, LanguageModel, tensors};
use models::state_dict::state_dict;
use models::{Llama, tensors_file};
use runtime::autograd::backward;
use runtime::profile::Counter;
use tch::{Device, Kind, Tensor};

fn folder(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/families")).join(name)
}

fn load(path: &Path, kind: Kind) -> Llama {
    Folder::open(path).unwrap().load(Some(kind), Device::Cpu).unwrap()
}

/// `transformers` dequantizes the experts of the same file; the script is `xtask/peers/model_families.py`.
#[test]
fn experts_in_mxfp4_are_read_as_transformers_reads_them() {
    let folder = folder("gpt_oss_mxfp4");
    let opened = Folder::open(&folder).unwrap();
    assert_eq!(opened.kind().unwrap(), Kind::BFloat16);
    assert!(!opened.has_locations());
    let cases: std::collections::BTreeMap<_, _> =
        tensors_file::read(&folder.join("cases.safetensors"), Device::Cpu).unwrap().into_iter().collect();
    let model = load(&folder, Kind::Float);
    let logits = model.logits(&Input::new(&cases["input_ids"])).unwrap();
    let error = (&logits - &cases["logits"]).abs().max().double_value(&[]);
    assert!(error < 1e-4 * cases["logits"].abs().max().double_value(&[]), "{error}");

    // What is written has the values in bf16, and no quantization.
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("dense");
    hugging_face::save(&load(&folder, Kind::BFloat16), &path, SHARD_BYTES).unwrap();
    assert_eq!(load(&path, Kind::Float).logits(&Input::new(&cases["input_ids"])).unwrap(), logits);
    assert!(!std::fs::read_to_string(path.join("config.json")).unwrap().contains("quantization_config"));
}

/// Tensors of all experts are divided among shards as any other, and pieces of them are those of the whole.
#[test]
fn a_model_in_shards_is_the_same() {
    let model = load(&folder("gpt_oss"), Kind::Float);
    let out = tempfile::tempdir().unwrap();
    for limit in [1, 9_000] {
        let path = out.path().join(limit.to_string());
        hugging_face::save(&model, &path, limit).unwrap();
        assert_eq!(state_dict(&load(&path, Kind::Float)), state_dict(&model));
    }
}

#[test]
fn a_step_has_exactly_the_predicted_flops() {
    for (batch, sequence) in [(2, 21), (1, 4), (1, 130)] {
        let model = load(&folder("gpt_oss"), Kind::Float);
        let tokens = Tensor::arange(batch * sequence, (Kind::Int64, Device::Cpu)).remainder(37);
        let tokens = tokens.view([batch, sequence]);
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
            "{sequence}: {expected:#?}\n{counts}"
        );
        assert_eq!(counts.unknown, Vec::<String>::new());
    }
}

/// A row in pieces of one and several tokens, longer than the window, has the logits of the whole row.
#[test]
fn a_cache_continues_from_any_token() {
    let model = load(&folder("gpt_oss"), Kind::Double);
    let _no_grad = tch::no_grad_guard();
    let tokens = (Tensor::arange(24, (Kind::Int64, Device::Cpu)) * 7).remainder(37).view([1, 24]);
    let whole = model.logits(&Input::new(&tokens)).unwrap();
    let mut cache = KeyValueCache::new(model.cache_shape().unwrap(), 1, 24).unwrap();
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
            assert!(error < 1e-12, "{length} tokens from {start}: {error}");
            extension.finish()
        };
        cache.commit(writes).unwrap();
        start += length;
    }
}

/// Every matrix of an expert is quantized, and the files of such a model have no form for them.
#[test]
fn experts_in_nf4_compute_and_are_not_saved() {
    let opened = Folder::open(&folder("gpt_oss")).unwrap();
    let model = opened.load(Some(Scales::Nested.kind()), Device::Cpu).unwrap();
    let is_expert = |name: &str| name.contains(".experts.");
    let quantized = tensors(&model).iter().filter(|one| is_nf4(one.tensor) && is_expert(&one.name)).count();
    assert_eq!(quantized, 3 * 4 * 3);
    let tokens = Tensor::from_slice(&[3i64, 7, 11, 5]).view([1, 4]);
    let logits = model.logits(&Input::new(&tokens)).unwrap();
    assert!(bool::try_from(logits.isfinite().all()).unwrap());
    let out = tempfile::tempdir().unwrap();
    let words = hugging_face::save(&model, &out.path().join("nf4"), SHARD_BYTES).unwrap_err().to_string();
    assert!(words.contains("a `gpt_oss` in NF4 cannot be saved"), "{words}");
}
