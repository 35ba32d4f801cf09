//! Activation checkpointing: what each layer keeps between forward and backward, as a plan for each layer.
//!
//! A layer of width d over n tokens keeps some k·n·d bytes for backward. It can keep less, at a cost:
//!
//! | [`LayerPlan`] | kept on the device | recomputed |
//! |---|---|---|
//! | [`KeepAll`](LayerPlan::KeepAll) | everything | nothing |
//! | [`RecomputeElementwise`](LayerPlan::RecomputeElementwise) | the input, the results of products and attention | norms, activations, dropout, sums |
//! | [`RecomputeMlp`](LayerPlan::RecomputeMlp) | all of attention, the MLP's input | the MLP |
//! | [`RecomputeAttention`](LayerPlan::RecomputeAttention) | all of the MLP, the attention's input | the attention |
//! | [`RecomputeAll`](LayerPlan::RecomputeAll) | the input | the layer |
//! | [`Offload`](LayerPlan::Offload) | nothing: the input is in host memory | the layer |
//!
//! Sources: Chen et al., arXiv:1604.06174 (full); Korthikanti et al., arXiv:2205.05198 (selective); Ren et al.,
//! arXiv:2101.06840, and DeepSpeed's `cpu_checkpointing` (offloaded).
//!
//! [`Activations::install`] wraps a model's blocks, attentions and MLPs under their own names. Each forward reads the plan, so it can
//! change between steps ([`Activations::change`]). Gradients equal those of [`KeepAll`](LayerPlan::KeepAll) bit for bit: the recomputation
//! has the same random state and mixed-precision policy. (On a GPU the backward passes of attention may add up in another order in every
//! run: [`kernels::attention::backend`].) A layer in which nothing requires a gradient is never recomputed.
//!
//! [`Activations::probe`] measures the cost of each plan on the current device; `accounting::activation_plan` then finds the
//! plan with the least recomputation within a budget. [`StepPredictor`] does both for a whole model:
//!
//! ```
//! use accounting::activation_plan::least_recomputation;
//! use models::module::Context;
//! use models::{Gpt2, Gpt2Config};
//! use tch::{Device, Kind, Tensor};
//! use training::activations::{Activations, LayerPlan};
//!
//! let config = Gpt2Config { vocabulary: 64, max_sequence: 32, hidden: 32, heads: 2, layers: 4, ..Gpt2Config::small() };
//! let mut model = Gpt2::new(&config, (Kind::Float, Device::Cpu))?;
//! let activations = Activations::install(&mut model, &[LayerPlan::KeepAll; 4])?;
//!
//! let hidden_btd = Tensor::zeros([2, 32, 32], (Kind::Float, Device::Cpu));
//! let probe = activations.probe(&mut model, &hidden_btd, &Context { training: true, ..Context::default() }, 1)?;
//! let all = 4 * probe.cost(LayerPlan::KeepAll).unwrap().held_bytes;
//! let plan = least_recomputation(4, &probe.choices, all)?;
//! activations.change(&plan.layers)?;
//! assert!(plan.peak_bytes <= all);
//! assert_eq!(activations.plan(), plan.layers);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod host_offload;
mod probe;
mod step_predictor;
mod switched;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use models::module::{Attention, Block, Mlp, Module, ModuleMapper, map_modules, replace};

pub use accounting::activation_plan::LayerPlan;
pub use host_offload::{HostOffload, LayerStorage};
pub use probe::LayerProbe;
pub use step_predictor::{StepCost, StepPredictor};

use crate::error::{Error, Result};
use switched::{Switched, SwitchedBlock};

/// Returns `plan` for every `k`-th of `layers` layers from the first on, and keep-all for the others and for the last layer,
/// whose backward follows its forward immediately, so that nothing would be saved.
///
/// ```
/// use training::activations::{LayerPlan::{KeepAll, RecomputeAll}, every_kth};
///
/// assert_eq!(every_kth(5, 2, RecomputeAll)?, [RecomputeAll, KeepAll, RecomputeAll, KeepAll, KeepAll]);
/// assert_eq!(every_kth(3, 1, RecomputeAll)?, [RecomputeAll, RecomputeAll, KeepAll]);
/// # Ok::<(), training::Error>(())
/// ```
///
/// # Errors
/// A `k` of 0.
pub fn every_kth(layers: usize, k: usize, plan: LayerPlan) -> Result<Vec<LayerPlan>> {
    if k == 0 {
        return Err(Error::config(
            WHAT,
            "every 0th layer; expected 1 for every layer, 2 for every second, …",
        ));
    }
    let plan_of = |layer| if layer % k == 0 && layer + 1 < layers { plan } else { LayerPlan::KeepAll };
    Ok((0..layers).map(plan_of).collect())
}

const WHAT: &str = "activation plan";

