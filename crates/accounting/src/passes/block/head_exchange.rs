//! The exchange of heads for tokens with the ranks that divide each row ([`sequence_parallel`](crate::sequence_parallel)).
//!
//! ```text
//! forward    q, k, v: [repeat] · copy for the other ranks · exchange · attention · output: copy · exchange · join
//! backward   output's gradient: copy · exchange · attention · v, k, q: copy · exchange · join · [sum over copies]
//! ```
//!
//! Queries, keys and values of a rank's tokens are freed once they are sent. Attention keeps those of all tokens and its own output; the
//! output's projection keeps the one that came back. The parts of one row need no copy where tokens are the outer dimension.

use super::{Block, BlockOptions};
use crate::exact::product;
use crate::passes::PeakTracker;
use crate::sequence_parallel::sent_key_heads;
use crate::{Decoder, Error};

/// Bytes of what is exchanged.
pub(super) struct HeadExchange {
    /// Keys, or values, with each head as often as it is sent.
    pub(super) sent_key: u64,
    /// Whether a batch has several rows, whose parts are copied to join them.
    joins: bool,
}

impl HeadExchange {
    /// `None` where each rank has whole rows.
    pub(super) fn new(model: &Decoder, options: &BlockOptions<'_>) -> Result<Option<Self>, Error> {
        if options.sequence_ranks <= 1 {
            return Ok(None);
        }
        if model.linear.is_some() || model.family.facts().has_attention_gate {
            return Err(Error::Shape {
                what: "rows of a model with linear or gated attention cannot be divided among ranks".into(),
                remedy: "give each rank whole rows".into(),
            });
        }
        let heads = sent_key_heads(model.heads, model.kv_heads, options.sequence_ranks)?;
        let bytes = options.recipe.compute.storage_bits() / 8;
        let sent_key = product("bytes of keys", &[options.tokens, heads, model.head_dim, bytes])?;
        Ok(Some(Self { sent_key, joins: options.rows > 1 }))
    }

    /// Replaces the heads of a rank's tokens, `bytes`, by some heads of all tokens.
    fn to_heads(&self, tracker: &mut PeakTracker, bytes: u64) {
        // The copy for the others and what arrives.
        tracker.make(2 * bytes);
        tracker.free(bytes);
        if self.joins {
            tracker.make(bytes);
            tracker.free(bytes);
        }
        tracker.free(bytes);
    }

    /// The opposite. `kept` is whether the heads of all tokens stay.
    fn to_tokens(&self, tracker: &mut PeakTracker, bytes: u64, kept: bool) {
        let copy = if self.joins { bytes } else { 0 };
        tracker.make(copy + bytes);
        tracker.free(copy);
        tracker.make(bytes);
        tracker.free(bytes);
        if !kept {
            tracker.free(bytes);
        }
    }
}

impl Block {
    /// Queries, keys and values before attention.
    pub(super) fn exchange_heads(&self, tracker: &mut PeakTracker) {
        let Some(exchange) = &self.exchange else { return };
        exchange.to_heads(tracker, self.query);
        for _ in 0..2 {
            if exchange.sent_key != self.key {
                tracker.make(exchange.sent_key);
                tracker.free(self.key);
            }
            exchange.to_heads(tracker, exchange.sent_key);
        }
    }

    /// The output after attention, which stays if it is kept.
    pub(super) fn exchange_output(&self, tracker: &mut PeakTracker, kept: bool) {
        if let Some(exchange) = &self.exchange {
            exchange.to_tokens(tracker, self.query, kept);
        }
    }

    /// The gradient of the output.
    pub(super) fn exchange_output_back(&self, tracker: &mut PeakTracker) {
        if let Some(exchange) = &self.exchange {
            exchange.to_heads(tracker, self.query);
        }
    }

    /// The gradients of queries, keys and values.
    pub(super) fn exchange_heads_back(&self, tracker: &mut PeakTracker) {
        let Some(exchange) = &self.exchange else { return };
        for _ in 0..2 {
            exchange.to_tokens(tracker, exchange.sent_key, false);
            if exchange.sent_key != self.key {
                tracker.make(self.key);
                tracker.free(exchange.sent_key);
            }
        }
        exchange.to_tokens(tracker, self.query, false);
    }

    /// Keys, or values, as attention keeps them.
    pub(super) fn attended_keys(&self) -> u64 {
        self.exchange.as_ref().map_or(self.attended_key, |exchange| exchange.sent_key)
    }
}
