//! The chunk size.
//!
//! Each chunk of tokens reads all of W twice, and reads and writes all of its gradient, whatever the chunk size: small chunks
//! are limited by memory bandwidth. So chunks are as large as the budget allows, and of nearly equal size. The plan depends on
//! shapes and on what is trained, never on the free memory.
//!
//! The gradient of a weight in bf16 is summed over chunks in fp32. The product of a single chunk is that gradient and needs no sum:
//! so the default on a GPU is one chunk for all rows wherever that takes no more memory than chunks and their sum.

use kernels::cross_entropy::{LogitsPass, pass_for};
use kernels::{gpu, processor};
use tch::{Device, Kind, Tensor};

use crate::error::{Result, refused};
use crate::inputs::{Sizes, compute_kind};
use crate::options::{Chunk, LinearCrossEntropy};

#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkPlan {
    /// Dtype of statistics, of everything per token or class, and of sums of gradients.
    pub(crate) compute: Kind,
    /// Dtype of logits: `compute`, or that of the inputs.
    pub(crate) logits: Kind,
    /// Dtype of ∂L/∂Z as an operand: that of the inputs where such products into fp32 are fast, so that rounding it pays.
    pub(crate) gradient: Kind,
    /// Tokens per chunk.
    pub(crate) tokens: i64,
}

/// The inputs of a plan besides the options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) sizes: Sizes,
    /// Dtype of the inputs.
    pub(crate) kind: Kind,
    pub(crate) device: Device,
    /// Whether the gradient of the weight, and not that of a bias, is computed, of the whole vocabulary.
    pub(crate) trains_weight: bool,
    /// Tiles of a chunk's logits beside the student's, with a teacher.
    pub(crate) tiles: u64,
}

impl ChunkPlan {
    pub(crate) fn new(options: &LinearCrossEntropy, of: Planned, pass: &dyn LogitsPass) -> Result<Self> {
        let Planned { sizes, kind, device, trains_weight, tiles } = of;
        let (compute, on_gpu) = (compute_kind(kind), device != Device::Cpu);
        let multiplies = processor::multiplies_into_fp32(kind) || gpu::is_chosen(device);
        let rounds = on_gpu || options.round_logits_gradient && multiplies;
        let gradient = if rounds { kind } else { compute };
        let logits = if on_gpu && options.round_logits { kind } else { compute };
        let chunk = options.chunk;
        let further = tiles * sizes.widest.unsigned_abs() * compute.elt_size_in_bytes() as u64;
        let row = row_bytes(sizes.widest, kind, logits, pass) + further;
        let most = match chunk.unwrap_or(Chunk::Budget(default_budget(device))) {
            Chunk::Tokens(tokens) => tokens,
            Chunk::Budget(_) if chunk.is_none() => {
                // Never an error: one row at least.
                let chunk = i64::try_from(default_budget(device) / row).unwrap_or(i64::MAX).max(1);
                let bytes = sizes.tokens.unsigned_abs().saturating_mul(row);
                let one = one_chunk_bytes([sizes.columns, sizes.hidden], kind, device);
                if trains_weight && tiles == 0 && bytes <= one { chunk.max(sizes.tokens) } else { chunk }
            }
            Chunk::Budget(budget) if budget < row => {
                return Err(refused(format!(
                    "a budget of {budget} bytes is less than the {row} bytes of one row of {} logits; increase it, or set a number of \
                     tokens",
                    sizes.widest
                )));
            }
            Chunk::Budget(budget) => i64::try_from(budget / row).unwrap_or(i64::MAX),
        };
        Ok(Self { compute, logits, gradient, tokens: most })
    }

    /// Returns the start and length of each chunk of `count` rows.
    pub(crate) fn chunks(&self, count: i64) -> impl Iterator<Item = (i64, i64)> + use<> {
        let most = self.tokens.clamp(1, count.max(1));
        let chunks = (count + most - 1) / most;
        let size = if chunks > 0 { (count + chunks - 1) / chunks } else { 1 };
        (0..count).step_by(size as usize).map(move |start| (start, size.min(count - start)))
    }

    /// Allocates a tile for the largest chunk of `count` rows.
    pub(crate) fn tile(
        &self,
        count: i64,
        columns: i64,
        device: Device,
        pass: &dyn LogitsPass,
    ) -> Result<Tensor> {
        let stride = pass.row_stride(columns, self.logits);
        let rows = Tensor::f_empty([self.largest(count), stride], (self.logits, device))?;
        Ok(rows.f_narrow(1, 0, columns)?)
    }

    /// Returns whether one chunk has all of `count` rows.
    pub(crate) fn is_one(&self, count: i64) -> bool {
        self.largest(count) >= count
    }

    /// Returns the rows of the largest chunk.
    fn largest(&self, count: i64) -> i64 {
        self.chunks(count).map(|(_, size)| size).max().unwrap_or(0)
    }
}

