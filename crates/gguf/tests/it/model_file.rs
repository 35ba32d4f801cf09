//! GGUF files read as models of Hugging Face: configurations, names, the order of rows, what is tied again, and what is refused.

use std::fs;
use std::path::{Path, PathBuf};

use decoder::DecoderConfig;
use expect_test::{Expect, expect};
use gguf::{FileType, Header, Model, ModelFile, ReadOptions, TensorInfo, TensorType, Value, Writer};
use serde_json::{Value as Json, json};

use crate::tiny_model::{HEAD, Tiny, families, value, written};

/// Writes a model as `out.gguf`.
fn exported(tiny: &Tiny, kind: FileType) -> PathBuf {
    let path = tiny.path("out.gguf");
    written(&Model::open(tiny.folder.path()).unwrap().convert(kind).unwrap(), &path);
    path
}

fn open(path: &Path) -> gguf::Result<ModelFile> {
    ModelFile::open(path, ReadOptions::default())
}

fn all(model: &ModelFile, name: &str) -> Vec<f32> {
    let tensor = model.tensor(name).unwrap_or_else(|| panic!("no {name}"));
    let rows = if tensor.shape.len() == 1 { 1 } else { tensor.shape[0] };
    let mut values = Vec::new();
    // In two parts, which must make no difference.
    model.rows(tensor, 0..rows / 2, &mut values).unwrap();
    model.rows(tensor, rows / 2..rows, &mut values).unwrap();
    values
}

/// The options of a configuration without tokens and the like.
fn options(config: Json) -> DecoderConfig {
    let config: DecoderConfig = serde_json::from_value(config).unwrap();
    DecoderConfig { other_fields: Default::default(), ..config }
}

/// Families with further options, and what differs from the original where llama.cpp has one name for two families.
fn cases() -> Vec<(&'static str, Json)> {
    let llama3 = |factor: f64, high: f64, original: u32| {
        json!({ "rope_theta": 10_000.0, "rope_scaling": {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
            "original_max_position_embeddings": original
        } })
    };
    let factors: Vec<f64> = (0..HEAD / 2).map(|pair| 1.0 + pair as f64 / 8.0).collect();
    let mut cases = families();
    cases.retain(|(family, _)| *family != "llama");
    cases.extend([
        ("llama", json!({ "attention_bias": false })),
        ("llama", llama3(32.0, 4.0, 8192)),
        ("llama", llama3(8.0, 40.0, 2048)),
        ("qwen3", json!({ "head_dim": HEAD, "rope_scaling": { "rope_type": "linear", "factor": 4.0 } })),
        (
            "phi3",
            json!({
                "sliding_window": 64, "original_max_position_embeddings": 128,
                "rope_scaling": { "type": "longrope", "long_factor": factors, "short_factor": factors }
            }),
        ),
    ]);
    cases
}

#[test]
fn every_family_is_read_as_it_was_written() {
    for (family, own) in cases() {
        let tiny = Tiny::with(family, own.clone());
        if family == "llama" {
            tiny.without(".bias");
        }
        let mut original: Json =
            serde_json::from_slice(&fs::read(tiny.path("config.json")).unwrap()).unwrap();
        let tensors = tiny.tensors();
        if family == "mistral" {
            original["model_type"] = "llama".into();
        }
        let model = open(&exported(&tiny, FileType::F32)).unwrap();
        let read = options(Json::Object(model.config().clone()));
        assert_eq!(read, options(original), "{family} {own}");
        assert_eq!(model.tensors().len(), tensors.len(), "{family}");
        for (seed, (name, shape)) in tensors.iter().enumerate() {
            let numel: u64 = shape.iter().product();
            let meant: Vec<f32> = (0..numel).map(|at| value(seed, at)).collect();
            assert_eq!(model.tensor(name).unwrap().shape, *shape);
            let found = all(&model, name);
            // −e^x is rounded, and its logarithm.
            let is_rounded = name.ends_with("A_log");
            let is_near = found.iter().zip(&meant).all(|(found, meant)| (found - meant).abs() < 1e-6);
            assert!(found == meant || is_rounded && is_near, "{family}: {name}");
        }
    }
}

