//! The memory of the gated delta rule by chunks, as `kernels::delta_rule` runs it.
//!
//! Tokens are computed in spans of 16 chunks of up to 64. Of a span, with h key heads, H value heads, keys of K and values of V numbers,
//! chunks of n tokens, in fp32: q, k `[h, t, K]`; v, its results and gradients `[H, t, V]`; k for each value head `[H, t, K]`; pairs of a chunk's
//! tokens `[h, t, n]` and `[H, t, n]`; the state `[H, K, V]`; backward has two states for each chunk. Temporaries that a function's bindings
//! hold live to its end.
//!
//! From forward to backward it keeps its inputs, and the state before each span but the first.

use decoder::LinearSizes;

use crate::Error;
use crate::decoder_flops::Workload;
use crate::exact::product;
use crate::passes::PeakTracker;

const WHAT: &str = "bytes of the delta rule";
/// Maximum number of tokens of a chunk, and of chunks of a span.
const CHUNK: u64 = 64;
const SPAN: u64 = 16;

/// Bytes of the tensors of the largest span.
pub(super) struct DeltaRule {
    /// Queries, or keys; as they come, without the tokens that fill the last chunk up.
    q: u64,
    raw_q: u64,
    /// Values.
    v: u64,
    raw_v: u64,
    /// Keys for each value head.
    keys: u64,
    /// Pairs of tokens, for each key head and for each value head.
    key_pairs: u64,
    pairs: u64,
    /// A number for each token and value head.
    numbers: u64,
    state: u64,
    /// Chunks of a span.
    chunks: u64,
    /// Whether the last chunk is filled up, and whether the inputs are cast.
    is_padded: bool,
    is_narrow: bool,
    /// Whether a key head has several value heads.
    groups: bool,
    /// States that are kept, and the result in the inputs' dtype.
    starts: u64,
    output: u64,
    /// Gradients of queries, keys and values in the inputs' dtype.
    gradients: u64,
    /// Whether there are several spans.
    is_divided: bool,
}

impl DeltaRule {
    /// `bytes` is the size of a number of the inputs.
    pub(super) fn new(linear: &LinearSizes, work: Workload, bytes: u64) -> Result<Self, Error> {
        let LinearSizes { key_heads: h, value_heads, key, value, .. } = *linear;
        let Workload { batch, sequence } = work;
        let n = sequence.checked_next_power_of_two().unwrap_or(CHUNK).min(CHUNK);
        let spans = sequence.div_ceil(n * SPAN);
        let count = sequence.min(n * SPAN);
        let chunks = count.div_ceil(n);
        let of = |tokens: u64, sizes: &[u64]| product(WHAT, &[&[batch, tokens, 4], sizes].concat());
        let state = product(WHAT, &[batch, value_heads, key, value, 4])?;
        let channels = product(WHAT, &[2 * h, key])?.saturating_add(product(WHAT, &[value_heads, value])?);
        Ok(Self {
            q: of(chunks * n, &[h, key])?,
            raw_q: of(count, &[h, key])?,
            v: of(chunks * n, &[value_heads, value])?,
            raw_v: of(count, &[value_heads, value])?,
            keys: of(chunks * n, &[value_heads, key])?,
            key_pairs: of(chunks * n, &[h, n])?,
            pairs: of(chunks * n, &[value_heads, n])?,
            numbers: of(chunks * n, &[value_heads])?,
            state,
            chunks,
            is_padded: chunks * n > count,
            is_narrow: bytes < 4,
            groups: value_heads > h,
            starts: product(WHAT, &[spans - 1, state])?,
            output: product(WHAT, &[batch, sequence, value_heads, value, bytes])?,
            gradients: product(WHAT, &[batch, sequence, channels, bytes])?,
            is_divided: spans > 1,
        })
    }

    /// States that are kept from forward to backward.
    pub(super) fn kept(&self) -> u64 {
        self.starts
    }

