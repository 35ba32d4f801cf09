//! Commands as a shell reads them, for records and advice.

use std::path::Path;

/// Quotes a word for a shell.
pub(crate) fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Returns the command line of this process.
pub(crate) fn this_process() -> String {
    let words = std::env::args_os().skip(1).map(|word| shell_word(&word.to_string_lossy()));
    std::iter::once("frugal".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

/// Returns the command that trains a finished run further.
pub(crate) fn more_steps(out: &Path) -> String {
    format!("`frugal resume {} --set training.steps=N`", shell_word(&out.display().to_string()))
}
