//! Gemma 4's BPE: `tokenizer.ggml.model = gemma4`. Its tokens are those of SentencePiece, with `▁` for a blank and bytes for unknown
//! characters, and the file has merges. llama.cpp divides a text at runs of line breaks alone.

use serde_json::{Value as Json, json};

use super::super::metadata::{Metadata, missing};
use super::{Parts, Tokens};
use crate::error::{Result, file_error};
use crate::value::Value;

/// # Errors
/// No merges, or some that are not two parts.
pub(super) fn parts(metadata: &Metadata<'_>, tokens: &Tokens<'_>) -> Result<Parts> {
    const KEY: &str = "tokenizer.ggml.merges";
    let merges = metadata.raw(KEY).and_then(Value::as_strings);
    let merges = merges.ok_or_else(|| missing(tokens.path, KEY, "a list of merges"))?;
    let pair = |merge: &String| -> Result<Json> {
        // The first part may begin with a blank.
        let at = merge.char_indices().skip(1).find(|(_, letter)| *letter == ' ').map(|(at, _)| at);
        let at = at.ok_or_else(|| {
            file_error(tokens.path, format!("the merge {merge:?} is not two parts; get the file again"))
        })?;
        Ok(json!([merge[..at], merge[at + 1..]]))
    };
    let merges: Vec<Json> = merges.iter().map(pair).collect::<Result<_>>()?;
    let replace =
        |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    Ok(Parts {
        model: json!({
            "type": "BPE", "dropout": null, "unk_token": tokens.text(metadata.token("unknown")),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
            "ignore_merges": false, "vocab": tokens.vocabulary(), "merges": merges,
        }),
        normalizer: replace(" ", "▁"),
        pre_tokenizer: json!({
            "type": "Split", "pattern": { "Regex": "\n+" }, "behavior": "Isolated", "invert": false,
        }),
        post_processor: None,
        decoder: json!({
            "type": "Sequence", "decoders": [replace("▁", " "), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })],
        }),
        adds: [true, false],
        normalizes_blanks: true,
    })
}
