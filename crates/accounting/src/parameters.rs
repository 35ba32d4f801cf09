//! Parameters: every tensor of a checkpoint with its name and shape, and their exact number.
//!
//! Names and shapes are those that transformers' `save_pretrained` writes (for [`Family::Gpt2Like`] those of
//! `torch.nn.TransformerDecoderLayer`), so that a sum can be checked against a real file. A tied output projection
//! is written once, as the embedding. GPT-2's `Conv1D` keeps its weights as `[inputs, outputs]`, the other families
//! as `[outputs, inputs]`.

#[cfg(test)]
mod tests;

use decoder::{
    EXPERT_PROJECTIONS, LINEAR_ATTENTION, SHARED_EXPERT, SHARED_EXPERT_GATE, SINKS, expert_projection,
};

use crate::gemma4::LayerKind;
use crate::model::{AttentionKind, Decoder, ExpertSizes, Family, Linear, Part};
use crate::{Error, exact};

/// Blocks beyond this number are counted, but not listed.
const LISTED_LAYERS: u64 = 10_000;

/// A tensor of parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterTensor {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// The part of the model that it belongs to.
    pub part: Part,
}

impl ParameterTensor {
    /// Returns the number of elements.
    pub fn elements(&self) -> Result<u64, Error> {
        exact::product("parameters of a tensor", &self.shape)
    }
}

impl Decoder {
    /// Returns every tensor of the checkpoint, in the order of the model's modules.
    ///
    /// # Errors
    /// A model of more than 10 000 blocks is not listed; [`parameters`](Self::parameters) still counts it.
    pub fn parameter_tensors(&self) -> Result<Vec<ParameterTensor>, Error> {
        if self.layers > LISTED_LAYERS {
            return Err(Error::Shape {
                what: format!("a list of the tensors of {} layers is too long", self.layers),
                remedy: format!("list a model of at most {LISTED_LAYERS} layers"),
            });
        }
        let mut tensors = self.tensors_before_blocks();
        let mut blocks = Vec::new();
        for (kind, _) in self.attention_kinds() {
            blocks.push((kind, self.block_tensors_of(kind)?));
        }
        for layer in 0..self.layers {
            let (prefix, kind) = (self.block_prefix(layer), self.attention_of(layer));
            let block = blocks.iter().filter(|(other, _)| *other == kind).flat_map(|(_, block)| block);
            tensors
                .extend(block.map(|t| ParameterTensor { name: format!("{prefix}{}", t.name), ..t.clone() }));
        }
        tensors.extend(self.tensors_after_blocks());
        Ok(tensors)
    }

    /// Returns the number of parameters, each counted once: a tied output projection is part of the embedding.
    pub fn parameters(&self) -> Result<u64, Error> {
        exact::sum(
            "number of parameters",
            [
                count(&self.tensors_before_blocks())?,
                self.all_block_parameters()?,
                count(&self.tensors_after_blocks())?,
            ],
        )
    }

    /// Returns the number of parameters that compute a token: all but those of the experts that it is not routed to.
    pub fn active_parameters(&self) -> Result<u64, Error> {
        let total = self.parameters()?;
        let Some(experts) = self.experts else { return Ok(total) };
        let idle = experts.count - experts.per_token;
        let weights = exact::product("weights of an expert", &[3, self.hidden, experts.feed_forward])?;
        let biases = match experts.biases {
            true => {
                exact::sum("biases of an expert", [experts.feed_forward, experts.feed_forward, self.hidden])?
            }
            false => 0,
        };
        let each = exact::sum("parameters of an expert", [weights, biases])?;
        Ok(total - exact::product("parameters of idle experts", &[experts.layers, idle, each])?)
    }

    pub(crate) fn all_block_parameters(&self) -> Result<u64, Error> {
        const WHAT: &str = "parameters of all blocks";
        let products: Result<Vec<u64>, Error> = self
            .block_groups()?
            .iter()
            .map(|(layers, tensors)| exact::product(WHAT, &[*layers, count(tensors)?]))
            .collect();
        exact::sum(WHAT, products?)
    }

