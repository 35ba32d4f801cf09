//! Simulates the schedule, event by event.

use super::setup::{Method, OptimizerPlace, Setup};
use super::step_costs::{Layer, Rates, StepCosts};
use super::timeline::{Operation, Span, StreamKind};

/// Runs `steps` steps. Returns the spans, and when each step ended; the first entry is the start.
pub(super) fn run(costs: &StepCosts, rates: &Rates, setup: &Setup, steps: usize) -> (Vec<Span>, Vec<f64>) {
    let mut run = Run::new(costs, rates, setup);
    let mut ends = vec![0.0];
    for _ in 0..steps {
        let end = run.step();
        ends.push(end);
    }
    (run.spans, ends)
}

/// A slot of the ring.
#[derive(Clone, Copy, Default)]
struct Slot {
    layer: Option<usize>,
    /// The time from which it can be overwritten.
    free: f64,
}

struct Run<'a> {
    costs: &'a StepCosts,
    rates: &'a Rates,
    setup: &'a Setup,
    /// Whether each layer stays on the device.
    resident: Vec<bool>,
    slots: Vec<Slot>,
    /// The time at which each stream is free.
    streams: [f64; 4],
    /// The time from which each layer's weights on the host are those of the next step.
    current: Vec<f64>,
    /// When the next layer's input is back on the device, if its copy has been started.
    arriving: Option<f64>,
    spans: Vec<Span>,
    /// The end of the previous step.
    begin: f64,
}

impl<'a> Run<'a> {
    fn new(costs: &'a StepCosts, rates: &'a Rates, setup: &'a Setup) -> Self {
        let count = costs.layers.len();
        let mut resident = vec![matches!(setup.method, Method::Resident { .. }); count];
        setup.resident.iter().for_each(|&layer| resident[layer] = true);
        let slots = match setup.method {
            Method::Resident { .. } => 0,
            Method::OneAtATime => 1,
            Method::Overlap { ring } => ring,
        };
        Self {
            costs,
            rates,
            setup,
            resident,
            slots: vec![Slot::default(); slots],
            streams: [0.0; 4],
            current: vec![0.0; count],
            arriving: None,
            spans: Vec::new(),
            begin: 0.0,
        }
    }

    /// Puts an operation on a stream, not before `ready`, and returns its end.
    fn put(
        &mut self,
        stream: StreamKind,
        operation: Operation,
        layer: Option<usize>,
        ready: f64,
        seconds: f64,
        bytes: u64,
    ) -> f64 {
        let fence = match self.setup.method {
            Method::OneAtATime => self.streams.iter().copied().fold(0.0, f64::max),
            _ => self.streams[stream as usize],
        };
        let start = fence.max(ready);
        let end = start + seconds;
        self.streams[stream as usize] = end;
        if seconds > 0.0 {
            self.spans.push(Span { stream, operation, layer, start, end, bytes });
        }
        end
    }

    /// Simulates one step and returns its end.
    fn step(&mut self) -> f64 {
        let count = self.costs.layers.len();
        for layer in 0..count {
            self.visit(layer, layer, false);
        }
        let fixed = self.costs.fixed;
        self.put(StreamKind::Compute, Operation::Head, None, self.begin, fixed.seconds, 0);
        if self.costs.training {
            for layer in (0..count).rev() {
                self.visit(2 * count - 1 - layer, layer, true);
            }
            self.finish();
        }
        // The next step adds its loads that run ahead.
        self.begin = self.streams.iter().copied().fold(self.begin, f64::max);
        self.begin
    }

