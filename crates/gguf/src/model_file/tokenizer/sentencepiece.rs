//! SentencePiece's BPE: `tokenizer.ggml.model = llama`. The file has no merges: llama.cpp joins the two neighbours whose text is the token
//! with the highest score. So every way to split a token into two others is a merge, and merges are ordered by the score of their token;
//! a Gemma's scores follow the order of its vocabulary.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde_json::{Value as Json, json};

use super::super::metadata::{Metadata, missing};
use super::{Parts, Tokens};
use crate::error::Result;
use crate::tokenizer::{NORMAL, UNUSED};
use crate::value::Value;

/// # Errors
/// No scores.
pub(super) fn parts(metadata: &Metadata<'_>, tokens: &Tokens<'_>) -> Result<Parts> {
    let scores =
        tokens.scores.ok_or_else(|| missing(tokens.path, "tokenizer.ggml.scores", "a list of numbers"))?;
    let prefix = metadata.raw("tokenizer.ggml.add_space_prefix") != Some(&Value::Bool(false));
    let replace =
        |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let begin = prefix.then(|| json!({ "type": "Prepend", "prepend": "▁" }));
    let strip = prefix.then(|| json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    let steps: Vec<Json> = begin.into_iter().chain([replace(" ", "▁")]).collect();
    let decoders: Vec<Json> =
        [replace("▁", " "), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })]
            .into_iter()
            .chain(strip)
            .collect();
    Ok(Parts {
        model: json!({
            "type": "BPE", "dropout": null, "unk_token": tokens.text(metadata.token("unknown")),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
            "ignore_merges": false, "vocab": tokens.vocabulary(), "merges": merges(tokens, scores),
        }),
        normalizer: json!({ "type": "Sequence", "normalizers": steps }),
        pre_tokenizer: Json::Null,
        post_processor: None,
        decoder: json!({ "type": "Sequence", "decoders": decoders }),
        adds: [true, false],
        normalizes_blanks: !prefix,
    })
}

/// The merges, best first. Added tokens are found in a text before anything is merged, so nothing is merged into them.
fn merges(tokens: &Tokens<'_>, scores: &[f32]) -> Vec<[String; 2]> {
    let is_merged = |kind: i32| kind == NORMAL || kind == UNUSED;
    let known: HashMap<&str, u32> =
        tokens.all().filter(|(_, _, kind)| is_merged(*kind)).map(|(id, text, _)| (text, id)).collect();
    let mut ids: Vec<(u32, &str)> = known.iter().map(|(text, id)| (*id, *text)).collect();
    ids.sort_unstable_by(|(one, _), (other, _)| {
        let score = |id: u32| scores[id as usize];
        score(*other).total_cmp(&score(*one)).then(one.cmp(other))
    });
    let mut merges = Vec::new();
    for (_, text) in ids {
        let splits = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        let mut parts: Vec<(&str, &str)> =
            splits.filter(|(one, other)| known.contains_key(one) && known.contains_key(other)).collect();
        parts.sort_by_key(|(one, _)| Reverse(one.len()));
        merges.extend(parts.into_iter().map(|(one, other)| [one.to_owned(), other.to_owned()]));
    }
    merges
}
