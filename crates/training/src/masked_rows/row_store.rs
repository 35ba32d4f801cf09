//! Rows of tokens and labels, in 4 bytes a token: in memory up to a bound, on disk beyond it.
//!
//! A row is stored as its ids (u32) and the lengths of its runs of labels: first those without a label, then those with one, and so on.
//! An index has 20 bytes for each row: its offset, its tokens, its learned tokens and its weight. So sizes are known without reading rows. Rows and
//! index are read by position from files without a name ([`MaskedRowsWriter::new`]) or from a file of prepared rows
//! ([`MaskedRows::read_file`]).

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use dataloading::IGNORE_INDEX;

use super::MaskedRow;
use super::byte_store::{ByteStore, ByteWriter};
use crate::error::{Error, Result};

/// Bytes of rows that are kept in memory, by default, and as many of the index.
pub const IN_MEMORY: usize = 8 << 20;
/// Bytes of a row in the index.
const ENTRY: usize = 20;

/// Rows that can be read in any order, by any number of owners: those of one source, or of several, one after the other. See the
/// [module](self).
#[derive(Debug, Clone)]
pub struct MaskedRows {
    sources: Vec<Source>,
}

/// Rows that were written together.
#[derive(Debug, Clone)]
struct Source {
    content: Arc<Content>,
    chosen: Chosen,
}

#[derive(Debug)]
struct Content {
    index: ByteStore,
    rows: ByteStore,
    count: usize,
    /// Bytes of `rows`.
    length: u64,
}

/// Which of the stored rows there are.
#[derive(Debug, Clone)]
enum Chosen {
    /// All but these, by rising numbers.
    Except(Arc<[u32]>),
    /// These, in this order.
    Only(Arc<[u32]>),
}

/// Writes rows, one after the other.
#[derive(Debug)]
pub struct MaskedRowsWriter {
    index: ByteWriter,
    rows: ByteWriter,
    count: usize,
    buffer: Vec<u8>,
}

/// The sizes of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSize {
    /// Tokens.
    pub tokens: usize,
    /// Tokens that are predicted and have a label: the first one is never predicted.
    pub learned: usize,
}

fn failed(cause: io::Error) -> Error {
    Error::io("stored rows", cause)
}

impl MaskedRowsWriter {
    /// Creates a writer that holds up to `bound` bytes of rows and as many of their index in memory, such as [`IN_MEMORY`], and writes what
    /// is beyond them to files without a name in `folder`. A folder in memory (tmpfs) saves none.
    pub fn new(bound: usize, folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        let (index, rows) = (ByteWriter::new(bound, folder.clone()), ByteWriter::new(bound, folder));
        Self { index, rows, count: 0, buffer: Vec::new() }
    }

    /// Creates a writer that holds everything in memory.
    pub fn in_memory() -> Self {
        Self::new(usize::MAX, PathBuf::new())
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Appends a row.
    ///
    /// # Errors
    /// Lists of different lengths; an id beyond 32 bits; a label that is neither its token nor −100; more than 2³² − 1 rows; a disk that is
    /// full.
    pub fn push(&mut self, row: &MaskedRow) -> Result<()> {
        let refuse = |reason: String| Err(super::refuse(format!("row {} {reason}", self.count)));
        let (tokens, labels) = (row.tokens.len(), row.labels.len());
        if tokens != labels {
            return refuse(format!("has {tokens} tokens and {labels} labels; expected one label per token"));
        }
        if !row.weight.is_finite() {
            return refuse(format!("has the weight {}; expected a finite number", row.weight));
        }
        if self.count >= u32::MAX as usize || tokens > u32::MAX as usize {
            return refuse("is beyond 32 bits; divide the data".to_owned());
        }
        let (mut runs, mut is_learned, mut learned) = (vec![0_u32], false, 0);
        for (at, (id, label)) in row.tokens.iter().zip(&row.labels).enumerate() {
            if u32::try_from(*id).is_err() {
                return refuse(format!("has the token {id}; expected 0 or more, of 32 bits"));
            }
            if *label != IGNORE_INDEX && label != id {
                return refuse(format!(
                    "has the label {label} at token {at}, which is {id}; expected {id} or {IGNORE_INDEX}"
                ));
            }
            if (*label != IGNORE_INDEX) != is_learned {
                is_learned = !is_learned;
                runs.push(0);
            }
            if let Some(run) = runs.last_mut() {
                *run += 1;
            }
            learned += u32::from(is_learned && at > 0);
        }
        let offset = self.rows.len();
        self.buffer.clear();
        let numbers = std::iter::once(runs.len() as u32).chain(runs);
        let numbers = numbers.chain(row.tokens.iter().map(|id| *id as u32));
        self.buffer.extend(numbers.flat_map(u32::to_le_bytes));
        self.rows.push(&self.buffer).map_err(failed)?;
        let mut entry = [0; ENTRY];
        entry[..8].copy_from_slice(&offset.to_le_bytes());
        entry[8..12].copy_from_slice(&(tokens as u32).to_le_bytes());
        entry[12..16].copy_from_slice(&learned.to_le_bytes());
        entry[16..].copy_from_slice(&row.weight.to_le_bytes());
        self.index.push(&entry).map_err(failed)?;
        self.count += 1;
        Ok(())
    }

    /// Returns the rows.
    ///
    /// # Errors
    /// A disk that is full.
    pub fn finish(self) -> Result<MaskedRows> {
        let length = self.rows.len();
        let (index, rows) = (self.index.finish().map_err(failed)?, self.rows.finish().map_err(failed)?);
        Ok(MaskedRows::new(Content { index, rows, count: self.count, length }))
    }
}

impl Source {
    fn len(&self) -> usize {
        match &self.chosen {
            Chosen::Except(out) => self.content.count - out.len(),
            Chosen::Only(rows) => rows.len(),
        }
    }

