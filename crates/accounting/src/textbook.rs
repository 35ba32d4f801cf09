//! The memory of a training step by the formulas of the literature, for systems that this project does not implement.
//!
//! A step of this project is predicted operation by operation ([`candidates`](crate::candidates)) and compared with the allocator. These
//! formulas answer for ZeRO, tensors in host memory, eager attention and a framework's kernels.
//!
//! # Moments
//!
//! A step has five moments at which its memory can be largest. The **peak** is the largest.
//!
//! | moment | gradients | activations | logits and loss | temporaries |
//! |---|---|---|---|---|
//! | head | none yet¹, or the output's³ | all | all | gathered parameters² |
//! | backward of the last block | those of the output¹ | all | the loss's input | one block's backward, buffers² |
//! | backward of the first block | all | one block's | the loss's input | one block's backward, buffers² |
//! | backward of the embedding | all | tokens | the loss's input | a tied matrix' second gradient |
//! | optimizer step | all | none | none | the step's own |
//!
//! ¹ all of them if gradients are accumulated over several batches. ² of ZeRO, or of tensors on the host, with a block as a bucket:
//! its gradients on their way, its parameters and the next one's. ³ if the loss computes it in chunks.
//!
//! # Model states
//!
//! ZeRO (Rajbhandari et al., arXiv:1910.02054) divides once, by the data-parallel degree: in stage 1 optimizer state and master weights, in 2
//! gradients too, in 3 parameters too. 16 bytes per parameter become 4 + 12/N, 2 + 14/N and 16/N.
//!
//! # Activations
//!
//! With `c` bytes in products, `r` in the residual stream; per token, `d` hidden, `h` heads and `n` key-value heads of `k`, `f`
//! feed-forward, `s` sequence:
//!
//! | kept by | tensor | bytes |
//! |---|---|---|
//! | each norm | its input; mean and deviation (RMSNorm: one number) in fp32 | `r·d`, `8` (`4`) |
//! | query, key, value projections | their input; under autocast a copy for each | `c·d` |
//! | attention | Q, output; K and V (eager kernels repeat them for every query head) | `2·c·h·k`, `2·c·n·k` |
//! | – eager | probabilities (under autocast in fp32 too) | `c·h·s` |
//! | – flash | log-sum-exp in fp32 | `4·h` |
//! | MLP | its input; up to four tensors by [`SwigluLevel`], or two of a GELU | `c·d`, `c·f` each |
//!
//! Korthikanti et al., "Reducing activation recomputation in large transformer models", arXiv:2205.05198, count a GPT block with dropout
//! in 16 bits: [`korthikanti`].
//!
//! ```
//! use accounting::textbook::{Step, memory};
//! use accounting::{decoder_flops::Workload, presets};
//!
//! let step = Step { work: Workload { batch: 4, sequence: 1024 }, ..Step::default() };
//! let memory = memory(&presets::find("gpt2")?, &step)?;
//! assert_eq!(memory.peak().moment.to_string(), "head");
//! assert_eq!(memory.peak().bytes("optimizer state"), 8 * 124_439_808);
//! # Ok::<(), accounting::Error>(())
//! ```

use decoder::QueryKeyNorm;

use crate::decoder_flops::{Recomputation, Workload, check_positions};
use crate::exact::{positive, product, sum};
use crate::memory::logits::{self, Loss};
use crate::memory::optimizer::Optimizer;
use crate::memory::recipe::Recipe;
use crate::memory::zero::ZeroStage;
use crate::memory::{Item, total};
use crate::model::{Decoder, Family, Part, has_modelled_passes};
use crate::offload::{Footprint, Moment};
use crate::recompute::{AttentionKernel, Recompute, SwigluLevel};
use crate::{Dtype, Error};

const WHAT: &str = "bytes of a step on paper";

/// The names of a moment's parts, in their order.
pub const PARTS: [&str; 8] = [
    "parameters",
    "autocast copies",
    "master weights",
    "optimizer state",
    "gradients",
    "activations",
    "logits and loss",
    "temporaries",
];

/// Tensors in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnHost {
    /// The parameters that the forward reads.
    pub parameters: bool,
    /// Gradients of the parameters.
    pub gradients: bool,
    /// Master weights and the optimizer's state; the step runs there.
    pub optimizer: bool,
    /// The inputs of blocks, if these keep nothing else.
    pub block_inputs: bool,
}

