//! The forward and the backward of one block of Llama, Qwen2, Qwen3, Mistral, SmolLM3, Granite, gpt-oss or Qwen3.5.
//!
//! With n tokens, d hidden, f feed-forward, and per element c bytes, the order in which `models` and autograd run it is
//!
//! ```text
//! forward    norm · q, k, v · [norms of q, k] · rotate · attention · o · [multiply] · add
//!            norm · gate, up · SiLU(gate) ⊙ up · down · [multiply] · add
//! backward   [multiply] · down · SiLU ⊙ · up, gate · norm · add
//!            [multiply] · o · attention · rotate · [norms of k, q] · v, k, q · norm · add
//! ```
//!
//! **Norms of queries and keys** (Qwen3) keep their outputs, `c·(h + n_kv)·k` per token, because the rotation makes new ones, and a
//! number in fp32 for each head; their backward overwrites the gradient that it reads. **Multipliers** (Granite) keep nothing; each
//! needs one more `[n, d]` while its branch begins its backward.
//!
//! **Gated attention** (Qwen3.5) divides the queries' projection into queries and gates, `2·c·h·k` per token, and multiplies the attention's output by
//! the gates' sigmoids: it keeps these and, where the output's projection learns, the product. Where only some columns of a head rotate, these
//! are joined with the others. [Windows](crate::model::WindowedLayers) and sinks take no memory where one kernel computes attention.
//!
//! **Mixed precision** ([`Recipe::casts`]): the residual stream and the norms are in fp32, and a norm keeps its input. Each projection
//! that reads a norm's output casts it, `c·d` per token, and keeps the cast if its weight or adapter learns. Gradients of branches and
//! of norms' outputs are cast on their way. Where products of 16 bits are computed in fp32, they take no memory beside their results,
//! and attention keeps queries, keys, values and its output in fp32. The weights' casts are not among a block's bytes: they stay for the
//! whole step.
//!
//! The backward of a product computes the gradients of its input and its weight while the gradient of its output and the kept
//! input still exist. A norm overwrites the gradient that it reads; SiLU(gate) ⊙ up needs two more gradients.
//!
//! **Flash attention on a GPU** has a workspace in backward (libtorch's `flash_api.cpp`): dQ in fp32, a number in fp32 for each row and head,
//! and where heads share keys, dK and dV of every head: `n·h·k·(4 + 2·c) + 4·n·h` bytes.
//!
//! The block's input and the gradient of its output are the caller's.

mod backward;
mod delta_net;
mod delta_rule;
mod expert_terms;
mod experts;
mod forward;
mod head_exchange;
mod joint;
mod kept;
mod peaks;
mod shared_expert;
mod tiled_mlp;

use crate::decoder_flops::Workload;
use crate::exact::product;
use crate::lora::{LowRank, Projection};
use crate::memory::quantized::{self, Matrices};
use crate::memory::recipe::Recipe;
use crate::model::{AttentionKind, Decoder, Linear};
use crate::recompute::NormKernel;
use crate::{Error, exact};

use delta_net::DeltaNet;
use experts::{ExpertOptions, Experts};
use head_exchange::HeadExchange;
use shared_expert::SharedExpert;
use tiled_mlp::{TiledMlp, TiledMlpOptions};

pub(crate) use peaks::{KeptPasses, Passes, kept_passes, passes};

/// The weights that are trained in a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trained<'a> {
    /// Nothing: the block is frozen, or in inference.
    Nothing,
    /// Adapters of frozen weights.
    Adapters(&'a LowRank),
    /// All weights.
    Everything,
}

impl<'a> Trained<'a> {
    fn adapters(self) -> Option<&'a LowRank> {
        match self {
            Trained::Adapters(lora) => Some(lora),
            Trained::Nothing | Trained::Everything => None,
        }
    }
}

