//! The lines of a UTF-8 file, and plain-text records made of them.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use flate2::read::MultiGzDecoder;

use super::{Encoding, Location, Record, io};
use crate::error::{Error, Result};

/// The maximum size of a record in bytes: some twenty books. It bounds the memory for a file without line breaks, a binary file, or a small
/// compressed one of a large text; a record is held several times while it is parsed and encoded.
pub const LONGEST_RECORD: u64 = 32 << 20;

/// The remedy for a file in UTF-16.
pub(crate) const UTF16: &str = "the file is UTF-16; convert it (iconv -f UTF-16 -t UTF-8)";

/// Returns whether a file begins with a byte order mark of UTF-16.
pub(crate) fn is_utf16(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff")
}

/// A line without its line break.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) text: String,
    /// The line number, from 1.
    pub(crate) number: u64,
}

pub(crate) struct Lines {
    path: Arc<Path>,
    reader: Box<dyn BufRead + Send>,
    encoding: Encoding,
    limit: u64,
    number: u64,
    bytes: u64,
    replaced: u64,
    is_at_line_end: bool,
}

impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lines")
            .field("path", &self.path)
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// Opens a file to read its bytes; those of a file whose name ends with `.gz` or `.zst` are decompressed.
///
/// # Errors
/// A file that cannot be opened.
pub fn open(path: &Path) -> Result<Box<dyn BufRead + Send>> {
    const BUFFER: usize = 1 << 18;
    let file = File::open(path).map_err(|cause| io(path, cause))?;
    let is = |name: &str| path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case(name));
    let file = BufReader::with_capacity(BUFFER, file);
    Ok(if is("gz") {
        Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(file)))
    } else if is("zst") {
        let decoder = zstd::stream::read::Decoder::with_buffer(file).map_err(|cause| io(path, cause))?;
        Box::new(BufReader::with_capacity(BUFFER, decoder))
    } else {
        Box::new(file)
    })
}

impl Lines {
    pub(crate) fn open(path: &Path, encoding: Encoding) -> Result<Self> {
        let reader = open(path)?;
        let limit = LONGEST_RECORD;
        Ok(Self {
            path: path.into(),
            reader,
            encoding,
            limit,
            number: 0,
            bytes: 0,
            replaced: 0,
            is_at_line_end: true,
        })
    }

    /// Returns whether the next read begins at a line: after an error about a line's content, but not about its size or the file.
    pub(crate) fn is_at_line_end(&self) -> bool {
        self.is_at_line_end
    }

    pub(super) fn replaced(&self) -> u64 {
        self.replaced
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn record(&self, text: String, line: u64) -> Record {
        Record { text, location: Location { path: self.path.clone(), line } }
    }

    /// Returns an error about line `line`.
    pub(crate) fn error(&self, line: u64, reason: String) -> Error {
        Error::Record { from: self.path.display().to_string(), location: format!("line {line}"), reason }
    }

    pub(crate) fn next(&mut self) -> Result<Option<Line>> {
        let mut bytes = Vec::new();
        self.is_at_line_end = false;
        let read = (&mut self.reader).take(self.limit + 1).read_until(b'\n', &mut bytes);
        let read = read.map_err(|cause| io(&self.path, cause))? as u64;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        let start = self.bytes;
        self.bytes += read;
        self.check_size(read, self.number)?;
        self.is_at_line_end = true;
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
            if bytes.last() == Some(&b'\r') {
                bytes.pop();
            }
        }
        // Skip the byte order mark.
        if self.number == 1 && bytes.starts_with(b"\xef\xbb\xbf") {
            bytes.drain(..3);
        }
        let text = match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(bad) if self.encoding == Encoding::Lossy => {
                let (text, replaced) = replace(bad.as_bytes());
                self.replaced += replaced;
                text
            }
            Err(bad) if start == 0 && is_utf16(bad.as_bytes()) => {
                // Its lines do not end where these do.
                self.is_at_line_end = false;
                return Err(self.error(self.number, UTF16.to_owned()));
            }
            Err(bad) => {
                let at = bad.utf8_error().valid_up_to();
                let (number, byte) = (self.number, start + at as u64);
                return Err(Error::Record {
                    from: self.path.display().to_string(),
                    location: format!(
                        "line {number}, byte {byte} of the file (0x{:02x})",
                        bad.as_bytes()[at]
                    ),
                    reason: match bad.as_bytes().contains(&0) {
                        true => "not text; give a file of text".to_owned(),
                        false => "not UTF-8; convert the file (iconv -f LATIN1 -t UTF-8)".to_owned(),
                    },
                });
            }
        };
        Ok(Some(Line { text, number: self.number }))
    }

    /// Checks that a record of `bytes` that starts at `line` is within the limit.
    pub(super) fn check_size(&self, bytes: u64, line: u64) -> Result<()> {
        if bytes <= self.limit {
            return Ok(());
        }
        Err(self.error(
            line,
            format!(
                "a record is longer than {} bytes; split it, or check that the format is the right one",
                self.limit
            ),
        ))
    }
}

