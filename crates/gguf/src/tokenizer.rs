//! The tokenizer of a model's folder, as llama.cpp wants it.
//!
//! llama.cpp has its own tokenizers and reads from a file which of them, its tokens and its merges. Three of them are supported, both from
//! `tokenizer.json`:
//!
//! - byte-level BPE (GPT-2, Llama 3, Qwen, …; `tokenizer.ggml.model = gpt2`), whose pre-tokenizer has a name (see [`pre`]);
//! - BPE over characters with bytes for unknown ones, which is what SentencePiece's models become in `tokenizer.json` (Llama 2,
//!   Mistral, Gemma; `tokenizer.ggml.model = llama`), of a Gemma 4 with its merges (`gemma4`).
//!
//! The rest is refused by name.

pub(crate) mod pre;
mod sentencepiece;
mod special;
mod template;

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value as Json};

use crate::error::{Result, file_error, unsupported};
use crate::json::{self, Fields};
use crate::value::{Array, Value};
pub(crate) use special::KNOWN_ENDS;
use special::Special;

/// `tokenizer.ggml.token_type` of each kind of token.
pub(crate) const NORMAL: i32 = 1;
pub(crate) const UNKNOWN: i32 = 2;
pub(crate) const CONTROL: i32 = 3;
pub(crate) const USER_DEFINED: i32 = 4;
pub(crate) const UNUSED: i32 = 5;
pub(crate) const BYTE: i32 = 6;

/// The tokenizer of a model's folder.
#[derive(Debug)]
pub struct Tokenizer {
    /// Texts and types of the tokens that there are, by their number.
    tokens: BTreeMap<u32, (String, i32)>,
    kind: Kind,
    special: Special,
    /// The chat template in Jinja, and other templates by name.
    templates: Vec<(String, String)>,
    /// Whether the folder names a `bos_token`, which templates are given.
    names_begin: bool,
    notes: Vec<String>,
    path: std::path::PathBuf,
}

#[derive(Debug)]
enum Kind {
    /// Byte-level BPE: llama.cpp's name of the pre-tokenizer, and the merges.
    ByteLevel { pre: String, merges: Vec<String> },
    /// Of SentencePiece: the score of each token, and whether a space is put before a text.
    SentencePiece { scores: BTreeMap<u32, f32>, space_prefix: bool },
    /// The tokens of SentencePiece with merges, as a Gemma 4 has them.
    Gemma4 { merges: Vec<String> },
}

/// Control tokens of a Gemma 4 that llama.cpp shows nevertheless, since it reads a model's thoughts and calls of tools by them.
const SHOWN: [&str; 7] = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
];

