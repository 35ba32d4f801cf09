//! The bytes and seconds of a candidate.

use super::{Batch, Candidate, Job, Placement, Tier};
use crate::Error;
use crate::activation_plan::LayerPlan;
use crate::decoder_flops::Workload;
use crate::exact::{product, sum};
use crate::memory::Item;
use crate::offload::sizes::{self, Choices};
use crate::offload::{
    Footprint, Layer, Method, OptimizerPlace, Rates, Setup, SimulatedStep, Start, StepCosts, StreamKind,
    moments, simulate,
};

/// A rate at which an update takes no time, for passes without an update.
const NO_UPDATE: f64 = 1e30;

/// A pass as it is simulated.
struct SimulatedPass {
    costs: StepCosts,
    step: SimulatedStep,
    /// Bytes of gradients that are summed on the device.
    summed: u64,
    /// Bytes in host memory.
    host_bytes: u64,
}

impl Job {
    /// Returns whether gradients of several passes are summed before an update: then those of all parameters exist during each. Ranks
    /// add each pass's to sums of their own.
    pub fn is_accumulated(&self, rows: Option<u64>) -> bool {
        self.ranks.is_none() && self.passes(self.widest(), rows) > 1
    }

    /// The batch of the most positions.
    pub(crate) fn widest(&self) -> Batch {
        let positions = |batch: &&Batch| batch.work.batch.saturating_mul(batch.work.sequence);
        self.largest.iter().max_by_key(positions).copied().unwrap_or(self.mean)
    }

    /// The passes of a step of batches like `batch`, in one process.
    pub(super) fn passes(&self, batch: Batch, rows: Option<u64>) -> u64 {
        let split = rows.map_or(1, |rows| batch.work.batch.div_ceil(rows.max(1)));
        let all = self.accumulation.max(1).saturating_mul(split);
        self.ranks
            .as_ref()
            .map_or(all, |ranks| all.div_ceil(ranks.micro_batches(self.choices.sequence_ranks)))
    }

    /// The largest pass over parts of a batch of at most `rows` rows. All labels may be in one part.
    pub(super) fn pass(&self, batch: Batch, rows: Option<u64>) -> Batch {
        let Workload { batch: all, sequence } = batch.work;
        let rows = rows.map_or(all, |rows| rows.clamp(1, all));
        // The longest rows may be in one part, which has no more positions than the batch.
        let sequence = match batch.longest {
            Some(longest) if rows < all => {
                longest.max(sequence).min(all.saturating_mul(sequence).div_ceil(rows.max(1)))
            }
            _ => sequence,
        };
        let labelled = batch.labelled.map(|labels| labels.min(rows.saturating_mul(sequence)));
        Batch { work: Workload { batch: rows, sequence }, labelled, longest: batch.longest }
    }

    /// The costs of a pass, with its update.
    pub(super) fn costs(&self, pass: Batch) -> Result<StepCosts, Error> {
        let mut costs = match &self.lora {
            Some(lora) => sizes::adapters(&self.model, lora, pass.work, pass.labelled, &self.choices)?,
            None => sizes::training(&self.model, pass.work, &self.choices)?,
        };
        costs.working.update_bytes = match &self.lora {
            Some(lora) => sizes::update_bytes_of_adapters(&self.model, lora, self.choices.optimizer)?,
            None => self.update_bytes()?,
        };
        Ok(costs)
    }

    /// Makes updates a part of backward, in which gradients are freed.
    fn update_in_backward(&self, costs: &mut StepCosts) -> Result<(), Error> {
        let (model, recipe) = (&self.model, &self.choices.recipe);
        let head = match (model.tied, &self.lora) {
            (false, _) => 0,
            (true, Some(_)) => costs.fixed.head_gradient_bytes,
            (true, None) => {
                recipe.gradients.bytes(product("elements", &[model.vocabulary, model.hidden])?)?
            }
        };
        let copies = match self.lora {
            Some(_) => [0; 2],
            None => sizes::update_bytes_of_one(model, recipe, self.choices.optimizer, self.on_cpu)?,
        };
        costs.update_in_backward(copies, head)
    }

