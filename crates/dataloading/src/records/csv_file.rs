//! The rows of a CSV file. The first row names the fields; every value is a text.

use std::io::{self, BufRead, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use csv::ErrorKind;
use serde_json::{Map, Value};

use super::{Record, RecordLocation, Records};
use crate::error::{Error, Result};
use crate::text::lines::{UTF16, is_utf16};
use crate::text::{LONGEST_RECORD, open as open_bytes};

/// Opens a file.
///
/// # Errors
/// A file that cannot be opened; a first row that is not UTF-8, or has a name twice.
pub(super) fn open(path: &Path, separator: u8) -> Result<Records> {
    // After a line that ends with CR LF the parser stands before the LF, and counts the line as not read.
    let mut first = Vec::new();
    let io = |cause| Error::Io { path: path.to_owned(), cause };
    open_bytes(path)?.take(LONGEST_RECORD).read_until(b'\n', &mut first).map_err(io)?;
    if is_utf16(&first) {
        return Err(Error::File { path: path.to_owned(), reason: UTF16.to_owned() });
    }
    let behind = u64::from(first.ends_with(b"\r\n"));
    let left = Arc::new(AtomicU64::new(LONGEST_RECORD));
    let bytes = Bounded { bytes: open_bytes(path)?, left: left.clone() };
    let mut reader = csv::ReaderBuilder::new().delimiter(separator).from_reader(bytes);
    let path: Arc<Path> = path.into();
    let names: Vec<String> = match reader.headers() {
        Ok(names) => names.iter().map(|name| name.trim().to_owned()).collect(),
        Err(error) => return Err(wrong(&path, 1, 0, &error)),
    };
    let location = RecordLocation { path: path.clone(), unit: "line", number: 1, line: None };
    if let Some((at, name)) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
        return Err(location.error(format!("column {} has the name `{name}` of another; rename it", at + 1)));
    }
    Ok(Box::new(Rows { reader, left, names, path, behind, is_done: false }))
}

/// The bytes of a file, as many as a record may have. Without its closing quote a value extends to the file's end.
struct Bounded {
    bytes: Box<dyn BufRead + Send>,
    left: Arc<AtomicU64>,
}

impl Read for Bounded {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            let reason = format!("a record is longer than {LONGEST_RECORD} bytes; is a quote missing?");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
        }
        let most = usize::try_from(left).map_or(out.len(), |left| left.min(out.len()));
        let count = self.bytes.read(&mut out[..most])?;
        self.left.store(left - count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

struct Rows {
    reader: csv::Reader<Bounded>,
    /// Bytes that may be read for the record.
    left: Arc<AtomicU64>,
    names: Vec<String>,
    path: Arc<Path>,
    /// Lines that the parser has not counted.
    behind: u64,
    is_done: bool,
}

impl Iterator for Rows {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Result<Record>> {
        if self.is_done {
            return None;
        }
        let line = self.reader.position().line();
        self.left.store(LONGEST_RECORD, Ordering::Relaxed);
        let mut row = csv::StringRecord::new();
        match self.reader.read_record(&mut row) {
            Ok(false) => {
                self.is_done = true;
                None
            }
            Ok(true) => {
                let number = row.position().map_or(line, csv::Position::line) + self.behind;
                let location = RecordLocation { path: self.path.clone(), unit: "line", number, line: None };
                let fields = self.names.iter().cloned().zip(row.iter().map(Value::from));
                Some(Ok(Record { fields: fields.collect::<Map<_, _>>(), location }))
            }
            Err(error) => {
                self.is_done = error.is_io_error();
                Some(Err(wrong(&self.path, line, self.behind, &error)))
            }
        }
    }
}

fn wrong(path: &Arc<Path>, line: u64, behind: u64, error: &csv::Error) -> Error {
    let number = error.position().map_or(line, csv::Position::line) + behind;
    let location = RecordLocation { path: path.clone(), unit: "line", number, line: None };
    match error.kind() {
        ErrorKind::Io(cause) if cause.kind() == io::ErrorKind::FileTooLarge => location.error(cause),
        ErrorKind::Io(cause) => {
            Error::File { path: path.to_path_buf(), reason: format!("it cannot be read further: {cause}") }
        }
        ErrorKind::UnequalLengths { expected_len, len, .. } => location.error(format!(
            "{len} values, and the first line names {expected_len} columns; put a value with separators or line breaks \
             between double quotes"
        )),
        ErrorKind::Utf8 { err, .. } => location.error(format!(
            "column {} is not UTF-8; convert the file (iconv -f LATIN1 -t UTF-8)",
            err.field() + 1
        )),
        _ => location.error(error),
    }
}
