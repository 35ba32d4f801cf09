//! The tokens of conversations and which of them are learned, compared with those of transformers' `apply_chat_template`.
//!
//! `conversation_tokens.json` has tiny tokenizers, one for each way in which a text begins and in which special tokens take blanks;
//! `xtask/peers/conversation_tokens.py` made it. It has the ids of real tokenizers, too; their folders are in the folder that
//! `FRUGAL_TOKENIZERS` names.

use std::path::{Path, PathBuf};

use dataloading::chat::{ChatTemplate, Conversation, Mask, Message, TemplateConfig};
use dataloading::records::{Detected, Record, RecordFormat, RecordLocation};
use dataloading::{IGNORE_INDEX, Tokenizer};
use frugal::rows::{Overlong, RowConfig, RowEncoder};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use training::masked_rows::MaskedRow;

fn fixtures() -> Value {
    serde_json::from_str(include_str!("conversation_tokens.json")).unwrap()
}

/// The template of a name, with its marks of answers or without them, and with the end token of a tokenizer.
fn template(fixtures: &Value, (name, end): (&str, Option<&str>), is_marked: bool) -> ChatTemplate {
    let mut source = fixtures["templates"][name].as_str().unwrap().to_owned();
    if let Some(end) = end {
        source = source.replace("</s>", end).replace("<|end|>", end);
    }
    if !is_marked {
        source = source.replace("{% generation %}", "{% if true %}").replace("endgeneration", "endif");
    }
    ChatTemplate::new(name, &source, TemplateConfig::default()).unwrap()
}

fn messages(fixtures: &Value, conversation: &str) -> Vec<Message> {
    let turns = fixtures["conversations"][conversation].as_array().unwrap().iter();
    turns.map(|turn| Message::new(turn[0].as_str().unwrap(), turn[1].as_str().unwrap())).collect()
}