/// Blocks of permuted rows are the file's, and decode to what rows give.
#[test]
fn blocks_have_the_order_of_rows() {
    let tiny = Tiny::of("mistral");
    let model = open(&exported(&tiny, FileType::Q8_0)).unwrap();
    for name in ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"] {
        let tensor = model.tensor(name).unwrap();
        assert_eq!(tensor.kind, TensorType::Q8_0);
        let (mut decoded, mut rows) = (Vec::new(), Vec::new());
        tensor.kind.decode(&model.blocks(tensor, 3..40).unwrap().unwrap(), &mut decoded);
        model.rows(tensor, 3..40, &mut rows).unwrap();
        assert_eq!(decoded, rows);
    }
    let norm = model.tensor("model.norm.weight").unwrap();
    assert_eq!(model.blocks(norm, 0..1).unwrap(), None);
}

/// Also of a matrix whose rows have another order, where a row beyond the last would be another one.
#[test]
fn rows_beyond_the_last_are_an_error() {
    let tiny = Tiny::of("qwen3_5_text");
    let model = open(&exported(&tiny, FileType::F32)).unwrap();
    for tensor in model.tensors() {
        let rows = if tensor.shape.len() == 1 { 1 } else { tensor.shape[0] };
        let error = model.rows(tensor, rows - 1..rows + 1, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains(&format!("in `{}`, which has {rows}", tensor.name)), "{error}");
        assert_eq!(model.blocks(tensor, rows - 1..rows + 1).is_err(), tensor.has_blocks());
    }
}

/// A file with other metadata and tensors than another; values are zeros where it has none.
fn changed(path: &Path, change: impl FnOnce(&mut Header)) -> PathBuf {
    let file = gguf::Reader::open(path).unwrap();
    let mut header = file.header().clone();
    change(&mut header);
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes, &header).unwrap();
    for tensor in &header.tensors {
        let all: u64 = tensor.shape[..tensor.shape.len() - 1].iter().product();
        let position = file.position(&tensor.name).or(file.position("token_embd.weight")).unwrap();
        let mut encoded = Vec::new();
        tensor.kind.encode(&file.rows(position, 0..all).unwrap(), &mut encoded);
        writer.write(&encoded).unwrap();
        writer.end_tensor().unwrap();
    }
    let path = path.with_file_name("changed.gguf");
    fs::write(&path, bytes).unwrap();
    path
}

fn with_head(path: &Path, kind: TensorType) -> PathBuf {
    changed(path, |header| {
        let embedding = header.tensors.iter().find(|tensor| tensor.name == "token_embd.weight").unwrap();
        header.tensors.push(TensorInfo { name: "output.weight".to_owned(), kind, ..embedding.clone() });
    })
}

#[test]
fn a_matrix_that_a_file_holds_twice_is_tied_again() {
    let tiny = Tiny::with("qwen2", json!({ "tie_word_embeddings": true }));
    let exact = all(&open(&exported(&tiny, FileType::F32)).unwrap(), "model.embed_tokens.weight");
    let path = with_head(&exported(&tiny, FileType::Q8_0), TensorType::F16);
    let model = open(&path).unwrap();
    assert_eq!(model.config()["tie_word_embeddings"], true);
    assert!(model.tensor("lm_head.weight").is_none());
    let tied = all(&model, "model.embed_tokens.weight");
    assert_eq!(model.tensor("model.embed_tokens.weight").unwrap().kind, TensorType::F16, "the finer one");
    assert!(tied != exact, "of q8_0 as the embedding is");
    expect![
        "out.gguf holds one matrix twice, as token_embd.weight (q8_0) and as output.weight (f16), equal within the error of their types: the head is tied to the embedding, with the values of output.weight, and the model has 19200 parameters less (--untied keeps both)"
    ]
    .assert_eq(&model.notes()[0].replace(&*path.display().to_string(), "out.gguf"));
    let both = ModelFile::open(&path, ReadOptions { untied: true }).unwrap();
    assert_eq!((both.config()["tie_word_embeddings"].clone(), both.notes().len()), (json!(false), 0));
    assert_eq!(both.tensor("lm_head.weight").unwrap().kind, TensorType::F16);
    // A head of its own stays one.
    let own = open(&exported(&Tiny::with("qwen2", json!({ "tie_word_embeddings": false })), FileType::Q8_0))
        .unwrap();
    assert_eq!(own.config()["tie_word_embeddings"], false);
}

