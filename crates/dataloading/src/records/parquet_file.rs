//! The rows of a Parquet file, the format in which the Hugging Face hub keeps data sets.
//!
//! A nested column gives every row the same keys. A key that a row does not have is null there, so nulls within a column are left out;
//! only a message's `content` may be null.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use serde_json::{Map, Number, Value};

use super::{Record, RecordLocation};
use crate::error::{Error, Result};
use crate::text::LONGEST_RECORD;

/// The key of an object that stands for bytes that are no text, with their number.
pub(super) const NOT_TEXT: &str = "bytes that are not UTF-8";
/// The library's message about a compression that it was compiled without.
const DISABLED: &str = "Disabled feature at compile time: ";
/// The key that may be null within a column.
const CONTENT: &str = "content";

pub(super) struct ParquetRows {
    rows: RowIter<'static>,
    path: Arc<Path>,
    number: u64,
    is_done: bool,
}

impl ParquetRows {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|cause| Error::Io { path: path.to_owned(), cause })?;
        let rows = guarded(|| {
            let reader = SerializedFileReader::new(file).map_err(|error| error.to_string())?;
            // A row that takes no bytes could be there any number of times.
            if reader.metadata().file_metadata().schema_descr().num_columns() == 0 {
                return Err("it has no columns".to_owned());
            }
            // Only a page's own header has its size; the size of a column is at the end of the file.
            for group in reader.metadata().row_groups() {
                for column in group.columns() {
                    let values = column.num_values().max(1);
                    if column.uncompressed_size() / values > LONGEST_RECORD as i64 {
                        let name = column.column_path().string();
                        return Err(format!(
                            "the column `{name}` has {values} values in {} bytes, and a record may have {LONGEST_RECORD}; divide its texts",
                            column.uncompressed_size()
                        ));
                    }
                }
            }
            Ok(RowIter::from_file_into(Box::new(reader)))
        });
        let rows = rows.map_err(|reason| Error::File {
            path: path.to_owned(),
            reason: format!("not a Parquet file that can be read: {reason}"),
        })?;
        Ok(Self { rows, path: path.into(), number: 0, is_done: false })
    }
}

/// Calls the library, which panics on some damaged files.
fn guarded<T>(read: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    // After a panic nothing of the reader is used again.
    let read = catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
        Err("its parts contradict each other (the library `parquet` panicked); take the file again"
            .to_owned())
    });
    read.map_err(|reason| match reason.split_once(DISABLED) {
        Some((_, codec)) => format!(
            "its columns are compressed with {codec}, and snappy, zstd and gzip are read; write it again with one of these: \
             pandas.read_parquet(FILE).to_parquet(FILE, compression=\"zstd\")"
        ),
        None => reason,
    })
}

impl Iterator for ParquetRows {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Result<Record>> {
        if self.is_done {
            return None;
        }
        self.number += 1;
        let location =
            RecordLocation { path: self.path.clone(), unit: "row", number: self.number, line: None };
        match guarded(|| self.rows.next().transpose().map_err(|error| error.to_string())) {
            Ok(Some(row)) if longest(&row) > LONGEST_RECORD => {
                Some(Err(location.error(format!("a text is longer than {LONGEST_RECORD} bytes; divide it"))))
            }
            Ok(Some(row)) => Some(Ok(Record { fields: fields(&row, true), location })),
            Ok(None) => {
                self.is_done = true;
                None
            }
            Err(reason) => {
                self.is_done = true;
                Some(Err(location.error(format!("it cannot be read: {reason}"))))
            }
        }
    }
}

/// Bytes of the longest text, in nested columns too.
fn longest(row: &Row) -> u64 {
    fn of_field(field: &Field) -> u64 {
        match field {
            Field::Str(text) => text.len() as u64,
            Field::Group(row) => longest(row),
            Field::ListInternal(list) => list.elements().iter().map(of_field).max().unwrap_or(0),
            Field::MapInternal(map) => {
                map.entries().iter().map(|(_, field)| of_field(field)).max().unwrap_or(0)
            }
            _ => 0,
        }
    }
    row.get_column_iter().map(|(_, field)| of_field(field)).max().unwrap_or(0)
}

fn fields(row: &Row, is_top: bool) -> Map<String, Value> {
    let columns = row.get_column_iter().map(|(name, field)| (name.clone(), value(field)));
    columns.filter(|(name, value)| is_top || !value.is_null() || name == CONTENT).collect()
}

fn value(field: &Field) -> Value {
    let float = |number: f64| Number::from_f64(number).map_or(Value::Null, Value::Number);
    match field {
        Field::Null => Value::Null,
        Field::Bool(is) => Value::Bool(*is),
        Field::Byte(number) => (*number).into(),
        Field::Short(number) => (*number).into(),
        Field::Int(number) => (*number).into(),
        Field::Long(number) => (*number).into(),
        Field::UByte(number) => (*number).into(),
        Field::UShort(number) => (*number).into(),
        Field::UInt(number) => (*number).into(),
        Field::ULong(number) => (*number).into(),
        Field::Float16(number) => float(f64::from(*number)),
        Field::Float(number) => float(f64::from(*number)),
        Field::Double(number) => float(*number),
        Field::Str(text) => Value::from(text.as_str()),
        // A column without a declared type, as older writers make of texts.
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => Value::from(text),
            // A column that may not be read, such as an image.
            Err(_) => Value::Object(Map::from_iter([(NOT_TEXT.to_owned(), bytes.len().into())])),
        },
        Field::Group(row) => Value::Object(fields(row, false)),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => {
            let key = |field: &Field| match value(field) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            Value::Object(map.entries().iter().map(|(name, field)| (key(name), value(field))).collect())
        }
        other => Value::from(other.to_string()),
    }
}