/// The token that ends a text: the tiny tokenizers', or that of a real one.
fn end_of(tokenizer: &Tokenizer) -> u32 {
    let names = ["</s>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "<eos>", "<|return|>", "<|im_end|>"];
    names.iter().find_map(|name| tokenizer.id(name)).unwrap_or(0)
}

fn encoder(tokenizer: &Tokenizer, template: Option<ChatTemplate>) -> RowEncoder {
    let options = RowConfig {
        longest: 4096,
        overlong: Overlong::Error,
        mask: Mask::Answers,
        begin: tokenizer.begin_of_text().unwrap(),
        end: end_of(tokenizer),
        vocabulary: tokenizer.vocabulary(),
        field: "text".to_owned(),
        templates: None,
    };
    let ends = [options.end];
    RowEncoder::new(tokenizer.clone(), template, &ends, options)
}

fn rows(encoder: &RowEncoder, format: RecordFormat, fields: Value) -> Vec<MaskedRow> {
    let location = RecordLocation { path: Path::new("a.jsonl").into(), unit: "line", number: 1, line: None };
    let record = Record { fields: fields.as_object().unwrap().clone(), location };
    let detected = Detected { formats: vec![(format, 1)], ignored: Vec::new() };
    encoder.record(&record, &detected).unwrap().0
}

fn conversation_rows(encoder: &RowEncoder, messages: &[Message]) -> Vec<MaskedRow> {
    let messages: Vec<&Map<String, Value>> = messages.iter().map(|message| &message.fields).collect();
    rows(encoder, RecordFormat::Messages, json!({ "messages": messages }))
}

fn ids(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

/// Compares the rows of a case; returns whether the mask could be compared.
fn check(fixtures: &Value, tokenizer: &Tokenizer, case: &Value, end: Option<&str>, about: &str) -> bool {
    let name = (case["template"].as_str().unwrap(), end);
    let messages = messages(fixtures, case["conversation"].as_str().unwrap());
    let expected = ids(&case["ids"]);
    let marked = template(fixtures, name, true);
    let marked_rows = conversation_rows(&encoder(tokenizer, Some(marked.clone())), &messages);
    assert_eq!(marked_rows.len(), 1, "{about}");
    assert_eq!(marked_rows[0].tokens, expected, "{about}");
    let text = marked.render(&Conversation::new(messages.clone()), false).unwrap().text;
    let at_inference: Vec<i64> = tokenizer.encode(&text).unwrap().into_iter().map(i64::from).collect();
    assert_eq!(marked_rows[0].tokens, at_inference, "{about}: `frugal chat` encodes the rendered text");
    if let Some(mask) = case["mask"].as_array() {
        for (at, (label, is)) in marked_rows[0].labels.iter().zip(mask).enumerate() {
            if (*label != IGNORE_INDEX) != (is == 1) {
                // The mark of a start, whose span is trimmed to nothing: transformers leaves it out of the answer that it begins.
                let token = tokenizer.decode(&[marked_rows[0].tokens[at] as u32]).unwrap();
                assert!(is == 0 && token.trim().is_empty(), "{about}: token {at}, `{token}`");
            }
        }
    }
    // Without marks the answers are found by rendering the messages before each.
    let unmarked = conversation_rows(&encoder(tokenizer, Some(template(fixtures, name, false))), &messages);
    assert_eq!(unmarked.last().unwrap().tokens, expected, "{about}, without marks");
    case["mask"].is_array()
}

#[test]
fn conversations_have_the_tokens_and_the_mask_of_transformers() {
    let fixtures = fixtures();
    let (mut cases, mut masks) = (0, 0);
    for (name, json) in fixtures["tokenizers"].as_object().unwrap() {
        let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        for case in fixtures["cases"].as_array().unwrap().iter().filter(|case| case["tokenizer"] == **name) {
            let about = format!("{name}, {}, {}", case["template"], case["conversation"]);
            masks += usize::from(check(&fixtures, &tokenizer, case, None, &about));
            cases += 1;
        }
    }
    assert!(cases >= 140 && masks >= 120, "{cases} cases, {masks} masks");
}

/// The folders with a tokenizer below a folder.
fn tokenizer_folders(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if folder.join("tokenizer.json").is_file() {
        found.push(folder.to_owned());
    } else if depth > 0 {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.for_each(|entry| tokenizer_folders(&entry.path(), depth - 1, found));
    }
}

#[test]
fn conversations_have_the_tokens_of_transformers_with_real_tokenizers() {
    let Some(folder) = std::env::var_os("FRUGAL_TOKENIZERS") else {
        eprintln!("skipped: set FRUGAL_TOKENIZERS to a folder with folders that have a tokenizer.json");
        return;
    };
    let fixtures = fixtures();
    let mut found = Vec::new();
    tokenizer_folders(Path::new(&folder), 4, &mut found);
    let mut compared = Vec::new();
    for folder in found {
        let bytes = std::fs::read(folder.join("tokenizer.json")).unwrap();
        let digest: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        let mut real = fixtures["real"].as_object().unwrap().iter();
        let Some((name, real)) = real.find(|(_, real)| real["sha256"] == digest) else { continue };
        let tokenizer = Tokenizer::from_bytes(&bytes).unwrap();
        for case in real["cases"].as_array().unwrap() {
            let about = format!("{name}, {}, {}", case["template"], case["conversation"]);
            // transformers 5 takes another normalizer than the file's for a LlamaTokenizer: it marks no start after a special token.
            // Version 4 and llama.cpp take the file's.
            if name.contains("llama2") && case["conversation"] == "specials" {
                continue;
            }
            check(&fixtures, &tokenizer, case, real["end"].as_str(), &about);
        }
        compared.push(name.as_str());
    }
    eprintln!("compared: {compared:?}");
    assert!(!compared.is_empty(), "none of the tokenizers there is in conversation_tokens.json");
}

/// A prompt and its completion have the tokens of their text, and begin and end tokens once, also where the text has them.
#[test]
fn texts_and_completions_begin_and_end_once() {
    let fixtures = fixtures();
    for (name, json) in fixtures["tokenizers"].as_object().unwrap() {
        let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        let begin = tokenizer.begin_of_text().unwrap();
        assert_eq!(begin.is_some(), matches!(name.as_str(), "prepend" | "prepend_rstrip"), "{name}");
        let encoder = encoder(&tokenizer, None);
        let end = i64::from(encoder.options().end);
        let is_end = |id: &&i64| **id == end;
        for text in ["Hi there", "<s>Hi there</s>", "Hi there</s>", "<s>Hi there"] {
            let row = &rows(&encoder, RecordFormat::Text, json!({ "text": text }))[0];
            let begins = row.tokens.iter().filter(|id| **id == 1).count();
            assert_eq!(begins, usize::from(begin.is_some() || text.starts_with("<s>")), "{name}: {text}");
            assert_eq!(row.tokens.iter().filter(is_end).count(), 1, "{name}: {text}");
            assert_eq!((row.tokens.last(), row.labels.last()), (Some(&end), Some(&end)), "{name}: {text}");
            assert_eq!(row.tokens, row.labels, "{name}: {text}");
        }
        for (prompt, completion) in [
            ("Hi there", " Yes"),
            ("<s>[INST] Hi [/INST]", " It is</s>"),
            ("Hi 🦀\r\n", "🦀 ok"),
            ("", "Yes"),
        ] {
            let fields = json!({ "prompt": prompt, "completion": completion });
            let row = &rows(&encoder, RecordFormat::PromptCompletion, fields)[0];
            let at_inference = tokenizer.encode_with_begin(prompt).unwrap();
            let learned = row.labels.iter().position(|label| *label != IGNORE_INDEX).unwrap();
            let read: Vec<i64> = at_inference.into_iter().map(i64::from).collect();
            assert_eq!(row.tokens[..learned], read, "{name}: {prompt}");
            assert_eq!(row.labels[learned..], row.tokens[learned..], "{name}: {prompt}");
            assert_eq!(row.tokens.iter().filter(is_end).count(), 1, "{name}: {completion}");
        }
    }
}

#[test]
fn a_token_that_ends_every_text_does_not_begin_it() {
    let fixtures = fixtures();
    let mut json = fixtures["tokenizers"]["byte_level"].clone();
    let special = json!({ "</s>": { "id": "</s>", "ids": [2], "tokens": ["</s>"] } });
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "SpecialToken": { "id": "</s>", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
        "special_tokens": special,
    });
    let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    assert_eq!(tokenizer.begin_of_text().unwrap(), None);
    let row = &rows(&encoder(&tokenizer, None), RecordFormat::Text, json!({ "text": "Hi" }))[0];
    assert_eq!((row.tokens.first() == Some(&2), row.tokens.last()), (false, Some(&2)));
}
