//! What a GGUF file has: its architecture, the types of its tensors, its tokenizer and its template.

use std::collections::BTreeMap;

use gguf::{ModelFile, Value};
use report::unit::human;
use serde_json::{Map, Value as Json, json};

use super::Line;
use crate::output::figures::{counted, grouped};

/// Tensors of a type, and their bytes.
type Sum = (u64, u64);

/// The lines of a file. Those named as a folder's replace them.
///
/// # Errors
/// A tokenizer that cannot be read.
pub(super) fn lines(model: &ModelFile) -> anyhow::Result<Vec<Line>> {
    let bytes: u64 = model.paths().map(|path| path.metadata().map_or(0, |file| file.len())).sum();
    let files: Vec<String> = model.paths().map(|path| path.display().to_string()).collect();
    let others = match files.len() - 1 {
        0 => String::new(),
        others => format!(" and {}", counted(others as u64, "further file")),
    };
    let file = format!("{}{others}, {}", files[0], human(bytes as f64, "B"));
    let architecture = text(model, "general.architecture").unwrap_or_default();
    let mut lines = vec![
        ("file", file, json!({ "paths": files, "bytes": bytes })),
        ("architecture", architecture.to_owned(), json!(architecture)),
    ];
    if let Some(name) = text(model, "general.name") {
        lines.push(("name", name.to_owned(), json!(name)));
    }
    lines.extend([types(model), tokenizer(model)?]);
    let template = text(model, "tokenizer.chat_template");
    let shown =
        template.map_or_else(|| "none".to_owned(), |text| counted(text.chars().count() as u64, "character"));
    lines.push(("chat template", shown, json!(template)));
    if !model.notes().is_empty() {
        lines.push(("read as", model.notes().join("; "), json!(model.notes())));
    }
    Ok(lines)
}

fn text<'a>(model: &'a ModelFile, key: &str) -> Option<&'a str> {
    model.metadata(key).and_then(Value::as_str)
}

/// Tensors and bytes of each type, the largest first.
fn types(model: &ModelFile) -> Line {
    let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
    for tensor in model.stored() {
        let sum = sums.entry(tensor.kind.to_string()).or_default();
        *sum = (sum.0 + 1, sum.1 + tensor.bytes().unwrap_or(0));
    }
    let mut sums: Vec<(String, Sum)> = sums.into_iter().collect();
    sums.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
    let shown = |(kind, (count, bytes)): &(String, Sum)| {
        format!("{kind} in {}, {}", counted(*count, "tensor"), human(*bytes as f64, "B"))
    };
    let all = sums.iter().map(shown).collect::<Vec<_>>().join("; ");
    let json: Map<String, Json> = sums
        .into_iter()
        .map(|(kind, (count, bytes))| (kind, json!({ "tensors": count, "bytes": bytes })))
        .collect();
    ("types", all, Json::Object(json))
}

/// The kind of tokenizer, its number of tokens, and the tokens that begin and end a text.
fn tokenizer(model: &ModelFile) -> anyhow::Result<Line> {
    let files = model.companion_files()?;
    let read = |name: &str| -> anyhow::Result<Json> {
        let text = files.iter().find(|(file, _)| *file == name).map_or("{}", |(_, text)| text);
        Ok(serde_json::from_str(text)?)
    };
    let (config, generation) = (read("tokenizer_config.json")?, read("generation_config.json")?);
    let tokens = model.metadata("tokenizer.ggml.tokens").and_then(Value::as_strings).unwrap_or_default();
    let kind = text(model, "tokenizer.ggml.model").unwrap_or_default();
    let splits = text(model, "tokenizer.ggml.pre");
    let ids = match &generation["eos_token_id"] {
        Json::Array(ids) => ids.clone(),
        Json::Null => Vec::new(),
        id => vec![id.clone()],
    };
    let known = |id: &Json| tokens.get(usize::try_from(id.as_u64()?).ok()?).map(String::as_str);
    let ends: Vec<&str> = ids.iter().filter_map(known).collect();
    let begin = config["bos_token"].as_str().filter(|_| config["add_bos_token"] == true);
    let mut shown = kind.to_owned();
    if let Some(splits) = splits {
        shown.push_str(&format!(" (splits text as {splits})"));
    }
    shown.push_str(&format!(", {} tokens", grouped(tokens.len() as u64)));
    if let Some(begin) = begin {
        shown.push_str(&format!(", a text begins with {begin}"));
    }
    if !ends.is_empty() {
        shown.push_str(&format!(", ends with {}", ends.join(" or ")));
    }
    let json = json!({
        "model": kind, "pre": splits, "tokens": tokens.len(), "begin": begin, "ends": ends,
    });
    Ok(("tokenizer", shown, json))
}