impl Tokenizer {
    /// Reads `tokenizer.json`, and beside it `tokenizer_config.json`, `generation_config.json` and the chat template.
    pub(crate) fn read(folder: &Path, config: &Fields) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        if !path.is_file() {
            return Err(file_error(
                folder,
                "tokenizer.json is missing; transformers writes it with AutoTokenizer.from_pretrained(…).save_pretrained(…)",
            ));
        }
        let fields = Fields { path: path.clone(), fields: json::read(&path)? };
        let tokenizer_config = json::read_optional(&folder.join("tokenizer_config.json"))?;
        let model = object(&fields, "model")?;
        let kind = model.get("type").and_then(Json::as_str).unwrap_or("BPE");
        if kind != "BPE" {
            return Err(unsupported(
                "the tokenizer",
                format!("model type `{kind}` in {}", path.display()),
                "only BPE can be converted: byte-level, or what SentencePiece's BPE becomes",
            ));
        }
        let vocabulary = vocabulary(&fields, model)?;
        let is_sentencepiece = model.get("byte_fallback") == Some(&Json::Bool(true));
        let mut added = added_tokens(&fields)?;
        added.extend(special_of_config(&tokenizer_config, &vocabulary, &added));
        let mut notes = Vec::new();
        let mut tokens: BTreeMap<u32, (String, i32)> =
            vocabulary.iter().map(|(text, id)| (*id, (text.clone(), NORMAL))).collect();
        let is_gemma4 = config.get("model_type").and_then(Json::as_str) == Some("gemma4_text");
        let keeps_merges = is_sentencepiece && is_gemma4 && !sentencepiece::space_prefix(&fields)?.0;
        let (kind, special) = if keeps_merges {
            sentencepiece::mark(&mut tokens, model);
            let kind = Kind::Gemma4 { merges: merges(&fields, model)? };
            (kind, Special::read(folder, config, &tokenizer_config, &fields, &added)?)
        } else if is_sentencepiece {
            let (scores, note) = sentencepiece::scores(&fields, model, &vocabulary)?;
            notes.extend(note);
            sentencepiece::mark(&mut tokens, model);
            let (space_prefix, note) = sentencepiece::space_prefix(&fields)?;
            notes.extend(note);
            let kind = Kind::SentencePiece { scores, space_prefix };
            (kind, Special::read(folder, config, &tokenizer_config, &fields, &added)?)
        } else {
            let tokenizer =
                parsed(&path).map_err(|cause| file_error(&path, format!("not a tokenizer: {cause}")))?;
            let pre = pre::name(&fields, &tokenizer)?;
            if fields.get("normalizer").is_some_and(|step| step.to_string().contains("\"NFC\"")) {
                notes.push(
                    "llama.cpp does not compose characters (NFC): a text with decomposed ones is tokenized differently"
                        .to_owned(),
                );
            }
            let kind = Kind::ByteLevel { pre, merges: merges(&fields, model)? };
            (kind, Special::read(folder, config, &tokenizer_config, &fields, &added)?)
        };
        for token in &added {
            let is_shown = keeps_merges && SHOWN.contains(&&*token.text);
            let is_control = !is_shown && (token.special || looks_special(&token.text));
            // llama.cpp looks for these in the text as it is, where SentencePiece's spaces are spaces.
            let text = if is_control { token.text.clone() } else { token.text.replace('▁', " ") };
            let kind = if is_control { CONTROL } else { USER_DEFINED };
            let is_unknown = tokens.get(&token.id).is_some_and(|(_, kind)| *kind == UNKNOWN);
            tokens.insert(token.id, (text, if is_unknown { UNKNOWN } else { kind }));
        }
        notes.extend(special.notes.iter().cloned());
        let templates = template::read(folder, &tokenizer_config)?;
        let older = json::read_optional(&folder.join("special_tokens_map.json"))?;
        let names_begin = [&tokenizer_config, &older].into_iter().any(|fields| {
            fields.get("bos_token").is_some_and(|token| token.is_string() || token.get("content").is_some())
        });
        Ok(Self { tokens, kind, special, templates, names_begin, notes, path })
    }

    pub(crate) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the chat template in Jinja, if the folder has one.
    pub fn chat_template(&self) -> Option<&str> {
        self.templates.iter().find(|(name, _)| name == template::DEFAULT).map(|(_, text)| &**text)
    }

    /// Returns the texts of the tokens that end a turn or a text, without duplicates: those of `generation_config.json` and
    /// `tokenizer_config.json`, and the known ends of a turn among the tokens.
    pub fn stop_tokens(&self) -> Vec<&str> {
        let ids = self.special.ends.iter().chain(&self.special.end_of_turn);
        let mut texts = Vec::new();
        for text in ids.filter_map(|id| self.tokens.get(id)).map(|(text, _)| &**text) {
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        texts
    }

    /// Returns the tokens whose text is letters and digits of ASCII alone.
    pub fn plain_tokens(&self) -> Vec<u32> {
        let is_plain = |(text, kind): &(String, i32)| {
            *kind == NORMAL && !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
        };
        self.tokens.iter().filter(|(_, token)| is_plain(token)).map(|(id, _)| *id).collect()
    }

    /// Returns the text of the token that llama.cpp puts before each text (`add_bos_token`).
    pub fn begin_token(&self) -> Option<&str> {
        self.tokens.get(&self.special.begin()?).map(|(text, _)| &**text)
    }

    /// Puts no token before a text.
    pub(crate) fn add_no_begin(&mut self) {
        if let Some(begin) = self.begin_token() {
            self.notes.push(format!(
                "the chat template writes no `{begin}`, so the file has add_bos_token = false: a chat in llama.cpp then has the tokens of \
                 apply_chat_template, and any other text no `{begin}`"
            ));
        }
        self.special.add_bos = false;
    }

    /// Returns llama.cpp's name of the pre-tokenizer; `default` for SentencePiece.
    pub fn pre_tokenizer(&self) -> &str {
        match &self.kind {
            Kind::ByteLevel { pre, .. } => pre,
            Kind::SentencePiece { .. } => "default",
            Kind::Gemma4 { .. } => "gemma4",
        }
    }

    /// Returns whether there are tokens with all of these texts.
    pub(crate) fn has_all(&self, texts: &[&str]) -> bool {
        texts.iter().all(|text| self.tokens.values().any(|(known, _)| known == text))
    }

    /// The metadata for a model with this many rows of the embedding: missing tokens are filled up.
    pub(crate) fn metadata(&self, rows: u32) -> Result<Vec<(String, Value)>> {
        self.check(rows)?;
        let (mut texts, mut kinds) = (Vec::new(), Vec::new());
        for id in 0..rows {
            let (text, kind) = match self.tokens.get(&id) {
                Some((text, kind)) => (text.clone(), *kind),
                None => (format!("[PAD{id}]"), UNUSED),
            };
            texts.push(text);
            kinds.push(kind);
        }
        let mut sorted: Vec<&str> = texts.iter().map(String::as_str).collect();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(unsupported(
                "a tokenizer with two tokens of one text",
                format!("{:?}", twice[0]),
                "llama.cpp refuses to load it",
            ));
        }
        let mut metadata: Vec<(&str, Value)> = Vec::new();
        match &self.kind {
            Kind::ByteLevel { pre, merges } => {
                metadata.push(("model", "gpt2".into()));
                metadata.push(("pre", pre.clone().into()));
                metadata.push(("tokens", Value::Array(Array::String(texts))));
                metadata.push(("token_type", Value::Array(Array::I32(kinds))));
                metadata.push(("merges", Value::Array(Array::String(merges.clone()))));
            }
            Kind::Gemma4 { merges } => {
                metadata.push(("model", "gemma4".into()));
                metadata.push(("tokens", Value::Array(Array::String(texts))));
                metadata.push(("token_type", Value::Array(Array::I32(kinds))));
                metadata.push(("merges", Value::Array(Array::String(merges.clone()))));
                metadata.push(("add_space_prefix", false.into()));
            }
            Kind::SentencePiece { scores, space_prefix } => {
                let score = |(id, kind): (u32, &i32)| match *kind {
                    UNUSED => -10_000.0,
                    NORMAL => scores.get(&id).copied().unwrap_or(sentencepiece::UNMERGED),
                    _ => -1000.0,
                };
                let scores = (0..).zip(&kinds).map(score).collect();
                metadata.push(("model", "llama".into()));
                metadata.push(("pre", "default".into()));
                metadata.push(("tokens", Value::Array(Array::String(texts))));
                metadata.push(("scores", Value::Array(Array::F32(scores))));
                metadata.push(("token_type", Value::Array(Array::I32(kinds))));
                metadata.push(("add_space_prefix", (*space_prefix).into()));
            }
        }
        metadata.extend(self.special.metadata(rows));
        let mut metadata: Vec<(String, Value)> =
            metadata.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
        metadata.extend(template::metadata(&self.templates, self.names_begin));
        Ok(metadata)
    }

    /// Tokens beyond the embedding's rows are left out if they were added to the vocabulary, else the folder contradicts itself.
    fn check(&self, rows: u32) -> Result<()> {
        let beyond = self.tokens.range(rows..).find(|(_, (_, kind))| ![CONTROL, USER_DEFINED].contains(kind));
        match beyond {
            None => Ok(()),
            Some((id, (text, _))) => Err(file_error(
                &self.path,
                format!(
                    "the token {text:?} has the number {id}, but the embedding has {rows} rows; the tokenizer is another model's"
                ),
            )),
        }
    }
}

