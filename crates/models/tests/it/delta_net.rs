//! Qwen3.5's linear attention in a model: generation, dtypes, and files of models that also read images. transformers' results are in
//! `fixtures_families`.

use std::path::{Path, PathBuf};

use accounting::decoder_flops::{Recomputation, Workload, step};
use models::generation::{CacheShape, GenerationConfig, Generator, KeyValueCache, generate};
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::module::{Input, LanguageModel, tensors};
use models::{DecoderConfig, Llama, state_dict, tensors_file};
use runtime::autograd::backward;
use runtime::profile::Counter;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/families/qwen3_5"))
}

fn model(kind: Kind) -> Llama {
    Folder::open(&folder()).unwrap().load(Some(kind), Device::Cpu).unwrap()
}

/// Rows of unequal length with a common prefix of 5 tokens; some are shorter than the convolution's window after it.
fn prompts() -> Vec<Vec<i64>> {
    let row = |number: i64, length: i64| {
        (0..length).map(|place| 3 + (place * 7 + if place < 5 { 0 } else { number * 11 }) % 36).collect()
    };
    [(1, 6), (2, 21), (3, 7), (4, 12)].into_iter().map(|(number, length)| row(number, length)).collect()
}

/// Rows that are padded, that share a prefix, and that end before others have the tokens of each row alone, read anew for each token.
#[test]
fn states_survive_padding_prefixes_and_ended_rows() {
    let model = model(Kind::Double);
    let options = |cache| GenerationConfig { max_new_tokens: 14, cache, ..GenerationConfig::default() };
    let alone = |prompt: &Vec<i64>| {
        generate(&model, std::slice::from_ref(prompt), &options(false), &mut ()).unwrap().remove(0).tokens
    };
    let expected: Vec<Vec<i64>> = prompts().iter().map(alone).collect();
    for prefix in [&[][..], &prompts()[0][..5]] {
        let generator = Generator::new(&model, &options(true)).unwrap().with_prefix(prefix).unwrap();
        // The second row, then the last, leave the batch early.
        let mut ends =
            |row: usize, tokens: &[i64]| row == 1 && tokens.len() == 3 || row == 3 && tokens.len() == 6;
        let found = generator.generate(&prompts(), &mut ends).unwrap();
        for ((found, expected), length) in found.iter().zip(&expected).zip([14, 3, 14, 6]) {
            assert_eq!(found.tokens, expected[..length], "prefix of {}", prefix.len());
        }
    }
}

/// A row in pieces of one and several tokens has the logits of the whole row, and a failed pass changes nothing.
#[test]
fn a_cache_continues_from_any_token() {
    let model = model(Kind::Double);
    let shape: CacheShape = model.cache_shape().unwrap();
    let recurrent = shape.recurrent.unwrap();
    let _no_grad = tch::no_grad_guard();
    assert_eq!((shape.layers.len(), recurrent.layers), (1, 2));
    assert_eq!(recurrent.bytes_per_row(Kind::BFloat16), 2 * (4 * 8 * 12 * 4 + 80 * 3 * 2));
    let decoder = accounting::Decoder::from_config(model.decoder_config()).unwrap();
    let predicted = accounting::memory::kv_cache::recurrent_bytes(&decoder, 1, accounting::Dtype::Bf16);
    assert_eq!(predicted.unwrap(), recurrent.bytes_per_row(Kind::BFloat16));
    let tokens = Tensor::from_slice(&prompts()[1]).unsqueeze(0);
    let whole = model.logits(&Input::new(&tokens)).unwrap();
    let mut cache = KeyValueCache::new(shape, 1, 21).unwrap();
    let mut start = 0;
    for count in [2, 1, 7, 1, 1, 9] {
        let part = tokens.narrow(1, start, count);
        let positions = Tensor::arange_start(start, start + count, (Kind::Int64, Device::Cpu)).unsqueeze(0);
        for is_repeated in [true, false] {
            let extension = cache.extend(count, None).unwrap();
            let mut input = Input { positions: Some(&positions), ..Input::new(&part) };
            input.context.extension = Some(&extension);
            let logits = model.logits(&input).unwrap();
            let error = (logits - whole.narrow(1, start, count)).abs().max().double_value(&[]);
            assert!(error < 1e-12, "{start}: {error}");
            let writes = extension.finish();
            // What a pass wrote counts only when it is committed.
            if !is_repeated {
                cache.commit(writes).unwrap();
            }
        }
        start += count;
    }
}

