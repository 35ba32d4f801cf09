//! FLOPs of a step that trains adapters.
//!
//! For n tokens, m of them labelled, and a projection `[o, i]` with an adapter of rank r:
//!
//! | | base | adapter |
//! |---|---|---|
//! | forward | `2·n·i·o` | `2·n·r·(i + o)` |
//! | backward, dx | `2·n·i·o` | `2·n·r·i` |
//! | – the adapter's own | – | `2·n·r·(i + 2·o)`: du, dA and dB |
//!
//! No product makes the gradient of a frozen weight, so that forward and backward are `4·N` FLOPs per token and not `6·N`. Nothing before
//! the first adapter has a gradient, such as the input of the first block's queries, keys and values: the embedding is frozen. The output
//! projection is `2·m·d·v` forward, and as much backward, of its input only. Attention's core is that of full training, its backward twice
//! its forward.
//!
//! **Rows of tokens**: n rows of the head are a product of their own, `2·m·d·n` forward and twice backward, beside that with the whole table.
//! Rows of the embedding have no product, and the input of every block has a gradient.
//!
//! **Experts**: the adapters of gate and up, and of down, compute the n·k rows that tokens are given to. The gradient of an expert's inner
//! product is computed in any case, since the router's weights and both adapters need it. The frozen router gives its input a gradient.

use super::{LowRank, Projection};
use crate::decoder_flops::{self, Flops, FlopsRow, Recomputation, StepFlops, Workload};
use crate::delta_rule;
use crate::flops::{AttentionCore, MatrixProduct};
use crate::model::{AttentionKind, Decoder, Linear, Part};
use crate::recompute::Recompute;
use crate::{Error, exact};

/// Returns the FLOPs of one training step of `lora` in a frozen `model`, with `labelled` tokens that have a label (`None`: all). The loss
/// is one that goes over the labelled tokens only.
///
/// # Errors
/// Adapters that [`LowRank`] refuses; more labelled tokens than there are.
///
/// ```
/// use accounting::decoder_flops::{Recomputation, Workload, step};
/// use accounting::lora::{LowRank, flops};
/// use accounting::presets;
///
/// let (model, work) = (presets::find("qwen2.5-0.5b")?, Workload { batch: 2, sequence: 256 });
/// let again = Recomputation::default();
/// let adapted = flops::step(&model, &LowRank::default(), work, None, &again)?.model()?;
/// let whole = step(&model, work, &again)?.model()?;
/// // Two thirds, plus the adapters and attention's core.
/// assert_eq!(adapted.dense * 1000 / whole.dense, 675);
/// assert_eq!(adapted.dense, 1_047_698_341_888);
/// # Ok::<(), accounting::Error>(())
/// ```
pub fn step(
    model: &Decoder,
    lora: &LowRank,
    work: Workload,
    labelled: Option<u64>,
    recomputation: &Recomputation,
) -> Result<StepFlops, Error> {
    lora.check_step(model, work, labelled, recomputation)?;
    let labelled = labelled.unwrap_or(work.tokens()?);
    let mut rows = decoder_flops::step(model, work, recomputation)?.rows;
    let (mut backward, mut recomputed) = (Vec::new(), Vec::new());
    for row in rows.iter_mut().filter(|row| row.part == Part::Output) {
        let matrix = product(labelled, model.hidden, model.vocabulary)?;
        backward.push(matrix);
        // The columns of replaced rows are products of their own, whose rows are trained.
        let replaced = match lora.token_rows.in_head {
            0 => Flops::default(),
            rows => product(labelled, model.hidden, rows)?,
        };
        backward.push(replaced.times(2)?);
        row.forward = Flops::sum([matrix, replaced])?;
    }

    // Layer by layer to the first one that learns; of the layers after it, those of a kind are alike.
    let mut kinds = Vec::new();
    for (kind, count) in model.attention_kinds() {
        kinds.push((kind, count, Layer::new(model, lora, work, kind)?));
    }
    let is_full = recomputation.checkpoint == Recompute::Full;
    let mut reached = lora.token_rows.in_embedding > 0;
    let mut number = 0;
    while !reached && number < model.layers {
        let kind = model.attention_of(number);
        number += 1;
        let Some((_, left, layer)) = kinds.iter_mut().find(|(other, ..)| *other == kind) else { break };
        *left -= 1;
        let of_layer = layer.backward(false, is_full)?;
        backward.push(of_layer.backward);
        recomputed.push(of_layer.recomputed);
        reached = of_layer.learns;
    }
    for (_, left, layer) in &kinds {
        let of_layer = layer.backward(true, is_full)?;
        backward.push(of_layer.backward.times(*left)?);
        recomputed.push(of_layer.recomputed.times(*left)?);
    }

    let first_core = rows.iter().position(|row| !row.has_weight).unwrap_or(rows.len());
    rows.splice(first_core..first_core, adapter_rows(model, lora, work)?);
    Ok(StepFlops {
        forward: Flops::sum(rows.iter().map(|row| row.forward))?,
        backward: Flops::sum(backward)?,
        recomputed: Flops::sum(recomputed)?,
        rows,
    })
}

