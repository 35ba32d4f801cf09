//! Experts of a mixture that are streamed from files through a cache of slots, as `offload` has them.
//!
//! A layer has E experts, and T tokens that choose k of them evenly and independently reach `E·(1 − (1 − k/E)ᵀ)`. A pass over L layers reads
//! those that are not in the cache. Forward goes through the layers from the first to the last and backward from the last to the first, so each
//! finds in a cache of C bytes what the one before used last, and with U bytes of experts that have tokens
//!
//! ```text
//! forward, or backward, of m batches in a step:  m·max(U − C, 0)
//! ```
//!
//! A layer that runs again in backward loads once for both if C has room for one layer's experts that have tokens; otherwise it reads up to
//! twice. Generation reads at most k·L experts for a token, and fewer as far as tokens choose alike.
//!
//! ```
//! use accounting::experts::{self, StreamedExperts};
//! use accounting::decoder_flops::Workload;
//! use accounting::memory::recipe::Recipe;
//! use accounting::model::{Decoder, ExpertSizes, Family, Sizes};
//!
//! let qwen3 = accounting::presets::find("qwen3-0.6b")?;
//! let experts = ExpertSizes { layers: 48, count: 128, per_token: 8, feed_forward: 768, shared: 0, biases: false };
//! let sizes = Sizes { family: Family::Qwen3Moe, hidden: 2048, embedding: 2048, layers: 48, experts: Some(experts), ..*qwen3 };
//! let model = Decoder::new(sizes)?;
//! // One token reads 8 experts of 4.72 million weights in each of 48 layers.
//! let one = experts::pass_bytes(&model, &Recipe::BF16, Workload { batch: 1, sequence: 1 }, 0)?;
//! assert_eq!(one, 48 * 8 * 3 * 2048 * 768 * 2);
//! // 64 tokens reach 126 of 128.
//! assert_eq!(experts::reached(&model, 64).round(), 126.0);
//! # Ok::<(), accounting::Error>(())
//! ```

use crate::Error;
use crate::decoder_flops::Workload;
use crate::exact::{product, sum};
use crate::memory::quantized;
use crate::memory::recipe::Recipe;
use crate::model::{Decoder, ExpertSizes};
use crate::offload::flat_bytes;

const WHAT: &str = "bytes of experts";

/// The name of a routed expert's tensors within a block.
pub(crate) const PREFIX: &str = "mlp.experts.";

/// How experts are streamed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamedExperts {
    /// Bytes of the slots of all layers together.
    pub cache: u64,
    /// Bytes per second of reads from the files.
    pub rate: f64,
}

fn sizes(model: &Decoder) -> Result<ExpertSizes, Error> {
    model.experts.ok_or_else(|| Error::Shape {
        what: format!("{} has no mixture of experts", model.family.model_type()),
        remedy: "leave out the streaming of experts".into(),
    })
}

/// Returns the bytes of a slot: of one expert, each of whose matrices is at a multiple of 256 bytes.
///
/// # Errors
/// A model without experts, or one whose matrices are in the blocks of a GGUF file.
pub fn slot_bytes(model: &Decoder, recipe: &Recipe) -> Result<u64, Error> {
    sizes(model)?;
    let bytes = quantized::expert_bytes(model, recipe)?;
    flat_bytes(&bytes)
}

/// Returns the bytes of the slots that fit into `cache` bytes: at most one for each expert.
///
/// # Errors
/// As [`slot_bytes`]; room for fewer than two.
pub fn cache_bytes(model: &Decoder, recipe: &Recipe, cache: u64) -> Result<u64, Error> {
    let ExpertSizes { layers, count, .. } = sizes(model)?;
    let slot = slot_bytes(model, recipe)?;
    let slots = (cache / slot.max(1)).min(product("experts", &[layers, count])?.max(2));
    if slots < 2 {
        return Err(Error::Shape {
            what: format!("a cache of {cache} bytes holds {slots} experts of {slot} bytes"),
            remedy: format!("give at least {}", product(WHAT, &[2, slot])?),
        });
    }
    product(WHAT, &[slots, slot])
}

/// Returns how many experts of a layer have tokens, of `tokens` that choose theirs evenly and independently; 0 for a model without experts.
pub fn reached(model: &Decoder, tokens: u64) -> f64 {
    let Some(ExpertSizes { count, per_token, .. }) = model.experts else { return 0.0 };
    let exponent = i32::try_from(tokens).unwrap_or(i32::MAX);
    count as f64 * (1.0 - (1.0 - per_token as f64 / count as f64).powi(exponent))
}

/// Returns the bytes that one pass over all layers reads, forward or backward, with a cache of `cache` bytes.
///
/// # Errors
/// As [`slot_bytes`].
pub fn pass_bytes(model: &Decoder, recipe: &Recipe, work: Workload, cache: u64) -> Result<u64, Error> {
    let ExpertSizes { layers, .. } = sizes(model)?;
    let one = sum(WHAT, quantized::expert_bytes(model, recipe)?)?;
    let used = reached(model, work.tokens()?) * layers as f64 * one as f64;
    Ok((used - cache as f64).max(0.0).round() as u64)
}

/// Returns the bytes of a layer's weights that `tokens` tokens read, of `bytes` in all: an expert without tokens is not read.
pub(crate) fn read_bytes(model: &Decoder, tokens: u64, bytes: u64) -> Result<u64, Error> {
    let Some(ExpertSizes { count, feed_forward, .. }) = model.experts else { return Ok(bytes) };
    let all = model.all_block_parameters()? / model.layers;
    let of_experts = product(WHAT, &[3, count, model.hidden, feed_forward])?;
    let idle = 1.0 - reached(model, tokens) / count as f64;
    Ok((bytes as f64 * (1.0 - of_experts as f64 / all.max(1) as f64 * idle)) as u64)
}
