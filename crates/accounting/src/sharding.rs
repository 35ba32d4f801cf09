//! Training over ranks that divide optimizer state, gradients or weights: bytes of each rank, and bytes that it sends.
//!
//! Trained parameters of one dtype lie one after the other in *regions*, each parameter at a multiple of 64 elements. A region is
//! divided among N ranks at multiples of 4096 elements, so the last ranks may own less, or nothing. With P elements of b_w bytes, of
//! b_g bytes as gradients, f = (N − 1)/N, and A rounds of one micro-batch on each rank:
//!
//! | stage | weights | gradients | fp32 sums | AdamW in fp32 | sent per rank and step |
//! |---|---|---|---|---|---|
//! | 1 | b_w·P | b_g·P, and one region | 4·P/N | 8·P/N | f·(A·b_g + b_w)·P |
//! | 2 | b_w·P | two regions | 4·P/N | 8·P/N | f·(A·b_g + b_w)·P |
//! | 3 | b_w·P/N, and slots of the largest layer | two layers | 4·P/N | 8·P/N | A·f·(2·b_w + b_g)·P |
//!
//! In stages 1 and 2 regions are buckets of about 16 MiB; in stage 3 each block of the decoder is a region, and what is outside of the
//! blocks is divided as in stage 2. fp32 master weights are divided in every stage. Frozen regions are neither reduced nor stepped:
//! whole on each rank or, in stage 3, gathered in each pass. A reduction receives two pieces of 1 MiB from each other rank at a time.
//!
//! ```
//! use accounting::memory::{optimizer::Optimizer, recipe::Recipe, zero::ZeroStage};
//! use accounting::{presets, sharding::Layout};
//!
//! let model = presets::find("qwen2.5-0.5b")?;
//! let layout = Layout::of_decoder(&model, &Recipe::FP32, ZeroStage::Two, 4)?;
//! let rank = layout.rank_bytes(0, &Recipe::FP32, Optimizer::AdamW, 0)?;
//! assert_eq!(rank.weights, 4 * 494_032_768);
//! println!("{} bytes sent", layout.sent_bytes(0, &Recipe::FP32, 1)?);
//! # Ok::<(), accounting::Error>(())
//! ```
//!
//! Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, sections 5 and 7.

use std::ops::Range;

use crate::exact::{positive, product, sum};
use crate::memory::optimizer::Optimizer;
use crate::memory::recipe::Recipe;
use crate::memory::zero::ZeroStage;
use crate::model::Decoder;
use crate::offload::StepCosts;
use crate::parameters::ParameterTensor;
use crate::{Dtype, Error};

/// Elements of a block: shards begin at multiples of it.
pub const BLOCK: u64 = 4096;
/// Elements at which a parameter begins in its region.
pub const ALIGNMENT: u64 = 64;
/// Bytes of weights in a bucket, at least.
pub const BUCKET_BYTES: u64 = 16 << 20;
/// Bytes of a piece of a reduction, of which two are received from each rank at a time.
const PIECE: u64 = 1 << 20;

/// Parameters that are divided, reduced and gathered together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The elements of each parameter.
    parameters: Vec<Range<u64>>,
    /// Elements, with those between parameters.
    pub elements: u64,
    /// Whether it has gradients.
    pub trained: bool,
    /// Whether its weights are divided too, and gathered when they are needed.
    pub gathered: bool,
}

impl Region {
    /// Places parameters, given by their elements, one after the other.
    pub fn new(parameters: &[u64], trained: bool, gathered: bool) -> Result<Self, Error> {
        let (mut ranges, mut elements) = (Vec::new(), 0);
        for &count in parameters {
            let end = sum("elements of a region", [elements, count])?;
            ranges.push(elements..end);
            elements = product("elements of a region", &[end.div_ceil(ALIGNMENT), ALIGNMENT])?;
        }
        Ok(Self { parameters: ranges, elements, trained, gathered })
    }

    /// Returns the elements that a rank owns.
    pub fn owned(&self, rank: u64, ranks: u64) -> Range<u64> {
        let per_rank = self.elements.div_ceil(BLOCK).div_ceil(ranks.max(1)).saturating_mul(BLOCK);
        let at = |rank: u64| per_rank.saturating_mul(rank).min(self.elements);
        at(rank)..at(rank.saturating_add(1))
    }

