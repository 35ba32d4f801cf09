//! Search for the fastest candidate within a budget.

use std::cmp::Ordering;

use super::{Candidate, Job, Placement, Ranks, Tier};
use crate::Error;
use crate::activation_plan::LayerPlan;
use crate::memory::zero::ZeroStage;
use crate::offload::{AvailableMemory, MOST_PLANNED_SLOTS, OptimizerPlace, interleaved};

/// The share within which two predictions are a tie: then the simpler candidate is chosen, whose rows go through the model at once, because
/// fewer change the order of a sum, or whose layers are all on the device.
const TIE: f64 = 0.02;

/// Plans between the chosen one and the least, for [`Job::cheaper_plans`].
const LEVELS: u64 = 4;

/// The candidates that a search considers.
#[derive(Clone, Debug, PartialEq)]
pub struct Allowed {
    /// The activation plans of resident layers; `None` for no candidate whose layers are all resident.
    pub layers: Option<Layers>,
    /// How layers are offloaded; `None` for no candidate with offloaded layers.
    pub offloaded: Option<OffloadedLayers>,
    /// Whether a batch may go through the model in parts.
    pub splits: bool,
    /// Rows of a pass that were given; `None` for those of a batch, or fewer if [`Allowed::splits`].
    pub rows: Option<u64>,
    /// What ranks may divide; empty for the job's own stage.
    pub stages: Vec<ZeroStage>,
    /// Numbers of replicas among which the ranks may be divided; empty for the job's own.
    pub replicas: Vec<u64>,
    /// Whether what a rank owns of divided layers may be in files.
    pub shards_in_files: bool,
}

/// The activation plans of resident layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layers {
    /// Any activation plan.
    Any,
    /// This plan.
    Only(Vec<LayerPlan>),
}

/// How layers are offloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadedLayers {
    /// The storage.
    pub tiers: Vec<Tier>,
    /// The largest ring; with [`OffloadedLayers::resident`] the ring, unless only a smaller one fits.
    pub most_slots: usize,
    /// The resident layers; `None` for as many as fit.
    pub resident: Option<Vec<usize>>,
    /// The layers that keep their activations; `None` for as many as fit, or more resident layers where that is faster.
    pub keep: Option<Vec<usize>>,
    /// Whether the inputs of layers that run again are in host memory; `None` for the faster of both, on a CPU not.
    pub inputs_on_host: Option<bool>,
    /// The place of the optimizer's state of offloaded layers.
    pub optimizer: OptimizerPlace,
}

impl Default for Allowed {
    /// Everything, for frozen layers on a GPU.
    fn default() -> Self {
        Self {
            layers: Some(Layers::Any),
            offloaded: Some(OffloadedLayers {
                tiers: vec![Tier::Host, Tier::File],
                most_slots: MOST_PLANNED_SLOTS,
                resident: None,
                keep: None,
                inputs_on_host: None,
                optimizer: OptimizerPlace::Device,
            }),
            splits: true,
            rows: None,
            stages: Vec::new(),
            replicas: Vec::new(),
            shards_in_files: false,
        }
    }
}

/// The candidates of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchResult {
    /// By falling peak, without those that save no memory over a faster one. Of those with fewer rows, only the best.
    pub candidates: Vec<Candidate>,
    /// The number of the fastest that fits.
    pub chosen: Option<usize>,
    /// The budget.
    pub budget: AvailableMemory,
}

impl SearchResult {
    /// Returns the fastest candidate that fits.
    pub fn chosen(&self) -> Option<&Candidate> {
        self.chosen.map(|number| &self.candidates[number])
    }

    /// Returns the candidate with the smallest peak.
    pub fn least(&self) -> Option<&Candidate> {
        self.candidates.last()
    }

    /// Returns whether a candidate fits.
    pub fn fits(&self, candidate: &Candidate) -> bool {
        fits(candidate, self.budget)
    }

    /// Returns the candidate of the smallest budget that is faster than the chosen one.
    pub fn faster(&self) -> Option<&Candidate> {
        let chosen = self.chosen()?;
        let faster = self.candidates.iter().filter(|one| one.seconds < chosen.seconds * (1.0 - TIE));
        let in_host = faster.filter(|one| fits_host(one, self.budget) && !self.fits(one));
        in_host.min_by_key(|one| one.device_bytes())
    }

