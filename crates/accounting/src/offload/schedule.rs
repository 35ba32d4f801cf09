//! The schedule, event by event.

use super::footprint::{Footprint, footprint, host_bytes};
use super::job::{Job, Layer, Rates};
use crate::{Error, exact};

/// How layers come to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// All layers are on the device. Gradients of all are there until an ordinary optimizer steps, unless its state is on the
    /// host.
    Resident {
        /// Whether each layer keeps its input only. Of no effect in inference.
        recompute: bool,
    },
    /// A layer is loaded, computed and released; nothing runs at the same time as anything else.
    OneAtATime,
    /// Loads run ahead of compute in a ring.
    Overlap {
        /// Slots of the ring, 1 to [`MOST_SLOTS`](super::MOST_SLOTS).
        ring: usize,
    },
}

/// Where master weights and optimizer state are, and so where the step runs, layer by layer as gradients come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerPlace {
    /// On the device: no gradient leaves, the changed weights of streamed layers do.
    Device,
    /// On the host: gradients leave, and the changed weights of what is resident come back.
    Host,
}

/// A method with its choices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    /// How layers come to the device.
    pub method: Method,
    /// Which layers stay there, rising from 0. Not read by [`Method::Resident`].
    pub resident: Vec<usize>,
    /// Where the optimizer is. Of no effect where nothing is trained.
    pub optimizer: OptimizerPlace,
}

/// Which step is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The first: no streamed layer is on the device.
    Cold,
    /// A later one, which finds what the one before has left.
    Warm,
}

/// What does one thing at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// The device's compute.
    Compute,
    /// Host or file to device.
    Load,
    /// Device to host.
    Store,
    /// The host's optimizer.
    Host,
}

impl Lane {
    /// All lanes, in the order in which a timeline shows them.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Load, Self::Store, Self::Host];

    /// `compute`, `load`, `store` or `host`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Load => "load",
            Self::Store => "store",
            Self::Host => "host",
        }
    }
}

/// What a lane does in a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// A layer's forward.
    Forward,
    /// Embedding, head and loss.
    Head,
    /// A layer's backward, with its recomputation.
    Backward,
    /// An optimizer's step.
    Step,
    /// Weights move: of a whole layer, or the changed ones.
    Weights,
    /// Gradients move.
    Gradients,
}

impl Work {
    /// A word for tables and timelines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Head => "head",
            Self::Backward => "backward",
            Self::Step => "step",
            Self::Weights => "weights",
            Self::Gradients => "gradients",
        }
    }
}

/// A lane at work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Which lane.
    pub lane: Lane,
    /// What it does.
    pub work: Work,
    /// For which layer; `None`: the fixed part, or all.
    pub layer: Option<usize>,
    /// Seconds from the start of the step; 0 at least, also where a load began before.
    pub start: f64,
    /// Seconds from the start of the step; its end at most.
    pub end: f64,
    /// Bytes moved, all of them in the step in which the transfer began.
    pub bytes: u64,
}

/// A step that was simulated.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// What ran when, lane by lane in the order of their start.
    pub spans: Vec<Span>,
    /// Seconds until all is done but for loads that run ahead of the next step.
    pub seconds: f64,
    /// Seconds of them in which compute does nothing.
    pub idle_seconds: f64,
    /// Bytes moved to the device.
    pub load_bytes: u64,
    /// Bytes moved from the device.
    pub store_bytes: u64,
    /// The device's bytes at their peak.
    pub device: Footprint,
    /// Bytes on the host: of streamed layers, of the optimizer, of gradients that came and were not consumed.
    pub host_bytes: u64,
}

impl Step {
    /// Seconds in which `lane` works.
    pub fn busy(&self, lane: Lane) -> f64 {
        self.of(lane).map(|span| span.end - span.start).sum()
    }

    /// The share of the load lane's seconds that compute works too; 1 where nothing is loaded.
    pub fn overlap(&self) -> f64 {
        let loads = self.busy(Lane::Load);
        let together = |load: &Span| {
            let shared = |span: &Span| (span.end.min(load.end) - span.start.max(load.start)).max(0.0);
            self.of(Lane::Compute).map(shared).sum::<f64>()
        };
        if loads > 0.0 { self.of(Lane::Load).map(together).sum::<f64>() / loads } else { 1.0 }
    }

    fn of(&self, lane: Lane) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(move |span| span.lane == lane)
    }
}

