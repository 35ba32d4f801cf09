//! Training over ranks that divide optimizer state, gradients or weights: bytes of each rank, and bytes that it sends.
//!
//! Parameters of one dtype lie one after the other in *regions*, each parameter at a multiple of [`ALIGNMENT`] elements. A region is
//! divided among N ranks at multiples of [`BLOCK`] elements, so the last ranks may own less, or nothing. With P elements of b_w bytes, of
//! b_g bytes as gradients, f = (N − 1)/N, A rounds of one micro-batch on each rank, and in stage 3 n layers and s slots:
//!
//! | stage | weights | gradients | fp32 sums | AdamW in fp32 | sent per rank and step |
//! |---|---|---|---|---|---|
//! | 1 | b_w·P | b_g·P, and one region | 4·P/N | 8·P/N | f·(A·b_g + b_w)·P |
//! | 2 | b_w·P | three regions | 4·P/N | 8·P/N | f·(A·b_g + b_w)·P |
//! | 3 | b_w·P/N, and s of the largest layer | three layers | 4·P/N | 8·P/N | f·(A·b_g + (2·A·(n − s) + s)/n·b_w)·P |
//!
//! In stages 1 and 2 regions are buckets of about 16 MiB. In stage 3 each layer is a region, in which parameters begin at multiples of 256
//! bytes; parameters outside of the layers are divided as in stage 2. fp32 master weights are divided in every stage. Frozen regions are
//! neither reduced nor stepped: whole on each rank or, in a layer of stage 3, gathered with it.
//!
//! **Loads of stage 3.** Layers are gathered into s slots. The last s layers of a forward stay for its backward, and the first s of a
//! backward for the next micro-batch, but not for the next step, which has changed them. So the first forward of a step gathers n layers,
//! every other pass n − s: 2·A·(n − s) + s in all. Frozen layers do not change: 2·A·(n − s).
//!
//! **Reductions** take a copy of the region's gradients, one region at a time while the next copy is filled, and receive two pieces of
//! [`piece_bytes`] from each other rank at a time. Stage 1 begins them when backward has ended, stages 2 and 3 as soon as a region's gradients are there.
//!
//! **Replicas** (hybrid sharding): N is then the ranks of one replica, which have everything above among them. In each round the fp32 sums
//! of a shard pass through the replicas, and from the last one to all: a rank of the last of R replicas sends R − 1 times its sums, the
//! others once.
//!
//! **One rank** alone takes the first fp32 gradients of a step as its sums: they stay until the step, and nothing is copied.
//!
//! ```
//! use accounting::memory::{optimizer::Optimizer, recipe::Recipe, zero::ZeroStage};
//! use accounting::{presets, sharding::Layout};
//!
//! let model = presets::find("qwen2.5-0.5b")?;
//! let layout = Layout::of_decoder(&model, &Recipe::FP32, ZeroStage::Two, 4)?;
//! let rank = layout.rank_bytes(0, &Recipe::FP32, Optimizer::AdamW, 0)?;
//! assert_eq!(rank.weights, 4 * 494_032_768);
//! println!("{} bytes sent", layout.sent_bytes(0, 1, 0)?);
//! # Ok::<(), accounting::Error>(())
//! ```
//!
//! Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, sections 5 and 7.

mod layout;
mod peak;

use std::ops::Range;

pub use layout::Layout;

use crate::exact::{product, sum};
use crate::memory::optimizer::Optimizer;
use crate::memory::recipe::Recipe;
use crate::memory::zero::ZeroStage;
use crate::{Dtype, Error};

/// Elements of a block: shards begin at multiples of it.
pub const BLOCK: u64 = 4096;
/// Elements at which a parameter begins in a bucket.
pub const ALIGNMENT: u64 = 64;
/// Bytes of weights in a bucket, at least.
pub const BUCKET_BYTES: u64 = 16 << 20;

/// Returns the bytes of a piece of a reduction over so many ranks on CPUs; two are received from each other one at a time.
pub fn piece_bytes(ranks: u64) -> u64 {
    const LEAST: u64 = 64 << 10;
    let each = (32 << 20) / (2 * ranks.saturating_sub(1).max(1));
    (each - each % LEAST).clamp(LEAST, 1 << 20)
}

/// Where a parameter is in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerPosition {
    /// Before the layers, whose gradients come last.
    Before,
    /// In the layer of that number.
    Layer(u64),
    /// After the layers.
    After,
}

/// A parameter of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parameter {
    range: Range<u64>,
    position: LayerPosition,
}

/// Parameters of one dtype that are divided, reduced and gathered together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    parameters: Vec<Parameter>,
    /// Elements, with those between parameters.
    pub elements: u64,
    /// The dtype of the weights.
    pub dtype: Dtype,
    /// The dtype of the gradients; `None` if they are frozen.
    pub gradients: Option<Dtype>,
    /// The layer whose weights they are, if these are divided too, and gathered when the layer computes.
    pub layer: Option<u64>,
}

