//! The rows of a vocabulary to which a training has added tokens.

use std::path::Path;

use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use lora::{LoraConfig, TokenIndices};
use models::hugging_face::Folder;
use models::tensors_file::TensorsFile;

/// The end of the name of PEFT's copy of a table with trained rows.
const TABLE: &str = "embed_tokens.token_adapter.base_layer.weight";

/// Returns the rows of a vocabulary of `stored` rows that has to hold `tokens` tokens: spare rows are used first, and one that grows has a
/// multiple of `multiple` rows.
pub(crate) fn padded(stored: i64, tokens: i64, multiple: Option<i64>) -> i64 {
    if tokens <= stored {
        return stored;
    }
    let multiple = multiple.unwrap_or(1).max(1);
    (tokens + multiple - 1) / multiple * multiple
}

/// Returns the rows that an adapter trains for new tokens: those of the embedding, and of a head of its own.
pub(crate) fn trained_rows(tokens: Vec<i64>, is_tied: bool) -> TokenIndices {
    if is_tied {
        return TokenIndices::Embedding(tokens);
    }
    let modules = ["embed_tokens", "lm_head"].map(|name| (name.to_owned(), tokens.clone()));
    TokenIndices::ByModule(modules.into())
}

/// Opens a model's folder with a vocabulary of `rows` rows.
///
/// # Errors
/// As [`Folder::open`].
pub(crate) fn grown(path: &Path, rows: i64) -> models::Result<Folder> {
    Ok(Folder::open(path)?.with_vocabulary(rows))
}

/// Returns a model's folder with the rows that its adapter has for new tokens, if it has any.
///
/// # Errors
/// An adapter that cannot be read.
pub(crate) fn for_adapter(
    folder: Folder,
    adapter: Option<&Path>,
    multiple: Option<i64>,
) -> anyhow::Result<Folder> {
    let Some(adapter) = adapter.map(|adapter| adapter.join(CONFIG_FILE)).filter(|path| path.is_file()) else {
        return Ok(folder);
    };
    let config = LoraConfig::read(&adapter)?;
    let largest = config.trainable_token_indices.as_ref().and_then(|tokens| tokens.largest());
    let stored = folder.config().vocab_size;
    // PEFT writes the whole table of a vocabulary that grew.
    let file = adapter.with_file_name(TENSORS_FILE);
    if largest.is_some_and(|largest| largest >= stored) && file.is_file() {
        let file = TensorsFile::open(&file)?;
        let mut tables = file.entries().iter().filter(|entry| entry.name.ends_with(TABLE));
        if let Some(&rows) = tables.find_map(|entry| entry.shape.first()) {
            return Ok(folder.with_vocabulary(rows));
        }
    }
    Ok(match largest.map(|largest| padded(stored, largest + 1, multiple)) {
        Some(rows) if rows > stored => folder.with_vocabulary(rows),
        _ => folder,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spare_rows_are_used_before_a_vocabulary_grows() {
        assert_eq!(padded(100, 100, Some(64)), 100);
        assert_eq!(padded(100, 101, None), 101);
        assert_eq!(padded(100, 101, Some(64)), 128);
        assert_eq!(padded(128, 129, Some(64)), 192);
    }
}
