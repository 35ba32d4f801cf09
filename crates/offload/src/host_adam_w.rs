//! AdamW whose state lives on the host, and whose step runs while backward goes on.
//!
//! Per parameter the state is 8 bytes (m and v), and 4 more for the unrounded weight of a bf16 model; the step reads and writes all of
//! it once. On the device that is memory for nothing between steps. On the host it costs the way of the gradient down and of the
//! weight up, which a layer that is offloaded goes anyway:
//!
//! ```text
//! compute   … backward of layer 5 │ backward of layer 4 │ backward of layer 3 │ …
//! store                           │ ∂L/∂w of 5          │ ∂L/∂w of 4          │
//! host                                          │ AdamW of 5 │        │ AdamW of 4 │
//! ```
//!
//! A layer's gradient is consumed as soon as it has arrived, so that gradients of the whole model are never in memory at once. Two
//! things need all gradients before the first step, and keep them on the host until then: accumulation, until the last micro-batch,
//! and clipping, whose norm is that of all. Clipped, the layers step in the order of forward, and the next forward may begin
//! while the last ones are not done ([`HostOptions::overlap`]): a load waits for its layer's step.
//!
//! [`training::Trainer`] runs it as any [`Optimizer`]: `Optimizer::begin` says how many micro-batches the step has and whether its norm
//! is clipped, which decides what may be stepped within backward. A loop of its own calls that and [`HostAdamW::step`].
//!
//! A layer is stepped when all of its forwards have given their gradients, and that so often as there are micro-batches: a layer that is
//! used twice, or whose graph is retained, waits for the rest, at the latest for [`HostAdamW::step`]. From a layer's step to that call
//! the model is between two steps: no forward is run, and no gradient of such a layer taken.
//!
//! Weights, state and schedule are bit for bit those of [`training::optimizer::AdamW`] with the same groups. What [`Offload`] did not
//! take home (embeddings, norms, head, resident layers) is stepped by exactly that, where it lies.
//!
//! Sources: ZeRO-Offload (Ren et al., arXiv:2101.06840) for the host's state; LOMO (Lv et al., arXiv:2306.09782) for the step
//! within backward; AdamW (Loshchilov & Hutter, arXiv:1711.05101).

mod checkpoint;
mod optimizer;
mod state;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use runtime::precision::identity;
use tch::{Kind, Tensor};
use training::optimizer::{AdamW, DeviceOptimizer, Group, Optimizer, StepDecision, StepSettings, ZeroGrad};
use training::scaler::NoScaler;

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::offload::Offload;
use state::{Due, LayerState, Parameter, Shared, State};

/// How [`HostAdamW`] steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HostOptions {
    /// Lets a step return while the host still steps; the next forward waits layer by layer. Whoever reads weights in between
    /// calls [`Offload::synchronize`] first.
    pub overlap: bool,
    /// Keeps the unrounded weights of bf16 and fp16 layers, in fp32.
    pub master_weights: bool,
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stepped {
    /// The norm of all gradients before clipping, where it was asked for.
    pub norm: Option<f64>,
    /// Whether the step was left out, as the norm was not finite.
    pub skipped: bool,
}

/// AdamW on the host. See the [module](self).
///
/// ```
/// use models::module::{Input, LanguageModel, trainable};
/// use models::{Llama, LlamaConfig};
/// use offload::{HostAdamW, HostOptions, Offload, Options};
/// use tch::{Device, Kind, Tensor};
/// use training::optimizer::{AdamW, Group};
///
/// let config = LlamaConfig::qwen2(100, 32, 64, 4, 4);
/// let mut model = Llama::new(&config, (Kind::Float, Device::Cpu))?;
/// let offload = Offload::apply(&mut model, &Options::default())?;
/// let group = Group::new(trainable(&model), 1e-3);
/// let mut optimizer = HostAdamW::new(&offload, vec![group], AdamW::default(), HostOptions::default())?;
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
    /// All parameters, in the groups' order: that in which the norm sums them.
    parameters: Vec<Tensor>,
    /// What did not go home.
    rest: Option<DeviceOptimizer>,
    groups: Vec<Group>,
    rule: AdamW,
    options: HostOptions,
}

