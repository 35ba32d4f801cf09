//! Mixtures of experts in `config.json`.
//!
//! | field | transformers 5 | before |
//! |---|---|---|
//! | experts of a layer | `num_local_experts` | `num_experts` |
//!
//! Both names are read, and both are written. gpt-oss always has the first, and `intermediate_size` for the experts' width.

use serde_json::{Value, json};

use super::file::{HuggingFace, refuse};
use super::{DecoderConfig, MAX_LAYERS, MAX_SIZE, WHAT};
use crate::error::{Error, Result};
use crate::family::Facts;

/// Maximum number of experts of a layer: four times that of the widest models (Kimi K2: 384; Qwen3-Next: 512).
const MAX_EXPERTS: i64 = 1 << 11;
/// Maximum number of experts in all layers; Kimi K2 has 23 040.
const MAX_ALL_EXPERTS: i64 = 1 << 17;

/// A mixture of experts, which replaces the MLP of some layers: a router gives each token a few of `experts` small MLPs, and their
/// results are added with the router's weights. `models::mixture` has the mathematics.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// `num_local_experts` or `num_experts`: experts of a layer.
    pub experts: i64,
    /// `num_experts_per_tok`: experts that compute a token.
    pub per_token: i64,
    /// `moe_intermediate_size`: inner width of an expert.
    pub intermediate_size: i64,
    /// `shared_expert_intermediate_size`: inner width of an expert that computes every token, times a gate; `None` for a family without.
    pub shared: Option<i64>,
    /// `norm_topk_prob`: whether the weights of a token's experts are divided by their sum.
    pub normalizes: bool,
    /// `decoder_sparse_step`: with n, the layers n − 1, 2n − 1, … have experts.
    pub step: i64,
    /// `mlp_only_layers`: layers that have the ordinary MLP nevertheless.
    pub dense_layers: Vec<i64>,
    /// gpt-oss's activation, with which the router and the experts have biases; `None` for SiLU(g)·u without biases.
    pub clamped: Option<ClampedSwiglu>,
}

/// The numbers of gpt-oss's activation of gate g and up u: (u' + 1)·g'·σ(α·g') with g' = min(g, limit) and u' = clamp(u, −limit, limit).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampedSwiglu {
    /// `swiglu_alpha`: α.
    pub alpha: f64,
    /// `swiglu_limit`.
    pub limit: f64,
}

impl Default for ClampedSwiglu {
    /// Returns gpt-oss's.
    fn default() -> Self {
        Self { alpha: 1.702, limit: 7.0 }
    }
}

impl DecoderConfig {
    /// Returns the mixture of a layer; `None` for a layer with an ordinary MLP.
    pub fn layer_mixture(&self, layer: usize) -> Option<&Mixture> {
        let layer = i64::try_from(layer).ok()?;
        self.mixture.as_ref().filter(|mixture| {
            (layer + 1) % mixture.step.max(1) == 0 && !mixture.dense_layers.contains(&layer)
        })
    }

    /// Returns the number of layers with a mixture.
    pub fn mixture_layers(&self) -> usize {
        let layers = usize::try_from(self.num_hidden_layers.min(MAX_LAYERS)).unwrap_or(0);
        (0..layers).filter(|&layer| self.layer_mixture(layer).is_some()).count()
    }

    /// Refuses invalid numbers of experts.
    pub(super) fn check_mixture(&self) -> Result<()> {
        let config = |reason: String| Err(Error::Config { what: WHAT, reason });
        let Some(mixture) = &self.mixture else {
            if self.family.facts().has_experts {
                return config(format!("`{}` has no mixture of experts; give one", self.family.model_type()));
            }
            return Ok(());
        };
        if !self.family.facts().has_experts {
            return config(format!("`{}` has a mixture of experts; expected none", self.family.model_type()));
        }
        if mixture.shared.is_some() != self.family.facts().has_shared_expert {
            return config(format!(
                "the mixture has {} shared expert, and `{}` {}",
                if mixture.shared.is_some() { "a" } else { "no" },
                self.family.model_type(),
                if mixture.shared.is_some() { "has none" } else { "has one" }
            ));
        }
        if mixture.clamped.is_some() != self.family.facts().has_clamped_experts {
            return config(format!(
                "the experts have {} activation, and those of `{}` {}",
                if mixture.clamped.is_some() { "a clamped" } else { "no clamped" },
                self.family.model_type(),
                if mixture.clamped.is_some() { "do not" } else { "do" }
            ));
        }
        if let Some(ClampedSwiglu { alpha, limit }) = mixture.clamped {
            for (name, number) in [("swiglu_alpha", alpha), ("swiglu_limit", limit)] {
                if !(1e-9..=1e9).contains(&number) {
                    return config(format!("`{name}` is {number:?}; expected a number from 1e-9 to 1e9"));
                }
            }
            if mixture.intermediate_size != self.intermediate_size {
                return config(format!(
                    "the experts are {} wide and `intermediate_size` is {}; expected one width",
                    mixture.intermediate_size, self.intermediate_size
                ));
            }
        }
        for (name, size, largest) in [
            ("num_experts", mixture.experts, MAX_EXPERTS),
            ("num_experts_per_tok", mixture.per_token, mixture.experts),
            ("moe_intermediate_size", mixture.intermediate_size, MAX_SIZE),
            ("shared_expert_intermediate_size", mixture.shared.unwrap_or(1), MAX_SIZE),
            ("decoder_sparse_step", mixture.step, MAX_LAYERS),
        ] {
            if !(1..=largest).contains(&size) {
                return config(format!("`{name}` is {size}; expected a number from 1 to {largest}"));
            }
        }
        let all = mixture.experts.saturating_mul(self.num_hidden_layers);
        if all > MAX_ALL_EXPERTS {
            return config(format!(
                "{} layers of {} experts are {all}; expected at most {MAX_ALL_EXPERTS}",
                self.num_hidden_layers, mixture.experts
            ));
        }
        if let Some(layer) = mixture.dense_layers.iter().find(|&&layer| !(0..MAX_LAYERS).contains(&layer)) {
            return config(format!("`mlp_only_layers` has {layer}; expected numbers of layers, from 0 on"));
        }
        Ok(())
    }
}

