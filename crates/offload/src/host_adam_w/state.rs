//! The optimizer state of each layer, and its update.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use kernels::adam::{AdamStep, AdamTensors, adam};
use kernels::stochastic_rounding::{self, Rounding, StepNumber, Stream};
use parking_lot::Mutex;
use runtime::device::Event;
use runtime::file_memory;
use runtime::precision::identity;
use tch::{Device, Kind, Tensor};
use training::clip::{self, Findings};
use training::optimizer::{AdamW, StepSettings, WeightVersion, follow_weight};

use crate::engine::{Engine, Transferred};
use crate::error::Result;
use crate::storage::{Gradients, Placement};

/// Maximum number of layers whose updates wait for the host thread, each with its gradients.
pub(super) const MAX_WAITING: usize = 2;

pub(super) struct Shared {
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    pub(super) rule: AdamW,
    /// Learning rate and weight decay of each group.
    pub(super) groups: Vec<(f64, f64)>,
    /// Settings of the current step.
    pub(super) settings: StepSettings,
    /// Parameters of offloaded layers, in the order of layers.
    pub(super) parameters: Vec<Parameter>,
    /// The index of each parameter, by its tensor's identity: a layer may be given other tensors, and have it at another index
    /// then.
    pub(super) indices: HashMap<usize, usize>,
    pub(super) layers: Vec<LayerState>,
    pub(super) master_weights: bool,
    pub(super) waiting: VecDeque<Arc<Event>>,
    /// Whether the current step has begun to update layers.
    pub(super) updating: bool,
}

/// The state of a layer within a step.
#[derive(Default)]
pub(super) struct LayerState {
    /// Whether gradients have arrived.
    pub(super) begun: bool,
    /// How often all forwards so far had delivered their gradients: the number of micro-batches, or less if several forwards
    /// ran before the first backward.
    pub(super) rounds: u64,
    pub(super) stepped: bool,
    /// Whether a tensor of the layer is another's too, so that its gradient is complete only after backward.
    pub(super) shares: bool,
}

pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) tensor: Tensor,
    pub(super) group: usize,
    /// The random numbers of its stochastic rounding.
    pub(super) stream: Option<Stream>,
    pub(super) step: u64,
    pub(super) moments: Option<[Tensor; 2]>,
    pub(super) master: Option<Tensor>,
    /// The weight as its last step leaves it; `None` where that is not known.
    pub(super) written: Option<WeightVersion>,
}

/// Gradients of a layer for its update.
pub(super) struct LayerGradients {
    pub(super) gradients: Gradients,
    /// When they are in host memory.
    pub(super) arrived: Vec<Arc<Event>>,
    /// Whether they are in buffers of the engine's pool.
    pub(super) pooled: bool,
    /// The clipping factor.
    pub(super) factor: Option<f64>,
    /// Whether the update runs before the backward has reached all layers.
    pub(super) is_early: bool,
    /// Whether a gradient that is not finite fails the update, before the layer is changed.
    pub(super) checked: bool,
}

impl State {
    pub(super) fn owns(&self, tensor: &Tensor) -> Result<bool> {
        Ok(self.indices.contains_key(&identity(tensor)?))
    }

    /// Takes the accumulated gradients of a layer, with the events that mark their arrival.
    pub(super) fn take_accumulated(&self, engine: &Engine, layer: usize) -> Result<Transferred> {
        engine.with_layers(|layers| {
            let layer = &mut layers[layer];
            let mut gradients = Vec::new();
            for index in 0..layer.tensors.len() {
                if self.owns(&layer.tensors[index])? {
                    gradients.extend(layer.take_gradient(index)?.map(|gradient| (index, gradient)));
                }
            }
            Ok((gradients, layer.arrived.clone()))
        })
    }

    /// Creates the state of every parameter that has a gradient, before the first of them is updated.
    pub(super) fn create(&mut self, engine: &Engine) -> Result<()> {
        for parameter in &mut self.parameters {
            let weight = parameter.tensor.shallow_clone();
            if weight.f_grad()?.defined() {
                drop(parameter.moments(&weight, engine.placement())?);
                parameter.master(&weight, engine.placement(), self.master_weights)?;
            }
        }
        Ok(())
    }