    /// Returns how many elements of a range are parameters'.
    fn of_parameters(&self, range: &Range<u64>) -> u64 {
        let within = |one: &Range<u64>| one.end.min(range.end).saturating_sub(one.start.max(range.start));
        self.parameters.iter().map(within).sum()
    }
}

/// How a model's parameters are divided among ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What is divided.
    pub stage: ZeroStage,
    /// Number of ranks.
    pub ranks: u64,
    /// All regions.
    pub regions: Vec<Region>,
}

/// Bytes of one rank between and during its passes, without activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankBytes {
    /// Weights, whole or this rank's part.
    pub weights: u64,
    /// Slots for gathered layers.
    pub slots: u64,
    /// Sums of gradients over micro-batches, in fp32.
    pub sums: u64,
    /// fp32 copies of half-precision weights.
    pub master: u64,
    /// Optimizer state.
    pub optimizer: u64,
    /// Gradients, and their flat copies while they are reduced.
    pub gradients: u64,
    /// Pieces of other ranks' gradients.
    pub pieces: u64,
}

impl RankBytes {
    /// Returns the sum of all.
    pub fn total(&self) -> Result<u64, Error> {
        let Self { weights, slots, sums, master, optimizer, gradients, pieces } = *self;
        sum("bytes of a rank", [weights, slots, sums, master, optimizer, gradients, pieces])
    }

    /// Returns those that stay between steps.
    fn states(&self) -> Result<u64, Error> {
        sum("bytes of a rank's states", [self.sums, self.master, self.optimizer])
    }
}

impl Layout {
    /// Divides parameters, given by their elements, into buckets for stages 0 to 2. A bucket has whole parameters.
    ///
    /// # Errors
    /// Stage 3; no ranks; counts beyond 64 bits.
    pub fn buckets(
        parameters: &[u64],
        dtype: Dtype,
        bucket_bytes: u64,
        stage: ZeroStage,
        ranks: u64,
    ) -> Result<Self, Error> {
        if stage == ZeroStage::Three {
            return Err(Error::Shape {
                what: "stage 3 divides the weights by layers".into(),
                remedy: "give the decoder".into(),
            });
        }
        let regions = buckets(parameters, dtype, bucket_bytes)?;
        Ok(Self { stage, ranks: positive("the number of ranks", ranks)?, regions })
    }

    /// Divides a decoder that is trained as a whole, in buckets of [`BUCKET_BYTES`].
    ///
    /// # Errors
    /// No ranks; counts beyond 64 bits.
    pub fn of_decoder(model: &Decoder, recipe: &Recipe, stage: ZeroStage, ranks: u64) -> Result<Self, Error> {
        let elements = |tensors: Vec<ParameterTensor>| -> Result<Vec<u64>, Error> {
            tensors.iter().map(ParameterTensor::elements).collect()
        };
        let block = elements(model.block_tensors()?)?;
        let [before, after] = [model.tensors_before_blocks(), model.tensors_after_blocks()];
        let (before, after) = (elements(before)?, elements(after)?);
        let (dtype, mut regions) = (recipe.parameters, Vec::new());
        if stage == ZeroStage::Three {
            let layer = Region::new(&block, true, true)?;
            regions.extend(std::iter::repeat_n(layer, usize::try_from(model.layers).unwrap_or(usize::MAX)));
            regions.extend(buckets(&[before, after].concat(), dtype, BUCKET_BYTES)?);
        } else {
            let blocks = (0..model.layers).flat_map(|_| block.iter().copied());
            let all: Vec<u64> = before.iter().copied().chain(blocks).chain(after).collect();
            regions = buckets(&all, dtype, BUCKET_BYTES)?;
        }
        Ok(Self { stage, ranks: positive("the number of ranks", ranks)?, regions })
    }

