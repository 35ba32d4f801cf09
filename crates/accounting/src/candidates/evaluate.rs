//! What a candidate takes.

use super::{Batch, Candidate, Job, Placement, Tier};
use crate::Error;
use crate::activation_plan::LayerPlan;
use crate::decoder_flops::Workload;
use crate::exact::sum;
use crate::memory::Item;
use crate::offload::sizes;
use crate::offload::{
    Footprint, Layer, Method, OptimizerPlace, Rates, Setup, SimulatedStep, Start, StepCosts, StreamKind,
    simulate,
};

/// A rate at which an update takes no time, for passes that none follows.
const NO_UPDATE: f64 = 1e30;

impl Job {
    /// Returns whether gradients of several passes are summed before an update: then those of all parameters exist during each.
    pub fn is_accumulated(&self, rows: Option<u64>) -> bool {
        self.passes(self.widest(), rows) > 1
    }

    /// The batch of the most positions.
    pub(super) fn widest(&self) -> Batch {
        let positions = |batch: &&Batch| batch.work.batch.saturating_mul(batch.work.sequence);
        self.largest.iter().max_by_key(positions).copied().unwrap_or(self.mean)
    }

    /// The passes of a step of batches like `batch`.
    fn passes(&self, batch: Batch, rows: Option<u64>) -> u64 {
        let split = rows.map_or(1, |rows| batch.work.batch.div_ceil(rows.max(1)));
        self.accumulation.max(1).saturating_mul(split)
    }

    /// The largest pass over parts of a batch of at most `rows` rows. All labels may be in one part.
    pub(super) fn pass(&self, batch: Batch, rows: Option<u64>) -> Batch {
        let Workload { batch: all, sequence } = batch.work;
        let work = Workload { batch: rows.map_or(all, |rows| rows.clamp(1, all)), sequence };
        let labelled = batch.labelled.map(|labels| labels.min(work.batch.saturating_mul(sequence)));
        Batch { work, labelled }
    }

    /// The costs of a pass, with its update.
    pub(super) fn costs(&self, pass: Batch) -> Result<StepCosts, Error> {
        let mut costs = match &self.lora {
            Some(lora) => sizes::adapters(&self.model, lora, pass.work, pass.labelled, &self.choices)?,
            None => sizes::training(&self.model, pass.work, &self.choices)?,
        };
        if self.lora.is_none() {
            costs.working.update_bytes = sizes::update_bytes(&self.model, &self.choices.recipe, self.on_cpu)?;
        }
        Ok(costs)
    }

    /// The costs of a pass under `placement`.
    fn costs_of(&self, placement: &Placement, pass: Batch) -> Result<StepCosts, Error> {
        let costs = self.costs(pass)?;
        match placement {
            Placement::Resident(plan) => self.with_plan(costs, pass, plan),
            Placement::Offloaded { keep, .. } => self.with_kept(costs, pass, keep),
        }
    }

    /// The costs of offloaded layers, some of which keep their activations.
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
    /// Those of [`simulate`]; a model whose activations are not modelled.
    pub fn evaluate(&self, placement: Placement, rows: Option<u64>) -> Result<Candidate, Error> {
        let setup = placement.setup();
        let rates = self.rates_of(&placement);
        let mut worst: Option<(Footprint, usize, u64)> = None;
        for (number, batch) in self.largest.iter().enumerate() {
            let costs = self.costs_of(&placement, self.pass(*batch, rows))?;
            let (peak, host) = self.peak(&placement, &setup, &rates, costs, self.is_accumulated(rows))?;
            if worst.as_ref().is_none_or(|(found, ..)| peak.total > found.total) {
                worst = Some((peak, number, host));
            }
        }
        let (peak, batch, host_bytes) = worst.ok_or(Error::Zero { what: "the number of batches" })?;
        let seconds = self.seconds(&placement, &setup, &rates, rows)?;
        let evaluation = self.evaluation.map(|batch| self.evaluation(&placement, batch)).transpose()?;
        let evaluation_bytes = evaluation.map_or(0, |peak| peak.total);
        Ok(Candidate { placement, rows, peak, batch, evaluation_bytes, host_bytes, seconds })
    }

