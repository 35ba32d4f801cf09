//! The 128-byte header of a shard.

use std::path::Path;

use sha2::{Digest, Sha256};

use super::file;
use crate::error::Result;

/// The format version that this crate writes, and the newest that it reads.
pub const VERSION: u32 = 1;

pub(super) const MAGIC: [u8; 8] = *b"FRUGALTK";

/// Size of a header in bytes.
pub(super) const BYTES: usize = 128;

/// Offset of the header's own checksum.
const CHECKED: usize = 112;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) width: u32,
    pub(super) shard: u32,
    pub(super) shards: u32,
    pub(super) documents: u64,
    pub(super) tokens: u64,
    pub(super) vocabulary: u64,
    pub(super) payload: [u8; 32],
    pub(super) store: [u8; 32],
}

impl Header {
    pub(super) fn render(&self) -> [u8; BYTES] {
        let mut bytes = Vec::with_capacity(BYTES);
        bytes.extend(MAGIC);
        for word in [VERSION, self.width, self.shard, self.shards] {
            bytes.extend(word.to_le_bytes());
        }
        for word in [self.documents, self.tokens, self.vocabulary] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.payload);
        bytes.extend(self.store);
        let check = Sha256::digest(&bytes);
        bytes.extend(&check[..BYTES - CHECKED]);
        let mut header = [0; BYTES];
        header.copy_from_slice(&bytes);
        header
    }

    /// Parses the header at the start of the file `path`.
    pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        if bytes.is_empty() {
            return Err(file(path, "the file is empty; copy or write the store again"));
        }
        if bytes.len() < MAGIC.len() || bytes[..MAGIC.len()] != MAGIC {
            return Err(file(path, "not a shard of a token store: it does not start with FRUGALTK"));
        }
        let Some(bytes) = bytes.first_chunk::<BYTES>() else {
            let has = bytes.len();
            return Err(file(
                path,
                format!("truncated within the header: {has} of {BYTES} bytes; copy it again"),
            ));
        };
        let version = u32_at(bytes, 8);
        if version > VERSION {
            return Err(file(
                path,
                format!(
                    "format version {version}, but this program reads up to {VERSION}; update the program, or write \
                     the store with it"
                ),
            ));
        }
        if Sha256::digest(&bytes[..CHECKED])[..BYTES - CHECKED] != bytes[CHECKED..] {
            return Err(file(
                path,
                "the header is damaged (its checksum differs); copy or write the store again",
            ));
        }
        let digest = |at: usize| {
            let mut digest = [0; 32];
            digest.copy_from_slice(&bytes[at..at + 32]);
            digest
        };
        let header = Self {
            width: u32_at(bytes, 12),
            shard: u32_at(bytes, 16),
            shards: u32_at(bytes, 20),
            documents: u64_at(bytes, 24),
            tokens: u64_at(bytes, 32),
            vocabulary: u64_at(bytes, 40),
            payload: digest(48),
            store: digest(80),
        };
        let ids = 1..=1 << 32;
        if version == 0
            || !ids.contains(&header.vocabulary)
            || header.width != width(header.vocabulary)
            || header.shard >= header.shards
        {
            return Err(file(path, "the header is inconsistent; write the store again"));
        }
        Ok(header)
    }

    /// Returns the bytes of the ids, padding included.
    pub(super) fn ids_bytes(&self) -> Option<u64> {
        self.tokens.checked_mul(self.width.into())?.checked_next_multiple_of(8)
    }

    /// Returns the expected size of the file in bytes.
    pub(super) fn file_bytes(&self) -> Option<u64> {
        let offsets = self.documents.checked_add(1)?.checked_mul(8)?;
        self.ids_bytes()?.checked_add(offsets)?.checked_add(BYTES as u64)
    }
}

/// Returns the bytes per id.
pub(super) fn width(vocabulary: u64) -> u32 {
    if vocabulary <= 1 << 16 { 2 } else { 4 }
}

pub(super) fn shard_name(number: u32) -> String {
    format!("{number:05}.tokens")
}

pub(super) fn store_checksum<'a>(payloads: impl Iterator<Item = &'a [u8; 32]>) -> [u8; 32] {
    let mut all = Sha256::new();
    payloads.for_each(|payload| all.update(payload));
    all.finalize().into()
}

pub(super) fn hexadecimal(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn u32_at(bytes: &[u8; BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8; BYTES], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
