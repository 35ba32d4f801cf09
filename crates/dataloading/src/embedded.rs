//! The project's own small data sets, which are committed in `data/`.
//!
//! They make every experiment and test work offline: an encyclopedia-like corpus in WikiText's format with WikiText-2's
//! spread of line lengths, word problems in GSM8K's format, a byte-level BPE trained on both, and a smaller world of problems
//! and stories that a small model can learn. All of it is about an invented world.
//!
//! ```
//! use dataloading::Tokenizer;
//! use dataloading::embedded;
//!
//! let folder = embedded::folder()?;
//! let tokenizer = Tokenizer::from_file(&folder.join(embedded::TOKENIZER))?;
//! assert_eq!(tokenizer.vocabulary(), 4096);
//! # Ok::<(), dataloading::Error>(())
//! ```

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Training articles, within the folder.
pub const CORPUS_TRAIN: &str = "corpus/train.txt";
/// Validation articles: others than those of training.
pub const CORPUS_VALID: &str = "corpus/valid.txt";
/// Training word problems.
pub const PROBLEMS_TRAIN: &str = "word-problems/train.jsonl";
/// Test word problems: others than those of training.
pub const PROBLEMS_TEST: &str = "word-problems/test.jsonl";
/// Training problems of two steps with small numbers, which a model of a million parameters can learn in a minute.
pub const SMALL_PROBLEMS_TRAIN: &str = "small-problems/train.jsonl";
/// Test problems of that kind: a template's three numbers are in no training problem and no story.
pub const SMALL_PROBLEMS_TEST: &str = "small-problems/test.jsonl";
/// Stories about the same world, with their calculations and without questions, and lists of calculations: paragraphs to
/// pretrain on.
pub const SMALL_STORIES: &str = "small-problems/stories.txt";
/// The tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";

/// The environment variable with the folder of the data sets, for programs that run on another machine than the one that built them.
pub const VARIABLE: &str = "FRUGAL_EMBEDDED";

/// `data/` of the sources. A program for other machines has no path of this one: `cargo xtask release` sets the variable.
const SOURCES: Option<&str> = match option_env!("FRUGAL_RELOCATABLE") {
    Some(_) => None,
    None => Some(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data")),
};

/// Returns the folder of the data sets. The first of these that has them is returned: the folder in `FRUGAL_EMBEDDED`, which is then the only
/// one; `data/` of the sources that this program was built from; `data/` in the executable's folder, or in one of the two folders above
/// it, as a bundle has it.
///
/// # Errors
/// None of these folders has the data.
pub fn folder() -> Result<PathBuf> {
    let has_data = |folder: &Path| folder.join(TOKENIZER).is_file();
    if let Some(named) = std::env::var_os(VARIABLE) {
        let named = PathBuf::from(named);
        if has_data(&named) {
            return Ok(named);
        }
        return Err(Error::File {
            path: named,
            reason: format!(
                "{VARIABLE} names this folder, but it has no {TOKENIZER}; name the project's data folder"
            ),
        });
    }
    let executable = std::env::current_exe().unwrap_or_default();
    let beside = executable.ancestors().skip(1).take(3).map(|folder| folder.join("data"));
    let mut candidates = SOURCES.map(PathBuf::from).into_iter().chain(beside);
    candidates.find(|folder| has_data(folder)).ok_or_else(|| Error::Empty {
        from: "embedded data".into(),
        reason: format!(
            "there is no data folder with the sources or beside the program; set {VARIABLE} to the project's data folder"
        ),
    })
}
