//! The seeded generator of the data sets in `data/`: the same seed gives the same bytes on every machine.
//!
//! An encyclopedia-like corpus in WikiText's format with WikiText-2's spread of line lengths, word problems in GSM8K's format, a
//! byte-level BPE trained on both, and a smaller world of problems and stories that a small model can learn. All of it is
//! about an invented world.

mod articles;
mod facts;
mod grammar;
mod random;
mod small_problems;
mod word_problems;
mod world;

use std::collections::BTreeSet;
use std::path::Path;

use dataloading::embedded::{
    CORPUS_TRAIN, CORPUS_VALID, PROBLEMS_TEST, PROBLEMS_TRAIN, SMALL_PROBLEMS_TEST, SMALL_PROBLEMS_TRAIN,
    SMALL_STORIES, TOKENIZER,
};
use dataloading::tokenizer::{Tokenizer, TrainOptions};
use dataloading::{Error, Result};
use random::Random;
use world::World;

/// The seed of the files in `data/`.
pub const SEED: u64 = 20_250_919;

const TRAIN_BYTES: usize = 1_150_000;
const VALID_BYTES: usize = 120_000;
const SMALL_TRAIN: usize = 1200;
const SMALL_TEST: usize = 200;
const STORY_PARAGRAPHS: usize = 4500;

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
