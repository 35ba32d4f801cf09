//! The tokenizer of a file as the files of a model's folder: `tokenizer.json` for the `tokenizers` library, and beside it
//! `tokenizer_config.json`, `generation_config.json` and the chat template.
//!
//! | `tokenizer.ggml.model` | model in `tokenizer.json` |
//! |---|---|
//! | `gpt2` | byte-level BPE with the file's merges; `pre` names the expressions at which texts are split |
//! | `llama` | BPE with bytes for unknown characters; its merges follow from the scores ([`sentencepiece`]) |
//! | `gemma4` | the same with the file's merges ([`gemma4`]) |
//! | `t5` | Unigram with the file's scores |
//!
//! Types of tokens: one of control becomes a special added token, one of the user an added token, both found as wholes in a text. A `[PADn]`
//! of type unused is a row of the embedding without a token.

mod byte_level;
mod gemma4;
mod sentencepiece;
mod unigram;

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value as Json, json};

use super::metadata::{Metadata, integers, missing};
use crate::error::{Result, file_error, unsupported};
use crate::tokenizer::{CONTROL, KNOWN_ENDS, NORMAL, UNUSED, USER_DEFINED};
use crate::value::{Array, Value};

/// The tokens of a file.
struct Tokens<'a> {
    path: &'a Path,
    texts: &'a [String],
    types: Vec<i32>,
    scores: Option<&'a [f32]>,
}

impl<'a> Tokens<'a> {
    fn read(metadata: &Metadata<'a>) -> Result<Self> {
        const KEY: &str = "tokenizer.ggml.tokens";
        let texts = metadata.raw(KEY).and_then(Value::as_strings);
        let texts = texts.ok_or_else(|| missing(metadata.path, KEY, "a list of texts"))?;
        let list = |key: &str| metadata.raw(&format!("tokenizer.ggml.{key}"));
        let types = match list("token_type").map(integers) {
            None => vec![NORMAL; texts.len()],
            Some(types) => types.unwrap_or_default().iter().map(|kind| *kind as i32).collect(),
        };
        let scores = match list("scores") {
            Some(Value::Array(Array::F32(scores))) => Some(&scores[..]),
            _ => None,
        };
        for (key, count) in [("token_type", Some(types.len())), ("scores", scores.map(<[f32]>::len))] {
            if let Some(count) = count.filter(|count| *count != texts.len()) {
                let reason = format!(
                    "`tokenizer.ggml.{key}` has {count} entries for {} tokens; get the file again",
                    texts.len()
                );
                return Err(file_error(metadata.path, reason));
            }
        }
        let mut known = BTreeSet::new();
        if let Some(twice) = texts.iter().find(|text| !known.insert(&***text)) {
            let reason =
                format!("two tokens have the text {twice:?}; get the file again, or convert the model again");
            return Err(file_error(metadata.path, reason));
        }
        Ok(Self { path: metadata.path, texts, types, scores })
    }

    /// The tokens that there are: number, text and type.
    fn all(&self) -> impl Iterator<Item = (u32, &'a str, i32)> {
        let tokens = (0..).zip(self.texts).zip(&self.types).map(|((id, text), kind)| (id, &**text, *kind));
        tokens.filter(|(_, text, kind)| *kind != UNUSED || !text.starts_with("[PAD"))
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.texts.iter().position(|known| known == text).and_then(|id| u32::try_from(id).ok())
    }

    fn text(&self, id: Option<u32>) -> Option<&'a str> {
        self.texts.get(id? as usize).map(String::as_str)
    }

    /// Numbers by texts. Added tokens are in it, too: they get their numbers from it.
    fn vocabulary(&self) -> Map<String, Json> {
        self.all().map(|(id, text, _)| (text.to_owned(), id.into())).collect()
    }

    /// The tokens that are found before a text is split. With `normalizes_blanks`, runs of blanks are found in the normalized text, where a
    /// blank and a `▁` are the same.
    fn added(&self, normalizes_blanks: bool) -> Vec<Json> {
        let added =
            self.all().filter(|(_, text, kind)| [CONTROL, USER_DEFINED].contains(kind) && !text.is_empty());
        added
            .map(|(id, text, kind)| {
                let is_normalized = normalizes_blanks && text.chars().all(|letter| letter == ' ');
                json!({
                    "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": is_normalized, "special": kind == CONTROL
                })
            })
            .collect()
    }
}

/// The parts of a `tokenizer.json` that its kind of model decides.
struct Parts {
    model: Json,
    normalizer: Json,
    pre_tokenizer: Json,
    /// The step that is done without tokens around a text.
    post_processor: Option<Json>,
    decoder: Json,
    /// Whether llama.cpp puts the token that begins a text before each text, and the one that ends it behind, where the file does not say.
    adds: [bool; 2],
    /// Whether tokens of blanks are found in the normalized text, as in Gemma's published tokenizer, whose vocabulary has them as `▁▁`.
    normalizes_blanks: bool,
}

