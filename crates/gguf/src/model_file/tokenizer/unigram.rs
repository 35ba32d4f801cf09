//! SentencePiece's Unigram: `tokenizer.ggml.model = t5`. A text is cut into the tokens with the largest sum of scores.

use serde_json::{Value as Json, json};

use super::super::metadata::{Metadata, missing};
use super::{Parts, Tokens};
use crate::error::Result;
use crate::value::{Array, Value};

/// # Errors
/// No scores.
pub(super) fn parts(metadata: &Metadata<'_>, tokens: &Tokens<'_>) -> Result<Parts> {
    let scores =
        tokens.scores.ok_or_else(|| missing(tokens.path, "tokenizer.ggml.scores", "a list of numbers"))?;
    let flag = |key: &str, default: bool| match metadata.raw(&format!("tokenizer.ggml.{key}")) {
        Some(Value::Bool(flag)) => *flag,
        _ => default,
    };
    let charsmap = match metadata.raw("tokenizer.ggml.precompiled_charsmap") {
        Some(Value::Array(Array::U8(bytes))) => bytes.clone(),
        Some(Value::Array(Array::I8(bytes))) => bytes.iter().map(|byte| byte.cast_unsigned()).collect(),
        _ => Vec::new(),
    };
    let mut steps = Vec::new();
    if !charsmap.is_empty() {
        steps.push(json!({ "type": "Precompiled", "precompiled_charsmap": base64(&charsmap) }));
    }
    if flag("remove_extra_whitespaces", false) {
        steps.push(json!({ "type": "Strip", "strip_left": true, "strip_right": true }));
        steps.push(json!({ "type": "Replace", "pattern": { "Regex": " {2,}" }, "content": " " }));
    }
    let scheme = if flag("add_space_prefix", true) { "always" } else { "never" };
    let metaspace =
        json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true });
    let vocabulary: Vec<Json> =
        tokens.texts.iter().zip(scores).map(|(text, score)| json!([text, score])).collect();
    Ok(Parts {
        model: json!({
            "type": "Unigram", "unk_id": metadata.token("unknown"), "vocab": vocabulary, "byte_fallback": false
        }),
        normalizer: if steps.is_empty() {
            Json::Null
        } else {
            json!({ "type": "Sequence", "normalizers": steps })
        },
        pre_tokenizer: metaspace.clone(),
        post_processor: None,
        decoder: metaspace,
        adds: [false, true],
        normalizes_blanks: false,
    })
}

/// Bytes as text of 64 letters (RFC 4648).
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let letters = |chunk: &[u8]| {
        let bits =
            chunk.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        let used = chunk.len() + 1;
        (0..4).map(move |at| match at < used {
            true => char::from(LETTERS[(bits >> (18 - 6 * at) & 63) as usize]),
            false => '=',
        })
    };
    bytes.chunks(3).flat_map(letters).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn bytes_are_padded_as_in_rfc_4648() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")]
        {
            assert_eq!(super::base64(bytes.as_bytes()), text);
        }
    }
}
