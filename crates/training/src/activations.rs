//! What each layer keeps between its forward and its backward: a plan, layer by layer.
//!
//! A layer of width d over n tokens keeps for its backward some k·n·d bytes. It can keep less and pay for it:
//!
//! | [`LayerPlan`] | held on the device | computed again |
//! |---|---|---|
//! | [`KeepAll`](LayerPlan::KeepAll) | everything | nothing |
//! | [`RecomputeElementwise`](LayerPlan::RecomputeElementwise) | the input, the results of products and attention | norms, activations, dropout, sums |
//! | [`RecomputeMlp`](LayerPlan::RecomputeMlp) | everything of attention, the MLP's input | the MLP |
//! | [`RecomputeAll`](LayerPlan::RecomputeAll) | the input | the layer |
//! | [`Offload`](LayerPlan::Offload) | nothing: the input is in the host's memory | the layer |
//!
//! Sources: Chen et al., arXiv:1604.06174 (full); Korthikanti et al., arXiv:2205.05198 (selective); Ren et al., arXiv:2101.06840,
//! and DeepSpeed's `cpu_checkpointing` (offloaded).
//!
//! [`apply`] puts a model's blocks and MLPs behind switches, under the names that they had; which way each goes is read at
//! each forward, so a plan can change between steps ([`Activations::change`]). Gradients are, bit for bit, those of
//! [`KeepAll`](LayerPlan::KeepAll): the second run has the first one's random state and policy of mixed precision. A layer in
//! which nothing needs a gradient is never run again.
//!
//! [`Activations::probe`] measures what each way costs on the device at hand, and `accounting::activation_plan` finds from
//! that the plan of least recomputation under a budget; [`Forecast`] does both for a whole model:
//!
//! ```
//! use accounting::activation_plan::least_recomputation;
//! use models::module::Context;
//! use models::{Gpt2, Gpt2Config};
//! use tch::{Device, Kind, Tensor};
//! use training::activations::{self, LayerPlan};
//!
//! let config = Gpt2Config { vocabulary: 64, max_sequence: 32, hidden: 32, heads: 2, layers: 4, ..Gpt2Config::small() };
//! let mut model = Gpt2::new(&config, (Kind::Float, Device::Cpu))?;
//! let activations = activations::apply(&mut model, &[LayerPlan::KeepAll; 4])?;
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

mod forecast;
mod host_lane;
mod probe;
mod switched;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use models::module::{Block, Mlp, Module, ModuleMapper, map_modules};

pub use forecast::{Forecast, StepCost};
pub use probe::LayerProbe;

use crate::error::{Error, Result};
use host_lane::HostLane;
use switched::{SwitchedBlock, SwitchedMlp};

/// What a layer does with its activations. See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerPlan {
    /// Everything that backward needs stays (no checkpointing).
    KeepAll,
    /// Keep products, recompute elementwise (selective): the results of linear layers and of attention stay, what lies between
    /// them is computed again ([`runtime::autograd::retain`]). Attention's result stays where libtorch's flash kernel for the
    /// CPU computes it; with dropout, on CUDA, and as [`models::AttentionPath::Explicit`] it is computed again.
    RecomputeElementwise,
    /// Keep attention, recompute the MLP (selective): the MLP's input stays, its inner activations do not.
    RecomputeMlp,
    /// The layer's input stays, and the layer runs again (full).
    RecomputeAll,
    /// The layer's input goes to page-locked host memory over a stream of its own, the layer runs again, and the input of
    /// the layer before is on its way back meanwhile (full, offloaded to host memory).
    Offload,
}

impl LayerPlan {
    /// All, by falling bytes on the device.
    pub const ALL: [Self; 5] =
        [Self::KeepAll, Self::RecomputeElementwise, Self::RecomputeMlp, Self::RecomputeAll, Self::Offload];

    /// A name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::KeepAll => "keep all",
            Self::RecomputeElementwise => "recompute elementwise",
            Self::RecomputeMlp => "recompute MLP",
            Self::RecomputeAll => "recompute all",
            Self::Offload => "offload",
        }
    }
}

impl fmt::Display for LayerPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `plan` for every `k`-th of `layers` layers, from the first on, the others keep all; and never for the last, whose
/// backward follows its forward at once: there is nothing to be saved in between.
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
    let of = |layer| if layer % k == 0 && layer + 1 < layers { plan } else { LayerPlan::KeepAll };
    Ok((0..layers).map(of).collect())
}

const WHAT: &str = "activation plan";

/// The switches of a model's layers.
#[derive(Debug)]
pub struct Activations {
    switches: Vec<Switch>,
    lane: HostLane,
}

/// Puts every block of `model`, and the MLP in it, behind a switch, and sets the switches to `plan`: one entry for each block,
/// in the order of [`Module::visit`]. The names of tensors and parts stay as they are. Once for a model; the plan changes by
/// [`Activations::change`].
///
/// # Errors
/// A plan of another length than the model has blocks, which leaves the model as it was; a block that a graph holds.
pub fn apply(model: &mut (impl Module + ?Sized), plan: &[LayerPlan]) -> Result<Activations> {
    let mut names = Names(Vec::new());
    map_modules(model, &mut names)?;
    check(plan, names.0.len())?;
    let mut install = Install {
        activations: Activations { switches: Vec::new(), lane: HostLane::default() },
        block: String::new(),
    };
    map_modules(model, &mut install)?;
    install.activations.change(plan)?;
    Ok(install.activations)
}

impl Activations {
    /// The plan in place.
    pub fn plan(&self) -> Vec<LayerPlan> {
        self.switches.iter().map(Switch::get).collect()
    }

    /// Another plan, from the next forward on. What a graph holds already is not touched.
    ///
    /// # Errors
    /// A plan of another length.
    pub fn change(&self, plan: &[LayerPlan]) -> Result<()> {
        check(plan, self.switches.len())?;
        self.switches.iter().zip(plan).for_each(|(switch, plan)| switch.set(*plan));
        Ok(())
    }

    /// Bytes of activations that are in the host's memory now, between a forward and its backward.
    pub fn host_bytes(&self) -> u64 {
        self.lane.bytes()
    }
}

fn check(plan: &[LayerPlan], layers: usize) -> Result<()> {
    if plan.len() == layers {
        return Ok(());
    }
    let reason = format!("{} entries for a model of {layers} blocks; give one for each block", plan.len());
    Err(Error::config(WHAT, reason))
}

/// Which way a layer goes.
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

/// The blocks that there are.
struct Names(Vec<String>);

impl ModuleMapper for Names {
    fn block(&mut self, name: &str, _: &mut Box<dyn Block>) -> models::Result<()> {
        self.0.push(name.to_owned());
        Ok(())
    }
}

struct Install {
    activations: Activations,
    /// The block that was last met.
    block: String,
}

impl ModuleMapper for Install {
    fn block(&mut self, name: &str, slot: &mut Box<dyn Block>) -> models::Result<()> {
        let Activations { switches, lane } = &mut self.activations;
        let switch = Switch::new();
        SwitchedBlock::install(slot, name, switch.clone(), lane.stop(switches.len()));
        switches.push(switch);
        self.block = name.to_owned();
        Ok(())
    }

    fn mlp(&mut self, name: &str, slot: &mut Box<dyn Mlp>) -> models::Result<()> {
        // An MLP outside of any block keeps what it keeps.
        let inside = name.strip_prefix(&self.block).is_some_and(|rest| rest.starts_with('.'));
        if let Some(switch) = self.activations.switches.last().filter(|_| inside) {
            SwitchedMlp::install(slot, name, switch.clone());
        }
        Ok(())
    }
}