/// A training step. Batches are per device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Sequences per device and their length.
    pub work: Workload,
    /// Number formats.
    pub recipe: Recipe,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Whether the optimizer step is one kernel. Otherwise it allocates lists of temporaries as large as the model, as `torch.optim` does on
    /// a GPU.
    pub fused_optimizer: bool,
    /// The recomputation of the backward.
    pub recomputation: Recomputation,
    /// The implementation of the loss.
    pub loss: Loss,
    /// The model states that data-parallel devices divide.
    pub stage: ZeroStage,
    /// The data-parallel devices.
    pub devices: u64,
    /// Whether gradients of an earlier batch exist while the next one runs.
    pub accumulate: bool,
    /// Tensors in host memory.
    pub host: OnHost,
}

impl Default for Step {
    /// One sequence of 1024 tokens, bf16 with fp32 master weights, AdamW over lists of tensors, all logits at once, one device.
    fn default() -> Self {
        Self {
            work: Workload { batch: 1, sequence: 1024 },
            recipe: Recipe::default(),
            optimizer: Optimizer::default(),
            fused_optimizer: false,
            recomputation: Recomputation::default(),
            loss: Loss::default(),
            stage: ZeroStage::Zero,
            devices: 1,
            accumulate: false,
            host: OnHost::default(),
        }
    }
}

impl Step {
    /// Returns a device's share of `all` bytes or elements, which ZeRO divides from `stage` on.
    fn share(&self, all: u64, stage: ZeroStage) -> u64 {
        if self.stage >= stage { all.div_ceil(self.devices.max(1)) } else { all }
    }

    /// Returns whether several devices divide the states of `stage`.
    fn divides(&self, stage: ZeroStage) -> bool {
        self.stage >= stage && self.devices > 1
    }
}

/// The memory of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The five moments, in order, with all of [`PARTS`].
    pub moments: [Footprint; 5],
    /// Bytes in host memory at the end of the forward.
    pub host_bytes: u64,
    /// Temporaries of one block's backward without buffers of communication.
    pub block_backward: u64,
}

impl Memory {
    /// Returns the largest moment; the first of several.
    pub fn peak(&self) -> &Footprint {
        let first = &self.moments[0];
        self.moments.iter().fold(first, |peak, other| if other.total > peak.total { other } else { peak })
    }

    /// Returns the maximum of one part over all moments.
    pub fn largest(&self, part: &str) -> u64 {
        self.moments.iter().map(|moment| moment.bytes(part)).max().unwrap_or(0)
    }
}

/// Bytes per device between steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelStates {
    /// Parameters that the forward reads.
    pub parameters: u64,
    /// The optimizer's own copy of the parameters.
    pub master: u64,
    /// Gradients between backward and step.
    pub gradients: u64,
    /// Optimizer state.
    pub optimizer: u64,
}

impl ModelStates {
    /// Returns the sum of the model states.
    ///
    /// # Errors
    /// Bytes beyond 64 bits.
    pub fn total(&self) -> Result<u64, Error> {
        sum(WHAT, [self.parameters, self.master, self.gradients, self.optimizer])
    }
}

/// Returns the bytes per device of `model`'s parameters, gradients and optimizer state, on the device or on the host.
///
/// # Errors
/// Bytes beyond 64 bits.
pub fn model_states(model: &Decoder, step: &Step) -> Result<ModelStates, Error> {
    let (recipe, parameters) = (&step.recipe, model.parameters()?);
    let bytes = |dtype: Dtype, from| dtype.bytes(step.share(parameters, from));
    Ok(ModelStates {
        parameters: bytes(recipe.parameters, ZeroStage::Three)?,
        master: recipe.master.map_or(Ok(0), |dtype| bytes(dtype, ZeroStage::One))?,
        gradients: bytes(recipe.gradients, ZeroStage::Two)?,
        optimizer: step.share(step.optimizer.state_bytes(model, recipe.state)?, ZeroStage::One),
    })
}