/// Returns the default budget in bytes for the logits of a chunk.
pub fn default_budget(device: Device) -> u64 {
    if device == Device::Cpu { 128 << 20 } else { 1 << 30 }
}

/// Returns the tokens of the largest chunk with the default budget and logits that are not rounded, where there are more chunks than one
/// ([`one_chunk_tokens`]).
pub fn default_chunk_tokens(tokens: i64, vocabulary: i64, kind: Kind, device: Device) -> i64 {
    chunk_tokens(tokens, row_bytes(vocabulary, kind, compute_kind(kind), pass_for(device)), device)
}

/// Returns [`default_chunk_tokens`] of a student with a teacher, for which there are as many further tiles of logits in the budget
/// ([`taught_tiles`](crate::taught_tiles), 1 with a set of tokens).
pub fn default_taught_chunk_tokens(
    tokens: i64,
    vocabulary: i64,
    (kind, device): (Kind, Device),
    tiles: u64,
) -> i64 {
    let row = row_bytes(vocabulary, kind, compute_kind(kind), pass_for(device));
    let further = tiles * vocabulary.unsigned_abs() * compute_kind(kind).elt_size_in_bytes() as u64;
    chunk_tokens(tokens, row + further, device)
}

fn chunk_tokens(tokens: i64, row: u64, device: Device) -> i64 {
    let most = i64::try_from(default_budget(device) / row).unwrap_or(i64::MAX).max(1);
    let chunks = ((tokens + most - 1) / most).max(1);
    (tokens + chunks - 1) / chunks
}

/// Returns the tokens, labelled or not, up to which the default is one chunk because that saves the sum of the gradient of a trained
/// weight `[vocabulary, hidden]` in `kind`, with logits that are not rounded; 0 for none: on a CPU, in another dtype than bf16, or for a
/// small matrix.
pub fn one_chunk_tokens(matrix: [i64; 2], kind: Kind, device: Device) -> i64 {
    let row = row_bytes(matrix[0], kind, compute_kind(kind), pass_for(device));
    i64::try_from(one_chunk_bytes(matrix, kind, device) / row).unwrap_or(i64::MAX)
}

/// The elements of a product on a GPU that is rounded to 16 bits at once: cuBLAS divides the sums of smaller ones among processors,
/// and may round each part.
pub(crate) const WHOLE: i64 = 1 << 22;

/// Returns the bytes of logits in one chunk, beside the gradient of the weight (2·v·h), that take no more than chunks of the budget and
/// the sum of that gradient in fp32 (4·v·h), or than the sum and the gradient.
fn one_chunk_bytes([columns, hidden]: [i64; 2], kind: Kind, device: Device) -> u64 {
    if device == Device::Cpu || kind != Kind::BFloat16 || columns.saturating_mul(hidden) < WHOLE {
        return 0;
    }
    let gradient = 2 * columns.unsigned_abs() * hidden.unsigned_abs();
    (default_budget(device) + gradient).max(2 * gradient)
}

/// Returns the bytes of a row of logits for inputs in `kind`: in the dtype of logits, including what separates it from the next and the
/// temporaries of the passes, and of its gradient in another dtype if that takes memory.
pub(crate) fn row_bytes(columns: i64, kind: Kind, logits: Kind, pass: &dyn LogitsPass) -> u64 {
    let none = kind == logits || pass.narrows_in_place();
    let cast = if none { 0 } else { kind.elt_size_in_bytes() as u64 };
    let element = logits.elt_size_in_bytes() as u64;
    let tile = element * pass.row_stride(columns, logits).unsigned_abs();
    tile + columns.unsigned_abs() * (element * pass.temporaries(logits) + cast)
}

#[cfg(test)]
mod tests {
    use kernels::cross_entropy::{Cpu, Reference};

    use super::*;

    #[test]
    fn chunks_cover_every_row_once_and_are_of_one_size() {
        for (tokens, count) in [(1, 0), (1, 5), (220, 2048), (7, 7), (7, 8), (3, 100), (i64::MAX, 10)] {
            let kind = Kind::Float;
            let plan = ChunkPlan { compute: kind, logits: kind, gradient: kind, tokens };
            let chunks: Vec<_> = plan.chunks(count).collect();
            let mut next = 0;
            for &(start, size) in &chunks {
                assert_eq!(start, next);
                assert!(size >= 1 && size <= tokens);
                next += size;
            }
            assert_eq!(next, count);
            let least = u64::try_from(count).unwrap().div_ceil(u64::try_from(tokens).unwrap());
            assert!(chunks.len() as u64 <= least, "{count} rows of {tokens}: {} chunks", chunks.len());
        }
    }

