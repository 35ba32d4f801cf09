//! Documents as token ids in memory-mapped files: written once, opened in constant time, larger than memory.
//!
//! # Format
//!
//! A store is a folder of shards `00000.tokens`, `00001.tokens`, …. A document lies in one shard; a shard ends before the
//! document that would exceed its maximum size (a longer document has a shard to itself). All numbers are little-endian.
//! Layout of a shard:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `FRUGALTK` |
//! | 4 | format version, 1 |
//! | 4 | bytes per token: 2 for a vocabulary of at most 65 536 ids, else 4 |
//! | 4, 4 | index of this shard from 0, number of shards |
//! | 8, 8, 8 | documents and tokens in this shard, size of the vocabulary |
//! | 32 | SHA-256 of everything after the header |
//! | 32 | SHA-256 of these checksums of all shards in order: identifies the store and its content |
//! | 16 | first 16 bytes of the SHA-256 of the 112 bytes before |
//! | tokens | the ids of all documents in order; zeros up to a multiple of 8 |
//! | 8 · (documents + 1) | the start of each document in tokens, and the end |
//!
//! Opening a store maps the shards and checks the headers against each other and against the file sizes; it reads neither
//! ids nor offsets. [`TokenStore::verify`] reads everything.
//!
//! A store is written to `.NAME.partial` beside it and then renamed: an interrupted write leaves no store, and the next
//! writer of that name removes the partial one. Processes that have a replaced store open keep reading it. During a
//! replacement the former store lies in `.NAME.replaced`, and for a moment no store has the name. If the process ends in
//! that moment, opening the store reports it, and the next writer of that name restores the former store.
//!
//! Do not change the files of a store: truncating a mapped file while it is read ends the process with `SIGBUS`, which
//! cannot be caught. Changes in place are detected by [`TokenStore::verify`] only, except for ids outside the vocabulary,
//! which are an error of every read.
//!
//! ```
//! use dataloading::Samples;
//! use dataloading::token_store::{TokenStore, Writer, WriterConfig};
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("towns");
//! let mut writer = Writer::create(&path, &WriterConfig::new(4096))?;
//! writer.push(&[17, 4, 1000])?;
//! writer.push(&[])?;
//! writer.finish()?;
//!
//! let store = TokenStore::open(&path)?;
//! assert_eq!((store.len(), store.tokens(), store.length(0)), (2, 3, 3));
//! assert_eq!(store.document(0)?.iter().collect::<Vec<_>>(), [17, 4, 1000]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod header;
mod ids;
mod placement;
mod shard;
mod tokenize;
mod writer;

use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::samples::Samples;
use shard::Shard;

pub use header::VERSION;
pub use ids::Ids;
pub use tokenize::{TokenizeConfig, Tokenized, TooLong, tokenize, tokenize_to_store};
pub use writer::{Writer, WriterConfig};

/// An open token store. It can be read from any thread; reading copies only the requested tokens.
#[derive(Debug)]
pub struct TokenStore {
    path: PathBuf,
    shards: Vec<Shard>,
    /// Documents before each shard, and the total.
    first: Vec<u64>,
    tokens: u64,
}