/// Runs `job` by `setup`.
///
/// # Errors
/// No layers, rates or seconds out of range, a ring of no or too many slots, resident layers that do not exist, a resident
/// training without recomputation whose [`Working::kept`](super::Working::kept) is missing, bytes beyond 64 bits.
pub fn simulate(job: &Job, rates: &Rates, setup: &Setup, start: Start) -> Result<Step, Error> {
    job.check(rates, setup)?;
    // What a step leaves in the ring repeats from the third on.
    let wanted = match start {
        Start::Cold => 0,
        Start::Warm => 3,
    };
    let mut run = Run::new(job, rates, setup);
    let mut ends = vec![0.0];
    // One more, for the loads that run ahead.
    for _ in 0..wanted + 2 {
        let end = run.step();
        ends.push(end);
    }
    let (begin, end) = (ends[wanted], ends[wanted + 1]);
    let mut spans: Vec<Span> =
        run.spans.into_iter().filter(|span| span.end > begin && span.start < end).collect();
    let moved = |lane| {
        let began = spans.iter().filter(|span: &&Span| span.lane == lane && span.start >= begin);
        exact::sum("bytes moved", began.map(|span| span.bytes))
    };
    let (load_bytes, store_bytes) = (moved(Lane::Load)?, moved(Lane::Store)?);
    for span in &mut spans {
        if span.start < begin {
            span.bytes = 0;
        }
        (span.start, span.end) = (span.start.max(begin) - begin, span.end.min(end) - begin);
    }
    spans.sort_by(|a, b| a.lane.cmp(&b.lane).then(a.start.total_cmp(&b.start)));
    let mut step = Step {
        spans,
        seconds: end - begin,
        idle_seconds: 0.0,
        load_bytes,
        store_bytes,
        device: Footprint::default(),
        host_bytes: 0,
    };
    step.idle_seconds = (step.seconds - step.busy(Lane::Compute)).max(0.0);
    step.device = footprint(job, setup, &step.spans)?;
    step.host_bytes = host_bytes(job, setup, &step.spans)?;
    Ok(step)
}

/// A slot of the ring.
#[derive(Clone, Copy, Default)]
struct Slot {
    layer: Option<usize>,
    /// When another layer may be loaded into it.
    free: f64,
}

struct Run<'a> {
    job: &'a Job,
    rates: &'a Rates,
    setup: &'a Setup,
    /// Whether each layer stays on the device.
    resident: Vec<bool>,
    slots: Vec<Slot>,
    /// When each lane is free.
    lanes: [f64; 4],
    /// When each layer's weights on the host are those of the next step.
    current: Vec<f64>,
    spans: Vec<Span>,
    /// When the step before was done.
    begin: f64,
}

impl<'a> Run<'a> {
    fn new(job: &'a Job, rates: &'a Rates, setup: &'a Setup) -> Self {
        let count = job.layers.len();
        let mut resident = vec![matches!(setup.method, Method::Resident { .. }); count];
        setup.resident.iter().for_each(|&layer| resident[layer] = true);
        let slots = match setup.method {
            Method::Resident { .. } => 0,
            Method::OneAtATime => 1,
            Method::Overlap { ring } => ring,
        };
        Self {
            job,
            rates,
            setup,
            resident,
            slots: vec![Slot::default(); slots],
            lanes: [0.0; 4],
            current: vec![0.0; count],
            spans: Vec::new(),
            begin: 0.0,
        }
    }

    /// Puts work on a lane, not before `ready`, and says when it is done.
    fn put(
        &mut self,
        lane: Lane,
        work: Work,
        layer: Option<usize>,
        ready: f64,
        seconds: f64,
        bytes: u64,
    ) -> f64 {
        let fence = match self.setup.method {
            Method::OneAtATime => self.lanes.iter().copied().fold(0.0, f64::max),
            _ => self.lanes[lane as usize],
        };
        let start = fence.max(ready);
        let end = start + seconds;
        self.lanes[lane as usize] = end;
        if seconds > 0.0 {
            self.spans.push(Span { lane, work, layer, start, end, bytes });
        }
        end
    }

    /// One step, and when it is done.
    fn step(&mut self) -> f64 {
        let count = self.job.layers.len();
        for layer in 0..count {
            self.visit(layer, layer, false);
        }
        let fixed = self.job.fixed;
        self.put(Lane::Compute, Work::Head, None, self.begin, fixed.seconds, 0);
        if self.job.training {
            for layer in (0..count).rev() {
                self.visit(2 * count - 1 - layer, layer, true);
            }
            self.finish();
        }
        // Loads that run ahead of the next step are put there by it.
        self.begin = self.lanes.iter().copied().fold(self.begin, f64::max);
        self.begin
    }

    /// Computes one visit, its layer loaded before where it is not there.
    fn visit(&mut self, at: usize, layer: usize, backward: bool) {
        let cost = self.job.layers[layer];
        let (slot, ready) = if self.resident[layer] {
            (None, self.current[layer])
        } else {
            let (slot, ready) = self.load(at, layer);
            (Some(slot), ready)
        };
        let (work, seconds) = match (backward, self.setup.method) {
            (false, _) => (Work::Forward, cost.forward_seconds),
            (true, Method::Resident { recompute: false }) => {
                (Work::Backward, (cost.backward_seconds - cost.forward_seconds).max(0.0))
            }
            (true, _) => (Work::Backward, cost.backward_seconds),
        };
        let mut done = self.put(Lane::Compute, work, Some(layer), ready.max(self.begin), seconds, 0);
        let mut stays = !matches!(self.setup.method, Method::OneAtATime);
        if backward && cost.trainable > 0 {
            match self.setup.optimizer {
                OptimizerPlace::Device => done = self.step_on_device(layer, &cost, done, slot.is_some()),
                OptimizerPlace::Host => {
                    self.step_on_host(layer, &cost, done);
                    stays = false;
                }
            }
        }
        if let Some(slot) = slot {
            self.slots[slot] = Slot { layer: stays.then_some(layer), free: done };
        }
    }

