//! Parameters: every tensor of a checkpoint with its name and shape, and their exact number.
//!
//! Names and shapes are those that transformers' `save_pretrained` writes (for [`Family::Gpt2Like`] those of
//! `torch.nn.TransformerDecoderLayer`), so that a sum can be checked against a real file. A tied output projection
//! is written once, as the embedding. GPT-2's `Conv1D` keeps its weights as `[inputs, outputs]`, the other families
//! as `[outputs, inputs]`.

use decoder::{EXPERT_PROJECTIONS, LINEAR_ATTENTION, SHARED_EXPERT, SHARED_EXPERT_GATE, expert_projection};

use crate::model::{Decoder, ExpertSizes, Family, Linear, Part};
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
        let block = self.block_tensors()?;
        for layer in 0..self.layers {
            let prefix = self.block_prefix(layer);
            tensors.extend(
                block.iter().map(|t| ParameterTensor { name: format!("{prefix}{}", t.name), ..t.clone() }),
            );
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
        let terms = [experts.layers, idle, 3, self.hidden, experts.feed_forward];
        Ok(total - exact::product("parameters of idle experts", &terms)?)
    }

    fn all_block_parameters(&self) -> Result<u64, Error> {
        const WHAT: &str = "parameters of all blocks";
        let sparse = self.experts.map_or(0, |experts| experts.layers);
        let linear = self.linear.map_or(0, |linear| linear.layers);
        let of_layers = |layers: u64, tensors: Result<Vec<ParameterTensor>, Error>| match layers {
            0 => Ok(0),
            _ => exact::product(WHAT, &[layers, count(&tensors?)?]),
        };
        // Which layers have linear attention is independent of which have experts.
        exact::sum(
            WHAT,
            [
                of_layers(self.layers, Ok(self.block_norms()))?,
                of_layers(self.layers - linear, self.attention_tensors())?,
                of_layers(linear, self.linear_tensors_of_block())?,
                of_layers(self.layers - sparse, self.mlp_tensors(None))?,
                of_layers(sparse, self.mlp_tensors(self.experts))?,
            ],
        )
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
        let block = weights(&self.block_linears()?)?;
        exact::sum(
            "parameters in matrix products",
            [
                exact::product("weights of all blocks", &[self.layers, block])?,
                weights(&self.outer_linears())?,
            ],
        )
    }

    /// Returns the number of parameters by part, parts without any left out. The sum is [`parameters`](Self::parameters).
    pub fn parameters_by_part(&self) -> Result<Vec<(Part, u64)>, Error> {
        let outer = [self.tensors_before_blocks(), self.tensors_after_blocks()].concat();
        let block = self.block_tensors()?;
        let mut parts = Vec::new();
        for part in Part::ALL {
            let of_part = |tensors: &[ParameterTensor]| {
                count(&tensors.iter().filter(|t| t.part == part).cloned().collect::<Vec<_>>())
            };
            let blocks = exact::product("parameters of all blocks", &[self.layers, of_part(&block)?])?;
            let total = exact::sum("parameters of a part", [of_part(&outer)?, blocks])?;
            if total > 0 {
                parts.push((part, total));
            }
        }
        Ok(parts)
    }

    /// The tensors of one block, without the block's prefix, with the number of blocks.
    pub(crate) fn tensor_groups(&self) -> Result<Vec<(u64, ParameterTensor)>, Error> {
        let outer = [self.tensors_before_blocks(), self.tensors_after_blocks()].concat();
        let blocks = self.block_tensors()?.into_iter().map(|tensor| (self.layers, tensor));
        Ok(outer.into_iter().map(|tensor| (1, tensor)).chain(blocks).collect())
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
                vec![tensor("model.embed_tokens.weight", &[v, e], Part::Embedding)]
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

    /// The tensors of each block, without the block's prefix; an error if only some layers have experts.
    pub(crate) fn block_tensors(&self) -> Result<Vec<ParameterTensor>, Error> {
        self.check_uniform()?;
        // The order of the models' modules: `sharding` cuts its buckets along it.
        let (attention, mlp) = (self.attention_tensors()?, self.mlp_tensors(self.experts)?);
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
                    tensors.extend(EXPERT_PROJECTIONS.iter().zip(&shapes).map(|(name, shape)| {
                        let name = format!("{}.weight", expert_projection(expert, name));
                        tensor(&name, shape, Part::FeedForward)
                    }));
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

fn tensor(name: &str, shape: &[u64], part: Part) -> ParameterTensor {
    ParameterTensor { name: name.into(), shape: shape.into(), part }
}

fn count(tensors: &[ParameterTensor]) -> Result<u64, Error> {
    let elements: Result<Vec<u64>, Error> = tensors.iter().map(ParameterTensor::elements).collect();
    exact::sum("number of parameters", elements?)
}

#[cfg(test)]
mod tests {
    use crate::model::{Decoder, ExpertSizes, Family, Sizes};
    use crate::presets;

    #[test]
    fn published_parameter_counts() {
        // transformers' `num_parameters()` and the safetensors totals of the model pages on the Hugging Face hub; the
        // cs336 rows from the course's "transformer accounting" with d_ff = 4 d.
        let published = [
            ("gpt2", 124_439_808),
            ("gpt2-medium", 354_823_168),
            ("gpt2-large", 774_030_080),
            ("gpt2-xl", 1_557_611_200),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen2.5-3b", 3_085_938_688),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-14b", 14_770_033_664),
            ("qwen2.5-32b", 32_763_876_352),
            ("qwen2.5-72b", 72_706_203_648),
            ("llama-2-7b", 6_738_415_616),
            ("llama-2-13b", 13_015_864_320),
            ("llama-2-70b", 68_976_648_192),
            ("llama-3-8b", 8_030_261_248),
            ("llama-3-70b", 70_553_706_496),
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.2-3b", 3_212_749_824),
            ("tinyllama-1.1b", 1_100_048_384),
            ("cs336-xl", 2_127_057_600),
        ];
        for (name, parameters) in published {
            assert_eq!(presets::find(name).unwrap().parameters().unwrap(), parameters, "{name}");
        }
    }

    /// As [`published_parameter_counts`], for one model of each other family.
    #[test]
    fn published_parameter_counts_of_other_families() {
        use Family::{Gemma2, Gemma3, Mistral, Olmo2, Phi3, Qwen3, SmolLm3};
        // Family, vocabulary, hidden, layers, heads, key-value heads, head size, feed-forward, tied.
        for (
            family,
            [vocabulary, hidden, layers, heads, kv_heads, head_dim, feed_forward],
            tied,
            parameters,
        ) in [
            (Qwen3, [151_936, 1024, 28, 16, 8, 128, 3072], true, 596_049_920),
            (Mistral, [32000, 4096, 32, 32, 8, 128, 14336], false, 7_241_732_096),
            (SmolLm3, [128_256, 2048, 36, 16, 4, 128, 11008], true, 3_075_098_624),
            (Olmo2, [100_352, 4096, 32, 32, 32, 128, 11008], false, 7_298_617_344),
            (Gemma3, [262_144, 1152, 26, 4, 1, 256, 6912], true, 999_885_952),
            (Gemma2, [256_000, 2304, 26, 8, 4, 256, 9216], true, 2_614_341_888),
            (Phi3, [32064, 3072, 32, 32, 32, 96, 8192], false, 3_821_079_552),
            (Phi3, [200_064, 3072, 32, 24, 8, 128, 8192], true, 3_836_021_760),
        ] {
            let model = Decoder::new(Sizes {
                family,
                vocabulary,
                context: 4096,
                embedding: hidden,
                hidden,
                layers,
                heads,
                kv_heads,
                head_dim,
                feed_forward,
                tied,
                attention_bias: false,
                mlp_bias: false,
                experts: None,
                linear: None,
                windows: None,
            });
            assert_eq!(model.unwrap().parameters().unwrap(), parameters, "{family:?}");
        }
    }

    /// Qwen3-30B-A3B and Qwen3-235B-A22B: totals of the safetensors files, and the active parameters of the model cards, which round
    /// 3.3 and 22 billion.
    #[test]
    fn published_parameter_counts_of_mixtures() {
        for (sizes, experts, total, active) in [
            ([2048, 48, 32, 4, 6144], [128, 8, 768], 30_532_122_624_u64, 3_353_032_704_u64),
            ([4096, 94, 64, 4, 12288], [128, 8, 1536], 235_093_634_560, 22_190_763_520),
        ] {
            let [hidden, layers, heads, kv_heads, feed_forward] = sizes;
            let [count, per_token, inner] = experts;
            let qwen3 = presets::find("qwen3-0.6b").unwrap();
            let mixture = |layers| ExpertSizes { layers, count, per_token, feed_forward: inner, shared: 0 };
            let sizes = Sizes {
                family: Family::Qwen3Moe,
                embedding: hidden,
                hidden,
                layers,
                heads,
                kv_heads,
                feed_forward,
                tied: false,
                experts: Some(mixture(layers)),
                ..*qwen3
            };
            let model = Decoder::new(sizes).unwrap();
            assert_eq!((model.parameters().unwrap(), model.active_parameters().unwrap()), (total, active));
            let listed = model.parameter_tensors().unwrap();
            assert_eq!(listed.iter().map(|tensor| tensor.elements().unwrap()).sum::<u64>(), total);
            assert_eq!(model.product_parameters().unwrap(), {
                let norms = layers * (2 * hidden + 2 * 128) + hidden;
                active - norms - model.vocabulary * hidden
            });
            let some = Decoder::new(Sizes { experts: Some(mixture(layers - 1)), ..sizes }).unwrap();
            let difference = hidden * (count + 3 * count * inner) - 3 * hidden * feed_forward;
            assert_eq!(total - some.parameters().unwrap(), difference);
            assert!(some.block_linears().unwrap_err().to_string().contains("layers have experts"));
            assert!(model.check_passes(8).unwrap_err().to_string().contains("qwen3_moe are not modelled"));
        }
    }

    #[test]
    fn parameter_list_parts_and_count_agree() {
        for name in presets::names() {
            let model = presets::find(name).unwrap();
            let listed: u64 = model.parameter_tensors().unwrap().iter().map(|t| t.elements().unwrap()).sum();
            let parts: u64 = model.parameters_by_part().unwrap().iter().map(|(_, n)| n).sum();
            let grouped: u64 =
                model.tensor_groups().unwrap().iter().map(|(n, t)| n * t.elements().unwrap()).sum();
            let total = model.parameters().unwrap();
            assert_eq!((listed, parts, grouped), (total, total, total), "{name}");
        }
    }
}
