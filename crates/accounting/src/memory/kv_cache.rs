//! Keys and values kept for generation: `2·L·a·b·s·n·k` elements (`L` layers of `a` attentions, `b` sequences of `s`
//! tokens, `n` key-value heads of width `k`). Grouped-query attention divides it by `heads / kv_heads`. A layer with linear attention keeps for
//! each sequence, however long, a state in fp32 and the last inputs of its convolution. A layer that attends to the keys of another keeps
//! nothing.
//!
//! ```
//! use accounting::{Dtype, decoder_flops::Workload, memory::kv_cache, presets};
//!
//! let one_token = Workload { batch: 1, sequence: 1 };
//! let llama = presets::find("llama-3-8b")?;
//! assert_eq!(kv_cache::bytes(&llama, one_token, Dtype::Bf16)?, 128 * 1024);
//! # Ok::<(), accounting::Error>(())
//! ```

use crate::decoder_flops::{Workload, check_positions};
use crate::model::Decoder;
use crate::{Dtype, Error, exact};

/// Returns the bytes of the cache for `work.batch` sequences of `work.sequence` tokens.
pub fn bytes(model: &Decoder, work: Workload, dtype: Dtype) -> Result<u64, Error> {
    work.tokens()?;
    check_positions(model, work.sequence)?;
    let of_layers = |layers, kv_heads, head_dim| {
        exact::product(
            "elements of the key-value cache",
            &[2, layers, model.family.attentions(), work.batch, work.sequence, kv_heads, head_dim],
        )
    };
    let elements = match &model.gemma4 {
        None => {
            let layers = model.layers - model.linear.map_or(0, |linear| linear.layers);
            of_layers(layers, model.kv_heads, model.head_dim)?
        }
        Some(sizes) => {
            let kinds = model.layer_kinds(sizes).into_iter().filter(|kind| !kind.shares);
            let each: Result<Vec<u64>, Error> =
                kinds.map(|kind| of_layers(kind.layers, kind.kv_heads, kind.head_dim)).collect();
            exact::sum("elements of the key-value cache", each?)?
        }
    };
    let states = [dtype.bytes(elements)?, recurrent_bytes(model, work.batch, dtype)?];
    exact::sum("bytes of the cache", states)
}

/// Returns the bytes of the states of linear attention for `batch` sequences of any length: in fp32, and the inputs of convolutions in
/// `dtype`. 0 without linear attention.
///
/// # Errors
/// More than 64 bits of bytes.
pub fn recurrent_bytes(model: &Decoder, batch: u64, dtype: Dtype) -> Result<u64, Error> {
    let Some(linear) = model.linear else { return Ok(0) };
    let state = [4, batch, linear.layers, linear.value_heads, linear.key, linear.value];
    let window = [batch, linear.layers, linear.window - 1, linear.channels().unwrap_or(u64::MAX)];
    exact::sum(
        "bytes of the states of linear attention",
        [
            exact::product("bytes of the states of linear attention", &state)?,
            dtype.bytes(exact::product("inputs of the convolutions", &window)?)?,
        ],
    )
}

/// Returns the bytes of the keys and values of one token.
///
/// # Errors
/// More than 64 bits of bytes.
pub fn token_bytes(model: &Decoder, dtype: Dtype) -> Result<u64, Error> {
    Ok(bytes(model, Workload { batch: 1, sequence: 1 }, dtype)? - recurrent_bytes(model, 1, dtype)?)
}

/// Returns the number of tokens of one sequence whose keys and values fit `available` bytes together with the
/// parameters in the same format.
///
/// # Errors
/// More than 64 bits of bytes.
pub fn tokens_beside_parameters(model: &Decoder, dtype: Dtype, available: u64) -> Result<u64, Error> {
    let (token, states) = (token_bytes(model, dtype)?, recurrent_bytes(model, 1, dtype)?);
    let beside = exact::sum("bytes of parameters and states", [dtype.bytes(model.parameters()?)?, states])?;
    Ok(available.saturating_sub(beside) / token.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn published_caches() {
        let cache = |name: &str, batch, sequence| {
            bytes(&presets::find(name).unwrap(), Workload { batch, sequence }, Dtype::Fp16).unwrap()
        };
        // Llama-2-7B at its full context: 2 GiB. Grouped-query attention: 128 KiB per token of Llama-3-8B, 320 KiB
        // of Llama-2-70B, 56 KiB of Qwen2.5-7B, 12 KiB of Qwen2.5-0.5B.
        assert_eq!(cache("llama-2-7b", 1, 4096), 2 << 30);
        assert_eq!(cache("llama-3-8b", 1, 1), 128 << 10);
        assert_eq!(cache("llama-2-70b", 1, 1), 320 << 10);
        assert_eq!(cache("qwen2.5-7b", 1, 1), 56 << 10);
        assert_eq!(cache("qwen2.5-0.5b", 4, 100), 400 * (12 << 10));
    }
}
