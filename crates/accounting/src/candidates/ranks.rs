//! Candidates of a step that several ranks run together.

use super::{Batch, Candidate, Job, Placement};
use crate::activation_plan::LayerPlan;
use crate::exact::sum;
use crate::memory::recipe::Recipe;
use crate::memory::zero::ZeroStage;
use crate::offload::{StepCosts, sizes};
use crate::scale::{Division, Exchange, Network, Step, Work, step};
use crate::sharding::{Layout, Region};
use crate::{Error, sequence_parallel};

/// The ranks that run a step together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ranks {
    /// What they divide.
    pub stage: ZeroStage,
    /// All ranks.
    pub ranks: u64,
    /// Replicas of what they divide, each of as many ranks.
    pub replicas: u64,
    /// Slots for gathered layers of stage 3.
    pub slots: u64,
    /// Whether the shards of stage 3 are in files, with the optimizer's sums, copies and state of them.
    pub in_files: bool,
    /// What connects them.
    pub network: Network,
}

impl Ranks {
    /// Returns the micro-batches of a round: one for each group of `sequence_ranks`.
    pub(super) fn micro_batches(&self, sequence_ranks: u64) -> u64 {
        (self.ranks / sequence_ranks.max(1)).max(1)
    }

    /// Whether what a rank owns of layers is in files.
    pub fn keeps_files(&self) -> bool {
        self.in_files && self.stage == ZeroStage::Three
    }

    fn division(&self) -> Division {
        Division { stage: self.stage, shard: self.ranks / self.replicas.max(1), replicas: self.replicas }
    }
}

/// What a rank exchanges with others in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traffic {
    /// The seconds of the step, and those in which the rank waits.
    pub times: Step,
    /// Bytes that rank 0 sends.
    pub sent_bytes: u64,
}

impl Job {
    /// Returns the job whose ranks divide what those of a candidate do.
    #[must_use]
    pub fn at(&self, candidate: &Candidate) -> Self {
        Self { ranks: candidate.ranks, ..self.clone() }
    }

    /// Returns what a rank exchanges with others in a step of mean batches; `None` for one process.
    ///
    /// # Errors
    /// As [`Job::evaluate`].
    pub fn traffic(&self, candidate: &Candidate) -> Result<Option<Traffic>, Error> {
        let Some(ranks) = &candidate.ranks else { return Ok(None) };
        let (job, placement, rows) = (self.at(candidate), &candidate.placement, candidate.rows);
        let (pass, rounds) = (job.pass(job.mean, rows), job.passes(job.mean, rows));
        let [between, last] = job.times(ranks, &job.costs_of(placement, pass)?, placement, pass)?;
        let all = |of: fn(&Step) -> f64| (rounds - 1) as f64 * of(&between) + of(&last);
        let times = Step {
            compute: candidate.seconds - all(Step::exposed),
            gather: all(|step| step.gather),
            reduce: all(|step| step.reduce),
            replicas: all(|step| step.replicas),
            exchange: all(|step| step.exchange),
            latency: all(|step| step.latency),
        };
        let Exchange { bytes, passes, .. } = job.exchange(placement, pass)?;
        let of_rows = rounds as f64 * self.model.layers as f64 * passes * bytes;
        let sent_bytes = job.layout(ranks)?.0.sent_bytes(0, rounds, ranks.slots)? + of_rows as u64;
        Ok(Some(Traffic { times, sent_bytes }))
    }

    /// Whether ranks divide the layers' weights.
    pub(super) fn divides_layers(&self) -> bool {
        self.ranks.is_some_and(|ranks| ranks.stage == ZeroStage::Three)
    }

    /// The division of what is trained and, in stage 3, of the layers; and the formats of what is stepped. Adapters are in fp32.
    fn layout(&self, ranks: &Ranks) -> Result<(Layout, Recipe), Error> {
        let Division { stage, shard, replicas } = ranks.division();
        let recipe = self.choices.recipe;
        let (layout, recipe) = match &self.lora {
            Some(lora) => {
                (Layout::of_adapters(&self.model, lora, recipe.parameters, stage, shard)?, Recipe::FP32)
            }
            None => (Layout::of_decoder(&self.model, &recipe, stage, shard)?, recipe),
        };
        let layout = layout.with_replicas(replicas)?.aligned(self.choices.optimizer.block_elements())?;
        Ok((layout, recipe))
    }

    /// The costs of the rank that owns the most, of those of the whole model.
    pub(super) fn divided(&self, costs: StepCosts) -> Result<StepCosts, Error> {
        let Some(ranks) = &self.ranks else { return Ok(costs) };
        let (layout, recipe) = self.layout(ranks)?;
        let mut costs = layout.costs(costs, &recipe, self.choices.optimizer, ranks.slots)?;
        if ranks.keeps_files() {
            let outside = Layout {
                regions: layout.regions.into_iter().filter(|one| one.layer.is_none()).collect(),
                ..layout
            };
            costs.layers.iter_mut().for_each(|layer| layer.slot_bytes = 0);
            costs.fixed.state_bytes = outside.rank_bytes(0, &recipe, self.choices.optimizer, 0)?.states()?;
        }
        Ok(costs)
    }

