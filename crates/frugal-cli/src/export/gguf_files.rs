//! `frugal export --format gguf`, `gguf-lora` and `ollama`.

use std::path::{Path, PathBuf};

use accounting::quantity::bytes_text;
use anyhow::{Context, anyhow, bail};
use dataloading::chat::{ChatTemplate, Conversation, Message, TemplateConfig};
use files::atomic_write;
use frugal::llama_cpp::LlamaCpp;
use gguf::ollama::{self, Chat, Modelfile, Role};
use gguf::{Adapter, Conversion, FileType, Model};
use lora::LoraConfig;
use lora::peft::CONFIG_FILE;
use models::DecoderConfig;
use models::hugging_face::Folder;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::verify::{self, Files};
use super::{Export, Type};
use crate::common_flags::Common;
use crate::output::shell_command::shell_word;

/// The file that `ollama create` reads.
const MODELFILE: &str = "Modelfile";

/// Writes the model, with the adapter merged if there is one.
pub(super) fn model(common: &Common, arguments: &Export) -> anyhow::Result<Value> {
    let out = file(&arguments.out)?;
    let base = arguments.base_model()?;
    let merged = match arguments.adapter()? {
        Some(adapter) => Some(merged(common, arguments, adapter.path())?),
        None => None,
    };
    let folder = merged.as_ref().map_or(&*base, TempDir::path);
    let model = opened(folder, folder)?.named(&stem(out));
    let kind = arguments.kind.unwrap_or(Type::F16).get();
    let verify = |file: &Path| {
        let Some(llama_cpp) = arguments.llama_cpp(common, folder, &model)? else { return Ok(None) };
        let files = Files { folder, texts: folder, adapter: None, model: file, lora: None, kind };
        verified(common, &llama_cpp, &model, &files).map(Some)
    };
    Ok(Value::Object(written(common, &model.convert(kind)?, out, &verify)?))
}

/// Writes the adapter.
pub(super) fn adapter(common: &Common, arguments: &Export) -> anyhow::Result<Value> {
    let out = file(&arguments.out)?;
    let base = arguments.base_model()?;
    let Some(folder) = arguments.adapter()? else {
        bail!("there is no adapter; give --adapter or --checkpoints")
    };
    let adapter = Adapter::open(folder.path(), &base)?.named(&stem(out));
    let model = Model::open(&base)?;
    let verify = |lora: &Path| {
        let Some(llama_cpp) = arguments.llama_cpp(common, &base, &model)? else { return Ok(None) };
        // llama.cpp applies it to the base in fp32.
        let place = temporary(out)?;
        let file = place.path().join("base.gguf");
        let quiet = Common { quiet: true, ..common.clone() };
        written(&quiet, &model.convert(FileType::F32)?, &file, &unverified)?;
        let files = Files {
            folder: &base,
            texts: &base,
            adapter: Some(folder.path()),
            model: &file,
            lora: Some(lora),
            kind: FileType::F32,
        };
        verified(common, &llama_cpp, &model, &files).map(Some)
    };
    let result = lora(common, &adapter, folder.path(), out, &verify)?;
    let opened = Folder::open(&base)?;
    let differences = arguments.companions(&opened)?.differences(&opened)?;
    if !differences.is_empty() {
        common.note(&format!(
                "note: the adapter was trained with another {} than its base has; the file has no place for that: --format ollama or gguf \
                 writes it with the model",
                differences.join(" and other ")
            ),
        );
    }
    Ok(Value::Object(result))
}

