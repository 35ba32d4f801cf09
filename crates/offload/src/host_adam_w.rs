//! AdamW with its state in host memory, whose step overlaps with backward.
//!
//! The state takes 8 bytes per parameter (m and v), and 4 more for the fp32 weight of a bf16 model; a step reads and writes all
//! of it once. On the device this memory is idle between steps. On the host it costs copying gradients to the host and weights
//! to the device, which offloaded layers do anyway:
//!
//! ```text
//! compute   … backward of layer 5 │ backward of layer 4 │ backward of layer 3 │ …
//! store                           │ ∂L/∂w of 5          │ ∂L/∂w of 4          │
//! host                                          │ AdamW of 5 │        │ AdamW of 4 │
//! ```
//!
//! A layer's gradient is consumed when it arrives, so the gradients of the whole model are never in memory at once. Three
//! features need all gradients before the first update, and keep them on the host until then: accumulation, until the last
//! micro-batch; clipping, whose norm covers all gradients; and [`NonFinite::Skip`], because a step can be skipped only as a whole.
//! Then layers are updated in the order of forward, and the next forward may start before the last ones are done
//! ([`HostAdamWConfig::overlap`]): a load waits for its layer's update. With [`NonFinite::Fail`] each layer's gradients are checked before
//! its update; a layer whose gradients are not finite keeps its weights, those of layers behind it are updated by then, and the error
//! says that the step cannot be undone. Layers that share a tensor are updated after backward, once.
//!
//! [`training::Trainer`] uses it as any [`Optimizer`]: `Optimizer::begin` announces the number of micro-batches, whether
//! gradients are clipped, and what is done if one is not finite, which decides what may be updated during backward. A custom loop
//! calls `begin` and [`HostAdamW::step`]; without `begin` a step has one micro-batch, no clipping, and [`NonFinite::Fail`].
//!
//! A layer is updated when all of its forwards have delivered their gradients, as many times as there are micro-batches. A
//! layer that is used twice, or whose graph is retained, waits for the rest, at the latest for [`HostAdamW::step`]. Between a
//! layer's update and that call the model is inconsistent: forwards are refused, and so are gradients of that layer.
//!
//! Weights, state and schedule equal those of [`training::optimizer::AdamW`] with the same groups, bit for bit. Parameters that
//! [`Offload`] did not offload (embeddings, norms, head, resident layers) are updated by that optimizer, on their device.
//!
//! Sources: ZeRO-Offload (Ren et al., arXiv:2101.06840) for optimizer state on the host; LOMO (Lv et al., arXiv:2306.09782) for
//! updates during backward; AdamW (Loshchilov & Hutter, arXiv:1711.05101).

mod accept;
mod checkpoint;
mod optimizer;
mod state;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use kernels::stochastic_rounding::Stream;
use parking_lot::Mutex;
use runtime::precision::identity;
use tch::{Kind, Tensor};
use training::clip::NonFinite;
use training::optimizer::{AdamW, DeviceOptimizer, Group, Optimizer, StepDecision, StepSettings, ZeroGrad};
use training::scaler::NoScaler;

use crate::engine::Engine;
use crate::error::{Result, refused};
use crate::offload::Offload;
use state::{LayerGradients, LayerState, Parameter, Shared, State};

/// Options of [`HostAdamW`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HostAdamWConfig {
    /// Whether a step may return before the host has finished it; the next forward waits layer by layer. Call
    /// [`Offload::synchronize`] before reading weights in between.
    pub overlap: bool,
    /// Whether to keep fp32 weights of bf16 and fp16 layers.
    pub master_weights: bool,
    /// The seed of stochastic rounding, for bf16 and fp16 weights without fp32 copies: see
    /// [`DeviceOptimizer::with_stochastic_rounding`].
    pub stochastic_rounding: Option<u64>,
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stepped {
    /// The gradient norm before clipping, if computed.
    pub norm: Option<f64>,
    /// Whether the step was skipped because the norm is not finite.
    pub skipped: bool,
}