impl Region {
    /// Returns the elements that a rank owns.
    pub fn owned(&self, rank: u64, ranks: u64) -> Range<u64> {
        let per_rank = self.elements.div_ceil(BLOCK).div_ceil(ranks.max(1)).saturating_mul(BLOCK);
        let at = |rank: u64| per_rank.saturating_mul(rank).min(self.elements);
        at(rank)..at(rank.saturating_add(1))
    }

    /// Returns how many elements of a range are each parameter's.
    fn parts(&self, range: Range<u64>) -> impl Iterator<Item = u64> {
        self.parameters.iter().map(move |parameter| within(&parameter.range, &range))
    }

    /// Returns how many elements of a range are parameters'.
    fn of_parameters(&self, range: &Range<u64>) -> u64 {
        self.parts(range.clone()).sum()
    }

    /// Returns the bytes of its gradients that are reduced, with the gaps between parameters.
    fn gradient_bytes(&self) -> Result<u64, Error> {
        self.gradients.map_or(Ok(0), |dtype| dtype.bytes(self.elements))
    }
}

/// Returns how many elements of one range are in another.
fn within(one: &Range<u64>, other: &Range<u64>) -> u64 {
    one.end.min(other.end).saturating_sub(one.start.max(other.start))
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
    /// Gradients, and their flat copies while they are reduced, at most.
    pub gradients: u64,
    /// Pieces of other ranks' gradients, at most.
    pub pieces: u64,
}

impl RankBytes {
    /// Returns the sum of all.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn total(&self) -> Result<u64, Error> {
        let Self { weights, slots, sums, master, optimizer, gradients, pieces } = *self;
        sum("bytes of a rank", [weights, slots, sums, master, optimizer, gradients, pieces])
    }

    /// Returns those that stay between steps.
    pub(crate) fn states(&self) -> Result<u64, Error> {
        sum("bytes of a rank's states", [self.sums, self.master, self.optimizer])
    }
}