/// Further settings that decide a block's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockOptions<'a> {
    /// Tokens of the batch, and its rows.
    pub(crate) tokens: u64,
    pub(crate) rows: u64,
    /// The kind of the block's attention.
    pub(crate) attention: AttentionKind,
    /// Number formats.
    pub(crate) recipe: &'a Recipe,
    /// The implementation of norms, which decides what they keep.
    pub(crate) norm: NormKernel,
    /// The weights that are trained.
    pub(crate) trained: Trained<'a>,
    /// Whether the gradients of trained tensors are counted as they arrive, and stay; otherwise they are the caller's.
    pub(crate) gradients: bool,
    /// Whether rows hold several documents: linear attention has a mask of its convolution.
    pub(crate) documents: bool,
    /// Ranks that divide each row; `tokens` are those of one rank's part then.
    pub(crate) sequence_ranks: u64,
    /// Whether products of weights in NF4 with 16-bit operands are computed in fp32.
    pub(crate) widens: bool,
    /// Largest number of bytes of a dequantized tile.
    pub(crate) tile_bytes: u64,
    /// Whether attention's backward has the workspace of flash attention on a GPU.
    pub(crate) flash_workspace: bool,
    /// Bytes of the temporaries of MLPs over tiles of tokens, if they run so.
    pub(crate) mlp_tile: Option<u64>,
}

impl BlockOptions<'_> {
    fn work(&self) -> Workload {
        Workload { batch: self.rows, sequence: self.tokens / self.rows.max(1) }
    }
}

/// Bytes of one projection's tensors; 0 for a projection that the block does not have.
#[derive(Default)]
struct ProjectionBytes {
    adapted: bool,
    /// Input and output, in the base's dtype and in that of sums: fp32, but the base's on a GPU.
    input: u64,
    output: u64,
    wide_input: u64,
    wide_output: u64,
    /// Gradients of W and b in the dtype of products, where they are cast afterwards.
    narrow_gradients: u64,
    /// The tile that a product with a quantized W has beside its result, in forward and in backward.
    tile: u64,
    tile_back: u64,
    /// u, or du.
    low: u64,
    /// Copies of A and B that a GPU keeps for backward: rounded to the base's dtype, or A of several terms as one matrix.
    factors: u64,
    /// How many low-rank terms there are: a frozen one's u is not kept, except on a GPU, where all are one tensor.
    terms: u64,
    /// With DoRA the product before it is multiplied, in fp32, and ν; and the temporaries of computing ν.
    unscaled: u64,
    norms: u64,
    /// A byte for each element of the input.
    mask: u64,
    /// Gradients of the trained tensors, as far as they are counted.
    gradients: u64,
}

