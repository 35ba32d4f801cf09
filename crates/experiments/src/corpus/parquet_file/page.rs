//! Pages of strings.

use std::io::Read;

use flate2::read::GzDecoder;

use super::thrift::{self, Value, take, unsigned};
use super::{Chunk, Reason};

const DATA_PAGE: i64 = 0;
const DICTIONARY_PAGE: i64 = 2;
const DATA_PAGE_V2: i64 = 3;
const PLAIN: i64 = 0;
/// Two names of the same: positions in the dictionary.
const DICTIONARY: [i64; 2] = [2, 8];
/// The largest page that is decompressed; writers make them of a megabyte.
const LARGEST_PAGE: usize = 1 << 28;
/// The most values of a page; writers put some ten thousand in one.
const MOST_VALUES: usize = 1 << 24;

/// The strings of a chunk in order, without nulls.
pub(super) fn texts(bytes: &[u8], chunk: &Chunk) -> Result<Vec<String>, Reason> {
    let (mut rest, mut seen) = (bytes, 0);
    let (mut dictionary, mut texts) = (Vec::new(), Vec::new());
    while seen < chunk.values {
        let header = thrift::parse(&mut rest)?;
        let size = |id| usize::try_from(header.int(id)?).map_err(|error| error.to_string());
        let (whole, compressed) = (size(2)?, size(3)?);
        let page = take(&mut rest, compressed)?;
        match header.int(1)? {
            DICTIONARY_PAGE => {
                let count = count(header.field(7)?)?;
                dictionary = plain(&decompressed(page, chunk.codec, whole)?, count)?;
            }
            DATA_PAGE => {
                let of = header.field(5)?;
                let (page, count) = (decompressed(page, chunk.codec, whole)?, count(of)?);
                let mut page = page.as_slice();
                let present = if chunk.optional {
                    let length = take(&mut page, 4)?;
                    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
                    present(take(&mut page, length as usize)?, count)?
                } else {
                    count
                };
                texts.extend(values(page, of.int(2)?, present, &dictionary)?);
                seen += count;
            }
            DATA_PAGE_V2 => {
                let of = header.field(8)?;
                let levels = usize::try_from(of.int(5)?).map_err(|error| error.to_string())?;
                let (mut page, count) = (page, count(of)?);
                let levels = take(&mut page, levels)?;
                let present = if chunk.optional { present(levels, count)? } else { count };
                let packed = of.field(7).map_or(true, |packed| *packed != Value::Bool(false));
                let codec = if packed { chunk.codec } else { 0 };
                let page = decompressed(page, codec, whole.saturating_sub(levels.len()))?;
                texts.extend(values(&page, of.int(4)?, present, &dictionary)?);
                seen += count;
            }
            _ => {}
        }
    }
    Ok(texts)
}

fn count(header: &Value) -> Result<usize, Reason> {
    let count = usize::try_from(header.int(1)?).map_err(|error| error.to_string())?;
    if count > MOST_VALUES {
        return Err(format!("a page of {count} values; expected {MOST_VALUES} at most"));
    }
    Ok(count)
}

fn decompressed(page: &[u8], codec: i64, whole: usize) -> Result<Vec<u8>, Reason> {
    if whole > LARGEST_PAGE {
        return Err(format!("a page of {whole} bytes; expected {LARGEST_PAGE} at most"));
    }
    match codec {
        0 => Ok(page.to_vec()),
        1 if snap::raw::decompress_len(page).is_ok_and(|whole| whole > LARGEST_PAGE) => {
            Err(format!("a page of more than {LARGEST_PAGE} bytes"))
        }
        1 => snap::raw::Decoder::new().decompress_vec(page).map_err(|error| error.to_string()),
        2 => {
            let mut bytes = Vec::new();
            let read = GzDecoder::new(page).take(LARGEST_PAGE as u64).read_to_end(&mut bytes);
            read.map(|_| bytes).map_err(|error| error.to_string())
        }
        other => {
            Err(format!("pages are compressed by the method {other}; expected none, Snappy (1) or gzip (2)"))
        }
    }
}

/// How many of `count` values are not null, by their definition levels of one bit.
fn present(levels: &[u8], count: usize) -> Result<usize, Reason> {
    Ok(hybrid(levels, 1, count)?.into_iter().filter(|&level| level == 1).count())
}

fn values(page: &[u8], encoding: i64, count: usize, dictionary: &[String]) -> Result<Vec<String>, Reason> {
    if encoding == PLAIN {
        return plain(page, count);
    }
    if !DICTIONARY.contains(&encoding) {
        return Err(format!(
            "texts are encoded by the method {encoding}; expected plain (0) or a dictionary (8)"
        ));
    }
    let mut page = page;
    let width = take(&mut page, 1)?[0];
    let text = |index: u32| {
        dictionary
            .get(index as usize)
            .cloned()
            .ok_or_else(|| format!("a text is missing in the dictionary: {index}"))
    };
    hybrid(page, width, count)?.into_iter().map(text).collect()
}

/// Strings, each after its length.
fn plain(page: &[u8], count: usize) -> Result<Vec<String>, Reason> {
    let (mut rest, mut texts) = (page, Vec::new());
    for _ in 0..count {
        let length = take(&mut rest, 4)?;
        let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
        let text = std::str::from_utf8(take(&mut rest, length as usize)?);
        texts.push(text.map_err(|error| format!("a text is not UTF-8: {error}"))?.to_owned());
    }
    Ok(texts)
}

/// Numbers of `width` bits: runs of one number, and groups of eight packed ones.
fn hybrid(bytes: &[u8], width: u8, count: usize) -> Result<Vec<u32>, Reason> {
    if width > 32 {
        return Err(format!("numbers of {width} bits; expected 32 at most"));
    }
    let (mut rest, mut numbers) = (bytes, Vec::new());
    while numbers.len() < count {
        let missing = count - numbers.len();
        let header = unsigned(&mut rest)?;
        let length = usize::try_from(header >> 1).map_err(|error| error.to_string())?;
        if length == 0 {
            return Err("an empty run of numbers".into());
        }
        if header & 1 == 0 {
            let bytes = take(&mut rest, usize::from(width).div_ceil(8))?;
            let number = bytes.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte));
            numbers.extend(std::iter::repeat_n(number, length.min(missing)));
        } else {
            let size = length.checked_mul(usize::from(width)).ok_or("a run is too long")?;
            let packed = take(&mut rest, size)?;
            let bit = |at: usize| u32::from(packed[at / 8] >> (at % 8) & 1);
            let number = |index: usize| {
                let first = index * usize::from(width);
                (0..usize::from(width)).fold(0, |number, at| number | bit(first + at) << at)
            };
            numbers.extend((0..missing.min(length.saturating_mul(8))).map(number));
        }
    }
    Ok(numbers)
}