    /// Returns the fastest candidate that takes less than the chosen one.
    pub fn cheaper(&self) -> Option<&Candidate> {
        let chosen = self.chosen()?;
        let cheaper = self.candidates.iter().filter(|one| one.device_bytes() < chosen.device_bytes());
        cheaper.filter(|one| fits_host(one, self.budget)).min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }
}

impl Allowed {
    /// What the ranks of a job may divide.
    fn divisions(&self, own: &Ranks) -> Vec<Ranks> {
        let stages = if self.stages.is_empty() { &[own.stage][..] } else { &self.stages };
        let replicas = if self.replicas.is_empty() { &[own.replicas][..] } else { &self.replicas };
        let mut all = Vec::new();
        for (&stage, &replicas) in stages.iter().flat_map(|stage| replicas.iter().map(move |of| (stage, of)))
        {
            let may_be = self.shards_in_files && stage == ZeroStage::Three && !own.in_files;
            let places = if may_be { &[false, true][..] } else { &[own.in_files] };
            all.extend(places.iter().map(|&in_files| Ranks { stage, replicas, in_files, ..*own }));
        }
        all
    }
}

fn fits(candidate: &Candidate, budget: AvailableMemory) -> bool {
    candidate.device_bytes() <= budget.device && fits_host(candidate, budget)
}

fn fits_host(candidate: &Candidate, budget: AvailableMemory) -> bool {
    budget.host.is_none_or(|host| candidate.host_bytes <= host)
}

/// Whether a candidate leaves no reason to show `other`, which changes as much or more, saves no memory beyond a tie, and takes more time.
fn replaces(candidate: &Candidate, other: &Candidate) -> bool {
    let is_as_simple = candidate.rows == other.rows || candidate.keeps_bits();
    let (bytes, others) = (candidate.device_bytes(), other.device_bytes());
    let saves_nothing =
        bytes as f64 <= others as f64 * (1.0 + TIE) && candidate.host_bytes <= other.host_bytes;
    let is_faster = match cost(candidate).total_cmp(&cost(other)) {
        Ordering::Less => true,
        Ordering::Equal => bytes < others,
        Ordering::Greater => false,
    };
    is_as_simple && saves_nothing && is_faster
}

/// Seconds, with the share of a tie for fewer rows, for offloaded layers, and for their inputs in host memory.
fn cost(candidate: &Candidate) -> f64 {
    let in_files = candidate.ranks.is_some_and(|ranks| ranks.keeps_files());
    let is_offloaded = in_files || matches!(candidate.placement, Placement::Offloaded { .. });
    let has_inputs_on_host = matches!(candidate.placement, Placement::Offloaded { inputs_on_host: true, .. });
    let changes = u8::from(!candidate.keeps_bits()) + u8::from(is_offloaded) + u8::from(has_inputs_on_host);
    candidate.seconds * (1.0 + TIE * f64::from(changes))
}

impl Job {
    /// Finds the fastest candidate that fits a budget.
    ///
    /// # Errors
    /// A model whose activations are not modelled; an activation plan of another length.
    pub fn search(&self, allowed: &Allowed, budget: AvailableMemory) -> Result<SearchResult, Error> {
        let all = match &self.ranks {
            Some(ranks) => {
                let mut all = Vec::new();
                for ranks in allowed.divisions(ranks) {
                    all.extend(Self { ranks: Some(ranks), ..self.clone() }.candidates(allowed, budget)?);
                }
                all
            }
            None => self.candidates(allowed, budget)?,
        };
        let best = (0..all.len()).filter(|&number| fits(&all[number], budget)).min_by(|&a, &b| {
            cost(&all[a]).total_cmp(&cost(&all[b])).then(all[a].device_bytes().cmp(&all[b].device_bytes()))
        });
        let least = (0..all.len()).min_by(|&a, &b| {
            let bytes = |number: usize| (all[number].device_bytes(), all[number].host_bytes);
            bytes(a).cmp(&bytes(b)).then(cost(&all[a]).total_cmp(&cost(&all[b])))
        });
        let chosen = best.map(|number| all[number].clone());
        let replaced: Vec<bool> =
            all.iter().map(|one| all.iter().any(|other| replaces(other, one))).collect();
        let mut shown: Vec<Candidate> = Vec::new();
        for (number, candidate) in all.into_iter().enumerate() {
            let is_least = Some(number) == least && (best.is_none() || !replaced[number]);
            let is_of_all_rows = candidate.rows == allowed.rows && !replaced[number];
            let is_shown = Some(number) == best || is_least || is_of_all_rows;
            if is_shown
                && !shown.iter().any(|one| {
                    one.placement == candidate.placement
                        && (one.rows, one.ranks) == (candidate.rows, candidate.ranks)
                })
            {
                shown.push(candidate);
            }
        }
        shown.sort_by_key(|candidate| std::cmp::Reverse((candidate.device_bytes(), candidate.peak.total)));
        let chosen = chosen.and_then(|chosen| shown.iter().position(|one| *one == chosen));
        Ok(SearchResult { candidates: shown, chosen, budget })
    }