/// AdamW on the host. See the [module](self).
///
/// ```
/// use models::module::{Input, LanguageModel, trainable};
/// use models::{Llama, DecoderConfig};
/// use offload::{HostAdamW, HostAdamWConfig, Offload, OffloadConfig};
/// use tch::{Device, Kind, Tensor};
/// use training::optimizer::{AdamW, Group};
///
/// let config = DecoderConfig::qwen2(100, 32, 64, 4, 4);
/// let mut model = Llama::new(&config, (Kind::Float, Device::Cpu))?;
/// let offload = OffloadConfig::default().install(&mut model)?;
/// let group = Group::new(trainable(&model), 1e-3);
/// let mut optimizer = HostAdamW::new(&offload, vec![group], AdamW::default(), HostAdamWConfig::default())?;
///
/// let tokens = Tensor::from_slice(&[3i64, 1, 4, 1]).view([1, 4]);
/// for _ in 0..3 {
///     let loss = model.loss(&Input::new(&tokens), &tokens)?.sum;
///     runtime::autograd::backward(&[&loss])?;
///     optimizer.step()?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct HostAdamW {
    engine: Engine,
    shared: Arc<Shared>,
    /// All parameters, with their names, in the groups' order, in which the norm sums them.
    parameters: Vec<(String, Tensor)>,
    /// The optimizer of parameters that are not offloaded.
    rest: Option<DeviceOptimizer>,
    groups: Vec<Group>,
    rule: AdamW,
    options: HostAdamWConfig,
    /// The loss of the step, if it is watched.
    loss: Option<Tensor>,
}