    /// Queues the update of a layer.
    pub(super) fn step(
        &mut self,
        engine: &Engine,
        layer: usize,
        gradients_of_layer: LayerGradients,
    ) -> Result<()> {
        let LayerGradients { gradients, arrived, pooled, factor, is_early, checked } = gradients_of_layer;
        let weights: Vec<Tensor> = engine.with_layers(|layers| {
            gradients.iter().map(|(index, _)| layers[layer].tensors[*index].shallow_clone()).collect()
        });
        let updated_early =
            if is_early { gradients.iter().map(|(index, _)| *index).collect() } else { Vec::new() };
        let AdamW { beta1, beta2, eps } = self.rule;
        let (mut work, mut names) = (Vec::new(), Vec::new());
        for ((in_layer, gradient), weight) in gradients.into_iter().zip(weights) {
            let Some(&index) = self.indices.get(&identity(&weight)?) else { continue };
            let parameter = &mut self.parameters[index];
            let (lr, weight_decay) = self.groups[parameter.group];
            let moments = parameter.moments(&weight, engine.placement())?;
            let master = parameter.master(&weight, engine.placement(), self.master_weights)?;
            self.updating = true;
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
            // The memory that the weight refers to at its step, whatever it refers to when the step runs; and with its own version,
            // because the weight's counts the change here: a graph that has saved the weight is refused before the step can run.
            work.push((step, gradient, weight.f_data()?, moments, master, parameter.stream));
            if checked {
                names.push(parameter.name.clone());
            }
            engine.with_layers(|layers| layers[layer].count_step(in_layer))?;
            parameter.written = Some(WeightVersion::of(&weight)?);
        }
        let used = pooled.then(|| engine.pool_return());
        let updated = engine.submit_update(layer, &arrived, updated_early, move || {
            let _no_grad = tch::no_grad_guard();
            let gradients = names.iter().map(String::as_str).zip(&work);
            let gradients = gradients.map(|(name, (_, gradient, ..))| (name, gradient.shallow_clone()));
            if let Some(name) = clip::first_non_finite(gradients)? {
                let findings = Findings { non_finite: true, ..Findings::default() };
                return Err(findings.error(Some(name)).into());
            }
            for (step, gradient, weight, [m, v], master, stream) in work {
                let in_use = [&gradient, &weight, &m, &v].into_iter().chain(&master);
                let in_use: Vec<Tensor> = in_use.map(Tensor::shallow_clone).collect();
                in_use.iter().try_for_each(file_memory::fetch)?;
                let gradient = if gradient.is_contiguous() { gradient } else { gradient.f_contiguous()? };
                let rounds = weight.kind() != Kind::Float;
                // A master copy is rounded to nearest: it keeps what the rounding drops.
                let stream = stream.filter(|_| rounds && master.is_none());
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
                    weight: (rounds && stream.is_none()).then_some(&weight),
                };
                adam(&tensors, &step)?;
                if let Some(stream) = stream {
                    let step = StepNumber::Host(step.step);
                    stochastic_rounding::round(&[Rounding {
                        source: &master,
                        target: &weight,
                        stream,
                        step,
                    }])?;
                }
                in_use.iter().try_for_each(file_memory::release)?;
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
    fn moments(&mut self, weight: &Tensor, placement: &Placement) -> Result<[Tensor; 2]> {
        let moments = match &self.moments {
            Some(moments) => moments,
            None => {
                let zero = || state_of(weight, placement);
                self.moments.insert([zero()?, zero()?])
            }
        };
        Ok(moments.each_ref().map(Tensor::shallow_clone))
    }

    /// Returns the fp32 weight, if one is kept, which follows what others have written since the last step. The weight itself is not
    /// being updated here: its last step is done.
    fn master(&mut self, weight: &Tensor, placement: &Placement, keep: bool) -> Result<Option<Tensor>> {
        if self.master.is_none() && keep && weight.kind() != Kind::Float {
            let _no_grad = tch::no_grad_guard();
            let mut master = state_of(weight, placement)?;
            master.f_copy_(weight)?;
            // All layers' are made before the first is updated: their pages would be resident together.
            [weight, &master].into_iter().try_for_each(file_memory::release)?;
            self.master = Some(master);
        } else if let Some(master) = &self.master {
            let version = WeightVersion::of(weight)?;
            if self.written != Some(version) {
                follow_weight(master, weight)?;
                file_memory::release(master)?;
                self.written = Some(version);
            }
        }
        Ok(self.master.as_ref().map(Tensor::shallow_clone))
    }
}

/// Returns fp32 zeros for a weight, in a file if the weight is; otherwise in the host's memory, which is not page-locked.
pub(super) fn state_of(weight: &Tensor, placement: &Placement) -> Result<Tensor> {
    let placement = Placement { pinned_for: Device::Cpu, ..placement.clone() };
    placement.zeros_beside(weight, &weight.size(), Kind::Float)
}
