//! Activations of a GPT block by the formulas of Korthikanti et al., "Reducing activation recomputation in large
//! transformer models", arXiv:2205.05198, section 4: 16-bit activations, dropout on, attention not fused, `f = 4·h`.
//!
//! For sequence `s`, batch `b`, hidden `h`, heads `a`, in bytes per block:
//!
//! ```text
//! none       s·b·h·(34 + 5·a·s/h) = 34·s·b·h + 5·a·b·s²
//! selective  34·s·b·h               the attention's core is recomputed
//! full       2·s·b·h                only the block's input is kept
//! ```
//!
//! [`activations`](super::activations) lists the same tensors one by one, for other blocks too; the two agree to the
//! byte where the formulas apply (except for the norms' statistics, which the paper omits).

use crate::decoder_flops::Workload;
use crate::recompute::Recompute;
use crate::{Error, exact};

/// Returns the bytes per block that are kept for the backward.
pub fn block_bytes(work: Workload, hidden: u64, heads: u64, choice: Recompute) -> Result<u64, Error> {
    const WHAT: &str = "bytes of a block's activations";
    let tokens = work.tokens()?;
    let linear = |factor| exact::product(WHAT, &[factor, tokens, hidden]);
    match choice {
        Recompute::None => {
            exact::sum(WHAT, [linear(34)?, exact::product(WHAT, &[5, heads, tokens, work.sequence])?])
        }
        Recompute::Selective => linear(34),
        Recompute::Full => linear(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Table 3 and section 5 of the paper: for GPT-3 (a = 96, s = 2048, h = 12288) 5as/h is 80, so that the core of
    /// attention holds 70 % of the activations; for MT-NLG (a = 128, h = 20480) 64 and 65 %.
    #[test]
    fn share_of_attention_in_gpt_3_and_mt_nlg() {
        let share = |heads, hidden| {
            let bytes = |choice| {
                block_bytes(Workload { batch: 1, sequence: 2048 }, hidden, heads, choice).unwrap() as f64
            };
            let percent = 100.0 * (1.0 - bytes(Recompute::Selective) / bytes(Recompute::None));
            percent.round()
        };
        assert_eq!((share(96, 12288), share(128, 20480)), (70.0, 65.0));
    }
}
