//! Tokenizers of SentencePiece, from `tokenizer.json`.
//!
//! There the model is BPE with ranked merges. llama.cpp instead joins the two neighbours whose text is the token with the highest
//! *score*. Both do the same if (1) all merges into one token follow each other, and (2) every way to split a token into two others is
//! a merge; then the score is minus the rank of the token. SentencePiece's own models have both properties. A tokenizer without the
//! first is refused; one without the second is converted, and a note describes where results may differ.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Map, Value as Json};

use super::{BYTE, NORMAL, UNKNOWN, pairs};
use crate::error::{Result, unsupported};
use crate::json::Fields;

/// The score of tokens that nothing is merged into, such as single characters.
pub(super) const UNMERGED: f32 = -1e6;

/// Returns the score of each token that is merged from others, and notes.
pub(super) fn scores(
    fields: &Fields,
    model: &Map<String, Json>,
    vocabulary: &BTreeMap<String, u32>,
) -> Result<(BTreeMap<u32, f32>, Option<String>)> {
    let refuse = |step: String| {
        unsupported(
            "a BPE tokenizer with bytes for unknown characters that is not SentencePiece's",
            step,
            "llama.cpp would tokenize differently",
        )
    };
    let added: BTreeSet<&str> = fields
        .get("added_tokens")
        .and_then(Json::as_array)
        .into_iter()
        .flatten()
        .filter_map(|token| token.get("content")?.as_str())
        .collect();
    let pairs = pairs(fields, model)?;
    let mut scores = BTreeMap::new();
    let mut last = None;
    for (one, other) in &pairs {
        let text = format!("{one}{other}");
        // It is found in a text before anything is merged, as Gemma 3's runs of line breaks are.
        if added.contains(&*text) {
            continue;
        }
        let Some(id) = vocabulary.get(&text) else {
            return Err(refuse(format!("{one:?} and {other:?} are merged into {text:?}, which is no token")));
        };
        if last != Some(*id) {
            let score = -(scores.len() as f32);
            if scores.insert(*id, score).is_some() {
                return Err(refuse(format!("the merges into {text:?} do not follow each other")));
            }
            last = Some(*id);
        }
    }
    let merges: BTreeSet<(&str, &str)> = pairs.into_iter().collect();
    let known: HashMap<&str, u32> = vocabulary
        .iter()
        .filter(|(text, _)| !added.contains(&***text))
        .map(|(text, id)| (&**text, *id))
        .collect();
    let mut differing = Vec::new();
    for text in known.keys().filter(|text| !is_byte(text)) {
        let splits = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        let both = splits.filter(|(one, other)| known.contains_key(one) && known.contains_key(other));
        differing.extend(both.filter(|pair| !merges.contains(pair)).map(|(one, other)| (*text, one, other)));
    }
    let note = differing.iter().min().map(|(text, one, other)| {
        format!(
            "llama.cpp may tokenize some texts differently: it also joins {} pairs that are no merges, such as {one:?} and {other:?} \
             into {text:?}",
            differing.len()
        )
    });
    Ok((scores, note))
}

/// Marks bytes and the unknown token.
pub(super) fn mark(tokens: &mut BTreeMap<u32, (String, i32)>, model: &Map<String, Json>) {
    let unknown = model.get("unk_token").and_then(Json::as_str);
    for (text, kind) in tokens.values_mut() {
        *kind = match Some(&**text) == unknown {
            true => UNKNOWN,
            false if is_byte(text) => BYTE,
            false => NORMAL,
        };
    }
}

/// `<0x0A>`.
fn is_byte(text: &str) -> bool {
    text.len() == 6
        && text.starts_with("<0x")
        && text.ends_with('>')
        && text[3..5].bytes().all(|digit| digit.is_ascii_hexdigit())
}

/// Returns whether a space is put before a text, and a note where llama.cpp puts it elsewhere.
pub(super) fn space_prefix(fields: &Fields) -> Result<(bool, Option<String>)> {
    let steps = |key: &str, list: &str| -> Vec<Json> {
        match fields.get(key) {
            None => Vec::new(),
            Some(step) => match step.get(list) {
                Some(Json::Array(all)) => all.clone(),
                _ => vec![step.clone()],
            },
        }
    };
    let kind = |step: &Json| step.get("type").and_then(Json::as_str).unwrap_or_default().to_owned();
    let (mut prefix, mut note) = (false, None);
    for step in steps("normalizer", "normalizers") {
        match &*kind(&step) {
            "Prepend" => prefix = true,
            "Replace" => {}
            other => {
                let remedy = "known are Prepend and Replace";
                return Err(unsupported("the tokenizer's normalizer", format!("`{other}`"), remedy));
            }
        }
    }
    for step in steps("pre_tokenizer", "pretokenizers") {
        match &*kind(&step) {
            "Metaspace" => {
                let scheme = step.get("prepend_scheme").and_then(Json::as_str).unwrap_or("always");
                prefix = scheme != "never";
                note = prefix.then(|| {
                    let what = match scheme {
                        "first" => "begins with a space or follows a special token",
                        _ => "begins with a space",
                    };
                    format!("llama.cpp tokenizes a text that {what} differently: it puts a space before each (Metaspace, `{scheme}`)")
                });
            }
            // Gemma 3 splits at spaces, which are no longer there.
            "Split" => {}
            other => {
                let remedy = "known are Metaspace and Split";
                return Err(unsupported("the tokenizer's pre-tokenizer", format!("`{other}`"), remedy));
            }
        }
    }
    Ok((prefix, note))
}