/// A token beside the vocabulary of merges.
pub(crate) struct AddedToken {
    pub(crate) id: u32,
    pub(crate) text: String,
    pub(crate) special: bool,
}

/// Parses a `tokenizer.json` by what is compiled once, in `tokenizers`; its other constructors would be compiled again here.
fn parsed(path: &Path) -> tokenizers::Result<tokenizers::Tokenizer> {
    std::fs::read_to_string(path)?.parse()
}

fn object<'a>(fields: &'a Fields, key: &str) -> Result<&'a Map<String, Json>> {
    fields
        .get(key)
        .and_then(Json::as_object)
        .ok_or_else(|| file_error(&fields.path, format!("`{key}` is missing; expected an object")))
}

fn vocabulary(fields: &Fields, model: &Map<String, Json>) -> Result<BTreeMap<String, u32>> {
    let refuse = |reason: String| file_error(&fields.path, reason);
    let all = model.get("vocab").and_then(Json::as_object);
    let all = all.ok_or_else(|| refuse("the model's `vocab` is missing".to_owned()))?;
    let mut ids = std::collections::BTreeSet::new();
    let number = |(text, id): (&String, &Json)| {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.ok_or_else(|| refuse(format!("the token {text:?} has no number")))?;
        if !ids.insert(id) {
            return Err(refuse(format!("two tokens have the number {id}")));
        }
        Ok((text.clone(), id))
    };
    all.iter().map(number).collect()
}