/// In a model in bf16 the decays are in fp32, in memory and in its files.
#[test]
fn decays_stay_in_fp32() {
    let wide = model(Kind::Float);
    let narrow = model(Kind::BFloat16);
    for named in tensors(&narrow) {
        let expected = if decoder::is_kept_wide(&named.name) { Kind::Float } else { Kind::BFloat16 };
        assert_eq!(named.tensor.kind(), expected, "{}", named.name);
    }
    let tokens = Tensor::from_slice(&prompts()[1]).unsqueeze(0);
    let [wide, logits] = [&wide, &narrow].map(|model| model.logits(&Input::new(&tokens)).unwrap());
    assert_eq!(logits.kind(), Kind::BFloat16);
    let error = (&logits.to_kind(Kind::Float) - &wide).norm() / wide.norm();
    assert!(error.double_value(&[]) < 0.03, "{error:?}");

    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("narrow");
    hugging_face::save(&narrow, &path, SHARD_BYTES).unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["dtype"], "bfloat16");
    let again = Folder::open(&path).unwrap();
    assert_eq!(again.kind().unwrap(), Kind::BFloat16);
    let again = again.load(None, Device::Cpu).unwrap();
    assert_eq!(state_dict::state_dict(&again), state_dict::state_dict(&narrow));
}

/// The folder of a model that also reads images and predicts several tokens: its text model is read, and the rest is named.
#[test]
fn the_text_model_of_a_multimodal_folder_is_read() {
    let (out, original) = (tempfile::tempdir().unwrap(), folder());
    let read = |path: &Path| -> Value { serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() };
    let mut text = read(&original.join("config.json"));
    let tied = text.as_object_mut().unwrap().remove("tie_word_embeddings").unwrap();
    text["mtp_num_hidden_layers"] = json!(1);
    let config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": tied,
        "text_config": text, "vision_config": { "depth": 2 }, "image_token_id": 7,
    });
    std::fs::write(out.path().join("config.json"), config.to_string()).unwrap();
    let named = tensors_file::read(&original.join("model.safetensors"), Device::Cpu).unwrap();
    let renamed =
        |(name, tensor): (String, Tensor)| (name.replace("model.", "model.language_model."), tensor);
    let mut named: Vec<(String, Tensor)> = named.into_iter().map(renamed).collect();
    let other = || Tensor::ones([2, 3], (Kind::BFloat16, Device::Cpu));
    named.extend(
        ["model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight"].map(|name| (name.to_owned(), other())),
    );
    tensors_file::write(&out.path().join("model.safetensors"), &named).unwrap();

    let opened = Folder::open(out.path()).unwrap();
    assert_eq!(opened.parts_not_read(), ["the part that reads images", "what predicts several tokens"]);
    assert_eq!(Folder::open(&original).unwrap().parts_not_read(), [""; 0]);
    let found = opened.load(Some(Kind::Float), Device::Cpu).unwrap();
    assert_eq!(state_dict::state_dict(&found), state_dict::state_dict(&model(Kind::Float)));
    let as_read = DecoderConfig::read(&original.join("config.json")).unwrap();
    assert_eq!(
        DecoderConfig { other_fields: as_read.other_fields.clone(), ..found.decoder_config().clone() },
        as_read
    );
    assert_eq!(
        accounting::Decoder::read(&out.path().join("config.json")).unwrap().parameters().unwrap(),
        as_read.parameter_count()
    );
}

/// `accounting` predicts the FLOPs of a step to the last one, of chunks of 64 and of fewer tokens, over several spans.
#[test]
fn a_step_has_exactly_the_predicted_flops() {
    for (folder, batch, sequence) in [("qwen3_5", 2, 21), ("qwen3_5_equal", 1, 200), ("qwen3_5", 1, 70)] {
        let folder = self::folder().with_file_name(folder);
        let model: Llama = Folder::open(&folder).unwrap().load(Some(Kind::Float), Device::Cpu).unwrap();
        let tokens = Tensor::arange(batch * sequence, (Kind::Int64, Device::Cpu)).remainder(37);
        let tokens = tokens.view([batch, sequence]);
        let counter = Counter::on_this_thread().unwrap();
        backward(&[&model.loss(&Input::training(&tokens), &tokens).unwrap().sum]).unwrap();
        let counts = counter.finish().unwrap();
        let work = Workload { batch: batch as u64, sequence: sequence as u64 };
        let decoder = accounting::Decoder::from_config(model.decoder_config()).unwrap();
        let expected = step(&decoder, work, &Recomputation::default()).unwrap();
        let hardware = expected.hardware().unwrap();
        let flops = counts.total.flops;
        assert_eq!(
            (u128::from(flops.dense), u128::from(flops.causal)),
            (hardware.dense, hardware.causal),
            "{sequence}: {expected:#?}\n{counts}"
        );
        assert_eq!(counts.unknown, Vec::<String>::new());
    }
}
