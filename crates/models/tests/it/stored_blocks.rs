//! Models whose matrices stay in the blocks of a GGUF file: values against `gguf`'s, logits and text against a dense model's.

use std::path::Path;

use gguf::{Header, ModelFile, ReadOptions, TensorInfo, TensorType, Value, Writer};
use kernels::quantized::blocks::{BlockType, from_bytes};
use kernels::quantized::{self, is_quantized};
use models::generation::{GenerationConfig, generate};
use models::module::{Input, LanguageModel, first_non_finite, parameter_count, tensors};
use models::{DecoderConfig, Llama, stored_blocks};
use tch::{Device, Kind, Tensor};

const HIDDEN: u64 = 256;
const WIDE: u64 = 512;
const VOCABULARY: u64 = 320;

/// Blocks with pseudo-random codes, and small factors.
fn blocks(kind: TensorType, values: usize, seed: u32) -> Vec<u8> {
    let count = values / kind.block_values();
    let mut bytes: Vec<u8> = (0..(count * kind.block_bytes()) as u32)
        .map(|index| ((index ^ seed << 20).wrapping_mul(2_654_435_761).rotate_left(13) ^ index) as u8)
        .collect();
    let factors: &[usize] = match kind {
        TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4K | TensorType::Q5K => &[1, 3],
        TensorType::Q2K => &[81, 83],
        TensorType::Q3K => &[109],
        TensorType::Q6K => &[209],
        _ => &[1],
    };
    for block in bytes.chunks_exact_mut(kind.block_bytes()) {
        for at in factors {
            // The sign, exponents of 2⁻¹³ to 2⁻¹⁰, and two bits of the significand.
            block[*at] = block[*at] & 0x8b | 0x08;
        }
    }
    bytes
}

/// Returns the values of `gguf`, and the tensor of the blocks.
fn both(kind: TensorType, shape: [i64; 2], bytes: &[u8]) -> (Vec<f32>, Tensor) {
    let mut values = Vec::new();
    kind.decode(bytes, &mut values);
    (values, from_bytes(BlockType::from_ggml(kind.number()).unwrap(), shape, bytes).unwrap())
}

#[test]
fn every_type_has_the_bits_of_the_file() {
    let known = TensorType::ALL.into_iter().filter(|kind| BlockType::from_ggml(kind.number()).is_some());
    let mut compared = 0;
    for kind in known {
        let stored = BlockType::from_ggml(kind.number()).unwrap();
        assert_eq!(
            (stored.name(), stored.values(), stored.bytes()),
            (kind.name(), kind.block_values(), kind.block_bytes())
        );
        for seed in 0..4 {
            let shape = [7, 768];
            let (expected, tensor) = both(kind, shape, &blocks(kind, 7 * 768, seed));
            let found: Vec<f32> =
                Vec::try_from(quantized::dequantize(&tensor, Kind::Float).unwrap().view([-1])).unwrap();
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found), bits(&expected), "{kind}");
            compared += 1;
        }
    }
    assert_eq!(compared, 4 * BlockType::ALL.len());
}

