//! FLOPs of linear attention's gated delta rule, as `kernels::delta_rule` computes it: by chunks of n tokens, with H_k heads of keys of
//! width K and H_v heads of values of width V.
//!
//! | products of a chunk | for each key head | for each value head |
//! |---|---|---|
//! | forward | KKᵀ, QKᵀ: 2·2n²K | [K; Q]S, K̂ᵀN: 3·2nKV; A·diag(β)(…), PN: 2·2n²V; A by blocks |
//! | recomputed in backward | KKᵀ, QKᵀ: 2·2n²K | KS, K̂ᵀN: 2·2nKV; A·diag(β)(…): 2n²V; A by blocks |
//! | backward | GK, GᵀQ, (F + Fᵀ)K: 3·2n²K | dO·Sᵀ, RSᵀ, N·dS′ᵀ, K̂dS′, Qᵀ(…), Kᵀ(…): 6·2nKV; PᵀdO, AᵀdN, dO·Nᵀ, RNᵀ: 4·2n²V |
//!
//! A is made of blocks: two of s rows become one of 2s by two products of s³, from 2 rows on. The pairs of a chunk are all computed, so the conventions of attention do not differ. The last chunk is filled up.

use decoder::LinearSizes;

use crate::decoder_flops::Workload;
use crate::exact::{wide_product, wide_sum};
use crate::{Error, exact};

/// Maximum number of tokens of a chunk.
const CHUNK: u64 = 64;
/// Rows of the first blocks.
const BLOCK: u64 = 2;

/// FLOPs of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleFlops {
    /// Forward.
    pub forward: u128,
    /// Backward, without recomputation.
    pub backward: u128,
    /// Recomputation in the backward.
    pub recomputed: u128,
}

/// Returns the FLOPs of one layer over `work`.
///
/// # Errors
/// More than 128 bits.
pub fn layer(linear: &LinearSizes, work: Workload) -> Result<RuleFlops, Error> {
    work.tokens()?;
    let n = work.sequence.checked_next_power_of_two().unwrap_or(CHUNK).min(CHUNK);
    let chunks = exact::product("chunks of a batch", &[work.batch, work.sequence.div_ceil(n)])?;
    let LinearSizes { key_heads, value_heads, key, value, .. } = *linear;
    let product = |count: u64, heads: u64, sizes: [u64; 3]| {
        let [m, inner, columns] = sizes;
        wide_product("FLOPs of the delta rule", &[2, count, chunks, heads, m, inner, columns])
    };
    let (of_keys, of_states, of_values) = ([n, key, n], [n, key, value], [n, n, value]);
    let sizes = std::iter::successors(Some(BLOCK), |block| Some(2 * block)).take_while(|block| *block < n);
    let blocks = sizes.map(|block| product(2, value_heads, [n / (2 * block) * block, block, block]));
    let inverse = wide_sum("FLOPs of the delta rule", blocks.collect::<Result<Vec<_>, _>>()?)?;
    // Numbers of products that are as wide as keys, states and values.
    let sum = |keys: u64, states: u64, values: u64, inverse: u128| {
        wide_sum(
            "FLOPs of the delta rule",
            [
                product(keys, key_heads, of_keys)?,
                product(states, value_heads, of_states)?,
                product(values, value_heads, of_values)?,
                inverse,
            ],
        )
    };
    Ok(RuleFlops {
        forward: sum(2, 3, 2, inverse)?,
        backward: sum(3, 6, 4, 0)?,
        recomputed: sum(2, 2, 1, inverse)?,
    })
}