/// Writes a folder for `ollama create`. An adapter that cannot be a file of its own is merged into the model.
pub(super) fn ollama(common: &Common, arguments: &Export) -> anyhow::Result<Value> {
    let out = &arguments.out;
    let base = arguments.base_model()?;
    let kind = arguments.kind.unwrap_or(Type::Q8).get();
    let adapter = arguments.adapter()?;
    let (mut own, mut merged_folder) = (None, None);
    if let Some(folder) = &adapter {
        match Adapter::open(folder.path(), &base) {
            Ok(adapter) => own = Some(adapter.named("adapter")),
            Err(error @ gguf::Error::Unsupported { .. }) => {
                common.note(&format!("the adapter is merged into the model: {error}"));
                merged_folder = Some(merged(common, arguments, folder.path())?);
            }
            Err(error) => return Err(error.into()),
        }
    }
    let folder = merged_folder.as_ref().map_or(&*base, TempDir::path);
    // A merged model's folder has them.
    let companions = match &own {
        Some(_) => {
            let files = tempfile::tempdir()?;
            arguments.companions(&Folder::open(&base)?)?.write(files.path())?;
            Some(files)
        }
        None => None,
    };
    let texts = companions.as_ref().map_or(folder, TempDir::path);
    let model = opened(folder, texts)?.named(&stem(out));
    let conversion = model.convert(kind)?;
    // A failure, such as a full disk, leaves nothing at `out`.
    let stage = temporary_for(out)?;
    let names = (format!("model-{kind}.gguf"), "adapter.gguf".to_owned());
    let mut result = written(common, &conversion, &stage.path().join(&names.0), &unverified)?;
    result.insert("file".to_owned(), json!(out.join(&names.0)));
    if let (Some(own), Some(folder)) = (&own, &adapter) {
        let mut written = lora(common, own, folder.path(), &stage.path().join(&names.1), &unverified)?;
        written.insert("file".to_owned(), json!(out.join(&names.1)));
        result.insert("adapter".to_owned(), Value::Object(written));
    }
    let chat = chat(&model, texts)?;
    match &chat {
        Some(Err(reason)) => common.note(&format!(
            "the Modelfile has no TEMPLATE: the model's chat template is not known: {reason}"
        )),
        Some(Ok(Chat { format, difference: Some(difference), .. })) => common.note(&format!(
            "the Modelfile has {}'s TEMPLATE; the model's own writes {difference} in another way",
            format.name
        )),
        _ => {}
    }
    let stops = model.tokenizer().stop_tokens().into_iter().map(str::to_owned).collect();
    let modelfile = Modelfile {
        from: names.0.clone(),
        adapter: own.as_ref().map(|_| names.1.clone()),
        chat,
        stops,
        context: DecoderConfig::read(&folder.join("config.json"))?.max_position_embeddings.try_into().ok(),
        sampling: sampling(texts)?,
    };
    let path = stage.path().join(MODELFILE);
    atomic_write::file(&path, |file| file.write_all(modelfile.to_string().as_bytes()))
        .with_context(|| format!("{} cannot be written", path.display()))?;
    if let Some(llama_cpp) = arguments.llama_cpp(common, folder, &model)? {
        let own = own.as_ref().and(adapter.as_ref());
        let (model_file, lora_file) = (stage.path().join(&names.0), stage.path().join(&names.1));
        let files = Files {
            folder,
            texts,
            adapter: own.map(|folder| folder.path()),
            model: &model_file,
            lora: own.map(|_| &*lora_file),
            kind,
        };
        let figures = verified(common, &llama_cpp, &model, &files).with_context(|| not_written(out))?;
        result.insert("verified".to_owned(), figures);
    }
    std::fs::create_dir_all(out).with_context(|| format!("{} cannot be created", out.display()))?;
    for name in [Some(&*names.0), own.as_ref().map(|_| &*names.1), Some(MODELFILE)].into_iter().flatten() {
        let path = out.join(name);
        let staged = stage.path().join(name);
        atomic_write::keep_access(&path, &staged)
            .and_then(|()| std::fs::rename(&staged, &path))
            .with_context(|| format!("{} cannot be written", path.display()))?;
    }
    result.insert("modelfile".to_owned(), json!(out.join(MODELFILE)));
    let word = shell_word(&out.display().to_string());
    common.note(&format!("to use it: cd {word} && ollama create NAME -f Modelfile"));
    Ok(Value::Object(result))
}

/// Opens a model with the tokenizer and the chat template of `texts`. llama.cpp puts the token that begins a text before every prompt if
/// the file says so, also before a chat, which was trained without it where the template writes none.
fn opened(folder: &Path, texts: &Path) -> anyhow::Result<Model> {
    let model = Model::open_with(folder, texts)?;
    let begins = || {
        let begin = model.tokenizer().begin_token()?;
        let template = ChatTemplate::from_folder(texts, TemplateConfig::default()).ok()??;
        let conversation = Conversation::new([Message::new(Role::User.name(), "question")]);
        Some(template.render(&conversation, true).ok()?.text.starts_with(begin))
    };
    Ok(if begins() == Some(false) { model.without_begin_token() } else { model })
}

/// The sampling settings in the model's `generation_config.json`; nothing without one.
fn sampling(folder: &Path) -> anyhow::Result<Vec<(&'static str, f64)>> {
    let path = folder.join("generation_config.json");
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
    let config: Value = serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
    Ok(ollama::sampling(&config))
}

/// Returns the chat template for Ollama, or the reason why it cannot be converted; `None` for a model without a template.
fn chat(model: &Model, folder: &Path) -> anyhow::Result<Option<Result<Chat, String>>> {
    let tokenizer = model.tokenizer();
    let Some(source) = tokenizer.chat_template() else { return Ok(None) };
    let Some(template) = ChatTemplate::from_folder(folder, TemplateConfig::default())? else {
        return Ok(None);
    };
    let render = |conversation: &[(Role, &str)]| {
        let messages = conversation.iter().map(|(role, content)| Message::new(role.name(), content));
        Some(template.render(&Conversation::new(messages), true).ok()?.text)
    };
    Ok(Some(Chat::from_template(source, tokenizer.begin_token(), &render)))
}

