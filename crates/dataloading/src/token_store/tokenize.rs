//! Parallel tokenization of a corpus, in order.

use std::path::Path;

use super::{TokenStore, Writer, WriterConfig};
use crate::error::{Error, Result};
use crate::text::{Corpus, Record, Records};
use crate::tokenizer::Tokenizer;

/// Records and bytes of text encoded at a time, which bound the memory.
const CHUNK_RECORDS: usize = 4096;
const CHUNK_BYTES: usize = 4 << 20;

/// How documents longer than the maximum are handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TooLong {
    /// Split into several documents of the maximum length, the last one shorter.
    #[default]
    Split,
    /// Truncated to the maximum; the rest is dropped and counted.
    Truncate,
    /// Dropped and counted.
    Drop,
}

/// Options of tokenization.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizeConfig {
    /// The id appended to each record; see [`Tokenizer::end_of_text`].
    pub end_of_text: Option<u32>,
    /// The maximum tokens of a document, end-of-text included.
    pub longest: Option<usize>,
    /// How longer documents are handled.
    pub too_long: TooLong,
}

/// Counts of a tokenized corpus.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tokenized {
    /// Records read.
    pub records: u64,
    /// Documents written.
    pub documents: u64,
    /// Tokens of these documents.
    pub tokens: u64,
    /// Records without tokens, which were skipped.
    pub empty: u64,
    /// Records longer than the maximum.
    pub too_long: u64,
    /// Tokens dropped from them.
    pub dropped_tokens: u64,
    /// Bytes of the files read so far.
    pub bytes: u64,
    /// Invalid UTF-8 sequences replaced.
    pub replaced: u64,
}

/// Encodes records and passes their documents to `sink`, in the order of the records. `progress` is called after each
/// chunk. Encoding uses all threads of the current rayon pool; the result does not depend on their number.
///
/// # Errors
/// The first error of the records, the tokenizer (with the position of the record) or the sink; a maximum of 0 tokens; an
/// end-of-text id outside the vocabulary.
pub fn tokenize(
    mut records: Records,
    tokenizer: &Tokenizer,
    options: &TokenizeConfig,
    mut progress: impl FnMut(&Tokenized),
    mut sink: impl FnMut(&[u32]) -> Result<()>,
) -> Result<Tokenized> {
    check(tokenizer, options)?;
    let mut counts = Tokenized::default();
    loop {
        let chunk = next_chunk(&mut records)?;
        if chunk.is_empty() {
            return Ok(counts);
        }
        let texts: Vec<&str> = chunk.iter().map(|record| &*record.text).collect();
        let encoded = match tokenizer.encode_batch(&texts) {
            Ok(encoded) => encoded,
            Err(error) => return Err(locate(&chunk, tokenizer, error)),
        };
        for ids in encoded {
            counts.records += 1;
            add(ids, options, &mut counts, &mut sink)?;
        }
        (counts.bytes, counts.replaced) = (records.bytes(), records.replaced());
        progress(&counts);
    }
}

/// Encodes a corpus into a new store; see [`tokenize`]. An error leaves no files behind.
///
/// # Errors
/// Errors of [`tokenize`] and [`Writer`]; all records are empty or dropped.
pub fn tokenize_to_store(
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    options: &TokenizeConfig,
    path: &Path,
    store: &WriterConfig,
    progress: impl FnMut(&Tokenized),
) -> Result<(TokenStore, Tokenized)> {
    if store.vocabulary < tokenizer.vocabulary() {
        return Err(Error::Config {
            what: "token store",
            reason: format!(
                "the vocabulary is {}, but the tokenizer has {} ids; use at least as many",
                store.vocabulary,
                tokenizer.vocabulary()
            ),
        });
    }
    let records = corpus.records()?;
    let mut writer = Writer::create(path, store)?;
    let counts = tokenize(records, tokenizer, options, progress, |ids| writer.push(ids))?;
    if counts.documents == 0 {
        return Err(Error::Empty {
            from: corpus.files.first().map_or_else(String::new, |path| path.display().to_string()),
            reason: format!(
                "of {} records {} are empty and {} longer than allowed, so there is nothing to store; {}",
                counts.records,
                counts.empty,
                counts.too_long,
                if counts.too_long > 0 {
                    "allow longer ones"
                } else {
                    "check the format that the text is read as"
                }
            ),
        });
    }
    Ok((writer.finish()?, counts))
}

fn check(tokenizer: &Tokenizer, options: &TokenizeConfig) -> Result<()> {
    let wrong = |reason| Err(Error::Config { what: "tokenize", reason });
    if options.longest == Some(0) {
        return wrong("the maximum length is 0 tokens; expected at least 1".into());
    }
    match options.end_of_text {
        Some(id) if id as usize >= tokenizer.vocabulary() => {
            wrong(format!("the end-of-text id {id} is not among the tokenizer's {}", tokenizer.vocabulary()))
        }
        _ => Ok(()),
    }
}

fn next_chunk(records: &mut Records) -> Result<Vec<Record>> {
    let (mut chunk, mut bytes) = (Vec::new(), 0);
    while chunk.len() < CHUNK_RECORDS && bytes < CHUNK_BYTES {
        let Some(record) = records.next().transpose()? else { break };
        bytes += record.text.len();
        chunk.push(record);
    }
    Ok(chunk)
}

fn add(
    mut ids: Vec<u32>,
    options: &TokenizeConfig,
    counts: &mut Tokenized,
    sink: &mut impl FnMut(&[u32]) -> Result<()>,
) -> Result<()> {
    if ids.is_empty() {
        counts.empty += 1;
        return Ok(());
    }
    ids.extend(options.end_of_text);
    let mut give = |ids: &[u32]| {
        counts.documents += 1;
        counts.tokens += ids.len() as u64;
        sink(ids)
    };
    let longest = options.longest.unwrap_or(usize::MAX);
    if ids.len() <= longest {
        return give(&ids);
    }
    counts.too_long += 1;
    match options.too_long {
        TooLong::Split => ids.chunks(longest).try_for_each(give),
        TooLong::Truncate => {
            give(&ids[..longest])?;
            counts.dropped_tokens += (ids.len() - longest) as u64;
            Ok(())
        }
        TooLong::Drop => {
            counts.dropped_tokens += ids.len() as u64;
            Ok(())
        }
    }
}

/// Finds the record of the chunk that the tokenizer refuses.
fn locate(chunk: &[Record], tokenizer: &Tokenizer, error: Error) -> Error {
    let refused = chunk.iter().find_map(|record| Some((record, tokenizer.encode(&record.text).err()?)));
    refused.map_or(error, |(record, cause)| Error::Record {
        from: record.location.path.display().to_string(),
        location: format!("line {}", record.location.line),
        reason: cause.to_string(),
    })
}