    /// Returns the bytes of a rank. `slots` are those for gathered layers.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn rank_bytes(
        &self,
        rank: u64,
        recipe: &Recipe,
        optimizer: Optimizer,
        slots: u64,
    ) -> Result<RankBytes, Error> {
        let mut bytes = RankBytes::default();
        let (mut largest, mut largest_layer, mut gradients) = (0, 0, 0);
        for region in &self.regions {
            let own = region.owned(rank, self.ranks);
            let (held, parameters) = (own.end - own.start, region.of_parameters(&own));
            let whole = recipe.parameters.bytes(region.elements)?;
            if region.gathered {
                bytes.weights += recipe.parameters.bytes(held)?;
                largest_layer = largest_layer.max(whole);
            } else {
                bytes.weights += whole;
            }
            if !region.trained {
                continue;
            }
            bytes.sums += Dtype::Fp32.bytes(held)?;
            bytes.master += recipe.master.map_or(Ok(0), |dtype| dtype.bytes(parameters))?;
            bytes.optimizer += optimizer.state_tensors() * recipe.state.bytes(parameters)?;
            let gradient = recipe.gradients.bytes(region.elements)?;
            gradients += gradient;
            largest = largest.max(gradient);
            let piece = PIECE.min(recipe.gradients.bytes(held)?);
            bytes.pieces = bytes.pieces.max(2 * (self.ranks - 1) * piece);
        }
        bytes.slots = product("bytes of slots", &[slots, largest_layer])?;
        bytes.gradients = match self.stage {
            ZeroStage::Zero => gradients,
            ZeroStage::One => sum("bytes of gradients", [gradients, largest])?,
            ZeroStage::Two | ZeroStage::Three => product("bytes of gradients", &[2, largest])?,
        };
        Ok(bytes)
    }

    /// Returns the bytes of gradients and weights that a rank sends in a step of `rounds` micro-batches of its own. Beside them it
    /// sends a few numbers: which parameters have a gradient, the norm's, losses, and whether to stop.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn sent_bytes(&self, rank: u64, recipe: &Recipe, rounds: u64) -> Result<u64, Error> {
        const WHAT: &str = "bytes that a rank sends";
        let mut sent = Vec::new();
        for region in &self.regions {
            let own = region.owned(rank, self.ranks);
            let own = own.end - own.start;
            if region.trained {
                let others = recipe.gradients.bytes(region.elements - own)?;
                sent.push(product(WHAT, &[rounds, others])?);
            }
            let gathers = match (region.gathered, region.trained) {
                (true, _) => 2 * rounds,
                (false, trained) => u64::from(trained),
            };
            sent.push(product(WHAT, &[gathers, self.ranks - 1, recipe.parameters.bytes(own)?])?);
        }
        sum(WHAT, sent)
    }

    /// Returns the costs of a step of one rank, the first, which owns the most: `costs` are those of the whole model.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn costs(
        &self,
        mut costs: StepCosts,
        recipe: &Recipe,
        optimizer: Optimizer,
        slots: u64,
    ) -> Result<StepCosts, Error> {
        let rank = self.rank_bytes(0, recipe, optimizer, slots)?;
        let share = |whole: u64| whole.div_ceil(self.ranks);
        for layer in &mut costs.layers {
            layer.state_bytes = 0;
            layer.trainable = share(layer.trainable);
            if self.stage >= ZeroStage::Two {
                layer.gradient_bytes = 0;
            }
            if self.stage == ZeroStage::Three {
                layer.slot_bytes = share(layer.slot_bytes);
            }
        }
        costs.fixed.state_bytes = rank.states()?;
        costs.fixed.trainable = share(costs.fixed.trainable);
        let (fixed, working) = (costs.fixed, &mut costs.working);
        match self.stage {
            ZeroStage::Zero => {}
            // The reduction takes the gradients region by region, when backward has ended.
            ZeroStage::One => {
                let all: u64 = costs.layers.iter().map(|layer| layer.gradient_bytes).sum();
                let flat = rank.gradients.saturating_sub(fixed.gradient_bytes.saturating_add(all));
                let reducing = sum("bytes of a reduction", [flat, rank.pieces])?;
                working.embedding_bytes = working.embedding_bytes.max(reducing);
            }
            ZeroStage::Two | ZeroStage::Three => {
                let beside = [working.constant_bytes, rank.gradients, rank.pieces, rank.slots];
                working.constant_bytes = sum("bytes beside the layers", beside)?;
            }
        }
        Ok(costs)
    }
}

fn buckets(parameters: &[u64], dtype: Dtype, bucket_bytes: u64) -> Result<Vec<Region>, Error> {
    let (mut regions, mut bucket, mut bytes) = (Vec::new(), Vec::new(), 0);
    for &elements in parameters {
        bucket.push(elements);
        bytes += dtype.bytes(elements)?;
        if bytes >= bucket_bytes {
            regions.push(Region::new(&bucket, true, false)?);
            (bucket, bytes) = (Vec::new(), 0);
        }
    }
    if !bucket.is_empty() {
        regions.push(Region::new(&bucket, true, false)?);
    }
    Ok(regions)
}

#[cfg(test)]
mod tests;
