//! The files of a model besides its weights: tokenizer, chat template, and end tokens.
//!
//! A model answers well only if it is asked as it was trained, and it stops only where its training ended answers. So a training decides
//! these files as it decides the weights: it writes them into its output folder when it starts, and whatever is made of the run, or reads
//! it, takes them from there.
//!
//! | | first | else |
//! |---|---|---|
//! | tokenizer | `data.tokenizer` | the adapter's folder, the model's folder |
//! | chat template | `data.chat_template` | the adapter's folder, the model's folder |
//! | end tokens | `generation_config.json` of the adapter's folder | that of the model; with an adapter of another program, also `eos_token` of its tokenizer and the end of a turn of its template |
//!
//! Variables of the template that a training sets (`data.template_arguments`) are written into the template's text as defaults.

mod added_tokens;
mod template_defaults;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use dataloading::Tokenizer;
use dataloading::chat::{
    ChatTemplate, Conversation, DEFAULT_TEMPLATE, Date, Message, TemplateConfig, TemplateSources,
    template_sources,
};
use files::atomic_write;
use models::hugging_face::Folder;
use serde_json::{Map, Value, json};

use crate::config::DataConfig;
use crate::error::{Error, Result};
use added_tokens::Added;
use template_defaults::with_defaults;

/// Name of the chat template within a folder.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Name of the tokenizer within a folder.
pub const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION: &str = "generation_config.json";
const PROCESSOR_TEMPLATE: &str = "chat_template.json";
const FURTHER_TEMPLATES: &str = "additional_chat_templates";

/// The tokenizer's files. Their templates and those of other files are copied apart.
const TOKENIZER_FILES: [&str; 7] = [
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
];

/// The files of a model besides its weights.
#[derive(Debug, Clone)]
pub struct CompanionFiles {
    /// The model's folder.
    model: PathBuf,
    /// The folder of the tokenizer's files.
    tokenizer: PathBuf,
    /// A `tokenizer.json` in place of the folder's.
    tokenizer_file: Option<PathBuf>,
    /// Tokens that were added to the tokenizer.
    added: Option<Added>,
    template: Template,
    /// The file with the settings of generation, if there is one.
    generation: Option<PathBuf>,
    /// Beginning and padding of a text, by `config.json`, for a model without that file.
    tokens_of_config: Map<String, Value>,
    /// The end tokens of that file, or of `config.json`.
    listed_ends: Vec<i64>,
    end_tokens: Vec<i64>,
}

/// Source of the chat template.
#[derive(Debug, Clone)]
enum Template {
    /// The files of a folder, as they are.
    Folder(PathBuf),
    /// Texts by name.
    Sources(TemplateSources),
}

impl CompanionFiles {
    /// Finds those of a model, of an adapter over it, and of a data configuration. Reads no template that stays as it is.
    ///
    /// # Errors
    /// A file that is missing, cannot be read, or is not JSON.
    pub fn of(folder: &Folder, adapter: Option<&Path>, data: &DataConfig) -> Result<Self> {
        let model = folder.path();
        let in_adapter = |name: &str| adapter.filter(|adapter| adapter.join(name).is_file());
        let tokenizer = in_adapter(TOKENIZER).unwrap_or(model).to_owned();
        let own_template = match adapter {
            Some(adapter) if has_template(adapter)? => Some(adapter),
            _ => None,
        };
        let template_folder = own_template.unwrap_or(model);
        let template = match &data.chat_template {
            Some(path) => {
                Template::Sources([(DEFAULT_TEMPLATE.to_owned(), (path.clone(), read(path)?))].into())
            }
            None if !data.template_arguments.is_empty() || template_folder != tokenizer => {
                Template::Sources(template_sources(template_folder)?)
            }
            None => Template::Folder(template_folder.to_owned()),
        };
        let template = match template {
            Template::Sources(mut sources) => {
                for (_, source) in sources.values_mut() {
                    *source = with_defaults(source, &data.template_arguments);
                }
                Template::Sources(sources)
            }
            folder => folder,
        };
        let mut companions = Self {
            model: model.to_owned(),
            tokenizer,
            tokenizer_file: data.tokenizer.clone(),
            added: None,
            template,
            generation: folder.generation_config(),
            tokens_of_config: tokens_of_config(&model.join("config.json"))?,
            listed_ends: folder.end_tokens().to_vec(),
            end_tokens: folder.end_tokens().to_vec(),
        };
        // A file may name tokens that the model does not have; transformers never meets them.
        let vocabulary = folder.config().vocab_size;
        companions.end_tokens.retain(|end| (0..vocabulary).contains(end));
        if let Some(adapter) = in_adapter(GENERATION) {
            let path = adapter.join(GENERATION);
            companions.listed_ends = ends_of(&object(&path)?);
            companions.end_tokens = companions.listed_ends.clone();
            companions.end_tokens.retain(|end| (0..vocabulary).contains(end));
            companions.generation = Some(path);
        } else if in_adapter(TOKENIZER).is_some() || own_template.is_some() {
            companions.add_ends_of_tokenizer(own_template.is_some(), data)?;
        }
        Ok(companions)
    }