    /// The parts of blocks, each with the number of blocks that have it. Layers with linear attention may have experts or an MLP, as the
    /// others.
    fn block_groups(&self) -> Result<Vec<(u64, Vec<ParameterTensor>)>, Error> {
        if let Some(sizes) = &self.gemma4 {
            let group = |kind: &LayerKind| {
                let linears = self.linears_of_kind(sizes, kind)?.concat();
                let weights = linears.iter().flat_map(|linear| self.linear_tensors(linear));
                Ok((kind.layers, weights.chain(self.norms_of_kind(sizes, kind)).collect()))
            };
            return self.layer_kinds(sizes).iter().map(group).collect();
        }
        let sparse = self.experts.map_or(0, |experts| experts.layers);
        let linear = self.linear.map_or(0, |linear| linear.layers);
        Ok(vec![
            (self.layers, self.block_norms()),
            (self.layers - linear, self.attention_tensors()?),
            (linear, self.linear_tensors_of_block()?),
            (self.layers - sparse, self.mlp_tensors(None)?),
            (sparse, self.mlp_tensors(self.experts)?),
        ])
    }

    /// Returns the number of parameters of one block.
    pub fn block_parameters(&self) -> Result<u64, Error> {
        count(&self.block_tensors()?)
    }

    /// Returns the number of parameters that are factors of matrix products with each token, the `N` of `2·N·D`: weights of the
    /// projections and of the output (tied or not), without embeddings, norms and biases.
    pub fn product_parameters(&self) -> Result<u64, Error> {
        let weights = |linears: &[Linear]| {
            let products: Result<Vec<u64>, Error> = linears
                .iter()
                .map(|linear| exact::product("elements of a weight", &[linear.inputs, linear.outputs]))
                .collect();
            exact::sum("elements of the weights", products?)
        };
        let of_blocks: Result<Vec<u64>, Error> = self
            .all_block_linears()?
            .into_iter()
            .map(|(layers, linear)| exact::product("weights of all blocks", &[layers, weights(&[linear])?]))
            .collect();
        exact::sum(
            "parameters in matrix products",
            [exact::sum("weights of all blocks", of_blocks?)?, weights(&self.outer_linears())?],
        )
    }

    /// Returns the number of parameters by part, parts without any left out. The sum is [`parameters`](Self::parameters).
    pub fn parameters_by_part(&self) -> Result<Vec<(Part, u64)>, Error> {
        let outer = [self.tensors_before_blocks(), self.tensors_after_blocks()].concat();
        let groups = self.block_groups()?;
        let mut parts = Vec::new();
        for part in Part::ALL {
            let of_part = |tensors: &[ParameterTensor]| {
                count(&tensors.iter().filter(|t| t.part == part).cloned().collect::<Vec<_>>())
            };
            let blocks: Result<Vec<u64>, Error> = groups
                .iter()
                .map(|(layers, tensors)| {
                    exact::product("parameters of all blocks", &[*layers, of_part(tensors)?])
                })
                .collect();
            let blocks = exact::sum("parameters of all blocks", blocks?)?;
            let total = exact::sum("parameters of a part", [of_part(&outer)?, blocks])?;
            if total > 0 {
                parts.push((part, total));
            }
        }
        Ok(parts)
    }

    /// The tensors of one block, without the block's prefix, with the number of blocks.
    pub(crate) fn tensor_groups(&self) -> Result<Vec<(u64, ParameterTensor)>, Error> {
        let mut all: Vec<_> = self.outer_tensors().into_iter().map(|tensor| (1, tensor)).collect();
        for (kind, layers) in self.attention_kinds() {
            all.extend(self.block_tensors_of(kind)?.into_iter().map(|tensor| (layers, tensor)));
        }
        Ok(all)
    }

    /// The tensors outside of the blocks.
    pub(crate) fn outer_tensors(&self) -> Vec<ParameterTensor> {
        [self.tensors_before_blocks(), self.tensors_after_blocks()].concat()
    }

