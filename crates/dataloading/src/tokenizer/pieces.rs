//! Long texts, encoded in pieces.
//!
//! A tokenizer takes 100 to 230 bytes of memory for a byte of text, and each text is one task of one thread. So a text beyond
//! [`LONGEST_PIECE`] bytes is cut, and its pieces are encoded on their own, on all threads. The ids are those of the whole text wherever
//! cuts do not change them. Cuts are made where pre-tokenizers and vocabularies begin a new word: in front of white space, at a line break
//! rather than at a blank, and only if the tokenizer gives the text around the cut the same ids cut and uncut. Line breaks behind
//! punctuation are passed over, because pre-tokenizers of GPT-4's kind join both. A text without such a place is cut anywhere.
//!
//! Memory is bounded by a few pieces, whatever the size of a file, compressed or not.

use std::io::BufRead;
use std::ops::ControlFlow;
use std::path::Path;

use rayon::prelude::*;

use super::Tokenizer;
use super::encoded::Encoded;
use crate::error::{Error, Result};
use crate::text::lines::{UTF16, is_utf16};
use crate::text::open;

/// Bytes of a text that is encoded in one piece.
pub const LONGEST_PIECE: usize = 32 << 10;
/// Bytes of a piece in which there is no place for a cut.
const WITHOUT_CUT: usize = 2 * LONGEST_PIECE;
/// Bytes behind a cut that must be there, to see what follows it.
const AHEAD: usize = 512;
/// Bytes on both sides of a cut that are encoded to check it.
const AROUND: usize = 96;
/// Places that are checked before the first one is taken.
const TRIED: usize = 24;
/// Bytes of pieces that are encoded at a time.
const TOGETHER: usize = 8 * LONGEST_PIECE;

impl Tokenizer {
    /// Returns the ids of a text as [`encode`](Self::encode) does, those of a long one [in pieces](self).
    ///
    /// # Errors
    /// The tokenizer fails on the text.
    pub fn encode_long(&self, text: &str) -> Result<Vec<u32>> {
        if text.len() <= LONGEST_PIECE {
            return self.encode(text);
        }
        let mut all = Vec::new();
        self.encode_pieces(
            &mut Pieces::new(self, Text::Held(text)),
            |is_first, piece| self.ids_of_piece(is_first, piece),
            |ids| {
                all.extend(ids);
                Ok::<_, Error>(ControlFlow::Continue(()))
            },
        )?;
        Ok(all)
    }

    /// Returns the ids of a long text [in pieces](self), each with its part of the text.
    pub(super) fn encode_long_with_spans(&self, text: &str) -> Result<Encoded> {
        let (mut all, mut at) = (Encoded::default(), 0);
        let encode = |is_first: bool, piece: &str| {
            let encoded = if is_first { self.encoded(piece) } else { self.encoded_after(piece) };
            encoded.map(|encoded| (encoded, piece.len()))
        };
        self.encode_pieces(&mut Pieces::new(self, Text::Held(text)), encode, |(encoded, length)| {
            all.append(at, encoded);
            at += length;
            Ok::<_, Error>(ControlFlow::Continue(()))
        })?;
        Ok(all)
    }

    /// Passes the ids of a file of text, which may be compressed (`.gz`, `.zst`), to `each`, [piece by piece](self), until that breaks.
    ///
    /// # Errors
    /// A file that cannot be read or is not UTF-8; the tokenizer fails on the text; the first error of `each`.
    pub fn encode_file<E: From<Error>>(
        &self,
        path: &Path,
        mut each: impl FnMut(&[u32]) -> Result<ControlFlow<()>, E>,
    ) -> Result<(), E> {
        let text = Text::File { reader: open(path)?, path, read: 0, part: Vec::new() };
        let mut pieces = Pieces::new(self, text);
        self.encode_pieces(
            &mut pieces,
            |is_first, piece| self.ids_of_piece(is_first, piece),
            |ids| each(&ids),
        )
    }

    fn ids_of_piece(&self, is_first: bool, piece: &str) -> Result<Vec<u32>> {
        if is_first { self.encode(piece) } else { self.encode_after(piece) }
    }

    /// Passes what `encode` makes of each piece, and of whether it is the first one, to `each`, in order, until that breaks.
    fn encode_pieces<T: Send, E: From<Error>>(
        &self,
        pieces: &mut Pieces<'_>,
        encode: impl Fn(bool, &str) -> Result<T> + Sync,
        mut each: impl FnMut(T) -> Result<ControlFlow<()>, E>,
    ) -> Result<(), E> {
        let mut is_first = true;
        loop {
            let (mut together, mut bytes) = (Vec::new(), 0);
            while bytes < TOGETHER && together.len() < rayon::current_num_threads() {
                let Some(piece) = pieces.next()? else { break };
                bytes += piece.len();
                together.push((std::mem::take(&mut is_first), piece));
            }
            if together.is_empty() {
                return Ok(());
            }
            let encoded = together.into_par_iter().map(|(is_first, piece)| encode(is_first, &piece));
            for piece in encoded.collect::<Vec<Result<T>>>() {
                if each(piece?)?.is_break() {
                    return Ok(());
                }
            }
        }
    }