    /// Computes one visit, after loading its layer if necessary.
    fn visit(&mut self, at: usize, layer: usize, backward: bool) {
        let cost = self.costs.layers[layer];
        let (slot, ready) = if self.resident[layer] {
            (None, self.current[layer])
        } else {
            let (slot, ready) = self.load(at, layer);
            (Some(slot), ready)
        };
        let (operation, seconds) = match (backward, self.setup.method) {
            (false, _) => (Operation::Forward, cost.forward_seconds),
            (true, method) if method.keeps(&cost) => {
                (Operation::Backward, (cost.backward_seconds - cost.forward_seconds).max(0.0))
            }
            (true, _) => (Operation::Backward, cost.backward_seconds),
        };
        let copies = self.keeps_input_on_host(layer);
        let ready = if backward && copies { ready.max(self.input_back(layer)) } else { ready };
        let start = self.streams[StreamKind::Compute as usize].max(ready).max(self.begin);
        let mut done = self.put(StreamKind::Compute, operation, Some(layer), start, seconds, 0);
        if !backward && copies {
            // The next layer's computation may reuse the memory.
            let copied = self.copy_input(layer, start);
            let compute = &mut self.streams[StreamKind::Compute as usize];
            *compute = compute.max(copied);
        }
        let mut stays = !matches!(self.setup.method, Method::OneAtATime);
        if backward && cost.trainable > 0 {
            match self.setup.optimizer {
                OptimizerPlace::Device => done = self.step_on_device(layer, &cost, done, slot.is_some()),
                // Resident layers are updated in place when the backward is done.
                OptimizerPlace::Host if self.resident[layer] => {}
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

    fn keeps_input_on_host(&self, layer: usize) -> bool {
        let StepCosts { training, working, layers, .. } = self.costs;
        *training && working.inputs_on_host && !self.setup.method.keeps(&layers[layer])
    }

    /// Returns when the input of a layer is back on the device, and starts the copy of that of the recomputed layer before it.
    fn input_back(&mut self, layer: usize) -> f64 {
        let now = self.streams[StreamKind::Compute as usize];
        let back = match self.arriving.take() {
            Some(back) => back,
            None => self.copy_input(layer, now),
        };
        let before = (0..layer).rev().find(|before| self.keeps_input_on_host(*before));
        self.arriving = before.map(|before| self.copy_input(before, now));
        back
    }

    /// Copies a layer's input to the host or back, and returns the end.
    fn copy_input(&mut self, layer: usize, ready: f64) -> f64 {
        let bytes = self.costs.working.input_bytes;
        let seconds = bytes as f64 / self.rates.store;
        self.put(StreamKind::Store, Operation::Inputs, Some(layer), ready, seconds, bytes)
    }

    /// Loads a layer if necessary; returns its slot and the time at which it is loaded.
    fn load(&mut self, at: usize, layer: usize) -> (usize, f64) {
        if let Some(slot) = self.slots.iter().position(|slot| slot.layer == Some(layer)) {
            return (slot, 0.0);
        }
        let free = self.slots.iter().map(|slot| slot.free).fold(f64::INFINITY, f64::min);
        let start = free.max(self.streams[StreamKind::Load as usize]).max(self.current[layer]);
        let mut victim = None;
        for (index, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.free <= start) {
            let distance = slot.layer.map_or(usize::MAX, |held| self.distance(at, held));
            if victim.is_none_or(|(_, farthest)| distance > farthest) {
                victim = Some((index, distance));
            }
        }
        let (slot, _) = victim.unwrap_or_default();
        let bytes = self.costs.layers[layer].slot_bytes;
        let seconds = bytes as f64 / self.rates.load;
        (slot, self.put(StreamKind::Load, Operation::Weights, Some(layer), start, seconds, bytes))
    }

    /// How many visits from `at` on until `layer` is needed, steps being the same over and over.
    fn distance(&self, at: usize, layer: usize) -> usize {
        let count = self.costs.layers.len();
        if !self.costs.training {
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
        let done = self.put(StreamKind::Compute, Operation::Step, Some(layer), done, seconds, 0);
        if !streamed {
            return done;
        }
        let bytes = cost.trainable_bytes;
        let seconds = bytes as f64 / self.rates.store;
        let stored = self.put(StreamKind::Store, Operation::Weights, Some(layer), done, seconds, bytes);
        self.current[layer] = stored;
        stored
    }

    /// Gradients are stored on the host, which runs the optimizer.
    fn step_on_host(&mut self, layer: usize, cost: &Layer, done: f64) {
        let seconds = cost.gradient_bytes as f64 / self.rates.store;
        let there = self.put(
            StreamKind::Store,
            Operation::Gradients,
            Some(layer),
            done,
            seconds,
            cost.gradient_bytes,
        );
        let seconds = cost.trainable as f64 / self.rates.host_optimizer;
        self.current[layer] = self.put(StreamKind::Host, Operation::Step, Some(layer), there, seconds, 0);
    }

    /// Steps the parameters that were not stepped layer by layer, on the device.
    fn finish(&mut self) {
        let at_once = |layer: usize| match (self.setup.optimizer, self.setup.method) {
            (OptimizerPlace::Device, Method::Resident { .. }) => true,
            (OptimizerPlace::Device, _) => false,
            (OptimizerPlace::Host, _) => self.resident[layer],
        };
        let layers = self.costs.layers.iter().enumerate().filter(|(layer, _)| at_once(*layer));
        let layers: f64 = layers.map(|(_, cost)| cost.trainable as f64).sum();
        let seconds = (self.costs.fixed.trainable as f64 + layers) / self.rates.device_optimizer;
        let done = self.streams[StreamKind::Compute as usize];
        self.put(StreamKind::Compute, Operation::Step, None, done, seconds, 0);
    }
}
