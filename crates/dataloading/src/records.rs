//! Records: the rows of JSON lines, JSON, CSV and Parquet files, each with its location, and what they hold.
//!
//! ```
//! use dataloading::records::{self, Content, RecordFormat};
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("train.jsonl");
//! std::fs::write(&path, "{\"messages\": [{\"role\": \"user\", \"content\": \"2+2?\"}]}\n")?;
//! let record = records::read(&path)?.next().expect("a record")?;
//! assert_eq!(record.location.to_string(), format!("{}: line 1", path.display()));
//!
//! let format = RecordFormat::from_fields(&record.fields, "text").expect("a known format");
//! assert_eq!(format, RecordFormat::Messages);
//! let Content::Conversation(conversation) = record.content(format, "text")? else { panic!("messages") };
//! assert_eq!(conversation.messages[0].role(), "user");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | file | a record |
//! |---|---|
//! | `.jsonl`, `.ndjson`, `.json` | a line, which is an object; an element of the array if the file begins with `[` |
//! | `.csv`, `.tsv` | a row; the first names the fields |
//! | `.parquet` | a row; columns may be nested |
//!
//! All but Parquet may be compressed (`.gz`, `.zst`). Files are read record by record. A record that is wrong is an error, after which the
//! next one can be read; only a file that cannot be read further ends with its error.

mod content;
mod csv_file;
mod json_array;
mod messages;
mod parquet_file;
mod preference;
mod prompt_templates;
mod rated;
mod record_format;
mod splits;
mod weight;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::text::Encoding;
use crate::text::json_lines::parse_object;
use crate::text::lines::Lines;

pub use content::Content;
pub use prompt_templates::PromptTemplates;
pub use record_format::{DETECTED_ROWS, Detected, RecordFormat};
pub use splits::Splits;
pub use weight::WEIGHT;

/// Where a record is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RecordLocation {
    /// The file.
    pub path: Arc<Path>,
    /// The unit that is counted: `line`, `row` in a file without lines, or `record` in one whose records may have several lines or share one.
    pub unit: &'static str,
    /// The number of the line, row or record, from 1.
    pub number: u64,
    /// The line, where that is not what is counted.
    pub line: Option<u64>,
}

impl RecordLocation {
    /// Returns an error about the record here.
    pub fn error(&self, reason: impl fmt::Display) -> Error {
        Error::Record {
            from: self.path.display().to_string(),
            location: self.within(),
            reason: reason.to_string(),
        }
    }

    /// Returns the place within the file.
    fn within(&self) -> String {
        let line = self.line.map_or_else(String::new, |line| format!(" (line {line})"));
        format!("{} {}{line}", self.unit, self.number)
    }
}

impl fmt::Display for RecordLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.within())
    }
}

/// A row of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Its fields, in the file's order.
    pub fields: Map<String, Value>,
    /// Where it is.
    pub location: RecordLocation,
}

impl Record {
    /// Returns what the record holds in a format; `text_field` holds the text of [`RecordFormat::Text`].
    ///
    /// # Errors
    /// A field that is missing or holds something else.
    pub fn content(&self, format: RecordFormat, text_field: &str) -> Result<Content> {
        format.content(&self.fields, text_field).map_err(|reason| self.location.error(reason))
    }
}

/// The type of a file, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// JSON lines.
    JsonLines,
    /// JSON: an array, or JSON lines.
    Json,
    /// Values between separators.
    Csv {
        /// The separator.
        separator: u8,
    },
    /// Parquet.
    Parquet,
    /// Anything else: plain text.
    Text,
}

impl FileKind {
    /// Returns the type of a file by its extension, in front of `.gz` or `.zst` if it is compressed.
    pub fn from_path(path: &Path) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let name = name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(&name);
        match name.rsplit_once('.').map_or("", |(_, extension)| extension) {
            "jsonl" | "ndjson" => Self::JsonLines,
            "json" => Self::Json,
            "csv" => Self::Csv { separator: b',' },
            "tsv" => Self::Csv { separator: b'\t' },
            "parquet" => Self::Parquet,
            _ => Self::Text,
        }
    }
}

/// The records of a file. See [`read`].
pub type Records = Box<dyn Iterator<Item = Result<Record>> + Send>;

/// Opens a file of records.
///
/// # Errors
/// A file that does not exist, is not a regular file, or is plain text.
pub fn read(path: &Path) -> Result<Records> {
    let metadata = std::fs::metadata(path).map_err(|cause| Error::Io { path: path.to_owned(), cause })?;
    let refuse = |reason: &str| Error::File { path: path.to_owned(), reason: reason.to_owned() };
    if !metadata.is_file() {
        return Err(refuse("not a regular file; give a file of records"));
    }
    Ok(match FileKind::from_path(path) {
        // An array has its records within, whatever the file's name is.
        FileKind::JsonLines | FileKind::Json if json_array::is_array(path)? => {
            Box::new(json_array::JsonArray::open(path)?)
        }
        FileKind::JsonLines | FileKind::Json => Box::new(JsonLines::open(path)?),
        FileKind::Csv { separator } => csv_file::open(path, separator)?,
        FileKind::Parquet => Box::new(parquet_file::ParquetRows::open(path)?),
        FileKind::Text => {
            return Err(refuse(
                "plain text has no records; give a .jsonl, .json, .csv, .tsv or .parquet file",
            ));
        }
    })
}

/// Returns the records of several files in order.
///
/// # Errors
/// Same as [`read`], for any of the files.
pub fn read_all(files: &[impl AsRef<Path>]) -> Result<Records> {
    let all = files.iter().map(|file| read(file.as_ref())).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(all.into_iter().flatten()))
}

/// The objects of a file of JSON lines.
struct JsonLines {
    lines: Lines,
    path: Arc<Path>,
    is_done: bool,
}

impl JsonLines {
    fn open(path: &Path) -> Result<Self> {
        Ok(Self { lines: Lines::open(path, Encoding::Strict)?, path: path.into(), is_done: false })
    }
}

impl Iterator for JsonLines {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Result<Record>> {
        while !self.is_done {
            match self.lines.next() {
                Ok(Some(line)) if line.text.trim().is_empty() => {}
                Ok(Some(line)) => {
                    let (path, number) = (self.path.clone(), line.number);
                    let location = RecordLocation { path, unit: "line", number, line: None };
                    return Some(match parse_object(&line.text) {
                        Ok(fields) => Ok(Record { fields, location }),
                        Err(reason) => Err(location.error(reason)),
                    });
                }
                Ok(None) => self.is_done = true,
                Err(error) => {
                    self.is_done = !self.lines.is_at_line_end();
                    return Some(Err(error));
                }
            }
        }
        None
    }
}
