//! Sequence parallelism: what ranks that divide each row send each other (Ulysses).
//!
//! Each of C ranks has t/C tokens of a row of t. Before attention it sends its tokens' queries, keys and values to the ranks that attend with
//! those heads, and after it the output's heads come back. With h query heads, g' key heads that are sent and e numbers per head, a rank
//! sends in one pass of a layer over b rows
//!
//! (C − 1)/C · b·t/C · (2h + 2g') · e
//!
//! numbers, and in the backward as many once more. g' is the least multiple of the g key heads that C divides and that divides h. What a
//! rank keeps of a layer is 1/C of what one process keeps, with the repeated keys and a copy of attention's output.
//!
//! Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.

use crate::decoder_flops::Workload;
use crate::exact::product;
use crate::{Decoder, Dtype, Error};

/// Returns g', how many key heads are sent.
///
/// # Errors
/// Ranks that do not divide the query heads.
///
/// ```
/// use accounting::sequence_parallel::sent_key_heads;
///
/// assert_eq!(sent_key_heads(32, 8, 16)?, 16);
/// assert!(sent_key_heads(32, 8, 64).is_err());
/// # Ok::<(), accounting::Error>(())
/// ```
pub fn sent_key_heads(heads: u64, kv_heads: u64, ranks: u64) -> Result<u64, Error> {
    decoder::sent_key_heads(heads, kv_heads, ranks).ok_or_else(|| Error::Shape {
        what: format!("{ranks} ranks do not divide {heads} attention heads"),
        remedy: format!("divide each row among a divisor of {heads} ranks"),
    })
}

/// Returns one rank's part of rows that `ranks` divide: as many rows, of ⌈t/C⌉ tokens.
pub fn part(work: Workload, ranks: u64) -> Workload {
    Workload { sequence: work.sequence.div_ceil(ranks.max(1)), ..work }
}

/// Returns the bytes that a rank sends in one forward of a layer over whole rows `work`, in `dtype`; in its backward as many.
///
/// # Errors
/// Ranks that do not divide the query heads; counts beyond 64 bits.
pub fn sent_bytes(model: &Decoder, work: Workload, dtype: Dtype, ranks: u64) -> Result<u64, Error> {
    if ranks <= 1 {
        return Ok(0);
    }
    let heads = 2 * (model.heads + sent_key_heads(model.heads, model.kv_heads, ranks)?);
    let numbers = product("numbers that are sent", &[part(work, ranks).tokens()?, heads, model.head_dim])?;
    dtype.bytes(numbers / ranks * (ranks - 1))
}