    pub(crate) fn tensors_before_blocks(&self) -> Vec<ParameterTensor> {
        let (v, e) = (self.vocabulary, self.embedding);
        match self.family {
            Family::Gpt2 => vec![
                tensor("transformer.wte.weight", &[v, e], Part::Embedding),
                tensor("transformer.wpe.weight", &[self.context, e], Part::Position),
            ],
            Family::Gpt2Like => {
                let mut tensors = vec![tensor("embedding.weight", &[v, e], Part::Embedding)];
                let projector = self.outer_linears().into_iter().filter(|l| l.part == Part::Projector);
                tensors.extend(projector.flat_map(|linear| self.linear_tensors(&linear)));
                tensors
            }
            _ => {
                let embedding = tensor("model.embed_tokens.weight", &[v, e], Part::Embedding);
                std::iter::once(embedding).chain(self.per_layer_tensors()).collect()
            }
        }
    }

    pub(crate) fn tensors_after_blocks(&self) -> Vec<ParameterTensor> {
        let mut tensors = match self.family {
            Family::Gpt2 => self.norm_tensors("transformer.ln_f"),
            Family::Gpt2Like => vec![],
            _ => self.norm_tensors("model.norm"),
        };
        if !self.tied {
            let output = self.outer_linears().into_iter().filter(|l| l.part == Part::Output);
            tensors.extend(output.flat_map(|linear| match self.family {
                // GPT-2's head is an ordinary Linear, unlike the projections of its blocks.
                Family::Gpt2 => {
                    vec![tensor("lm_head.weight", &[linear.outputs, linear.inputs], Part::Output)]
                }
                _ => self.linear_tensors(&linear),
            }));
        }
        tensors
    }

    /// The tensors of each block, without the block's prefix; an error if blocks differ.
    pub(crate) fn block_tensors(&self) -> Result<Vec<ParameterTensor>, Error> {
        self.check_uniform()?;
        self.block_tensors_of(AttentionKind::Full)
    }

    /// The tensors of a block with this kind of attention, without the block's prefix; an error if only some layers have experts.
    pub(crate) fn block_tensors_of(&self, kind: AttentionKind) -> Result<Vec<ParameterTensor>, Error> {
        self.check_widths()?;
        self.check_experts()?;
        // The order of the models' modules: `sharding` cuts its buckets along it.
        let attention = match kind {
            AttentionKind::Linear => self.linear_tensors_of_block()?,
            AttentionKind::Full | AttentionKind::Windowed { .. } => self.attention_tensors()?,
        };
        let mlp = self.mlp_tensors(self.experts)?;
        let norms = self.block_norms();
        let [before, after] = if self.family == Family::Gpt2 { [norms, vec![]] } else { [vec![], norms] };
        Ok([before, attention, mlp, after].concat())
    }

    /// The norms of a block, without those of queries and keys.
    fn block_norms(&self) -> Vec<ParameterTensor> {
        self.family.norm_names().iter().flat_map(|name| self.norm_tensors(name)).collect()
    }

    /// The attention of a block, with the norms of queries and keys.
    fn attention_tensors(&self) -> Result<Vec<ParameterTensor>, Error> {
        let linears = self.dense_linears()?;
        let attention = linears.iter().filter(|linear| linear.part == Part::Attention);
        let mut tensors: Vec<_> = attention.flat_map(|linear| self.linear_tensors(linear)).collect();
        if self.family.facts().has_sinks {
            tensors.push(tensor(SINKS, &[self.heads], Part::Attention));
        }
        for (name, (width, _)) in
            self.family.query_key_norm_names().iter().zip(self.query_key_norms()?.into_iter().flatten())
        {
            tensors.push(tensor(&format!("{name}.weight"), &[width], Part::Norm));
        }
        Ok(tensors)
    }

