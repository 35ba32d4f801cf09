//! The tensors that a block keeps from its forward to its backward.

use super::shared_expert::SharedExpert;
use super::{Block, Recorded};
use crate::lora::Projection;
use crate::memory::Item;
use crate::{Error, exact};

impl Block {
    /// Lists the tensors that the block keeps; `input` is whether its input needs a gradient.
    pub(crate) fn kept(&self, input: bool) -> Vec<Item> {
        use Projection::Down;
        let recorded = self.recorded(input);
        let mut items = Vec::new();
        let mut keep = |condition: bool, name, bytes| {
            if condition {
                items.push(Item { name, bytes });
            }
        };
        keep(recorded.input && !self.keeps_output, "norm input", self.narrow);
        keep(recorded.input, "norm statistics", self.statistic);
        keep(self.keeps_first_output(&recorded), "query, key, value input", self.narrow);
        match &self.linear {
            Some(linear) => items.extend(self.kept_of_linear(linear, &recorded)),
            None => items.extend(self.kept_of_attention(&recorded)),
        }
        let mut keep = |condition: bool, name, bytes| {
            if condition {
                items.push(Item { name, bytes });
            }
        };
        keep(recorded.middle && !self.keeps_output, "norm input", self.narrow);
        keep(recorded.middle, "norm statistics", self.statistic);
        keep(self.keeps_second_output(&recorded), "feed-forward input", self.narrow);
        keep(self.mixed, "casts of the feed-forward input", self.kept_mlp_casts());
        let gates = self.keeps_gates(&recorded);
        keep(gates, "gate xW", self.kept_wide());
        keep(gates, "up xV", self.kept_wide());
        if let Some(experts) = &self.experts {
            let of_experts = recorded.middle || self.experts_learn();
            keep(of_experts, "gate xW of the experts", experts.kept_inner());
            keep(of_experts, "up xV of the experts", experts.kept_inner());
            keep(of_experts, "routing", experts.kept_routing(recorded.middle));
            keep(of_experts, "low-rank products", experts.kept_low());
        }
        let has_product = self.experts.is_none() || self.shared.is_some();
        keep(self.learns(&[Down]) && has_product, "SiLU(xW) ⊙ xV", self.kept_wide());
        if let Some(shared) = &self.shared {
            keep(recorded.middle, "result of the shared expert", shared.kept());
        }
        for which in Projection::ALL {
            keep(self.projection(which).adapted, "low-rank products", self.projection(which).low);
            keep(self.projection(which).factors > 0, "adapters in 16 bits", self.projection(which).factors);
            keep(
                self.projection(which).unscaled > 0,
                "products before their magnitudes",
                self.projection(which).unscaled,
            );
        }
        items.retain(|item| item.bytes > 0);
        items
    }

    /// Lists what attention keeps, without adapters' products.
    fn kept_of_attention(&self, recorded: &Recorded) -> Vec<Item> {
        use Projection::{Key, Output, Query, Value};
        let mut items = Vec::new();
        let mut keep = |condition: bool, name, bytes| {
            if condition {
                items.push(Item { name, bytes });
            }
        };
        keep(self.mixed, "casts of the query, key, value input", self.kept_casts(&[Query, Key, Value]));
        if let Some(norms) = &self.query_key_norms {
            keep(recorded.attention, "outputs of the norms of queries and keys", self.query + self.key);
            keep(recorded.attention, "norm statistics", norms.statistics);
        }
        keep(recorded.attention, "query", self.attended_query);
        keep(recorded.attention, "key and value", 2 * self.attended_keys());
        keep(recorded.attention, "log-sum-exp of scores", self.log_sum_exp);
        if self.is_gated {
            keep(recorded.attention, "attention output", self.attended_query);
            keep(recorded.attention, "gate", self.query);
            keep(self.learns(&[Output]), "gated attention output", self.query);
        } else if self.exchange.is_some() {
            keep(recorded.attention, "attention output of all tokens", self.query);
            keep(self.learns(&[Output]), "attention output", self.query);
            return items;
        } else if self.mixed_in_fp32 {
            keep(recorded.attention, "attention output in fp32", self.attended_query);
            keep(self.learns(&[Output]), "attention output", self.query);
        } else {
            keep(recorded.attention || self.learns(&[Output]), "attention output", self.query);
        }
        items
    }

