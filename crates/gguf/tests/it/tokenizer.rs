//! Tokenizers: types of tokens, filling up, special tokens, the pre-tokenizer's name, chat templates, SentencePiece's scores.

use std::path::PathBuf;

use expect_test::expect;
use gguf::{Array, FileType, Header, Model, Value};
use serde_json::json;

use crate::tiny_model::{ROWS, Tiny, byte_level_tokenizer};

fn header(tiny: &Tiny) -> Header {
    Model::open(tiny.folder.path()).unwrap().convert(FileType::F16).unwrap().header().clone()
}

fn strings(header: &Header, key: &str) -> Vec<String> {
    header.get(key).unwrap_or_else(|| panic!("no {key}")).as_strings().unwrap().to_vec()
}

fn types(header: &Header) -> Vec<i32> {
    match header.get("tokenizer.ggml.token_type") {
        Some(Value::Array(Array::I32(types))) => types.clone(),
        other => panic!("{other:?}"),
    }
}

/// Everything of the tokenizer but its lists.
fn settings(header: &Header) -> String {
    let own = header
        .metadata
        .iter()
        .filter(|(key, value)| key.starts_with("tokenizer.") && !matches!(value, Value::Array(_)));
    own.map(|(key, value)| format!("{key} {value:?}\n")).collect()
}

#[test]
fn tokens_have_their_types_and_fill_the_embeddings_rows() {
    let header = header(&Tiny::of("qwen2"));
    let (tokens, types) = (strings(&header, "tokenizer.ggml.tokens"), types(&header));
    assert_eq!((tokens.len() as u64, types.len() as u64), (ROWS, ROWS));
    assert_eq!((&*tokens[0], types[0]), ("!", 1));
    assert_eq!((&*tokens[257], types[257]), ("<|im_end|>", 3));
    // Added, but no token of control: its SentencePiece space is a space.
    assert_eq!((&*tokens[259], types[259]), (" tool", 4));
    assert_eq!((&*tokens[260], types[260]), ("[PAD260]", 5));
    assert_eq!(strings(&header, "tokenizer.ggml.merges"), ["h e"]);
}

