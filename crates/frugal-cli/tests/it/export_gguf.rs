//! `frugal export` to GGUF, GGUF-LoRA and Ollama: what is written, what is refused, and what llama.cpp computes from it.

use std::path::{Path, PathBuf};

use frugal::llama_cpp::{LlamaCpp, Request};
use gguf::{Reader, TensorType};
use models::tensors_file;
use serde_json::{Value, json};
use tch::{Device, Tensor};

use crate::tiny_folder::Tiny;

pub(crate) fn result(out: &str) -> Value {
    serde_json::from_str::<Value>(out).unwrap()["result"].clone()
}

/// llama.cpp, if a Python with it is here.
pub(crate) fn llama_cpp() -> Option<LlamaCpp> {
    LlamaCpp::find(None).map_err(|error| eprintln!("skipped: {error}")).ok()
}

/// A fixture of transformers with a tokenizer: bytes, and what fills its rows up.
fn fixture(tiny: &Tiny, name: &str) -> PathBuf {
    let fixtures = std::env::var_os("FRUGAL_FIXTURES").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures")),
        PathBuf::from,
    );
    let folder = tiny.path(name);
    std::fs::create_dir_all(folder.join("adapter")).unwrap();
    for file in [
        "config.json",
        "model.safetensors",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    ] {
        std::fs::copy(fixtures.join(name).join(file), folder.join(file)).unwrap();
    }
    write_tokenizer(&folder);
    folder
}

pub(crate) fn write_tokenizer(folder: &Path) {
    let mut alphabet: Vec<char> = ('!'..='~').chain('¡'..='¬').chain('®'..='ÿ').collect();
    alphabet.extend((0..256 - alphabet.len() as u32).map(|n| char::from_u32(256 + n).unwrap()));
    let special = ["<pad>", "<s>", "</s>"].map(str::to_owned);
    let texts = special.iter().cloned().chain(alphabet.iter().map(char::to_string));
    let vocab: serde_json::Map<String, Value> =
        texts.enumerate().map(|(id, text)| (text, id.into())).collect();
    let added: Vec<Value> = special
        .iter()
        .enumerate()
        .map(|(id, text)| {
            json!({
                "id": id, "content": text, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false
            })
        })
        .collect();
    let level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": added,
        "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []
        }
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

#[test]
fn fixtures_llama_cpp_computes_the_models_log_probabilities() {
    let Some(_) = llama_cpp() else { return };
    let tiny = Tiny::new();
    for name in ["llama", "qwen2"] {
        fixture(&tiny, name);
        let export = |rest: &str| {
            let (out, _) = tiny.succeed(&format!("export --model {name} --verify --overwrite --json {rest}"));
            let figure = result(&out)["verified"]["largest_difference"].as_f64().unwrap();
            eprintln!("{name}, {rest}: {figure:.1e}");
            figure
        };
        assert!(export("--format gguf --type f32 --out f32.gguf") <= 1e-5);
        assert!(export("--format gguf --type f16 --out f16.gguf") <= 1e-3);
        assert!(export("--format gguf --type q8_0 --out q8.gguf") <= 1e-2);
        for kind in ["q6_k", "q5_k_m", "q4_k_m", "q4_0"] {
            assert!(export(&format!("--format gguf --type {kind} --out {kind}.gguf")) <= 1e-2);
        }
        assert!(export(&format!("--format gguf-lora --adapter {name}/adapter --out lora.gguf")) <= 1e-5);
        assert!(
            export(&format!("--format gguf --type f32 --adapter {name}/adapter --out merged.gguf")) <= 1e-5
        );
        assert!(
            export(&format!("--format ollama --type f32 --adapter {name}/adapter --out {name}-ollama"))
                <= 1e-4
        );
    }
}

/// Rows of q and k in another order load silently; the comparison must tell them.
#[test]
fn fixtures_a_wrong_order_of_rows_is_told_by_llama_cpp() {
    let Some(llama_cpp) = llama_cpp() else { return };
    let tiny = Tiny::new();
    let folder = fixture(&tiny, "llama");
    tiny.succeed("export --model llama --format gguf --type f32 --out right.gguf");
    tiny.succeed("export --model llama --format gguf-lora --adapter llama/adapter --out right-lora.gguf");
    // Head by head of 8 rows: what conversion interleaves then has the order of Hugging Face.
    let undo = |file: &str| {
        let of = |(name, tensor): (String, Tensor)| {
            let is_turned =
                [".q_proj.", ".k_proj."].iter().any(|part| name.contains(part)) && !name.contains("lora_A");
            let turned =
                || tensor.view([-1, 4, 2, tensor.size()[1]]).transpose(1, 2).contiguous().view_as(&tensor);
            let new = if is_turned { turned() } else { tensor.shallow_clone() };
            (name, new)
        };
        let path = folder.join(file);
        let all = tensors_file::read(&path, Device::Cpu).unwrap();
        tensors_file::write(&path, &all.into_iter().map(of).collect::<Vec<_>>()).unwrap();
    };
    undo("adapter/adapter_model.safetensors");
    tiny.succeed("export --model llama --format gguf-lora --adapter llama/adapter --out wrong-lora.gguf");
    undo("model.safetensors");
    tiny.succeed("export --model llama --format gguf --type f32 --out wrong.gguf");
    assert_eq!(Reader::open(&tiny.path("wrong.gguf")).unwrap().header().tensors[0].kind, TensorType::F32);

    let prompts = [(10..60).collect::<Vec<u32>>()];
    let of = |model: &str, lora: Option<&str>| {
        let (model, lora) = (tiny.path(model), lora.map(|lora| tiny.path(lora)));
        let request = Request {
            model: &model,
            lora: lora.as_deref(),
            prompts: &prompts,
            texts: &[],
            forced: 40,
            vocabulary: 500,
            threads: 1,
        };
        llama_cpp.compute(&request).unwrap().log_probabilities.remove(0)
    };
    let differ =
        |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
    let (right, adapted) = (of("right.gguf", None), of("right.gguf", Some("right-lora.gguf")));
    let figures = [
        differ(&right, &of("wrong.gguf", None)),
        differ(&adapted, &of("right.gguf", Some("wrong-lora.gguf"))),
    ];
    eprintln!("wrong rows of the model and of the adapter: {:.1e} and {:.1e}", figures[0], figures[1]);
    assert!(figures.iter().all(|figure| *figure > 2e-3), "{figures:?}");
}
