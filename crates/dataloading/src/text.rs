//! Text files, read record by record through a buffer, so that a corpus may be larger than memory.
//!
//! A [`Corpus`] is a list of files in order and a [`Format`] that defines their records. Every record carries its
//! [`Location`], so that an error can name the file and line.
//!
//! ```
//! use dataloading::text::{Corpus, Format};
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("towns.txt");
//! std::fs::write(&path, " \n = Arden = \n \n Arden is a town . \n \n = = History = = \n \n It is old . \n")?;
//! let articles: Vec<_> = Corpus::new([path.clone()], Format::Articles).records()?.collect::<Result<_, _>>()?;
//! assert_eq!(articles.len(), 1);
//! let lines: Vec<_> = Corpus::new([path], Format::Lines).records()?.collect::<Result<_, _>>()?;
//! assert_eq!(lines[1].text, "Arden is a town .");
//! assert_eq!(lines[1].location.line, 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub(crate) mod json_lines;
pub(crate) mod lines;
mod wikitext;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use lines::{Line, Lines};

pub use lines::{LONGEST_RECORD, open};
pub use wikitext::{heading_level, is_blank};

/// The format of a text file: what one record is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Format {
    /// WikiText: an article, from a level-one heading (` = Title = `) to the next. Inner headings (` = = History = = `) and
    /// the marks `@-@`, `@,@`, `@.@` are kept.
    Articles,
    /// WikiText, one record per non-blank line, trimmed, headings included.
    Lines,
    /// Plain text: paragraphs separated by blank lines.
    Paragraphs,
    /// Plain text: one record per file, up to [`LONGEST_RECORD`] bytes.
    Files,
    /// JSON lines: one object per line, with the text in this string field.
    JsonLines(String),
}

/// How bytes that are not UTF-8 are handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Encoding {
    /// Fail with an error that names file, line and byte.
    #[default]
    Strict,
    /// Replace each invalid sequence by U+FFFD and count it ([`Records::replaced`]).
    Lossy,
}

/// The position of a record: file and line.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Location {
    /// The path of the file.
    pub path: Arc<Path>,
    /// The line number, from 1.
    pub line: u64,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}", self.path.display(), self.line)
    }
}

/// A text and its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The text, without its final line break.
    pub text: String,
    /// The position of its start.
    pub location: Location,
}

/// Text files and their format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corpus {
    /// The files, in reading order.
    pub files: Vec<PathBuf>,
    /// The format of the files.
    pub format: Format,
    /// How bytes that are not UTF-8 are handled.
    pub encoding: Encoding,
}

impl Corpus {
    /// Creates a corpus of UTF-8 files.
    pub fn new(files: impl IntoIterator<Item = PathBuf>, format: Format) -> Self {
        Self { files: files.into_iter().collect(), format, encoding: Encoding::Strict }
    }

    /// Opens the corpus and returns an iterator over its records.
    ///
    /// # Errors
    /// The list is empty, or a file does not exist or is not a regular file. All files are checked before the first is
    /// read.
    pub fn records(&self) -> Result<Records> {
        if self.files.is_empty() {
            return Err(Error::Empty {
                from: "corpus".into(),
                reason: "the list of files is empty; pass at least one".into(),
            });
        }
        for path in &self.files {
            let metadata = std::fs::metadata(path).map_err(|cause| io(path, cause))?;
            if !metadata.is_file() {
                return Err(Error::File {
                    path: path.clone(),
                    reason: "not a regular file; pass text files".into(),
                });
            }
        }
        Ok(Records {
            corpus: self.clone(),
            next_file: 0,
            lines: None,
            lookahead: None,
            yielded: 0,
            replaced: 0,
            bytes: 0,
            done: false,
        })
    }
}

/// An iterator over the records of a [`Corpus`], in order. It ends after the first error. A corpus without records yields
/// one [`Error::Empty`].
#[derive(Debug)]
pub struct Records {
    corpus: Corpus,
    next_file: usize,
    lines: Option<Lines>,
    /// A line that was read ahead: the start of the next record.
    lookahead: Option<Line>,
    yielded: u64,
    replaced: u64,
    bytes: u64,
    done: bool,
}

impl Records {
    /// Returns the number of invalid UTF-8 sequences replaced so far.
    pub fn replaced(&self) -> u64 {
        self.replaced + self.lines.as_ref().map_or(0, Lines::replaced)
    }

    /// Returns the bytes read so far, for a progress bar over the file sizes.
    pub fn bytes(&self) -> u64 {
        self.bytes + self.lines.as_ref().map_or(0, Lines::bytes)
    }

    fn next_record(&mut self) -> Result<Option<Record>> {
        loop {
            if self.lines.is_none() {
                let Some(path) = self.corpus.files.get(self.next_file) else { return Ok(None) };
                self.next_file += 1;
                self.lines = Some(Lines::open(path, self.corpus.encoding)?);
            }
            let Some(lines) = &mut self.lines else { continue };
            let record = match &self.corpus.format {
                Format::Articles => wikitext::next_article(lines, &mut self.lookahead)?,
                Format::Lines => wikitext::next_line(lines)?,
                Format::Paragraphs => lines::next_paragraph(lines)?,
                Format::Files => lines::whole_file(lines)?,
                Format::JsonLines(field) => json_lines::next_object(lines, field)?,
            };
            if record.is_some() {
                return Ok(record);
            }
            self.replaced += lines.replaced();
            self.bytes += lines.bytes();
            self.lines = None;
        }
    }
}

impl Iterator for Records {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        match self.next_record() {
            Ok(Some(record)) => {
                self.yielded += 1;
                Some(Ok(record))
            }
            Ok(None) => {
                self.done = true;
                let from = self.corpus.files.iter().map(|path| path.display().to_string());
                (self.yielded == 0).then(|| {
                    Err(Error::Empty {
                        from: from.collect::<Vec<_>>().join(", "),
                        reason: "there is no text; check the files and their format".into(),
                    })
                })
            }
            Err(error) => {
                self.done = true;
                Some(Err(error))
            }
        }
    }
}

fn io(path: &Path, cause: std::io::Error) -> Error {
    Error::Io { path: path.to_owned(), cause }
}
