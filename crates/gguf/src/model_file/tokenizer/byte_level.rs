//! Byte-level BPE: `tokenizer.ggml.model = gpt2`.

use serde_json::{Value as Json, json};

use super::super::metadata::{Metadata, missing};
use super::{Parts, Tokens};
use crate::error::{Result, file_error, unsupported};
use crate::tokenizer::pre::{self, Pre};
use crate::value::Value;

/// The model with the file's merges, and the expressions that `tokenizer.ggml.pre` names.
///
/// # Errors
/// No merges, or a merge that is no pair; an unknown pre-tokenizer, or none: texts would be split elsewhere than in the model's training.
pub(super) fn parts(metadata: &Metadata<'_>, tokens: &Tokens<'_>) -> Result<Parts> {
    let name = metadata.raw("tokenizer.ggml.pre").and_then(Value::as_str).unwrap_or_default();
    let Some(Pre { expressions, ignore_merges, composes, adds_begin }) = pre::by_name(name) else {
        let found = if name.is_empty() { "none".to_owned() } else { format!("`{name}`") };
        return Err(unsupported(
            format!("the pre-tokenizer (`tokenizer.ggml.pre`) of {}", metadata.path.display()),
            found,
            format!(
                "known are {}; give the model's folder in Hugging Face's layout",
                pre::names().join(", ")
            ),
        ));
    };
    const MERGES: &str = "tokenizer.ggml.merges";
    let merges = metadata.raw(MERGES).and_then(Value::as_strings);
    let merges = merges.ok_or_else(|| missing(metadata.path, MERGES, "a list of pairs of tokens"))?;
    let pair = |merge: &String| {
        // A part begins with another character than a space, so one that is a space itself is before the separator.
        let at = merge.char_indices().skip(1).find(|(_, letter)| *letter == ' ').map(|(at, _)| at);
        let (one, other) =
            at.map(|at| (&merge[..at], &merge[at + 1..])).filter(|(_, other)| !other.is_empty())?;
        Some(json!([one, other]))
    };
    let pairs = merges.iter().map(|merge| {
        pair(merge)
            .ok_or_else(|| file_error(tokens.path, format!("the merge {merge:?} is no pair of tokens")))
    });
    let byte_level = |use_regex: bool, trim_offsets: bool| {
        json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": trim_offsets, "use_regex": use_regex
        })
    };
    let split = |expression: &&str| json!({ "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false });
    let mut steps: Vec<Json> = expressions.iter().map(split).collect();
    steps.push(byte_level(false, true));
    Ok(Parts {
        model: json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignore_merges, "vocab": tokens.vocabulary(),
            "merges": pairs.collect::<Result<Vec<Json>>>()?,
        }),
        normalizer: if composes { json!({ "type": "NFC" }) } else { Json::Null },
        pre_tokenizer: json!({ "type": "Sequence", "pretokenizers": steps }),
        post_processor: Some(byte_level(false, false)),
        decoder: byte_level(false, true),
        adds: [adds_begin, false],
        normalizes_blanks: false,
    })
}