/// A handle on the plan of a model's layers. Clones share the plan.
#[derive(Debug, Clone)]
pub struct Activations {
    switches: Vec<Switch>,
    offload: HostOffload,
    can_recompute_attention: bool,
}

impl Activations {
    /// Wraps every block of `model` and its MLP, and sets the plan: one entry per block, in the order of [`Module::visit`]. Names
    /// of tensors and parts do not change. Call it once per model; [`Activations::change`] changes the plan.
    ///
    /// # Errors
    /// A plan of the wrong length, or one that recomputes the attention of a block without a replaceable one, which leave the model
    /// unchanged; a block that a graph holds.
    pub fn install(model: &mut (impl Module + ?Sized), plan: &[LayerPlan]) -> Result<Self> {
        let mut parts = Parts::default();
        map_modules(model, &mut parts)?;
        let can_recompute_attention = parts.attentions >= parts.blocks;
        check(plan, parts.blocks, can_recompute_attention)?;
        let mut install = Install {
            activations: Self {
                switches: Vec::new(),
                offload: HostOffload::default(),
                can_recompute_attention,
            },
            block: String::new(),
        };
        map_modules(model, &mut install)?;
        install.activations.change(plan)?;
        Ok(install.activations)
    }

    /// Returns the current plan.
    pub fn plan(&self) -> Vec<LayerPlan> {
        self.switches.iter().map(Switch::get).collect()
    }

    /// Changes the plan from the next forward on. Existing graphs do not change.
    ///
    /// # Errors
    /// As [`Activations::install`].
    pub fn change(&self, plan: &[LayerPlan]) -> Result<()> {
        check(plan, self.switches.len(), self.can_recompute_attention)?;
        self.switches.iter().zip(plan).for_each(|(switch, plan)| switch.set(*plan));
        Ok(())
    }

    /// Returns the bytes of activations in host memory now, between a forward and its backward.
    pub fn host_bytes(&self) -> u64 {
        self.offload.bytes()
    }
}

fn check(plan: &[LayerPlan], layers: usize, can_recompute_attention: bool) -> Result<()> {
    if plan.len() != layers {
        let reason =
            format!("{} entries for a model of {layers} blocks; give one for each block", plan.len());
        return Err(Error::config(WHAT, reason));
    }
    if plan.contains(&LayerPlan::RecomputeAttention) && !can_recompute_attention {
        let reason =
            "this model's blocks have no single attention that can be recomputed; take `recompute all`";
        return Err(Error::config(WHAT, reason));
    }
    Ok(())
}

/// A layer's plan, shared by its block and its MLP.
#[derive(Debug, Clone)]
pub(crate) struct Switch(Arc<AtomicU8>);

impl Switch {
    fn new() -> Self {
        Self(Arc::default())
    }

    fn get(&self) -> LayerPlan {
        LayerPlan::ALL[usize::from(self.0.load(Ordering::Relaxed))]
    }

    fn set(&self, plan: LayerPlan) {
        self.0.store(plan as u8, Ordering::Relaxed);
    }
}

/// Counts the parts.
#[derive(Default)]
struct Parts {
    blocks: usize,
    attentions: usize,
}

impl ModuleMapper for Parts {
    fn block(&mut self, _: &str, _: &mut Box<dyn Block>) -> models::Result<()> {
        self.blocks += 1;
        Ok(())
    }

    fn attention(&mut self, _: &str, _: &mut Box<dyn Attention>) -> models::Result<()> {
        self.attentions += 1;
        Ok(())
    }
}

struct Install {
    activations: Activations,
    /// The last visited block.
    block: String,
}

impl Install {
    /// The switch of the block that holds the part `name`; `None` for a part outside of any block.
    fn switch_of(&self, name: &str) -> Option<Switch> {
        let inside = name.strip_prefix(&self.block).is_some_and(|rest| rest.starts_with('.'));
        self.activations.switches.last().filter(|_| inside).cloned()
    }
}

impl ModuleMapper for Install {
    fn block(&mut self, name: &str, slot: &mut Box<dyn Block>) -> models::Result<()> {
        let Activations { switches, offload, .. } = &mut self.activations;
        let switch = Switch::new();
        SwitchedBlock::install(slot, name, switch.clone(), offload.storage(switches.len()));
        switches.push(switch);
        self.block = name.to_owned();
        Ok(())
    }

    fn attention(&mut self, name: &str, slot: &mut Box<dyn Attention>) -> models::Result<()> {
        if let Some(switch) = self.switch_of(name) {
            replace(slot, |attention| Box::new(Switched::new(name, attention, switch)));
        }
        Ok(())
    }

    fn mlp(&mut self, name: &str, slot: &mut Box<dyn Mlp>) -> models::Result<()> {
        if let Some(switch) = self.switch_of(name) {
            replace(slot, |mlp| Box::new(Switched::new(name, mlp, switch)));
        }
        Ok(())
    }
}
