//! The chat template among the files of a model.
//!
//! | file | what it has |
//! |---|---|
//! | `chat_template.jinja` | the template; it takes precedence |
//! | `additional_chat_templates/NAME.jinja` | further ones, by name |
//! | `tokenizer_config.json` | `chat_template`: a template, or a list of `{"name": …, "template": …}`; the special tokens |
//! | `chat_template.json` | `chat_template`, of older processors |
//! | `special_tokens_map.json` | special tokens, of older tokenizers |
//!
//! As in transformers, the template named `default` renders conversations, and the one named `tool_use`, where there is one, those
//! with tools.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::template::{ChatTemplate, TemplateConfig};
use crate::error::{Error, Result};

const TEMPLATE: &str = "chat_template.jinja";
const ADDITIONAL: &str = "additional_chat_templates";
const TOKENIZER: &str = "tokenizer_config.json";
const PROCESSOR: &str = "chat_template.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
/// The name of the template that renders conversations without tools.
pub const DEFAULT_TEMPLATE: &str = "default";
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// Reads the template of a model's folder; `None` if it has none. The folder's special tokens are added to those of the options.
    ///
    /// # Errors
    /// A file that cannot be read or is not JSON; several templates without a default; those of [`ChatTemplate::new`].
    pub fn from_folder(folder: &Path, options: TemplateConfig) -> Result<Option<Self>> {
        Self::from_sources(&template_sources(folder)?, folder, options)
    }

    /// Compiles templates by their names; `None` if there are none. The special tokens of `folder` are added to those of the options.
    ///
    /// # Errors
    /// A file of special tokens that cannot be read or is not JSON; several templates without a default; those of
    /// [`ChatTemplate::new`].
    pub fn from_sources(
        sources: &TemplateSources,
        folder: &Path,
        options: TemplateConfig,
    ) -> Result<Option<Self>> {
        if sources.is_empty() {
            return Ok(None);
        }
        let options = with_special_tokens(folder, options)?;
        let compile = |name: &str| match sources.get(name) {
            Some((from, source)) => Self::new(&from.display().to_string(), source, options.clone()).map(Some),
            None => Ok(None),
        };
        let default = match compile(DEFAULT_TEMPLATE)? {
            Some(template) => template,
            None if sources.len() == 1 => {
                let name = sources.keys().next().map(String::as_str).unwrap_or_default();
                return compile(name);
            }
            None => {
                let names: Vec<&str> = sources.keys().map(String::as_str).collect();
                return Err(Error::File {
                    path: folder.join(TOKENIZER),
                    reason: format!(
                        "it has the chat templates {}, and none named `{DEFAULT_TEMPLATE}`; write the one to take into \
                         {TEMPLATE}",
                        names.join(", ")
                    ),
                });
            }
        };
        Ok(Some(match compile(TOOL_USE)? {
            Some(for_tools) => default.with_tools_template(for_tools),
            None => default,
        }))
    }

    /// Reads a template of a file, with the special tokens of a model's folder.
    ///
    /// # Errors
    /// A file that cannot be read; those of [`ChatTemplate::new`].
    pub fn from_file(path: &Path, folder: &Path, options: TemplateConfig) -> Result<Self> {
        Self::new(&path.display().to_string(), &read(path)?, with_special_tokens(folder, options)?)
    }
}

/// Templates by their names, with the files that they are from.
pub type TemplateSources = BTreeMap<String, (PathBuf, String)>;

/// Reads the templates of a folder.
///
/// # Errors
/// A file that cannot be read, is not JSON, or has something else in the place of a template.
pub fn template_sources(folder: &Path) -> Result<TemplateSources> {
    let mut sources = BTreeMap::new();
    for file in [PROCESSOR, TOKENIZER] {
        let path = folder.join(file);
        match object(&path)?.remove("chat_template") {
            None | Some(Value::Null) => {}
            Some(Value::String(source)) => {
                sources.insert(DEFAULT_TEMPLATE.to_owned(), (path, source));
            }
            Some(Value::Array(named)) => {
                for template in named {
                    let text = |field: &str| template[field].as_str().map(str::to_owned);
                    let (Some(name), Some(source)) = (text("name"), text("template")) else {
                        return Err(malformed(path));
                    };
                    sources.insert(name, (path.clone(), source));
                }
            }
            Some(_) => return Err(malformed(path)),
        }
    }
    let entries = std::fs::read_dir(folder.join(ADDITIONAL)).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "jinja") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let source = read(&path)?;
            sources.insert(name, (path, source));
        }
    }
    let path = folder.join(TEMPLATE);
    if path.is_file() {
        let source = read(&path)?;
        sources.insert(DEFAULT_TEMPLATE.to_owned(), (path, source));
    }
    Ok(sources)
}

fn malformed(path: PathBuf) -> Error {
    let reason = "`chat_template` is neither a text nor a list of objects with `name` and `template`; take the file \
                  that came with the model";
    Error::File { path, reason: reason.to_owned() }
}

fn with_special_tokens(folder: &Path, mut options: TemplateConfig) -> Result<TemplateConfig> {
    // The last one counts.
    let mut all = Map::new();
    for file in [SPECIAL_TOKENS, TOKENIZER] {
        for (name, value) in object(&folder.join(file))? {
            if name == "additional_special_tokens" && value.is_array() {
                all.insert(name, value);
            } else if name.ends_with("_token") {
                let text = value.as_str().or_else(|| value["content"].as_str());
                all.extend(text.map(|text| (name, Value::from(text))));
            }
        }
    }
    all.append(&mut options.special_tokens);
    options.special_tokens = all;
    Ok(options)
}

fn read(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(|cause| Error::Io { path: path.to_owned(), cause })?;
    String::from_utf8(bytes).map_err(|cause| Error::File {
        path: path.to_owned(),
        reason: format!("not UTF-8 ({cause}); take the file that came with the model"),
    })
}

/// Returns the fields of a JSON file; none if it does not exist.
fn object(path: &Path) -> Result<Map<String, Value>> {
    if !path.is_file() {
        return Ok(Map::new());
    }
    serde_json::from_str(&read(path)?).map_err(|cause| Error::File {
        path: path.to_owned(),
        reason: format!("not a JSON object ({cause}); take the file that came with the model"),
    })
}