    /// Adds the end that another program's adapter has in its tokenizer and its template.
    fn add_ends_of_tokenizer(&mut self, has_template: bool, data: &DataConfig) -> Result<()> {
        let tokenizer = self.tokenizer()?;
        let config = object(&self.tokenizer.join(TOKENIZER_CONFIG))?;
        let end = config.get("eos_token");
        let end = end.and_then(|end| end.as_str().or_else(|| end.get("content")?.as_str()));
        if let Some(end) = end.and_then(|end| tokenizer.id(end)) {
            self.add_end(i64::from(end));
        }
        let template = if has_template { self.chat_template(data)? } else { None };
        if let Some(end) = template.and_then(|template| turn_end(&template, &tokenizer)) {
            self.add_end(end);
        }
        Ok(())
    }

    /// Adds a token that ends an answer.
    pub fn add_end(&mut self, end: i64) {
        if !self.end_tokens.contains(&end) {
            self.end_tokens.push(end);
        }
    }

    /// Returns the tokens that end an answer, those of the base first; empty if there are none.
    pub fn end_tokens(&self) -> &[i64] {
        &self.end_tokens
    }

    /// Reads the tokenizer.
    ///
    /// # Errors
    /// No `tokenizer.json`, or one that cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let path = self.tokenizer_file.clone().unwrap_or_else(|| self.tokenizer.join(TOKENIZER));
        if self.tokenizer_file.is_none() && !path.is_file() {
            let reason = format!("{TOKENIZER} is missing; put there the one that came with the model");
            return Err(Error::File { path: self.tokenizer.clone(), reason });
        }
        let tokenizer = match &self.added {
            Some(added) => Tokenizer::from_bytes(added.json.as_bytes())?,
            None => Tokenizer::from_file(&path)?,
        };
        match &self.tokenizer_file {
            Some(_) => Ok(tokenizer),
            None => with_special_tokens(tokenizer, &self.tokenizer),
        }
    }

    /// Compiles the chat template with the date and the variables of a data configuration; `None` without a template.
    ///
    /// # Errors
    /// A missing file; an invalid template or date.
    pub fn chat_template(&self, data: &DataConfig) -> Result<Option<ChatTemplate>> {
        let date = match &data.date {
            Some(date) => date.parse().map_err(|reason| Error::Toml(format!("`data.date`: {reason}")))?,
            None => Date::today(),
        };
        let arguments = data.template_arguments.clone();
        let options = TemplateConfig { arguments, date, ..TemplateConfig::default() };
        Ok(ChatTemplate::from_sources(&self.template_sources()?, &self.tokenizer, options)?)
    }

    fn template_sources(&self) -> Result<TemplateSources> {
        Ok(match &self.template {
            Template::Folder(folder) => template_sources(folder)?,
            Template::Sources(sources) => sources.clone(),
        })
    }

    /// Returns what differs from the model's own folder, in words.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub fn differences(&self, folder: &Folder) -> Result<Vec<&'static str>> {
        let texts = |sources: TemplateSources| -> Vec<String> {
            sources.into_values().map(|(_, source)| source).collect()
        };
        let tokenizer = self.tokenizer_file.clone().unwrap_or_else(|| self.tokenizer.join(TOKENIZER));
        let bytes = |path: &Path| std::fs::read(path).ok();
        let differs = [
            ("tokenizer", self.added.is_some() || bytes(&tokenizer) != bytes(&folder.path().join(TOKENIZER))),
            ("chat template", texts(self.template_sources()?) != texts(template_sources(folder.path())?)),
            ("end tokens", self.end_tokens != folder.end_tokens()),
        ];
        Ok(differs.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect())
    }

    /// Writes all of them into a folder, as transformers reads them: the tokenizer's files, the chat template, and
    /// `generation_config.json` with the end tokens.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn write(&self, out: &Path) -> Result<()> {
        // An adapter has the files that its trainer reads; other programs may read others of the same tokenizer.
        let bytes = |folder: &Path| std::fs::read(folder.join(TOKENIZER)).ok();
        let is_same = self.tokenizer != self.model && bytes(&self.tokenizer) == bytes(&self.model);
        for name in TOKENIZER_FILES {
            let source = self.tokenizer.join(name);
            let from = if is_same && !source.is_file() { self.model.join(name) } else { source };
            copy(&from, &out.join(name))?;
        }
        if let Some(file) = &self.tokenizer_file {
            copy(file, &out.join(TOKENIZER))?;
        }
        self.added.as_ref().map_or(Ok(()), |added| added.write(out))?;
        match &self.template {
            Template::Folder(folder) => copy_templates(folder, out)?,
            Template::Sources(sources) => write_sources(sources, out)?,
        }
        self.write_generation_config(out)
    }

    /// Writes the text of the template into a folder, as [`CHAT_TEMPLATE`], and returns its path; `None` without exactly one template.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn write_template(&self, out: &Path) -> Result<Option<PathBuf>> {
        let mut sources = self.template_sources()?.into_values();
        let (Some((_, source)), None) = (sources.next(), sources.next()) else { return Ok(None) };
        let path = out.join(CHAT_TEMPLATE);
        write_text(&path, &source)?;
        Ok(Some(path))
    }

    fn write_generation_config(&self, out: &Path) -> Result<()> {
        let path = out.join(GENERATION);
        if self.end_tokens == self.listed_ends {
            return match &self.generation {
                Some(from) => copy(from, &path),
                None => Ok(()),
            };
        }
        let mut fields = match &self.generation {
            Some(from) => object(from)?,
            None => self.tokens_of_config.clone(),
        };
        let ends = match self.end_tokens.as_slice() {
            [one] => json!(one),
            several => json!(several),
        };
        fields.insert("eos_token_id".to_owned(), ends);
        write_text(&path, &format!("{:#}\n", Value::Object(fields)))
    }
}