    #[test]
    fn a_budget_counts_everything_of_the_logits_size() {
        let sizes =
            Sizes { tokens: 4096, hidden: 64, columns: 1000, vocabulary: 1000, first: 0, widest: 1000 };
        let budget =
            |bytes| LinearCrossEntropy { chunk: Some(Chunk::Budget(bytes)), ..LinearCrossEntropy::default() };
        let planned = |kind, device| Planned { sizes, kind, device, trains_weight: true, tiles: 0 };
        let tokens = |kind, device, pass: &dyn LogitsPass| {
            ChunkPlan::new(&budget(1_000_000), planned(kind, device), pass).unwrap().tokens
        };
        assert_eq!(tokens(Kind::Float, Device::Cpu, &Cpu), 250);
        assert_eq!(tokens(Kind::Double, Device::Cpu, &Cpu), 125);
        assert_eq!(tokens(Kind::BFloat16, Device::Cpu, &Cpu), 250);
        assert_eq!(tokens(Kind::Float, Device::Cuda(0), &Reference), 83);
        assert_eq!(tokens(Kind::BFloat16, Device::Cuda(0), &Reference), 71);
        // Rounded logits, on a GPU only: two bytes, and libtorch's operators work on a copy in fp32.
        let rounded = LinearCrossEntropy { round_logits: true, ..budget(1_000_000) };
        let plan = |kind, device, pass: &dyn LogitsPass| {
            ChunkPlan::new(&rounded, planned(kind, device), pass).unwrap()
        };
        for (kind, device, pass, logits, tokens) in [
            (Kind::BFloat16, Device::Cuda(0), &Cpu as &dyn LogitsPass, Kind::BFloat16, 500),
            (Kind::Half, Device::Cuda(0), &Reference, Kind::Half, 71),
            (Kind::Float, Device::Cuda(0), &Reference, Kind::Float, 83),
            (Kind::BFloat16, Device::Cpu, &Cpu, Kind::Float, 250),
        ] {
            let found = plan(kind, device, pass);
            assert_eq!((found.logits, found.tokens), (logits, tokens), "{kind:?} on {device:?}");
        }
        let error = ChunkPlan::new(&budget(3999), planned(Kind::Float, Device::Cpu), &Cpu).unwrap_err();
        expect_test::expect!["linear cross-entropy: a budget of 3999 bytes is less than the 4000 bytes of one row of 1000 logits; increase it, or set a number of tokens"]
            .assert_eq(&error.to_string());
    }

    /// 2092 rows of 128,256 logits in fp32 are the budget of a GPU, and the gradient of a weight takes as much.
    #[test]
    fn one_chunk_that_needs_no_sum_may_take_its_memory() {
        let sizes = |rows| Sizes {
            tokens: rows,
            hidden: 4096,
            columns: 128_256,
            vocabulary: 128_256,
            first: 0,
            widest: 128_256,
        };
        let tokens = |rows, kind, device, trains_weight, round_logits| {
            let options = LinearCrossEntropy { round_logits, ..LinearCrossEntropy::default() };
            ChunkPlan::new(
                &options,
                Planned { sizes: sizes(rows), kind, device, trains_weight, tiles: 0 },
                &Cpu,
            )
            .unwrap()
            .tokens
        };
        let (gpu, bf16) = (Device::Cuda(0), Kind::BFloat16);
        assert_eq!(tokens(4096, bf16, gpu, true, false), 4096);
        assert_eq!(tokens(4140, bf16, gpu, true, false), 4140);
        assert_eq!(tokens(4141, bf16, gpu, true, false), 2092);
        assert_eq!(tokens(8192, bf16, gpu, true, true), 8192);
        // The same by the pass that this machine has for a GPU.
        let most = one_chunk_tokens([128_256, 4096], bf16, gpu);
        for (rows, is_one) in [(most, true), (most + 1, false)] {
            let planned =
                Planned { sizes: sizes(rows), kind: bf16, device: gpu, trains_weight: true, tiles: 0 };
            let plan = ChunkPlan::new(&LinearCrossEntropy::default(), planned, pass_for(gpu)).unwrap();
            assert_eq!(plan.is_one(rows), is_one, "{rows}");
        }
        // No sum is saved: a frozen weight, gradients in fp32, a CPU's cache.
        assert_eq!(tokens(4096, bf16, gpu, false, false), 2092);
        assert_eq!(tokens(4096, Kind::Half, gpu, true, false), 2092);
        assert_eq!(tokens(4096, Kind::Float, gpu, true, false), 2092);
        assert_eq!(tokens(4096, bf16, Device::Cpu, true, false), 261);
        for (matrix, kind, device) in [
            ([1000, 64], bf16, gpu),
            ([128_256, 4096], Kind::Half, gpu),
            ([128_256, 4096], bf16, Device::Cpu),
        ] {
            assert_eq!(one_chunk_tokens(matrix, kind, device), 0);
        }
    }
}
