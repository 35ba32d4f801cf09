//! Real problems, where there are some, and the embedded tokenizer.
#![allow(dead_code, reason = "each test file takes what it needs")]

use std::path::PathBuf;
use std::sync::OnceLock;

use dataloading::Tokenizer;
use frugal::tasks::gsm8k::{Annotations, Problem, records};

/// The problems of a file of GSM8K in the folder that `FRUGAL_DATA` names.
pub(crate) fn real(file: &str) -> Option<Vec<Problem>> {
    let path = std::env::var_os("FRUGAL_DATA").map(|folder| PathBuf::from(folder).join("gsm8k").join(file));
    match path.filter(|path| path.is_file()) {
        Some(path) => Some(records::read(&path, Annotations::Keep).unwrap()),
        None => {
            eprintln!("skipped: set FRUGAL_DATA to a folder that has gsm8k/{file}");
            None
        }
    }
}

/// A file of the project's own data.
pub(crate) fn embedded(name: &str) -> PathBuf {
    dataloading::embedded::folder().unwrap().join(name)
}

/// The embedded byte-level BPE of 4096 ids.
pub(crate) fn tokenizer() -> Tokenizer {
    Tokenizer::from_file(&embedded("tokenizer.json")).unwrap()
}

/// The same, read once.
pub(crate) fn tokenizer_once() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(tokenizer)
}

/// The embedded test problems.
pub(crate) fn problems() -> Vec<Problem> {
    records::read(&embedded("word-problems/test.jsonl"), Annotations::Keep).unwrap()
}