    /// The number of the stored row that is row `number`.
    fn stored(&self, number: usize) -> usize {
        match &self.chosen {
            Chosen::Only(rows) => rows[number] as usize,
            Chosen::Except(out) => {
                // Of the rows left out, those before it: `out[k] − k` rows are kept before the k-th of them.
                let (mut low, mut high) = (0, out.len());
                while low < high {
                    let middle = low.midpoint(high);
                    if out[middle] as usize - middle <= number { low = middle + 1 } else { high = middle }
                }
                number + low
            }
        }
    }

    fn entry(&self, number: usize) -> Result<(u64, RowSize, f32)> {
        let mut entry = [0; ENTRY];
        let at = (ENTRY * self.stored(number)) as u64;
        self.content.index.read(at, &mut entry).map_err(failed)?;
        let word = |at: usize| u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]);
        let offset = u64::from(word(0)) | u64::from(word(4)) << 32;
        let size = RowSize { tokens: word(8) as usize, learned: word(12) as usize };
        Ok((offset, size, f32::from_bits(word(16))))
    }

    fn row(&self, number: usize) -> Result<MaskedRow> {
        let (offset, size, weight) = self.entry(number)?;
        let read = |at: u64, count: usize| -> Result<Vec<u8>> {
            if at + 4 * count as u64 > self.content.length {
                return Err(failed(io::Error::new(io::ErrorKind::InvalidData, "a row is damaged")));
            }
            let mut bytes = vec![0; 4 * count];
            self.content.rows.read(at, &mut bytes).map_err(failed)?;
            Ok(bytes)
        };
        let numbers = |bytes: Vec<u8>| -> Vec<u32> {
            bytes.as_chunks::<4>().0.iter().map(|number| u32::from_le_bytes(*number)).collect()
        };
        let runs = numbers(read(offset, 1)?)[0] as usize;
        let all = numbers(read(offset + 4, runs.saturating_add(size.tokens))?);
        let (runs, ids) = all.split_at(runs);
        let tokens: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
        let mut labels = Vec::with_capacity(tokens.len());
        for (number, run) in runs.iter().enumerate() {
            let part = labels.len()..tokens.len().min(labels.len() + *run as usize);
            match number % 2 {
                0 => labels.extend(part.map(|_| IGNORE_INDEX)),
                _ => labels.extend_from_slice(&tokens[part]),
            }
        }
        Ok(MaskedRow { tokens, labels, weight })
    }

    /// The rows whose numbers are not `out`, and those whose numbers are.
    fn divide(&self, out: &[u32]) -> (Self, Self) {
        let stored = |number: u32| self.stored(number as usize) as u32;
        let parted: Arc<[u32]> = out.iter().map(|number| stored(*number)).collect();
        let rest = match &self.chosen {
            Chosen::Except(before) => {
                let mut all: Vec<u32> = before.iter().chain(&*parted).copied().collect();
                all.sort_unstable();
                Chosen::Except(all.into())
            }
            Chosen::Only(_) => {
                let is_kept = |number: &u32| out.binary_search(number).is_err();
                Chosen::Only((0..self.len() as u32).filter(is_kept).map(stored).collect())
            }
        };
        let with = |chosen| Self { content: self.content.clone(), chosen };
        (with(rest), with(Chosen::Only(parted)))
    }
}

impl MaskedRows {
    fn new(content: Content) -> Self {
        Self { sources: vec![Source { content: Arc::new(content), chosen: Chosen::Except(Arc::new([])) }] }
    }

    /// Stores rows in memory.
    ///
    /// # Errors
    /// Errors of [`MaskedRowsWriter::push`].
    pub fn of(rows: &[MaskedRow]) -> Result<Self> {
        let mut writer = MaskedRowsWriter::in_memory();
        rows.iter().try_for_each(|row| writer.push(row))?;
        writer.finish()
    }

    /// Returns the rows of several sources, one after the other.
    pub fn join(parts: impl IntoIterator<Item = Self>) -> Self {
        Self { sources: parts.into_iter().flat_map(|part| part.sources).collect() }
    }

