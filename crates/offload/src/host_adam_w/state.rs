//! What the host remembers of each layer, and the step of one.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use runtime::device::{self, Event};
use runtime::fused::adam::{AdamStep, AdamTensors, adam};
use runtime::precision::identity;
use tch::{Device, Kind, Tensor};
use training::optimizer::{AdamW, StepSettings};

use crate::engine::{Arriving, Engine, Gradients, Sink};
use crate::error::{Error, Result};

/// Layers whose steps may wait for the host's thread, each with its gradients.
const WAITING: usize = 2;

pub(super) struct Shared {
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    pub(super) rule: AdamW,
    /// Learning rate and weight decay of each group.
    pub(super) groups: Vec<(f64, f64)>,
    /// Of the step at hand.
    pub(super) settings: StepSettings,
    /// Of layers, in the order of the layers.
    pub(super) parameters: Vec<Parameter>,
    /// Where each is among the parameters, by the tensor that it is: a layer may be given others, and have it at another place then.
    pub(super) places: HashMap<usize, usize>,
    pub(super) layers: Vec<LayerState>,
    pub(super) master_weights: bool,
    pub(super) waiting: VecDeque<Arc<Event>>,
}

/// A layer within a step.
#[derive(Default)]
pub(super) struct LayerState {
    /// Whether gradients have come.
    pub(super) begun: bool,
    /// How often all forwards that were run had given their gradients: the micro-batches, or fewer where several forwards were before
    /// the first backward.
    pub(super) rounds: u64,
    pub(super) stepped: bool,
}

pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) tensor: Tensor,
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
    /// Whether other layers are still to come in this backward.
    pub(super) ahead: bool,
}

impl Sink for Shared {
    fn deliver(&self, engine: &Engine, layer: usize, gradients: Gradients) -> Result<()> {
        let mut state = self.state.lock();
        let Arrived { ours, others, name, outstanding, fresh } = state.sort(engine, layer, gradients)?;
        // What no group has is someone else's, and goes where it would go without this optimizer.
        if !others.is_empty() {
            engine.keep(layer, others)?;
        }
        let StepSettings { micro_batches, clip, .. } = state.settings;
        let of = &mut state.layers[layer];
        if of.stepped {
            let reason = format!(
                "gradients of `{name}` came after the layer's step, which was taken when all of its forwards had given theirs \
                 {micro_batches} time(s); say with `HostAdamW::begin` how many micro-batches a step has, before the first of them"
            );
            return Err(Error::config("optimizer", reason));
        }
        let first = !std::mem::replace(&mut of.begun, true);
        of.rounds += u64::from(outstanding == 0);
        let last = outstanding == 0 && of.rounds >= micro_batches;
        if first {
            engine.with_layers(|layers| layers[layer].settled = false);
        }
        if clip.is_some() || !last {
            return engine.keep(layer, ours);
        }
        of.stepped = true;
        let (lent, (gradients, arrived)) = if fresh {
            (true, engine.bring_home(layer, ours)?)
        } else {
            engine.keep(layer, ours)?;
            (false, state.kept(engine, layer)?)
        };
        // Gradients that wait are memory: backward goes no further ahead of the host than this.
        while state.waiting.len() >= WAITING {
            if let Some(oldest) = state.waiting.pop_front() {
                oldest.synchronize()?;
            }
        }
        state.step(engine, layer, Due { gradients, arrived, lent, factor: None, ahead: true })
    }
}

/// Gradients of a layer that have come.
struct Arrived {
    ours: Gradients,
    others: Gradients,
    name: String,
    /// Forwards of the layer that are still to give theirs.
    outstanding: usize,
    /// Whether there are no gradients of ours from before.
    fresh: bool,
}

impl State {
    fn sort(&self, engine: &Engine, layer: usize, gradients: Gradients) -> Result<Arrived> {
        engine.with_layers(|layers| {
            let of = &layers[layer];
            let (mut ours, mut others, mut fresh) = (Vec::new(), Vec::new(), true);
            for index in 0..of.tensors.len() {
                fresh = fresh && !(self.has(&of.tensors[index])? && of.has_gradient(index)?);
            }
            for (index, gradient) in gradients {
                let has = self.has(&of.tensors[index])?;
                if has { &mut ours } else { &mut others }.push((index, gradient));
            }
            let outstanding = of.outstanding.load(Ordering::Relaxed);
            Ok(Arrived { ours, others, name: of.name.clone(), outstanding, fresh })
        })
    }

    fn has(&self, tensor: &Tensor) -> Result<bool> {
        Ok(self.places.contains_key(&identity(tensor)?))
    }

    /// Takes the gradients of a layer that were kept at home, and says when they are there.
    pub(super) fn kept(&self, engine: &Engine, layer: usize) -> Result<Arriving> {
        engine.with_layers(|layers| {
            let of = &mut layers[layer];
            let mut gradients = Vec::new();
            for index in 0..of.tensors.len() {
                if self.has(&of.tensors[index])? {
                    gradients.extend(of.take_gradient(index)?.map(|gradient| (index, gradient)));
                }
            }
            Ok((gradients, of.arrived.clone()))
        })
    }

    /// Queues the step of a layer.
    pub(super) fn step(&mut self, engine: &Engine, layer: usize, due: Due) -> Result<()> {
        let Due { gradients, arrived, lent, factor, ahead } = due;
        let weights: Vec<Tensor> = engine.with_layers(|layers| {
            gradients.iter().map(|(index, _)| layers[layer].tensors[*index].shallow_clone()).collect()
        });
        let ahead = if ahead { gradients.iter().map(|(index, _)| *index).collect() } else { Vec::new() };
        let AdamW { beta1, beta2, eps } = self.rule;
        let mut work = Vec::new();
        for ((_, gradient), weight) in gradients.into_iter().zip(weights) {
            let Some(&place) = self.places.get(&identity(&weight)?) else { continue };
            let parameter = &mut self.parameters[place];
            let (lr, weight_decay) = self.groups[parameter.group];
            parameter.step += 1;
            let step = AdamStep {
                lr: lr * self.settings.factor,
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
            // The memory that the weight shows at its step, whatever it shows when that is done; and of a version of its own: the engine
            // knows of this change by the layer's generation, ahead of time, and the tensor's version tells it of those by others.
            work.push((step, gradient, weight.f_data()?, moments, master));
        }
        let used = lent.then(|| engine.rooms());
        let updated = engine.update(layer, &arrived, ahead, move || {
            let _no_grad = tch::no_grad_guard();
            for (step, gradient, weight, [m, v], master) in work {
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
