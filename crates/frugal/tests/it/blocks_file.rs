//! Files with random models whose matrices are in blocks.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use frugal::models::hugging_face::Folder;
use gguf::{Array, Header, ReadOptions, Reader, TensorInfo, TensorType, Value, Writer};

/// A model whose matrices have a type each.
pub(crate) struct Shape {
    pub(crate) architecture: &'static str,
    pub(crate) vocabulary: u64,
    pub(crate) hidden: u64,
    pub(crate) inner: u64,
    pub(crate) layers: usize,
    pub(crate) embedding: TensorType,
    /// Of an output matrix of its own.
    pub(crate) output: Option<TensorType>,
}

/// The types of the matrices, in turn.
const TYPES: [TensorType; 9] = {
    use TensorType::*;
    [Q4K, Q5_0, Q6K, Q4_1, Q8_0, Q5K, BF16, Q5_1, Q4_0]
};

impl Shape {
    fn tensors(&self) -> Vec<TensorInfo> {
        let &Self { vocabulary, hidden, inner, layers, embedding, output, .. } = self;
        let mut infos = Vec::new();
        let mut add = |name: &str, shape: &[u64], kind| {
            infos.push(TensorInfo { name: name.to_owned(), shape: shape.to_vec(), kind })
        };
        add("token_embd.weight", &[vocabulary, hidden], embedding);
        add("output_norm.weight", &[hidden], TensorType::F32);
        if let Some(kind) = output {
            add("output.weight", &[vocabulary, hidden], kind);
        }
        let mut types = TYPES.into_iter().cycle();
        for layer in 0..layers {
            for (name, shape) in [
                ("attn_q", [hidden, hidden]),
                ("attn_k", [hidden / 2, hidden]),
                ("attn_v", [hidden / 2, hidden]),
                ("attn_output", [hidden, hidden]),
                ("ffn_gate", [inner, hidden]),
                ("ffn_up", [inner, hidden]),
                ("ffn_down", [hidden, inner]),
            ] {
                add(&format!("blk.{layer}.{name}.weight"), &shape, types.next().unwrap());
            }
            let biases: &[_] = match self.architecture {
                "qwen2" => &[("attn_q", hidden), ("attn_k", hidden / 2), ("attn_v", hidden / 2)],
                _ => &[],
            };
            for (name, width) in biases {
                add(&format!("blk.{layer}.{name}.bias"), &[*width], TensorType::F32);
            }
            for name in ["attn_norm", "ffn_norm"] {
                add(&format!("blk.{layer}.{name}.weight"), &[hidden], TensorType::F32);
            }
        }
        infos
    }

    /// The sizes, and the tokenizer of the tiny model in the tree with further tokens.
    fn metadata(&self) -> Vec<(String, Value)> {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fixtures/gguf_merge/base.gguf");
        let tiny = Reader::open(&tiny).unwrap();
        let architecture = self.architecture;
        let number = |key: &str, value: u64| (format!("{architecture}.{key}"), Value::U32(value as u32));
        let mut metadata = vec![
            ("general.architecture".to_owned(), Value::String(architecture.to_owned())),
            number("embedding_length", self.hidden),
            number("block_count", self.layers as u64),
            number("feed_forward_length", self.inner),
            number("attention.head_count", 4),
            number("attention.head_count_kv", 2),
            number("context_length", 256),
            number("vocab_size", self.vocabulary),
            number("rope.dimension_count", self.hidden / 4),
            (format!("{architecture}.attention.layer_norm_rms_epsilon"), Value::F32(1e-6)),
            (format!("{architecture}.rope.freq_base"), Value::F32(10000.0)),
        ];
        for (key, value) in tiny.header().metadata.iter().filter(|(key, _)| key.starts_with("tokenizer.")) {
            let value = match value.clone() {
                Value::Array(Array::String(mut tokens)) if key.ends_with(".tokens") => {
                    tokens.extend((tokens.len() as u64..self.vocabulary).map(|id| format!("<{id}>")));
                    Value::Array(Array::String(tokens))
                }
                Value::Array(Array::I32(mut types)) if key.ends_with(".token_type") => {
                    types.resize(self.vocabulary as usize, 1);
                    Value::Array(Array::I32(types))
                }
                value => value,
            };
            metadata.push((key.clone(), value));
        }
        metadata
    }

    /// Writes the model with values of the size of an initialisation's.
    fn write(&self, path: &Path) {
        let header = Header { metadata: self.metadata(), tensors: self.tensors() };
        let mut file = BufWriter::new(File::create(path).unwrap());
        let mut writer = Writer::new(&mut file, &header).unwrap();
        for (seed, info) in header.tensors.iter().enumerate() {
            let is_norm = info.name.contains("norm");
            let value = |at: u32| {
                let mixed = (at ^ (seed as u32) << 24).wrapping_mul(2_654_435_761).rotate_left(13) % 1001;
                (mixed as f32 / 1000.0 - 0.5) / 8.0 + if is_norm { 1.0 } else { 0.0 }
            };
            let count = info.shape.iter().product::<u64>() as u32;
            let mut bytes = Vec::new();
            info.kind.encode(&(0..count).map(value).collect::<Vec<f32>>(), &mut bytes);
            writer.write(&bytes).unwrap();
            writer.end_tensor().unwrap();
        }
        writer.finish().unwrap();
        file.flush().unwrap();
    }

    /// Opens the model, whose file is written into the folder.
    pub(crate) fn open(&self, scratch: &Path) -> Folder {
        let file = scratch.join("blocks.gguf");
        self.write(&file);
        let folder = gguf::folder::make(&file, ReadOptions::default(), scratch).unwrap();
        Folder::open(&folder).unwrap()
    }
}
