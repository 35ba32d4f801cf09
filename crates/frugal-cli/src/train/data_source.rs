//! `--data` of `frugal train`: the kinds of sources, and how a path is recognized as one.

use std::fmt;
use std::path::Path;

use anyhow::{Context, bail};
use frugal::config::SYNTHETIC;
use frugal::dataloading::documents::DocumentSource;

/// The first file of a token store.
const FIRST_TOKENS: &str = "00000.tokens";

/// A source of documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataSource<'a> {
    /// A generated language without documents.
    Synthetic,
    /// The encyclopedia that the program carries.
    Embedded,
    /// A folder of tokens.
    TokenStore(&'a Path),
    /// A `.jsonl` file: one field of each line is a document.
    JsonLines(&'a Path),
    /// A file with a document in each line.
    Text(&'a Path),
}

impl<'a> DataSource<'a> {
    /// Returns the source of this name or path.
    ///
    /// # Errors
    /// A path that does not exist; a folder that is not a token store.
    pub(super) fn find(source: &'a str) -> anyhow::Result<Self> {
        let path = Path::new(source);
        match source {
            SYNTHETIC => Ok(Self::Synthetic),
            "embedded" => Ok(Self::Embedded),
            _ if !path.exists() => {
                bail!(
                    "--data {source}: there is no such file or folder; expected synthetic, embedded, or a path"
                )
            }
            _ if path.join(FIRST_TOKENS).is_file() => Ok(Self::TokenStore(path)),
            _ if path.is_dir() => bail!("{}", not_a_token_store(path)?),
            _ if path.extension().is_some_and(|extension| extension == "jsonl") => Ok(Self::JsonLines(path)),
            _ => Ok(Self::Text(path)),
        }
    }

    /// Returns the source as `dataloading` opens it; `None` for the synthetic language.
    pub(super) fn documents(self) -> Option<DocumentSource> {
        match self {
            Self::Synthetic => None,
            Self::Embedded => Some(DocumentSource::Embedded),
            Self::TokenStore(path) | Self::JsonLines(path) | Self::Text(path) => {
                Some(DocumentSource::Path(path.into()))
            }
        }
    }
}

impl fmt::Display for DataSource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Synthetic => f.write_str(SYNTHETIC),
            Self::Embedded => f.write_str("embedded"),
            Self::TokenStore(path) | Self::JsonLines(path) | Self::Text(path) => path.display().fmt(f),
        }
    }
}

/// Explains why a folder is not a token store, with the files that it has.
fn not_a_token_store(folder: &Path) -> anyhow::Result<String> {
    let mut names = Vec::new();
    for entry in folder.read_dir().with_context(|| folder.display().to_string())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        names.push(name);
    }
    names.sort();
    // Not `.jsonl.gz`: only the extension `.jsonl` makes a file JSON lines, so its lines would be trained on as plain text.
    let is_text = |name: &&String| [".txt", ".jsonl", ".txt.gz"].iter().any(|end| name.ends_with(end));
    let shown = folder.display();
    let problem =
        format!("--data {shown} is a folder, so it must be a token store, but it has no {FIRST_TOKENS}");
    Ok(match names.iter().find(is_text) {
        Some(file) => format!("{problem}; name one of its files, as --data {}", folder.join(file).display()),
        None if names.is_empty() => format!("{problem}: it is empty; give a text file or a .jsonl file"),
        None => {
            let (first, more) = (names[..names.len().min(3)].join(", "), names.len().saturating_sub(3));
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{problem}: it has {first}{more}; give a text file (.txt) or a .jsonl file")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_data_says_what_was_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let message = || not_a_token_store(folder.path()).unwrap();
        assert!(message().contains("it has no 00000.tokens: it is empty; give a text file"), "{}", message());
        for name in ["d", "c", "a.md", "b.py"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        assert!(
            message().contains("it has no 00000.tokens: it has a.md, b.py, c and 1 more; give a text file"),
            "{}",
            message()
        );
        let file = folder.path().join("wiki.txt");
        std::fs::write(&file, "").unwrap();
        assert!(
            message().ends_with(&format!("; name one of its files, as --data {}", file.display())),
            "{}",
            message()
        );
    }
}
