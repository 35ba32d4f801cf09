//! Adapters of the experts of a mixture, as `models::mixture` adds them to its products.
//!
//! For an expert of m rows and a term of rank r: a copy of its part of B; u `[m, r]` in fp32, which is kept; products, and operands of the
//! term's own products, in fp32, which are rounded to the dtype of the others. In backward du `[m, r]`, operands in fp32 again. The gradients
//! of A and B have the size of these, for all experts, and exist from the beginning of the mixture's backward.

use crate::Error;
use crate::exact::{product, sum};
use crate::lora::LowRank;
use crate::model::{Decoder, ExpertSizes};

const WHAT: &str = "bytes of an adapter of experts";

/// Bytes of the adapter of one tensor of all experts.
pub(super) struct Term {
    /// u of all rows, and of an expert that has all tokens.
    pub(super) all_low: u64,
    pub(super) low: u64,
    /// The copy of an expert's part of B.
    pub(super) b: u64,
}

/// The adapters of a mixture.
#[derive(Default)]
pub(super) struct Terms {
    pub(super) gate_up: Option<Term>,
    pub(super) down: Option<Term>,
    /// Their gradients, as far as they are counted.
    pub(super) gradients: u64,
}

impl Terms {
    pub(super) fn new(
        model: &Decoder,
        experts: &ExpertSizes,
        lora: Option<&LowRank>,
        tokens: u64,
        gradients: bool,
    ) -> Result<Self, Error> {
        let Some(lora) = lora.filter(|lora| lora.experts.any()) else { return Ok(Self::default()) };
        let rank = lora.rank;
        let term = |outputs: u64| -> Result<Term, Error> {
            Ok(Term {
                all_low: product(WHAT, &[tokens, experts.per_token, rank, 4])?,
                low: product(WHAT, &[tokens, rank, 4])?,
                // The only expert's part is the whole tensor, so nothing is copied.
                b: if experts.count > 1 { product(WHAT, &[outputs, rank, 4])? } else { 0 },
            })
        };
        let both = product(WHAT, &[2, experts.feed_forward])?;
        let mut elements = 0;
        for [inputs, outputs] in lora.experts.widths(model.hidden, experts)? {
            let widths = sum(WHAT, [inputs, outputs])?;
            elements = sum(WHAT, [elements, product(WHAT, &[experts.count, rank, widths])?])?;
        }
        Ok(Self {
            gate_up: if lora.experts.gate_up { Some(term(both)?) } else { None },
            down: if lora.experts.down { Some(term(model.hidden)?) } else { None },
            gradients: if gradients { LowRank::WIDE.bytes(elements)? } else { 0 },
        })
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Term> {
        [&self.gate_up, &self.down].into_iter().flatten()
    }

    pub(super) fn any(&self) -> bool {
        self.all().next().is_some()
    }
}
