//! Changes of a step's memory by the division among ranks.
//!
//! Gradients of a region wait until all are there, are copied, and are freed when the copy has been reduced. A copy is filled while the one
//! before it is reduced. So beside the tensors of a layer's backward there are at most
//!
//! ```text
//! stage 1   after backward                all gradients, and a copy of the first region that is not reduced yet
//! stage 2   backward of a layer           gradients of later layers whose region is not complete, and two copies
//! stage 3   backward of a layer           the copy of the layer after it, and its own when its activations are freed
//! ```
//!
//! One rank alone adds gradients to its sums without copies, but for those of layers in stage 3 that have another dtype than their sums.
//! fp32 gradients are the sums themselves, of the one micro-batch that is counted here.

use super::{LayerPosition, Layout, Region};
use crate::Error;
use crate::exact::sum;
use crate::memory::optimizer::Optimizer;
use crate::memory::recipe::Recipe;
use crate::memory::zero::ZeroStage;
use crate::offload::StepCosts;

const WHAT: &str = "bytes of gradients that are reduced";

impl Layout {
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
        match self.stage {
            _ if self.takes_all_gradients() => {}
            ZeroStage::Zero => {}
            ZeroStage::One => {
                let reducing = sum(WHAT, [self.copies_after_backward()?, rank.pieces])?;
                costs.working.embedding_bytes = costs.working.embedding_bytes.max(reducing);
            }
            ZeroStage::Two => self.reduce_during_backward(&mut costs, rank.pieces)?,
            ZeroStage::Three => self.reduce_layers(&mut costs, rank.pieces)?,
        }
        for (number, layer) in (0..).zip(&mut costs.layers) {
            layer.state_bytes = 0;
            layer.trainable = share(layer.trainable);
            if self.stage == ZeroStage::Three {
                layer.slot_bytes = self.own_layer_bytes(number)?;
            }
        }
        costs.fixed.are_reduced = self.stage != ZeroStage::Zero && !self.takes_all_gradients();
        costs.fixed.state_bytes = rank.states()?;
        costs.fixed.trainable = share(costs.fixed.trainable);
        costs.working.constant_bytes =
            sum("bytes beside the layers", [costs.working.constant_bytes, rank.slots])?;
        Ok(costs)
    }

    /// The first rank's part of a layer.
    fn own_layer_bytes(&self, layer: u64) -> Result<u64, Error> {
        let mut bytes = 0;
        for region in self.regions.iter().filter(|region| region.layer == Some(layer)) {
            let range = region.owned(0, self.ranks);
            bytes += region.dtype.bytes(range.end - range.start)?;
        }
        Ok(bytes)
    }

    fn trained(&self) -> impl DoubleEndedIterator<Item = &Region> {
        self.regions.iter().filter(|region| region.gradients.is_some())
    }

    /// Returns the bytes of a region's copy while it is reduced.
    fn copy_bytes(&self, region: &Region) -> Result<u64, Error> {
        if self.is_alone() && region.layer.is_none() { Ok(0) } else { region.gradient_bytes() }
    }

    /// The largest sum of copies beyond the gradients, whose regions are freed from the last to the first.
    fn copies_after_backward(&self) -> Result<u64, Error> {
        let copies: Vec<u64> =
            self.trained().rev().map(|region| self.copy_bytes(region)).collect::<Result<_, _>>()?;
        let mut freed = 0u64;
        let mut most = 0;
        for (number, &copy) in copies.iter().enumerate() {
            // While a copy is filled, the one before is reduced, and those before it are freed.
            most = most.max(copy.saturating_sub(freed));
            freed += number.checked_sub(1).map_or(0, |before| copies[before]);
        }
        Ok(most)
    }

    fn reduce_during_backward(&self, costs: &mut StepCosts, pieces: u64) -> Result<(), Error> {
        let after = self.gradients_at(|position| position == LayerPosition::After)?;
        costs.fixed.head_gradient_bytes = costs.fixed.head_gradient_bytes.saturating_sub(after);
        costs.fixed.gradient_bytes = costs.fixed.gradient_bytes.saturating_sub(after);
        let mut regions: Vec<(&Region, u64)> = Vec::new();
        for region in self.trained().rev() {
            regions.push((region, region.gradient_bytes()?));
        }
        let (mut next, mut waiting, mut copy) = (0, after, 0);
        for number in (0..costs.layers.len()).rev() {
            let layer = &mut costs.layers[number];
            let gradients = std::mem::take(&mut layer.gradient_bytes);
            let mut most = sum(WHAT, [waiting, copy])?;
            waiting = sum(WHAT, [waiting, gradients])?;
            while let Some(&(region, bytes)) = regions.get(next)
                && region.is_complete_after(number as u64)
            {
                // The layer's gradients are among its working bytes.
                let next_copy = self.copy_bytes(region)?;
                most = most.max(sum(WHAT, [waiting.saturating_sub(gradients), next_copy, copy])?);
                (waiting, copy, next) = (waiting.saturating_sub(bytes), next_copy, next + 1);
            }
            layer.reducing_bytes = sum(WHAT, [most, pieces])?;
        }
        let last = regions.get(next).map_or(Ok(0), |(region, _)| self.copy_bytes(region))?;
        costs.working.embedding_bytes = costs.working.embedding_bytes.max(last);
        costs.fixed.reducing_bytes = sum(WHAT, [waiting, copy, pieces])?;
        Ok(())
    }

    fn reduce_layers(&self, costs: &mut StepCosts, pieces: u64) -> Result<(), Error> {
        let mut copy = 0;
        for number in (0..costs.layers.len()).rev() {
            let regions = self.trained().filter(|region| region.layer == Some(number as u64));
            let gradients = sum(WHAT, regions.map(Region::gradient_bytes).collect::<Result<Vec<_>, _>>()?)?;
            let layer = &mut costs.layers[number];
            layer.gradient_bytes = 0;
            layer.reducing_bytes = sum(WHAT, [copy, pieces])?;
            let delivered = sum(WHAT, [gradients, gradients])?;
            costs.working.backward_bytes = costs.working.backward_bytes.max(delivered);
            // Then its activations are freed, but for its input.
            let input = costs.working.input_bytes;
            for kept in layer.kept.iter_mut().chain(&mut costs.working.kept) {
                let freed = kept.bytes.saturating_sub(input);
                kept.backward_bytes = kept.backward_bytes.max(delivered.saturating_sub(freed));
            }
            copy = gradients;
        }
        let outside = self.trained().filter(|region| region.layer.is_none());
        let last = outside.map(|region| self.copy_bytes(region)).collect::<Result<Vec<_>, _>>()?;
        costs.working.embedding_bytes =
            costs.working.embedding_bytes.max(last.into_iter().max().unwrap_or(0));
        costs.fixed.reducing_bytes = sum(WHAT, [copy, pieces])?;
        Ok(())
    }

    /// Returns the bytes of the gradients of parameters at some positions.
    fn gradients_at(&self, is: impl Fn(LayerPosition) -> bool) -> Result<u64, Error> {
        let mut bytes = 0;
        for region in self.trained() {
            let elements: u64 = region
                .parameters
                .iter()
                .filter(|parameter| is(parameter.position))
                .map(|parameter| parameter.range.end - parameter.range.start)
                .sum();
            bytes += region.gradients.map_or(Ok(0), |dtype| dtype.bytes(elements))?;
        }
        Ok(bytes)
    }
}

impl Region {
    /// Whether all its gradients are there when the backward of a layer has ended.
    fn is_complete_after(&self, layer: u64) -> bool {
        self.parameters.iter().all(|parameter| match parameter.position {
            LayerPosition::Before => false,
            LayerPosition::Layer(number) => number >= layer,
            LayerPosition::After => true,
        })
    }
}