    /// The costs of a pass under `placement`, of the whole model.
    pub(super) fn costs_of(&self, placement: &Placement, pass: Batch) -> Result<StepCosts, Error> {
        let costs = self.costs(pass)?;
        let costs = match placement {
            Placement::Resident(plan) => {
                let mut costs = self.with_plan(costs, pass, plan)?;
                if self.in_backward {
                    self.update_in_backward(&mut costs)?;
                }
                costs
            }
            Placement::Offloaded { keep, inputs_on_host, .. } => {
                let mut costs = self.with_kept(costs, pass, keep)?;
                costs.working.inputs_on_host = *inputs_on_host;
                costs
            }
        };
        self.with_teacher(costs, pass)
    }

    /// Returns the costs of offloaded layers where those of `keep` keep their activations.
    fn with_kept(&self, mut costs: StepCosts, pass: Batch, keep: &[usize]) -> Result<StepCosts, Error> {
        if keep.is_empty() {
            return Ok(costs);
        }
        let plan = vec![LayerPlan::KeepAll; costs.layers.len()];
        let planned = self.with_plan(costs.clone(), pass, &plan)?;
        for (number, layer) in costs.layers.iter_mut().enumerate() {
            layer.kept = planned.layers[number].kept.filter(|_| keep.contains(&number));
        }
        Ok(costs)
    }

    fn rates_of(&self, placement: &Placement) -> Rates {
        match placement {
            _ if self.ranks.is_some_and(|ranks| ranks.keeps_files()) => {
                Rates { device_optimizer: self.file_optimizer, ..self.rates }
            }
            Placement::Offloaded { tier: Tier::File, .. } if self.lora.is_none() => {
                Rates { load: self.file_load, host_optimizer: self.file_optimizer, ..self.rates }
            }
            Placement::Offloaded { tier: Tier::File, .. } => Rates { load: self.file_load, ..self.rates },
            _ => self.rates,
        }
    }

    /// Predicts a step whose passes have at most `rows` rows.
    ///
    /// # Errors
    /// As [`simulate`]; a model whose activations are not modelled.
    pub fn evaluate(&self, placement: Placement, rows: Option<u64>) -> Result<Candidate, Error> {
        let mut worst: Option<(Footprint, usize, u64)> = None;
        for (number, batch) in self.largest.iter().enumerate() {
            let pass = self.simulated(&placement, rows, *batch)?;
            let peak = self.complete(pass.step.device.clone(), &pass)?;
            let peak = self.or_teacher(peak, self.pass(*batch, rows))?;
            if worst.as_ref().is_none_or(|(largest, ..)| peak.total > largest.total) {
                let of_teacher = match &self.teacher {
                    Some(teacher) => teacher.weights(*batch)?[1],
                    None => 0,
                };
                worst = Some((peak, number, if self.on_cpu { 0 } else { pass.host_bytes + of_teacher }));
            }
        }
        let (peak, batch, host_bytes) = worst.ok_or(Error::Zero { what: "the number of batches" })?;
        let seconds = self.seconds(&placement, rows)?;
        let evaluation = self.evaluation.map(|batch| self.evaluation(&placement, batch)).transpose()?;
        let evaluation_bytes = evaluation.map_or(0, |peak| peak.total);
        let ranks = self.ranks;
        Ok(Candidate { placement, rows, ranks, peak, batch, evaluation_bytes, host_bytes, seconds })
    }

    /// Returns the device's bytes at every moment of a step, in their order; the largest is [`Candidate::peak`].
    ///
    /// # Errors
    /// As [`Job::evaluate`].
    pub fn moments(&self, candidate: &Candidate) -> Result<Vec<Footprint>, Error> {
        let batch = self.largest.get(candidate.batch).copied().unwrap_or_else(|| self.widest());
        let pass = self.simulated(&candidate.placement, candidate.rows, batch)?;
        let footprints = moments(&pass.costs, &candidate.placement.setup(), &pass.step)?;
        footprints.into_iter().map(|footprint| self.complete(footprint, &pass)).collect()
    }

    /// Returns the tensors that a layer keeps from its forward to its backward in the pass with the peak, if it keeps everything.
    ///
    /// # Errors
    /// As [`Job::evaluate`].
    pub fn kept_tensors(&self, candidate: &Candidate) -> Result<Vec<Item>, Error> {
        let batch = self.largest.get(candidate.batch).copied().unwrap_or_else(|| self.widest());
        let work = self.pass(batch, candidate.rows).work;
        sizes::kept_tensors(&self.model, self.lora.as_ref(), work, &self.choices)
    }

