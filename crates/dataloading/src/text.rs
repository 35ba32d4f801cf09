//! Text in files, read record by record through a buffer, so that a corpus may be larger than memory.
//!
//! A [`Corpus`] is a list of files, read in order, and a [`Format`] that says what one record of them is. Every record
//! carries its [`Place`], so that whatever is wrong with it later can be said with file and line.
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
//! assert_eq!(lines[1].place.line, 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod json_lines;
mod lines;
mod wikitext;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use lines::{Line, Lines};

pub use lines::LONGEST_RECORD;
pub use wikitext::{heading_level, is_blank};

/// What one record of a file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Format {
    /// WikiText: an article, from its heading of level one (` = Title = `) to the next one. Its inner headings
    /// (` = = History = = `) and the marks `@-@`, `@,@`, `@.@` stay as they are.
    Articles,
    /// WikiText as the course's assignment reads it: each line that is not empty, headings included, trimmed.
    Lines,
    /// Plain text: lines up to an empty one.
    Paragraphs,
    /// Plain text: each file whole, up to [`LONGEST_RECORD`] bytes, as any record.
    Files,
    /// One JSON object per line; the text is the string in this field.
    JsonLines(String),
}

/// What to do with bytes that are no UTF-8.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Encoding {
    /// An error that names file, line and byte.
    #[default]
    Strict,
    /// Each bad sequence becomes U+FFFD, and is counted ([`Records::replaced`]).
    Lossy,
}

/// Where a record starts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    /// The file.
    pub path: Arc<Path>,
    /// Its line, from 1.
    pub line: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}", self.path.display(), self.line)
    }
}

/// A text and where it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The text, without the line break at its end.
    pub text: String,
    /// Where it starts.
    pub place: Place,
}

/// Files and what a record of them is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corpus {
    /// The files, in the order in which they are read.
    pub files: Vec<PathBuf>,
    /// What a record is.
    pub format: Format,
    /// What to do with bytes that are no UTF-8.
    pub encoding: Encoding,
}

impl Corpus {
    /// Files that must hold UTF-8.
    pub fn new(files: impl IntoIterator<Item = PathBuf>, format: Format) -> Self {
        Self { files: files.into_iter().collect(), format, encoding: Encoding::Strict }
    }

    /// Starts to read.
    ///
    /// # Errors
    /// No files; a file that is not there or is no regular file, so that it is said before hours of work and not after.
    pub fn records(&self) -> Result<Records> {
        if self.files.is_empty() {
            return Err(Error::Empty {
                from: "corpus".into(),
                reason: "no files were given; name at least one".into(),
            });
        }
        for path in &self.files {
            let metadata = std::fs::metadata(path).map_err(|cause| io(path, cause))?;
            if !metadata.is_file() {
                return Err(Error::File {
                    path: path.clone(),
                    reason: "not a regular file; name the text files themselves".into(),
                });
            }
        }
        Ok(Records {
            corpus: self.clone(),
            next_file: 0,
            lines: None,
            held: None,
            given: 0,
            replaced: 0,
            bytes: 0,
            over: false,
        })
    }
}

/// The records of a [`Corpus`], in order. After the first error there are no more. A corpus that has no record at all ends
/// with one [`Error::Empty`].
#[derive(Debug)]
pub struct Records {
    corpus: Corpus,
    next_file: usize,
    lines: Option<Lines>,
    /// A line that was read and belongs to the record after.
    held: Option<Line>,
    given: u64,
    replaced: u64,
    bytes: u64,
    over: bool,
}

impl Records {
    /// Sequences of bytes that were no UTF-8 and were replaced so far.
    pub fn replaced(&self) -> u64 {
        self.replaced + self.lines.as_ref().map_or(0, Lines::replaced)
    }

    /// Bytes read so far, for a progress bar over the sizes of the files.
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
                Format::Articles => wikitext::next_article(lines, &mut self.held)?,
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
        if self.over {
            return None;
        }
        match self.next_record() {
            Ok(Some(record)) => {
                self.given += 1;
                Some(Ok(record))
            }
            Ok(None) => {
                self.over = true;
                let from = self.corpus.files.iter().map(|path| path.display().to_string());
                (self.given == 0).then(|| {
                    Err(Error::Empty {
                        from: from.collect::<Vec<_>>().join(", "),
                        reason: "there is no text; check that these are the right files and the right format"
                            .into(),
                    })
                })
            }
            Err(error) => {
                self.over = true;
                Some(Err(error))
            }
        }
    }
}

fn io(path: &Path, cause: std::io::Error) -> Error {
    Error::Io { path: path.to_owned(), cause }
}
