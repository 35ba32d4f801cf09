//! The chat templates of a folder: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`.

use std::path::Path;

use serde_json::{Map, Value as Json};

use crate::error::{Result, io_error};
use crate::value::{Array, Value};

/// The name of the template that is used where none is chosen.
pub(super) const DEFAULT: &str = "default";

/// Returns the templates by name. Their line breaks are `\n`, as Jinja2 reads them.
pub(super) fn read(folder: &Path, config: &Map<String, Json>) -> Result<Vec<(String, String)>> {
    let mut templates = texts(folder, config)?;
    templates.iter_mut().for_each(|(_, text)| *text = text.replace("\r\n", "\n").replace('\r', "\n"));
    Ok(templates)
}

fn texts(folder: &Path, config: &Map<String, Json>) -> Result<Vec<(String, String)>> {
    let path = folder.join("chat_template.jinja");
    if path.is_file() {
        let text = std::fs::read_to_string(&path).map_err(|cause| io_error(&path, cause))?;
        return Ok(vec![(DEFAULT.to_owned(), text)]);
    }
    Ok(match config.get("chat_template") {
        Some(Json::String(text)) => vec![(DEFAULT.to_owned(), text.clone())],
        Some(Json::Array(all)) => {
            let text = |entry: &Json, key: &str| Some(entry.get(key)?.as_str()?.to_owned());
            all.iter().filter_map(|entry| Some((text(entry, "name")?, text(entry, "template")?))).collect()
        }
        _ => Vec::new(),
    })
}

/// Returns the metadata of the templates.
pub(super) fn metadata(templates: &[(String, String)]) -> Vec<(String, Value)> {
    let mut metadata = Vec::new();
    let mut others = Vec::new();
    for (name, text) in templates {
        if name == DEFAULT {
            metadata.push(("tokenizer.chat_template".to_owned(), text.clone().into()));
        } else {
            metadata.push((format!("tokenizer.chat_template.{name}"), text.clone().into()));
            others.push(name.clone());
        }
    }
    if !others.is_empty() {
        metadata.push(("tokenizer.chat_templates".to_owned(), Value::Array(Array::String(others))));
    }
    metadata
}
