//! llama.cpp's name of a byte-level pre-tokenizer, `tokenizer.ggml.pre`.
//!
//! llama.cpp has the pre-tokenizers' regular expressions in its code, under names. A wrong name is no error: texts are split elsewhere,
//! and the model reads tokens that it has not seen in training. Two ways lead to the name:
//!
//! 1. llama.cpp's converter tokenizes a text, and finds the SHA-256 of the tokens in a table (`checksums.txt`).
//! 2. A tokenizer that the table lacks, such as one trained by its user, is known by its regular expressions.
//!
//! Any other is refused.
//!
//! Source: llama.cpp, `conversion/base.py` (`get_vocab_base_pre`) and `src/llama-vocab.cpp`.

use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use crate::error::{Result, file_error, unsupported};
use crate::json::Fields;

/// SHA-256 of the tokens of [`TEXT`], and the name.
const CHECKSUMS: &str = include_str!("checksums.txt");

/// The text that llama.cpp's converter tokenizes.
const TEXT: &str = "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u{200d}🌫️ (multiple emojis concatenated) ✅ 🦙🦙 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL";

/// The regular expression of GPT-2, which `ByteLevel` has built in.
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Expressions of `tokenizer.json`, llama.cpp's name for one that merges a whole word that is a token, and for one that does not.
const EXPRESSIONS: [(&str, Option<&str>, Option<&str>); 6] = [
    (GPT_2, None, Some("gpt-2")),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Some("llama-bpe"),
        Some("smaug-bpe"),
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        None,
        Some("qwen2"),
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        None,
        Some("qwen35"),
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        None,
        Some("gpt-4o"),
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Some("tekken"),
        None,
    ),
];

/// Other names of llama.cpp for the same expressions, and for the same way to take whole words.
const ALIASES: [(&str, &[&str]); 5] = [
    ("llama-bpe", &["llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"]),
    ("smaug-bpe", &["dbrx"]),
    ("qwen2", &["deepseek-r1-qwen", "megrez", "kormo"]),
    ("gpt-4o", &["llama4", "kanana2"]),
    ("gpt-2", &["phi-2", "olmo", "mpt"]),
];
/// Names of the splits that take every digit alone, and then GPT-2's words.
const SINGLE_DIGITS: [&str; 4] = ["smollm", "starcoder", "refact", "command-r"];
/// Names whose published tokenizers compose characters (NFC) first. llama.cpp does not.
const COMPOSED: [&str; 3] = ["qwen2", "qwen35", "olmo"];

/// What a name of llama.cpp means.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Pre {
    /// The expressions at which texts are split, one after the other.
    pub(crate) expressions: Vec<&'static str>,
    /// Whether a word that is a token is taken whole.
    pub(crate) ignore_merges: bool,
    /// Whether characters are composed first.
    pub(crate) composes: bool,
    /// Whether llama.cpp begins each text with a token where a file does not say.
    pub(crate) adds_begin: bool,
}

/// Returns what a name means; `None` for an unknown one.
pub(crate) fn by_name(name: &str) -> Option<Pre> {
    let composes = COMPOSED.contains(&name);
    if SINGLE_DIGITS.contains(&name) {
        return Some(Pre {
            expressions: vec![r"\p{N}", GPT_2],
            ignore_merges: false,
            composes,
            adds_begin: false,
        });
    }
    let usual = ALIASES.iter().find(|(_, others)| others.contains(&name)).map_or(name, |(usual, _)| usual);
    let (expression, unmerged, _) =
        EXPRESSIONS.iter().find(|(_, unmerged, merged)| [*unmerged, *merged].contains(&Some(usual)))?;
    let ignore_merges = *unmerged == Some(usual);
    Some(Pre { expressions: vec![expression], ignore_merges, composes, adds_begin: ignore_merges })
}