impl ProjectionBytes {
    fn new(options: &BlockOptions<'_>, which: Projection, linear: &Linear) -> Result<Self, Error> {
        let BlockOptions { tokens, recipe, trained, gradients, widens, tile_bytes, .. } = *options;
        let lora = trained.adapters();
        let everything = matches!(trained, Trained::Everything);
        let adapted = lora.is_some_and(|lora| lora.targets.has(which));
        let magnitudes = adapted && lora.is_some_and(|lora| lora.magnitudes);
        let rank = lora.map_or(0, |lora| lora.rank);
        let c = recipe.compute.storage_bits() / 8;
        let activation = |width: u64, bytes: u64| product("bytes of an activation", &[tokens, width, bytes]);
        let on_gpu = lora.is_some_and(|lora| !lora.on_cpu);
        let joins = adapted && on_gpu && !magnitudes;
        let sum_bytes = if on_gpu { c } else { 4 };
        let (wide_input, wide_output) =
            (activation(linear.inputs, sum_bytes)?, activation(linear.outputs, sum_bytes)?);

        // Where sums are in fp32, and where 16 bits are not multiplied, a tile is in fp32.
        let element = if widens {
            4
        } else if adapted {
            sum_bytes
        } else {
            c
        };
        let tile = |length, width| match recipe.matrices {
            Matrices::Dense => Ok(0),
            _ => quantized::tile_bytes(tile_bytes, length, width, element),
        };

        // Elements of W and b, and of A, B and the magnitudes.
        let weight = product("elements of a weight", &[linear.inputs, linear.outputs])?;
        let bias = if linear.bias { linear.outputs } else { 0 };
        let weight = exact::sum("elements of a weight", [weight, bias])?;
        let widths = exact::sum("widths of a projection", [linear.inputs, linear.outputs])?;
        let pair = product("elements of an adapter", &[rank, widths])?;
        let terms = lora.map_or(1, LowRank::terms);
        let adapter =
            exact::sum("elements of an adapter", [pair, if magnitudes { linear.outputs } else { 0 }])?;

        Ok(Self {
            adapted,
            input: activation(linear.inputs, c)?,
            output: activation(linear.outputs, c)?,
            wide_input,
            wide_output,
            narrow_gradients: match gradients && everything && recipe.casts {
                true => recipe.compute.bytes(weight)?,
                false => 0,
            },
            tile: tile(linear.outputs, linear.inputs)?,
            tile_back: tile(linear.inputs, linear.outputs)?,
            low: activation(if joins { terms * rank } else { rank }, sum_bytes)?,
            factors: match lora.filter(|_| joins) {
                Some(_) if c < 4 => product("bytes of an adapter", &[terms, pair, c])?,
                Some(lora) if joint::terms_of_input(lora, which) > 1 => {
                    product("bytes of an adapter", &[terms, rank, linear.inputs, c])?
                }
                _ => 0,
            },
            terms: if joins { 1 } else { terms },
            unscaled: match magnitudes {
                true => {
                    exact::sum("bytes of a product", [wide_output, LowRank::WIDE.bytes(linear.outputs)?])?
                }
                false => 0,
            },
            // W·Aᵀ, the same times B, and two vectors.
            norms: LowRank::WIDE.bytes(product("elements of norms", &[2 * rank + 2, linear.outputs])?)?,
            mask: activation(linear.inputs, 1)?,
            gradients: match (gradients, everything, adapted) {
                (true, true, _) => recipe.gradients.bytes(weight)?,
                (true, false, true) => LowRank::WIDE.bytes(adapter)?,
                _ => 0,
            },
        })
    }
}

/// A block with its options.
pub(crate) struct Block {
    /// Whether the base is in 16 bits and sums are in fp32, as on a CPU, so that they are tensors of their own.
    rounds: bool,
    /// Whether the residual stream is in fp32 beside products in 16 bits, and whether these are computed in fp32.
    mixed: bool,
    mixed_in_fp32: bool,
    dropout: bool,
    /// Whether projections of one input are one function.
    joins: bool,
    tiled: Option<TiledMlp>,
    /// The mixture in place of the MLP; then the MLP's tensors are those of the expert that computes every token, if there is one.
    experts: Option<Experts>,
    shared: Option<SharedExpert>,
    /// Linear attention in place of the other one.
    linear: Option<DeltaNet>,
    /// Whether the attention's output is multiplied by a gate, which the queries' projection gives, too.
    is_gated: bool,
    keeps_output: bool,
    documents: bool,
    /// Whether all weights learn, and whether anything of the model does.
    everything: bool,
    trains: bool,
    projections: Vec<ProjectionBytes>,
    /// Gradient of a norm's weight, as far as it is counted.
    norm_gradient: u64,
    query_key_norms: Option<QueryKeyNorms>,
    /// Whether branches are multiplied before they are added.
    multiplies: bool,
    /// `[n, d]` of the residual stream, and of the operands and results of products.
    pub(crate) narrow: u64,
    operand: u64,
    /// `[n, h·k]`
    query: u64,
    /// `[n, n_kv·k]`
    key: u64,
    /// Of both, the columns of heads that rotate, if these are not all.
    rotated: Option<u64>,
    /// Both as attention reads them.
    attended_query: u64,
    attended_key: u64,
    /// `[n, f]`
    wide: u64,
    log_sum_exp: u64,
    /// The exchange of heads for tokens with the ranks that divide each row.
    exchange: Option<HeadExchange>,
    /// Workspace of attention's backward.
    flash_workspace: u64,
    /// A number for each token.
    statistic: u64,
}

