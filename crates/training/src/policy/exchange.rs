//! Answers and rewards of all ranks, from those of each.

use std::ops::Range;

use models::generation::{FinishReason, Generated};
use runtime::collectives::{Group, ReduceConfig};
use tch::Tensor;

use crate::error::Result;

/// Returns the prompts of a rank, of `count`: consecutive ones, as many as the others have, or one more or less.
pub(super) fn of_rank(count: usize, group: &Group) -> Range<usize> {
    let from = |rank: usize| rank * count / group.size();
    from(group.rank())..from(group.rank() + 1)
}

/// The answers of a rank.
pub(super) struct Answered {
    pub(super) answers: Vec<Generated>,
    pub(super) rewards: Vec<f64>,
    /// The number of the first one among those of all ranks.
    pub(super) first: usize,
}

/// Numbers of an answer before its tokens: their count, and 1 + its end token, or 0.
const BEFORE: usize = 2;

impl Answered {
    /// Returns the answers of all ranks, `count` of at most `longest` tokens, and their rewards. Each rank's are a part of a table that is
    /// zero elsewhere, so their sum is exact.
    ///
    /// # Errors
    /// A rank that failed.
    pub(super) fn exchanged(
        self,
        count: usize,
        longest: usize,
        group: &Group,
    ) -> Result<(Vec<Generated>, Vec<f64>)> {
        let width = BEFORE + longest;
        let (mut table, mut rewards) = (vec![0_i64; count * width], vec![0.0; count]);
        let own = self.answers.iter().zip(self.rewards).enumerate();
        for (number, (answer, reward)) in own.map(|(number, own)| (self.first + number, own)) {
            let row = &mut table[number * width..(number + 1) * width];
            row[0] = answer.tokens.len() as i64;
            row[1] = answer.end_token.map_or(0, |token| token + 1);
            row[BEFORE..BEFORE + answer.tokens.len()].copy_from_slice(&answer.tokens);
            rewards[number] = reward;
        }
        let sum = |own: Tensor, label| group.all_reduce(&own, ReduceConfig::default(), label).map(|_| own);
        let table = Vec::<i64>::try_from(sum(Tensor::f_from_slice(&table)?, "answers")?)?;
        let rewards = Vec::<f64>::try_from(sum(Tensor::f_from_slice(&rewards)?, "rewards")?)?;
        let answer = |row: &[i64]| {
            let tokens = row[BEFORE..BEFORE + row[0] as usize].to_vec();
            let end_token = (row[1] > 0).then(|| row[1] - 1);
            let finish_reason = match end_token {
                Some(_) => FinishReason::EndToken,
                None if tokens.len() < longest => FinishReason::MaxSequence,
                None => FinishReason::MaxNewTokens,
            };
            Generated { tokens, end_token, finish_reason }
        };
        Ok((table.chunks(width).map(answer).collect(), rewards))
    }
}
