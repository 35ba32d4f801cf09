//! Sequence parallelism: the tokens of each row are divided among ranks, which exchange heads for tokens in attention (Ulysses).
//!
//! Rank c of C has tokens c·t/C to (c + 1)·t/C − 1 of every row of t tokens. Every part of a decoder but attention computes tokens one by
//! one, so it needs no other rank. Before attention an all-to-all exchanges all heads of t/C tokens for 1/C of the heads of all t tokens,
//! and after it another one exchanges them back:
//!
//! ```text
//! q [b, t/C, h, e] ──▶ [b, t, h/C, e] ──attention──▶ [b, t, h/C, e] ──▶ [b, t/C, h, e]
//! ```
//!
//! Each rank attends over whole rows, so that packed documents, sliding windows, soft caps and sinks are those of one process, and the work
//! is divided evenly although attention is causal. A rank keeps 1/C of the activations of a layer. It sends (C − 1)/C · b·t/C·(2h + 2g')·e
//! elements per layer and pass, where g' is the number of key heads that are sent; backward sends as much once more, and recomputation, too.
//! Source: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.
//!
//! # Heads
//!
//! C must divide the query heads. Where it does not divide the g key heads, each of them is sent as often as the ranks need it: g' is the
//! least multiple of g that C divides and that divides h (Qwen2.5-0.5B has h = 14 and g = 2: g' = 2 for C = 2, 14 for C = 7).
//!
//! # Bits
//!
//! A head is attended to by one rank, in the order of one process, so attention has its bits wherever the kernel's bits of a head do not
//! depend on the other heads (on the CPU). Gradients of weights are sums over tokens: each rank sums its own, and the ranks' sums are added in
//! the order of ranks. So they depend on C, but not on how many groups of C ranks take different micro-batches.
//!
//! # The loss
//!
//! Each rank computes the loss of its own tokens with the whole head, in chunks of logits. The vocabulary-parallel loss of `fused-ce` takes
//! the hidden states of all t tokens on every rank instead, and a part of the head: t·d elements beside V·d/C. That is less than V·d only
//! where t is well below the vocabulary V, and rows are divided where t is large: Llama 3 has V = 128 256, and its long rows t = 131 072.
//!
//! # Difference from PyTorch
//!
//! PyTorch's `context_parallel` is ring attention: a rank keeps its queries, and keys and values of the others pass by. It has no bound on the
//! number of ranks, but sends keys and values C − 1 times, has no packed documents, and needs rows in another order for even work.

use std::ops::Range;

use runtime::autograd::{self, Backward, Forward, Function};
use runtime::collectives::Group;
use runtime::precision;
use runtime::tensor_layout::TensorLayout;
use tch::Tensor;

use crate::attention::{AttentionConfig, Documents, attend, attention, check, effective, repeat_heads};
use crate::error::{Error, Result, wrong_shape};
use crate::module::Context;

/// This rank's part of rows that ranks divide among them. See the [module](self).
#[derive(Debug, Clone)]
pub struct SequenceShard {
    group: Group,
    length: i64,
}

impl SequenceShard {
    /// Divides rows of `length` tokens among the ranks of a group.
    ///
    /// # Errors
    /// A length that the ranks do not divide.
    pub fn new(group: &Group, length: i64) -> Result<Self> {
        let ranks = group.size() as i64;
        if length < ranks || length % ranks != 0 {
            let reason =
                format!("rows of {length} tokens; expected a multiple of {ranks}, a part for each rank");
            return Err(Error::invalid("sequence parallelism", reason));
        }
        Ok(Self { group: group.clone(), length })
    }

    /// Returns the number of tokens of a whole row.
    pub fn length(&self) -> i64 {
        self.length
    }

    /// Returns the positions in a row that are this rank's.
    pub fn range(&self) -> Range<i64> {
        let part = self.length / self.ranks();
        let start = part * self.group.rank() as i64;
        start..start + part
    }

    fn ranks(&self) -> i64 {
        self.group.size() as i64
    }

    /// [`attention`] of this rank's tokens of all heads, `[batch, length / ranks, heads, head]`, over those of all ranks. `documents` are
    /// those of whole rows. All ranks call it.
    ///
    /// # Errors
    /// As [`attention`]; heads that the ranks do not divide; a rank that fails.
    pub(crate) fn attention(
        &self,
        [q, k, v]: [Tensor; 3],
        documents: Option<&Documents>,
        options: &AttentionConfig<'_>,
    ) -> Result<Tensor> {
        let [batch, part, heads, head] = check([&q, &k, &v], None, options)?;
        let ranks = self.ranks();
        if part * ranks != self.length {
            let expected = format!(
                "[batch, {}, heads, head], 1/{ranks} of rows of {}",
                self.length / ranks,
                self.length
            );
            return Err(wrong_shape("sequence parallelism", "q", [batch, part, heads, head], expected));
        }
        let of_keys = TensorLayout::of(&k)?;
        let sent_keys = sent_key_heads(heads, of_keys.size()[2], ranks)?;
        let own_heads = heads / ranks;
        let first_head = own_heads * self.group.rank() as i64;
        let sinks = options.sinks.map(|sinks| sinks.f_narrow(0, first_head, own_heads)).transpose()?;
        let options = AttentionConfig { sinks: sinks.as_ref(), ..effective(options, self.length, documents) };
        // In the dtype of a mixed-precision policy, so that no more is sent than what is multiplied.
        let q = self.exchange(Direction::ToHeads, precision::operand(&q)?, q)?;
        let k = self.exchange(Direction::ToHeads, repeat_heads(&precision::operand(&k)?, sent_keys)?, k)?;
        let v = self.exchange(Direction::ToHeads, repeat_heads(&precision::operand(&v)?, sent_keys)?, v)?;
        check([&q, &k, &v], documents, &options)?;
        let o = precision::attend(&q, &k, &v, &|q, k, v| attend(q, k, v, documents, &options))?;
        drop((q, k, v));
        let o = o.f_reshape([batch, self.length, own_heads, head])?;
        let o_bthe = self.exchange(Direction::ToTokens, o.shallow_clone(), o)?;
        Ok(o_bthe.f_reshape([batch, part, heads * head])?)
    }