/// Bytes of the norms of queries and keys together.
struct QueryKeyNorms {
    statistics: u64,
    /// Gradients of the weights, as far as they are counted.
    gradients: u64,
}

/// The parts of a block that need a gradient, and so record a graph.
struct Recorded {
    input: bool,
    attention: bool,
    /// The residual stream between attention and feed-forward.
    middle: bool,
    feed_forward: bool,
}

impl Block {
    pub(crate) fn new(model: &Decoder, options: &BlockOptions<'_>) -> Result<Self, Error> {
        let BlockOptions { tokens, recipe, norm, trained, gradients, documents, widens, mlp_tile, .. } =
            *options;
        let (everything, lora) = (matches!(trained, Trained::Everything), trained.adapters());
        let exchange = HeadExchange::new(model, options)?;
        if recipe.casts && exchange.is_some() {
            return Err(Error::Shape {
                what: "mixed precision of rows that ranks divide is not modelled".into(),
                remedy: "take bfloat16, or give each rank whole rows".into(),
            });
        }
        if recipe.casts && model.family.facts().has_attention_gate {
            return Err(Error::Shape {
                what: "gated attention in mixed precision is not modelled".into(),
                remedy: "take bfloat16, or measure a step instead".into(),
            });
        }
        let c = recipe.compute.storage_bits() / 8;
        let attended = if recipe.casts && widens { 4 } else { c };
        let activation = |width: u64, bytes: u64| product("bytes of an activation", &[tokens, width, bytes]);
        let norm_gradient =
            |width: u64| if gradients && everything { recipe.gradients.bytes(width) } else { Ok(0) };
        let norms = |[queries, keys]: [(u64, u64); 2]| {
            Ok::<_, Error>(QueryKeyNorms {
                statistics: activation(exact::sum("norms of a token", [queries.1, keys.1])?, 4)?,
                gradients: exact::sum(
                    "bytes of gradients",
                    [norm_gradient(queries.0)?, norm_gradient(keys.0)?],
                )?,
            })
        };
        Ok(Self {
            rounds: c < 4 && lora.is_none_or(|lora| lora.on_cpu),
            dropout: lora.is_some_and(|lora| lora.dropout),
            joins: !recipe.casts && lora.is_some_and(|lora| !lora.on_cpu && !lora.magnitudes),
            experts: match &model.experts {
                None => None,
                Some(sizes) => {
                    let tile_bytes = options.tile_bytes;
                    let options =
                        ExpertOptions { tokens, recipe, widens, everything, gradients, tile_bytes, lora };
                    Some(Experts::new(model, sizes, &options)?)
                }
            },
            shared: match model.experts.map(|experts| experts.shared) {
                Some(width) if width > 0 => Some(SharedExpert::new(model.hidden, options)?),
                _ => None,
            },
            linear: match (options.attention, &model.linear) {
                (AttentionKind::Linear, Some(linear)) => Some(DeltaNet::new(linear, options)?),
                _ => None,
            },
            is_gated: model.family.facts().has_attention_gate,
            tiled: match (mlp_tile, lora) {
                (None, _) => None,
                (Some(_), _) if model.experts.is_some() => {
                    return Err(Error::Shape {
                        what: "a mixture of experts has no tiled MLP".into(),
                        remedy: "leave out the tiles".into(),
                    });
                }
                (Some(_), Some(_)) => {
                    return Err(Error::Shape {
                        what: "adapters beside a tiled MLP are not modelled".into(),
                        remedy: "leave out the tiles".into(),
                    });
                }
                (Some(most), None) => {
                    let options = TiledMlpOptions { tokens, recipe, widens, everything, gradients, most };
                    Some(TiledMlp::new(model, &options)?)
                }
            },
            mixed: recipe.casts,
            mixed_in_fp32: recipe.casts && widens,
            keeps_output: norm == NormKernel::Output && !recipe.casts,
            documents,
            everything,
            trains: !matches!(trained, Trained::Nothing),
            projections: {
                let mut all: Vec<_> = Projection::ALL.iter().map(|_| ProjectionBytes::default()).collect();
                for (which, linear) in Projection::linears(model, options.attention)? {
                    all[which as usize] = ProjectionBytes::new(options, which, &linear)?;
                }
                all
            },
            norm_gradient: norm_gradient(model.hidden)?,
            query_key_norms: model.query_key_norms()?.map(norms).transpose()?,
            multiplies: model.family.facts().has_multipliers,
            narrow: activation(model.hidden, recipe.residual.storage_bits() / 8)?,
            operand: activation(model.hidden, c)?,
            query: activation(model.query_width()?, c)?,
            key: activation(model.kv_width()?, c)?,
            rotated: match model.rotary_width() {
                width if width < model.head_dim => {
                    let heads = exact::sum("heads", [model.heads, model.kv_heads])?;
                    Some(activation(product("rotated columns", &[heads, width])?, c)?)
                }
                _ => None,
            },
            attended_query: activation(model.query_width()?, attended)?,
            attended_key: activation(model.kv_width()?, attended)?,
            wide: activation(
                match model.experts {
                    Some(experts) => experts.shared,
                    None => model.feed_forward,
                },
                c,
            )?,
            log_sum_exp: activation(model.heads, 4)?,
            exchange,
            flash_workspace: match options.flash_workspace && c < 4 {
                true => {
                    // dQ and a number for each row and head in fp32; with shared keys, dK and dV of every head.
                    let expanded = if model.kv_heads < model.heads { 2 * c } else { 0 };
                    let rows = activation(model.query_width()?, 4 + expanded)?;
                    exact::sum("bytes of a workspace", [rows, activation(model.heads, 4)?])?
                }
                false => 0,
            },
            statistic: activation(1, 4)?,
        })
    }