impl HostAdamW {
    /// Creates an AdamW over the parameters of `groups`, on the host for those in layers of `offload`. From now on it consumes
    /// their gradients: `.grad` stays empty, except during accumulation or clipping. Parameters are identified by their
    /// tensors, so layers may be given further tensors later.
    ///
    /// # Errors
    /// Another `HostAdamW` for the same layers; a group with its own rule; layers in f64; fp32 copies and stochastic rounding together;
    /// the errors of [`DeviceOptimizer::new`].
    pub fn new(offload: &Offload, groups: Vec<Group>, rule: AdamW, options: HostAdamWConfig) -> Result<Self> {
        let engine = offload.engine().clone();
        if options.master_weights && options.stochastic_rounding.is_some() {
            let reason = "both `master_weights` and `stochastic_rounding` are given; a weight with an fp32 copy needs no random \
                          rounding, so give one of them";
            return Err(refused("optimizer", reason));
        }
        if engine.options().source.is_some() {
            let reason =
                "these layers are in shards, which their own optimizer steps; use it instead of `HostAdamW`";
            return Err(refused("optimizer", reason));
        }
        let mut indices = HashMap::new();
        let count = engine.with_layers(|layers| -> Result<usize> {
            for (layer, of) in layers.iter().enumerate() {
                for (index, tensor) in of.tensors.iter().enumerate() {
                    indices.insert(identity(tensor)?, (layer, index));
                }
            }
            Ok(layers.len())
        })?;
        let layers: Vec<LayerState> = (0..count).map(|_| LayerState::default()).collect();
        let mut of_layers = Vec::new();
        let (mut rates, mut rest, mut parameters) = (Vec::new(), Vec::new(), Vec::new());
        // Validated as the standard optimizer does.
        DeviceOptimizer::new(rule, groups.iter().map(handles).collect())?;
        let all = groups.iter().map(handles).collect();
        for (number, group) in groups.into_iter().enumerate() {
            if group.rule.is_some() {
                let reason =
                    format!("group `{}` has its own rule; expected one AdamW for all groups", group.name);
                return Err(refused("optimizer", reason));
            }
            rates.push((group.lr, group.weight_decay));
            let mut outside = Vec::new();
            for (name, tensor) in &group.parameters {
                parameters.extend((!group.frozen).then(|| (name.clone(), tensor.shallow_clone())));
                let Some(&(layer, index)) = indices.get(&identity(tensor)?) else {
                    outside.push((name.clone(), tensor.shallow_clone()));
                    continue;
                };
                if tensor.kind() == Kind::Double {
                    let reason =
                        format!("`{name}` is Double, but the host computes in fp32; use DeviceOptimizer");
                    return Err(refused("optimizer", reason));
                }
                if !group.frozen {
                    let parameter = Parameter {
                        name: name.clone(),
                        tensor: tensor.shallow_clone(),
                        group: number,
                        stream: options.stochastic_rounding.map(|seed| Stream::new(seed, name)),
                        step: 0,
                        moments: None,
                        master: None,
                        written: None,
                    };
                    of_layers.push(((layer, index), parameter));
                }
            }
            rest.push(Group { parameters: outside, ..group });
        }
        rest.retain(|group| !group.parameters.is_empty());
        let rest = if rest.is_empty() { None } else { Some(DeviceOptimizer::new(rule, rest)?) };
        let rest = match rest {
            Some(rest) if options.master_weights => Some(rest.with_master_weights()),
            Some(rest) => Some(match options.stochastic_rounding {
                Some(seed) => rest.with_stochastic_rounding(seed),
                None => rest,
            }),
            None => None,
        };
        of_layers.sort_by_key(|(index_of, _)| *index_of);
        let of_layers: Vec<Parameter> = of_layers.into_iter().map(|(_, parameter)| parameter).collect();
        let mut indices = HashMap::new();
        for (index_of, parameter) in of_layers.iter().enumerate() {
            indices.insert(identity(&parameter.tensor)?, index_of);
        }
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                rule,
                groups: rates,
                // Steps within backward until `begin` says otherwise.
                settings: StepSettings { non_finite: NonFinite::Fail, ..StepSettings::default() },
                parameters: of_layers,
                indices,
                layers,
                master_weights: options.master_weights,
                waiting: VecDeque::new(),
                updating: false,
            }),
        });
        engine.set_consumer(shared.clone())?;
        Ok(Self { engine, shared, parameters, rest, groups: all, rule, options, loss: None })
    }

    /// Ends a step: clips and updates what was not updated during backward, and clears all gradients.
    ///
    /// # Errors
    /// A failure on the host thread, also of an earlier step with [`HostAdamWConfig::overlap`]; those of libtorch.
    pub fn step(&mut self) -> Result<Stepped> {
        let decision = self.unscale_and_clip(&mut NoScaler)?;
        self.take_step(&decision)?;
        self.zero_grad(ZeroGrad::ToNone)?;
        let StepDecision::Host { norm, skip, .. } = decision else {
            return Err(refused(
                "optimizer",
                "the step was decided on the device; expected a decision on the host",
            ));
        };
        Ok(Stepped { norm, skipped: skip })
    }

    /// Updates, in the order of forward, every layer that still has gradients.
    fn step_layers(&mut self, factor: Option<f64>) -> Result<()> {
        let mut state = self.shared.state.lock();
        // Queued without waiting: no further gradients are computed meanwhile.
        state.waiting.clear();
        for layer in 0..state.layers.len() {
            let (gradients, arrived) = state.take_accumulated(&self.engine, layer)?;
            if !gradients.is_empty() {
                let gradients_of_layer = LayerGradients {
                    gradients,
                    arrived,
                    pooled: false,
                    factor,
                    is_early: false,
                    checked: false,
                };
                state.step(&self.engine, layer, gradients_of_layer)?;
            }
        }
        let has_shared = state.layers.iter().any(|layer| layer.shares);
        drop(state);
        // A load of a layer waits for that layer's update, not for one that has written a tensor of both.
        if has_shared { self.engine.synchronize() } else { Ok(()) }
    }

    fn forget_gradients(&mut self) -> Result<()> {
        let state = self.shared.state.lock();
        (0..state.layers.len()).try_for_each(|layer| state.take_accumulated(&self.engine, layer).map(drop))
    }

    /// Marks the model as consistent again: forwards may run.
    fn end(&mut self) {
        let mut state = self.shared.state.lock();
        state.layers.iter_mut().for_each(|layer| *layer = LayerState::default());
        state.updating = false;
        drop(state);
        self.engine.with_layers(|layers| layers.iter_mut().for_each(|layer| layer.updated_early.clear()));
    }

    /// Returns the bytes of state on the host and on the device.
    pub fn state_bytes(&self) -> StateBytes {
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        let state = self.shared.state.lock();
        let host = state
            .parameters
            .iter()
            .flat_map(|parameter| parameter.moments.iter().flatten().chain(&parameter.master))
            .map(bytes)
            .sum();
        StateBytes { host, device: self.rest.as_ref().map_or(0, DeviceOptimizer::state_bytes) }
    }
}

/// Bytes of optimizer state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateBytes {
    /// In host memory, for offloaded layers.
    pub host: u64,
    /// On the device, for other parameters.
    pub device: u64,
}

impl Drop for HostAdamW {
    fn drop(&mut self) {
        // A failure now is, or was, reported to the next use of the weights.
        let _ = self.engine.synchronize();
        self.engine.remove_consumer();
    }
}

impl fmt::Debug for HostAdamW {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostAdamW").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Copies a group, sharing its parameters.
fn handles(group: &Group) -> Group {
    let parameters = group.parameters.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    Group {
        name: group.name.clone(),
        weight_decay: group.weight_decay,
        frozen: group.frozen,
        ..Group::new(parameters, group.lr)
    }
}
