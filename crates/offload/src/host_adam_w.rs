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
//! A layer is stepped when all of its forwards have given their gradients, and that so often as there are micro-batches: a layer that is
//! used twice, or whose graph is retained, waits for the rest, at the latest for [`HostAdamW::step`]. From a layer's step to that call
//! the model is between two steps: no forward is run, and no gradient of such a layer taken.
//!
//! //! Weights, state and schedule are bit for bit those of [`training::optimizer::AdamW`] with the same groups. What [`Offload`] did not
//! take home (embeddings, norms, head, resident layers) is stepped by exactly that, where it lies.
//!
//! Sources: ZeRO-Offload (Ren et al., arXiv:2101.06840) for the host's state; LOMO (Lv et al., arXiv:2306.09782) for the step
//! within backward; AdamW (Loshchilov & Hutter, arXiv:1711.05101).

mod state;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use runtime::device;
use runtime::precision::identity;
use tch::{Device, Kind, Tensor};
use training::clip;
use training::optimizer::{AdamW, Group, Optimizer, ZeroGrad};

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::offload::Offload;
use state::{Due, LayerState, Parameter, Shared, State};

/// How [`HostAdamW`] steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HostOptions {
    /// The norm of all gradients is clipped to this. A step whose norm is not finite is left out.
    pub clip: Option<f64>,
    /// Lets [`HostAdamW::step`] return while the host still steps; the next forward waits layer by layer. Whoever reads weights in between
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
    rest: Option<Optimizer>,
    options: HostOptions,
}