fn product(rows: u64, inner: u64, columns: u64) -> Result<Flops, Error> {
    Ok(Flops::both(MatrixProduct::new(rows, inner, columns).flops()?))
}

/// The adapters' rows of a table.
fn adapter_rows(model: &Decoder, lora: &LowRank, work: Workload) -> Result<Vec<FlopsRow>, Error> {
    let mut rows: Vec<FlopsRow> = Vec::new();
    for (kind, times) in model.attention_kinds() {
        let layer = Layer::new(model, lora, work, kind)?;
        for (part, adapter) in layer.adapters() {
            let forward = adapter.forward.times(times)?;
            match rows.iter_mut().find(|row| row.name == adapter.name) {
                Some(row) => {
                    row.times += times;
                    row.forward = Flops::sum([row.forward, forward])?;
                }
                None => {
                    rows.push(FlopsRow { name: adapter.name.clone(), part, has_weight: true, times, forward })
                }
            }
        }
    }
    Ok(rows)
}

/// The products of an adapter, in one layer.
struct Adapter {
    name: String,
    forward: Flops,
    /// Gradients of its tensors.
    own: Flops,
    /// The gradient of its input.
    of_input: Flops,
}

/// A product with a weight, in one layer.
struct Product {
    part: Part,
    weight: Flops,
    adapter: Option<Adapter>,
}

impl Product {
    fn new(lora: &LowRank, linear: &Linear, tokens: u64) -> Result<Self, Error> {
        let weight = product(tokens, linear.inputs, linear.outputs)?;
        let is_adapted = Projection::of_module(linear.name).is_some_and(|which| lora.targets.has(which));
        let adapter = match is_adapted {
            true => Some(Adapter::of_projection(lora, linear, tokens)?),
            false => None,
        };
        Ok(Self { part: linear.part, weight, adapter })
    }

    fn learns(&self) -> bool {
        self.adapter.is_some()
    }

    fn forward(&self) -> [Flops; 2] {
        [self.weight, self.adapter.as_ref().map_or(Flops::default(), |adapter| adapter.forward)]
    }

    /// Its backward; `reached` is whether its input has a gradient.
    fn backward(&self, reached: bool) -> [Flops; 3] {
        let none = Flops::default();
        let (own, of_input) =
            self.adapter.as_ref().map_or((none, none), |adapter| (adapter.own, adapter.of_input));
        if reached { [own, of_input, self.weight] } else { [own, none, none] }
    }
}

impl Adapter {
    fn of_projection(lora: &LowRank, linear: &Linear, tokens: u64) -> Result<Self, Error> {
        let down = product(tokens, linear.inputs, lora.rank)?;
        let up = product(tokens, lora.rank, linear.outputs)?;
        // Each pass computes ν: W·Aᵀ, and B·(A·Aᵀ). With dropout W multiplies the dropped part and the kept part.
        let (mut norms, mut again) = (Flops::default(), Flops::default());
        if lora.magnitudes {
            norms = Flops::sum([
                product(linear.outputs, linear.inputs, lora.rank)?,
                product(linear.outputs, lora.rank, lora.rank)?,
            ])?;
            again = if lora.dropout { product(tokens, linear.inputs, linear.outputs)? } else { again };
        }
        // A frozen term has no dA and dB.
        let frozen = if lora.subtracted { Flops::sum([down, up])? } else { Flops::default() };
        Ok(Self {
            name: format!("{} adapter", linear.name),
            forward: Flops::sum([down, up, norms, again, frozen])?,
            // dB and du, dA.
            own: Flops::sum([up, up, down])?,
            of_input: Flops::sum([down, again, frozen])?,
        })
    }

    /// The adapter of a tensor of all experts, over the rows of all of them.
    fn of_experts(name: &str, rank: u64, [inputs, outputs]: [u64; 2], rows: u64) -> Result<Self, Error> {
        let (down, up) = (product(rows, inputs, rank)?, product(rows, rank, outputs)?);
        Ok(Self {
            name: format!("mlp.experts.{name} adapter"),
            forward: Flops::sum([down, up])?,
            own: Flops::sum([up, up, down])?,
            of_input: down,
        })
    }
}

/// A layer's feed-forward products that follow one another.
struct Branch {
    /// Gate and up.
    inner: Vec<Product>,
    down: Product,
    /// Whether the gradient of the inner product is computed in any case.
    of_experts: bool,
}

/// The products of one layer.
struct Layer {
    /// Those that read the attention's input.
    inputs: Vec<Product>,
    /// Forward, backward and recomputation of the attention's core.
    core: [Flops; 3],
    output: Product,
    branches: Vec<Branch>,
    /// Products with the MLP's input beside the branches: the router, and the gate of the expert of every token.
    beside: Vec<Product>,
}

/// The products of one layer's backward.
struct LayerBackward {
    backward: Flops,
    recomputed: Flops,
    /// Whether its result has a gradient.
    learns: bool,
}