    /// Exchanges `x`, made of `from`, which is freed before the result is read.
    fn exchange(&self, direction: Direction, x: Tensor, from: Tensor) -> Result<Tensor> {
        drop(from);
        let [exchanged] = autograd::apply(Exchange { shard: self.clone(), direction }, &[&x])?;
        Ok(exchanged)
    }
}

/// [`attention`] of a pass: over whole rows, or over this rank's part of them.
///
/// # Errors
/// As [`attention`] and [`SequenceShard::attention`].
pub(crate) fn attention_within(
    context: &Context<'_>,
    [q, k, v]: [Tensor; 3],
    options: &AttentionConfig<'_>,
) -> Result<Tensor> {
    match context.sequence {
        None => attention(&q, &k, &v, context.documents, options),
        Some(shard) => shard.attention([q, k, v], context.documents, options),
    }
}

/// Returns how many key heads are sent.
///
/// # Errors
/// `ranks` does not divide `heads`.
fn sent_key_heads(heads: i64, kv_heads: i64, ranks: i64) -> Result<i64> {
    let [all, of_keys, parts] = [heads, kv_heads, ranks].map(i64::unsigned_abs);
    let sent = decoder::sent_key_heads(all, of_keys, parts).map(u64::cast_signed);
    sent.ok_or_else(|| {
        let reason = format!(
            "{ranks} ranks do not divide {heads} heads; divide rows among a divisor of {heads} ranks"
        );
        Error::invalid("sequence parallelism", reason)
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    /// All heads of a part of the tokens become a part of the heads of all tokens.
    ToHeads,
    ToTokens,
}

impl Direction {
    fn opposite(self) -> Self {
        match self {
            Self::ToHeads => Self::ToTokens,
            Self::ToTokens => Self::ToHeads,
        }
    }
}

/// The all-to-all, whose gradient is the opposite one.
struct Exchange {
    shard: SequenceShard,
    direction: Direction,
}

impl Exchange {
    fn run(&self, direction: Direction, x: &Tensor, label: &str) -> Result<Tensor> {
        let source = self.sent(direction, x)?;
        let target = source.f_empty_like()?;
        self.shard.group.all_to_all(&target, &source, label)?.wait()?;
        drop(source);
        self.received(direction, &target)
    }

    /// Returns a tensor's parts for the ranks, one after the other: `[ranks, batch, length / ranks, heads / ranks, head]`.
    fn sent(&self, direction: Direction, x: &Tensor) -> Result<Tensor> {
        let (batch, tokens, heads, head) = x.size4()?;
        let ranks = self.shard.ranks();
        let parts = match direction {
            Direction::ToHeads => {
                x.f_reshape([batch, tokens, ranks, heads / ranks, head])?.f_permute([2, 0, 1, 3, 4])?
            }
            Direction::ToTokens => {
                x.f_reshape([batch, ranks, tokens / ranks, heads, head])?.f_permute([1, 0, 2, 3, 4])?
            }
        };
        Ok(parts.f_contiguous()?)
    }

    /// Joins the parts of the ranks: of one row's tokens without a copy.
    fn received(&self, direction: Direction, parts: &Tensor) -> Result<Tensor> {
        let &[ranks, batch, tokens, heads, head] = parts.size().as_slice() else {
            return Err(wrong_shape("sequence parallelism", "the parts", parts.size(), "five dimensions"));
        };
        Ok(match direction {
            Direction::ToHeads => {
                parts.f_permute([1, 0, 2, 3, 4])?.f_reshape([batch, ranks * tokens, heads, head])?
            }
            Direction::ToTokens => {
                parts.f_permute([1, 2, 0, 3, 4])?.f_reshape([batch, tokens, ranks * heads, head])?
            }
        })
    }
}

impl Function for Exchange {
    fn forward(&mut self, _: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        inputs.iter().map(|x| self.run(self.direction, x, "attention")).collect()
    }

    fn backward(&self, _: &mut Backward, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        // The ranks have the same graph, so that a gradient is absent on all of them or on none.
        let exchange =
            |gradient: Tensor| self.run(self.direction.opposite(), &gradient, "backward of attention");
        gradients.into_iter().map(|gradient| gradient.map(exchange).transpose()).collect()
    }
}