impl TokenStore {
    /// Opens the store in a folder. Takes a few system calls per shard, whatever its size.
    ///
    /// # Errors
    /// The folder does not exist or holds no store; a shard is missing, truncated, of another store, of a newer format, or
    /// not a shard.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            let former = placement::aside(path).filter(|aside| aside.is_dir());
            return Err(match former {
                Some(former) => file(
                    path,
                    format!(
                        "its replacement was interrupted, and the former store is in {}; rename it, or write the store again",
                        former.display()
                    ),
                ),
                None => file(path, "there is no such folder; pass the folder of a store"),
            });
        }
        let first = path.join(header::shard_name(0));
        if !first.is_file() {
            return Err(file(
                path,
                "not a token store: it has no 00000.tokens; write one with token_store::tokenize_to_store",
            ));
        }
        let mut shards = vec![Shard::open(&first)?];
        for number in 1..shards[0].header.shards {
            let name = path.join(header::shard_name(number));
            if !name.is_file() {
                let shard_count = shards[0].header.shards;
                return Err(file(
                    &name,
                    format!("this shard of {shard_count} is missing; copy the whole folder again"),
                ));
            }
            shards.push(Shard::open(&name)?);
        }
        let (mut documents, mut tokens, mut first) = (0u64, 0u64, vec![0]);
        for (number, shard) in (0..).zip(&shards) {
            let (header, head) = (&shard.header, &shards[0].header);
            let same = header.store == head.store
                && header.shard == number
                && (header.shards, header.vocabulary, header.width)
                    == (head.shards, head.vocabulary, head.width);
            let sums = documents.checked_add(header.documents).zip(tokens.checked_add(header.tokens));
            let (true, Some(sums)) = (same, sums) else {
                return Err(file(
                    shard.path(),
                    "this shard is of another store; copy the whole folder again",
                ));
            };
            (documents, tokens) = sums;
            first.push(documents);
        }
        usize::try_from(documents).map_err(|_| file(path, "more documents than this platform supports"))?;
        Ok(Self { path: path.to_owned(), shards, first, tokens })
    }

    /// Returns the path of the store.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the number of shards.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Returns the vocabulary size: every id is less than this, as the writer and [`Samples::read`] check.
    pub fn vocabulary(&self) -> usize {
        self.shards[0].header.vocabulary as usize
    }

    /// Returns the SHA-256 of the content in hexadecimal. Stores with the same fingerprint hold the same documents in the
    /// same order and shards; a resumed run compares it.
    pub fn fingerprint(&self) -> String {
        header::hexadecimal(&self.shards[0].header.store)
    }

    /// Returns the ids of document `index` in place, without checking them; [`Samples::read`] refuses ids outside the
    /// vocabulary.
    ///
    /// # Errors
    /// The document does not exist, or its offsets are damaged.
    pub fn document(&self, index: usize) -> Result<Ids<'_>> {
        let (shard, local) = self.locate(index).ok_or_else(|| self.no_document(index))?;
        shard.document(local)
    }

    fn no_document(&self, index: usize) -> Error {
        Error::Record {
            from: self.path.display().to_string(),
            location: format!("document {index}"),
            reason: format!("there are {}, numbered from 0", self.len()),
        }
    }

    /// Reads everything and checks the checksums, the order of the offsets, and that each id is less than the vocabulary.
    ///
    /// # Errors
    /// A shard is damaged.
    pub fn verify(&self) -> Result<()> {
        self.shards.iter().try_for_each(Shard::verify)?;
        let all = header::store_checksum(self.shards.iter().map(|shard| &shard.header.payload));
        if all != self.shards[0].header.store {
            return Err(file(&self.path, "the shards do not belong together; copy the whole folder again"));
        }
        Ok(())
    }

    fn locate(&self, index: usize) -> Option<(&Shard, u64)> {
        let index = index as u64;
        let shard = self.first.partition_point(|first| *first <= index).checked_sub(1)?;
        Some((self.shards.get(shard)?, index - self.first[shard]))
    }
}

impl Samples for TokenStore {
    fn len(&self) -> usize {
        self.first.last().map_or(0, |documents| *documents as usize)
    }

    /// Returns 0 for a document that does not exist or has damaged offsets; [`Samples::read`], which samplers call for such
    /// samples, returns the error.
    fn length(&self, index: usize) -> usize {
        self.document(index).map_or(0, |ids| ids.len())
    }

    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()> {
        let (shard, local) = self.locate(index).ok_or_else(|| self.no_document(index))?;
        shard.read(local, 0..usize::MAX, out)
    }

    /// Returns the first 64 bits of [`TokenStore::fingerprint`].
    fn fingerprint(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.shards[0].header.store;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Reads only the pages of the part.
    fn read_part(&self, index: usize, part: Range<usize>, out: &mut Vec<u32>) -> Result<()> {
        let (shard, local) = self.locate(index).ok_or_else(|| self.no_document(index))?;
        shard.read(local, part, out)
    }
}

fn file(path: &Path, reason: impl Into<String>) -> Error {
    Error::File { path: path.to_owned(), reason: reason.into() }
}

fn io(path: &Path, cause: std::io::Error) -> Error {
    Error::Io { path: path.to_owned(), cause }
}