    /// Predicts the peak of an evaluation between steps, on batches of this size: no gradient and no graph exist, the optimizer's
    /// state does.
    ///
    /// # Errors
    /// As [`Job::evaluate`].
    pub fn evaluation(&self, placement: &Placement, batch: Batch) -> Result<Footprint, Error> {
        const WHAT: &str = "bytes of an evaluation";
        let trained = self.divided(self.costs(batch)?)?;
        // The head without a gradient of its matrix, as over a frozen model.
        let frozen = self.lora.unwrap_or_default();
        let choices = Choices { mlp_tile: None, ..self.choices };
        let head =
            sizes::adapters(&self.model, &frozen, batch.work, batch.labelled, &choices)?.working.head_bytes;
        let mut costs = sizes::inference(&self.model, batch.work, &self.choices)?;
        costs.working.head_bytes = head;
        for (layer, trained) in costs.layers.iter_mut().zip(&trained.layers) {
            layer.slot_bytes = trained.slot_bytes;
        }
        costs.working.constant_bytes += self.slots()?;
        let costs = self.with_teacher(costs, batch)?;
        let setup = placement.setup();
        let mut peak = simulate(&costs, &self.rates_of(placement), &setup, Start::Warm)?.device;
        if matches!(placement, Placement::Resident(_)) {
            let state = trained.state_bytes()?;
            peak.parts.push(Item { name: "optimizer state", bytes: state });
            peak.total = sum(WHAT, [peak.total, state])?;
        }
        self.or_teacher(peak, batch)
    }

    /// Simulates a pass over `batch`, the last of a step.
    fn simulated(
        &self,
        placement: &Placement,
        rows: Option<u64>,
        batch: Batch,
    ) -> Result<SimulatedPass, Error> {
        let costs = self.divided(self.costs_of(placement, self.pass(batch, rows))?)?;
        let accumulated = self.is_accumulated(rows);
        let on_device = |layer: &usize| match placement {
            Placement::Resident(_) => true,
            Placement::Offloaded { resident, .. } => resident.contains(layer),
        };
        let (costs, summed) = if accumulated { with_sums(costs, &on_device)? } else { (costs, 0) };
        let step = simulate(&costs, &self.rates_of(placement), &placement.setup(), Start::Warm)?;
        let host_bytes = self.host_bytes(placement, &costs, step.host_bytes, accumulated)?;
        Ok(SimulatedPass { costs, step, summed, host_bytes })
    }

    /// Bytes in host memory, `simulated` of them by the simulation: without pages of files, which the system drops when memory is short,
    /// and with the gradients that wait for the norm of all, or are summed. Of resident layers on a GPU, the inputs that are kept on the host.
    fn host_bytes(
        &self,
        placement: &Placement,
        costs: &StepCosts,
        simulated: u64,
        accumulated: bool,
    ) -> Result<u64, Error> {
        const WHAT: &str = "bytes of a step";
        let (tier, resident) = match placement {
            Placement::Offloaded { tier, resident, .. } => (tier, resident),
            Placement::Resident(_) if self.on_cpu => return Ok(simulated),
            Placement::Resident(plan) => {
                let inputs = plan.iter().filter(|kept| **kept == LayerPlan::Offload).count() as u64;
                return sum(WHAT, [simulated, product(WHAT, &[inputs, costs.working.input_bytes])?]);
            }
        };
        let streamed = || {
            let layers = costs.layers.iter().enumerate();
            layers.filter(|(layer, _)| !resident.contains(layer)).map(|(_, layer)| layer)
        };
        let in_files = *tier == Tier::File;
        let all_in_files = in_files && self.lora.is_none();
        let files = match (in_files, all_in_files) {
            (_, true) => {
                let bytes = |layer: &Layer| sum(WHAT, [layer.slot_bytes, layer.state_bytes]);
                sum(WHAT, streamed().map(bytes).collect::<Result<Vec<_>, _>>()?)?
            }
            // The frozen weights.
            (true, false) => sum(WHAT, streamed().map(|layer| layer.slot_bytes - layer.trainable_bytes))?,
            (false, false) => 0,
        };
        let gradients = match costs.updates() && (accumulated || self.clips) && !all_in_files {
            true => sum(WHAT, streamed().map(|layer| layer.gradient_bytes))?,
            false => 0,
        };
        sum(WHAT, [simulated.saturating_sub(files), gradients])
    }

