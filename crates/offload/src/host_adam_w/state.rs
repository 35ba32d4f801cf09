//! What the host remembers of each layer, and the step of one.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use runtime::autograd::set_grad;
use runtime::device::{self, Event};
use runtime::fused::adam::{AdamStep, AdamTensors, adam};
use tch::{Device, Kind, Tensor};
use training::optimizer::AdamW;

use crate::engine::{Arriving, Engine, Gradients, Sink};
use crate::error::Result;

/// Layers whose steps may wait for the host's thread, each with its gradients.
const WAITING: usize = 2;

pub(super) struct Shared {
    pub(super) clips: bool,
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    pub(super) rule: AdamW,
    /// Learning rate and weight decay of each group.
    pub(super) groups: Vec<(f64, f64)>,
    pub(super) factor: f64,
    pub(super) micro_batches: u64,
    pub(super) layers: Vec<LayerState>,
    pub(super) master_weights: bool,
    pub(super) waiting: VecDeque<Arc<Event>>,
}

#[derive(Default)]
pub(super) struct LayerState {
    /// By the number of its tensor.
    pub(super) parameters: BTreeMap<usize, Parameter>,
    /// Micro-batches of this step whose gradients have come.
    pub(super) delivered: u64,
}

pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) group: usize,
    pub(super) step: u64,
    pub(super) moments: Option<[Tensor; 2]>,
    pub(super) master: Option<Tensor>,
}

/// Gradients of a layer that are to be used.
pub(super) struct Due {
    pub(super) gradients: Gradients,
    /// When they are at home.
    pub(super) arrived: Vec<Arc<Event>>,
    /// Whether their memory is the engine's, for others after this.
    pub(super) lent: bool,
    /// What clipping multiplies them by.
    pub(super) factor: Option<f64>,
}

impl Sink for Shared {
    fn deliver(&self, engine: &Engine, layer: usize, gradients: Gradients) -> Result<()> {
        let mut state = self.state.lock();
        let of = &mut state.layers[layer];
        // What no group has is nobody's.
        let gradients: Gradients =
            gradients.into_iter().filter(|(index, _)| of.parameters.contains_key(index)).collect();
        of.delivered += 1;
        let (first, last) = (of.delivered == 1, of.delivered == state.micro_batches);
        if first {
            engine.with_layers(|layers| layers[layer].settled = false);
        }
        if self.clips || !last {
            return engine.keep(layer, gradients);
        }
        let (lent, (gradients, arrived)) = if first {
            (true, engine.bring_home(layer, gradients)?)
        } else {
            engine.keep(layer, gradients)?;
            (false, kept(engine, layer)?)
        };
        // Gradients that wait are memory: backward goes no further ahead of the host than this.
        while state.waiting.len() >= WAITING {
            if let Some(oldest) = state.waiting.pop_front() {
                oldest.synchronize()?;
            }
        }
        state.step(engine, layer, Due { gradients, arrived, lent, factor: None })
    }
}

impl State {
    /// Queues the step of a layer.
    pub(super) fn step(&mut self, engine: &Engine, layer: usize, due: Due) -> Result<()> {
        let Due { gradients, arrived, lent, factor } = due;
        let weights: Vec<Tensor> = engine.with_layers(|layers| {
            gradients.iter().map(|(index, _)| layers[layer].tensors[*index].shallow_clone()).collect()
        });
        let AdamW { beta1, beta2, eps } = self.rule;
        let mut work = Vec::new();
        for ((index, gradient), weight) in gradients.into_iter().zip(weights) {
            let Some(parameter) = self.layers[layer].parameters.get_mut(&index) else { continue };
            let (lr, weight_decay) = self.groups[parameter.group];
            parameter.step += 1;
            let step = AdamStep {
                lr: lr * self.factor,
                beta1,
                beta2,
                eps,
                weight_decay,
                decoupled: true,
                step: parameter.step,
                gradient_factor: factor,
            };
            let moments = parameter.moments(&weight)?;
            let master = parameter.master(&weight, self.master_weights)?;
            work.push((step, gradient, weight, moments, master));
        }
        let used = lent.then(|| engine.rooms());
        let updated = engine.update(layer, &arrived, move || {
            let _no_grad = tch::no_grad_guard();
            for (step, gradient, weight, [m, v], master) in work {
                // Of a version of its own: the engine knows of this change by the layer's generation, ahead of time, and the
                // tensor's version tells it of those by others.
                let weight = weight.f_data()?;
                let gradient = if gradient.is_contiguous() { gradient } else { gradient.f_contiguous()? };
                let rounds = weight.kind() != Kind::Float;
                let master = match master {
                    Some(master) => master,
                    None if rounds => weight.f_to_kind(Kind::Float)?,
                    None => weight.shallow_clone(),
                };
                let tensors = AdamTensors {
                    gradient: &gradient,
                    master: &master,
                    exp_avg: &m,
                    exp_avg_sq: &v,
                    weight: rounds.then_some(&weight),
                };
                adam(&tensors, &step)?;
                if let Some(used) = &used {
                    used(gradient);
                }
            }
            Ok(())
        })?;
        self.waiting.push_back(updated);
        Ok(())
    }
}

impl Parameter {
    fn moments(&mut self, weight: &Tensor) -> Result<[Tensor; 2]> {
        let moments = match &self.moments {
            Some(moments) => moments,
            None => {
                let zero = || -> Result<Tensor> {
                    let mut tensor = device::pinned_empty(&weight.size(), Kind::Float, Device::Cpu)?;
                    Ok(tensor.f_zero_()?)
                };
                self.moments.insert([zero()?, zero()?])
            }
        };
        Ok(moments.each_ref().map(Tensor::shallow_clone))
    }

    /// The unrounded weight, where one is kept. The weight itself is not being changed: its last step is done, or none was.
    fn master(&mut self, weight: &Tensor, keep: bool) -> Result<Option<Tensor>> {
        if self.master.is_none() && keep && weight.kind() != Kind::Float {
            let _no_grad = tch::no_grad_guard();
            let mut master = device::pinned_empty(&weight.size(), Kind::Float, Device::Cpu)?;
            master.f_copy_(weight)?;
            self.master = Some(master);
        }
        Ok(self.master.as_ref().map(Tensor::shallow_clone))
    }
}

/// Takes the gradients of a layer that were kept at home, and says when they are there.
pub(super) fn kept(engine: &Engine, layer: usize) -> Result<Arriving> {
    engine.with_layers(|layers| {
        let of = &mut layers[layer];
        let mut gradients = Vec::new();
        for (index, tensor) in of.tensors.iter().enumerate() {
            let gradient = tensor.f_grad()?;
            if gradient.defined() {
                set_grad(tensor, None)?;
                gradients.push((index, gradient));
            }
        }
        Ok((gradients, std::mem::take(&mut of.arrived)))
    })
}
