//! Models in NF4: the numbers of bitsandbytes, its files in both directions, loading, generation. `xtask/peers/nf4.py --write` made the
//! cases.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kernels::nf4::{self, Scales, sections};
use kernels::quantized;
use models::generation::{GenerationConfig, generate};
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::module::{Input, LanguageModel, parameter_count, tensors};
use models::state_dict::state_dict;
use models::{DecoderConfig, Llama, tensors_file};
use runtime::memory::{Region, live_bytes, track_cpu};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

fn fixtures() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/nf4"))
}

fn read(path: &Path) -> BTreeMap<String, Tensor> {
    tensors_file::read(path, Device::Cpu).unwrap().into_iter().collect()
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    Vec::try_from(tensor.contiguous().view([-1]).view_dtype(Kind::Uint8)).unwrap()
}

/// A copy of a folder's files.
fn copy(from: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

#[test]
fn fixtures_codes_scales_and_values_are_those_of_bitsandbytes() {
    let cases = read(&fixtures().join("matrices.safetensors"));
    let originals = cases.iter().filter_map(|(name, tensor)| Some((name.strip_suffix(".original")?, tensor)));
    let mut compared = 0;
    for (name, original) in originals {
        for (form, scales) in [("float", Scales::Float), ("nested", Scales::Nested)] {
            let of = |end: &str| &cases[&format!("{name}.{form}.{end}")];
            let stored = nf4::quantize(original, scales).unwrap();
            let parts = sections(&stored).unwrap();
            assert_eq!(bytes(&parts.codes), bytes(of("weight")), "{name} {form}: codes");
            assert_eq!(bytes(&parts.absmax), bytes(of("weight.absmax")), "{name} {form}: scales");
            let text = String::from_utf8(bytes(of("weight.quant_state.bitsandbytes__nf4"))).unwrap();
            let state: Value = serde_json::from_str(&text).unwrap();
            if let Some((factors, mean)) = &parts.nested {
                let offset = state["nested_offset"].as_f64().unwrap() as f32;
                assert_eq!(bytes(mean), offset.to_ne_bytes(), "{name}: mean");
                assert_eq!(bytes(factors), bytes(of("weight.nested_absmax")), "{name}: factors");
                let map = Tensor::from_slice(nf4::nested_map());
                assert_eq!(bytes(&map), bytes(of("weight.nested_quant_map")), "the map of nested scales");
            }
            assert_eq!(bytes(&Tensor::from_slice(&nf4::TABLE)), bytes(of("weight.quant_map")), "the table");
            for (end, kind) in [("float32", Kind::Float), ("bfloat16", Kind::BFloat16)] {
                if end == "float32" && original.kind() != Kind::Float {
                    continue;
                }
                let values = quantized::dequantize(&stored, kind).unwrap();
                assert_eq!(bytes(&values), bytes(of(end)), "{name} {form}: {end}");
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 20);
}

/// The folder that transformers wrote: the dequantized model has its logits, and the model in NF4 the same weights.
#[test]
fn fixtures_a_folder_of_bitsandbytes_is_the_model_of_transformers() {
    let folder = Folder::open(&fixtures().join("model")).unwrap();
    assert_eq!(folder.kind().unwrap(), Scales::Nested.kind());
    let cases = read(&fixtures().join("model/cases.safetensors"));
    let difference = |model: &Llama| {
        let logits = model.logits(&Input::new(&cases["tokens"])).unwrap();
        let largest = cases["logits"].abs().max().double_value(&[]);
        (logits.to_kind(Kind::Float) - &cases["logits"]).abs().max().double_value(&[]) / largest
    };
    let dense = folder.load(Some(Kind::Float), Device::Cpu).unwrap();
    assert!(difference(&dense) < 1e-5, "{}", difference(&dense));
    let quantized = folder.load(None, Device::Cpu).unwrap();
    // Activations, norms and the embedding are in bf16.
    assert!(difference(&quantized) < 3e-2, "{}", difference(&quantized));
    assert_eq!(parameter_count(&quantized).total, folder.config().parameter_count());

    let values: BTreeMap<String, Tensor> = state_dict(&dense).into_iter().collect();
    let own = Llama::new(folder.config(), (Scales::Nested.kind(), Device::Cpu)).unwrap();
    hugging_face::load_weights(&own, &fixtures().join("original.safetensors")).unwrap();
    let mut matrices = 0;
    for (from_files, made_here) in tensors(&quantized).into_iter().zip(tensors(&own)) {
        assert_eq!(from_files.name, made_here.name);
        if nf4::is_nf4(from_files.tensor) {
            let dequantized = quantized::dequantize(from_files.tensor, Kind::Float).unwrap();
            assert_eq!(dequantized, values[&from_files.name], "{}", from_files.name);
            assert_eq!(from_files.tensor, made_here.tensor, "{}: quantized here", from_files.name);
            matrices += 1;
        }
    }
    assert_eq!(matrices, 14);
}

fn generated(model: &Llama, prompts: &[Vec<i64>], options: &GenerationConfig) -> Vec<Vec<i64>> {
    let rows = generate(model, prompts, options, &mut |_: usize, _: &[i64]| false).unwrap();
    rows.into_iter().map(|row| row.tokens).collect()
}

fn small() -> DecoderConfig {
    DecoderConfig { num_key_value_heads: 2, initializer_range: 0.2, ..DecoderConfig::qwen2(50, 64, 96, 2, 4) }
}

/// Quantized while it is read or as it is made, written as bitsandbytes' files and read again, in shards: the same bytes and tokens.
#[test]
fn files_are_read_as_they_were_written() {
    let (dense, quantized) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let model = Llama::new(&small(), (Kind::Float, Device::Cpu)).unwrap();
    hugging_face::save(&model, dense.path(), SHARD_BYTES).unwrap();
    for scales in [Scales::Nested, Scales::Float] {
        let loaded = Folder::open(dense.path()).unwrap().load(Some(scales.kind()), Device::Cpu).unwrap();
        for named in tensors(&loaded) {
            let is_matrix = named.name.contains("_proj.weight");
            let expected = if is_matrix { scales.kind() } else { Kind::BFloat16 };
            assert_eq!(named.tensor.kind(), expected, "{}", named.name);
            assert_eq!(named.tensor.requires_grad(), !is_matrix, "{}", named.name);
        }
        let from =
            tensors(&model).into_iter().find(|named| named.name == "layers.1.mlp.up_proj.weight").unwrap();
        let state: BTreeMap<String, Tensor> = state_dict(&loaded).into_iter().collect();
        let expected = nf4::quantize(&from.tensor.to_kind(Kind::BFloat16), scales).unwrap();
        assert_eq!(state[&from.name], expected);

        hugging_face::save(&loaded, quantized.path(), 20_000).unwrap();
        let config = std::fs::read_to_string(quantized.path().join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["quantization_config"]["bnb_4bit_use_double_quant"], scales == Scales::Nested);
        assert_eq!(config["dtype"], "bfloat16");
        let folder = Folder::open(quantized.path()).unwrap();
        // The files decide the form of scales.
        let again = folder.load(Some(Scales::Nested.kind()), Device::Cpu).unwrap();
        for ((name, meant), (_, read)) in
            state.iter().zip(state_dict(&again).into_iter().collect::<BTreeMap<_, _>>())
        {
            assert_eq!((meant.kind(), meant), (read.kind(), &read), "{name}");
        }
        let options = GenerationConfig { max_new_tokens: 12, ..GenerationConfig::default() };
        let prompts = [vec![3i64, 1, 4, 1, 5], vec![9, 2, 6]];
        assert_eq!(generated(&again, &prompts, &options), generated(&loaded, &prompts, &options));

        // A model in another dtype forgets that its files were quantized.
        let dequantized = folder.load(Some(Kind::BFloat16), Device::Cpu).unwrap();
        hugging_face::save(&dequantized, quantized.path(), SHARD_BYTES).unwrap();
        let config = std::fs::read_to_string(quantized.path().join("config.json")).unwrap();
        assert!(!config.contains("quantization_config"));
    }
}

/// A few tokens use the product without tiles: greedy tokens are those of a decoding that reads whole rows again.
#[test]
fn logits_of_the_cache_are_those_of_the_whole_row() {
    runtime::random::seed(1).unwrap();
    let config = DecoderConfig {
        num_key_value_heads: 2,
        initializer_range: 0.05,
        ..DecoderConfig::llama(80, 256, 512, 2, 4)
    };
    let model = Llama::new(&config, (Scales::Nested.kind(), Device::Cpu)).unwrap();
    let prompt = vec![5i64, 17, 3, 60];
    let options = GenerationConfig { max_new_tokens: 8, ..GenerationConfig::default() };
    let generated = generated(&model, std::slice::from_ref(&prompt), &options);
    let row: Vec<i64> = prompt.iter().chain(&generated[0]).copied().collect();
    let _no_grad = tch::no_grad_guard();
    let logits =
        model.logits(&Input::new(&Tensor::from_slice(&row).view([1, -1]))).unwrap().to_kind(Kind::Float);
    for (at, token) in (prompt.len() - 1..).zip(&generated[0]) {
        let of = logits.get(0).get(at as i64);
        // In bf16 the best logit of one path may be the next one of another.
        assert!(of.double_value(&[*token]) >= of.max().double_value(&[]) - 0.05, "{at}");
    }
}

/// Beside the model, loading takes one matrix in bf16 and its quantization.
#[test]
fn loading_takes_the_memory_of_one_matrix() {
    track_cpu().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = DecoderConfig::llama(500, 512, 2048, 3, 8);
    hugging_face::save(
        &Llama::new(&config, (Kind::BFloat16, Device::Cpu)).unwrap(),
        folder.path(),
        SHARD_BYTES,
    )
    .unwrap();
    let opened = Folder::open(folder.path()).unwrap();
    let before = live_bytes(Device::Cpu).unwrap();
    let region = Region::start(Device::Cpu).unwrap();
    let model = opened.load(Some(Scales::Nested.kind()), Device::Cpu).unwrap();
    let usage = region.finish().unwrap();
    let own = live_bytes(Device::Cpu).unwrap() - before;
    let dense = config.parameter_count() * 2;
    assert!(own < dense / 2, "{own} of {dense}");
    let matrix = 512 * 2048;
    let beside = usage.peak_above_start() - own;
    // bf16, the packed bytes, s in fp32, and a piece in fp32.
    assert!(beside <= 2 * matrix + matrix * 9 / 16 + matrix / 16 + (8 << 20), "{beside}");
    drop(model);
}

type Tensors = Vec<(String, Tensor)>;

#[test]
fn files_that_are_not_nf4_are_refused_by_name() {
    let message = |change: &dyn Fn(&mut Tensors)| {
        let folder = copy(&fixtures().join("model"));
        let path = folder.path().join("model.safetensors");
        let mut tensors = tensors_file::read(&path, Device::Cpu).unwrap();
        change(&mut tensors);
        tensors_file::write(&path, &tensors).unwrap();
        Folder::open(folder.path()).map(|_| ()).unwrap_err().to_string()
    };
    const WEIGHT: &str = "model.layers.0.mlp.up_proj.weight";
    let set = |end: &'static str, tensor: Tensor| {
        message(&move |tensors| {
            let name = format!("{WEIGHT}{end}");
            let found = tensors.iter_mut().find(|(own, _)| *own == name).unwrap();
            found.1 = tensor.shallow_clone();
        })
    };
    let state = |change: &dyn Fn(&mut Value)| {
        message(&|tensors| {
            let name = format!("{WEIGHT}.quant_state.bitsandbytes__nf4");
            let found = tensors.iter_mut().find(|(own, _)| *own == name).unwrap();
            let mut value: Value = serde_json::from_slice(&bytes(&found.1)).unwrap();
            change(&mut value);
            found.1 = Tensor::from_slice(value.to_string().as_bytes());
        })
    };
    let remove = |end: &'static str| {
        message(&move |tensors| tensors.retain(|(name, _)| *name != format!("{WEIGHT}{end}")))
    };
    let zeros = |size: i64, kind| Tensor::zeros([size], (kind, Device::Cpu));
    for (found, words) in [
        (set("", zeros(7, Kind::Uint8)), "the codes is 7 bytes; a weight [64, 64] has 2048 bytes of it"),
        (set(".absmax", zeros(63, Kind::Uint8)), "`absmax` is 63 bytes"),
        (set(".absmax", zeros(64, Kind::Float)), "is Float; expected Uint8"),
        (set(".quant_map", zeros(16, Kind::Float)), "`quant_map` is missing, or has other values than NF4's"),
        (set(".nested_quant_map", zeros(256, Kind::Float)), "other values than the dynamic map of 8 bits"),
        (remove(".nested_absmax"), "`nested_absmax` is missing"),
        (remove(""), "is missing, but its quantization state exists"),
        (
            remove(".quant_state.bitsandbytes__nf4"),
            "of quantized weights, those of bitsandbytes in NF4 are supported",
        ),
        (
            state(&|state| state["quant_type"] = "fp4".into()),
            "fp4 in blocks of 64; nf4 in blocks of 64 is supported",
        ),
        (state(&|state| state["blocksize"] = 128.into()), "nf4 in blocks of 128"),
        (state(&|state| state["shape"] = vec![64, 63].into()), "expected an even number of columns"),
        (
            state(&|state| state["shape"] = vec![32, 128].into()),
            "layers.0.mlp.up_proj.weight [32, 128] (expected [64, 64])",
        ),
        (
            state(&|state| state["nested_blocksize"] = 64.into()),
            "nested blocks of Some(64) scales; expected 256",
        ),
    ] {
        assert!(found.contains(words), "{found}");
    }
    let error =
        Folder::open(&fixtures().join("model")).unwrap().load(Some(Kind::Int), Device::Cpu).unwrap_err();
    assert!(error.to_string().contains("expected float32, bfloat16, float16, float64 or NF4"), "{error}");
}