    /// Predicts the peak of an evaluation between steps, on batches of this size: no gradient and no graph exist, the optimizer's
    /// state does.
    ///
    /// # Errors
    /// As [`Job::evaluate`].
    pub fn evaluation(&self, placement: &Placement, batch: Batch) -> Result<Footprint, Error> {
        const WHAT: &str = "bytes of an evaluation";
        let trained = self.costs(batch)?;
        // The head without a gradient of its matrix, as over a frozen model.
        let frozen = self.lora.unwrap_or_default();
        let head = sizes::adapters(&self.model, &frozen, batch.work, batch.labelled, &self.choices)?
            .working
            .head_bytes;
        let mut costs = sizes::inference(&self.model, batch.work, &self.choices)?;
        costs.working.head_bytes = head;
        for (layer, trained) in costs.layers.iter_mut().zip(&trained.layers) {
            layer.slot_bytes = trained.slot_bytes;
        }
        let setup = placement.setup();
        let mut peak = simulate(&costs, &self.rates_of(placement), &setup, Start::Warm)?.device;
        if matches!(placement, Placement::Resident(_)) {
            let state = trained.state_bytes()?;
            peak.parts.push(Item { name: "optimizer state", bytes: state });
            peak.total = sum(WHAT, [peak.total, state])?;
        }
        Ok(peak)
    }

    fn peak(
        &self,
        placement: &Placement,
        setup: &Setup,
        rates: &Rates,
        costs: StepCosts,
        accumulated: bool,
    ) -> Result<(Footprint, u64), Error> {
        const WHAT: &str = "bytes of a step";
        let on_device = |layer: &usize| match placement {
            Placement::Resident(_) => true,
            Placement::Offloaded { resident, .. } => resident.contains(layer),
        };
        let (costs, summed) = if accumulated { with_sums(costs, &on_device)? } else { (costs, 0) };
        let SimulatedStep { device: mut peak, mut host_bytes, .. } =
            simulate(&costs, rates, setup, Start::Warm)?;
        split_gradients(&mut peak, summed);
        if let Placement::Offloaded { tier, resident, .. } = placement {
            let streamed = costs.layers.iter().enumerate().filter(|(layer, _)| !resident.contains(layer));
            let in_files = *tier == Tier::File;
            let all_in_files = in_files && self.lora.is_none();
            if all_in_files {
                // All of them is pages of files, which the system writes and drops when memory is short.
                let of = |layer: &Layer| sum(WHAT, [layer.slot_bytes, layer.state_bytes]);
                let of_layers =
                    streamed.clone().map(|(_, layer)| of(layer)).collect::<Result<Vec<_>, _>>()?;
                host_bytes = host_bytes.saturating_sub(sum(WHAT, of_layers)?);
            } else if in_files {
                // The frozen weights are pages of files, which the system drops when memory is short.
                let frozen = streamed.clone().map(|(_, layer)| layer.slot_bytes - layer.trainable_bytes);
                host_bytes = host_bytes.saturating_sub(sum(WHAT, frozen)?);
            }
            if costs.updates() && (accumulated || self.clips) && !all_in_files {
                host_bytes =
                    sum(WHAT, [host_bytes, sum(WHAT, streamed.map(|(_, layer)| layer.gradient_bytes))?])?;
            }
        }
        if self.on_cpu && host_bytes > 0 {
            peak.parts.push(Item { name: "offloaded layers", bytes: host_bytes });
            peak.total = sum(WHAT, [peak.total, host_bytes])?;
            host_bytes = 0;
        }
        Ok((peak, host_bytes))
    }

    /// Seconds of a step of mean batches.
    fn seconds(
        &self,
        placement: &Placement,
        setup: &Setup,
        rates: &Rates,
        rows: Option<u64>,
    ) -> Result<f64, Error> {
        let costs = self.costs_of(placement, self.pass(self.mean, rows))?;
        let passes = self.passes(self.mean, rows);
        let last = self.seconds_of(&simulate(&costs, rates, setup, Start::Warm)?);
        if passes == 1 {
            return Ok(last);
        }
        let free = Rates { host_optimizer: NO_UPDATE, device_optimizer: NO_UPDATE, ..*rates };
        let pass = self.seconds_of(&simulate(&costs, &free, setup, Start::Warm)?);
        Ok((passes - 1) as f64 * pass + last)
    }
}

impl Job {
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
