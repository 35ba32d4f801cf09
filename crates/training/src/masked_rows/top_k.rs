//! A teacher's most probable tokens at every labelled position of some rows, in a file.
//!
//! ```text
//! "frugal top-k\n"   header: u32 bytes of JSON, JSON   (rows + 1)·u64 positions before each row   positions·(k·u32 tokens, k·f16 ln q)
//! ```
//!
//! in little-endian order. A position takes 6·k bytes. fp16 has ln q to 2⁻⁸ above −16, and to 2⁻⁷ below; a token whose probability it rounds to 0 has
//! ln q = −65504. The header has what the probabilities depend on, and a file of another header is refused, by name. Positions of a row are read when its
//! batch is made: nothing is held.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use runtime::ops::TryScalar;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::MaskedBatches;
use crate::error::{Error, Result};

const MAGIC: &[u8; 13] = b"frugal top-k\n";
/// More bytes than a header has.
const LONGEST_HEADER: u32 = 1 << 20;

/// What a file's probabilities depend on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopKHeader {
    /// SHA-256 of the tokenizer's tokens, in the order of their ids.
    pub tokenizer: String,
    /// Tokens that the probabilities are over: those that student and teacher have.
    pub vocabulary: i64,
    /// The temperature of the probabilities.
    pub temperature: f64,
    /// k.
    pub k: usize,
    /// [`MaskedBatches::content`](crate::masked_rows::MaskedBatches::content): of the rows' tokens and labels, and so of tokenizer and template.
    pub rows: String,
    /// SHA-256 of the files of the teacher's weights; empty for a training that takes any teacher's.
    pub teacher: String,
}

impl TopKHeader {
    /// The first field in which it differs from what a training needs, with both values. It may be over fewer tokens: those that a student with a
    /// longer head has, too.
    fn difference(&self, needed: &Self) -> Option<(&'static str, String, String)> {
        let pairs = [
            ("tokenizer", self.tokenizer.clone(), needed.tokenizer.clone()),
            ("temperature", self.temperature.to_string(), needed.temperature.to_string()),
            ("k", self.k.to_string(), needed.k.to_string()),
            ("rows", self.rows.clone(), needed.rows.clone()),
        ];
        let of_teacher = ("teacher", self.teacher.clone(), needed.teacher.clone());
        let of_vocabulary = ("vocabulary", self.vocabulary.to_string(), needed.vocabulary.to_string());
        let more = [of_teacher].into_iter().filter(|(_, _, needed)| !needed.is_empty());
        let beyond = (self.vocabulary > needed.vocabulary).then_some(of_vocabulary);
        pairs.into_iter().chain(more).find(|(_, own, needed)| own != needed).or(beyond)
    }
}

/// An open file. See the [module](self).
#[derive(Debug)]
pub struct TopKFile {
    file: File,
    path: PathBuf,
    header: TopKHeader,
    /// Where offsets and positions begin.
    offsets: u64,
    positions: u64,
    rows: usize,
}

impl TopKFile {
    /// Opens a file of the probabilities that a training over `rows` rows needs.
    ///
    /// # Errors
    /// No such file; another format; a header that differs, with the field and both values; a length that is not that of the header.
    pub fn open(path: &Path, needed: &TopKHeader, rows: usize) -> Result<Self> {
        let failed = |cause: io::Error| Error::io(path, cause);
        let refuse = |reason: String| {
            Err(Error::config("the teacher's file", format!("{}: {reason}", path.display())))
        };
        let mut file = File::open(path).map_err(failed)?;
        let (mut magic, mut length) = ([0; MAGIC.len()], [0; 4]);
        let begin = file.read_exact(&mut magic).and_then(|()| file.read_exact(&mut length));
        let length = u32::from_le_bytes(length);
        if begin.is_err() || magic != *MAGIC || length > LONGEST_HEADER {
            return refuse("is no file of a teacher's probabilities; give another, or remove it".to_owned());
        }
        let mut json = vec![0; length as usize];
        file.read_exact(&mut json).map_err(failed)?;
        let header: TopKHeader = match serde_json::from_slice(&json) {
            Ok(header) => header,
            Err(cause) => return refuse(format!("its header is not readable: {cause}")),
        };
        if let Some((field, own, needed)) = header.difference(needed) {
            return refuse(format!(
                "its {field} is {own}, and this training's is {needed}; have the teacher write another file, in another folder"
            ));
        }
        let offsets = (MAGIC.len() + 4) as u64 + u64::from(length);
        let positions = offsets + 8 * (rows as u64 + 1);
        let own = Self { file, path: path.to_owned(), header, offsets, positions, rows };
        let count = own.offset(rows)?;
        let expected = positions + count * own.position_bytes();
        let found = own.file.metadata().map_err(failed)?.len();
        if found != expected {
            return refuse(format!("has {found} bytes; expected {expected}: it was cut short; remove it"));
        }
        Ok(own)
    }

    /// The header.
    pub fn header(&self) -> &TopKHeader {
        &self.header
    }

    fn position_bytes(&self) -> u64 {
        6 * self.header.k as u64
    }