/// Reads the mixture of a family that has one, and removes its fields from `file`'s others.
pub(super) fn read(file: &mut HuggingFace, facts: &Facts) -> Result<Mixture> {
    if file.get::<bool>("output_router_logits")? == Some(true) {
        return Err(refuse(
            "`output_router_logits` is true, which adds the load-balancing loss to every loss, also of an evaluation; set it to false, and give \
             `loss.router_aux_loss` for a training"
                .to_owned(),
        ));
    }
    let (new, old): (Option<i64>, Option<i64>) = (file.take("num_local_experts")?, file.take("num_experts")?);
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        return Err(refuse(format!("`num_local_experts` is {new} and `num_experts` {old}; they must agree")));
    }
    // Defaults are those of transformers.
    if facts.has_clamped_experts {
        let clamped = ClampedSwiglu::default();
        return Ok(Mixture {
            experts: new.or(old).unwrap_or(128),
            per_token: file.take("num_experts_per_tok")?.unwrap_or(4),
            intermediate_size: file.intermediate_size.unwrap_or(2880),
            shared: None,
            normalizes: true,
            step: 1,
            dense_layers: Vec::new(),
            clamped: Some(ClampedSwiglu {
                alpha: file.take_number("swiglu_alpha")?.unwrap_or(clamped.alpha),
                limit: file.take_number("swiglu_limit")?.unwrap_or(clamped.limit),
            }),
        });
    }
    if facts.has_shared_expert {
        return Ok(Mixture {
            experts: new.or(old).unwrap_or(256),
            per_token: file.take("num_experts_per_tok")?.unwrap_or(8),
            intermediate_size: file.take("moe_intermediate_size")?.unwrap_or(512),
            shared: Some(file.take("shared_expert_intermediate_size")?.unwrap_or(512)),
            normalizes: true,
            step: 1,
            dense_layers: Vec::new(),
            clamped: None,
        });
    }
    Ok(Mixture {
        experts: new.or(old).unwrap_or(128),
        per_token: file.take("num_experts_per_tok")?.unwrap_or(8),
        intermediate_size: file.take("moe_intermediate_size")?.unwrap_or(768),
        shared: None,
        normalizes: file.take("norm_topk_prob")?.unwrap_or(false),
        step: file.take("decoder_sparse_step")?.unwrap_or(1),
        dense_layers: file.take("mlp_only_layers")?.unwrap_or_default(),
        clamped: None,
    })
}

/// Returns the fields of a mixture.
pub(super) fn write(mixture: &Mixture) -> Vec<(&'static str, Value)> {
    if let Some(ClampedSwiglu { alpha, limit }) = mixture.clamped {
        return vec![
            ("num_local_experts", json!(mixture.experts)),
            ("num_experts_per_tok", json!(mixture.per_token)),
            ("swiglu_alpha", json!(alpha)),
            ("swiglu_limit", json!(limit)),
        ];
    }
    let mut fields = vec![
        ("num_local_experts", json!(mixture.experts)),
        ("num_experts", json!(mixture.experts)),
        ("num_experts_per_tok", json!(mixture.per_token)),
        ("moe_intermediate_size", json!(mixture.intermediate_size)),
    ];
    match mixture.shared {
        Some(shared) => fields.push(("shared_expert_intermediate_size", json!(shared))),
        None => fields.extend([
            ("norm_topk_prob", json!(mixture.normalizes)),
            ("decoder_sparse_step", json!(mixture.step)),
            ("mlp_only_layers", json!(mixture.dense_layers)),
        ]),
    }
    fields
}