    /// Bytes that an update adds. Ranks step fp32 copies by sums in fp32, which need no other; weights of 16 bits by gradients in their
    /// dtype.
    pub(super) fn update_bytes(&self) -> Result<u64, Error> {
        let recipe = self.choices.recipe;
        let Some(ranks) = &self.ranks else {
            return sizes::update_bytes(&self.model, &recipe, self.choices.optimizer, self.on_cpu);
        };
        if recipe.master.is_some() || recipe.parameters.storage_bits() >= recipe.state.storage_bits() {
            return Ok(0);
        }
        let (largest, all) = self.layout(ranks)?.0.stepped();
        let copies = sizes::update_copies(&recipe, self.choices.optimizer, self.on_cpu, (largest, all))?;
        sum("bytes of the optimizer's step", [copies, recipe.parameters.bytes(all)?])
    }

    /// Returns the bytes of a peak that are there only while an earlier reduction is still under way: those of
    /// [`Layout::overlapping_bytes`], and in stage 2 the copy of a bucket where the last one follows late.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn overlapping_bytes(&self) -> Result<u64, Error> {
        let Some(ranks) = &self.ranks else { return Ok(0) };
        let layout = self.layout(ranks)?.0;
        let bytes = |region: &Region| region.gradients.map_or(Ok(0), |dtype| dtype.bytes(region.elements));
        let copies = layout.regions.iter().map(bytes).collect::<Result<Vec<_>, _>>()?;
        let copy = if ranks.stage == ZeroStage::Two { copies.into_iter().max().unwrap_or(0) } else { 0 };
        sum("bytes of reductions", [layout.overlapping_bytes()?, copy])
    }

    /// The bytes of the slots for gathered layers.
    pub(super) fn slots(&self) -> Result<u64, Error> {
        let Some(ranks) = &self.ranks else { return Ok(0) };
        let (layout, recipe) = self.layout(ranks)?;
        Ok(layout.rank_bytes(0, &recipe, self.choices.optimizer, ranks.slots)?.slots)
    }

    /// The seconds in which a rank waits for others in a round of a step, and in its last one; `whole` are the costs of the whole model.
    ///
    /// Transfers run beside compute. But processes that share a CPU send with the cores that compute, so there they take turns.
    pub(super) fn waits(
        &self,
        whole: &StepCosts,
        placement: &Placement,
        pass: Batch,
    ) -> Result<[f64; 2], Error> {
        let Some(ranks) = &self.ranks else { return Ok([0.0; 2]) };
        // Each pass reads this rank's part of the layers.
        let own = whole.layers.iter().map(|layer| layer.slot_bytes as f64).sum::<f64>()
            / ranks.division().shard as f64;
        let reads = if ranks.keeps_files() { 2.0 * own / self.file_load } else { 0.0 };
        Ok(self.times(ranks, whole, placement, pass)?.map(|times| times.exposed() + reads))
    }

    /// The times of a round and of the last one.
    fn times(
        &self,
        ranks: &Ranks,
        whole: &StepCosts,
        placement: &Placement,
        pass: Batch,
    ) -> Result<[Step; 2], Error> {
        let layers = whole.layers.len() as u64;
        let hides = !self.on_cpu || ranks.ranks > ranks.network.node;
        let mean = |seconds: f64| if hides { seconds / layers.max(1) as f64 } else { 0.0 };
        let forward: f64 = whole.layers.iter().map(|layer| layer.forward_seconds).sum();
        let backward: f64 = whole.layers.iter().map(|layer| layer.backward_seconds).sum();
        let three = ranks.stage == ZeroStage::Three;
        let bytes = |of: fn(&crate::offload::Layer) -> u64| {
            whole.layers.iter().map(|layer| of(layer) as f64).sum::<f64>() / layers.max(1) as f64
        };
        let trained = |bytes: u64| if whole.fixed.trainable > 0 { bytes as f64 } else { 0.0 };
        let last = Work {
            layers,
            forward: mean(forward),
            // The costs of a layer include the forward of one that runs again.
            backward: mean(backward - forward),
            outside: if hides { whole.fixed.seconds } else { 0.0 },
            optimizer: 0.0,
            weights: if three {
                bytes(|layer| layer.slot_bytes)
            } else {
                bytes(|layer| layer.trainable_bytes)
            },
            gradients: bytes(|layer| layer.gradient_bytes),
            outside_weights: trained(whole.fixed.weight_bytes),
            outside_gradients: whole.fixed.gradient_bytes as f64,
            exchange: self.exchange(placement, pass)?,
        };
        // Only the last round is followed by an update.
        let weights = if three { last.weights } else { 0.0 };
        let between = Work { weights, outside_weights: 0.0, ..last };
        Ok([between, last].map(|work| step(&work, ranks.division(), &ranks.network)))
    }

    fn exchange(&self, placement: &Placement, pass: Batch) -> Result<Exchange, Error> {
        let ranks = self.choices.sequence_ranks;
        let bytes =
            sequence_parallel::sent_bytes(&self.model, pass.work, self.choices.recipe.compute, ranks)?;
        let again = match placement {
            Placement::Resident(plan) => {
                let runs_again = |kept: &&LayerPlan| {
                    matches!(
                        kept,
                        LayerPlan::RecomputeAll | LayerPlan::RecomputeAttention | LayerPlan::Offload
                    )
                };
                plan.iter().filter(runs_again).count() as f64 / plan.len().max(1) as f64
            }
            Placement::Offloaded { .. } => 1.0,
        };
        Ok(Exchange { ranks, bytes: bytes as f64, passes: 2.0 + again })
    }
}