    /// All candidates of the job's own stage.
    fn candidates(&self, allowed: &Allowed, budget: AvailableMemory) -> Result<Vec<Candidate>, Error> {
        let mut all: Vec<Candidate> = Vec::new();
        for rows in self.row_counts(allowed) {
            match &allowed.layers {
                None => {}
                Some(Layers::Only(plan)) => all.push(self.evaluate(Placement::Resident(plan.clone()), rows)?),
                Some(Layers::Any) => all.extend(self.resident(rows, budget)?),
            }
            if let Some(offloaded) = &allowed.offloaded {
                // Memory of a CPU's host is the device's.
                let both: &[bool] = if self.on_cpu { &[false] } else { &[false, true] };
                let places = offloaded.inputs_on_host.as_ref().map_or(both, std::slice::from_ref);
                for &tier in &offloaded.tiers {
                    for &inputs_on_host in places {
                        all.extend(self.offloaded(offloaded, (tier, inputs_on_host), rows, budget)?);
                    }
                }
            }
        }
        Ok(all)
    }

    /// Returns the smallest candidate of each kind that is allowed, with the fewest rows: with all layers resident, with and without copies in
    /// host memory, and with as few as can be in each tier.
    pub(crate) fn smallest(&self, allowed: &Allowed) -> Result<Vec<Candidate>, Error> {
        let rows = self.row_counts(allowed).pop().flatten();
        let mut all = Vec::new();
        match &allowed.layers {
            None => {}
            Some(Layers::Only(plan)) => all.push(self.evaluate(Placement::Resident(plan.clone()), rows)?),
            Some(Layers::Any) => {
                all.push(self.least_held(self.kept_options(), rows)?);
                all.push(self.least_held(&self.options_on_device(), rows)?);
            }
        }
        if let Some(OffloadedLayers { tiers, resident, keep, inputs_on_host, optimizer, .. }) =
            &allowed.offloaded
        {
            for &tier in tiers {
                let placement = Placement::Offloaded {
                    tier,
                    ring: 1,
                    resident: resident.clone().unwrap_or_default(),
                    keep: keep.clone().unwrap_or_default(),
                    inputs_on_host: inputs_on_host.unwrap_or(!self.on_cpu),
                    optimizer: *optimizer,
                };
                all.push(self.evaluate(placement, rows)?);
            }
        }
        Ok(all)
    }

    /// Returns the activation plans with the rows of `chosen` that take less and less memory, the fastest first, for a training whose memory is
    /// less than was planned for. No gradient's bit depends on which of them computes it.
    ///
    /// # Errors
    /// As [`Job::search`].
    pub fn cheaper_plans(&self, chosen: &Candidate) -> Result<Vec<Candidate>, Error> {
        let options = self.kept_options();
        let least = self.least_held(options, chosen.rows)?;
        let mut plans: Vec<Candidate> = Vec::new();
        let range = chosen.peak.total.saturating_sub(least.peak.total);
        for level in (1..LEVELS).rev() {
            let budget = least.peak.total + range / LEVELS * level;
            plans.extend(self.least_recomputed(options, chosen.rows, budget)?);
        }
        plans.push(least);
        let mut below = chosen.peak.total;
        plans.retain(|plan| {
            let is_less = plan.peak.total < below;
            below = below.min(plan.peak.total);
            is_less
        });
        Ok(plans)
    }

    /// Rows of a pass: those of a batch, then half of them, a quarter, …, one.
    fn row_counts(&self, allowed: &Allowed) -> Vec<Option<u64>> {
        let mut counts = vec![allowed.rows];
        if allowed.splits && allowed.rows.is_none() {
            let mut rows = self.widest().work.batch;
            while rows > 1 {
                rows = rows.div_ceil(2);
                counts.push(Some(rows));
            }
        }
        counts
    }

