//! The texts of a Parquet file, the format in which the Hugging Face hub keeps data sets.
//!
//! Reads what such a file of texts has: one flat column of strings, plain or with a dictionary, uncompressed or compressed by Snappy
//! or gzip. Anything else is refused by name. (A file: pages of values, row group by row group, then a description of them all in
//! Thrift's compact protocol, its length, and the mark `PAR1`.)

mod page;
mod thrift;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use dataloading::{Error, Result};
use thrift::Value;

/// The column of the texts.
const COLUMN: &str = "text";
const MARK: &[u8; 4] = b"PAR1";
/// The type `BYTE_ARRAY`.
const BYTE_ARRAY: i64 = 6;
/// The repetition type `OPTIONAL`.
const OPTIONAL: i64 = 1;

/// Why a file cannot be read.
type Reason = String;

/// The lines of the column `text` that are not blank, trimmed, as `Format::Lines` reads them.
///
/// # Errors
/// A file that is missing, is not Parquet, or has no such column. Values that cannot be read are an error of the iterator.
pub(super) fn lines(path: &Path) -> Result<impl Iterator<Item = Result<String>> + use<>> {
    let path = path.to_owned();
    let mut file = File::open(&path).map_err(|cause| Error::Io { path: path.clone(), cause })?;
    let failed = |path: &PathBuf, reason| Error::File { path: path.clone(), reason };
    let chunks = describe(&mut file).map_err(|reason| failed(&path, reason))?;
    let texts = chunks.into_iter().flat_map(move |chunk| {
        let texts = chunk.bytes(&mut file).and_then(|bytes| page::texts(&bytes, &chunk));
        match texts {
            Ok(texts) => texts.into_iter().map(Ok).collect(),
            Err(reason) => vec![Err(failed(&path, reason))],
        }
    });
    let trimmed = texts.map(|text| text.map(|text| text.trim().to_owned()));
    Ok(trimmed.filter(|line| !line.as_ref().is_ok_and(String::is_empty)))
}

/// The values of the column in one row group.
struct Chunk {
    start: u64,
    length: u64,
    values: usize,
    codec: i64,
    optional: bool,
}

impl Chunk {
    fn bytes(&self, file: &mut File) -> Result<Vec<u8>, Reason> {
        let size = file.metadata().map_err(|error| error.to_string())?.len();
        if self.start.checked_add(self.length).is_none_or(|end| end > size) {
            return Err(format!(
                "a row group of {} bytes at {} in a file of {size}",
                self.length, self.start
            ));
        }
        read_at(file, self.start, self.length)
    }
}

fn read_at(file: &mut File, start: u64, length: u64) -> Result<Vec<u8>, Reason> {
    let mut bytes = vec![0; usize::try_from(length).map_err(|error| error.to_string())?];
    let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut bytes));
    read.map(|()| bytes).map_err(|error| error.to_string())
}

/// Reads the description at the end of the file, and from it where the texts are.
fn describe(file: &mut File) -> Result<Vec<Chunk>, Reason> {
    let size = file.metadata().map_err(|error| error.to_string())?.len();
    let Some(footer) = size.checked_sub(8) else { return Err("not a Parquet file: it is too short".into()) };
    let end = read_at(file, footer, 8)?;
    if &end[4..] != MARK {
        return Err("not a Parquet file: it does not end with PAR1".into());
    }
    let length = u64::from(u32::from_le_bytes([end[0], end[1], end[2], end[3]]));
    let start =
        footer.checked_sub(length).ok_or("not a Parquet file: its description is longer than the file")?;
    let description = thrift::parse(&mut read_at(file, start, length)?.as_slice())?;
    let schema = description.list(2)?;
    let (root, fields) = schema.split_first().ok_or("the schema is empty")?;
    if root.int(5)? != fields.len() as i64 || fields.iter().any(|field| field.int(5).is_ok()) {
        return Err("its columns are nested; expected flat ones".into());
    }
    let names = fields.iter().map(|field| field.text(4)).collect::<Result<Vec<String>, Reason>>()?;
    let column = names.iter().position(|name| name == COLUMN);
    let column = column.ok_or_else(|| format!("no column `{COLUMN}`; the file has {}", names.join(", ")))?;
    let field = &fields[column];
    if field.int(1)? != BYTE_ARRAY || field.int(3)? > OPTIONAL {
        return Err(format!("the column `{COLUMN}` does not hold one string in each row"));
    }
    let optional = field.int(3)? == OPTIONAL;
    description.list(4)?.iter().map(|group| chunk(group, column, optional)).collect()
}

fn chunk(group: &Value, column: usize, optional: bool) -> Result<Chunk, Reason> {
    let columns = group.list(1)?;
    let chunk = columns.get(column).ok_or("a row group lacks a column")?.field(3)?;
    let size = |id| u64::try_from(chunk.int(id)?).map_err(|error| error.to_string());
    let data = size(9)?;
    // A dictionary, where there is one, is before the values.
    let start = size(11).map_or(data, |dictionary| dictionary.min(data));
    let values = usize::try_from(size(5)?).map_err(|error| error.to_string())?;
    Ok(Chunk { start, length: size(7)?, values, codec: chunk.int(4)?, optional })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What pyarrow writes with Snappy: a dictionary and a null, in row groups of two rows.
    const DICTIONARY: &[u8] = include_bytes!("parquet_file/dictionary.parquet");
    /// What it writes without a dictionary, uncompressed, in pages of the second version.
    const PLAIN: &[u8] = include_bytes!("parquet_file/plain.parquet");

    fn read(bytes: &[u8]) -> Result<Vec<String>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train-00000-of-00001.parquet");
        std::fs::write(&path, bytes).unwrap();
        lines(&path)?.collect()
    }

    #[test]
    fn lines_are_read_trimmed_and_blank_ones_are_left_out() {
        let expected = ["= Arden =", "Arden is a town , and ærø is none .", "= Arden ="];
        assert_eq!(read(DICTIONARY).unwrap(), expected);
        assert_eq!(read(PLAIN).unwrap(), expected);
    }

    #[test]
    fn a_file_that_is_not_one_of_texts_is_refused_by_name() {
        let refused = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
        assert!(
            refused(b"no Parquet at all").ends_with("parquet: not a Parquet file: it does not end with PAR1")
        );
        let mut renamed = DICTIONARY.to_vec();
        let places: Vec<usize> =
            (0..renamed.len() - 4).filter(|&at| &renamed[at..at + 4] == COLUMN.as_bytes()).collect();
        places.into_iter().for_each(|at| renamed[at..at + 4].copy_from_slice(b"rows"));
        assert!(refused(&renamed).ends_with("no column `text`; the file has rows"), "{}", refused(&renamed));
    }

    #[test]
    fn damaged_files_are_errors_and_never_a_panic() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("damaged.parquet");
        for whole in [DICTIONARY, PLAIN] {
            for at in 0..whole.len() {
                for byte in [0, 0x7f, 0x80, 0xff, whole[at] ^ 1] {
                    let mut bytes = whole.to_vec();
                    bytes[at] = byte;
                    std::fs::write(&path, &bytes).unwrap();
                    if let Ok(lines) = lines(&path) {
                        lines.for_each(drop);
                    }
                }
            }
        }
    }
}
