//! A memory-mapped shard of a store.

use std::ops::Range;
use std::path::Path;

use files::mapped::MappedFile;
use sha2::{Digest, Sha256};

use super::header::{self, Header};
use super::ids::Ids;
use super::{file, io};
use crate::error::{Error, Result};

#[derive(Debug)]
pub(super) struct Shard {
    map: MappedFile,
    pub(super) header: Header,
    /// Byte offset of the document offsets.
    offsets: usize,
}

impl Shard {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let map = MappedFile::open(path).map_err(|cause| io(path, cause))?;
        let header = Header::parse(path, &map)?;
        let has = map.len() as u64;
        let Some(needs) = header.file_bytes() else {
            return Err(file(path, "the header is inconsistent; write the store again"));
        };
        if has != needs {
            let what = if has < needs { "truncated" } else { "too long" };
            return Err(file(
                path,
                format!("{what}: {has} bytes, but its header says {needs}; copy or write the store again"),
            ));
        }
        // The file is mapped, so its size fits `usize`.
        let offsets = header::BYTES + header.ids_bytes().unwrap_or(0) as usize;
        Ok(Self { map, header, offsets })
    }

    pub(super) fn path(&self) -> &Path {
        self.map.path()
    }

    pub(super) fn document(&self, index: u64) -> Result<Ids<'_>> {
        let (start, end) = (self.offset(index), self.offset(index + 1));
        self.ids(start, end).ok_or_else(|| Error::Record {
            from: self.path().display().to_string(),
            location: format!("document {index}"),
            reason: format!(
                "its offsets are damaged ({start}..{end} of {} tokens); copy or write the store again",
                self.header.tokens
            ),
        })
    }

    /// Appends the tokens `part` of a document; tokens beyond its end are ignored.
    pub(super) fn read(&self, index: u64, part: Range<usize>, out: &mut Vec<u32>) -> Result<()> {
        let ids = self.document(index)?;
        let part = part.start.min(ids.len())..part.end.min(ids.len());
        let (first, start) = (part.start, out.len());
        let Some(part) = ids.slice(part) else { return Ok(()) };
        part.copy_to(out);
        let vocabulary = self.header.vocabulary;
        // The header guarantees a vocabulary of 1 to 2³² ids.
        let largest = u32::try_from(vocabulary.saturating_sub(1)).unwrap_or(u32::MAX);
        // No early exit, so that the loop compiles to vector comparisons; the data is in the cache anyway.
        if !out[start..].iter().fold(false, |beyond, &id| beyond | (id > largest)) {
            return Ok(());
        }
        let position = out[start..].iter().position(|&id| id > largest).unwrap_or(0);
        let id = out[start + position];
        out.truncate(start);
        Err(Error::Record {
            from: self.path().display().to_string(),
            location: format!("document {index}, token {}", first + position),
            reason: format!(
                "id {id}, but the vocabulary of the store is {vocabulary}; copy or write the store again"
            ),
        })
    }

    /// `index` is at most the number of documents.
    fn offset(&self, index: u64) -> u64 {
        let at = self.offsets + 8 * index as usize;
        self.map
            .get(at..at + 8)
            .and_then(|bytes| bytes.first_chunk())
            .map_or(u64::MAX, |b| u64::from_le_bytes(*b))
    }

    fn ids(&self, start: u64, end: u64) -> Option<Ids<'_>> {
        if start > end || end > self.header.tokens {
            return None;
        }
        let (start, end, width) = (start as usize, end as usize, self.header.width as usize);
        let bytes = self.map.get(header::BYTES + width * start..header::BYTES + width * end)?;
        Some(Ids::new(bytes, width == 4))
    }

    pub(super) fn verify(&self) -> Result<()> {
        let damaged = |what: String| Err(file(self.path(), format!("{what}; copy or write the store again")));
        if Sha256::digest(&self.map[header::BYTES..])[..] != self.header.payload {
            return damaged("the content is damaged (its checksum differs)".into());
        }
        let documents = self.header.documents;
        let rise = (0..=documents).map(|index| self.offset(index)).is_sorted();
        if !rise || self.offset(0) != 0 || self.offset(documents) != self.header.tokens {
            return damaged("the offsets do not increase from 0 to the number of tokens".into());
        }
        let largest = self.ids(0, self.header.tokens).and_then(Ids::max);
        match largest {
            Some(id) if u64::from(id) >= self.header.vocabulary => {
                damaged(format!("it has id {id}, but the vocabulary is {}", self.header.vocabulary))
            }
            _ => Ok(()),
        }
    }
}