/// Compares a file with llama.cpp, before it has its name, and returns the figures; `None` where it is not compared.
type Verify<'a> = &'a dyn Fn(&Path) -> anyhow::Result<Option<Value>>;

/// Compares nothing.
fn unverified(_: &Path) -> anyhow::Result<Option<Value>> {
    Ok(None)
}

/// Converts an adapter with the scales of its configuration.
fn lora(
    common: &Common,
    adapter: &Adapter,
    folder: &Path,
    out: &Path,
    verify: Verify<'_>,
) -> anyhow::Result<Map<String, Value>> {
    let config = LoraConfig::read(&folder.join(CONFIG_FILE))?;
    let scale = |module: &str, _: u64| {
        config.options(module).map(|options| options.scaling()).map_err(|error| error.to_string())
    };
    written(common, &adapter.convert(&scale)?, out, verify)
}

/// Writes a file, reads it again, and compares the two; gives it its name after `verify`, so that an earlier file stays where that
/// fails. Notes for the user go to standard error.
fn written(
    common: &Common,
    conversion: &Conversion<'_>,
    out: &Path,
    verify: Verify<'_>,
) -> anyhow::Result<Map<String, Value>> {
    for note in conversion.notes() {
        common.note(&format!("note: {note}"));
    }
    let parent = atomic_write::parent(out);
    std::fs::create_dir_all(parent).with_context(|| format!("{} cannot be created", parent.display()))?;
    let (mut cause, mut refused, mut figures) = (None, None, None);
    let content = |file: &mut dyn std::io::Write| {
        conversion.write(file).map_err(|error| {
            cause = Some(error);
            std::io::Error::other("the conversion failed")
        })
    };
    let check = |file: &Path| {
        let verified = conversion.check(file).map_err(anyhow::Error::from).and_then(|()| verify(file));
        figures = verified.map_err(|error| {
            refused = Some(error);
            std::io::Error::other("the verification failed")
        })?;
        Ok(())
    };
    let result = atomic_write::checked_file(out, content, check);
    match (result, cause, refused) {
        (_, Some(error @ gguf::Error::Output { .. }), _) => {
            let needed = bytes_text(conversion.bytes());
            return Err(error).with_context(|| format!("{} of at least {needed}", out.display()));
        }
        (_, Some(error), _) => return Err(error.into()),
        (_, _, Some(error)) => return Err(error).with_context(|| not_written(out)),
        (result, None, None) => result.with_context(|| format!("{} cannot be written", out.display()))?,
    }
    let mut fields = json!({
        "file": out, "tensors": conversion.header().tensors.len(), "bytes": std::fs::metadata(out)?.len(),
        "notes": conversion.notes()
    });
    if let Some(figures) = figures {
        fields["verified"] = figures;
    }
    fields.as_object().cloned().ok_or_else(|| anyhow!("no fields"))
}

/// The error of a failed verification.
fn not_written(out: &Path) -> String {
    format!("{} is not written", out.display())
}

/// Compares files with llama.cpp, says how much they differ, and returns the figures.
fn verified(
    common: &Common,
    llama_cpp: &LlamaCpp,
    model: &Model,
    files: &Files<'_>,
) -> anyhow::Result<Value> {
    let figures = verify::compare(llama_cpp, model, files)?;
    common.note(&figures.to_string());
    figures.judge()?;
    Ok(figures.json())
}

/// Merges an adapter into the model, in a folder beside the output that is removed after use.
fn merged(common: &Common, arguments: &Export, adapter: &Path) -> anyhow::Result<TempDir> {
    let place = temporary(&arguments.out)?;
    arguments.merge(common, adapter, place.path())?;
    Ok(place)
}

/// A temporary folder on the disk of an output folder.
fn temporary_for(out: &Path) -> anyhow::Result<TempDir> {
    match out.is_dir() {
        true => Ok(tempfile::Builder::new().prefix(".export-").tempdir_in(out)?),
        false => temporary(out),
    }
}

/// A temporary folder on the disk of the output, in the nearest folder that exists.
fn temporary(out: &Path) -> anyhow::Result<TempDir> {
    let parent = atomic_write::parent(out);
    let existing = parent.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
    let made = tempfile::Builder::new().prefix(".export-").tempdir_in(existing);
    made.with_context(|| format!("{} cannot be written", existing.display()))
}

/// The output file.
fn file(out: &Path) -> anyhow::Result<&Path> {
    if out.is_dir() {
        bail!(
            "--out {} is a folder; give a file, such as {}",
            out.display(),
            out.join("model.gguf").display()
        );
    }
    Ok(out)
}

fn stem(out: &Path) -> String {
    let real = out.canonicalize().unwrap_or_else(|_| PathBuf::from(out));
    real.file_stem().map_or_else(|| "model".to_owned(), |stem| stem.to_string_lossy().into_owned())
}
