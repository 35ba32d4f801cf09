//! Randomly mutated files: each is refused, or read as it says, within memory proportional to its size.

use std::fs;
use std::path::Path;

use gguf::{Adapter, Array, Header, Reader, TensorInfo, TensorType, Value, Writer};
use serde_json::json;
use testing::fuzz::{self, Outcome};

use crate::tiny_model::{Tiny, write_tensors};

/// A folder in memory if possible: files are written tens of thousands of times.
pub(crate) fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

#[test]
fn gguf_files() {
    let header = Header {
        metadata: vec![
            ("general.architecture".to_owned(), "llama".into()),
            ("llama.block_count".to_owned(), Value::U32(1)),
            (
                "tokenizer.ggml.tokens".to_owned(),
                Value::Array(Array::String(vec!["a".to_owned(), "bc".to_owned()])),
            ),
            ("tokenizer.ggml.scores".to_owned(), Value::Array(Array::F32(vec![0.5, 1.0, 2.0]))),
        ],
        tensors: vec![
            TensorInfo { name: "x".to_owned(), shape: vec![2, 32], kind: TensorType::Q8_0 },
            TensorInfo { name: "y".to_owned(), shape: vec![3], kind: TensorType::F32 },
        ],
    };
    let mut good = Vec::new();
    let mut writer = Writer::new(&mut good, &header).unwrap();
    for bytes in [&[7u8; 68][..], &[0; 12]] {
        writer.write(bytes).unwrap();
        writer.end_tensor().unwrap();
    }
    let folder = scratch();
    let path = folder.path().join("x.gguf");
    fuzz::run("gguf", |random| {
        let bytes = fuzz::bytes(random, &good);
        fs::write(&path, &bytes).unwrap();
        let read = fuzz::within(64 * bytes.len() + (1 << 16), || {
            let file = Reader::open(&path)?;
            for (place, tensor) in file.header().tensors.iter().enumerate() {
                let rows = tensor.shape[..tensor.shape.len() - 1].iter().product();
                let values = file.rows(place, 0..rows)?;
                assert_eq!(values.len() as u64, tensor.shape.iter().product::<u64>());
            }
            Ok::<_, gguf::Error>(file.header().clone())
        });
        let Ok(header) = read else { return Outcome::Refused };
        // What was read can be written, and is the same again. The alignment may differ.
        let mut again = Vec::new();
        let written = Writer::new(&mut again, &header).map(drop);
        assert!(written.is_ok() || header.tensors.iter().any(|tensor| tensor.name.len() > 63), "{written:?}");
        Outcome::Read
    });
}

/// `config.json`, `adapter_config.json` and the adapter's tensors.
#[test]
fn adapters() {
    let tiny = Tiny::of("llama");
    let folder = scratch();
    let base = folder.path().join("base");
    fs::create_dir(&base).unwrap();
    let config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(tiny.path("config.json")).unwrap()).unwrap();
    let own = json!({ "peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "bias": "none", "use_dora": false, "modules_to_save": [] });
    let name = |half: &str| format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight");
    let weights = folder.path().join("adapter_model.safetensors");
    write_tensors(&weights, &[(name("A"), vec![2, 64]), (name("B"), vec![64, 2])]);
    let good = fs::read(&weights).unwrap();
    fuzz::run("adapter for GGUF", |random| {
        let part = random.below(3);
        let text = if part == 0 { fuzz::json(random, &config) } else { config.to_string() };
        fs::write(base.join("config.json"), &text).unwrap();
        let adapter = if part == 1 { fuzz::json(random, &own) } else { own.to_string() };
        fs::write(folder.path().join("adapter_config.json"), &adapter).unwrap();
        let bytes = if part == 2 { fuzz::safetensors(random, &good) } else { good.clone() };
        fs::write(&weights, &bytes).unwrap();
        let allowed = 400 * (text.len() + adapter.len() + bytes.len()) + (1 << 16);
        let read = fuzz::within(allowed, || {
            let adapter = Adapter::open(folder.path(), &base)?;
            let conversion = adapter.convert(&|_, rank| Ok(2.0 / rank as f64))?;
            let mut out = Vec::new();
            conversion.write(&mut out)?;
            Ok::<_, gguf::Error>(out)
        });
        let Ok(written) = read else { return Outcome::Refused };
        assert!(written.len() >= 4 * 64 * 4);
        Outcome::Read
    });
}
