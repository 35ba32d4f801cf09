//! The shapes of a model's tensors and its parameter count, computed without allocating anything.

mod gemma4;

use crate::config::DecoderConfig;
use crate::family::QueryKeyNorm;
use crate::tensors::{
    EXPERT_PROJECTIONS, LINEAR_ATTENTION, LINEAR_INPUTS, PER_LAYER_EMBEDDING, Projection, SHARED_EXPERT,
    SHARED_EXPERT_GATE, SINKS, Width, expert_projection,
};

/// The name of the embedding's tensor, without Hugging Face's `model.`.
pub const EMBEDDING: &str = "embed_tokens.weight";
/// The name of the head's tensor.
pub const LM_HEAD: &str = "lm_head.weight";

/// A tensor's name and shape.
type Shape = (String, Vec<i64>);

/// The number of elements of all tensors, at most `u64::MAX`.
fn saturating_sum(shapes: impl Iterator<Item = Shape>) -> u64 {
    let size = |size: i64| u64::try_from(size).unwrap_or(0);
    let numbers =
        |shape: Vec<i64>| shape.into_iter().fold(1, |product: u64, n| product.saturating_mul(size(n)));
    shapes.fold(0, |sum: u64, (_, shape)| sum.saturating_add(numbers(shape)))
}

impl DecoderConfig {
    /// Returns the names (without Hugging Face's `model.`) and shapes of every tensor, in the order of
    /// `models::state_dict`. A tied head shares the embedding's tensor and is not listed again.
    pub fn shapes(&self) -> Vec<(String, Vec<i64>)> {
        let kinds =
            [false, true].map(|is_linear| [false, true].map(|sparse| self.block_shapes(sparse, is_linear)));
        let layers = 0..usize::try_from(self.num_hidden_layers).unwrap_or(0);
        let blocks = layers.flat_map(|index| {
            let (is_linear, is_sparse) = (self.is_linear(index), self.layer_mixture(index).is_some());
            let block = match self.gemma4 {
                Some(_) => self.gemma4_block_shapes(index),
                None => kinds[usize::from(is_linear)][usize::from(is_sparse)].clone(),
            };
            block.into_iter().map(move |(name, shape)| (format!("layers.{index}.{name}"), shape))
        });
        let embedding = (EMBEDDING.to_owned(), vec![self.vocab_size, self.hidden_size]);
        let before = std::iter::once(embedding).chain(self.per_layer_shapes());
        before.chain(blocks).chain(self.end_shapes()).collect()
    }

    /// Returns the number of parameters, a tied head once: 494 032 768 for Qwen2.5-0.5B. Saturates at `u64::MAX`.
    pub fn parameter_count(&self) -> u64 {
        let size = |size: i64| u64::try_from(size).unwrap_or(0);
        let sum = |shapes: Vec<Shape>| saturating_sum(shapes.into_iter());
        let embedding = size(self.vocab_size).saturating_mul(size(self.hidden_size));
        let outer = embedding.saturating_add(sum(self.end_shapes()));
        if self.gemma4.is_some() {
            return outer.saturating_add(self.gemma4_parameters());
        }
        let linear = self.linear_layers() as u64;
        let sparse_linear = self.linear_mixture_layers() as u64;
        let sparse = (self.mixture_layers() as u64).saturating_sub(sparse_linear);
        let dense = size(self.num_hidden_layers).saturating_sub(linear).saturating_sub(sparse);
        let of_layers = |layers: u64, has_experts, is_linear| match layers {
            0 => 0,
            _ => sum(self.block_shapes(has_experts, is_linear)).saturating_mul(layers),
        };
        let blocks = [
            of_layers(dense, false, false),
            of_layers(sparse, true, false),
            of_layers(linear - sparse_linear, false, true),
            of_layers(sparse_linear, true, true),
        ];
        blocks.into_iter().fold(outer, u64::saturating_add)
    }

    /// Returns the name (without Hugging Face's `model.`) and `[in, out]` of every projection of the blocks, and of a head that is
    /// not tied. Routers and experts of a mixture are not listed: adapters cannot replace them.
    pub fn projections(&self) -> Vec<(String, [i64; 2])> {
        let of_mixture = [format!(".{}.", self.family.router()), ".mlp.experts.".to_owned()];
        let is_table = |name: &str| name == EMBEDDING || name.starts_with(PER_LAYER_EMBEDDING);
        let is_listed = |name: &str| !is_table(name) && !of_mixture.iter().any(|part| name.contains(part));
        let all = self.shapes().into_iter().filter(|(name, _)| is_listed(name));
        let matrix = |(name, shape): (String, Vec<i64>)| match shape[..] {
            [out, inner] => Some((name.strip_suffix(".weight")?.to_owned(), [inner, out])),
            _ => None,
        };
        all.filter_map(matrix).collect()
    }

