//! The logits and what the cross-entropy makes of them: the largest tensors of a small model with a large vocabulary.
//!
//! Per token and vocabulary entry, composed of framework operations (`c` bytes in matrix products):
//!
//! ```text
//! logits                                 c    held by the caller until the step ends
//! a copy in fp32                         4    only if c < 4; gone when the loss is there
//! log-probabilities                      4    kept for the backward
//! gradient of the log-probabilities      4    backward only
//! gradient of the logits                 4    backward only
//! ```
//!
//! The peak is in the backward, `c + 12`: 16 bytes in fp32, 14 in 16 bits. A loss computed in chunks of tokens has
//! this for one chunk only, and keeps the gradient of the hidden states instead.

use crate::decoder_flops::Workload;
use crate::exact::positive;
use crate::memory::Item;
use crate::model::Decoder;
use crate::{Dtype, Error};

/// How the loss is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Loss {
    /// All logits, then the cross-entropy, composed of framework operations.
    #[default]
    Eager,
    /// Output projection and loss for so many tokens at a time, gradients in the same pass.
    Chunked {
        /// Tokens of a chunk.
        tokens: u64,
    },
}

/// Logits, loss temporaries and their gradients at their peak, when the backward starts.
pub fn peak(model: &Decoder, work: Workload, compute: Dtype, loss: Loss) -> Result<Vec<Item>, Error> {
    let (tokens, c) = (work.tokens()?, compute.storage_bits() / 8);
    let rows = match loss {
        Loss::Eager => tokens,
        Loss::Chunked { tokens: chunk } => positive("tokens of a chunk of logits", chunk)?.min(tokens),
    };
    let size = [rows, model.vocabulary];
    let mut items = vec![
        Item::new("logits", c, &size)?,
        Item::new("log-probabilities", 4, &size)?,
        Item::new("gradient of the log-probabilities", 4, &size)?,
        Item::new("gradient of the logits", 4, &size)?,
    ];
    if loss != Loss::Eager {
        items.push(Item::new("gradient of the hidden states", c, &[tokens, model.hidden])?);
    }
    Ok(items)
}

/// What stays while the blocks' backward runs: the logits that the caller still holds, or the gradient of the hidden
/// states.
pub fn held(model: &Decoder, work: Workload, compute: Dtype, loss: Loss) -> Result<Vec<Item>, Error> {
    let (tokens, c) = (work.tokens()?, compute.storage_bits() / 8);
    let item = match loss {
        Loss::Eager => Item::new("logits", c, &[tokens, model.vocabulary])?,
        Loss::Chunked { .. } => Item::new("gradient of the hidden states", c, &[tokens, model.hidden])?,
    };
    Ok(vec![item])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::total;
    use crate::presets;

    #[test]
    fn bytes_per_token_and_entry() {
        let model = presets::find("gpt2").unwrap();
        let work = Workload { batch: 2, sequence: 512 };
        let bytes = |dtype, loss| total(&peak(&model, work, dtype, loss).unwrap()).unwrap();
        assert_eq!(bytes(Dtype::Fp32, Loss::Eager), 16 * 1024 * 50257);
        assert_eq!(bytes(Dtype::Bf16, Loss::Eager), 14 * 1024 * 50257);
        let chunked = Loss::Chunked { tokens: 256 };
        assert_eq!(bytes(Dtype::Bf16, chunked), 14 * 256 * 50257 + 2 * 1024 * 768);
        let larger_than_all = Loss::Chunked { tokens: 1 << 40 };
        assert_eq!(bytes(Dtype::Bf16, larger_than_all), 14 * 1024 * 50257 + 2 * 1024 * 768);
        assert!(peak(&model, work, Dtype::Bf16, Loss::Chunked { tokens: 0 }).is_err());
    }
}