/// Returns the files by name.
///
/// # Errors
/// A missing key; a kind of tokenizer, or a pre-tokenizer, that is not known, by name.
pub(super) fn files(metadata: &Metadata<'_>) -> Result<Vec<(&'static str, String)>> {
    const KEY: &str = "tokenizer.ggml.model";
    let kind = metadata.raw(KEY).and_then(Value::as_str);
    let kind = kind.ok_or_else(|| missing(metadata.path, KEY, "the name of a tokenizer"))?;
    let tokens = Tokens::read(metadata)?;
    let parts = match kind {
        "gpt2" => byte_level::parts(metadata, &tokens)?,
        "llama" => sentencepiece::parts(metadata, &tokens)?,
        "gemma4" => gemma4::parts(metadata, &tokens)?,
        "t5" => unigram::parts(metadata, &tokens)?,
        other => {
            return Err(unsupported(
                format!("the tokenizer of {}", metadata.path.display()),
                format!("`{other}`"),
                "gpt2, llama, gemma4 and t5 can be read",
            ));
        }
    };
    let special = Special::new(metadata, &tokens, parts.adds);
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": tokens.added(parts.normalizes_blanks),
        "normalizer": parts.normalizer, "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": special.post_processor(parts.post_processor), "decoder": parts.decoder, "model": parts.model,
    });
    let mut files = vec![
        ("tokenizer.json", tokenizer.to_string()),
        ("tokenizer_config.json", format!("{:#}\n", special.tokenizer_config(metadata, &tokens))),
        ("generation_config.json", format!("{:#}\n", special.generation_config())),
    ];
    if let Some(template) = metadata.raw("tokenizer.chat_template").and_then(Value::as_str) {
        files.push(("chat_template.jinja", template.to_owned()));
    }
    Ok(files)
}

/// The special tokens: numbers, and texts.
struct Special<'a> {
    bos: Option<(u32, &'a str)>,
    eos: Option<(u32, &'a str)>,
    pad: Option<(u32, &'a str)>,
    unknown: Option<&'a str>,
    add_bos: bool,
    add_eos: bool,
    /// All tokens that end a text or a turn.
    ends: Vec<u32>,
}

impl<'a> Special<'a> {
    fn new(metadata: &Metadata<'_>, tokens: &Tokens<'a>, adds: [bool; 2]) -> Self {
        let named = |name: &str| metadata.token(name).and_then(|id| Some((id, tokens.text(Some(id))?)));
        let flag = |key: &str, default: bool| match metadata.raw(&format!("tokenizer.ggml.{key}")) {
            Some(Value::Bool(flag)) => *flag,
            _ => default,
        };
        let (bos, eos) = (named("bos"), named("eos"));
        let mut ends: Vec<u32> =
            ["eos", "eot", "eom"].iter().filter_map(|name| Some(named(name)?.0)).collect();
        // Those that llama.cpp knows by their texts, where they are tokens of control.
        let by_text = KNOWN_ENDS.iter().filter_map(|text| tokens.id(text));
        ends.extend(by_text.filter(|id| tokens.types[*id as usize] == CONTROL));
        let mut seen = BTreeSet::new();
        ends.retain(|end| seen.insert(*end));
        Self {
            add_bos: bos.is_some() && flag("add_bos_token", adds[0]),
            add_eos: eos.is_some() && flag("add_eos_token", adds[1]),
            bos,
            eos,
            pad: named("padding"),
            unknown: tokens.text(metadata.token("unknown")),
            ends,
        }
    }

    /// The step that puts tokens around a text, after the model's own.
    fn post_processor(&self, own: Option<Json>) -> Json {
        let [begin, end] = [self.bos.filter(|_| self.add_bos), self.eos.filter(|_| self.add_eos)];
        if begin.is_none() && end.is_none() {
            return own.unwrap_or(Json::Null);
        }
        let part = |sequence: &str, type_id: u32| {
            let token = |text: &str| json!({ "SpecialToken": { "id": text, "type_id": type_id } });
            let text = json!({ "Sequence": { "id": sequence, "type_id": type_id } });
            let parts = [begin.map(|(_, text)| token(text)), Some(text), end.map(|(_, text)| token(text))];
            parts.into_iter().flatten().collect::<Vec<Json>>()
        };
        let pair = [part("A", 0), part("B", 1)].concat();
        let tokens: Map<String, Json> = begin
            .iter()
            .chain(&end)
            .map(|(id, text)| ((*text).to_owned(), json!({ "id": text, "ids": [id], "tokens": [text] })))
            .collect();
        let template = json!({
            "type": "TemplateProcessing", "single": part("A", 0), "pair": pair,
            "special_tokens": tokens,
        });
        match own {
            None => template,
            Some(own) => json!({ "type": "Sequence", "processors": [own, template] }),
        }
    }

    fn tokenizer_config(&self, metadata: &Metadata<'_>, tokens: &Tokens<'_>) -> Json {
        let mut config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
            "add_bos_token": self.add_bos, "add_eos_token": self.add_eos,
        });
        if let Ok(Some(context)) = metadata.optional_size("context_length") {
            config["model_max_length"] = context.into();
        }
        let text = |token: Option<(u32, &'a str)>| token.map(|(_, text)| text);
        let named = [
            ("bos", text(self.bos)),
            ("eos", text(self.eos)),
            ("pad", text(self.pad)),
            ("unk", self.unknown),
        ];
        for (name, text) in named.into_iter().filter_map(|(name, text)| Some((name, text?))) {
            config[format!("{name}_token")] = text.into();
        }
        let control = tokens.all().filter(|(_, _, kind)| *kind == CONTROL);
        let listed: Map<String, Json> = control
            .map(|(id, text, _)| {
                let token = json!({
                    "content": text, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false, "special": true
                });
                (id.to_string(), token)
            })
            .collect();
        config["added_tokens_decoder"] = listed.into();
        config
    }

    fn generation_config(&self) -> Json {
        let mut config = json!({});
        match self.ends.as_slice() {
            [] => {}
            [end] => config["eos_token_id"] = (*end).into(),
            ends => config["eos_token_id"] = ends.into(),
        }
        for (name, token) in [("bos", self.bos), ("pad", self.pad)] {
            if let Some((id, _)) = token {
                config[format!("{name}_token_id")] = id.into();
            }
        }
        config
    }
}
