//! The layers of a Gemma 4, which differ in the width of their heads, in their window, and in whether they have keys of their own.

use decoder::{
    BiasOption, PER_LAYER_EMBEDDING, PER_LAYER_GATE, PER_LAYER_MODEL_PROJECTION, PER_LAYER_NORM,
    PER_LAYER_PROJECTION, POST_PER_LAYER_NORM,
};

use crate::model::{Decoder, Gemma4Sizes, Linear, Part};
use crate::parameters::{ParameterTensor, tensor};
use crate::{Error, exact};

/// Layers that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerKind {
    /// Number of these layers.
    pub(crate) layers: u64,
    /// Width of a head.
    pub(crate) head_dim: u64,
    /// Key-value heads.
    pub(crate) kv_heads: u64,
    /// Whether they attend in full.
    pub(crate) full: bool,
    /// Whether they attend to the keys of earlier layers.
    pub(crate) shares: bool,
}

impl Decoder {
    /// Returns the kinds of layers of a Gemma 4.
    pub(crate) fn layer_kinds(&self, sizes: &Gemma4Sizes) -> [LayerKind; 4] {
        let sliding_shared = sizes.shared - sizes.shared_full;
        let sliding = (self.layers - sizes.full) - sliding_shared;
        let kind = |layers, full, shares| LayerKind {
            layers,
            head_dim: if full { sizes.head_dim } else { self.head_dim },
            kv_heads: if full { sizes.kv_heads } else { self.kv_heads },
            full,
            shares,
        };
        [
            kind(sliding, false, false),
            kind(sizes.full - sizes.shared_full, true, false),
            kind(sliding_shared, false, true),
            kind(sizes.shared_full, true, true),
        ]
    }

    /// Refuses layers that contradict each other.
    pub(crate) fn check_gemma4(&self, sizes: &Gemma4Sizes) -> Result<(), Error> {
        let fits = sizes.full <= self.layers
            && sizes.shared < self.layers
            && sizes.shared_full <= sizes.shared.min(sizes.full)
            && sizes.shared - sizes.shared_full <= self.layers - sizes.full;
        if !fits {
            return Err(Error::Shape {
                what: format!(
                    "of {} layers {} attend in full, {} share keys, and {} do both",
                    self.layers, sizes.full, sizes.shared, sizes.shared_full
                ),
                remedy: "give numbers of the model's layers".into(),
            });
        }
        if !self.heads.is_multiple_of(sizes.kv_heads) {
            return Err(Error::Shape {
                what: format!(
                    "{} heads are not a multiple of {} key-value heads",
                    self.heads, sizes.kv_heads
                ),
                remedy: "give key-value heads that divide the heads".into(),
            });
        }
        Ok(())
    }

    /// The products with weights of these layers' attention and of the rest of their block.
    pub(crate) fn linears_of_kind(
        &self,
        sizes: &Gemma4Sizes,
        kind: &LayerKind,
    ) -> Result<[Vec<Linear>; 2], Error> {
        let hidden = self.hidden;
        let queries = exact::product("width of the queries", &[self.heads, kind.head_dim])?;
        let keys = exact::product("width of the keys", &[kind.kv_heads, kind.head_dim])?;
        let bias = self.has_bias(BiasOption::QueriesKeysValues);
        let part = Part::Attention;
        let mut attention = vec![Linear::new("self_attn.q_proj", part, hidden, queries, bias)];
        if !kind.shares {
            attention.push(Linear::new("self_attn.k_proj", part, hidden, keys, bias));
            if !(kind.full && sizes.keys_are_values) {
                attention.push(Linear::new("self_attn.v_proj", part, hidden, keys, bias));
            }
        }
        let of_output = self.has_bias(BiasOption::AttentionOutput);
        attention.push(Linear::new("self_attn.o_proj", part, queries, hidden, of_output));
        let factor = if kind.shares { sizes.shared_feed_forward } else { 1 };
        let inner = exact::product("width of the feed-forward layer", &[factor, self.feed_forward])?;
        let part = Part::FeedForward;
        let mut others = vec![
            Linear::new("mlp.gate_proj", part, hidden, inner, false),
            Linear::new("mlp.up_proj", part, hidden, inner, false),
            Linear::new("mlp.down_proj", part, inner, hidden, false),
        ];
        if sizes.per_layer_input > 0 {
            others.push(Linear::new(PER_LAYER_GATE, part, hidden, sizes.per_layer_input, false));
            others.push(Linear::new(PER_LAYER_PROJECTION, part, sizes.per_layer_input, hidden, false));
        }
        Ok([attention, others])
    }

    /// The parameters of a block of these layers, without the products' weights.
    pub(crate) fn norms_of_kind(&self, sizes: &Gemma4Sizes, kind: &LayerKind) -> Vec<ParameterTensor> {
        let of_heads: &[&str] =
            if kind.shares { &["self_attn.q_norm"] } else { &["self_attn.q_norm", "self_attn.k_norm"] };
        let norm = |name: &&str, width: u64| tensor(&format!("{name}.weight"), &[width], Part::Norm);
        let mut norms: Vec<_> = of_heads.iter().map(|name| norm(name, kind.head_dim)).collect();
        norms.extend(self.family.norm_names().iter().map(|name| norm(name, self.hidden)));
        if sizes.per_layer_input > 0 {
            norms.push(norm(&POST_PER_LAYER_NORM, self.hidden));
        }
        norms
    }

    /// The projection of the first embedding to the second's width, if there is a second.
    pub(crate) fn per_layer_projection(&self) -> Option<Linear> {
        let sizes = self.gemma4.filter(|sizes| sizes.per_layer_input > 0)?;
        let all = self.layers.saturating_mul(sizes.per_layer_input);
        Some(Linear::new(PER_LAYER_MODEL_PROJECTION, Part::Projector, self.hidden, all, false))
    }

    /// The tensors of the second embedding.
    pub(crate) fn per_layer_tensors(&self) -> Vec<ParameterTensor> {
        let (Some(sizes), Some(projection)) = (self.gemma4, self.per_layer_projection()) else {
            return Vec::new();
        };
        let weight = |name: &str| format!("model.{name}.weight");
        vec![
            tensor(
                &weight(PER_LAYER_EMBEDDING),
                &[sizes.per_layer_vocabulary, projection.outputs],
                Part::Embedding,
            ),
            tensor(&weight(projection.name), &[projection.outputs, self.hidden], Part::Projector),
            tensor(&weight(PER_LAYER_NORM), &[sizes.per_layer_input], Part::Norm),
        ]
    }
}