/// `tokenizer_config.json` goes before `config.json`; what it says of added tokens goes before the post-processor.
#[test]
fn special_tokens_come_from_the_files_in_their_order() {
    let tiny = Tiny::of("qwen2");
    expect![[r#"
        tokenizer.ggml.model String("gpt2")
        tokenizer.ggml.pre String("gpt-2")
        tokenizer.ggml.bos_token_id U32(256)
        tokenizer.ggml.eos_token_id U32(257)
        tokenizer.ggml.add_bos_token Bool(false)
        tokenizer.ggml.add_eos_token Bool(false)
    "#]]
    .assert_eq(&settings(&header(&tiny)));
    tiny.write(
        "tokenizer_config.json",
        &json!({
            "eos_token": { "content": "<s>" }, "pad_token": "!", "bos_token": null, "add_bos_token": true,
            "chat_template": "{{ messages }}"
        })
        .to_string(),
    );
    tiny.write("generation_config.json", r#"{ "eos_token_id": [257, 256] }"#);
    let model = Model::open(tiny.folder.path()).unwrap();
    expect![[r#"
        tokenizer.ggml.model String("gpt2")
        tokenizer.ggml.pre String("gpt-2")
        tokenizer.ggml.bos_token_id U32(256)
        tokenizer.ggml.eos_token_id U32(256)
        tokenizer.ggml.padding_token_id U32(0)
        tokenizer.ggml.eot_token_id U32(257)
        tokenizer.ggml.add_bos_token Bool(true)
        tokenizer.ggml.add_eos_token Bool(false)
        tokenizer.chat_template String("{{ messages }}")
    "#]]
    .assert_eq(&settings(model.convert(FileType::F16).unwrap().header()));
    assert_eq!(model.tokenizer().stop_tokens(), ["<s>", "<|im_end|>"]);
    expect![
        "tokenizer_config.json has add_bos_token = true, tokenizer.json does not add it; the file has true"
    ]
    .assert_eq(&model.convert(FileType::F16).unwrap().notes().join("\n"));
}

/// llama.cpp stops at the ends that keys name, and at some texts. An end that it does not know by its text takes a key before one that it
/// does.
#[test]
fn every_end_of_an_answer_has_a_key() {
    let tiny = Tiny::of("llama");
    tiny.write("tokenizer_config.json", &json!({ "eos_token": "<s>" }).to_string());
    tiny.write("generation_config.json", r#"{ "eos_token_id": [256, 257, 7, 8] }"#);
    let model = Model::open(tiny.folder.path()).unwrap();
    let conversion = model.convert(FileType::F16).unwrap();
    let id = |key: &str| conversion.header().get(&format!("tokenizer.ggml.{key}")).cloned();
    assert_eq!(id("eos_token_id"), Some(256u32.into()));
    // 257 is <|im_end|>.
    assert_eq!((id("eot_token_id"), id("eom_token_id")), (Some(7u32.into()), Some(8u32.into())));
    tiny.write("generation_config.json", r#"{ "eos_token_id": [256, 7, 8, 9] }"#);
    let model = Model::open(tiny.folder.path()).unwrap();
    expect![
        "llama.cpp stops at the tokens [9] only if it is asked to: a file has places for three ends of a text"
    ]
    .assert_eq(&model.convert(FileType::F16).unwrap().notes().join("\n"));
}

/// A folder's templates are found where transformers finds them.
#[test]
fn chat_templates_of_every_file_are_read() {
    let tiny = Tiny::of("llama");
    tiny.write("chat_template.json", r#"{ "chat_template": "processor" }"#);
    let of_default =
        || Model::open(tiny.folder.path()).unwrap().tokenizer().chat_template().map(str::to_owned);
    assert_eq!(of_default().as_deref(), Some("processor"));
    tiny.write("tokenizer_config.json", r#"{ "chat_template": "tokenizer" }"#);
    assert_eq!(of_default().as_deref(), Some("tokenizer"));
    tiny.write("chat_template.jinja", "file");
    std::fs::create_dir(tiny.folder.path().join("additional_chat_templates")).unwrap();
    tiny.write("additional_chat_templates/tool_use.jinja", "tools");
    assert_eq!(of_default().as_deref(), Some("file"));
    let model = Model::open(tiny.folder.path()).unwrap();
    let conversion = model.convert(FileType::F16).unwrap();
    assert_eq!(conversion.header().get("tokenizer.chat_template.tool_use"), Some(&"tools".into()));
    // Those of another folder take precedence with its tokenizer.
    let other = Tiny::of("llama");
    other.write("chat_template.jinja", "other");
    let model = Model::open_with(tiny.folder.path(), other.folder.path()).unwrap();
    assert_eq!(model.tokenizer().chat_template(), Some("other"));
}

/// transformers gives a template the `bos_token` that the folder names, or none; llama.cpp always that of an id, of token 11 at the last.
#[test]
fn a_template_that_asks_for_a_bos_token_gets_the_folder_s() {
    let tiny = Tiny::of("qwen2");
    tiny.write("chat_template.jinja", "{{ bos_token or '' }}{{ messages }}");
    let template = || header(&tiny).get("tokenizer.chat_template").cloned().unwrap();
    for bos_token in [json!(null), json!({ "content": "<s>" }), json!("<s>")] {
        tiny.write("tokenizer_config.json", &json!({ "bos_token": bos_token }).to_string());
        let none = if bos_token.is_null() { "{%- set bos_token = '' -%}\n" } else { "" };
        assert_eq!(template(), (&*format!("{none}{{{{ bos_token or '' }}}}{{{{ messages }}}}")).into());
    }
    tiny.write("tokenizer_config.json", "{}");
    tiny.write("special_tokens_map.json", r#"{ "bos_token": "<s>" }"#);
    assert_eq!(template(), "{{ bos_token or '' }}{{ messages }}".into());
}

#[test]
fn a_post_processor_that_adds_the_first_token_is_seen() {
    let tiny = Tiny::of("llama");
    tiny.change("tokenizer.json", |tokenizer| {
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [256], "tokens": ["<s>"] } }
        });
    });
    assert_eq!(header(&tiny).get("tokenizer.ggml.add_bos_token"), Some(&Value::Bool(true)));
}

#[test]
fn templates_come_from_their_own_file_first_and_may_be_several() {
    let tiny = Tiny::of("qwen2");
    let several = json!([{ "name": "default", "template": "D" }, { "name": "tool_use", "template": "T" }]);
    tiny.write("tokenizer_config.json", &json!({ "chat_template": several }).to_string());
    let file = header(&tiny);
    assert_eq!(file.get("tokenizer.chat_template"), Some(&"D".into()));
    assert_eq!(file.get("tokenizer.chat_template.tool_use"), Some(&"T".into()));
    assert_eq!(strings(&file, "tokenizer.chat_templates"), ["tool_use"]);
    tiny.write("chat_template.jinja", "J");
    assert_eq!(header(&tiny).get("tokenizer.chat_template"), Some(&"J".into()));
}

/// The pre-tokenizers of tokenizers that are not in llama.cpp's table of checksums are known by their expressions.
#[test]
fn pre_tokenizers_are_known_by_their_expressions() {
    let llama_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let split = |expression: &str| json!({ "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false });
    let level = |regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex });
    let digits = json!({ "type": "Digits", "individual_digits": true });
    let name = |steps: Vec<serde_json::Value>, ignore_merges: bool| {
        let tiny = Tiny::of("llama");
        tiny.change("tokenizer.json", |tokenizer| {
            tokenizer["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": steps });
            tokenizer["model"]["ignore_merges"] = ignore_merges.into();
        });
        let model = Model::open(tiny.folder.path());
        model.map(|model| model.tokenizer().pre_tokenizer().to_owned()).map_err(|error| error.to_string())
    };
    assert_eq!(name(vec![split(llama_3), level(false)], true).unwrap(), "llama-bpe");
    assert_eq!(name(vec![split(llama_3), level(false)], false).unwrap(), "smaug-bpe");
    let qwen = llama_3.replace("{1,3}", "");
    assert_eq!(name(vec![split(&qwen), level(false)], false).unwrap(), "qwen2");
    assert_eq!(name(vec![digits, level(true)], false).unwrap(), "smollm");
    let error = name(vec![split("[aeiou]"), level(false)], false).unwrap_err();
    assert!(
        error.starts_with("the tokenizer's pre-tokenizer is not supported: ") && error.contains("[aeiou]"),
        "{error}"
    );
}

/// The table of checksums, on the real tokenizer of GPT-2.
#[test]
fn gpt_2_has_llama_cpps_checksum() {
    let path =
        std::env::var_os("FRUGAL_DATA").map(|data| PathBuf::from(data).join("gpt2-tokenizer/tokenizer.json"));
    let Some(path) = path.filter(|path| path.is_file()) else {
        eprintln!("skipped: set FRUGAL_DATA to a folder that has gpt2-tokenizer/tokenizer.json");
        return;
    };
    let tiny = Tiny::of("llama");
    tiny.change("tokenizer.json", |tokenizer| {
        *tokenizer = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        // Its checksum is that of the tokens, so the name is found although no expression is known.
        tokenizer["normalizer"] = json!({ "type": "Lowercase" });
        tokenizer["normalizer"] =
            json!({ "type": "Replace", "pattern": { "String": "\u{7}" }, "content": "" });
    });
    let error = Model::open(tiny.folder.path()).map(|model| model.tokenizer().pre_tokenizer().to_owned());
    assert_eq!(error.unwrap(), "gpt-2");
}

pub(crate) fn sentencepiece() -> serde_json::Value {
    let mut vocab = serde_json::Map::new();
    for text in ["<unk>", "<s>", "</s>"] {
        vocab.insert(text.to_owned(), vocab.len().into());
    }
    for byte in 0..256 {
        vocab.insert(format!("<0x{byte:02X}>"), vocab.len().into());
    }
    for text in ["▁h", "he", "▁he", "▁", "h", "e"] {
        vocab.insert(text.to_owned(), vocab.len().into());
    }
    let mut tokenizer = byte_level_tokenizer();
    tokenizer["added_tokens"] = json!([
        { "id": 0, "content": "<unk>", "special": true }, { "id": 1, "content": "<s>", "special": true },
        { "id": 2, "content": "</s>", "special": true }
    ]);
    tokenizer["normalizer"] = json!({
        "type": "Sequence",
        "normalizers": [
            { "type": "Prepend", "prepend": "▁" }, { "type": "Replace", "pattern": { "String": " " }, "content": "▁" }
        ]
    });
    tokenizer["pre_tokenizer"] = json!(null);
    tokenizer["model"] = json!({
        "type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "vocab": vocab,
        "merges": ["▁ h", "h e", "▁ he", "▁h e"]
    });
    tokenizer
}

#[test]
fn tokens_of_sentencepiece_have_scores_by_rank() {
    let tiny = Tiny::of("mistral");
    tiny.write("tokenizer.json", &sentencepiece().to_string());
    let file = header(&tiny);
    assert_eq!(file.get("tokenizer.ggml.model"), Some(&"llama".into()));
    assert_eq!(file.get("tokenizer.ggml.add_space_prefix"), Some(&Value::Bool(true)));
    let types = types(&file);
    assert_eq!((types[0], types[1], types[3], types[259], types[299]), (2, 3, 6, 1, 5));
    let Some(Value::Array(Array::F32(scores))) = file.get("tokenizer.ggml.scores") else {
        panic!("no scores")
    };
    assert_eq!(scores[259..262], [0.0, -1.0, -2.0]);
    assert!(scores[262] < -1000.0, "a character is not merged");
    assert!(file.get("tokenizer.ggml.merges").is_none());
}

#[test]
fn merges_that_scores_cannot_express_are_refused_or_noted() {
    let tiny = Tiny::of("mistral");
    let with = |merges: &[&str]| {
        let mut tokenizer = sentencepiece();
        tokenizer["model"]["merges"] = json!(merges);
        tiny.write("tokenizer.json", &tokenizer.to_string());
        Model::open(tiny.folder.path())
    };
    expect![[r#"a BPE tokenizer with bytes for unknown characters that is not SentencePiece's is not supported: the merges into "▁he" do not follow each other; llama.cpp would tokenize differently"#]]
        .assert_eq(&with(&["▁ h", "▁h e", "h e", "▁ he"]).unwrap_err().to_string());
    let model = with(&["▁ h", "h e", "▁ he"]).unwrap();
    expect![[r#"llama.cpp may tokenize some texts differently: it also joins 1 pairs that are no merges, such as "▁h" and "e" into "▁he""#]]
        .assert_eq(&model.convert(FileType::F16).unwrap().notes().join("\n"));
}

/// As Gemma 3's runs of line breaks are: they are found in a text before anything is merged.
#[test]
fn merges_into_added_tokens_do_not_matter() {
    let tiny = Tiny::of("mistral");
    let mut tokenizer = sentencepiece();
    tokenizer["model"]["merges"] = json!(["▁ h", "▁h e", "h e", "▁ he"]);
    let id = tokenizer["model"]["vocab"]["▁he"].clone();
    let token = json!({
        "id": id, "content": "▁he", "special": false, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
    });
    tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
    tiny.write("tokenizer.json", &tokenizer.to_string());
    let file = header(&tiny);
    let Some(Value::Array(Array::F32(scores))) = file.get("tokenizer.ggml.scores") else {
        panic!("no scores")
    };
    assert_eq!(scores[259..261], [0.0, -1.0]);
}

/// A chat template that writes no token to begin a text, over a tokenizer that adds one.
#[test]
fn a_model_without_a_begin_token_adds_none_and_says_so() {
    let tiny = Tiny::of("qwen2");
    tiny.write(
        "tokenizer_config.json",
        r#"{ "eos_token": "<|im_end|>", "bos_token": "<s>", "add_bos_token": true }"#,
    );
    let model = Model::open(tiny.folder.path()).unwrap();
    assert_eq!(model.tokenizer().begin_token(), Some("<s>"));
    let model = model.without_begin_token();
    assert_eq!(model.tokenizer().begin_token(), None);
    let conversion = model.convert(FileType::F16).unwrap();
    assert_eq!(conversion.header().get("tokenizer.ggml.add_bos_token"), Some(&Value::Bool(false)));
    let notes = conversion.notes().join("\n");
    assert!(
        notes.contains("the chat template writes no `<s>`, so the file has add_bos_token = false"),
        "{notes}"
    );
}

#[test]
fn special_tokens_that_only_the_configuration_names_are_control_tokens() {
    let tiny = Tiny::of("qwen2");
    tiny.change("tokenizer.json", |tokenizer| tokenizer["added_tokens"] = json!([]));
    let decoder = json!({ "257": { "content": "<|im_end|>", "special": true }, "0": { "content": "!", "special": false } });
    tiny.write("tokenizer_config.json", &json!({ "added_tokens_decoder": decoder }).to_string());
    tiny.change("tokenizer.json", |tokenizer| tokenizer["model"]["vocab"]["<|im_end|>"] = json!(257));
    let types = types(&header(&tiny));
    assert_eq!((types[0], types[257]), (1, 3));
}

/// Blanks and characters that llama.cpp treats in another way than the tokenizer are named.
#[test]
fn what_llama_cpp_tokenizes_otherwise_is_a_note() {
    let notes = |tiny: &Tiny| {
        Model::open(tiny.folder.path()).unwrap().convert(FileType::F16).unwrap().notes().join("\n")
    };
    let tiny = Tiny::of("mistral");
    for (scheme, expected) in [("always", true), ("first", true), ("never", false)] {
        let mut tokenizer = sentencepiece();
        tokenizer["normalizer"] = json!(null);
        tokenizer["pre_tokenizer"] =
            json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false });
        tiny.write("tokenizer.json", &tokenizer.to_string());
        let notes = notes(&tiny);
        let named = format!("(Metaspace, `{scheme}`)");
        assert_eq!(notes.contains(&named), expected, "{scheme}: {notes}");
    }
    let tiny = Tiny::of("qwen2");
    assert_eq!(notes(&tiny), "");
    tiny.change("tokenizer.json", |tokenizer| tokenizer["normalizer"] = json!({ "type": "NFC" }));
    assert_eq!(
        notes(&tiny),
        "llama.cpp does not compose characters (NFC): a text with decomposed ones is tokenized differently"
    );
}
