//! Small data sets of the project's own, written by a seeded generator and kept in `data/`.
//!
//! They make every experiment and test work offline: an encyclopedia-like corpus in WikiText's format with WikiText-2's
//! spread of line lengths, word problems in GSM8K's format, a byte-level BPE trained on both, and a smaller world of problems
//! and stories that a small model can learn. All of it is about an invented world. The same seed gives the same bytes on every machine.
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

mod articles;
mod facts;
mod grammar;
mod random;
mod small_problems;
mod word_problems;
mod world;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::tokenizer::{Tokenizer, TrainOptions};
use random::Random;
use world::World;

/// The seed of the files in `data/`.
pub const SEED: u64 = 20_250_919;

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

/// A folder that holds the data sets, for programs that lie elsewhere than they were built.
pub const VARIABLE: &str = "FRUGAL_EMBEDDED";

const TRAIN_BYTES: usize = 1_150_000;
const VALID_BYTES: usize = 120_000;
const SMALL_TRAIN: usize = 1200;
const SMALL_TEST: usize = 200;
const STORY_PARAGRAPHS: usize = 4500;

/// The folder of the data sets: the one that `FRUGAL_EMBEDDED` names; else `data/` of the sources that this program was
/// built from; else `data/` beside the folder of the executable, as a bundle has it, or beside the executable.
///
/// # Errors
/// None of them holds the data.
pub fn folder() -> Result<PathBuf> {
    let holds = |folder: &Path| folder.join(TOKENIZER).is_file();
    if let Some(named) = std::env::var_os(VARIABLE) {
        let named = PathBuf::from(named);
        if holds(&named) {
            return Ok(named);
        }
        return Err(Error::File {
            path: named,
            reason: format!(
                "{VARIABLE} names this folder, but it has no {TOKENIZER}; name the project's data folder"
            ),
        });
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data");
    let executable = std::env::current_exe().unwrap_or_default();
    let above = executable.ancestors().skip(1).take(3).map(|folder| folder.join("data"));
    let mut candidates = std::iter::once(sources).chain(above);
    candidates.find(|folder| holds(folder)).ok_or_else(|| Error::Empty {
        from: "embedded data".into(),
        reason: format!(
            "there is no data folder with the sources or beside the program; set {VARIABLE} to the project's data folder"
        ),
    })
}

/// The data sets of a seed: names within the folder, and contents.
///
/// # Errors
/// None that depends on the seed: those of training a tokenizer.
pub fn generate(seed: u64) -> Result<Vec<(&'static str, String)>> {
    let random = Random::new(seed);
    let world = World::new(&mut random.fork(1));
    let mut titles = BTreeSet::new();
    let corpus_train = articles::corpus(&world, &random.fork(2), TRAIN_BYTES, &mut titles);
    let corpus_valid = articles::corpus(&world, &random.fork(3), VALID_BYTES, &mut titles);
    let mut questions = BTreeSet::new();
    let problems_train = word_problems::problems(&random.fork(4), 2000, &mut questions);
    let problems_test = word_problems::problems(&random.fork(5), 300, &mut questions);
    let problems = problems_train.lines().map(|line| {
        let problem: serde_json::Value =
            serde_json::from_str(line).map_err(|error| Error::Tokenizer(error.to_string()))?;
        let field = |name: &str| problem[name].as_str().unwrap_or_default().to_owned();
        Ok(format!("{}\n{}", field("question"), field("answer")))
    });
    let texts = corpus_train.lines().map(|line| Ok(format!("{line}\n"))).chain(problems);
    let mut questions = BTreeSet::new();
    let small_train = small_problems::problems(&random.fork(6), SMALL_TRAIN, false, &mut questions);
    let small_test = small_problems::problems(&random.fork(7), SMALL_TEST, true, &mut questions);
    let small_stories = small_problems::stories(&random.fork(8), STORY_PARAGRAPHS);
    let tokenizer = Tokenizer::train_json(texts, &TrainOptions::default())?;
    Ok(vec![
        (CORPUS_TRAIN, corpus_train),
        (CORPUS_VALID, corpus_valid),
        (PROBLEMS_TRAIN, problems_train),
        (PROBLEMS_TEST, problems_test),
        (SMALL_PROBLEMS_TRAIN, small_train),
        (SMALL_PROBLEMS_TEST, small_test),
        (SMALL_STORIES, small_stories),
        (TOKENIZER, tokenizer),
    ])
}

/// Writes the data sets of `seed` into `folder`, replacing files of these names.
///
/// # Errors
/// A file cannot be written.
pub fn write(folder: &Path, seed: u64) -> Result<()> {
    for (name, content) in generate(seed)? {
        let path = folder.join(name);
        let io = |cause| Error::Io { path: path.clone(), cause };
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(io)?;
        }
        std::fs::write(&path, content).map_err(io)?;
    }
    Ok(())
}
