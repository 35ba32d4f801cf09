//! The head of a decoder: the last norm, the output projection and the loss, forward and backward.
//!
//! With n tokens, m of them with a label, d hidden, v entries of the vocabulary, c bytes of a number in products:
//!
//! ```text
//! all logits     Z [n, v] · fp32 copy of Z if c < 4 · log-softmax; then its gradient, and that of Z: at most 3·4·n·v
//! in chunks of r one tile [r, v] in fp32, overwritten by its gradient; ∂hidden [n, d] and ∂W [v, d] computed in the forward
//! ```
//!
//! The sums of ∂W are in fp32; for a narrower weight they are rounded at the end, into a second tensor, or in bf16 as they are written if
//! there is one tile ([`Loss::LinearCrossEntropy`]).

use crate::exact::{self, product, sum};
use crate::memory::logits::{self, Loss};
use crate::memory::quantized::{self, Matrices};
use crate::memory::recipe::Recipe;
use crate::memory::{Item, total};
use crate::model::Decoder;
use crate::passes::PeakTracker;
use crate::recompute::NormKernel;
use crate::{Error, decoder_flops::Workload};

/// The options of a head, besides the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadOptions<'a> {
    pub(crate) work: Workload,
    /// Tokens with a label; `None` for all.
    pub(crate) labelled: Option<u64>,
    /// Number formats.
    pub(crate) recipe: &'a Recipe,
    /// The norm's kernel.
    pub(crate) norm: NormKernel,
    /// The implementation of the loss.
    pub(crate) loss: Loss,
    /// Whether the output matrix is trained.
    pub(crate) trained: bool,
    /// Whether a fused loss rounds the gradient of a tile of logits in place, if at all.
    pub(crate) on_cpu: bool,
    /// Tiles of logits beside the model's own.
    pub(crate) further_tiles: u64,
}

/// How many items of [`outside`] are live for the whole step.
pub(crate) const FIXED: usize = 2;

/// Returns the tensors kept outside the blocks: [`FIXED`] items for the whole step, the others until the head's
/// backward.
pub(crate) fn outside(model: &Decoder, options: &HeadOptions<'_>) -> Result<Vec<Item>, Error> {
    let tokens = options.work.tokens()?;
    let c = options.recipe.compute.storage_bits() / 8;
    let mut items = vec![
        Item::new("tokens and labels", 8, &[2, tokens])?,
        // For all positions, in fp32.
        Item::new("rotary angles", 4, &[model.context, model.rotary_width()])?,
    ];
    if options.norm != NormKernel::Output {
        items.push(Item::new("norm input", c, &[tokens, model.hidden])?);
    }
    items.push(Item::new("norm statistics", 4, &[tokens])?);
    items.push(Item::new("output projection input", c, &[tokens, model.hidden])?);
    Ok(items)
}

/// Returns the tensors of a loss over tiles of tokens, without those of the output matrix' gradient.
fn chunked(model: &Decoder, options: &HeadOptions<'_>) -> Result<Vec<Item>, Error> {
    let tokens = options.work.tokens()?;
    let labelled = options.labelled.unwrap_or(tokens);
    let c = options.recipe.compute.storage_bits() / 8;
    let chunk =
        exact::positive("tokens of a chunk of logits", options.loss.chunk_of(tokens).unwrap_or(labelled))?;
    // Chunks are as even as possible, so a batch of somewhat fewer labels may have larger ones: its chunks are full.
    let rows = match options.labelled {
        None => labelled.div_ceil(labelled.div_ceil(chunk)),
        Some(labelled) => labelled.min(chunk),
    };
    let narrow = [rows, model.hidden];
    let mut items = vec![
        Item::new("tile of logits in fp32", 4, &[1 + options.further_tiles, rows, model.vocabulary])?,
        Item::new("gradient of the hidden states", c, &[tokens, model.hidden])?,
        Item::new("labels and positions of the labelled tokens", 16, &[labelled])?,
    ];
    if labelled < tokens || c < 4 {
        items.push(Item::new("a chunk's gradient of its hidden states", 4, &narrow)?);
    }
    if let Some(bytes) = training_tile(model, options.recipe)? {
        items.push(Item { name: "a tile of the output matrix", bytes });
    }
    if c < 4 {
        items.push(Item::new("the same, rounded", c, &narrow)?);
        if !options.on_cpu {
            items.push(Item::new("the tile's gradient, rounded", c, &[rows, model.vocabulary])?);
        }
    }
    Ok(items)
}

