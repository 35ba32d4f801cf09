//! FLOPs of matrix products, and of the layers composed of them.
//!
//! A product `[m, k] · [k, n]` is `m·n` sums of `k` products: `2·m·k·n` FLOPs, counting an addition and a
//! multiplication as one each. Its backward is two products of the same size, `dA = dC·Bᵀ` and `dB = Aᵀ·dC`: twice the
//! forward, unless one of the two gradients is not needed.
//!
//! **Not counted**, as in every published count: additions of biases and residuals, norms, activation functions,
//! softmax, dropout, rotary positions, the loss, the optimizer's step. They are linear in the activations, without
//! the factor `k`, and are bound by memory bandwidth. **Zero**: an embedding is a lookup.
//!
//! **Attention** has two products without weights, `Q·Kᵀ` and `P·V`. A causal mask keeps `t·(t+1)/2` of the `t²` pairs:
//! [`Convention::Dense`] counts all pairs (PyTorch's `FlopCounterMode`, PaLM, Megatron), and [`Convention::Causal`]
//! those that are not masked (which a flash kernel computes, up to its tiles). Reports here give both.
//!
//! Sources: CS336 lecture 2; Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.

use crate::exact::wide_product;
use crate::{Error, exact};

/// `batch` products of `[rows, inner] · [inner, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixProduct {
    /// Number of independent products.
    pub batch: u64,
    /// Rows of the left factor, `m`.
    pub rows: u64,
    /// Columns of the left factor and rows of the right one, `k`.
    pub inner: u64,
    /// Columns of the right factor, `n`.
    pub columns: u64,
}

impl MatrixProduct {
    /// Returns one product `[rows, inner] · [inner, columns]`.
    pub const fn new(rows: u64, inner: u64, columns: u64) -> Self {
        Self { batch: 1, rows, inner, columns }
    }

    /// Returns the FLOPs of the product, `2·batch·m·k·n`.
    ///
    /// ```
    /// use accounting::flops::MatrixProduct;
    /// assert_eq!(MatrixProduct::new(1024, 256, 64).flops()?, 2 * 1024 * 256 * 64);
    /// # Ok::<(), accounting::Error>(())
    /// ```
    pub fn flops(self) -> Result<u128, Error> {
        wide_product("FLOPs of a matrix product", &[2, self.batch, self.rows, self.inner, self.columns])
    }

    /// Returns the FLOPs of the gradients of those factors that need one.
    pub fn backward_flops(self, left_needs_grad: bool, right_needs_grad: bool) -> Result<u128, Error> {
        let one = self.flops()?;
        let count = u128::from(left_needs_grad) + u128::from(right_needs_grad);
        one.checked_mul(count).ok_or_else(|| Error::Overflow {
            what: "FLOPs of a backward pass",
            bits: 128,
            terms: format!("{count} × {one}"),
        })
    }
}

/// The pairs of positions that count in an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Convention {
    /// All pairs, masked or not.
    Dense,
    /// The pairs that a causal mask keeps.
    Causal,
}

/// The part of an attention without weights: `Q·Kᵀ` and `P·V` of a sequence with itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionCore {
    /// Sequences.
    pub batch: u64,
    /// Positions of each sequence.
    pub sequence: u64,
    /// Query heads. Sharing keys and values between heads saves no FLOPs.
    pub heads: u64,
    /// Width of a head.
    pub head_dim: u64,
}

impl AttentionCore {
    /// Returns the FLOPs of `Q·Kᵀ` with a window of w tokens: w pairs per query, or those that a causal mask keeps of them.
    ///
    /// # Errors
    /// More than 128 bits.
    pub fn windowed_score_flops(self, window: u64, convention: Convention) -> Result<u128, Error> {
        let Self { batch, sequence, heads, head_dim } = self;
        let Some(beyond) = sequence.checked_sub(window).filter(|&beyond| beyond > 0) else {
            return self.score_flops(convention);
        };
        match convention {
            Convention::Dense => {
                wide_product("FLOPs of an attention", &[2, batch, heads, sequence, window, head_dim])
            }
            // The first w queries as without a window, the others with w keys each.
            Convention::Causal => {
                let first = Self { sequence: window, ..self }.score_flops(convention)?;
                let rest =
                    wide_product("FLOPs of an attention", &[2, batch, heads, beyond, window, head_dim])?;
                exact::wide_sum("FLOPs of an attention", [first, rest])
            }
        }
    }