    fn read(&self, at: u64, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, at).map_err(|cause| Error::io(&self.path, cause))?;
        Ok(bytes)
    }

    fn offset(&self, row: usize) -> Result<u64> {
        let bytes = self.read(self.offsets + 8 * row as u64, 8)?;
        Ok(u64::from_le_bytes(bytes.try_into().unwrap_or_default()))
    }

    /// Reads the positions of a row, which has `learned` of them: their tokens, and the bits of ln q in fp16.
    ///
    /// # Errors
    /// A file that cannot be read; another number of positions.
    pub fn row(&self, row: usize, learned: usize) -> Result<(Vec<u32>, Vec<u16>)> {
        let (from, to) = (self.offset(row)?, self.offset(row + 1)?);
        if row >= self.rows || to.checked_sub(from) != Some(learned as u64) {
            let reason = format!("row {row} has positions {from} to {to}; expected {learned}");
            return Err(Error::config("the teacher's file", reason));
        }
        let k = self.header.k;
        let bytes = self.read(self.positions + from * self.position_bytes(), learned * 6 * k)?;
        let (mut tokens, mut values) = (Vec::with_capacity(learned * k), Vec::with_capacity(learned * k));
        for position in bytes.chunks_exact(6 * k) {
            let (of_tokens, of_values) = position.split_at(4 * k);
            tokens.extend(
                of_tokens
                    .chunks_exact(4)
                    .map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]])),
            );
            values.extend(of_values.chunks_exact(2).map(|two| u16::from_le_bytes([two[0], two[1]])));
        }
        Ok((tokens, values))
    }
}

/// Writes a file, under a temporary name until it is whole.
#[derive(Debug)]
pub struct TopKWriter {
    file: tempfile::NamedTempFile,
    path: PathBuf,
    k: usize,
}

impl TopKWriter {
    /// Begins a file for rows with these numbers of labelled positions.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn create(
        path: &Path,
        header: &TopKHeader,
        learned: impl IntoIterator<Item = Result<u64>>,
    ) -> Result<Self> {
        let failed = |cause: io::Error| Error::io(path, cause);
        let folder = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).map_err(failed)?;
        let file = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
        let json = serde_json::to_vec(header).map_err(|cause| failed(cause.into()))?;
        let mut out = io::BufWriter::new(file.as_file());
        let mut begin = || -> io::Result<()> {
            out.write_all(MAGIC)?;
            out.write_all(&(json.len() as u32).to_le_bytes())?;
            out.write_all(&json)
        };
        begin().map_err(failed)?;
        let mut before = 0u64;
        out.write_all(&before.to_le_bytes()).map_err(failed)?;
        for learned in learned {
            before += learned?;
            out.write_all(&before.to_le_bytes()).map_err(failed)?;
        }
        out.flush().map_err(failed)?;
        drop(out);
        Ok(Self { file, path: path.to_owned(), k: header.k })
    }

    /// Appends positions: tokens and log-probabilities `[n, k]`.
    ///
    /// # Errors
    /// Another shape; a disk that is full.
    pub fn append(&mut self, tokens_nk: &Tensor, log_q_nk: &Tensor) -> Result<()> {
        let k = self.k as i64;
        let tokens = Vec::<i64>::try_from(tokens_nk.f_reshape([-1])?.f_contiguous()?)?;
        // The bits of fp16, whose largest number is 65504.
        let halves = log_q_nk.try_clamp_min(-65504.0)?.f_to_kind(Kind::Half)?.f_contiguous()?;
        let bits = Vec::<i16>::try_from(halves.f_view_dtype(Kind::Int16)?.f_reshape([-1])?)?;
        if tokens_nk.size() != log_q_nk.size() || tokens_nk.size().last() != Some(&k) {
            return Err(Error::config("the teacher's file", format!("{:?} tokens of {k}", tokens_nk.size())));
        }
        let mut bytes = Vec::with_capacity(tokens.len() * 6);
        for (tokens, bits) in tokens.chunks_exact(self.k).zip(bits.chunks_exact(self.k)) {
            tokens.iter().for_each(|token| bytes.extend((*token as u32).to_le_bytes()));
            bits.iter().for_each(|bits| bytes.extend(bits.to_le_bytes()));
        }
        self.file.write_all(&bytes).map_err(|cause| Error::io(&self.path, cause))
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// A disk that is full.
    pub fn finish(self) -> Result<()> {
        let path = self.path;
        self.file.as_file().sync_all().map_err(|cause| Error::io(&path, cause))?;
        self.file.persist(&path).map_err(|cause| Error::io(&path, cause.error))?;
        Ok(())
    }
}

impl MaskedBatches {
    /// Returns a source of the same batches that have a teacher's most probable tokens.
    #[must_use]
    pub fn with_top_k(self, file: TopKFile) -> Self {
        Self { top_k: Some(Arc::new(file)), ..self }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Returns the number of labels of each row.
    pub fn learned(&self) -> impl Iterator<Item = Result<u64>> + '_ {
        (0..self.rows.len()).map(|row| Ok(self.rows.size(row)?.learned as u64))
    }
}