    /// Returns the number of rows of each source.
    pub fn sources(&self) -> impl Iterator<Item = usize> + '_ {
        self.sources.iter().map(Source::len)
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.sources().sum()
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The source of row `number`, and its number there.
    fn find(&self, number: usize) -> (&Source, usize) {
        let mut rest = number;
        for source in &self.sources {
            match rest.checked_sub(source.len()) {
                Some(beyond) => rest = beyond,
                None => return (source, rest),
            }
        }
        panic!("row {number} of {}", self.len())
    }

    /// Returns the sizes of row `number`, without reading it.
    ///
    /// # Errors
    /// A file that cannot be read.
    ///
    /// # Panics
    /// There is no such row.
    pub fn size(&self, number: usize) -> Result<RowSize> {
        let (source, number) = self.find(number);
        Ok(source.entry(number)?.1)
    }

    /// Returns the weight of row `number`, without reading it.
    ///
    /// # Errors
    /// A file that cannot be read.
    ///
    /// # Panics
    /// There is no such row.
    pub fn weight(&self, number: usize) -> Result<f32> {
        let (source, number) = self.find(number);
        Ok(source.entry(number)?.2)
    }

    /// Returns row `number`.
    ///
    /// # Errors
    /// A file that cannot be read.
    ///
    /// # Panics
    /// There is no such row.
    pub fn row(&self, number: usize) -> Result<MaskedRow> {
        let (source, number) = self.find(number);
        source.row(number)
    }

    /// Returns the rows in order.
    pub fn iter(&self) -> impl Iterator<Item = Result<MaskedRow>> + '_ {
        (0..self.len()).map(|number| self.row(number))
    }

    /// Returns the rows as a list.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn to_vec(&self) -> Result<Vec<MaskedRow>> {
        self.iter().collect()
    }

    /// Returns the rows whose numbers, which rise, are not `out`, in their order, and those whose numbers are; of the same sources, which may
    /// be empty.
    pub fn divide(&self, out: &[u32]) -> (Self, Self) {
        let (mut first, mut rest, mut parts) = (0, out, (Vec::new(), Vec::new()));
        for source in &self.sources {
            let end = first + source.len() as u32;
            let (own, others) = rest.split_at(rest.partition_point(|number| *number < end));
            let own: Vec<u32> = own.iter().map(|number| number - first).collect();
            let (kept, parted) = source.divide(&own);
            parts.0.push(kept);
            parts.1.push(parted);
            (first, rest) = (end, others);
        }
        (Self { sources: parts.0 }, Self { sources: parts.1 })
    }

    /// Returns the first `count` rows, or all if there are fewer.
    pub fn first(&self, count: usize) -> Self {
        let rest: Vec<u32> = (count.min(self.len()) as u32..self.len() as u32).collect();
        self.divide(&rest).0
    }

    /// Writes all stored rows, to be read by [`read_file`](Self::read_file). Rows that were left out are written, too.
    ///
    /// # Errors
    /// A writer that fails; a file that cannot be read; rows of several sources.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let [source] = &self.sources[..] else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "rows of several sources have no file"));
        };
        let Content { index, rows, count, length } = &*source.content;
        out.write_all(&(*count as u64).to_le_bytes())?;
        out.write_all(&length.to_le_bytes())?;
        index.pass(0, (ENTRY * count) as u64, &mut |bytes| out.write_all(bytes))?;
        rows.pass(0, *length, &mut |bytes| out.write_all(bytes))
    }

    /// Opens rows that [`write`](Self::write) wrote, which begin at `start` and end with the file. The file stays open.
    ///
    /// # Errors
    /// A file that cannot be read, or whose parts contradict each other. Rows are not looked at; they need a checksum of the caller's.
    pub fn read_file(file: File, start: u64) -> io::Result<Self> {
        let length_of_file = file.metadata()?.len();
        let file = Arc::new(file);
        let from = |start| ByteStore::File { file: file.clone(), start };
        let mut header = [0; 16];
        from(start).read(0, &mut header)?;
        let (count, length) =
            (u128::from_le_bytes(header) as u64, (u128::from_le_bytes(header) >> 64) as u64);
        let rows = count.checked_mul(ENTRY as u64).and_then(|index| index.checked_add(start + 16));
        let rows = rows.filter(|rows| rows.checked_add(length) == Some(length_of_file));
        let (Some(rows), Ok(count)) = (rows, usize::try_from(count)) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its parts contradict each other"));
        };
        Ok(Self::new(Content { index: from(start + 16), rows: from(rows), count, length }))
    }
}

/// The same rows in the same order; rows that cannot be read are equal to none.
impl PartialEq for MaskedRows {
    fn eq(&self, other: &Self) -> bool {
        let same = |(own, other): (Result<MaskedRow>, Result<MaskedRow>)| matches!((own, other), (Ok(own), Ok(other)) if own == other);
        self.len() == other.len() && self.iter().zip(other.iter()).all(same)
    }
}

impl Default for MaskedRows {
    fn default() -> Self {
        let empty = || ByteStore::Memory(Vec::new());
        Self::new(Content { index: empty(), rows: empty(), count: 0, length: 0 })
    }
}

#[cfg(test)]
mod tests;