/// Writes a tied model of the family Qwen2 with a type for each matrix, and biases and norms in fp32.
fn write(path: &Path) {
    use TensorType::*;
    let mut infos = Vec::new();
    let mut add =
        |name: String, shape: &[u64], kind| infos.push(TensorInfo { name, shape: shape.to_vec(), kind });
    add("token_embd.weight".to_owned(), &[VOCABULARY, HIDDEN], Q8_0);
    add("output_norm.weight".to_owned(), &[HIDDEN], F32);
    for (layer, types) in
        [[Q4K, Q5_0, Q6K, Q4_1, Q2K, Q3K, Q5K], [Q4_0, BF16, Q5_1, IQ4NL, Q8_0, Q4K, Q6K]].iter().enumerate()
    {
        let mut part = |name: &str, shape: &[u64], kind| add(format!("blk.{layer}.{name}"), shape, kind);
        let [query, key, value, output, gate, up, down] = *types;
        part("attn_norm.weight", &[HIDDEN], F32);
        part("ffn_norm.weight", &[HIDDEN], F32);
        part("attn_q.weight", &[HIDDEN, HIDDEN], query);
        part("attn_k.weight", &[HIDDEN / 2, HIDDEN], key);
        part("attn_v.weight", &[HIDDEN / 2, HIDDEN], value);
        part("attn_q.bias", &[HIDDEN], F32);
        part("attn_k.bias", &[HIDDEN / 2], F32);
        part("attn_v.bias", &[HIDDEN / 2], F32);
        part("attn_output.weight", &[HIDDEN, HIDDEN], output);
        part("ffn_gate.weight", &[WIDE, HIDDEN], gate);
        part("ffn_up.weight", &[WIDE, HIDDEN], up);
        part("ffn_down.weight", &[HIDDEN, WIDE], down);
    }
    let number = |key: &str, value: u32| (format!("qwen2.{key}"), Value::U32(value));
    let metadata = vec![
        ("general.architecture".to_owned(), Value::String("qwen2".to_owned())),
        number("embedding_length", HIDDEN as u32),
        number("block_count", 2),
        number("feed_forward_length", WIDE as u32),
        number("attention.head_count", 4),
        number("attention.head_count_kv", 2),
        number("context_length", 128),
        ("qwen2.attention.layer_norm_rms_epsilon".to_owned(), Value::F32(1e-6)),
        ("qwen2.rope.freq_base".to_owned(), Value::F32(10000.0)),
    ];
    write_file(path, Header { metadata, tensors: infos });
}

/// Writes a gpt-oss whose experts are in blocks, those of a layer of other types than those of the next.
fn write_mixture(path: &Path) {
    use TensorType::*;
    const EXPERTS: u64 = 3;
    let mut infos = Vec::new();
    let mut add =
        |name: String, shape: &[u64], kind| infos.push(TensorInfo { name, shape: shape.to_vec(), kind });
    add("token_embd.weight".to_owned(), &[VOCABULARY, HIDDEN], Q8_0);
    add("output.weight".to_owned(), &[VOCABULARY, HIDDEN], Q6K);
    add("output_norm.weight".to_owned(), &[HIDDEN], F32);
    for (layer, [gate, up, down]) in [[Q4K, Q8_0, Q6K], [Q4_0, BF16, Q5_1]].into_iter().enumerate() {
        let mut part = |name: &str, shape: &[u64], kind| add(format!("blk.{layer}.{name}"), shape, kind);
        part("attn_norm.weight", &[HIDDEN], F32);
        part("post_attention_norm.weight", &[HIDDEN], F32);
        part("attn_sinks.weight", &[4], F32);
        for (name, rows) in
            [("attn_q", HIDDEN), ("attn_k", HIDDEN / 2), ("attn_v", HIDDEN / 2), ("attn_output", HIDDEN)]
        {
            part(&format!("{name}.weight"), &[rows, HIDDEN], Q4K);
            part(&format!("{name}.bias"), &[rows], F32);
        }
        part("ffn_gate_inp.weight", &[EXPERTS, HIDDEN], F32);
        part("ffn_gate_inp.bias", &[EXPERTS], F32);
        for (name, rows, columns, kind) in
            [("gate", WIDE, HIDDEN, gate), ("up", WIDE, HIDDEN, up), ("down", HIDDEN, WIDE, down)]
        {
            part(&format!("ffn_{name}_exps.weight"), &[EXPERTS, rows, columns], kind);
            part(&format!("ffn_{name}_exps.bias"), &[EXPERTS, rows], F32);
        }
    }
    let number = |key: &str, value: u32| (format!("gpt-oss.{key}"), Value::U32(value));
    let metadata = vec![
        ("general.architecture".to_owned(), Value::String("gpt-oss".to_owned())),
        number("embedding_length", HIDDEN as u32),
        number("block_count", 2),
        number("feed_forward_length", WIDE as u32),
        number("expert_feed_forward_length", WIDE as u32),
        number("expert_count", EXPERTS as u32),
        number("expert_used_count", 2),
        number("attention.head_count", 4),
        number("attention.head_count_kv", 2),
        number("attention.sliding_window", 5),
        number("context_length", 128),
        ("gpt-oss.attention.layer_norm_rms_epsilon".to_owned(), Value::F32(1e-5)),
        ("gpt-oss.rope.freq_base".to_owned(), Value::F32(10000.0)),
    ];
    write_file(path, Header { metadata, tensors: infos });
}

