//! The heap while a conversion is written and checked: a few parts, whatever the tensors' sizes.

use std::fs::File;
use std::io::{BufWriter, Write};

use gguf::{FileType, Model};
use serde_json::{Value, json};

use crate::tiny_model::{HIDDEN, Tiny, write_tensors};

/// The embedding alone has 32 MiB; parts are of one, in fp32, encoded, and interleaved.
#[test]
fn no_tensor_is_whole_in_memory() {
    const VOCABULARY: u64 = 131_072;
    let tiny = Tiny::with("llama", json!({ "vocab_size": VOCABULARY, "tie_word_embeddings": true }));
    let bytes = std::fs::read(tiny.path("model.safetensors")).unwrap();
    let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + size]).unwrap();
    let shape = |name: &str, entry: &Value| match name {
        "model.embed_tokens.weight" => vec![VOCABULARY, HIDDEN],
        _ => serde_json::from_value(entry["shape"].clone()).unwrap(),
    };
    let tensors: Vec<(String, Vec<u64>)> =
        header.as_object().unwrap().iter().map(|(name, entry)| (name.clone(), shape(name, entry))).collect();
    write_tensors(&tiny.path("model.safetensors"), &tensors);
    drop(bytes);
    let model = Model::open(tiny.folder.path()).unwrap();
    let path = tiny.path("out.gguf");
    for kind in [FileType::F32, FileType::Q8_0, FileType::Q4KM] {
        let conversion = model.convert(kind).unwrap();
        assert!(conversion.bytes() > 8 << 20);
        testing::fuzz::within(28 << 20, || {
            let mut out = BufWriter::new(File::create(&path).unwrap());
            conversion.write(&mut out).unwrap();
            out.flush().unwrap();
        });
        testing::fuzz::within(48 << 20, || conversion.check(&path).unwrap());
    }
}