    fn projection(&self, which: Projection) -> &ProjectionBytes {
        &self.projections[which as usize]
    }

    /// Whether a mixture's experts learn.
    fn experts_learn(&self) -> bool {
        self.experts.as_ref().is_some_and(Experts::learns)
    }

    /// Whether something that reads the MLP's input learns.
    fn mlp_input_is_read(&self) -> bool {
        self.learns(&[Projection::Gate, Projection::Up])
            || self.experts.as_ref().is_some_and(Experts::keeps_input)
    }

    /// Whether gate and up have a backward.
    fn keeps_gates(&self, recorded: &Recorded) -> bool {
        recorded.middle || self.learns(&[Projection::Gate, Projection::Up])
    }

    /// Whether one of these projections learns, itself or by an adapter, so that its input is kept.
    fn learns(&self, which: &[Projection]) -> bool {
        self.everything || which.iter().any(|one| self.projection(*one).adapted)
    }

    fn recorded(&self, input: bool) -> Recorded {
        use Projection::{Down, Gate, Up};
        let attention = input || self.learns(self.attention_inputs());
        let middle = attention || self.output_learns();
        let feed_forward = middle || self.learns(&[Gate, Up, Down]) || self.experts_learn();
        Recorded { input, attention, middle, feed_forward }
    }

    /// The projections of the attention's input.
    fn attention_inputs(&self) -> &'static [Projection] {
        use Projection::{Key, LinearDecay, LinearGate, LinearQkv, LinearRate, Query, Value};
        match self.linear {
            Some(_) => &[LinearQkv, LinearGate, LinearRate, LinearDecay],
            None => &[Query, Key, Value],
        }
    }

    /// Whether the attention's output projection learns.
    fn output_learns(&self) -> bool {
        let output = if self.linear.is_some() { Projection::LinearOutput } else { Projection::Output };
        self.learns(&[output])
    }

    /// Whether the block's output has a gradient; `input` is whether its input has one.
    pub(crate) fn records(&self, input: bool) -> bool {
        self.recorded(input).feed_forward
    }
}

#[cfg(test)]
mod tests;