fn write_file(path: &Path, header: Header) {
    use TensorType::*;
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes, &header).unwrap();
    for (seed, info) in header.tensors.iter().enumerate() {
        let values = info.shape.iter().product::<u64>() as usize;
        let float = |at: usize| {
            ((at * 31 + seed * 7) % 97) as f32 / 970.0 + if info.name.contains("norm") { 1.0 } else { -0.05 }
        };
        let part = match info.kind {
            F32 | BF16 => {
                let mut bytes = Vec::new();
                info.kind.encode(&(0..values).map(float).collect::<Vec<_>>(), &mut bytes);
                bytes
            }
            kind => blocks(kind, values, seed as u32),
        };
        writer.write(&part).unwrap();
        writer.end_tensor().unwrap();
    }
    writer.finish().unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// The same model with all values in a floating dtype.
fn dense(file: &ModelFile, kind: Kind) -> Llama {
    let config: DecoderConfig =
        serde_json::from_value(serde_json::Value::Object(file.config().clone())).unwrap();
    let model = Llama::new(&config, (kind, Device::Cpu)).unwrap();
    let _no_grad = tch::no_grad_guard();
    for named in tensors(&model) {
        let source = file.tensor(&models::hugging_face::tensor_name(&named.name)).unwrap();
        let rows = if source.shape.len() == 1 { 1 } else { source.shape[0] };
        let mut values = Vec::new();
        file.rows(source, 0..rows, &mut values).unwrap();
        named.tensor.shallow_clone().copy_(&Tensor::from_slice(&values).view(&named.tensor.size()[..]));
    }
    model
}

#[test]
fn a_model_in_its_blocks_computes_what_the_dense_one_does() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    write(&path);
    let file = ModelFile::open(&path, ReadOptions::default()).unwrap();
    let model = stored_blocks::load(&file, Device::Cpu).unwrap();
    let exact = dense(&file, Kind::Float);

    // Every matrix of blocks is the file's bytes, and is counted as what it holds.
    let stored = tensors(&model);
    let quantized_ones = stored.iter().filter(|named| is_quantized(named.tensor)).count();
    assert_eq!(quantized_ones, 1 + 2 * 7 - 1);
    assert_eq!(parameter_count(&model).total, parameter_count(&exact).total);
    let bytes = stored_blocks::matrix_bytes(&file, 0).unwrap();
    for named in stored.iter().filter(|named| named.tensor.dim() > 1) {
        let (_, expected) = bytes.iter().find(|(name, _)| *name == named.name).unwrap();
        let elements = named.tensor.numel() * named.tensor.kind().elt_size_in_bytes();
        assert_eq!(elements as u64, *expected, "{}", named.name);
    }
    for (stored, dense) in stored.iter().zip(tensors(&exact)) {
        let values = match is_quantized(stored.tensor) {
            true => quantized::dequantize(stored.tensor, Kind::Float).unwrap(),
            false => stored.tensor.to_kind(Kind::Float),
        };
        let tolerance = if is_quantized(stored.tensor) { 0.0 } else { 4e-3 };
        assert!(values.allclose(dense.tensor, tolerance, 0.0, false), "{}", stored.name);
    }
    assert_eq!(first_non_finite(&model).unwrap(), None);

    // Logits as near to those in fp32 as a model in bf16 gives.
    let tokens = Tensor::from_slice(&(0..48i64).map(|at| at * 13 % VOCABULARY as i64).collect::<Vec<_>>())
        .view([2, 24]);
    let _no_grad = tch::no_grad_guard();
    let logits = |model: &Llama| model.logits(&Input::new(&tokens)).unwrap().to_kind(Kind::Float);
    let (expected, found) = (logits(&exact), logits(&model));
    let rounded = logits(&dense(&file, Kind::BFloat16));
    let distance = |x: &Tensor| (x - &expected).norm().double_value(&[]) / expected.norm().double_value(&[]);
    assert!(
        distance(&found) < 1.5 * distance(&rounded) + 1e-3,
        "{} {}",
        distance(&found),
        distance(&rounded)
    );

    // Text, by products of one row with blocks.
    let options = GenerationConfig { max_new_tokens: 12, ..GenerationConfig::default() };
    let text =
        |model: &Llama| generate(model, &[vec![3, 1, 4], vec![1, 5, 9, 2, 6]], &options, &mut ()).unwrap();
    for generated in text(&model) {
        assert_eq!(generated.tokens.len(), 12);
    }
    assert_eq!(text(&model)[0].tokens, text(&model)[0].tokens);
}

