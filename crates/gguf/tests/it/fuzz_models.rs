//! Randomly changed files of models: each is refused by name, or read as a model whose configuration, tensors and tokenizer agree.
//!
//! The header is changed as a whole (keys, values, arrays, tensors), so that the changes reach what the container's own checks let pass,
//! and the bytes of the file as [`fuzz::bytes`] does.

use std::fs;
use std::path::Path;

use decoder::DecoderConfig;
use gguf::{Array, FileType, Header, Model, ModelFile, ReadOptions, Reader, TensorInfo, TensorType, Value};
use serde_json::Value as Json;
use testing::fuzz::{self, Outcome, Random};

use crate::tiny_model::{Tiny, families, written};
use crate::tokenizer::sentencepiece;

/// The bytes of a header, valid or not, for tensors that begin at `offsets` of the data.
fn encode(header: &Header, offsets: &[u64]) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((header.tensors.len() as u64).to_le_bytes());
    out.extend((header.metadata.len() as u64).to_le_bytes());
    for (key, value) in &header.metadata {
        text(&mut out, key);
        encode_value(&mut out, value);
    }
    for (tensor, offset) in header.tensors.iter().zip(offsets) {
        text(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|size| out.extend(size.to_le_bytes()));
        out.extend(tensor.kind.number().to_le_bytes());
        out.extend(offset.to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(32), 0);
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The number of a type, and a value's bytes, as numbers of `$method`.
macro_rules! encoded {
    ($out:ident, $value:expr, $($number:literal $variant:ident),*) => {
        match $value {
            Value::Bool(x) => $out.extend([7, 0, 0, 0, u8::from(*x)]),
            Value::String(x) => {
                $out.extend(8u32.to_le_bytes());
                text($out, x);
            }
            Value::Array(Array::Bool(all)) => {
                $out.extend([9u32.to_le_bytes(), 7u32.to_le_bytes()].concat());
                $out.extend((all.len() as u64).to_le_bytes());
                all.iter().for_each(|x| $out.push(u8::from(*x)));
            }
            Value::Array(Array::String(all)) => {
                $out.extend([9u32.to_le_bytes(), 8u32.to_le_bytes()].concat());
                $out.extend((all.len() as u64).to_le_bytes());
                all.iter().for_each(|x| text($out, x));
            }
            $(
                Value::$variant(x) => {
                    $out.extend(($number as u32).to_le_bytes());
                    $out.extend(x.to_le_bytes());
                }
                Value::Array(Array::$variant(all)) => {
                    $out.extend([9u32.to_le_bytes(), ($number as u32).to_le_bytes()].concat());
                    $out.extend((all.len() as u64).to_le_bytes());
                    all.iter().for_each(|x| $out.extend(x.to_le_bytes()));
                }
            )*
        }
    };
}

fn encode_value(out: &mut Vec<u8>, value: &Value) {
    encoded!(out, value, 0 U8, 1 I8, 2 U16, 3 I16, 4 U32, 5 I32, 6 F32, 10 U64, 11 I64, 12 F64);
}

/// Values that no key has, and texts that other keys have.
fn strange(random: &mut Random) -> Value {
    let texts = [
        "",
        "llama",
        "gpt2",
        "t5",
        "qwen2",
        "gemma3",
        "default",
        "smollm",
        "yarn",
        "linear",
        "\u{10ffff}",
        "<s>",
    ];
    match random.below(16) {
        0 => Value::U32(0),
        1 => Value::U32(1),
        2 => Value::U32(u32::MAX),
        3 => Value::U64(1 << random.below(64)),
        4 => Value::I32(-1),
        5 => Value::I64(i64::MIN),
        6 => Value::F32(f32::NAN),
        7 => Value::F32(f32::INFINITY),
        8 => Value::F64(1e300),
        9 => Value::Bool(random.once_in(2)),
        10 => Value::Array(Array::U32(vec![random.bits() as u32; random.below(4)])),
        11 => Value::Array(Array::String(vec!["a".to_owned(); random.below(4)])),
        12 => Value::Array(Array::F32(vec![f32::NAN; random.below(300)])),
        13 => Value::U32(random.below(300) as u32),
        _ => texts[random.below(texts.len())].into(),
    }
}

fn change_list<T: Clone>(random: &mut Random, all: &mut Vec<T>, new: T) {
    let (at, other) = (random.below(all.len()), random.below(all.len()));
    match random.below(6) {
        _ if all.is_empty() => all.push(new),
        0 => all.truncate(at),
        1 => drop(all.remove(at)),
        2 => all[at] = all[other].clone(),
        3 => all.swap(at, other),
        4 => all.insert(at, new),
        _ => all[at] = new,
    }
}

fn change_value(random: &mut Random, value: &mut Value) {
    let text =
        ["", " ", "\u{2581}a", "a b", "<0x41>", "<0xZZ>", "[PAD7]", "ab", "\u{120}\u{120}"][random.below(9)];
    match value {
        Value::Array(Array::String(all)) => change_list(random, all, text.to_owned()),
        Value::Array(Array::I32(all)) => {
            let new = [-1, 0, 1, 2, 3, 4, 5, 6, i32::MAX][random.below(9)];
            change_list(random, all, new);
        }
        Value::Array(Array::F32(all)) => {
            let new = [f32::NAN, f32::NEG_INFINITY, 0.0, -1e30][random.below(4)];
            change_list(random, all, new);
        }
        other => *other = strange(random),
    }
}

/// Makes one to three changes to a header and to where its tensors begin.
fn change(random: &mut Random, header: &mut Header, offsets: &mut Vec<u64>) {
    for _ in 0..=random.below(3) {
        let (key, at) = (random.below(header.metadata.len()), random.below(header.tensors.len()));
        if header.tensors.is_empty() || header.metadata.is_empty() {
            return;
        }
        let other = random.below(header.tensors.len());
        let size = [0, 1, 3, 1 << 31, 1 << 40, 1 << 62, u64::MAX][random.below(7)];
        match random.below(16) {
            0 => drop(header.metadata.remove(key)),
            1 => header.metadata.push((header.metadata[key].0.clone(), strange(random))),
            2 => header.metadata[key].1 = strange(random),
            3..=7 => change_value(random, &mut header.metadata[key].1),
            8 => {
                header.tensors.remove(at);
                offsets.remove(at);
            }
            9 => header.tensors[at].name = header.tensors[other].name.clone(),
            10 => {
                header.tensors[at].name =
                    ["output.weight", "rope_freqs.weight", "", "x"][random.below(4)].to_owned()
            }
            11 => header.tensors[at].shape.reverse(),
            12 => change_list(random, &mut header.tensors[at].shape, size),
            13 => header.tensors[at].kind = TensorType::ALL[random.below(TensorType::ALL.len())],
            14 => offsets[at] = [offsets[other], size, offsets[at] + 1][random.below(3)],
            _ => {
                let tensor = TensorInfo { name: "output.weight".to_owned(), ..header.tensors[at].clone() };
                header.tensors.push(tensor);
                offsets.push(offsets[at]);
            }
        }
    }
}

/// A model's header, where its tensors begin, and their data.
struct Good {
    header: Header,
    offsets: Vec<u64>,
    data: Vec<u8>,
}

impl Good {
    fn of(tiny: &Tiny) -> Self {
        let path = tiny.path("good.gguf");
        let file = written(&Model::open(tiny.folder.path()).unwrap().convert(FileType::Q8_0).unwrap(), &path);
        let (mut offsets, mut data) = (Vec::new(), Vec::new());
        for (position, tensor) in file.header().tensors.iter().enumerate() {
            let rows = tensor.shape[..tensor.shape.len() - 1].iter().product();
            offsets.push(data.len() as u64);
            data.extend_from_slice(file.raw(position, 0..rows).unwrap());
            data.resize(data.len().next_multiple_of(32), 0);
        }
        Self { header: file.header().clone(), offsets, data }
    }
}

/// Reads everything of a model; returns whether it was refused.
///
/// # Panics
/// What is read contradicts itself.
fn read(path: &Path, options: ReadOptions) -> Outcome {
    let Ok(model) = ModelFile::open(path, options) else { return Outcome::Refused };
    let config: DecoderConfig = serde_json::from_value(Json::Object(model.config().clone())).unwrap();
    let numel = |shape: &[u64]| shape.iter().product::<u64>();
    let numbers: u64 = model.tensors().iter().map(|tensor| numel(&tensor.shape)).sum();
    assert_eq!(numbers, config.parameter_count());
    let mut values = Vec::new();
    for tensor in model.tensors() {
        let rows = if tensor.shape.len() == 1 { 1 } else { tensor.shape[0] };
        values.clear();
        model.rows(tensor, 0..rows, &mut values).unwrap();
        assert_eq!(values.len() as u64, numel(&tensor.shape), "{}", tensor.name);
        assert!(model.rows(tensor, rows..rows + 1, &mut values).is_err(), "{}", tensor.name);
        let _blocks = model.blocks(tensor, 0..rows).unwrap();
    }
    let Ok(files) = model.companion_files() else { return Outcome::Refused };
    for (name, text) in files.iter().filter(|(name, _)| name.ends_with(".json")) {
        let fields: Json = serde_json::from_str(text).unwrap();
        if *name != "tokenizer.json" {
            continue;
        }
        // What it reads has tokens of the model's vocabulary alone.
        if let Ok(tokenizer) = text.parse::<tokenizers::Tokenizer>()
            && let Ok(encoded) = tokenizer.encode("a b\u{e9}  <s> 12", true)
        {
            let rows = config.vocab_size.unsigned_abs();
            assert!(encoded.get_ids().iter().all(|id| u64::from(*id) < rows), "{fields}");
        }
    }
    Outcome::Read
}

#[test]
fn models() {
    let mut all: Vec<Good> = families().iter().map(|(family, _)| Good::of(&Tiny::of(family))).collect();
    let tiny = Tiny::of("llama");
    tiny.write("tokenizer.json", &sentencepiece().to_string());
    all.push(Good::of(&tiny));
    let folder = super::fuzz_files::scratch();
    let path = folder.path().join("x.gguf");
    fuzz::run("GGUF models", |random| {
        let good = &all[random.below(all.len())];
        let (mut header, mut offsets) = (good.header.clone(), good.offsets.clone());
        if !random.once_in(4) {
            change(random, &mut header, &mut offsets);
        }
        let mut bytes = encode(&header, &offsets);
        let start = bytes.len();
        bytes.extend(&good.data);
        match random.below(4) {
            0 => bytes = [fuzz::bytes(random, &bytes[..start]), good.data.clone()].concat(),
            1 => bytes = fuzz::bytes(random, &bytes),
            _ => {}
        }
        fs::write(&path, &bytes).unwrap();
        let options = ReadOptions { untied: random.once_in(2) };
        fuzz::within(64 * bytes.len() + (1 << 20), || read(&path, options))
    });
}

/// The file that is changed is the one that the writer writes.
#[test]
fn an_unchanged_header_is_read_as_the_written_one() {
    let tiny = Tiny::of("gemma3_text");
    let good = Good::of(&tiny);
    let path = tiny.path("again.gguf");
    fs::write(&path, [encode(&good.header, &good.offsets), good.data.clone()].concat()).unwrap();
    assert_eq!(Reader::open(&path).unwrap().header(), &good.header);
    assert_eq!(read(&path, ReadOptions::default()), Outcome::Read);
}