/// Returns all known names.
pub(crate) fn names() -> Vec<&'static str> {
    let usual = EXPRESSIONS.iter().flat_map(|(_, unmerged, merged)| [*unmerged, *merged]).flatten();
    let others = ALIASES.iter().flat_map(|(_, others)| others.iter().copied());
    let mut names: Vec<&str> = usual.chain(others).chain(SINGLE_DIGITS).collect();
    names.sort_unstable();
    names
}

/// Returns the name of a tokenizer's pre-tokenizer.
pub(super) fn name(fields: &Fields, tokenizer: &tokenizers::Tokenizer) -> Result<String> {
    let checksum = checksum(tokenizer).map_err(|cause| file_error(&fields.path, cause.to_string()))?;
    let mut checksums = CHECKSUMS.lines().filter_map(|line| line.split_once(' '));
    if let Some((_, name)) = checksums.find(|(sum, _)| *sum == checksum) {
        return Ok(name.to_owned());
    }
    let (expressions, merges_words) = (expressions(fields), ignores_merges(fields));
    if let Some(name) = expressions.as_deref().and_then(|all| by_expressions(all, merges_words)) {
        return Ok(name.to_owned());
    }
    let steps = fields.get("pre_tokenizer").map_or_else(|| "none".to_owned(), Json::to_string);
    Err(unsupported(
        "the tokenizer's pre-tokenizer",
        format!("{steps} (checksum {checksum})"),
        "llama.cpp knows none that splits texts like it; train with a tokenizer of GPT-2, Llama 3 or Qwen",
    ))
}

/// Returns the SHA-256 of the tokens of [`TEXT`], written as Python writes a list.
fn checksum(tokenizer: &tokenizers::Tokenizer) -> tokenizers::Result<String> {
    let ids: Vec<String> = tokenizer.encode(TEXT, true)?.get_ids().iter().map(u32::to_string).collect();
    let digest = Sha256::digest(format!("[{}]", ids.join(", ")));
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns whether a word that is a token is taken whole, without its merges.
fn ignores_merges(fields: &Fields) -> bool {
    fields.get("model").and_then(|model| model.get("ignore_merges")) == Some(&Json::Bool(true))
}

fn by_expressions(expressions: &[String], ignore_merges: bool) -> Option<&'static str> {
    match expressions {
        [expression] => {
            let (_, unmerged, merged) = EXPRESSIONS.iter().find(|(other, ..)| other == expression)?;
            if ignore_merges { *unmerged } else { *merged }
        }
        // Every digit alone, as StarCoder and SmolLM.
        [digits, rest] if digits == r"\p{N}" && rest == GPT_2 && !ignore_merges => Some("smollm"),
        _ => None,
    }
}

/// Returns the expressions at which texts are split, one after the other; `None` for steps that are not known.
fn expressions(fields: &Fields) -> Option<Vec<String>> {
    let normalizer = fields.get("normalizer").and_then(|step| step.get("type")?.as_str());
    // llama.cpp does not normalise; composed characters, which NFC makes, are what nearly all texts have.
    if !matches!(normalizer, None | Some("NFC")) {
        return None;
    }
    let step = fields.get("pre_tokenizer")?;
    let steps = match step.get("pretokenizers") {
        Some(Json::Array(all)) => all.clone(),
        _ => vec![step.clone()],
    };
    let is = |step: &Json, key: &str, default: bool| step.get(key).and_then(Json::as_bool).unwrap_or(default);
    let mut expressions = Vec::new();
    for step in &steps {
        match step.get("type")?.as_str()? {
            "ByteLevel" => {
                if is(step, "add_prefix_space", true) {
                    return None;
                }
                if is(step, "use_regex", true) {
                    expressions.push(GPT_2.to_owned());
                }
            }
            "Digits" if is(step, "individual_digits", false) => expressions.push(r"\p{N}".to_owned()),
            "Split" if step.get("behavior")?.as_str()? == "Isolated" && !is(step, "invert", false) => {
                expressions.push(step.get("pattern")?.get("Regex")?.as_str()?.to_owned());
            }
            _ => return None,
        }
    }
    Some(expressions)
}