    /// The linear attention of a block.
    fn linear_tensors_of_block(&self) -> Result<Vec<ParameterTensor>, Error> {
        let Some(linear) = self.linear else { return Ok(Vec::new()) };
        let linears = self.linears_of(self.family.linear_projections())?;
        let mut tensors: Vec<_> = linears.iter().flat_map(|linear| self.linear_tensors(linear)).collect();
        let channels = exact::sum(
            "channels of linear attention",
            [
                exact::product("keys and queries", &[2, linear.key_heads, linear.key])?,
                exact::product("values", &[linear.value_heads, linear.value])?,
            ],
        )?;
        for (name, shape, part) in [
            ("conv1d.weight", &[channels, 1, linear.window][..], Part::Attention),
            ("A_log", &[linear.value_heads], Part::Attention),
            ("dt_bias", &[linear.value_heads], Part::Attention),
            ("norm.weight", &[linear.value], Part::Norm),
        ] {
            tensors.push(tensor(&format!("{LINEAR_ATTENTION}.{name}"), shape, part));
        }
        Ok(tensors)
    }

    /// The MLP of a block, or these experts in place of it.
    fn mlp_tensors(&self, experts: Option<ExpertSizes>) -> Result<Vec<ParameterTensor>, Error> {
        let linears = self.dense_linears()?;
        let others = linears.iter().filter(|linear| linear.part != Part::Attention);
        let mut tensors = Vec::new();
        match experts {
            None => tensors.extend(others.flat_map(|linear| self.linear_tensors(linear))),
            Some(experts) => {
                let (hidden, inner) = (self.hidden, experts.feed_forward);
                tensors.extend(self.linear_tensors(&self.router(experts)));
                let shapes = [[inner, hidden], [inner, hidden], [hidden, inner]];
                for expert in 0..experts.count {
                    for (name, shape) in EXPERT_PROJECTIONS.iter().zip(&shapes) {
                        let name = expert_projection(expert, name);
                        tensors.push(tensor(&format!("{name}.weight"), shape, Part::FeedForward));
                        if experts.biases {
                            tensors.push(tensor(&format!("{name}.bias"), &shape[..1], Part::FeedForward));
                        }
                    }
                }
                if experts.shared > 0 {
                    let shared = experts.shared;
                    let shapes = [[shared, hidden], [shared, hidden], [hidden, shared]];
                    tensors.extend(EXPERT_PROJECTIONS.iter().zip(&shapes).map(|(name, shape)| {
                        tensor(&format!("{SHARED_EXPERT}.{name}.weight"), shape, Part::FeedForward)
                    }));
                    let gate = format!("{SHARED_EXPERT_GATE}.weight");
                    tensors.push(tensor(&gate, &[1, hidden], Part::FeedForward));
                }
            }
        }
        Ok(tensors)
    }

    fn block_prefix(&self, layer: u64) -> String {
        match self.family {
            Family::Gpt2 => format!("transformer.h.{layer}."),
            Family::Gpt2Like if self.layers == 1 => "decoder.".into(),
            Family::Gpt2Like => format!("decoder.layers.{layer}."),
            _ => format!("model.layers.{layer}."),
        }
    }

    fn linear_tensors(&self, linear: &Linear) -> Vec<ParameterTensor> {
        let shape = match self.family {
            Family::Gpt2 => [linear.inputs, linear.outputs],
            _ => [linear.outputs, linear.inputs],
        };
        // `MultiheadAttention` names its packed projection without a module of its own.
        let separator = if linear.name.ends_with("in_proj") { '_' } else { '.' };
        let mut tensors = vec![tensor(&format!("{}{separator}weight", linear.name), &shape, linear.part)];
        if linear.bias {
            let name = format!("{}{separator}bias", linear.name);
            tensors.push(tensor(&name, &[linear.outputs], linear.part));
        }
        tensors
    }

    fn norm_tensors(&self, name: &str) -> Vec<ParameterTensor> {
        let mut tensors = vec![tensor(&format!("{name}.weight"), &[self.hidden], Part::Norm)];
        if !self.family.is_rotary() {
            tensors.push(tensor(&format!("{name}.bias"), &[self.hidden], Part::Norm));
        }
        tensors
    }
}

pub(crate) fn tensor(name: &str, shape: &[u64], part: Part) -> ParameterTensor {
    ParameterTensor { name: name.into(), shape: shape.into(), part }
}

fn count(tensors: &[ParameterTensor]) -> Result<u64, Error> {
    let elements: Result<Vec<u64>, Error> = tensors.iter().map(ParameterTensor::elements).collect();
    exact::sum("number of parameters", elements?)
}