    /// Returns the FLOPs of `Q·Kᵀ`, `2·b·h·pairs·k`, which `P·V` equals.
    pub fn score_flops(self, convention: Convention) -> Result<u128, Error> {
        let Self { batch, sequence, heads, head_dim } = self;
        match convention {
            Convention::Dense => {
                let product = MatrixProduct {
                    batch: exact::product("batch × heads", &[batch, heads])?,
                    rows: sequence,
                    inner: head_dim,
                    columns: sequence,
                };
                product.flops()
            }
            // 2 · t·(t+1)/2 = t·(t+1), without a fraction.
            Convention::Causal => {
                let next = exact::sum("sequence + 1", [sequence, 1])?;
                wide_product("FLOPs of an attention", &[batch, heads, sequence, next, head_dim])
            }
        }
    }

    /// Returns the FLOPs of the forward, `4·b·h·pairs·k`.
    pub fn forward_flops(self, convention: Convention) -> Result<u128, Error> {
        let scores = self.score_flops(convention)?;
        exact::wide_sum("FLOPs of an attention", [scores, scores])
    }

    /// Returns the FLOPs of the backward's four products (gradients of Q, K, P and V), `8·b·h·pairs·k`.
    pub fn backward_flops(self, convention: Convention) -> Result<u128, Error> {
        let forward = self.forward_flops(convention)?;
        exact::wide_sum("FLOPs of an attention's backward", [forward, forward])
    }
}

/// Returns the forward FLOPs of `tokens` through a SwiGLU layer, `(SiLU(xW) ⊙ xV)·U`: `6·T·d·f`.
pub fn swiglu(tokens: u64, hidden: u64, feed_forward: u64) -> Result<u128, Error> {
    wide_product("FLOPs of a SwiGLU layer", &[6, tokens, hidden, feed_forward])
}

/// Returns the forward FLOPs of the output projection to `vocabulary` logits: `2·T·d·v`.
pub fn logits(tokens: u64, hidden: u64, vocabulary: u64) -> Result<u128, Error> {
    MatrixProduct::new(tokens, hidden, vocabulary).flops()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flops_of_a_product_equal_those_of_a_loop() {
        let (m, k, n) = (3, 5, 7);
        let mut operations = 0u128;
        for _ in 0..m * n {
            operations += 2 * k;
        }
        let product = MatrixProduct::new(m as u64, k as u64, n as u64);
        assert_eq!(product.flops().unwrap(), operations);
        assert_eq!(product.backward_flops(true, true).unwrap(), 2 * operations);
        assert_eq!(product.backward_flops(false, true).unwrap(), operations);
        assert_eq!(product.backward_flops(false, false).unwrap(), 0);
    }

    #[test]
    fn causal_attention_counts_unmasked_pairs() {
        let core = AttentionCore { batch: 2, sequence: 9, heads: 3, head_dim: 4 };
        let pairs = (0..9).flat_map(|query| (0..9).filter(move |key| *key <= query)).count() as u128;
        assert_eq!(core.score_flops(Convention::Causal).unwrap(), 2 * 2 * 3 * 4 * pairs);
        assert_eq!(core.score_flops(Convention::Dense).unwrap(), 2 * 2 * 3 * 4 * 81);
        let forward = core.forward_flops(Convention::Dense).unwrap();
        assert_eq!(core.backward_flops(Convention::Dense).unwrap(), 2 * forward);
        // A flash kernel's backward recomputes the scores: 2.5 times the forward.
        let with_flash =
            core.backward_flops(Convention::Dense).unwrap() + core.score_flops(Convention::Dense).unwrap();
        assert_eq!(2 * with_flash, 5 * forward);
    }

    #[test]
    fn a_window_counts_the_pairs_within_it() {
        let core = AttentionCore { batch: 2, sequence: 9, heads: 3, head_dim: 4 };
        for window in [1, 2, 8, 9, 20] {
            let kept = |query: u64| (0..9).filter(move |key| *key <= query && query - key < window);
            let pairs = (0..9).flat_map(kept).count() as u128;
            let causal = core.windowed_score_flops(window, Convention::Causal).unwrap();
            assert_eq!(causal, 2 * 2 * 3 * 4 * pairs, "{window}");
            let dense = core.windowed_score_flops(window, Convention::Dense).unwrap();
            assert_eq!(dense, 2 * 2 * 3 * 4 * 9 * u128::from(window.min(9)), "{window}");
        }
    }

    #[test]
    fn flops_of_layers_are_sums_over_their_products() {
        // 2·m·k·n each.

        assert_eq!(swiglu(10, 6, 16).unwrap(), 3 * 1920);
        assert_eq!(logits(10, 6, 99).unwrap(), 11_880);
        assert!(swiglu(u64::MAX, u64::MAX, 2).is_err());
    }
}