/// Reads the tokenizer of a folder, with the special tokens that only `tokenizer_config.json` says are such, as transformers does.
///
/// # Errors
/// A file that cannot be read.
pub fn tokenizer_of(folder: &Path) -> Result<Tokenizer> {
    with_special_tokens(Tokenizer::from_file(&folder.join(TOKENIZER))?, folder)
}

fn with_special_tokens(tokenizer: Tokenizer, folder: &Path) -> Result<Tokenizer> {
    const NAMES: [&str; 7] =
        ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];
    let config = object(&folder.join(TOKENIZER_CONFIG))?;
    let named = NAMES.iter().filter_map(|name| config.get(*name));
    let further = config.get("additional_special_tokens").and_then(Value::as_array).into_iter().flatten();
    let listed = config.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten();
    let listed = listed.map(|(_, token)| token).filter(|token| token["special"] == Value::Bool(true));
    let text = |token: &Value| token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned);
    let texts: Vec<String> = named.chain(further).chain(listed).filter_map(text).collect();
    Ok(tokenizer.with_special_tokens(texts.iter().map(String::as_str)))
}

/// Returns the names of the companion files that a folder has.
pub fn names(folder: &Path) -> Vec<&'static str> {
    let others = [GENERATION, CHAT_TEMPLATE, PROCESSOR_TEMPLATE, FURTHER_TEMPLATES];
    TOKENIZER_FILES.into_iter().chain(others).filter(|name| folder.join(name).exists()).collect()
}

/// Removes the companion files that a folder has besides those named: a model that replaces another is not to get its templates or its
/// end tokens.
///
/// # Errors
/// A file that cannot be removed.
pub fn remove_others(folder: &Path, kept: &[&str]) -> Result<()> {
    for name in names(folder).into_iter().filter(|name| !kept.contains(name)) {
        let path = folder.join(name);
        let removed =
            if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        removed.map_err(|cause| failed(&path, &cause))?;
    }
    Ok(())
}

/// Copies the companion files of a folder into another, those that there are.
///
/// # Errors
/// A file that cannot be read or written.
pub fn copy_between(from: &Path, to: &Path) -> Result<()> {
    for name in TOKENIZER_FILES.into_iter().chain([GENERATION]) {
        copy(&from.join(name), &to.join(name))?;
    }
    copy_templates(from, to)
}