/// Returns the memory of a training step of `model` at its five moments.
///
/// # Errors
/// A family other than GPT-2 and those of Llama's blocks (Llama, Mistral, Qwen2, SmolLM3); block inputs on the host of blocks that keep
/// more; bytes beyond 64 bits.
pub fn memory(model: &Decoder, step: &Step) -> Result<Memory, Error> {
    check(model, step)?;
    let Step { work, recipe, host, .. } = *step;

    // Model states, each on the device or on the host.
    let states = model_states(model, step)?;
    let place = |bytes, on_host| if on_host { (0, bytes) } else { (bytes, 0) };
    let (parameters, parameters_on_host) = place(states.parameters, host.parameters);
    let (all_gradients, gradients_on_host) = place(states.gradients, host.gradients);
    let (master, master_on_host) = place(states.master, host.optimizer);
    let (optimizer, optimizer_on_host) = place(states.optimizer, host.optimizer);
    let (casts, block_casts) = autocast_copies(model, step)?;

    // Activations. If block inputs are on the host, one block's are in use; the next block's, in transfer, are a temporary.
    let block = Block::new(model, step)?;
    let (per_block, outside) = (block.kept(), block.outside);
    let of_blocks = product(WHAT, &[model.layers, per_block])?;
    let (on_device, blocks_on_host, in_transfer) =
        if host.block_inputs { (per_block, of_blocks, per_block) } else { (of_blocks, 0, 0) };
    let all_activations = sum(WHAT, [outside, on_device])?;
    let one_block = sum(WHAT, [outside, per_block])?;

    // Logits and loss: at the peak, and the caller's tensor while the backward runs.
    let loss_peak = total(&logits::peak(model, work, &recipe, step.loss, None)?)?;
    let width = if step.loss == Loss::Eager { model.vocabulary } else { model.hidden };
    let loss_input = product(WHAT, &[work.tokens()?, width, recipe.compute.storage_bits() / 8])?;

    // Temporaries: a block's backward and buffers. The first block prefetches nothing.
    let (reducing, gathered) = buffers(model, step)?;
    let at_head = sum(WHAT, [gathered, in_transfer])?;
    let first_backward = sum(WHAT, [block.backward(), reducing, gathered])?;
    let last_backward = sum(WHAT, [first_backward, in_transfer])?;
    let update = if host.optimizer { 0 } else { update_bytes(model, step)? };

    // The gradient of the output matrix arrives with the chunks of the loss, or with the backward of the logits.
    let matrix = |width| product("parameters of the output", &[model.vocabulary, width]);
    let output_gradient = recipe.gradients.bytes(step.share(matrix(model.hidden)?, ZeroStage::Two))?;
    let head_gradient = if step.loss == Loss::Eager { 0 } else { output_gradient };
    let early = |gradients| if step.accumulate && !host.gradients { all_gradients } else { gradients };

    // A tied matrix, or an accumulated one, already has its gradient when the embedding's part arrives. A gradient on the host is added to
    // there, but the new part passes through the device.
    let has_second_gradient = model.tied || step.accumulate || host.gradients;
    let second_gradient =
        if has_second_gradient { recipe.gradients.bytes(matrix(model.embedding)?)? } else { 0 };

    let moment = |moment, [casts, gradients, activations, logits, temporaries]: [u64; 5]| {
        let bytes = [parameters, casts, master, optimizer, gradients, activations, logits, temporaries];
        let parts = PARTS.into_iter().zip(bytes).map(|(name, bytes)| Item { name, bytes }).collect();
        Ok::<_, Error>(Footprint { moment, parts, total: sum(WHAT, bytes)? })
    };
    let last = Moment::Backward(usize::try_from(model.layers - 1).unwrap_or(usize::MAX));
    let moments = [
        moment(Moment::Head, [casts, early(head_gradient), all_activations, loss_peak, at_head])?,
        moment(last, [casts, early(output_gradient), all_activations, loss_input, last_backward])?,
        moment(Moment::Backward(0), [block_casts, all_gradients, one_block, loss_input, first_backward])?,
        moment(Moment::Embedding, [0, all_gradients, outside, loss_input, second_gradient])?,
        moment(Moment::Update, [0, all_gradients, 0, 0, update])?,
    ];
    let states_on_host = [parameters_on_host, gradients_on_host, master_on_host, optimizer_on_host];
    let host_bytes = sum(WHAT, states_on_host.into_iter().chain([blocks_on_host]))?;
    Ok(Memory { moments, host_bytes, block_backward: block.backward() })
}

fn check(model: &Decoder, step: &Step) -> Result<(), Error> {
    check_positions(model, step.work.sequence)?;
    let facts = model.family.facts();
    let is_plain = facts.query_key_norm == QueryKeyNorm::None && !facts.has_multipliers && !facts.has_experts;
    let is_counted = model.family == Family::Gpt2 || has_modelled_passes(model.family) && is_plain;
    model.check_modelled(is_counted, step.work.sequence)?;
    positive("the number of devices", step.devices)?;
    step.recipe.check_trained()?;
    if step.host.block_inputs && step.recomputation.checkpoint != Recompute::Full {
        return Err(Error::Shape {
            what: "block inputs can be on the host only where blocks keep nothing else".into(),
            remedy: "recompute in full, or keep the activations on the device".into(),
        });
    }
    Ok(())
}