impl HostAdamW {
    /// AdamW over the parameters of `groups`, on the host for those in layers that `offload` took home. From here on the engine gives it
    /// their gradients: `.grad` stays empty, but where they have to be kept for accumulation or clipping. Parameters are known by their
    /// tensors, whatever layers are given besides them later.
    ///
    /// # Errors
    /// Another one that lives; a group with a rule of its own; layers in f64; what [`Optimizer::new`] refuses; a limit for clipping that is not positive.
    pub fn new(offload: &Offload, groups: Vec<Group>, rule: AdamW, options: HostOptions) -> Result<Self> {
        options.clip.map_or(Ok(()), clip::check)?;
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
        Optimizer::new(rule, groups.iter().map(handles).collect())?;
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
        let rest = if rest.is_empty() { None } else { Some(Optimizer::new(rule, rest)?) };
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
            clips: options.clip.is_some(),
            state: Mutex::new(State {
                rule,
                groups: rates,
                factor: 1.0,
                micro_batches: 1,
                parameters: of_layers,
                places,
                layers,
                master_weights: options.master_weights,
                waiting: VecDeque::new(),
            }),
        });
        engine.set_sink(shared.clone())?;
        Ok(Self { engine, shared, parameters, rest, options })
    }

    /// Says how many micro-batches the coming step has, before the first of them; 1 until it is said.
    ///
    /// # Errors
    /// 0; a step that has begun already.
    pub fn begin(&mut self, micro_batches: u64) -> Result<()> {
        let mut state = self.shared.state.lock();
        if micro_batches == 0 {
            return Err(Error::config("optimizer", "a step of 0 micro-batches; expected 1 or more"));
        }
        if state.layers.iter().any(|layer| layer.begun) {
            return Err(Error::config(
                "optimizer",
                "gradients of a step have come already; end it with `step` first",
            ));
        }
        state.micro_batches = micro_batches;
        Ok(())
    }

    /// What multiplies every group's learning rate from now on: a schedule's factor.
    ///
    /// # Errors
    /// A factor that is negative or not finite.
    pub fn set_factor(&mut self, factor: f64) -> Result<()> {
        if !(factor.is_finite() && factor >= 0.0) {
            let reason =
                format!("the learning rate's factor is {factor}; expected a finite number from 0 on");
            return Err(Error::config("optimizer", reason));
        }
        if let Some(rest) = &mut self.rest {
            rest.set_factor(factor)?;
        }
        self.shared.state.lock().factor = factor;
        Ok(())
    }

    /// The learning rate of each group's next step.
    pub fn learning_rates(&self) -> Vec<f64> {
        let state = self.shared.state.lock();
        state.groups.iter().map(|(lr, _)| lr * state.factor).collect()
    }

    /// Ends a step: what has not been stepped within backward is stepped now, and all gradients are gone.
    ///
    /// # Errors
    /// A failure on the host's thread, that of an earlier step with [`HostOptions::overlap`] included; those of libtorch.
    pub fn step(&mut self) -> Result<Stepped> {
        let mut stepped = Stepped { norm: None, skipped: false };
        let mut factor = None;
        if let Some(limit) = self.options.clip {
            // All gradients are at home.
            self.engine.synchronize()?;
            let gradients =
                self.parameters.iter().map(|tensor| Ok(tensor.f_grad()?)).collect::<Result<Vec<_>>>()?;
            let gradients: Vec<Tensor> = gradients.into_iter().filter(Tensor::defined).collect();
            let norm = clip::norm(&gradients)?.read()?;
            stepped = Stepped { norm: Some(norm), skipped: !norm.is_finite() };
            factor = clip::factor(norm, limit);
        }
        if stepped.skipped {
            self.forget_gradients()?;
        } else {
            self.step_layers(factor)?;
            if let Some(rest) = &mut self.rest {
                if let Some(factor) = factor {
                    let _no_grad = tch::no_grad_guard();
                    runtime::ops::foreach::mul_scalar_(&rest.gradients()?, factor)?;
                }
                rest.step()?;
            }
        }
        if let Some(rest) = &self.rest {
            rest.zero_grad(ZeroGrad::ToNone)?;
        }
        self.shared.state.lock().layers.iter_mut().for_each(|layer| *layer = LayerState::default());
        self.engine.with_layers(|layers| layers.iter_mut().for_each(|layer| layer.ahead.clear()));
        if self.options.overlap {
            self.engine.send_ahead()?;
        } else {
            self.engine.synchronize()?;
        }
        Ok(stepped)
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

    /// The state as named tensors, named as [`Optimizer::state`] names them, so that a checkpoint of one can be read by the other.
    /// They share memory with the optimizer's own.
    ///
    /// # Errors
    /// A failure of the host's thread, which is waited for.
    pub fn state(&self) -> Result<Vec<(String, Tensor)>> {
        self.engine.synchronize()?;
        let state = self.shared.state.lock();
        let mut named = Vec::new();
        for parameter in &state.parameters {
            let Parameter { name, step, moments: Some([m, v]), master, .. } = parameter else { continue };
            named.push((format!("{name}.step"), Tensor::from(*step as i64)));
            named.push((format!("{name}.exp_avg"), m.shallow_clone()));
            named.push((format!("{name}.exp_avg_sq"), v.shallow_clone()));
            named.extend(master.iter().map(|master| (format!("{name}.master"), master.shallow_clone())));
        }
        named.extend(self.rest.iter().flat_map(Optimizer::state));
        Ok(named)
    }

    /// Puts back what [`HostAdamW::state`] or [`Optimizer::state`] gave. A parameter without any tensor in it starts anew.
    ///
    /// # Errors
    /// All names that are missing, not known, or of another shape or dtype; nothing is changed then.
    pub fn load_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()> {
        self.engine.synchronize()?;
        // The ordinary optimizer's own reading decides what fits.
        let mut state = self.shared.state.lock();
        let own = |parameter: &Parameter| (parameter.name.clone(), parameter.tensor.shallow_clone());
        let of_layers: Vec<(String, Tensor)> = state.parameters.iter().map(own).collect();
        let is_ours = |name: &str| {
            of_layers.iter().any(|(own, _)| name.strip_prefix(own.as_str()).is_some_and(is_slot))
        };
        let (ours, others): (Vec<_>, Vec<_>) = tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()))
            .partition(|(name, _)| is_ours(name));
        let mut reader = (!of_layers.is_empty())
            .then(|| Optimizer::new(state.rule, vec![Group::new(of_layers, 0.0)]))
            .transpose()?;
        if let Some(reader) = &mut reader {
            reader.load_state(&ours)?;
        }
        match &mut self.rest {
            Some(rest) => rest.load_state(&others)?,
            None if others.is_empty() => {}
            None => {
                let names: Vec<&str> = others.iter().map(|(name, _)| name.as_str()).take(8).collect();
                let reason = format!("its state has no {}", names.join(", "));
                return Err(Error::config("optimizer", reason));
            }
        }
        let read: HashMap<String, Tensor> = reader.iter().flat_map(Optimizer::state).collect();
        for parameter in &mut state.parameters {
            let slot = |slot: &str| read.get(&format!("{}.{slot}", parameter.name));
            let own = |tensor: &Tensor| -> Result<Tensor> {
                let home = device::pinned_empty(&tensor.size(), tensor.kind(), Device::Cpu)?;
                home.shallow_clone().f_copy_(tensor)?;
                Ok(home)
            };
            let moments = slot("exp_avg").zip(slot("exp_avg_sq"));
            let (step, moments, master) = (
                slot("step").map_or(Ok(0), |step| step.f_int64_value(&[]))?,
                moments.map(|(m, v)| Ok::<_, Error>([own(m)?, own(v)?])).transpose()?,
                slot("master").map(own).transpose()?,
            );
            (parameter.step, parameter.moments, parameter.master) = (step as u64, moments, master);
        }
        Ok(())
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
        StateBytes { host, device: self.rest.as_ref().map_or(0, Optimizer::state_bytes) }
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

/// What follows a parameter's name in its state's.
fn is_slot(rest: &str) -> bool {
    [".step", ".exp_avg", ".exp_avg_sq", ".master"].contains(&rest)
}