    /// The tensors of a block whose MLP is a mixture, if `has_experts`, and whose attention is linear, if `is_linear`.
    fn block_shapes(&self, has_experts: bool, is_linear: bool) -> Vec<Shape> {
        let sizes = self.sizes();
        let width =
            |width: Width| sizes.width(width).and_then(|width| i64::try_from(width).ok()).unwrap_or(i64::MAX);
        let projection = |projection: &Projection| {
            let Projection { name, input, output, bias } = *projection;
            let weight = (format!("{name}.weight"), vec![width(output), width(input)]);
            let bias = sizes.has_bias(bias).then(|| (format!("{name}.bias"), vec![width(output)]));
            std::iter::once(weight).chain(bias)
        };
        let norm_widths = match self.family.facts().query_key_norm {
            QueryKeyNorm::AllHeads => [width(Width::Queries), width(Width::Keys)],
            QueryKeyNorm::None | QueryKeyNorm::PerHead => [self.head_dim; 2],
        };
        let (attention, mlp): (Vec<_>, Vec<_>) =
            self.family.projections().iter().partition(|projection| projection.is_attention());
        let norm = |(name, width): (&&str, i64)| (format!("{name}.weight"), vec![width]);
        let mut shapes: Vec<Shape> = Vec::new();
        if let Some(linear) = self.linear_attention.filter(|_| is_linear) {
            // In the order of the module: the projection of the output last.
            let mut projections = self.family.linear_projections().iter().map(projection);
            shapes.extend(projections.by_ref().take(LINEAR_INPUTS).flatten());
            let named = |(name, shape): (&str, Vec<i64>)| (format!("{LINEAR_ATTENTION}.{name}"), shape);
            shapes.extend(linear.shapes().map(named));
            shapes.extend(projections.flatten());
        } else {
            shapes.extend(attention.into_iter().flat_map(projection));
            if self.family.facts().has_sinks {
                shapes.push((SINKS.to_owned(), vec![self.num_attention_heads]));
            }
            shapes.extend(self.family.query_key_norm_names().iter().zip(norm_widths).map(norm));
        }
        match self.mixture.as_ref().filter(|_| has_experts) {
            None => shapes.extend(mlp.into_iter().flat_map(projection)),
            Some(mixture) => {
                let (hidden, inner) = (self.hidden_size, mixture.intermediate_size);
                let has_biases = mixture.clamped.is_some();
                let named = |name: &str, [out, inner]: [i64; 2]| {
                    let bias = has_biases.then(|| (format!("{name}.bias"), vec![out]));
                    std::iter::once((format!("{name}.weight"), vec![out, inner])).chain(bias)
                };
                shapes.extend(named(self.family.router(), [mixture.experts, hidden]));
                let widths = [[inner, hidden], [inner, hidden], [hidden, inner]];
                for expert in 0..u64::try_from(mixture.experts).unwrap_or(0) {
                    let projections = EXPERT_PROJECTIONS.iter().zip(widths);
                    shapes.extend(
                        projections.flat_map(|(name, shape)| named(&expert_projection(expert, name), shape)),
                    );
                }
                if let Some(shared) = mixture.shared {
                    let widths = [[shared, hidden], [shared, hidden], [hidden, shared]];
                    shapes.extend(
                        EXPERT_PROJECTIONS
                            .iter()
                            .zip(widths)
                            .map(|(name, shape)| (format!("{SHARED_EXPERT}.{name}.weight"), shape.to_vec())),
                    );
                    shapes.push((format!("{SHARED_EXPERT_GATE}.weight"), vec![1, hidden]));
                }
            }
        }
        shapes.extend(self.family.norm_names().iter().map(|name| norm((name, self.hidden_size))));
        shapes
    }

    fn end_shapes(&self) -> Vec<Shape> {
        let head = (!self.tie_word_embeddings)
            .then(|| (LM_HEAD.to_owned(), vec![self.vocab_size, self.hidden_size]));
        std::iter::once(("norm.weight".to_owned(), vec![self.hidden_size])).chain(head).collect()
    }
}
