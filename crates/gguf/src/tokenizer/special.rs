//! The special tokens: which one begins and ends a text or a turn, and which are added to a text.
//!
//! The sources, in llama.cpp's order: `tokenizer_config.json` by text, then `config.json` by number. Ends of a text come from
//! `generation_config.json`, too, which may have several.

use std::path::Path;

use serde_json::{Map, Value as Json};

use super::AddedToken;
use crate::error::Result;
use crate::json::{self, Fields};
use crate::value::Value;

/// Texts by which llama.cpp finds the end of a turn.
const ENDS_OF_TURN: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"];

/// Texts at which llama.cpp stops although no key of the file names them.
pub(crate) const KNOWN_ENDS: [&str; 7] =
    ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"];

/// The keys of ends besides that of a text.
const FURTHER_ENDS: [&str; 2] = ["eot_token_id", "eom_token_id"];

/// The roles of special tokens, under their names in both formats.
const ROLES: [(&str, &str); 7] = [
    ("bos", "bos_token_id"),
    ("eos", "eos_token_id"),
    ("unk", "unknown_token_id"),
    ("sep", "seperator_token_id"),
    ("pad", "padding_token_id"),
    ("cls", "cls_token_id"),
    ("mask", "mask_token_id"),
];

#[derive(Debug)]
pub(super) struct Special {
    /// Keys and tokens.
    ids: Vec<(&'static str, u32)>,
    /// Tokens that end a text.
    pub(super) ends: Vec<u32>,
    /// Tokens that end a turn, by their text.
    pub(super) end_of_turn: Vec<u32>,
    pub(super) add_bos: bool,
    add_eos: bool,
    pub(super) notes: Vec<String>,
}

impl Special {
    pub(super) fn read(
        folder: &Path,
        config: &Fields,
        tokenizer_config: &Map<String, Json>,
        tokenizer: &Fields,
        added: &[AddedToken],
    ) -> Result<Self> {
        let generation = json::read_optional(&folder.join("generation_config.json"))?;
        let numbers = |fields: &Map<String, Json>, role: &str| -> Vec<u32> {
            let number = |value: &Json| value.as_u64().and_then(|id| u32::try_from(id).ok());
            match fields.get(&format!("{role}_token_id")) {
                Some(Json::Array(all)) => all.iter().filter_map(number).collect(),
                Some(value) => number(value).into_iter().collect(),
                None => Vec::new(),
            }
        };
        let by_text = |text: &str| added.iter().find(|token| token.text == text).map(|token| token.id);
        let of_config = |role: &str| {
            let text = match tokenizer_config.get(&format!("{role}_token"))? {
                Json::String(text) => text,
                entry => entry.get("content")?.as_str()?,
            };
            by_text(text).or_else(|| {
                let id = tokenizer.get("model")?.get("vocab")?.get(text)?.as_u64()?;
                u32::try_from(id).ok()
            })
        };

        // The token of each role, and all tokens that end a text, once each.
        let mut ids = Vec::new();
        let mut ends = numbers(&generation, "eos");
        for (role, key) in ROLES {
            let of_model = || numbers(&config.fields, role).first().copied();
            let of_generation = || numbers(&generation, role).first().copied();
            if let Some(id) = of_config(role).or_else(of_model).or_else(of_generation) {
                ids.push((key, id));
                if role == "eos" {
                    ends.insert(0, id);
                }
            }
        }
        ends.extend(numbers(&config.fields, "eos"));
        let mut seen = Vec::new();
        ends.retain(|id| {
            !seen.contains(id) && {
                seen.push(*id);
                true
            }
        });

        // Further ends. Only a few have a place in the file; llama.cpp stops at known ends in any case.
        let end_of_turn: Vec<u32> = ENDS_OF_TURN.iter().filter_map(|text| by_text(text)).collect();
        let stops = |end: &&u32| KNOWN_ENDS.iter().any(|text| by_text(text) == Some(**end));
        let further = ends.iter().skip(1);
        let unknown: Vec<u32> = further.clone().filter(|end| !stops(end)).copied().collect();
        let known = end_of_turn.iter().chain(further).filter(|end| Some(*end) != ends.first());
        let known = known.filter(|end| !unknown.contains(end)).copied();
        let placed: Vec<u32> = unknown.iter().copied().chain(known.take(1)).collect();
        ids.extend(FURTHER_ENDS.into_iter().zip(placed));
        let id_of = |key: &str| ids.iter().find(|(name, _)| *name == key).map(|(_, id)| *id);
        let mut notes = Vec::new();
        if unknown.len() > FURTHER_ENDS.len() {
            notes.push(format!(
                "llama.cpp stops at the tokens {:?} only if it is asked to: a file has places for three ends of a text",
                &unknown[FURTHER_ENDS.len()..]
            ));
        }

        // Whether tokens are added to each text: by the file's own configuration, or else as the tokenizer does.
        let (begin, end) = added_by_template(tokenizer, by_text);
        let mut decide = |role: &str, key: &str, id: Option<u32>| {
            let added = id.is_some() && id == id_of(key);
            match tokenizer_config.get(&format!("add_{role}_token")) {
                Some(Json::Bool(configured)) if *configured != added => {
                    notes.push(format!(
                        "tokenizer_config.json has add_{role}_token = {configured}, tokenizer.json does {}; the file has {configured}",
                        if added { "add it" } else { "not add it" }
                    ));
                    *configured
                }
                _ => added,
            }
        };
        let add_bos = decide("bos", "bos_token_id", begin);
        let add_eos = decide("eos", "eos_token_id", end);
        Ok(Self { ids, ends, end_of_turn, add_bos, add_eos, notes })
    }

    /// The token that is put before each text.
    pub(super) fn begin(&self) -> Option<u32> {
        self.ids.iter().filter(|_| self.add_bos).find(|(key, _)| *key == "bos_token_id").map(|(_, id)| *id)
    }

    /// The metadata, without the prefix; tokens beyond the embedding's rows are left out.
    pub(super) fn metadata(&self, rows: u32) -> Vec<(&'static str, Value)> {
        let ids = self.ids.iter().filter(|(_, id)| *id < rows).map(|(key, id)| (*key, (*id).into()));
        // Always both: where they are missing, llama.cpp assumes what is usual for the pre-tokenizer.
        ids.chain([("add_bos_token", self.add_bos.into()), ("add_eos_token", self.add_eos.into())]).collect()
    }
}

/// Returns the tokens that the post-processor puts before and after a text.
fn added_by_template(
    tokenizer: &Fields,
    by_text: impl Fn(&str) -> Option<u32>,
) -> (Option<u32>, Option<u32>) {
    let Some(post) = tokenizer.get("post_processor") else { return (None, None) };
    let processors = match post.get("processors") {
        Some(Json::Array(all)) => all.clone(),
        _ => vec![post.clone()],
    };
    let template = processors
        .iter()
        .find(|step| step.get("type").and_then(Json::as_str) == Some("TemplateProcessing"))
        .and_then(|step| step.get("single")?.as_array().cloned())
        .unwrap_or_default();
    let special = |part: Option<&Json>| by_text(part?.get("SpecialToken")?.get("id")?.as_str()?);
    (special(template.first()), special(template.last()))
}