    /// Leaves the result and, with `record`, the kept states.
    pub(super) fn forward(&self, tracker: &mut PeakTracker, record: bool) {
        tracker.make(self.starts);
        let before = tracker.live();
        // Results of earlier spans.
        tracker.make(if self.is_divided { self.output - self.output.min(self.raw_v) } else { 0 });
        tracker.make(self.state);
        self.span(tracker);
        // Keys and queries for each value head, their products with the state, what is read of it.
        let of_chunk = |bytes: u64| bytes / self.chunks;
        tracker.make(2 * self.q);
        tracker.make(2 * self.v + self.v);
        let grouped = if self.groups { 2 * of_chunk(self.keys) } else { 0 };
        tracker.touch(grouped.max(3 * of_chunk(self.v)).max(of_chunk(self.v) + 2 * self.state));
        tracker.make(self.state);
        tracker.make(2 * self.v);
        tracker.free(2 * self.q + 3 * self.v);
        // P·N, the result, the same by token.
        tracker.make(2 * self.v);
        tracker.free(self.v);
        tracker.make(self.v);
        tracker.make(if self.is_narrow { self.raw_v } else { 0 });
        tracker.release_since(before);
        // Several spans are joined.
        tracker.touch(if self.is_divided { self.output } else { 0 });
        tracker.make(self.output);
        if !record {
            tracker.free(self.starts);
        }
    }

    /// With the gradient of the result, which stays, leaves those of queries, keys and values, and frees the kept states.
    pub(super) fn backward(&self, tracker: &mut PeakTracker) {
        let before = tracker.live();
        let &Self { q, v, keys, key_pairs, pairs, state, chunks, .. } = self;
        let of_chunk = |bytes: u64| bytes / chunks;
        let states = chunks * state;
        tracker.make(if self.is_divided { self.gradients } else { 0 });
        tracker.make(2 * state);
        self.span(tracker);
        self.split(tracker, self.raw_v, v);
        // The pass over the chunks again.
        let grouped = |bytes: u64| if self.groups { of_chunk(bytes) } else { 0 };
        tracker.make(v + states);
        tracker.touch(grouped(keys).max(3 * of_chunk(v)) + 2 * state);
        tracker.make(v);
        tracker.free(v);
        tracker.touch(states);
        // From the last chunk to the first.
        tracker.make(2 * v);
        tracker.make(v + states);
        tracker.touch(2 * grouped(keys) + 2 * of_chunk(v) + 3 * state);
        tracker.touch(v);
        tracker.touch(states);
        tracker.free(2 * v);
        // Products with states, and pairs of tokens.
        tracker.make(3 * keys);
        tracker.touch(keys);
        tracker.make(2 * pairs);
        tracker.touch(pairs);
        if self.groups {
            tracker.make(2 * key_pairs);
        }
        tracker.touch(v.max(keys).max(states));
        // Of queries, then of keys.
        let over_group = if self.groups { q } else { 0 };
        tracker.make(over_group + q);
        tracker.touch(q);
        tracker.free(over_group);
        tracker.touch(keys + over_group + 3 * q + key_pairs);
        tracker.make(q);
        for _ in 0..2 {
            // Before their normalisation.
            self.split(tracker, self.raw_q, q);
            tracker.make(q);
            tracker.touch(4 * q);
            tracker.free(2 * q);
            tracker.make(q);
        }
        tracker.make(2 * q);
        tracker.make(v);
        tracker.touch(v);
        tracker.release_since(before);
        tracker.make(self.gradients);
        tracker.free(self.starts);
    }

    /// Leaves a part of the inputs by chunk.
    fn split(&self, tracker: &mut PeakTracker, raw: u64, bytes: u64) {
        let cast = if self.is_narrow { raw } else { 0 };
        let padded = if self.is_padded { bytes } else { 0 };
        tracker.make(cast + padded + bytes);
        tracker.free(cast + padded);
    }

    /// Leaves the operands of a span.
    fn span(&self, tracker: &mut PeakTracker) {
        let &Self { q, v, keys, key_pairs, pairs, numbers, .. } = self;
        // Queries are normalised and multiplied, keys normalised.
        for copies in [2, 1] {
            self.split(tracker, self.raw_q, q);
            tracker.touch(q);
            tracker.make(q);
            tracker.free(q);
            tracker.make((copies - 1) * q);
        }
        self.split(tracker, self.raw_v, v);
        tracker.make(3 * numbers);
        // D, KKᵀ, M, (I + M)⁻¹ by blocks.
        tracker.make(pairs + key_pairs + pairs);
        tracker.touch(3 * pairs);
        tracker.make(pairs);
        // P and K̂.
        tracker.make(key_pairs);
        tracker.make(pairs);
        tracker.free(key_pairs);
        tracker.make(keys);
        tracker.free(pairs + q);
    }
}
