//! How records become rows, by a configuration.

use std::io::{BufRead as _, Read as _};
use std::path::{Path, PathBuf};

use anyhow::bail;
use frugal::Config;
use frugal::companion_files::turn_end;
use frugal::config::origins::values;
use frugal::config::{DataConfig, DataFormat};
use frugal::dataloading::chat::ChatTemplate;
use frugal::dataloading::records::{Detected, PromptTemplates, RecordFormat, Splits};
use frugal::dataloading::text;
use frugal::models::hugging_face::Folder;
use frugal::rows::{self, Found, RowConfig, RowEncoder};

use crate::common_flags::Common;
use crate::flags::flags_of;
use crate::flags::tokenizer::Ends;
use crate::output::figures::counted;
use crate::output::problems;
use crate::output::shell_command::shell_word;

/// The encoder for the model of a folder.
///
/// # Errors
/// A prompt's template without its completion's, or the other way round; a text that is no template.
pub(crate) fn encoder(
    folder: &Folder,
    template: Option<ChatTemplate>,
    data: &DataConfig,
    ends: &Ends,
) -> anyhow::Result<RowEncoder> {
    let options = RowConfig {
        // A row has to fit a packed one.
        longest: data.packing.unwrap_or(usize::MAX).min(ends.longest(folder, data)),
        overlong: data.overlong,
        mask: data.mask,
        begin: ends.begin,
        end: ends.end,
        vocabulary: usize::try_from(folder.config().vocab_size).unwrap_or(0),
        field: data.field.clone(),
        templates: templates(data)?,
    };
    let model_ends: Vec<u32> =
        folder.all_end_tokens().iter().filter_map(|id| u32::try_from(*id).ok()).collect();
    Ok(RowEncoder::new(ends.tokenizer.clone(), template, &model_ends, options))
}

/// The flags that make the rows of `data` where those of `before` would be made without them, each after a blank.
pub(crate) fn flags_of_rows(data: &DataConfig, before: &DataConfig) -> String {
    const KEYS: [&str; 9] = [
        "data.format",
        "data.field",
        "data.prompt_template",
        "data.completion_template",
        "data.mask",
        "data.overlong",
        "data.chat_template",
        "data.end_token",
        "data.max_length",
    ];
    let of = |data: &DataConfig| values(&Config { data: data.clone(), ..Config::default() }).ok();
    // A configuration is written and read as values everywhere.
    let (Some(own), Some(before)) = (of(data), of(before)) else { return String::new() };
    let mut flags = String::new();
    for (key, value) in own.iter().filter(|pair| KEYS.contains(&&*pair.0) && !before.contains(pair)) {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        if let Some(flag) = flags_of(key).next().filter(|_| value != "null") {
            flags += &format!(" {flag} {}", shell_word(&value));
        }
    }
    flags
}

/// Says which built-in variant of the chat template makes rows of conversations, if one does, and whether the template makes them
/// without the end token that is asked for.
pub(crate) fn note_template(common: &Common, (encoder, data): (&RowEncoder, &DataConfig), found: &Found) {
    let Found::Records(detected) = found else { return };
    if detected.formats.iter().all(|(format, _)| matches!(format, RecordFormat::Text | RecordFormat::Tokens))
    {
        return;
    }
    if let Some(variant) = encoder.template().and_then(ChatTemplate::training_variant) {
        common.note(&format!("chat template for training: {variant}"));
    }
    let is_rendered = |(format, _): &(RecordFormat, usize)| {
        *format != RecordFormat::PromptCompletion || encoder.options().templates.is_some()
    };
    let (Some(template), Some(asked)) = (encoder.template(), &data.end_token) else { return };
    let tokenizer = encoder.tokenizer();
    let end = turn_end(template, tokenizer).and_then(|end| tokenizer.token(u32::try_from(end).ok()?));
    if let Some(end) = end.filter(|end| end != asked && detected.formats.iter().all(is_rendered)) {
        let text = format!(
            "note: --end-token {asked} changes no row, because the chat template ends answers with `{end}`; leave it out, or give a \
             template that writes it as --chat-template"
        );
        common.note(&text);
    }
}

/// The templates of a configuration, if it has any.
///
/// # Errors
/// One template without the other; an invalid template.
fn templates(data: &DataConfig) -> anyhow::Result<Option<PromptTemplates>> {
    match (&data.prompt_template, &data.completion_template) {
        (None, None) => Ok(None),
        (Some(prompt), Some(completion)) => Ok(Some(PromptTemplates::new(prompt, completion)?)),
        _ => bail!("`data.prompt_template` and `data.completion_template` belong together; give both"),
    }
}

/// The format of the files, by the configuration or by their first records.
///
/// # Errors
/// As [`rows::detect`].
pub(crate) fn found(splits: &Splits, data: &DataConfig) -> anyhow::Result<Found> {
    let files = &splits.train;
    if templates(data)?.is_some() {
        let formats = vec![(RecordFormat::PromptCompletion, 0)];
        return Ok(Found::Records(Detected { formats, ignored: Vec::new() }));
    }
    if let Some(format) = data.format.of_records() {
        return Ok(Found::Records(Detected { formats: vec![(format, 0)], ignored: Vec::new() }));
    }
    Ok(match data.format {
        DataFormat::Gsm8k => Found::Gsm8k,
        DataFormat::Text => Found::Text,
        DataFormat::Auto if problems::is_folder(Path::new(&data.source)) => Found::Gsm8k,
        DataFormat::Rows => Found::Records(rows::detect_records(files, &data.field)?),
        _ => rows::detect(files, &data.field)?,
    })
}

/// Whether the first line of a file is a JSON object.
fn begins_with_object(file: &Path) -> bool {
    const LONGEST: u64 = 1 << 20;
    let mut line = Vec::new();
    let read = text::open(file).ok().and_then(|file| file.take(LONGEST).read_until(b'\n', &mut line).ok());
    read.is_some() && serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&line).is_ok()
}

/// Says what was found.
pub(crate) fn found_text(found: &Found, splits: &Splits, data: &DataConfig) -> String {
    let file = |files: &[PathBuf]| match files {
        [] => String::new(),
        [one] => one.display().to_string(),
        [first, rest @ ..] => format!("{} and {} more", first.display(), rest.len()),
    };
    let mut text = format!("data: {}", file(&splits.train));
    match found {
        Found::Gsm8k => text += " (GSM8K: question and answer)",
        Found::Text
            if data.format != DataFormat::Text
                && splits.train.first().is_some_and(|file| begins_with_object(file)) =>
        {
            text += " (plain text, although its first line is a JSON object; to read records, give it a name that ends with .jsonl)";
        }
        Found::Text => text += " (plain text)",
        Found::Records(detected) => {
            text += " (";
            match &detected.formats[..] {
                several @ [_, (_, 1..), ..] => {
                    let each = several
                        .iter()
                        .map(|(format, count)| format!("{format} in {}", counted(*count as u64, "record")));
                    text += &each.collect::<Vec<_>>().join(", ");
                }
                _ => text += &detected.to_string(),
            }
            if !detected.ignored.is_empty() {
                let names: Vec<&str> = detected.ignored.iter().map(String::as_str).take(6).collect();
                text += &format!("; not read: {}", names.join(", "));
            }
            text += ")";
        }
    }
    if !splits.validation.is_empty() && *found != Found::Gsm8k {
        text += &format!("; validation: {}", file(&splits.validation));
    }
    text
}
