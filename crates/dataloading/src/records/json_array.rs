//! The elements of a JSON array, read one at a time.
//!
//! A scanner over the bytes finds where an element ends: at a comma or the closing bracket that is in no string and at no deeper level.
//! So a file may be larger than memory, errors have lines, and after a wrong element the next one can be read.

use std::io::{BufRead, Read};
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::{Record, RecordLocation};
use crate::error::{Error, Result};
use crate::text::LONGEST_RECORD;
use crate::text::json_lines::kind;
use crate::text::lines::open;

/// Returns whether the first character of a file is `[`.
pub(super) fn is_array(path: &Path) -> Result<bool> {
    let mut bytes = open(path)?.take(1 << 16).bytes();
    let first =
        bytes.by_ref().find(|byte| !matches!(byte, Ok(byte) if is_blank(*byte) || MARK.contains(byte)));
    match first {
        None => Ok(false),
        Some(Ok(byte)) => Ok(byte == b'['),
        Some(Err(cause)) => Err(Error::Io { path: path.to_owned(), cause }),
    }
}

/// The byte order mark.
const MARK: [u8; 3] = *b"\xef\xbb\xbf";

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

pub(super) struct JsonArray {
    reader: Box<dyn BufRead + Send>,
    path: Arc<Path>,
    line: u64,
    /// Elements before the next one.
    records: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Before,
    Within,
    After,
}

/// The byte that ended an element.
enum End {
    Comma,
    Bracket,
    File,
}

impl JsonArray {
    pub(super) fn open(path: &Path) -> Result<Self> {
        Ok(Self { reader: open(path)?, path: path.into(), line: 1, records: 0, state: State::Before })
    }

    /// The place of the newest element, or of a line of it.
    fn location(&self, line: u64) -> RecordLocation {
        RecordLocation { path: self.path.clone(), unit: "record", number: self.records, line: Some(line) }
    }

    fn byte(&mut self) -> Result<Option<u8>> {
        let buffer =
            self.reader.fill_buf().map_err(|cause| Error::Io { path: self.path.to_path_buf(), cause })?;
        let Some(&byte) = buffer.first() else { return Ok(None) };
        self.reader.consume(1);
        self.line += u64::from(byte == b'\n');
        Ok(Some(byte))
    }

    /// Reads up to the end of an element; returns its bytes and its first line.
    fn element(&mut self) -> Result<(Vec<u8>, u64, End)> {
        let (mut bytes, mut depth) = (Vec::new(), 0usize);
        let (mut in_string, mut escaped) = (false, false);
        let mut first = self.line;
        while let Some(byte) = self.byte()? {
            if bytes.is_empty() && is_blank(byte) {
                first = self.line;
                continue;
            }
            if in_string {
                in_string = escaped || byte != b'"';
                escaped = !escaped && byte == b'\\';
            } else {
                match byte {
                    b'"' => in_string = true,
                    b'{' | b'[' => depth += 1,
                    b',' if depth == 0 => return Ok((bytes, first, End::Comma)),
                    b']' if depth == 0 => return Ok((bytes, first, End::Bracket)),
                    b'}' | b']' => depth = depth.saturating_sub(1),
                    _ => {}
                }
            }
            bytes.push(byte);
            if bytes.len() as u64 > LONGEST_RECORD {
                let reason = format!(
                    "a record is longer than {LONGEST_RECORD} bytes; is a bracket or a quote missing?"
                );
                return Err(self.location(first).error(reason));
            }
        }
        Ok((bytes, first, End::File))
    }

    /// Returns the next element; `None` at the end of the array.
    fn advance(&mut self) -> Result<Option<Record>> {
        if self.state == State::Before {
            self.state = State::Within;
            while self.byte()?.is_some_and(|byte| byte != b'[') {}
        }
        self.records += 1;
        let (bytes, line, end) = self.element()?;
        let location = self.location(line);
        let is_empty = bytes.iter().all(|byte| is_blank(*byte));
        match end {
            End::Comma => {}
            End::Bracket => self.state = State::After,
            End::File => {
                self.state = State::After;
                return Err(location.error("the array does not end with `]`; the file is cut off"));
            }
        }
        if is_empty && self.state == State::After {
            return Ok(None);
        }
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(fields)) => Ok(Some(Record { fields, location })),
            Ok(other) => Err(location.error(format!(
                "expected an object, found {}; an element of the array is one record",
                kind(&other)
            ))),
            Err(cause) => {
                let cause_text = cause.to_string();
                let message = cause_text.split(" at line ").next().unwrap_or_default().to_owned();
                let at = self.location(line + cause.line().saturating_sub(1) as u64);
                Err(at.error(format!("not JSON ({message}); correct or remove the record")))
            }
        }
    }
}

impl Iterator for JsonArray {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Result<Record>> {
        if self.state == State::After {
            return None;
        }
        let next = self.advance();
        if matches!(next, Err(Error::Io { .. })) {
            self.state = State::After;
        }
        next.transpose()
    }
}
