//! From files to rows.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use dataloading::records::{self, Detected, FileKind, Record, RecordLocation};
use rayon::prelude::*;
use serde_json::Value;
use training::masked_rows::{IN_MEMORY, MaskedRow, MaskedRowsWriter};

use super::cache;
use super::counts::{Counts, Rows};
use super::encoder::RowEncoder;
use crate::error::{Error, Result};

/// Records that are encoded in parallel.
const CHUNK: usize = 512;
/// Bytes of texts of records that are encoded in parallel.
const CHUNK_BYTES: usize = 2 << 20;

/// Content of files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// GSM8K's problems: JSON lines with `question`, and an `answer` whose last line is `####` and the result.
    Gsm8k,
    /// Plain text.
    Text,
    /// Records.
    Records(Detected),
}

/// Finds what files hold, by their names and their first records: text or records. GSM8K is chosen, not found, because questions with
/// answers may look like its problems.
///
/// # Errors
/// A file that cannot be read; a record that has no known format.
pub fn detect(files: &[PathBuf], field: &str) -> Result<Found> {
    let kind = files.first().map_or(FileKind::Text, |file| FileKind::from_path(file));
    if kind == FileKind::Text {
        return Ok(Found::Text);
    }
    detect_records(files, field).map(Found::Records)
}

/// Finds the formats of the records of files.
///
/// # Errors
/// As [`detect`]; files of plain text.
pub fn detect_records(files: &[PathBuf], field: &str) -> Result<Detected> {
    Detected::new(records::read_all(files)?, field).map_err(|error| named(error, files))
}

/// Names the files in an error about data without a record.
fn named(error: dataloading::Error, files: &[PathBuf]) -> Error {
    match (error, files.first()) {
        (dataloading::Error::Empty { reason, .. }, Some(path)) => Error::File { path: path.clone(), reason },
        (error, _) => error.into(),
    }
}

/// Encodes the records of files in order, and passes the rows of each, or what is wrong with it, to `each`, until that breaks. The place
/// is that of a record that could be read.
///
/// # Errors
/// A file that cannot be opened; the first error of `each`.
pub fn encode<E: From<Error>>(
    files: &[PathBuf],
    encoder: &RowEncoder,
    detected: &Detected,
    mut each: impl FnMut(Option<&RecordLocation>, Result<(Vec<MaskedRow>, Counts)>) -> Result<ControlFlow<()>, E>,
) -> Result<(), E> {
    let mut records = records::read_all(files).map_err(Error::from)?;
    loop {
        let chunk = next_chunk(&mut records);
        if chunk.is_empty() {
            return Ok(());
        }
        let encoded: Vec<_> = chunk
            .into_par_iter()
            .map(|record| match record {
                Ok(record) => (encoder.record(&record, detected), Some(record.location)),
                Err(error) => (Err(error.into()), None),
            })
            .collect();
        for (rows, place) in encoded {
            if each(place.as_ref(), rows)?.is_break() {
                return Ok(());
            }
        }
    }
}

/// The next records, as many as are encoded at a time.
fn next_chunk(records: &mut records::Records) -> Vec<dataloading::Result<Record>> {
    let (mut chunk, mut bytes) = (Vec::new(), 0);
    while chunk.len() < CHUNK && bytes < CHUNK_BYTES {
        let Some(record) = records.next() else { break };
        bytes += record.as_ref().map_or(0, |record| record.fields.values().map(text_bytes).sum());
        chunk.push(record);
    }
    chunk
}

/// Bytes of the texts in a value.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(text_bytes).sum(),
        Value::Object(values) => values.values().map(text_bytes).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => size_of::<Value>(),
    }
}

/// A writer of rows, which puts those that are too many for memory beside the prepared rows.
pub(super) fn writer() -> MaskedRowsWriter {
    let beside = cache::folder().filter(|folder| cache::create(folder).is_ok());
    MaskedRowsWriter::new(IN_MEMORY, beside.unwrap_or_else(std::env::temp_dir))
}

/// Reads the rows of files: all of them, or those of the first records until there are `limit`.
///
/// # Errors
/// The first record that is wrong; no row at all.
pub fn prepare(
    files: &[PathBuf],
    encoder: &RowEncoder,
    detected: &Detected,
    limit: Option<usize>,
) -> Result<Rows> {
    let (mut rows, mut counts) = (writer(), Counts::default());
    let limit = limit.unwrap_or(usize::MAX);
    encode(files, encoder, detected, |_, encoded| {
        let (of_record, own) = encoded?;
        counts.add(&own);
        let left = limit - rows.len();
        of_record.iter().take(left).try_for_each(|row| rows.push(row))?;
        Ok::<_, Error>(if rows.len() < limit { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    })?;
    if rows.is_empty() {
        return Err(nothing_left(files, encoder, &counts));
    }
    counts.rows = rows.len();
    Ok(Rows { rows: rows.finish()?, counts })
}

/// Whether rows came from a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cached {
    /// They were made of the records, and are in this file.
    Written(PathBuf),
    /// They were read from this file.
    Read(PathBuf),
    /// They were made of the records, and could not be written.
    NotWritten(String),
}

/// Reads the rows of files from a folder of prepared rows; if they are not there, makes them as [`prepare`] does, and writes them.
///
/// # Errors
/// As [`prepare`]. A cache that cannot be written is no error.
pub fn prepare_cached(
    files: &[PathBuf],
    encoder: &RowEncoder,
    detected: &Detected,
    limit: Option<usize>,
    folder: &Path,
) -> Result<(Rows, Cached)> {
    let path = folder.join(cache::key(files, encoder, detected, limit)?).with_extension("rows");
    if let Some(rows) = cache::read(&path) {
        return Ok((rows, Cached::Read(path)));
    }
    let rows = prepare(files, encoder, detected, limit)?;
    let cached = match cache::write(&path, &rows) {
        Ok(()) => Cached::Written(path),
        Err(cause) => Cached::NotWritten(format!("{}: {cause}", path.display())),
    };
    Ok((rows, cached))
}

fn nothing_left(files: &[PathBuf], encoder: &RowEncoder, counts: &Counts) -> Error {
    let longest = encoder.options().longest;
    let reason = match (counts.skipped, counts.without_label) {
        (0, 0) => "there is no record in it".to_owned(),
        (0, without) => format!(
            "none of its {without} rows has a text to learn: no answer, every answer with weight 0, or answers beyond the \
             longest row of {longest} tokens"
        ),
        (skipped, _) => format!(
            "{skipped} rows are longer than {longest} tokens, and no other is left; shorten them, or raise the longest row"
        ),
    };
    Error::File { path: files.first().map_or_else(PathBuf::new, |file| Path::new(file).to_owned()), reason }
}
