//! Pretrained models, where `FRUGAL_MODELS` names a folder of them (`cargo xtask setup --models`). `data/real_models` has what other
//! programs read from them (`xtask/peers/gguf_models.py`).

use std::io::{BufWriter, Write};
use std::path::PathBuf;

use gguf::{FileType, Model, ModelFile, ReadOptions, Reader};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The numbers of parameters of models by their files.
const PARAMETERS: [(&str, u64); 3] = [
    ("SmolLM2-135M-Instruct.Q4_1.gguf", 134_515_008),
    ("gemma-3-270m-q4_k_m.gguf", 268_098_176),
    ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", 494_032_768),
];

#[allow(clippy::print_stderr, reason = "output of a test")]
fn file(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("FRUGAL_MODELS").map(|folder| PathBuf::from(folder).join(name));
    let path = path.filter(|path| path.is_file());
    if path.is_none() {
        eprintln!("skipped: no {name} in FRUGAL_MODELS");
    }
    path
}

#[test]
fn pretrained_models_have_their_published_parameters_and_tokenizers() {
    for (name, parameters) in PARAMETERS {
        let Some(path) = file(name) else { continue };
        let model = ModelFile::open(&path, ReadOptions::default()).unwrap();
        let count: u64 = model.tensors().iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum();
        assert_eq!(count, parameters, "{name}");
        let files = model.companion_files().unwrap();
        if let Some(out) = std::env::var_os("FRUGAL_TOKENIZERS_OUT") {
            let out = PathBuf::from(out).join(name);
            std::fs::create_dir_all(&out).unwrap();
            std::fs::write(out.join("config.json"), serde_json::to_string(model.config()).unwrap()).unwrap();
            files.iter().for_each(|(file, text)| std::fs::write(out.join(file), text).unwrap());
        }
        let text = &files.iter().find(|(file, _)| *file == "tokenizer.json").unwrap().1;
        let tokenizer: tokenizers::Tokenizer = text.parse().unwrap();
        let encoded = tokenizer.encode("Hello  world 123\n\n你好 🦙", false).unwrap();
        let back = tokenizer.decode(encoded.get_ids(), false).unwrap();
        assert_eq!(back, "Hello  world 123\n\n你好 🦙", "{name}");
        for added in tokenizer.get_added_tokens_decoder() {
            assert_eq!(tokenizer.token_to_id(&added.1.content), Some(added.0), "{name}");
        }
    }
}

/// What other programs read, by the file.
const EXPECTED: [(&str, &str); 3] = [
    ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2"),
    ("gemma-3-270m-q4_k_m.gguf", "gemma3"),
    ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5"),
];

fn expected(name: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/real_models");
    std::fs::read_to_string(PathBuf::from(path).join(name)).unwrap()
}

#[test]
fn every_tensor_has_the_bits_that_the_python_package_gguf_decodes() {
    for (name, expected_name) in EXPECTED {
        let Some(path) = file(name) else { continue };
        let file = Reader::open(&path).unwrap();
        let lines = expected(&format!("{expected_name}.tensors.txt"));
        assert_eq!(lines.lines().count(), file.header().tensors.len(), "{name}");
        for line in lines.lines() {
            let [tensor, kind, digest] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let position = file.position(tensor).unwrap();
            let info = &file.header().tensors[position];
            assert_eq!(info.kind.to_string().to_uppercase(), kind, "{name}: {tensor}");
            let rows: u64 = info.shape[..info.shape.len() - 1].iter().product();
            let mut sha256 = Sha256::new();
            for start in (0..rows).step_by(1024) {
                let values = file.rows(position, start..rows.min(start + 1024)).unwrap();
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                sha256.update(&bytes);
            }
            let ours: String = sha256.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(ours, digest, "{name}: {tensor}");
            file.forget(position).unwrap();
        }
    }
}