/// Experts keep the blocks of their part of a file's tensor.
#[test]
fn experts_in_their_blocks_compute_what_the_dense_ones_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    write_mixture(&path);
    let file = ModelFile::open(&path, ReadOptions::default()).unwrap();
    let model = stored_blocks::load(&file, Device::Cpu).unwrap();
    let exact = dense(&file, Kind::Float);
    let stored = tensors(&model);
    let of_experts = |named: &&models::module::NamedTensor<'_>| {
        named.name.contains(".experts.") && is_quantized(named.tensor)
    };
    assert_eq!(stored.iter().filter(of_experts).count(), 3 * (3 + 2));
    for (stored, dense) in stored.iter().zip(tensors(&exact)) {
        let values = match is_quantized(stored.tensor) {
            true => quantized::dequantize(stored.tensor, Kind::Float).unwrap(),
            false => stored.tensor.to_kind(Kind::Float),
        };
        let tolerance = if is_quantized(stored.tensor) { 0.0 } else { 4e-3 };
        assert!(values.allclose(dense.tensor, tolerance, 0.0, false), "{}", stored.name);
    }
    let tokens = Tensor::from_slice(&(0..48i64).map(|at| at * 13 % VOCABULARY as i64).collect::<Vec<_>>())
        .view([2, 24]);
    let _no_grad = tch::no_grad_guard();
    let logits = |model: &Llama| model.logits(&Input::new(&tokens)).unwrap().to_kind(Kind::Float);
    let (expected, found) = (logits(&exact), logits(&model));
    let rounded = logits(&dense(&file, Kind::BFloat16));
    let distance = |x: &Tensor| (x - &expected).norm().double_value(&[]) / expected.norm().double_value(&[]);
    let (found, rounded) = (distance(&found), distance(&rounded));
    // Rounding may give a token another expert, in either model.
    assert!(found < 2.0 * rounded + 1e-2, "{found} {rounded}");
    let options = GenerationConfig { max_new_tokens: 12, ..GenerationConfig::default() };
    let text = generate(&model, &[vec![3, 1, 4], vec![1, 5, 9, 2, 6]], &options, &mut ()).unwrap();
    assert!(text.iter().all(|row| row.tokens.len() == 12));
}

#[test]
fn what_cannot_be_kept_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    write(&path);
    let file = ModelFile::open(&path, ReadOptions::default()).unwrap();
    let error = stored_blocks::load(&file, Device::Cuda(0)).unwrap_err().to_string();
    assert!(error.contains("blocks are multiplied on a CPU only") && error.contains("tiny.gguf"), "{error}");
    let model = stored_blocks::load(&file, Device::Cpu).unwrap();
    let error =
        models::hugging_face::save(&model, &folder.path().join("saved"), 1 << 30).unwrap_err().to_string();
    assert!(error.contains("in the blocks of a GGUF file"), "{error}");
}