fn refused(path: &Path, expected: Expect) {
    let folder = format!("{}/", path.parent().unwrap().display());
    expected.assert_eq(&open(path).unwrap_err().to_string().replace(&folder, ""));
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let tiny = Tiny::of("qwen2");
    let good = exported(&tiny, FileType::F16);
    let set = |key: &'static str, value: Option<Value>| {
        changed(&good, |header| {
            header.metadata.retain(|(name, _)| name != key);
            header.metadata.extend(value.map(|value| (key.to_owned(), value)));
        })
    };
    refused(
        &set("general.architecture", Some("mamba".into())),
        expect![
            "the architecture of changed.gguf is not supported: `mamba`; those that can be read are llama, granite, smollm3, qwen2, qwen3, qwen3moe, gpt-oss, qwen35moe, qwen35, olmo2, phi3, gemma2, gemma3, gemma4"
        ],
    );
    refused(
        &set("general.architecture", Some("clip".into())),
        expect![
            "changed.gguf: it is the projector of a vision model, not a language model; give the file of the language model beside it"
        ],
    );
    refused(
        &set("general.type", Some("adapter".into())),
        expect![
            "changed.gguf: it is an adapter, not a model; give the GGUF file of its base, and the adapter as PEFT's folder with --adapter"
        ],
    );
    refused(
        &set("general.architecture", None),
        expect![
            "changed.gguf: `general.architecture` is missing (the name of an architecture); get the file again, or convert the model again with llama.cpp"
        ],
    );
    refused(
        &set("qwen2.attention.head_count", None),
        expect![
            "changed.gguf: `qwen2.attention.head_count` is missing (a whole number above 0); get the file again, or convert the model again with llama.cpp"
        ],
    );
    refused(
        &set("qwen2.embedding_length", Some("64".into())),
        expect![[
            r#"changed.gguf: `qwen2.embedding_length` is String("64"); expected a whole number: convert the model again"#
        ]],
    );
    refused(
        &set("qwen2.feed_forward_length", Some(128.into())),
        expect![
            "changed.gguf: `blk.0.ffn_gate.weight` has the shape [96, 64]; its metadata give [128, 64]: get the file again"
        ],
    );
    refused(
        &set("qwen2.expert_count", Some(8.into())),
        expect![
            "`qwen2.expert_count` of changed.gguf is not supported: 8; this family has no mixture of experts"
        ],
    );
    refused(
        &set("qwen2.block_count", Some(u32::MAX.into())),
        expect![
            "changed.gguf: `qwen2.block_count` is 4294967295, but the file has 26 tensors; get the file again"
        ],
    );
    refused(
        &changed(&good, |header| header.tensors.retain(|tensor| tensor.name != "blk.1.attn_q.bias")),
        expect!["changed.gguf: 1 tensors are missing, such as `blk.1.attn_q.bias`; get the file again"],
    );
    refused(
        &changed(&good, |header| {
            let further =
                TensorInfo { name: "blk.0.attn_sinks.weight".to_owned(), ..header.tensors[0].clone() };
            header.tensors.push(further);
        }),
        expect![
            "a tensor of changed.gguf is not supported: `blk.0.attn_sinks.weight`; a `qwen2` has none of this name (1 such tensors), so the model would compute something else"
        ],
    );
}

