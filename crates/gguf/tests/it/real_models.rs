//! Pretrained models, where `FRUGAL_MODELS` names a folder of them (`cargo xtask setup --models`).

use std::path::PathBuf;

use gguf::{ModelFile, ReadOptions};

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