/// Bytes of the largest tile that a fused loss has of an output matrix in the blocks of a file, in fp32: some rows for the logits, some
/// columns for the gradient of the hidden states.
fn training_tile(model: &Decoder, recipe: &Recipe) -> Result<Option<u64>, Error> {
    if !matches!(recipe.matrices, Matrices::Blocks(_)) {
        return Ok(None);
    }
    let tile = |length, width| quantized::tile_bytes(quantized::CPU_TILE, length, width, 4);
    let (rows, columns) = (tile(model.vocabulary, model.hidden)?, tile(model.hidden, model.vocabulary)?);
    Ok(Some(rows.max(columns)))
}

/// Bytes of the tile of an output matrix in the blocks of a file that logits in numbers of `bytes` are computed with.
fn inference_tile(model: &Decoder, recipe: &Recipe, bytes: u64) -> Result<u64, Error> {
    match recipe.matrices {
        Matrices::Blocks(_) => {
            quantized::tile_bytes(quantized::CPU_TILE, model.vocabulary, model.hidden, bytes)
        }
        _ => Ok(0),
    }
}

/// Returns the peak bytes of the head of a training step, from the last block's output to the gradient of that output, beyond what
/// blocks keep.
pub(crate) fn training_bytes(model: &Decoder, options: &HeadOptions<'_>) -> Result<u64, Error> {
    let HeadOptions { work, recipe, loss, trained, .. } = *options;
    let tokens = work.tokens()?;
    let kept = total(&outside(model, options)?[FIXED..])?;
    let tensor = |width: u64, bytes: u64| product("bytes of the head", &[tokens, width, bytes]);
    let c = recipe.compute.storage_bits() / 8;
    let (narrow, logits, wide) =
        (tensor(model.hidden, c)?, tensor(model.vocabulary, c)?, tensor(model.vocabulary, 4)?);
    let matrix = product("elements of the output matrix", &[model.vocabulary, model.hidden])?;
    let gradient = if trained { recipe.gradients.bytes(matrix)? } else { 0 };
    let mut tracker = PeakTracker::default();
    tracker.make(kept);
    match loss {
        Loss::Eager => {
            // The block's output is freed after the norm's is computed.
            tracker.touch(narrow);
            tracker.make(logits);
            if c < 4 {
                tracker.make(wide);
            }
            tracker.make(wide);
            tracker.free(if c < 4 { sum("bytes of the head", [logits, wide])? } else { logits });
            // The gradient of the log-softmax, then that of the logits.
            tracker.make(wide);
            tracker.make(wide);
            tracker.free(wide);
            tracker.free(wide);
            if c < 4 {
                tracker.make(logits);
                tracker.free(wide);
            }
            tracker.make(sum("bytes of the head", [narrow, gradient])?);
        }
        Loss::LinearCrossEntropy { .. } => {
            tracker.touch(narrow);
            let items = total(&chunked(model, options)?)?;
            let sums = match trained {
                true if !loss.is_whole(tokens) => product("bytes of the sums", &[matrix, 4])?,
                _ => gradient,
            };
            tracker.make(sum("bytes of the head", [items, sums])?);
            if trained && gradient < sums {
                tracker.free(items - narrow);
                tracker.make(gradient);
            }
        }
        _ => {
            let peak = total(&logits::peak(model, work, recipe, loss, options.labelled)?)?;
            tracker.make(sum("bytes of the head", [peak, gradient])?);
        }
    }
    tracker.peak()
}

/// The tokens whose logits an inference computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Logits {
    /// Every token.
    #[default]
    AllTokens,
    /// Each row's last token, as in generation.
    LastToken,
}

/// Returns the peak bytes of the head of an inference, beyond the last block's output.
pub(crate) fn inference_bytes(
    model: &Decoder,
    options: &HeadOptions<'_>,
    which: Logits,
) -> Result<u64, Error> {
    let tokens = options.work.tokens()?;
    let c = options.recipe.compute.storage_bits() / 8;
    let narrow = product("bytes of the head", &[tokens, model.hidden, c])?;
    let rows = match which {
        Logits::AllTokens => tokens,
        Logits::LastToken => options.work.batch,
    };
    let logits = product("bytes of the logits", &[rows, model.vocabulary, c])?;
    let tile = inference_tile(model, options.recipe, c)?;
    let logits = sum("bytes of the head", [logits, tile])?;
    // First the block's output and the norm's, then the norm's and the logits.
    sum("bytes of the head", [narrow, narrow.max(logits)])
}
