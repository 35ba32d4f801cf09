//! Writing a store document by document.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::header::{self, Header};
use super::placement::{
    aside, check_target, hidden, is_at, parent, place, recover, remove_folder, sync_folder,
};
use super::{TokenStore, file, io};
use crate::error::{Error, Result};

/// The lock file in the partial folder: a writer holds its lock as long as it lives.
const LOCK: &str = "writing.lock";

/// Options of a new store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriterConfig {
    /// The vocabulary size: every id must be less than this.
    pub vocabulary: usize,
    /// Maximum size of a shard in bytes, without its header. A longer document has a shard to itself. A reader maps all
    /// shards at once.
    pub shard_bytes: u64,
    /// Whether to replace an existing store when this one is finished; otherwise an existing store is an error.
    pub replace: bool,
}

impl WriterConfig {
    /// Shards of 512 MiB; an existing store is an error.
    pub fn new(vocabulary: usize) -> Self {
        Self { vocabulary, shard_bytes: 512 << 20, replace: false }
    }
}

/// A writer of a store. Memory: a buffer, and 8 bytes per document of the current shard (which count towards the size of
/// the shard). If dropped before [`finish`](Self::finish), it removes its files.
#[derive(Debug)]
pub struct Writer {
    target: PathBuf,
    partial: PathBuf,
    /// Where a store is moved when it is replaced.
    aside: PathBuf,
    options: WriterConfig,
    width: u32,
    lock: Option<File>,
    current: Option<Unfinished>,
    done: Vec<Header>,
    buffer: Vec<u8>,
    failed: bool,
}

/// The shard being written.
#[derive(Debug)]
struct Unfinished {
    path: PathBuf,
    out: BufWriter<File>,
    hash: Sha256,
    offsets: Vec<u64>,
}