#[test]
fn hard_texts_have_the_tokens_of_the_published_tokenizers_and_of_llama_cpp() {
    for (name, expected_name) in EXPECTED {
        let Some(path) = file(name) else { continue };
        let model = ModelFile::open(&path, ReadOptions::default()).unwrap();
        let files = model.companion_files().unwrap();
        let text = &files.iter().find(|(file, _)| *file == "tokenizer.json").unwrap().1;
        let tokenizer: tokenizers::Tokenizer = text.parse().unwrap();
        let all: Value = serde_json::from_str(&expected(&format!("{expected_name}.json"))).unwrap();
        let ids = |value: &Value| -> Vec<u64> {
            value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
        };
        let mut other = Vec::new();
        for entry in all["texts"].as_array().unwrap() {
            let text = entry["text"].as_str().unwrap();
            let of = |special: bool| -> Vec<u64> {
                let encoded = tokenizer.encode(text, special).unwrap();
                encoded.get_ids().iter().map(|id| u64::from(*id)).collect()
            };
            if of(false) != ids(&entry["ids"]) {
                other.push(format!("{text:?}: {:?} instead of {}", of(false), entry["ids"]));
            }
            // A model with a begin token has it once.
            assert_eq!(of(true), [ids(&all["begin"]), of(false)].concat(), "{name}: {text:?}");
        }
        assert!(other.is_empty(), "{name}:\n{}", other.join("\n"));
    }
}

/// For each type of file, SHA-256 over all tensors in the order of their names: name, type and bytes.
const QUANTISED: [(&str, FileType, &str); 8] = [
    (EXPECTED[0].0, FileType::Q4KM, "c7ebddb6c3e0de2cdbdd62d2bc7467728b12a2ea48cd9e449b6191f69945dc0c"),
    (EXPECTED[0].0, FileType::Q5KM, "f97f3d480a12912f378f36ddeb0c5149059c82a811e3e12d334368916d25edd2"),
    (EXPECTED[0].0, FileType::Q6K, "c53d4b53c522ff0cc183bdb54af8fb96b94f93e1875116574115787fc8bd59d2"),
    (EXPECTED[0].0, FileType::Q8_0, "eefe69989d3602ed411af4b69de3626f17f8bb3008d9158b76409bce9906103c"),
    (EXPECTED[2].0, FileType::Q4KM, "b5fcce62dee8b206fa1aa91d063713452cd6deffec02df63d0a147c5c238d51d"),
    (EXPECTED[2].0, FileType::Q5KM, "4d759088a63c8839650ba551281377e4e445720be4311f483665d81f92aae495"),
    (EXPECTED[2].0, FileType::Q6K, "19985c4c38b936ab49fb1e500818df5a61f5414a95e8c4de399f520d79e791c7"),
    (EXPECTED[2].0, FileType::Q8_0, "0b8593dc33150dff1c6055e83bf7a5249fb7a8294ead7fbccf492fcc0681e4cf"),
];

/// A file that is quantised again has the tensors, the types and the bytes of llama.cpp's `llama_model_quantize` on the same values
/// (`xtask/peers/gguf_quantize.py`), so its perplexity is that of llama.cpp's file.
#[test]
fn files_that_are_quantised_again_have_the_bytes_of_llama_cpps_quantiser() {
    let mut other = Vec::new();
    for (name, kind, expected) in QUANTISED {
        let Some(path) = file(name) else { continue };
        let scratch = tempfile::tempdir().unwrap();
        let folder = gguf::folder::make(&path, ReadOptions::default(), scratch.path()).unwrap();
        let out = scratch.path().join("out.gguf");
        let mut writer = BufWriter::new(std::fs::File::create(&out).unwrap());
        Model::open(&folder).unwrap().convert(kind).unwrap().write(&mut writer).unwrap();
        writer.flush().unwrap();
        let written = Reader::open(&out).unwrap();
        let mut tensors: Vec<_> = written.header().tensors.iter().enumerate().collect();
        tensors.sort_by(|(_, one), (_, other)| one.name.cmp(&other.name));
        let mut sha256 = Sha256::new();
        for (position, tensor) in tensors {
            sha256.update(format!("{} {}\n", tensor.name, tensor.kind.to_string().to_uppercase()));
            let rows = tensor.shape[..tensor.shape.len() - 1].iter().product();
            sha256.update(written.raw(position, 0..rows).unwrap());
        }
        let ours: String = sha256.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if ours != expected {
            other.push(format!("{name} as {kind}: {ours}"));
            if let Some(kept) = std::env::var_os("FRUGAL_QUANTISED_OUT") {
                std::fs::copy(&out, PathBuf::from(kept).join(format!("{kind}-{name}"))).unwrap();
            }
        }
    }
    assert!(other.is_empty(), "{}", other.join("\n"));
}
