//! The assignment's split of the training file: 90 % to train on, 5 % to test, 5 % to evaluate.
//!
//! It is `train_test_split(0.1, seed=42)`, whose test part is halved by `train_test_split(0.5, seed=42)`, of Hugging Face's
//! `datasets`: of `n` rows the first `⌈share·n⌉` of numpy's permutation are tested on, the others trained on. The orders are
//! the same too, so figures over these parts can be compared with those of the notebook. GSM8K's 7473 problems become 6725,
//! 374 and 374; its official test file is another one.

use super::error::{Error, Result};
use super::numpy_random::permutation;
use super::records::Problem;

/// The assignment's seed.
pub const SEED: u64 = 42;

/// Numbers of the problems to train on, and of those to test on.
///
/// # Errors
/// A share that is not between 0 and 1, or one that leaves a part empty.
pub fn train_test_split(count: usize, test_share: f64, seed: u64) -> Result<(Vec<usize>, Vec<usize>)> {
    let refuse = |reason: String| Err(Error::Config { what: "split", reason });
    if !(test_share > 0.0 && test_share < 1.0) {
        return refuse(format!("a test share of {test_share}; expected one between 0 and 1"));
    }
    let tested = (test_share * count as f64).ceil() as usize;
    let Some(rows) = u32::try_from(count).ok().filter(|_| tested < count) else {
        return refuse(format!(
            "{count} problems cannot be divided with a test share of {test_share}: a part would be empty; give more problems"
        ));
    };
    let mut order = permutation(rows, seed);
    let train = order.split_off(tested);
    Ok((train, order))
}

/// The three parts: numbers of problems in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// 90 %.
    pub train: Vec<usize>,
    /// 5 %: the notebook's `test_dataset`, the first part of the second split.
    pub test: Vec<usize>,
    /// 5 %: the notebook's `eval_dataset`.
    pub eval: Vec<usize>,
}

impl Split {
    /// Divides `count` problems.
    ///
    /// # Errors
    /// So few problems that a part would be empty.
    pub fn new(count: usize, seed: u64) -> Result<Self> {
        let (train, held_out) = train_test_split(count, 0.1, seed)?;
        let (test, eval) = train_test_split(held_out.len(), 0.5, seed)?;
        let numbers = |part: Vec<usize>| part.into_iter().map(|at| held_out[at]).collect();
        Ok(Self { train, test: numbers(test), eval: numbers(eval) })
    }
}

/// Returns the problems with these numbers, in this order. Numbers beyond the list are left out.
pub fn select(problems: &[Problem], numbers: &[usize]) -> Vec<Problem> {
    numbers.iter().filter_map(|number| problems.get(*number).cloned()).collect()
}
