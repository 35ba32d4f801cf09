//! TensorBoard's event files.
//!
//! A file is a sequence of records: the length as `u64`, its checksum, that many bytes, and their checksum, all little-endian
//! (TensorFlow's `record_writer.h`). A checksum is the CRC-32C of the bytes, rotated right by 15 bits, plus `0xa282ead8`. The bytes of a
//! record are an `Event` of protocol buffers (`event.proto`, `summary.proto`) with these fields:
//!
//! | message | fields |
//! |---|---|
//! | `Event` | 1 `wall_time`: double, 2 `step`: int64, 3 `file_version`: string, 5 `summary`: `Summary`, 7 `session_log`: `SessionLog` |
//! | `Summary` | 1 `value`: repeated `Value` |
//! | `Value` | 1 `tag`: string, 2 `simple_value`: float |
//! | `SessionLog` | 1 `status`: enum; 1 is `START` |
//!
//! A start at step s tells TensorBoard to forget what earlier files of the folder have from step s on, so a resumed training writes a new
//! file and needs no change to the old ones.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The version of the format, which is the first event of a file.
const FILE_VERSION: &str = "brain.Event:2";

/// A file of scalars that is being written.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Creates a new file in `folder`, for the steps after `step`.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn create(folder: &Path, step: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let seconds = wall_time() as u64;
        let names = (0..).map(|number| format!("events.out.tfevents.{seconds:010}.frugal.{number}"));
        for path in names.map(|name| folder.join(name)) {
            match OpenOptions::new().create_new(true).append(true).open(&path) {
                Ok(file) => {
                    let mut new = Self { path, file };
                    new.put(&event(0, &text(3, FILE_VERSION)))?;
                    new.put(&event(step + 1, &message(7, &varint_field(1, 1))))?;
                    return Ok(new);
                }
                Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => {}
                Err(cause) => return Err(cause),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends the values of a step, each under its tag.
    ///
    /// # Errors
    /// A full disk.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> io::Result<()> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut content = text(1, tag);
            content.push(2 << 3 | 5);
            content.extend((*value as f32).to_le_bytes());
            summary.extend(message(1, &content));
        }
        self.put(&event(step, &message(5, &summary)))
    }

    /// Appends a record, in one write, so that a kill between writes leaves whole records.
    fn put(&mut self, event: &[u8]) -> io::Result<()> {
        self.file.write_all(&record(event))
    }
}

fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A record around bytes.
fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let mut record = length.to_vec();
    record.extend(checksum(&length).to_le_bytes());
    record.extend(bytes);
    record.extend(checksum(bytes).to_le_bytes());
    record
}

/// An event with its time and step, around one further field.
fn event(step: u64, what: &[u8]) -> Vec<u8> {
    let mut event = vec![1 << 3 | 1];
    event.extend(wall_time().to_le_bytes());
    event.extend(varint_field(2, step));
    event.extend(what);
    event
}

fn varint(mut value: u64, into: &mut Vec<u8>) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

fn varint_field(number: u8, value: u64) -> Vec<u8> {
    let mut field = vec![number << 3];
    varint(value, &mut field);
    field
}

/// A field of bytes with a length: a message or a text.
fn message(number: u8, content: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    varint(content.len() as u64, &mut field);
    field.extend(content);
    field
}

fn text(number: u8, text: &str) -> Vec<u8> {
    message(number, text.as_bytes())
}

/// The masked CRC-32C of a record.
fn checksum(bytes: &[u8]) -> u32 {
    crc_32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), with the reflected polynomial `0x82f63b78`.
fn crc_32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let (mut value, mut bit) = (byte as u32, 0);
            while bit < 8 {
                value = if value & 1 == 1 { value >> 1 ^ 0x82f6_3b78 } else { value >> 1 };
                bit += 1;
            }
            table[byte] = value;
            byte += 1;
        }
        table
    };
    !bytes.iter().fold(!0, |crc: u32, byte| crc >> 8 ^ TABLE[(crc as u8 ^ byte) as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720, appendix B.4.
    #[test]
    fn checksums_are_those_of_the_standard() {
        assert_eq!(crc_32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc_32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc_32c(&[0xff; 32]), 0x62a8_ab43);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc_32c(&ascending), 0x46dd_794e);
    }

    #[test]
    fn numbers_of_any_size_are_varints() {
        let varint = |value: u64| {
            let mut bytes = Vec::new();
            varint(value, &mut bytes);
            bytes
        };
        assert_eq!(
            (varint(0), varint(127), varint(128), varint(300)),
            (vec![0], vec![127], vec![128, 1], vec![0xac, 2])
        );
        assert_eq!(varint(u64::MAX).len(), 10);
    }

    #[test]
    fn two_files_of_one_second_have_two_names() {
        let folder = tempfile::tempdir().unwrap();
        let files = [0, 7].map(|step| EventFile::create(folder.path(), step).unwrap());
        assert_ne!(files[0].path(), files[1].path());
    }
}