/// Returns the text with U+FFFD for each maximal invalid sequence, and the number of replacements.
fn replace(bytes: &[u8]) -> (String, u64) {
    let (mut text, mut replaced) = (String::with_capacity(bytes.len()), 0);
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        if !chunk.invalid().is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            replaced += 1;
        }
    }
    (text, replaced)
}

/// Returns the lines up to the next blank line, joined by line breaks.
pub(super) fn next_paragraph(lines: &mut Lines) -> Result<Option<Record>> {
    let mut paragraph: Option<(String, u64)> = None;
    while let Some(line) = lines.next()? {
        let blank = line.text.trim().is_empty();
        match &mut paragraph {
            None if blank => {}
            None => paragraph = Some((line.text, line.number)),
            Some(_) if blank => break,
            Some((text, start)) => {
                text.push('\n');
                text.push_str(&line.text);
                lines.check_size(text.len() as u64, *start)?;
            }
        }
    }
    Ok(paragraph.map(|(text, start)| lines.record(text, start)))
}

/// Returns all lines of the file; a file of only white space has no record.
pub(super) fn whole_file(lines: &mut Lines) -> Result<Option<Record>> {
    let mut text = String::new();
    while let Some(line) = lines.next()? {
        if line.number > 1 {
            text.push('\n');
        }
        text.push_str(&line.text);
        lines.check_size(text.len() as u64, 1)?;
    }
    let empty = text.trim().is_empty();
    Ok((!empty).then(|| lines.record(text, 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_longer_than_the_limit_is_refused_and_not_held_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long.txt");
        let open = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Lines { limit: 8, ..Lines::open(&path, Encoding::Strict).unwrap() }
        };
        assert_eq!(open("1234567\n").next().unwrap().unwrap().text, "1234567");
        let error = open("123456789123456789\n").next().unwrap_err().to_string();
        assert!(error.ends_with(
            "line 1: a record is longer than 8 bytes; split it, or check that the format is the right one"
        ));
        assert!(next_paragraph(&mut open("12345\n12345\n")).is_err());
        assert!(next_paragraph(&mut open("12345\n\n12345\n")).is_ok());
        assert!(whole_file(&mut open("12345\n12345\n")).is_err());
    }

    #[test]
    fn each_bad_sequence_counts_once() {
        for (bytes, text, replaced) in [
            (&b"plain"[..], "plain", 0),
            (b"caf\xe9 bar", "caf\u{fffd} bar", 1),
            (b"\xff\xfe", "\u{fffd}\u{fffd}", 2),
            (b"cut \xe2\x82", "cut \u{fffd}", 1),
        ] {
            assert_eq!(replace(bytes), (text.to_owned(), replaced));
        }
    }
}
