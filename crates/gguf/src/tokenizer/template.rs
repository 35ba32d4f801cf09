//! The chat templates of a folder, as transformers finds them: `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, else
//! `chat_template` of `tokenizer_config.json`, else that of `chat_template.json`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value as Json};

use crate::error::{Result, io_error};
use crate::json;
use crate::value::{Array, Value};

/// The name of the template that is used where none is chosen.
pub(super) const DEFAULT: &str = "default";

/// Returns the templates by name, the default one first. Their line breaks are `\n`, as Jinja2 reads them.
pub(super) fn read(folder: &Path, config: &Map<String, Json>) -> Result<Vec<(String, String)>> {
    let mut templates = texts(folder, config)?;
    templates.iter_mut().for_each(|(_, text)| *text = text.replace("\r\n", "\n").replace('\r', "\n"));
    Ok(templates)
}

fn texts(folder: &Path, config: &Map<String, Json>) -> Result<Vec<(String, String)>> {
    let processor = json::read_optional(&folder.join("chat_template.json"))?;
    let mut templates = BTreeMap::new();
    for fields in [&processor, config] {
        match fields.get("chat_template") {
            Some(Json::String(text)) => drop(templates.insert(DEFAULT.to_owned(), text.clone())),
            Some(Json::Array(all)) => {
                let text = |entry: &Json, key: &str| Some(entry.get(key)?.as_str()?.to_owned());
                templates.extend(
                    all.iter().filter_map(|entry| Some((text(entry, "name")?, text(entry, "template")?))),
                );
            }
            _ => {}
        }
    }
    let text = |path: &Path| std::fs::read_to_string(path).map_err(|cause| io_error(path, cause));
    let entries = std::fs::read_dir(folder.join("additional_chat_templates")).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "jinja") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            templates.insert(name, text(&path)?);
        }
    }
    let path = folder.join("chat_template.jinja");
    if path.is_file() {
        templates.insert(DEFAULT.to_owned(), text(&path)?);
    }
    let default = templates.remove_entry(DEFAULT);
    Ok(default.into_iter().chain(templates).collect())
}

/// Returns the metadata of the templates. `begins` says whether the folder names a `bos_token`: templates that ask for one that it does
/// not name are given none, as in transformers. llama.cpp gives them the text of the file's `bos_token_id`, and of token 11 where the file
/// has none.
pub(super) fn metadata(templates: &[(String, String)], begins: bool) -> Vec<(String, Value)> {
    let mut metadata = Vec::new();
    let mut others = Vec::new();
    for (name, text) in templates {
        let none = if !begins && text.contains("bos_token") { "{%- set bos_token = '' -%}\n" } else { "" };
        let text = format!("{none}{text}");
        if name == DEFAULT {
            metadata.push(("tokenizer.chat_template".to_owned(), text.into()));
        } else {
            metadata.push((format!("tokenizer.chat_template.{name}"), text.into()));
            others.push(name.clone());
        }
    }
    if !others.is_empty() {
        metadata.push(("tokenizer.chat_templates".to_owned(), Value::Array(Array::String(others))));
    }
    metadata
}