    /// Everything kept, the least recomputation that fits, and the fewest bytes; where these do not fit the host, the same without copies
    /// in its memory.
    fn resident(&self, rows: Option<u64>, budget: AvailableMemory) -> Result<Vec<Candidate>, Error> {
        let keeps =
            self.evaluate(Placement::Resident(vec![LayerPlan::KeepAll; self.model.layers as usize]), rows)?;
        let keeps_fit = fits(&keeps, budget);
        let mut candidates = vec![keeps];
        for options in [self.kept_options(), &self.options_on_device()] {
            let least = self.least_held(options, rows)?;
            if !keeps_fit && least.peak.total <= budget.device {
                candidates.extend(self.least_recomputed(options, rows, budget.device)?);
            }
            candidates.push(least);
            if candidates.iter().all(|one| fits_host(one, budget)) {
                break;
            }
        }
        Ok(candidates)
    }

    /// The fastest that fits with layers in `tier` and inputs on the device or in host memory, and the one that takes the least.
    fn offloaded(
        &self,
        allowed: &OffloadedLayers,
        (tier, inputs_on_host): (Tier, bool),
        rows: Option<u64>,
        budget: AvailableMemory,
    ) -> Result<Vec<Candidate>, Error> {
        let layers = self.model.layers as usize;
        let candidate = |ring: usize, resident: Vec<usize>, keep: Vec<usize>| {
            let optimizer = allowed.optimizer;
            self.evaluate(
                Placement::Offloaded { tier, ring, resident, keep, inputs_on_host, optimizer },
                rows,
            )
        };
        // Backward frees the activations of the last layers first.
        let last = |count: usize| -> Vec<usize> { (layers - count..layers).collect() };
        // The layers that keep their activations: those that were given, or none and the most that fit.
        let keeps = |ring: usize, resident: &[usize]| match &allowed.keep {
            Some(keep) => Ok(vec![keep.clone()]),
            None => {
                let most = most(layers + 1, budget, |count| candidate(ring, resident.to_vec(), last(count)))?;
                let most = most.map_or(0, |(count, _)| count);
                Ok::<_, Error>(if most > 0 { vec![last(most), Vec::new()] } else { vec![Vec::new()] })
            }
        };
        if let Some(resident) = &allowed.resident {
            let streamed = layers.saturating_sub(resident.len()).max(1);
            // The ring that was given, or the largest that fits.
            let rings = (1..=allowed.most_slots.min(streamed)).rev();
            let mut all = Vec::new();
            for ring in rings {
                for keep in keeps(ring, resident)? {
                    all.push(candidate(ring, resident.clone(), keep)?);
                }
            }
            let best = all.iter().find(|one| fits(one, budget)).cloned();
            let least = all.last().filter(|least| best.as_ref() != Some(least)).cloned();
            return Ok(best.into_iter().chain(least).collect());
        }
        let mut all = Vec::new();
        for ring in 1..=allowed.most_slots.min(layers) {
            for keep in keeps(ring, &[])? {
                // The most resident layers that fit beside the ring. At least one layer is offloaded.
                let residents = layers + 1 - ring;
                let most =
                    most(residents, budget, |stay| candidate(ring, interleaved(layers, stay), keep.clone()))?;
                all.extend(most.map(|(_, candidate)| candidate));
            }
        }
        all.push(candidate(1, Vec::new(), allowed.keep.clone().unwrap_or_default())?);
        Ok(best_and_least(all, budget))
    }
}

/// Returns the largest of the numbers below `end` whose candidate fits the device, with that candidate. What is on the device is not on the
/// host, so it takes the least of the host's memory, too.
fn most(
    end: usize,
    budget: AvailableMemory,
    candidate: impl Fn(usize) -> Result<Candidate, Error>,
) -> Result<Option<(usize, Candidate)>, Error> {
    let (mut most, mut too_many, mut low) = (None, end, 0);
    while low < too_many {
        let middle = low + (too_many - low) / 2;
        let evaluated = candidate(middle)?;
        if evaluated.device_bytes() <= budget.device {
            (most, low) = (Some((middle, evaluated)), middle + 1);
        } else {
            too_many = middle;
        }
    }
    Ok(most)
}

fn best_and_least(all: Vec<Candidate>, budget: AvailableMemory) -> Vec<Candidate> {
    let fitting = all.iter().filter(|one| fits(one, budget));
    let best = fitting.min_by(|a, b| cost(a).total_cmp(&cost(b))).cloned();
    let least = all.iter().min_by_key(|one| one.device_bytes()).cloned();
    let least = least.filter(|least| best.as_ref() != Some(least));
    best.into_iter().chain(least).collect()
}