impl HostAdamW {
    /// AdamW over the parameters of `groups`, on the host for those in layers that `offload` took home. From here on the engine gives it
    /// their gradients: `.grad` stays empty, but where they have to be kept for accumulation or clipping. Parameters are known by their
    /// tensors, whatever layers are given besides them later.
    ///
    /// # Errors
    /// Another one that lives; a group with a rule of its own; layers in f64; what [`DeviceOptimizer::new`]
    /// refuses.
    pub fn new(offload: &Offload, groups: Vec<Group>, rule: AdamW, options: HostOptions) -> Result<Self> {
        let engine = offload.engine().clone();
        let mut places = HashMap::new();
        let count = engine.with_layers(|layers| -> Result<usize> {
            for (layer, of) in layers.iter().enumerate() {
                for (index, tensor) in of.tensors.iter().enumerate() {
                    places.insert(identity(tensor)?, (layer, index));
                }
            }
            Ok(layers.len())
        })?;
        let layers: Vec<LayerState> = (0..count).map(|_| LayerState::default()).collect();
        let mut of_layers = Vec::new();
        let (mut rates, mut rest, mut parameters) = (Vec::new(), Vec::new(), Vec::new());
        // The whole is checked as the ordinary optimizer checks it.
        DeviceOptimizer::new(rule, groups.iter().map(handles).collect())?;
        let all = groups.iter().map(handles).collect();
        for (number, group) in groups.into_iter().enumerate() {
            if group.rule.is_some() {
                let reason = format!(
                    "group `{}` has a rule of its own; expected one AdamW for all groups",
                    group.name
                );
                return Err(Error::config("optimizer", reason));
            }
            rates.push((group.lr, group.weight_decay));
            let mut outside = Vec::new();
            for (name, tensor) in &group.parameters {
                parameters.extend((!group.frozen).then(|| tensor.shallow_clone()));
                let Some(&(layer, index)) = places.get(&identity(tensor)?) else {
                    outside.push((name.clone(), tensor.shallow_clone()));
                    continue;
                };
                if tensor.kind() == Kind::Double {
                    let reason = format!(
                        "`{name}` is Double; the host's step computes in fp32. Take the ordinary optimizer"
                    );
                    return Err(Error::config("optimizer", reason));
                }
                if !group.frozen {
                    let parameter = Parameter {
                        name: name.clone(),
                        tensor: tensor.shallow_clone(),
                        group: number,
                        step: 0,
                        moments: None,
                        master: None,
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
            rest => rest,
        };
        of_layers.sort_by_key(|(place, _)| *place);
        let of_layers: Vec<Parameter> = of_layers.into_iter().map(|(_, parameter)| parameter).collect();
        let mut places = HashMap::new();
        for (place, parameter) in of_layers.iter().enumerate() {
            places.insert(identity(&parameter.tensor)?, place);
        }
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                rule,
                groups: rates,
                settings: StepSettings::default(),
                parameters: of_layers,
                places,
                layers,
                master_weights: options.master_weights,
                waiting: VecDeque::new(),
            }),
        });
        engine.set_sink(shared.clone())?;
        Ok(Self { engine, shared, parameters, rest, groups: all, rule, options })
    }

    /// Ends a step: what has not been stepped within backward is clipped and stepped now, and all gradients are gone.
    ///
    /// # Errors
    /// A failure on the host's thread, that of an earlier step with [`HostOptions::overlap`] included; those of libtorch.
    pub fn step(&mut self) -> Result<Stepped> {
        let decision = self.unscale_and_clip(&mut NoScaler)?;
        self.take_step(&decision)?;
        self.zero_grad(ZeroGrad::ToNone)?;
        let StepDecision::Host { norm, skip, .. } = decision else {
            return Err(Error::config("optimizer", "a step that was decided on a device"));
        };
        Ok(Stepped { norm, skipped: skip })
    }

    /// Steps, in the order of forward, every layer that still has gradients.
    fn step_layers(&mut self, factor: Option<f64>) -> Result<()> {
        let mut state = self.shared.state.lock();
        // These are all queued whatever is before them: nothing follows that would make more gradients.
        state.waiting.clear();
        for layer in 0..state.layers.len() {
            let (gradients, arrived) = state.kept(&self.engine, layer)?;
            if !gradients.is_empty() {
                let due = Due { gradients, arrived, lent: false, factor, ahead: false };
                state.step(&self.engine, layer, due)?;
            }
        }
        Ok(())
    }

    fn forget_gradients(&mut self) -> Result<()> {
        let state = self.shared.state.lock();
        (0..state.layers.len()).try_for_each(|layer| state.kept(&self.engine, layer).map(drop))
    }

    /// The model is between two steps no more: forwards may run.
    fn end(&mut self) {
        self.shared.state.lock().layers.iter_mut().for_each(|layer| *layer = LayerState::default());
        self.engine.with_layers(|layers| layers.iter_mut().for_each(|layer| layer.ahead.clear()));
    }

    /// Bytes of state on the host, and elsewhere.
    pub fn state_bytes(&self) -> StateBytes {
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        let state = self.shared.state.lock();
        let host = state
            .parameters
            .iter()
            .flat_map(|of| of.moments.iter().flatten().chain(&of.master))
            .map(bytes)
            .sum();
        StateBytes { host, device: self.rest.as_ref().map_or(0, DeviceOptimizer::state_bytes) }
    }
}

/// Where state lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateBytes {
    /// Of layers that are at home.
    pub host: u64,
    /// Of the rest, beside its parameters.
    pub device: u64,
}

impl Drop for HostAdamW {
    fn drop(&mut self) {
        // What fails now was, or will be, an error of the next use of the weights.
        let _ = self.engine.synchronize();
        self.engine.remove_sink();
    }
}

impl fmt::Debug for HostAdamW {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostAdamW").field("options", &self.options).finish_non_exhaustive()
    }
}

/// The same group on the same parameters.
fn handles(group: &Group) -> Group {
    let parameters = group.parameters.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    Group {
        name: group.name.clone(),
        weight_decay: group.weight_decay,
        frozen: group.frozen,
        ..Group::new(parameters, group.lr)
    }
}