    /// Whether a cut at `at` gives the ids around it that the whole text has.
    fn is_cut(&self, text: &str, at: usize) -> Result<bool> {
        let (from, to) = (ceil(text, at.saturating_sub(AROUND)), floor(text, at + AROUND));
        let mut cut = self.encode_after(&text[from..at])?;
        cut.extend(self.encode_after(&text[at..to])?);
        Ok(cut == self.encode_after(&text[from..to])?)
    }
}

/// Where text comes from.
enum Text<'a> {
    Held(&'a str),
    File {
        reader: Box<dyn BufRead + Send>,
        path: &'a Path,
        read: u64,
        /// The first bytes of a character whose rest was not read yet.
        part: Vec<u8>,
    },
}

impl Text<'_> {
    /// Appends some of the text; false at its end.
    fn append(&mut self, out: &mut String) -> Result<bool> {
        match self {
            Self::Held(text) => {
                let (part, rest) = text.split_at(floor(text, LONGEST_PIECE));
                out.push_str(part);
                *text = rest;
                Ok(!part.is_empty())
            }
            Self::File { reader, path, read, part } => {
                let io = |cause| Error::Io { path: path.to_path_buf(), cause };
                let wrong =
                    |reason: &str| Error::File { path: path.to_path_buf(), reason: reason.to_owned() };
                let bytes = reader.fill_buf().map_err(io)?;
                let (count, is_end) = (bytes.len().min(LONGEST_PIECE), bytes.is_empty());
                if *read == 0 && is_utf16(bytes) {
                    return Err(wrong(UTF16));
                }
                part.extend_from_slice(&bytes[..count]);
                reader.consume(count);
                let valid = match std::str::from_utf8(part) {
                    Ok(text) => text.len(),
                    Err(bad) if bad.error_len().is_none() && !is_end => bad.valid_up_to(),
                    Err(bad) => {
                        let at = bad.valid_up_to();
                        let byte = *read + at as u64;
                        let remedy = match part.contains(&0) {
                            true => "it is not text; give a file of text",
                            false => "it is not UTF-8; convert the file (iconv -f LATIN1 -t UTF-8)",
                        };
                        return Err(wrong(&format!("byte {byte} (0x{:02x}): {remedy}", part[at])));
                    }
                };
                out.push_str(std::str::from_utf8(&part[..valid]).unwrap_or_default());
                part.drain(..valid);
                *read += valid as u64;
                Ok(!is_end)
            }
        }
    }
}

struct Pieces<'a> {
    tokenizer: &'a Tokenizer,
    text: Text<'a>,
    /// Text before the next piece's end.
    pending: String,
    is_at_end: bool,
}

impl<'a> Pieces<'a> {
    fn new(tokenizer: &'a Tokenizer, text: Text<'a>) -> Self {
        Self { tokenizer, text, pending: String::new(), is_at_end: false }
    }

    fn next(&mut self) -> Result<Option<String>> {
        let mut longest = LONGEST_PIECE;
        loop {
            while !self.is_at_end && self.pending.len() < longest + AHEAD {
                self.is_at_end = !self.text.append(&mut self.pending)?;
            }
            if self.pending.len() <= longest {
                return Ok((!self.pending.is_empty()).then(|| std::mem::take(&mut self.pending)));
            }
            let cut = match self.cut(longest)? {
                Some(cut) => cut,
                None if longest < WITHOUT_CUT => {
                    longest = WITHOUT_CUT;
                    continue;
                }
                None => floor(&self.pending, longest),
            };
            let rest = self.pending.split_off(cut);
            return Ok(Some(std::mem::replace(&mut self.pending, rest)));
        }
    }

    /// Returns the last place within `longest` bytes where the text may be cut; `None` if there is no white space.
    fn cut(&self, longest: usize) -> Result<Option<usize>> {
        let text = &self.pending[..floor(&self.pending, longest + AHEAD)];
        let end = floor(text, longest);
        let (mut first, mut tried) = (None, 0);
        for is_line_end in [true, false] {
            for at in places(text, end, is_line_end) {
                if self.tokenizer.is_cut(text, at)? {
                    return Ok(Some(at));
                }
                first.get_or_insert(at);
                tried += 1;
                if tried % TRIED == 0 {
                    break;
                }
            }
        }
        Ok(first)
    }
}

/// Returns the places before `end`, the last one first, where white space begins that has a line break in it or not.
fn places(text: &str, end: usize, with_line_break: bool) -> impl Iterator<Item = usize> + '_ {
    let mut before = text[..end].char_indices().rev().peekable();
    std::iter::from_fn(move || {
        loop {
            let (at, space) = before.next()?;
            let (_, last) = before.peek()?;
            if !space.is_whitespace() || last.is_whitespace() {
                continue;
            }
            // Punctuation and the line breaks behind it may be one word.
            if matches!(space, '\r' | '\n') && !last.is_alphanumeric() {
                continue;
            }
            let run = text[at..].chars().take_while(|character| character.is_whitespace());
            if at > 0 && run.into_iter().any(|character| character == '\n') == with_line_break {
                return Some(at);
            }
        }
    })
}

/// The last border of characters at or before a byte.
fn floor(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// The first border of characters at or after a byte.
fn ceil(text: &str, at: usize) -> usize {
    (at..text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len())
}
