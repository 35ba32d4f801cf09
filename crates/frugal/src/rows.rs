//! Fine-tuning rows from a user's own files.
//!
//! | file | a row | what is learned |
//! |---|---|---|
//! | JSON lines with `prompt` and `completion` | one line | the completion and the end token |
//! | JSON lines with `text` | one line | everything |
//! | plain text | as many tokens as fit | everything |
//!
//! Prompt and completion are tokenized separately, as generation tokenizes the prompt alone. A text's last token in one row is the
//! first of the next, so that every token is predicted once.

use std::path::Path;

use dataloading::{IGNORE_INDEX, Tokenizer};
use serde_json::{Map, Value};
use training::masked_rows::MaskedRow;

use crate::config::DataFormat;
use crate::error::{Error, Result};

/// How rows are made for a model.
#[derive(Debug, Clone)]
pub struct RowOptions {
    /// The most tokens of a row.
    pub longest: usize,
    /// The token that begins every row, if the model has one.
    pub begin: Option<u32>,
    /// The token that ends a completion or a text.
    pub end: u32,
    /// The field that holds the text of a JSON line.
    pub field: String,
    /// Leaves out rows that are too long, instead of failing.
    pub skip_long: bool,
}

/// Rows of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rows {
    /// The rows, in the order of the file.
    pub rows: Vec<MaskedRow>,
    /// Rows that were too long and left out.
    pub skipped: usize,
    /// Rows that are left out because they have no text to learn.
    pub empty: usize,
}

/// Returns the format of a path, by its name and its first line.
///
/// # Errors
/// A file that cannot be read.
pub fn detect(path: &Path) -> Result<DataFormat> {
    if path.is_dir() {
        return Ok(DataFormat::Gsm8k);
    }
    let is_json = path.extension().is_some_and(|extension| extension == "jsonl" || extension == "json");
    if !is_json {
        return Ok(DataFormat::Text);
    }
    let text = read(path)?;
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let fields: Map<String, Value> = serde_json::from_str(first).unwrap_or_default();
    let is_problem = fields.contains_key("question") && fields.contains_key("answer");
    Ok(if is_problem { DataFormat::Gsm8k } else { DataFormat::Rows })
}

/// Reads rows from JSON lines.
///
/// # Errors
/// A line that is not JSON or has neither form, by its number; a row that is too long; no row at all.
pub fn json_lines(path: &Path, tokenizer: &Tokenizer, options: &RowOptions) -> Result<Rows> {
    let mut rows = Rows::default();
    for (index, line) in read(path)?.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let refuse = |reason: String| Error::File {
            path: path.to_owned(),
            reason: format!("line {}: {reason}", index + 1),
        };
        let fields: Map<String, Value> = serde_json::from_str(line)
            .map_err(|cause| refuse(format!("not a JSON object ({cause}); fix or remove the line")))?;
        let row = row(&fields, tokenizer, options).map_err(|error| refuse(error.to_string()))?;
        if row.labels.iter().skip(1).all(|label| *label == IGNORE_INDEX) {
            rows.empty += 1;
        } else if row.tokens.len() <= options.longest {
            rows.rows.push(row);
        } else if options.skip_long {
            rows.skipped += 1;
        } else {
            return Err(refuse(format!(
                "{} tokens are more than the longest row of {}; shorten it, or leave long rows out (--skip-long)",
                row.tokens.len(),
                options.longest
            )));
        }
    }
    if rows.rows.is_empty() {
        let reason = match (rows.skipped, rows.empty) {
            (0, 0) => format!(
                "no row in it; expected JSON lines with `prompt` and `completion`, or with `{}`",
                options.field
            ),
            (0, empty) => format!("none of its {empty} rows has a text to learn"),
            (skipped, _) => format!(
                "{skipped} rows are longer than {} tokens, and no other is left; shorten them, or raise the longest row",
                options.longest
            ),
        };
        return Err(Error::File { path: path.to_owned(), reason });
    }
    Ok(rows)
}

/// Reads rows from plain text, each as long as possible.
///
/// # Errors
/// No text; a longest row of fewer than 2 tokens.
pub fn text(path: &Path, tokenizer: &Tokenizer, options: &RowOptions) -> Result<Rows> {
    if options.longest < 2 {
        let found = options.longest.to_string();
        return Err(Error::Value { key: "data.max_length", found, expected: "2 tokens or more" });
    }
    let mut ids: Vec<i64> = options.begin.map(i64::from).into_iter().collect();
    ids.extend(tokenizer.encode(&read(path)?)?.into_iter().map(i64::from));
    ids.push(i64::from(options.end));
    if ids.len() < 3 {
        return Err(Error::File { path: path.to_owned(), reason: "no text in it".to_owned() });
    }
    let starts = (0..ids.len() - 1).step_by(options.longest - 1);
    let rows = starts.map(|start| {
        let tokens = ids[start..ids.len().min(start + options.longest)].to_vec();
        MaskedRow { labels: tokens.clone(), tokens }
    });
    Ok(Rows { rows: rows.collect(), ..Rows::default() })
}