    /// The slot of a layer and when it is there.
    fn load(&mut self, at: usize, layer: usize) -> (usize, f64) {
        if let Some(slot) = self.slots.iter().position(|slot| slot.layer == Some(layer)) {
            return (slot, 0.0);
        }
        let free = self.slots.iter().map(|slot| slot.free).fold(f64::INFINITY, f64::min);
        let start = free.max(self.lanes[Lane::Load as usize]).max(self.current[layer]);
        let mut victim = None;
        for (place, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.free <= start) {
            let distance = slot.layer.map_or(usize::MAX, |held| self.distance(at, held));
            if victim.is_none_or(|(_, farthest)| distance > farthest) {
                victim = Some((place, distance));
            }
        }
        let (slot, _) = victim.unwrap_or_default();
        let bytes = self.job.layers[layer].slot_bytes;
        let seconds = bytes as f64 / self.rates.load;
        (slot, self.put(Lane::Load, Work::Weights, Some(layer), start, seconds, bytes))
    }

    /// How many visits from `at` on until `layer` is needed, steps being the same over and over.
    fn distance(&self, at: usize, layer: usize) -> usize {
        let count = self.job.layers.len();
        if !self.job.training {
            return (layer + count - at) % count;
        }
        let round = 2 * count;
        [layer, round - 1 - layer]
            .map(|place| (place + round - at) % round)
            .into_iter()
            .min()
            .unwrap_or(round)
    }

    /// The step of one layer on the device, and when its slot is free.
    fn step_on_device(&mut self, layer: usize, cost: &Layer, done: f64, streamed: bool) -> f64 {
        if matches!(self.setup.method, Method::Resident { .. }) {
            return done;
        }
        let seconds = cost.trainable as f64 / self.rates.device_optimizer;
        let done = self.put(Lane::Compute, Work::Step, Some(layer), done, seconds, 0);
        if !streamed {
            return done;
        }
        let bytes = cost.trainable_bytes;
        let seconds = bytes as f64 / self.rates.store;
        let stored = self.put(Lane::Store, Work::Weights, Some(layer), done, seconds, bytes);
        self.current[layer] = stored;
        stored
    }

    /// Gradients go to the host, which steps.
    fn step_on_host(&mut self, layer: usize, cost: &Layer, done: f64) {
        let seconds = cost.gradient_bytes as f64 / self.rates.store;
        let there = self.put(Lane::Store, Work::Gradients, Some(layer), done, seconds, cost.gradient_bytes);
        let seconds = cost.trainable as f64 / self.rates.host_optimizer;
        self.current[layer] = self.put(Lane::Host, Work::Step, Some(layer), there, seconds, 0);
    }

    /// The fixed part's step; what the host changed of resident weights comes back.
    fn finish(&mut self) {
        let fixed = self.job.fixed;
        let done = self.lanes[Lane::Compute as usize];
        match self.setup.optimizer {
            OptimizerPlace::Device => {
                let layers = match self.setup.method {
                    Method::Resident { .. } => {
                        self.job.layers.iter().map(|layer| layer.trainable as f64).sum()
                    }
                    _ => 0.0,
                };
                let seconds = (fixed.trainable as f64 + layers) / self.rates.device_optimizer;
                self.put(Lane::Compute, Work::Step, None, done, seconds, 0);
            }
            OptimizerPlace::Host => {
                for layer in (0..self.job.layers.len()).rev() {
                    if self.resident[layer] && self.job.layers[layer].trainable > 0 {
                        let bytes = self.job.layers[layer].trainable_bytes;
                        let seconds = bytes as f64 / self.rates.load;
                        self.put(Lane::Load, Work::Weights, Some(layer), self.current[layer], seconds, bytes);
                    }
                }
                if fixed.trainable > 0 {
                    let seconds = fixed.gradient_bytes as f64 / self.rates.store;
                    let there =
                        self.put(Lane::Store, Work::Gradients, None, done, seconds, fixed.gradient_bytes);
                    let seconds = fixed.trainable as f64 / self.rates.host_optimizer;
                    let stepped = self.put(Lane::Host, Work::Step, None, there, seconds, 0);
                    let seconds = fixed.trainable_bytes as f64 / self.rates.load;
                    self.put(Lane::Load, Work::Weights, None, stepped, seconds, fixed.trainable_bytes);
                }
            }
        }
    }
}
