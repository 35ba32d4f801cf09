//! Documents as token ids in files: written once, opened at once, larger than memory.
//!
//! # The format
//!
//! A store is a folder of shards `00000.tokens`, `00001.tokens`, …. A document lies in one shard whole; a shard ends before
//! the document that would make it longer than asked (a document longer than that has a shard to itself). All numbers are
//! little-endian. A shard is
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `FRUGALTK` |
//! | 4 | format version, 1 |
//! | 4 | bytes per token: 2 where the vocabulary has at most 65 536 ids, else 4 |
//! | 4, 4 | number of this shard from 0, and how many there are |
//! | 8, 8, 8 | documents and tokens in this shard, size of the vocabulary |
//! | 32 | SHA-256 of all that follows the header |
//! | 32 | SHA-256 of the former of all shards in order: which store this shard is of, and a name for its content |
//! | 16 | start of the SHA-256 of the 112 bytes before |
//! | tokens | the ids, document after document; zeros up to a multiple of 8 |
//! | 8 · (documents + 1) | where each document starts, in tokens, and the end |
//!
//! Opening maps the shards and checks the headers against each other and against the sizes of the files; it reads neither
//! ids nor offsets. [`TokenStore::verify`] reads all.
//!
//! Writing goes to `.NAME.partial` beside the store, and a rename ends it: an interrupted write leaves no store, and the
//! next writer of that name removes what it left. A store that is replaced stays as it was for those who have it open. It
//! lies in `.NAME.replaced` until the new one has its name: for a moment there is no store of that name. Where a process ends
//! in that moment, opening says so, and the next writer of that name puts the former store back.
//!
//! A store is never written to once it has its name, and nobody else may: a mapped file that is cut short while it is read
//! ends the process with `SIGBUS`, of which no program can make an error. Files changed in place are not noticed but by
//! [`TokenStore::verify`]; an id beyond the vocabulary, which a model would look up beyond its table, is an error of whoever
//! reads it.
//!
//! ```
//! use dataloading::Samples;
//! use dataloading::token_store::{TokenStore, Writer, WriterOptions};
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("towns");
//! let mut writer = Writer::create(&path, &WriterOptions::new(4096))?;
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
mod placing;
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
pub use tokenize::{TokenizeOptions, Tokenized, TooLong, tokenize, tokenize_to_store};
pub use writer::{Writer, WriterOptions};

/// An open store. Reading is possible from any thread, and copies nothing but what is asked for.
#[derive(Debug)]
pub struct TokenStore {
    path: PathBuf,
    shards: Vec<Shard>,
    /// Documents before each shard, and in all.
    first: Vec<u64>,
    tokens: u64,
}

impl TokenStore {
    /// Opens the folder of a store: a few system calls per shard, whatever the size.
    ///
    /// # Errors
    /// No such folder, or none that a store was written to; a shard that is missing, cut, of another store, of a newer
    /// format, or no shard at all.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            let former = placing::aside(path).filter(|aside| aside.is_dir());
            return Err(match former {
                Some(former) => file(
                    path,
                    format!(
                        "its replacement was interrupted, and the former store lies in {}; rename it, or write the store again",
                        former.display()
                    ),
                ),
                None => {
                    file(path, "there is no such folder; a store is the folder that its writer was given")
                }
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
                let of = shards[0].header.shards;
                return Err(file(
                    &name,
                    format!("this shard of {of} is missing; copy the whole folder again"),
                ));
            }
            shards.push(Shard::open(&name)?);
        }
        let (mut documents, mut tokens, mut first) = (0u64, 0u64, vec![0]);
        for (number, shard) in (0..).zip(&shards) {
            let (own, head) = (&shard.header, &shards[0].header);
            let same = own.store == head.store
                && own.shard == number
                && (own.shards, own.vocabulary, own.width) == (head.shards, head.vocabulary, head.width);
            let sums = documents.checked_add(own.documents).zip(tokens.checked_add(own.tokens));
            let (true, Some(sums)) = (same, sums) else {
                return Err(file(
                    shard.path(),
                    "this shard is of another store; copy the whole folder again",
                ));
            };
            (documents, tokens) = sums;
            first.push(documents);
        }
        usize::try_from(documents).map_err(|_| file(path, "more documents than this machine can number"))?;
        Ok(Self { path: path.to_owned(), shards, first, tokens })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tokens in all.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Shards.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Ids that a token may have: each is less than this, as the writer saw to and [`Samples::read`] checks.
    pub fn vocabulary(&self) -> usize {
        self.shards[0].header.vocabulary as usize
    }

    /// SHA-256 over the content, in hexadecimal: two stores with this name hold the same documents in the same order and
    /// shards. What a resumed training compares, to know that it goes on over the same data.
    pub fn fingerprint(&self) -> String {
        header::hexadecimal(&self.shards[0].header.store)
    }

    /// Whether a model with `vocabulary` ids can read this store.
    ///
    /// # Errors
    /// The store may hold ids that the model has no embedding for.
    pub fn check_vocabulary(&self, vocabulary: usize) -> Result<()> {
        if self.vocabulary() <= vocabulary {
            return Ok(());
        }
        Err(file(
            &self.path,
            format!(
                "made with a vocabulary of {}, but the model has {vocabulary} ids; give the model at least {}, or \
                 tokenize again with its own tokenizer",
                self.vocabulary(),
                self.vocabulary()
            ),
        ))
    }

    /// The ids of document `index`, where they lie, unchecked: [`Samples::read`] refuses one beyond the vocabulary.
    ///
    /// # Errors
    /// No such document; offsets that are damaged.
    pub fn document(&self, index: usize) -> Result<Ids<'_>> {
        let (shard, local) = self.locate(index).ok_or_else(|| self.no_document(index))?;
        shard.document(local)
    }

    fn no_document(&self, index: usize) -> Error {
        Error::Record {
            from: self.path.display().to_string(),
            place: format!("document {index}"),
            reason: format!("there are {}, numbered from 0", self.len()),
        }
    }

    /// Reads everything: the checksums, that the offsets only rise, that each id is less than the vocabulary.
    ///
    /// # Errors
    /// The first shard that is damaged.
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

    /// 0 for a document that does not exist or whose offsets are damaged: whoever is about to pass over it reads it, as
    /// the samplers do, and is told.
    fn length(&self, index: usize) -> usize {
        self.document(index).map_or(0, |ids| ids.len())
    }

    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()> {
        let (shard, local) = self.locate(index).ok_or_else(|| self.no_document(index))?;
        shard.read(local, 0..usize::MAX, out)
    }

    /// The start of [`TokenStore::fingerprint`].
    fn fingerprint(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.shards[0].header.store;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Touches the pages of the part alone.
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