impl Layer {
    fn new(model: &Decoder, lora: &LowRank, work: Workload, kind: AttentionKind) -> Result<Self, Error> {
        let tokens = work.tokens()?;
        let of = |linear: &Linear| Product::new(lora, linear, tokens);
        let projections = match kind {
            AttentionKind::Linear => model.family.linear_projections(),
            _ => model.family.projections(),
        };
        let attention = model.linears_of(projections)?;
        let attention: Vec<&Linear> = attention.iter().filter(|one| one.part == Part::Attention).collect();
        let (output, inputs) = attention.split_last().ok_or(Error::Zero { what: "projections" })?;
        let mlp = model.feed_forward_linears()?;
        let (mut inner, mut beside, mut branches) = (Vec::new(), Vec::new(), Vec::new());
        for linear in &mlp {
            let mut product = of(linear)?;
            let is_routed = model.experts.is_some() && !linear.name.contains("shared_expert");
            if is_routed {
                product.adapter = adapter_of_experts(model, lora, linear, tokens)?;
            }
            match linear.name.rsplit('.').next() {
                Some("gate_proj" | "up_proj") => inner.push(product),
                Some("down_proj") => {
                    let inner = std::mem::take(&mut inner);
                    branches.push(Branch { inner, down: product, of_experts: is_routed });
                }
                _ => beside.push(product),
            }
        }
        Ok(Self {
            inputs: inputs.iter().map(|linear| of(linear)).collect::<Result<_, _>>()?,
            core: core(model, work, kind)?,
            output: of(output)?,
            branches,
            beside,
        })
    }

    fn products(&self) -> impl Iterator<Item = &Product> {
        let of_branches = self.branches.iter().flat_map(|branch| branch.inner.iter().chain([&branch.down]));
        self.inputs.iter().chain([&self.output]).chain(of_branches).chain(&self.beside)
    }

    fn adapters(&self) -> impl Iterator<Item = (Part, &Adapter)> {
        self.products().filter_map(|product| Some((product.part, product.adapter.as_ref()?)))
    }

    /// The layer's backward; `reached` is whether its input has a gradient.
    fn backward(&self, reached: bool, is_full: bool) -> Result<LayerBackward, Error> {
        let learns = |products: &[Product]| products.iter().any(Product::learns);
        let (mut backward, mut recomputed) = (Vec::new(), Vec::new());
        let attended = reached || learns(&self.inputs);
        backward.extend(self.inputs.iter().flat_map(|product| product.backward(reached)));
        let [forward, of_core, again] = self.core;
        if attended {
            backward.push(of_core);
            recomputed.push(again);
        }
        backward.extend(self.output.backward(attended));
        let middle = attended || self.output.learns();
        backward.extend(self.beside.iter().flat_map(|product| product.backward(middle)));
        let mut learnt = middle;
        for Branch { inner, down, of_experts } in &self.branches {
            let multiplied = middle || learns(inner) || (*of_experts && down.learns());
            backward.extend(inner.iter().flat_map(|product| product.backward(middle)));
            backward.extend(down.backward(multiplied));
            learnt = learnt || multiplied || down.learns();
        }
        if is_full && learnt {
            recomputed.push(forward);
            recomputed.extend(self.products().flat_map(Product::forward));
        }
        Ok(LayerBackward {
            backward: Flops::sum(backward)?,
            recomputed: Flops::sum(recomputed)?,
            learns: learnt,
        })
    }
}

/// The adapter of a routed expert's product: that of gate and up is gate's.
fn adapter_of_experts(
    model: &Decoder,
    lora: &LowRank,
    linear: &Linear,
    tokens: u64,
) -> Result<Option<Adapter>, Error> {
    let Some(experts) = &model.experts else { return Ok(None) };
    let rows = exact::product("rows of experts", &[tokens, experts.per_token])?;
    let inner = experts.feed_forward;
    let both = exact::product("width of gate and up", &[2, inner])?;
    Ok(match linear.name.rsplit('.').next() {
        Some("gate_proj") if lora.experts.gate_up => {
            Some(Adapter::of_experts("gate_up_proj", lora.rank, [model.hidden, both], rows)?)
        }
        Some("down_proj") if lora.experts.down => {
            Some(Adapter::of_experts("down_proj", lora.rank, [inner, model.hidden], rows)?)
        }
        _ => None,
    })
}

/// Forward, backward and recomputation of the core of an attention.
fn core(model: &Decoder, work: Workload, kind: AttentionKind) -> Result<[Flops; 3], Error> {
    if let (AttentionKind::Linear, Some(linear)) = (kind, &model.linear) {
        let rule = delta_rule::layer(linear, work)?;
        return Ok([rule.forward, rule.backward, rule.recomputed].map(Flops::both));
    }
    let core = AttentionCore {
        batch: work.batch,
        sequence: work.sequence,
        heads: model.heads,
        head_dim: model.head_dim,
    };
    let scores = Flops::of_core(|convention| match kind {
        AttentionKind::Windowed { tokens } => core.windowed_score_flops(tokens, convention),
        _ => core.score_flops(convention),
    })?;
    Ok([scores.times(2)?, scores.times(4)?, scores])
}