/// Returns the bytes of two buffers: the gradients of a block, on their way to other devices or the host; and the parameters that come from
/// there, of two blocks, or twice the largest matrix outside the blocks.
fn buffers(model: &Decoder, step: &Step) -> Result<(u64, u64), Error> {
    let block = model.block_parameters()?;
    let reduces = step.divides(ZeroStage::Two) || step.host.gradients;
    let reducing = if reduces { step.recipe.gradients.bytes(block)? } else { 0 };
    if !step.divides(ZeroStage::Three) && !step.host.parameters {
        return Ok((reducing, 0));
    }
    let parts = model.parameters_by_part()?.into_iter();
    let outside = parts.filter(|(part, _)| matches!(part, Part::Embedding | Part::Output));
    let largest = outside.map(|(_, elements)| elements).fold(block, u64::max);
    Ok((reducing, step.recipe.compute.bytes(product(WHAT, &[2, largest])?)?))
}

/// Returns the bytes of autocast's copies of all weights, and of one block's; none where gathered parameters replace them.
fn autocast_copies(model: &Decoder, step: &Step) -> Result<(u64, u64), Error> {
    if !step.recipe.casts || step.divides(ZeroStage::Three) || step.host.parameters {
        return Ok((0, 0));
    }
    let all = step.recipe.compute.bytes(model.product_parameters()?)?;
    Ok((all, step.recipe.compute.bytes(model.block_parameters()?)?.min(all)))
}

/// Returns the temporaries of the optimizer's step over lists of tensors: the square root of the second moment, Lion's signs; AdaGrad's list form also
/// allocates the scaled gradients.
fn update_bytes(model: &Decoder, step: &Step) -> Result<u64, Error> {
    let copies = match step.optimizer {
        optimizer if step.fused_optimizer && !optimizer.updates_whole_tensors() => 0,
        Optimizer::Sgd | Optimizer::Momentum | Optimizer::Adam8bit => 0,
        // One tensor after the other.
        Optimizer::Muon | Optimizer::Adafactor => {
            let tensors = model.tensor_groups()?;
            let tensors = tensors.iter().map(|(_, tensor)| tensor.into());
            return step.optimizer.update_bytes_of(tensors, step.recipe.state);
        }
        Optimizer::RmsProp | Optimizer::Adam | Optimizer::AdamW | Optimizer::Lion => 1,
        Optimizer::AdaGrad => 2,
    };
    let share = step.share(model.parameters()?, ZeroStage::One);
    product(WHAT, &[copies, step.recipe.state.bytes(share)?])
}

/// Bytes of a block's tensors, and of the tensors kept outside the blocks.
struct Block {
    recomputation: Recomputation,
    /// Whether autocast copies the operands of products.
    casts: bool,
    /// Whether the MLP is a SwiGLU.
    gated: bool,
    /// `[tokens, d]` of the residual stream, and of the operands of products.
    stream: u64,
    narrow: u64,
    /// A norm's numbers per token, and attention's.
    statistics: u64,
    log_sum_exp: u64,
    /// `[tokens, h·k]`, the same in fp32, and `[tokens, n·k]`.
    query: u64,
    wide_query: u64,
    key: u64,
    /// `[tokens, f]`
    wide: u64,
    /// `[tokens, h, s]` in the format of products, and in fp32.
    pairs: u64,
    wide_pairs: u64,
    /// Tensors kept outside the blocks.
    outside: u64,
}

