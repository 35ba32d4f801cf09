//! Rows of plain text.

use std::io::Read as _;
use std::path::Path;

use training::masked_rows::MaskedRow;

use super::encoder::RowEncoder;
use super::overlong::split;
use crate::error::{Error, Result};

/// Reads rows from plain text, each as long as possible. A row's last token is the first of the next.
///
/// # Errors
/// No text; a longest row of fewer than 2 tokens.
pub fn text(path: &Path, encoder: &RowEncoder) -> Result<Vec<MaskedRow>> {
    let longest = encoder.options().longest;
    if longest < 2 {
        let found = longest.to_string();
        return Err(Error::Value { key: "data.max_length", found, expected: "2 tokens or more" });
    }
    let row = encoder.text(&read(path)?)?;
    if row.tokens.len() < 3 {
        return Err(Error::File { path: path.to_owned(), reason: "no text in it".to_owned() });
    }
    Ok(split(&row, longest))
}

fn read(path: &Path) -> Result<String> {
    let failed = |cause: std::io::Error| Error::File { path: path.to_owned(), reason: cause.to_string() };
    let mut text = String::new();
    dataloading::text::open(path)?.read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}
