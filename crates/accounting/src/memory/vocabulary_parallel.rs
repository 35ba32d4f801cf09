//! The memory of a vocabulary-parallel cross-entropy: each of R ranks has v/R rows of the output matrix `[v, d]`, and all n tokens (Shoeybi
//! et al., arXiv:1909.08053, section 3; here the logits are computed in tiles of t tokens). Bytes per rank, with c bytes per element of a
//! product:
//!
//! ```text
//! tile of logits                       4·t·v/R     in fp32, overwritten by its gradient
//! output matrix, and its gradient      v·d/R       elements each, in their dtypes; and a fp32 accumulator if the gradient is narrower
//! statistics of the tokens             12·n        largest logit, sum of exponentials, and the target's logit, in fp32
//! gradient of the hidden states        c·n·d       a sum over the ranks
//! ```
//!
//! Only the last two are reduced over the ranks: neither logits nor gradients of the matrix are sent. To reduce B bytes, each rank of a ring
//! sends 2·(R − 1)/R·B (Patarasuk & Yuan 2009).

use crate::decoder_flops::Workload;
use crate::exact::{positive, product};
use crate::memory::recipe::Recipe;
use crate::model::Decoder;
use crate::{Dtype, Error};

/// Bytes of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankBytes {
    /// The tile of logits.
    pub tile: u64,
    /// The rank's rows of the output matrix.
    pub matrix: u64,
    /// The gradient of these rows.
    pub matrix_gradient: u64,
    /// The gradient's accumulator, if it is wider than the gradient.
    pub accumulator: u64,
    /// The gradient of the hidden states.
    pub hidden_gradient: u64,
    /// The statistics of all tokens that are reduced over the ranks.
    pub statistics: u64,
}

impl RankBytes {
    /// Returns the bytes that are reduced over the ranks in a step.
    ///
    /// # Errors
    /// Bytes beyond 64 bits.
    pub fn reduced(&self) -> Result<u64, Error> {
        crate::exact::sum("bytes reduced over the ranks", [self.statistics, self.hidden_gradient])
    }
}

/// Returns the bytes of the rank with the most rows, with tiles of `tile` tokens. All tokens of `work` count as labelled.
///
/// # Errors
/// No ranks, no tokens, bytes beyond 64 bits.
pub fn rank_bytes(
    model: &Decoder,
    work: Workload,
    recipe: &Recipe,
    tile: u64,
    ranks: u64,
) -> Result<RankBytes, Error> {
    /// A maximum, a sum and a target's logit, in fp32.
    const STATISTICS: u64 = 12;
    let (tokens, c) = (work.tokens()?, recipe.compute.storage_bits() / 8);
    let rows = model.vocabulary.div_ceil(positive("ranks", ranks)?);
    let tile = positive("tokens of a tile of logits", tile)?.min(tokens);
    let elements = product("elements of the output matrix", &[rows, model.hidden])?;
    Ok(RankBytes {
        tile: product("bytes of a tile of logits", &[4, tile, rows])?,
        matrix: recipe.parameters.bytes(elements)?,
        matrix_gradient: recipe.gradients.bytes(elements)?,
        accumulator: if recipe.gradients == Dtype::Fp32 { 0 } else { Dtype::Fp32.bytes(elements)? },
        hidden_gradient: product("bytes of the hidden states' gradient", &[c, tokens, model.hidden])?,
        statistics: product("bytes of the tokens' statistics", &[STATISTICS, tokens])?,
    })
}

/// Returns the bytes that each of `ranks` sends while a ring reduces `bytes`.
///
/// # Errors
/// No ranks, bytes beyond 64 bits.
pub fn ring_sends(bytes: u64, ranks: u64) -> Result<u64, Error> {
    let ranks = positive("ranks", ranks)?;
    product("bytes that a ring sends", &[2, bytes.div_ceil(ranks), ranks - 1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn each_rank_has_its_rows_and_all_tokens() {
        let model = presets::find("llama-3-8b").unwrap();
        let work = Workload { batch: 4, sequence: 20_480 };
        let bytes = |ranks| rank_bytes(&model, work, &Recipe::BF16, 1024, ranks).unwrap();
        let [one, two] = [1, 2].map(bytes);
        assert_eq!(one.tile, 4 * 1024 * 128_256);
        assert_eq!(2 * two.tile, one.tile);
        assert_eq!(2 * two.matrix, one.matrix);
        assert_eq!([one.matrix_gradient, one.accumulator], [one.matrix, 2 * one.matrix]);
        assert_eq!((two.statistics, two.hidden_gradient), (12 * 81_920, 2 * 81_920 * 4096));
        assert_eq!(two.reduced().unwrap(), two.statistics + two.hidden_gradient);
        assert_eq!(ring_sends(1000, 2).unwrap(), 1000);
        assert_eq!(ring_sends(1000, 1).unwrap(), 0);
        assert!(rank_bytes(&model, work, &Recipe::BF16, 1024, 0).is_err());
    }
}