impl Writer {
    /// Starts a store in the folder `path`. Removes the files of an interrupted write of the same name, and restores a
    /// store whose replacement was interrupted.
    ///
    /// # Errors
    /// The vocabulary is 0 or exceeds `u32`; shards have 0 bytes; `path` exists and may not be replaced, or is not a store;
    /// another process is writing this store; the folder is not writable.
    pub fn create(path: &Path, options: &WriterConfig) -> Result<Self> {
        let wrong = |reason| Err(Error::Config { what: "token store", reason });
        if options.vocabulary == 0 || options.vocabulary as u64 > 1 << 32 {
            return wrong(format!("a vocabulary of {}; expected 1 to 2^32 ids", options.vocabulary));
        }
        if options.shard_bytes == 0 {
            return wrong("shards of 0 bytes; use 1 MiB or more".into());
        }
        let (Some(partial), Some(aside)) = (hidden(path, "partial"), aside(path)) else {
            return wrong(format!("{} has no folder name", path.display()));
        };
        check_target(path, options.replace)?;
        let parent = parent(path);
        std::fs::create_dir_all(parent).map_err(|cause| io(parent, cause))?;
        std::fs::create_dir_all(&partial).map_err(|cause| io(&partial, cause))?;
        let lock_path = partial.join(LOCK);
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path);
        let lock = lock.map_err(|cause| io(&lock_path, cause))?;
        let busy =
            || Err(file(path, "another process is writing this store; wait for it, or choose another name"));
        match lock.try_lock() {
            // A writer that has finished since then moved the folder with the lock file away.
            Ok(()) if !is_at(&lock, &lock_path) => return busy(),
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return busy(),
            Err(std::fs::TryLockError::Error(cause)) => return Err(io(&lock_path, cause)),
        }
        let entries = std::fs::read_dir(&partial).map_err(|cause| io(&partial, cause))?;
        for leftover in entries.flatten().filter(|entry| entry.file_name() != LOCK) {
            let leftover = leftover.path();
            std::fs::remove_file(&leftover).map_err(|cause| io(&leftover, cause))?;
        }
        recover(path, &aside)?;
        let writer = Self {
            target: path.to_owned(),
            partial,
            aside,
            width: header::width(options.vocabulary as u64),
            options: options.clone(),
            lock: Some(lock),
            current: None,
            done: Vec::new(),
            buffer: Vec::new(),
            failed: false,
        };
        // Checked again with the lock held and after the recovery. Dropping the writer cleans up.
        check_target(path, options.replace)?;
        Ok(writer)
    }

    /// Appends a document, which may be empty.
    ///
    /// # Errors
    /// An id is not less than the vocabulary (nothing is written); or writing fails, for example because the disk is full.
    /// After that, every call fails.
    pub fn push(&mut self, ids: &[u32]) -> Result<()> {
        let vocabulary = self.options.vocabulary;
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
            let document = self.documents();
            return Err(Error::Record {
                from: self.target.display().to_string(),
                location: format!("document {document}"),
                reason: format!(
                    "id {id}, but the vocabulary of the store is {vocabulary}; use the vocabulary of the tokenizer that \
                     made the ids"
                ),
            });
        }
        self.working()?;
        let result = self.append(ids);
        self.failed = result.is_err();
        result
    }

    /// Finishes the store: syncs all files to disk and renames the folder into place. A store may be empty.
    ///
    /// # Errors
    /// Writing fails or has failed before; `path` was created in the meantime.
    pub fn finish(mut self) -> Result<TokenStore> {
        self.working()?;
        if self.current.is_none() && self.done.is_empty() {
            self.current = Some(self.start()?);
        }
        self.end_shard()?;
        let (shards, store) =
            (self.done.len() as u32, header::store_checksum(self.done.iter().map(|h| &h.payload)));
        for head in &mut self.done {
            (head.shards, head.store) = (shards, store);
            let path = self.partial.join(header::shard_name(head.shard));
            let write = || -> std::io::Result<()> {
                let mut out = OpenOptions::new().write(true).open(&path)?;
                out.write_all(&head.render())?;
                out.sync_all()
            };
            write().map_err(|cause| io(&path, cause))?;
        }
        check_target(&self.target, self.options.replace)?;
        sync_folder(&self.partial)?;
        // The lock file moves with the folder: until then no other writer can take it for leftovers.
        place(&self.partial, &self.target, &self.aside)?;
        let old_lock = self.lock.take();
        let lock = self.target.join(LOCK);
        std::fs::remove_file(&lock).map_err(|cause| io(&lock, cause))?;
        drop(old_lock);
        sync_folder(&self.target)?;
        sync_folder(parent(&self.target))?;
        remove_folder(&self.aside)?;
        TokenStore::open(&self.target)
    }

    /// Returns the number of documents so far.
    pub fn documents(&self) -> u64 {
        let current = self.current.as_ref().map_or(0, |shard| shard.offsets.len() as u64 - 1);
        self.done.iter().map(|head| head.documents).sum::<u64>() + current
    }

    fn working(&self) -> Result<()> {
        if self.failed {
            return Err(file(
                &self.target,
                "an earlier write failed, so the store is incomplete; start again",
            ));
        }
        Ok(())
    }

    fn append(&mut self, ids: &[u32]) -> Result<()> {
        let width = u64::from(self.width);
        let full = self.current.as_ref().is_some_and(|shard| {
            let has = shard.tokens() * width + 8 * shard.offsets.len() as u64;
            has + ids.len() as u64 * width + 8 > self.options.shard_bytes && shard.offsets.len() > 1
        });
        if full {
            self.end_shard()?;
        }
        let mut shard = match self.current.take() {
            Some(shard) => shard,
            None => self.start()?,
        };
        self.buffer.clear();
        if self.width == 2 {
            // Each id is less than the vocabulary, which fits 16 bits.
            self.buffer.extend(ids.iter().flat_map(|id| (*id as u16).to_le_bytes()));
        } else {
            self.buffer.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        }
        shard.write(&self.buffer)?;
        shard.offsets.push(shard.tokens() + ids.len() as u64);
        self.current = Some(shard);
        Ok(())
    }

    fn start(&self) -> Result<Unfinished> {
        let path = self.partial.join(header::shard_name(self.done.len() as u32));
        let out = File::create(&path).map_err(|cause| io(&path, cause))?;
        let mut out = BufWriter::with_capacity(1 << 20, out);
        // The header is written last; until then the file is not a valid shard.
        out.write_all(&[0; header::BYTES]).map_err(|cause| io(&path, cause))?;
        Ok(Unfinished { path, out, hash: Sha256::new(), offsets: vec![0] })
    }

    fn end_shard(&mut self) -> Result<()> {
        let Some(mut shard) = self.current.take() else { return Ok(()) };
        let mut head = Header {
            width: self.width,
            shard: self.done.len() as u32,
            shards: 0,
            documents: shard.offsets.len() as u64 - 1,
            tokens: shard.tokens(),
            vocabulary: self.options.vocabulary as u64,
            payload: [0; 32],
            store: [0; 32],
        };
        let padding = (8 - head.tokens * u64::from(head.width) % 8) % 8;
        shard.write(&[0; 8][..padding as usize])?;
        let offsets: Vec<u8> = shard.offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
        shard.write(&offsets)?;
        head.payload = shard.hash.finalize().into();
        let mut flush = || -> std::io::Result<()> {
            shard.out.flush()?;
            shard.out.get_ref().sync_data()
        };
        flush().map_err(|cause| io(&shard.path, cause))?;
        self.done.push(head);
        Ok(())
    }
}

impl Unfinished {
    fn tokens(&self) -> u64 {
        self.offsets.last().copied().unwrap_or(0)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.out.write_all(bytes).map_err(|cause| io(&self.path, cause))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.lock.is_some() {
            self.current = None;
            // A folder that cannot be removed is left to the next writer.
            let _ = std::fs::remove_dir_all(&self.partial);
        }
    }
}