    /// A footprint with the summed gradients apart from the optimizer's state, and on a CPU with the bytes in host memory.
    fn complete(&self, mut footprint: Footprint, pass: &SimulatedPass) -> Result<Footprint, Error> {
        split_gradients(&mut footprint, pass.summed);
        if self.on_cpu && pass.host_bytes > 0 {
            footprint.parts.push(Item { name: "offloaded layers", bytes: pass.host_bytes });
            footprint.total = sum("bytes of a step", [footprint.total, pass.host_bytes])?;
        }
        Ok(footprint)
    }

    /// Seconds of a step of mean batches.
    fn seconds(&self, placement: &Placement, rows: Option<u64>) -> Result<f64, Error> {
        let (setup, rates) = (placement.setup(), self.rates_of(placement));
        let pass = self.pass(self.mean, rows);
        let whole = self.costs_of(placement, pass)?;
        let passes = self.passes(self.mean, rows);
        let [between, at_last] = self.waits(&whole, placement, pass)?;
        let further = match self.further_passes {
            0 => 0.0,
            passes => f64::from(passes) * self.forward_seconds(placement, pass)?,
        };
        let further = further + self.teacher.as_ref().map_or(Ok(0.0), |teacher| teacher.seconds(pass))?;
        let [between, at_last] = [between + further, at_last + further];
        let costs = self.divided(whole)?;
        let last = self.seconds_of(&simulate(&costs, &rates, &setup, Start::Warm)?) + at_last;
        if passes == 1 {
            return Ok(last);
        }
        let free = without_updates(rates);
        let pass = self.seconds_of(&simulate(&costs, &free, &setup, Start::Warm)?) + between;
        Ok((passes - 1) as f64 * pass + last)
    }
}

/// Rates at which updates take no time.
fn without_updates(rates: Rates) -> Rates {
    Rates { host_optimizer: NO_UPDATE, device_optimizer: NO_UPDATE, ..rates }
}

impl Job {
    /// Seconds of a forward without a graph, whose head computes the labelled positions alone.
    fn forward_seconds(&self, placement: &Placement, pass: Batch) -> Result<f64, Error> {
        let mut costs = sizes::inference(&self.model, pass.work, &self.choices)?;
        if let Some(labelled) = pass.labelled {
            costs.fixed.seconds *= labelled as f64 / pass.work.tokens()? as f64;
        }
        let rates = without_updates(self.rates_of(placement));
        Ok(self.seconds_of(&simulate(&costs, &rates, &placement.setup(), Start::Warm)?))
    }

    /// Seconds of a simulated step. On a CPU, transfers and updates take turns with products: nothing is hidden behind them.
    fn seconds_of(&self, step: &SimulatedStep) -> f64 {
        if !self.on_cpu {
            return step.seconds;
        }
        StreamKind::ALL.into_iter().map(|stream| step.busy(stream)).sum()
    }
}

impl Placement {
    fn setup(&self) -> Setup {
        match self {
            Self::Resident(_) => Setup {
                method: Method::Resident { recompute: false },
                resident: Vec::new(),
                optimizer: OptimizerPlace::Device,
            },
            Self::Offloaded { ring, resident, optimizer, .. } => Setup {
                method: Method::Overlap { ring: *ring },
                resident: resident.clone(),
                optimizer: *optimizer,
            },
        }
    }
}

/// The costs of a pass during which the sums of earlier passes' gradients exist, as bytes that are there all the time: of what is outside
/// of the layers, and of layers `on_device`. Returns their bytes, too.
fn with_sums(mut costs: StepCosts, on_device: &dyn Fn(&usize) -> bool) -> Result<(StepCosts, u64), Error> {
    let mut sums = vec![costs.fixed.gradient_bytes];
    for (_, layer) in costs.layers.iter_mut().enumerate().filter(|(number, _)| on_device(number)) {
        sums.push(layer.gradient_bytes);
        layer.state_bytes += layer.gradient_bytes;
        layer.gradient_bytes = 0;
    }
    let fixed = &mut costs.fixed;
    fixed.state_bytes += fixed.gradient_bytes;
    (fixed.gradient_bytes, fixed.head_gradient_bytes) = (0, 0);
    Ok((costs, sum("bytes of gradients", sums)?))
}

/// Separates the gradients of [`with_sums`] from the optimizer's state.
fn split_gradients(peak: &mut Footprint, gradients: u64) {
    if gradients == 0 {
        return;
    }
    if let Some(state) = peak.parts.iter_mut().find(|item| item.name == "optimizer state") {
        state.bytes -= gradients.min(state.bytes);
        peak.parts.push(Item { name: "gradients", bytes: gradients });
    }
}