fn row(fields: &Map<String, Value>, tokenizer: &Tokenizer, options: &RowOptions) -> Result<MaskedRow> {
    let text = |field: &str| match fields.get(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(Error::Toml(format!("`{field}` is {other}; expected a text"))),
    };
    let ids =
        |text: &str| -> Result<Vec<i64>> { Ok(tokenizer.encode(text)?.into_iter().map(i64::from).collect()) };
    let mut tokens: Vec<i64> = options.begin.map(i64::from).into_iter().collect();
    let (prompt, completion) = match (text("prompt")?, text("completion")?, text(&options.field)?) {
        (Some(prompt), Some(completion), _) => (Some(prompt), completion),
        (_, _, Some(text)) => (None, text),
        _ => {
            let names: Vec<&str> = fields.keys().map(String::as_str).collect();
            return Err(Error::Toml(format!(
                "neither `prompt` and `completion` nor `{}`; the fields here are: {}",
                options.field,
                names.join(", ")
            )));
        }
    };
    if let Some(prompt) = prompt {
        tokens.extend(ids(prompt)?);
    }
    let learned = if prompt.is_some() { tokens.len() } else { 0 };
    tokens.extend(ids(completion)?);
    tokens.push(i64::from(options.end));
    let labels = (0..).zip(&tokens).map(|(at, id)| if at < learned { IGNORE_INDEX } else { *id }).collect();
    Ok(MaskedRow { tokens, labels })
}

fn read(path: &Path) -> Result<String> {
    let reason = |cause: std::io::Error| Error::File { path: path.to_owned(), reason: cause.to_string() };
    std::fs::read_to_string(path).map_err(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting() -> (tempfile::TempDir, Tokenizer, RowOptions) {
        let path = dataloading::embedded::folder().unwrap().join("tokenizer.json");
        let options =
            RowOptions { longest: 40, begin: None, end: 0, field: "text".to_owned(), skip_long: false };
        (tempfile::tempdir().unwrap(), Tokenizer::from_file(&path).unwrap(), options)
    }

    #[test]
    fn completions_are_learned_and_prompts_are_not() {
        let (folder, tokenizer, options) = setting();
        let path = folder.path().join("rows.jsonl");
        std::fs::write(
            &path,
            "{\"prompt\": \"How many pears?\", \"completion\": \" Five.\"}\n\n{\"text\": \"A pear.\"}\n",
        )
        .unwrap();
        assert_eq!(detect(&path).unwrap(), DataFormat::Rows);
        let Rows { rows, skipped, empty } = json_lines(&path, &tokenizer, &options).unwrap();
        assert_eq!((rows.len(), skipped, empty), (2, 0, 0));
        let prompt = tokenizer.encode("How many pears?").unwrap().len();
        assert!(rows[0].labels[..prompt].iter().all(|label| *label == IGNORE_INDEX));
        assert_eq!(rows[0].labels[prompt..], rows[0].tokens[prompt..]);
        assert_eq!(rows[1].labels, rows[1].tokens);
        assert!(rows.iter().all(|row| row.tokens.last() == Some(&0)));
    }

    #[test]
    fn every_token_of_a_text_is_predicted_once() {
        let (folder, tokenizer, options) = setting();
        let path = folder.path().join("plain.txt");
        std::fs::write(&path, "Ann has 5 pears and buys 3 more. ".repeat(9)).unwrap();
        let rows = text(&path, &tokenizer, &RowOptions { longest: 16, ..options }).unwrap().rows;
        let all: Vec<i64> = tokenizer
            .encode(&std::fs::read_to_string(&path).unwrap())
            .unwrap()
            .into_iter()
            .map(i64::from)
            .chain([0])
            .collect();
        let predicted: Vec<i64> = rows.iter().flat_map(|row| row.labels[1..].to_vec()).collect();
        assert_eq!(predicted, all[1..]);
    }

    #[test]
    fn bad_lines_are_named() {
        let (folder, tokenizer, options) = setting();
        let path = folder.path().join("rows.jsonl");
        let long = format!("{{\"text\": \"{}\"}}", "pears ".repeat(60));
        for (line, said) in [
            ("{", "line 2: not a JSON object"),
            ("{\"a\": 1}", "line 2: neither `prompt` and `completion` nor `text`; the fields here are: a"),
            ("{\"text\": 5}", "line 2: `text` is 5; expected a text"),
            (
                long.as_str(),
                "are more than the longest row of 40; shorten it, or leave long rows out (--skip-long)",
            ),
        ] {
            std::fs::write(&path, format!("{{\"text\": \"a\"}}\n{line}\n")).unwrap();
            let error = json_lines(&path, &tokenizer, &options).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        let skipping = RowOptions { skip_long: true, ..options };
        assert_eq!(json_lines(&path, &tokenizer, &skipping).unwrap().skipped, 1);
    }

    #[test]
    fn rows_without_a_text_are_left_out_and_counted() {
        let (folder, tokenizer, options) = setting();
        let path = folder.path().join("rows.jsonl");
        let check = |lines: &str, longest| {
            std::fs::write(&path, lines).unwrap();
            let options = RowOptions { longest, skip_long: true, ..options.clone() };
            json_lines(&path, &tokenizer, &options)
        };
        let Rows { rows, empty, .. } = check("{\"text\": \"\"}\n{\"text\": \"a pear\"}\n", 40).unwrap();
        assert_eq!((rows.len(), empty), (1, 1));
        let error = check("{\"text\": \"\"}\n", 40).unwrap_err().to_string();
        assert!(error.ends_with("none of its 1 rows has a text to learn"), "{error}");
        let error = check("{\"text\": \"a pear\"}\n", 1).unwrap_err().to_string();
        assert!(error.contains("1 rows are longer than 1 tokens, and no other is left"), "{error}");
    }
}