fn added_tokens(fields: &Fields) -> Result<Vec<AddedToken>> {
    let Some(Json::Array(all)) = fields.get("added_tokens") else { return Ok(Vec::new()) };
    let read = |token: &Json| {
        let id = token.get("id").and_then(Json::as_u64).and_then(|id| u32::try_from(id).ok());
        let text = token.get("content").and_then(Json::as_str);
        let (Some(id), Some(text)) = (id, text) else {
            return Err(file_error(
                &fields.path,
                format!("the added token {token} has no `id` or no `content`"),
            ));
        };
        let special = token.get("special") == Some(&Json::Bool(true));
        Ok(AddedToken { id, text: text.to_owned(), special })
    };
    all.iter().map(read).collect()
}

/// Returns the tokens that are ordinary in `tokenizer.json` and special in `tokenizer_config.json`.
fn special_of_config(
    config: &Map<String, Json>,
    vocabulary: &BTreeMap<String, u32>,
    added: &[AddedToken],
) -> Vec<AddedToken> {
    let listed = config.get("added_tokens_decoder").and_then(Json::as_object).into_iter().flatten();
    let special = |(_, token): (&String, &Json)| {
        let text = token.get("content")?.as_str()?;
        let is_special = token.get("special") == Some(&Json::Bool(true));
        let is_new = added.iter().all(|known| known.text != text);
        let id = *vocabulary.get(text).filter(|_| is_special && is_new)?;
        Some(AddedToken { id, text: text.to_owned(), special: true })
    };
    listed.filter_map(special).collect()
}

/// Returns merges as llama.cpp reads them: both parts with a space between. A space within a part is written as byte-level BPE does.
fn merges(fields: &Fields, model: &Map<String, Json>) -> Result<Vec<String>> {
    let pairs = pairs(fields, model)?;
    Ok(pairs
        .iter()
        .map(|(one, other)| format!("{} {}", one.replace(' ', "Ġ"), other.replace(' ', "Ġ")))
        .collect())
}

/// Returns the merges, which files have as a text with a space or as a list of two texts.
pub(crate) fn pairs<'a>(fields: &Fields, model: &'a Map<String, Json>) -> Result<Vec<(&'a str, &'a str)>> {
    let refuse =
        |merge: &Json| file_error(&fields.path, format!("the merge {merge} is not a pair of tokens"));
    let Some(Json::Array(all)) = model.get("merges") else {
        return Err(file_error(&fields.path, "the model's `merges` are missing"));
    };
    let pair = |merge: &'a Json| match merge {
        Json::String(text) => text.split_once(' ').ok_or_else(|| refuse(merge)),
        Json::Array(two) => match two.as_slice() {
            [Json::String(one), Json::String(other)] => Ok((&**one, &**other)),
            _ => Err(refuse(merge)),
        },
        _ => Err(refuse(merge)),
    };
    all.iter().map(pair).collect()
}

/// Returns whether a token is a control token although its file has it as an ordinary one, as llama.cpp's converter guesses.
fn looks_special(text: &str) -> bool {
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || (text.starts_with("<|") && text.ends_with("|>"))
        || (text.starts_with("<｜") && text.ends_with("｜>"))
        || (text.starts_with("<unused") && text.ends_with('>'))
}