impl Block {
    fn new(model: &Decoder, step: &Step) -> Result<Self, Error> {
        let (tokens, recipe) = (step.work.tokens()?, &step.recipe);
        let [c, r] = [recipe.compute, recipe.residual].map(|dtype| dtype.storage_bits() / 8);
        let gated = model.family.is_swiglu();
        let bytes = |width: u64, bytes: u64| {
            let tensor = product(WHAT, &[tokens, width, bytes])?;
            // Room for the sums below, which have fewer than 64 terms.
            product(WHAT, &[tensor, 64]).map(|_| tensor)
        };
        let pairs = product(WHAT, &[model.heads, step.work.sequence])?;
        let mut block = Self {
            recomputation: step.recomputation,
            casts: recipe.casts,
            gated,
            stream: bytes(model.hidden, r)?,
            narrow: bytes(model.hidden, c)?,
            statistics: bytes(if gated { 1 } else { 2 }, 4)?,
            log_sum_exp: bytes(model.heads, 4)?,
            query: bytes(model.query_width()?, c)?,
            wide_query: bytes(model.query_width()?, 4)?,
            key: bytes(model.kv_width()?, c)?,
            wide: bytes(model.feed_forward, c)?,
            pairs: bytes(pairs, c)?,
            wide_pairs: bytes(pairs, 4)?,
            outside: 0,
        };
        // Tokens and labels, the table of rotary angles, the last norm, and the output projection's input.
        let angles = if gated { product(WHAT, &[c, 2, step.work.sequence, model.head_dim])? } else { 0 };
        block.outside = sum(WHAT, [bytes(2, 8)?, angles, block.norm(), block.narrow])?;
        Ok(block)
    }

    fn is_eager(&self) -> bool {
        self.recomputation.attention == AttentionKernel::Eager
    }

    fn norm(&self) -> u64 {
        self.stream + self.statistics
    }

    fn probabilities(&self) -> u64 {
        self.pairs + if self.casts { self.wide_pairs } else { 0 }
    }

    fn attention(&self) -> u64 {
        // The projections of the GPT-2s are one, with one copy of its input.
        let copies = if self.casts && self.gated { 3 } else { 1 };
        let core = match (self.is_eager(), self.recomputation.checkpoint) {
            (true, Recompute::Selective) => 2 * self.query,
            (true, _) => 2 * self.query + self.probabilities(),
            (false, _) => 2 * self.key + self.log_sum_exp,
        };
        self.norm() + copies * self.narrow + 2 * self.query + core
    }

    fn feed_forward(&self) -> u64 {
        // A hand-written SwiGLU casts its input once.
        let composed = self.gated && self.recomputation.swiglu == SwigluLevel::Eager;
        let copies = if self.casts && composed { 2 } else { 1 };
        let tensors = if self.gated { self.recomputation.swiglu.kept_feed_forward_tensors() } else { 2 };
        self.norm() + copies * self.narrow + tensors * self.wide
    }

    /// Bytes that a block keeps from its forward to its backward.
    fn kept(&self) -> u64 {
        match self.recomputation.checkpoint {
            Recompute::Full => self.stream,
            _ => self.attention() + self.feed_forward(),
        }
    }

    /// Temporaries of a backward: gradients of the residual stream and of a branch, and the larger of the feed-forward layer's and of the
    /// attention's once the feed-forward layer's tensors are freed. A recomputed block keeps everything but its input, which exists.
    fn backward(&self) -> u64 {
        let level = self.recomputation.swiglu;
        let wide = match (self.gated, level) {
            (false, _) | (true, SwigluLevel::Eager) => 2,
            (true, level) => 1 + level.recomputed_products(),
        };
        let core = match (self.is_eager(), self.recomputation.checkpoint) {
            (true, checkpoint) => {
                let again = if checkpoint == Recompute::Selective { self.probabilities() } else { 0 };
                2 * if self.casts { self.wide_pairs } else { self.pairs } + again
            }
            (false, _) => self.wide_query,
        };
        let attention = 2 * self.query + 2 * self.key + core;
        let again = match self.recomputation.checkpoint {
            Recompute::Full => self.attention() + self.feed_forward() - self.stream,
            _ => 0,
        };
        let largest = (wide * self.wide).max(attention.saturating_sub(self.feed_forward()));
        self.stream + self.narrow + largest + again
    }
}

/// Returns the bytes that a GPT block keeps by the formulas of Korthikanti et al., section 4: 16-bit activations, dropout, eager attention,
/// `f = 4·h`. With sequence `s`, batch `b`, hidden `h`, heads `a`: `34·s·b·h + 5·a·b·s²`; without the second term if attention's core is
/// recomputed, and `2·s·b·h` for a block's input alone.
///
/// # Errors
/// No tokens, bytes beyond 64 bits.
pub fn korthikanti(work: Workload, hidden: u64, heads: u64, choice: Recompute) -> Result<u64, Error> {
    let linear = |factor| product(WHAT, &[factor, work.tokens()?, hidden]);
    match choice {
        Recompute::None => {
            sum(WHAT, [linear(34)?, product(WHAT, &[5, heads, work.tokens()?, work.sequence])?])
        }
        Recompute::Selective => linear(34),
        Recompute::Full => linear(2),
    }
}