/// The parts of a model that is split: those of a block each.
#[test]
fn a_model_in_several_files_is_read_as_one() {
    let tiny = Tiny::of("qwen3");
    let whole = exported(&tiny, FileType::F32);
    let part = |no: u32, keep: fn(&str) -> bool, all: bool| {
        let path = changed(&whole, |header| {
            if no > 0 {
                header.metadata.clear();
            }
            let total = header.tensors.len() as i32 + i32::from(!all);
            header.tensors.retain(|tensor| keep(&tensor.name));
            header.metadata.extend([
                ("split.no".to_owned(), Value::U16(no as u16)),
                ("split.count".to_owned(), Value::U16(2)),
                ("split.tensors.count".to_owned(), Value::I32(total)),
            ]);
        });
        let named = tiny.path(&format!("m-{:05}-of-00002.gguf", no + 1));
        fs::rename(path, &named).unwrap();
        named
    };
    let first = part(0, |name| !name.starts_with("blk.1."), true);
    refused(
        &first,
        expect!["m-00001-of-00002.gguf: m-00002-of-00002.gguf is missing, which has a part of the model"],
    );
    let second = part(1, |name| name.starts_with("blk.1."), true);
    let model = open(&whole).unwrap();
    for path in [&first, &second] {
        let split = open(path).unwrap();
        assert_eq!((split.config(), split.paths().count()), (model.config(), 2));
        for tensor in model.tensors() {
            assert!(all(&split, &tensor.name) == all(&model, &tensor.name), "{}", tensor.name);
        }
    }
    part(0, |name| !name.starts_with("blk.1."), false);
    refused(
        &first,
        expect!["m-00001-of-00002.gguf: its 2 files have 25 tensors of 26; get all of them again"],
    );
    let renamed = tiny.path("one.gguf");
    fs::rename(&first, &renamed).unwrap();
    refused(
        &renamed,
        expect![
            "one.gguf: one of 2 files of a model, but its name does not end in -NNNNN-of-00002.gguf; give the files their names again, or join them with `llama-gguf-split --merge`"
        ],
    );
}

/// A folder whose weights stay in a file is converted to the file's own bytes, but for its name.
#[test]
fn a_folder_of_a_file_is_converted_again() {
    for (family, own) in families().into_iter().filter(|(family, _)| *family != "llama") {
        let tiny = Tiny::with(family, own);
        tiny.write("chat_template.jinja", "{{ messages[0].content }}");
        let path = exported(&tiny, FileType::F32);
        let cache = tiny.path("cache");
        let folder = gguf::folder::make(&path, ReadOptions::default(), &cache).unwrap();
        assert_eq!(gguf::folder::make(&path, ReadOptions::default(), &cache).unwrap(), folder);
        assert_eq!(fs::read_dir(&cache).unwrap().count(), 1);
        let again = Model::open(&folder).unwrap().named("again");
        let again = written(&again.convert(FileType::F32).unwrap(), &tiny.path("again.gguf"));
        let first = gguf::Reader::open(&path).unwrap();
        let known = |file: &gguf::Reader| {
            let mut metadata = file.header().metadata.clone();
            // The base of layers with a window is llama.cpp's default, which the configuration then names.
            metadata.retain(|(key, _)| !["general.name", "gemma3.rope.freq_base_swa"].contains(&&**key));
            metadata.sort_by(|(one, _), (other, _)| one.cmp(other));
            metadata
        };
        assert_eq!(known(&again), known(&first), "{family}");
        assert_eq!(again.header().tensors, first.header().tensors, "{family}");
        for tensor in &first.header().tensors {
            let same = |file: &gguf::Reader| crate::tiny_model::values(file, &tensor.name);
            let (again, first) = (same(&again), same(&first));
            let is_near = again.iter().zip(&first).all(|(x, y)| (x / y - 1.0).abs() < 1e-6);
            let is_rounded = tensor.name.ends_with("ssm_a");
            assert!(again == first || is_rounded && is_near, "{family}: {}", tensor.name);
        }
    }
}