    /// Bytes that the attention keeps between its input and its output.
    pub(super) fn attention_bytes(&self, recorded: &Recorded) -> Result<u64, Error> {
        let (items, outputs) = match &self.linear {
            Some(linear) => (self.kept_of_linear(linear, recorded), [Projection::LinearOutput]),
            None => (self.kept_of_attention(recorded), [Projection::Output]),
        };
        let low = self.adapter_bytes(self.attention_inputs())?;
        let of_output = self.adapter_bytes(&outputs)?;
        exact::sum("bytes of a block", items.iter().map(|item| item.bytes).chain([low, of_output]))
    }

    /// Bytes that the adapter of a projection keeps beside its input; 0 without one.
    pub(super) fn kept_by_adapter(&self, which: Projection) -> u64 {
        let one = self.projection(which);
        if one.adapted { one.low + one.factors + one.unscaled } else { 0 }
    }

    /// Bytes that adapters of these projections keep beside inputs.
    pub(super) fn adapter_bytes(&self, which: &[Projection]) -> Result<u64, Error> {
        let adapted = which.iter().map(|which| self.projection(*which)).filter(|one| one.adapted);
        exact::sum("bytes of a block", adapted.map(|one| one.low + one.factors + one.unscaled))
    }

    /// Casts of an input that these projections keep in mixed precision.
    pub(super) fn kept_casts(&self, which: &[Projection]) -> u64 {
        if !self.mixed {
            return 0;
        }
        which.iter().filter(|one| self.learns(&[**one])).count() as u64 * self.operand
    }

    pub(super) fn keeps_first_output(&self, recorded: &Recorded) -> bool {
        !self.mixed && (recorded.input && self.keeps_output || self.learns(self.attention_inputs()))
    }

    pub(super) fn keeps_second_output(&self, recorded: &Recorded) -> bool {
        let reads_input = self.tiled.is_some() || self.keeps_output;
        !self.mixed && (recorded.middle && reads_input || self.mlp_input_is_read())
    }

    /// Casts of the MLP's input that are kept in mixed precision.
    pub(super) fn kept_mlp_casts(&self) -> u64 {
        match &self.experts {
            Some(experts) => experts.kept_casts(),
            None => self.kept_casts(&[Projection::Gate, Projection::Up]),
        }
    }

    /// `[n, f]`, unless the MLP keeps its input alone.
    pub(super) fn kept_wide(&self) -> u64 {
        if self.tiled.is_some() { 0 } else { self.wide }
    }

    /// What the MLP keeps beside its input and casts of it.
    pub(super) fn mlp_bytes(&self, recorded: &Recorded) -> Result<u64, Error> {
        use Projection::{Down, Gate, Up};
        let low = self.adapter_bytes(&[Gate, Up, Down])?;
        let gates = if self.keeps_gates(recorded) { 2 * self.kept_wide() } else { 0 };
        let product = if self.learns(&[Down]) { self.kept_wide() } else { 0 };
        let of_experts = match &self.experts {
            Some(experts) if recorded.middle || self.experts_learn() => {
                let routing = experts.kept_routing(recorded.middle);
                exact::sum("bytes of a block", [2 * experts.kept_inner(), routing, experts.kept_low()])?
            }
            _ => 0,
        };
        let shared = self.shared.as_ref().filter(|_| recorded.middle).map_or(0, SharedExpert::kept);
        exact::sum("bytes of a block", [gates, product, of_experts, shared, low])
    }
}