/// Returns the token with which a template ends an answer, where it is one of the tokenizer's added ones.
pub fn turn_end(template: &ChatTemplate, tokenizer: &Tokenizer) -> Option<i64> {
    const ANSWER: &str = "answer-to-be-found";
    let conversation =
        Conversation::new([Message::new("user", "question"), Message::new("assistant", ANSWER)]);
    let text = template.render(&conversation, false).ok()?.text;
    let rest = text.split_once(ANSWER)?.1.trim_start();
    let added = tokenizer.added_tokens();
    let end = added.iter().filter(|token| !token.is_empty() && rest.starts_with(token.as_str()));
    tokenizer.id(end.max_by_key(|token| token.len())?).map(i64::from)
}

/// Whether a folder has a chat template.
fn has_template(folder: &Path) -> Result<bool> {
    let has_file = [CHAT_TEMPLATE, PROCESSOR_TEMPLATE, FURTHER_TEMPLATES];
    if has_file.iter().any(|name| folder.join(name).exists()) {
        return Ok(true);
    }
    Ok(object(&folder.join(TOKENIZER_CONFIG))?.get("chat_template").is_some_and(|value| !value.is_null()))
}

/// Copies the files of templates that are not in `tokenizer_config.json`.
fn copy_templates(from: &Path, to: &Path) -> Result<()> {
    for name in [CHAT_TEMPLATE, PROCESSOR_TEMPLATE] {
        copy(&from.join(name), &to.join(name))?;
    }
    for entry in std::fs::read_dir(from.join(FURTHER_TEMPLATES)).into_iter().flatten().flatten() {
        let folder = to.join(FURTHER_TEMPLATES);
        std::fs::create_dir_all(&folder).map_err(|cause| failed(&folder, &cause))?;
        copy(&entry.path(), &folder.join(entry.file_name()))?;
    }
    Ok(())
}

/// Writes templates under their names, and the default one into `tokenizer_config.json`, where older programs look for it.
fn write_sources(sources: &TemplateSources, out: &Path) -> Result<()> {
    for (name, (_, source)) in sources {
        if name == DEFAULT_TEMPLATE || sources.len() == 1 {
            write_text(&out.join(CHAT_TEMPLATE), source)?;
            let path = out.join(TOKENIZER_CONFIG);
            let mut config = object(&path)?;
            if !config.is_empty() {
                config.insert("chat_template".to_owned(), json!(source));
                write_text(&path, &format!("{:#}\n", Value::Object(config)))?;
            }
        } else {
            let folder = out.join(FURTHER_TEMPLATES);
            std::fs::create_dir_all(&folder).map_err(|cause| failed(&folder, &cause))?;
            write_text(&folder.join(format!("{name}.jinja")), source)?;
        }
    }
    Ok(())
}

/// The tokens that begin and pad a text, by `config.json`.
fn tokens_of_config(path: &Path) -> Result<Map<String, Value>> {
    let fields = object(path)?;
    let tokens = ["bos_token_id", "pad_token_id"].into_iter();
    Ok(tokens
        .filter_map(|name| Some((name.to_owned(), fields.get(name).filter(|id| !id.is_null())?.clone())))
        .collect())
}

fn ends_of(generation: &Map<String, Value>) -> Vec<i64> {
    match generation.get("eos_token_id") {
        Some(Value::Array(ends)) => ends.iter().filter_map(Value::as_i64).collect(),
        Some(end) => end.as_i64().into_iter().collect(),
        None => Vec::new(),
    }
}

/// Copies a file, if it exists and is not the same.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let real = |path: &Path| path.canonicalize().ok();
    if !from.is_file() || real(from) == real(to) {
        return Ok(());
    }
    let mut file = File::open(from).map_err(|cause| failed(from, &cause))?;
    atomic_write::file(to, |out| io::copy(&mut file, out)).map_err(|cause| failed(to, &cause)).map(drop)
}

fn write_text(path: &Path, text: &str) -> Result<()> {
    atomic_write::file(path, |out| out.write_all(text.as_bytes())).map_err(|cause| failed(path, &cause))
}

fn read(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(|cause| failed(path, &cause))?;
    String::from_utf8(bytes).map_err(|cause| Error::File {
        path: path.to_owned(),
        reason: format!("not UTF-8 ({cause}); give a text file"),
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

fn failed(path: &Path, cause: &io::Error) -> Error {
    Error::File { path: path.to_owned(), reason: cause.to_string() }
}