impl Layout {
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
        let (mut largest, mut gradients) = (0, 0);
        for region in &self.regions {
            let range = region.owned(rank % self.ranks, self.ranks);
            let (share, parameters) = (range.end - range.start, region.of_parameters(&range));
            let weights = if region.layer.is_some() { share } else { region.elements };
            bytes.weights += region.dtype.bytes(weights)?;
            let Some(dtype) = region.gradients else { continue };
            bytes.sums += if self.takes_gradients(region) { 0 } else { Dtype::Fp32.bytes(share)? };
            let master = recipe.master.filter(|_| region.dtype == recipe.parameters);
            bytes.master += master.map_or(Ok(0), |dtype| dtype.bytes(parameters))?;
            for parameter in &region.parameters {
                let whole = parameter.range.end - parameter.range.start;
                let part = within(&parameter.range, &range);
                bytes.optimizer += optimizer.state_bytes_of_part(part, whole, recipe.state)?;
            }
            largest = largest.max(region.gradient_bytes()?);
            gradients += region.gradient_bytes()?;
            bytes.pieces = bytes.pieces.max(self.received(dtype.bytes(share)?));
        }
        let layers = (0..self.layers()).map(|layer| self.layer_bytes(layer));
        let layer = layers.collect::<Result<Vec<u64>, Error>>()?.into_iter().max().unwrap_or(0);
        bytes.slots = product("bytes of slots", &[slots.min(self.layers()), layer])?;
        bytes.gradients = match self.stage {
            _ if self.takes_all_gradients() => gradients,
            ZeroStage::Zero => gradients,
            ZeroStage::One => sum("bytes of gradients", [gradients, largest])?,
            ZeroStage::Two | ZeroStage::Three => {
                product("bytes of gradients", &[3, largest])?.min(gradients + largest)
            }
        };
        Ok(bytes)
    }

    /// Returns the bytes that a step has at its peak only if an earlier reduction is still under way then: of stage 3 the copy of the
    /// layer after and pieces, of stage 2 pieces, of stage 1 none. Ranks that run at the same pace have ended it before.
    /// [`Layout::costs`] includes them.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn overlapping_bytes(&self) -> Result<u64, Error> {
        let (mut copy, mut pieces) = (0, 0);
        let three = self.stage == ZeroStage::Three;
        if !three && self.stage != ZeroStage::Two {
            return Ok(0);
        }
        for region in self.regions.iter().filter(|region| !three || region.layer.is_some()) {
            let Some(dtype) = region.gradients else { continue };
            let range = region.owned(0, self.ranks);
            if three {
                copy = copy.max(region.gradient_bytes()?);
            }
            pieces = pieces.max(self.received(dtype.bytes(range.end - range.start)?));
        }
        Ok(copy + pieces)
    }

    /// Returns the elements of the largest part of a parameter that the first rank steps, and of all.
    pub(crate) fn stepped(&self) -> (u64, u64) {
        let trained = self.regions.iter().filter(|region| region.gradients.is_some());
        let parts = trained.flat_map(|region| region.parts(region.owned(0, self.ranks)));
        parts.fold((0, 0), |(largest, all), part| (largest.max(part), all + part))
    }

    /// Returns the bytes that receive a shard of so many bytes from the other ranks: one piece of each if it holds all, else two.
    fn received(&self, share: u64) -> u64 {
        let piece = piece_bytes(self.ranks);
        (self.ranks - 1) * if share > piece { 2 * piece } else { share }
    }

    /// Whether a region's gradients become its sums, as those of one rank do that have their dtype.
    fn takes_gradients(&self, region: &Region) -> bool {
        self.is_alone() && region.gradients == Some(Dtype::Fp32)
    }

    /// Whether all gradients become sums.
    fn takes_all_gradients(&self) -> bool {
        let mut trained = self.regions.iter().filter(|region| region.gradients.is_some());
        trained.all(|region| self.takes_gradients(region))
    }

    /// Returns the number of layers whose weights are divided.
    pub fn layers(&self) -> u64 {
        self.regions.iter().filter_map(|region| region.layer).max().map_or(0, |last| last + 1)
    }

    /// Returns the bytes of a gathered layer.
    fn layer_bytes(&self, layer: u64) -> Result<u64, Error> {
        let regions = self.regions.iter().filter(|region| region.layer == Some(layer));
        let bytes: Result<Vec<u64>, Error> =
            regions.map(|region| region.dtype.bytes(region.elements)).collect();
        sum("bytes of a layer", bytes?)
    }

    /// Returns how often a layer is gathered into one of `slots` in a step of `rounds` micro-batches: once for each pass to which it does
    /// not stay.
    fn gathers(&self, layer: u64, rounds: u64, slots: u64) -> u64 {
        let is_trained = self.regions.iter().any(|one| one.layer == Some(layer) && one.gradients.is_some());
        let for_forward = u64::from(layer >= slots);
        let for_backward = u64::from(layer.saturating_add(slots) < self.layers());
        let changed = u64::from(is_trained && for_forward == 0 && rounds > 0);
        rounds * (for_forward + for_backward) + changed
    }

    /// Returns the bytes of gradients and weights that a rank sends in a step of `rounds` micro-batches of its own, with layers gathered
    /// into `slots`; `rank` counts through the replicas. Beside them it sends a few numbers: which parameters have a gradient, the norm's,
    /// losses, and whether to stop.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn sent_bytes(&self, rank: u64, rounds: u64, slots: u64) -> Result<u64, Error> {
        const WHAT: &str = "bytes that a rank sends";
        let (replica, number) = (rank / self.ranks, rank % self.ranks);
        let to_replicas = if replica + 1 == self.replicas { self.replicas - 1 } else { 1 };
        let mut sent = Vec::new();
        for region in &self.regions {
            let range = region.owned(number, self.ranks);
            let share = range.end - range.start;
            if let Some(dtype) = region.gradients {
                sent.push(product(WHAT, &[rounds, to_replicas, Dtype::Fp32.bytes(share)?])?);
                sent.push(product(WHAT, &[rounds, dtype.bytes(region.elements - share)?])?);
            }
            let gathers = match region.layer {
                Some(layer) => self.gathers(layer, rounds, slots),
                None => u64::from(region.gradients.is_some()),
            };
            sent.push(product(WHAT, &[gathers, self.ranks - 1, region.dtype.bytes(share)?])?);
        }
        sum(WHAT, sent)
    }

    /// Returns those of [`Layout::sent_bytes`] that go to rank `to`, another one, so that the bytes on the link between two machines are a
    /// sum over their ranks.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn sent_bytes_to(&self, rank: u64, to: u64, rounds: u64, slots: u64) -> Result<u64, Error> {
        const WHAT: &str = "bytes that a rank sends to another";
        let ([replica, number], [its_replica, its_number]) = (self.place(rank), self.place(to));
        let mut sent = Vec::new();
        for region in &self.regions {
            let share = |number: u64| {
                let range = region.owned(number, self.ranks);
                range.end - range.start
            };
            // Sums go from replica to replica, and from the last to all.
            let takes_sums = its_replica == replica + 1 || replica + 1 == self.replicas;
            match region.gradients {
                Some(_) if replica != its_replica => {
                    let times = u64::from(number == its_number && takes_sums);
                    sent.push(product(WHAT, &[rounds, times, Dtype::Fp32.bytes(share(number))?])?);
                }
                Some(dtype) => sent.push(product(WHAT, &[rounds, dtype.bytes(share(its_number))?])?),
                None => {}
            }
            if replica == its_replica {
                let gathers = match region.layer {
                    Some(layer) => self.gathers(layer, rounds, slots),
                    None => u64::from(region.gradients.is_some()),
                };
                sent.push(product(WHAT, &[gathers, region.dtype.bytes(share(number))?])?);
            }
        }
        sum(WHAT, sent)
    }

    /// A rank's replica, and its number there.
    fn place(&self, rank: u64) -> [u64; 2] {
        [rank / self.ranks, rank % self.ranks]
    }
}

#[cfg(test)]
mod tests;
