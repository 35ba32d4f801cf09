//! Activation plans: which layers keep their activations and which recompute them, with the least recomputation under a budget.
//!
//! Each of `L` equal layers gets one of a few choices `c`: it keeps `h_c` bytes between its forward and its backward, costs
//! `r_c` seconds of recomputation, and needs `t_c` more bytes during its backward (recomputed tensors and gradients inside it).
//! Backward runs from the last layer to the first and frees as it goes, so at layer `i` the device holds
//!
//! ```text
//! m_i = h_0 + … + h_i + t_i            peak = max_i m_i
//! ```
//!
//! The order matters: a layer's transient bytes come on top of everything before it, and nothing after it. **Sorted by falling
//! `t`, the peak is minimal.** Let neighbours `a`, `b` have `t_a < t_b`, and let the layers before them keep `S` bytes. They
//! need `S + h_a + t_a` and `S + h_a + h_b + t_b`; exchanged they need `S + h_b + t_b` and `S + h_a + h_b + t_a`, neither of
//! which exceeds the second of the former, and other layers are not affected. (This is Jackson's rule for jobs with delivery
//! times: longest tail first.) So recomputed layers come first and kept ones last. The last layer, whose activations are needed
//! right after its forward, is kept if that takes no more bytes than recomputing it: a plan that recomputes it for nothing
//! loses to the one that does not.
//!
//! A plan is a number of layers per choice, so the least recomputation is an unbounded knapsack with choices in that order. It
//! is solved exactly: for every number of layers, it keeps the pairs (bytes kept, seconds) that no other pair beats in both.
//! Seconds are whole picoseconds, so that ties are ties. Of the plans with the least recomputation it takes the one with the
//! smallest peak. If bytes and seconds of many choices lie on one line, few pairs beat others, and there can be millions of
//! them. Then seconds are rounded to coarser units, four times as coarse until at most [`MOST_PAIRS`] remain: the plan is
//! within half a unit per layer of the best. Real decoder layers stay far below.
//!
//! The costs come from measurements: `training` has them.
//!
//! Herrmann, Beaumont et al., "Optimal checkpointing for heterogeneous chains" (arXiv:1911.13214), solve unequal layers by
//! dynamic programming over a discretised budget; here layers are equal, and no byte is rounded.
//!
//! ```
//! use accounting::activation_plan::{LayerChoice, LayerCost, least_recomputation};
//!
//! let keep = LayerCost { held_bytes: 100, host_bytes: 0, recompute_seconds: 0.0, transient_bytes: 10 };
//! let again = LayerCost { held_bytes: 20, host_bytes: 0, recompute_seconds: 1.0, transient_bytes: 90 };
//! let choices = [LayerChoice { of: "keep", cost: keep }, LayerChoice { of: "again", cost: again }];
//! let plan = least_recomputation(4, &choices, 250)?;
//! assert_eq!(plan.layers, ["again", "again", "keep", "keep"]);
//! assert_eq!((plan.peak_bytes, plan.recompute_seconds), (250, 2.0));
//! # Ok::<(), accounting::Error>(())
//! ```

use std::fmt;

use crate::Error;
use crate::exact::{positive, product, sum};
use crate::quantity::bytes_text;

/// The cost of one layer under one choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Bytes on the device between the layer's forward and its backward.
    pub held_bytes: u64,
    /// Bytes on the host in that time, not counted in the budget.
    pub host_bytes: u64,
    /// Additional seconds of the backward compared to keeping everything: finite, from 0 to [`LONGEST_SECONDS`].
    pub recompute_seconds: f64,
    /// Bytes on the device beyond `held_bytes` at the peak of the layer's backward.
    pub transient_bytes: u64,
}

/// The tensors that a decoder layer keeps from its forward to its backward; the others are recomputed. `training::activations` runs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerPlan {
    /// Keeps everything that backward needs (no checkpointing).
    KeepAll,
    /// Keeps products, recomputes elementwise operations (selective): the results of linear layers and attention are kept. The
    /// result of attention is kept only from libtorch's CPU flash kernel; with dropout, on CUDA, and with explicit attention it is
    /// recomputed.
    RecomputeElementwise,
    /// Keeps attention, recomputes the MLP (selective): keeps the MLP's input, not its inner activations.
    RecomputeMlp,
    /// Keeps the MLP, recomputes the attention (selective): keeps the attention's input, not its inner activations. For the
    /// models whose blocks have one attention: Llama, Qwen2 and GPT-2.
    RecomputeAttention,
    /// Keeps the layer's input and recomputes the layer (full).
    RecomputeAll,
    /// Copies the layer's input to pinned host memory on its own stream and recomputes the layer; the input of the previous
    /// layer is prefetched meanwhile (full, offloaded).
    Offload,
}

impl LayerPlan {
    /// All plans, from most to fewest bytes on the device.
    pub const ALL: [Self; 6] = [
        Self::KeepAll,
        Self::RecomputeElementwise,
        Self::RecomputeMlp,
        Self::RecomputeAttention,
        Self::RecomputeAll,
        Self::Offload,
    ];

    /// Returns the name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::KeepAll => "keep all",
            Self::RecomputeElementwise => "recompute elementwise",
            Self::RecomputeMlp => "recompute MLP",
            Self::RecomputeAttention => "recompute attention",
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

/// A choice for a layer's activations, with its cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerChoice<T> {
    /// The caller's name of the choice.
    pub of: T,
    /// Its cost.
    pub cost: LayerCost,
}

/// An activation plan: a choice for each layer.
#[derive(Clone, Debug, PartialEq)]
pub struct ActivationPlan<T> {
    /// The choice of each layer, in the order of forward.
    pub layers: Vec<T>,
    /// Peak bytes of activations and temporaries on the device during backward.
    pub peak_bytes: u64,
    /// Bytes on the host when the forward is done.
    pub host_bytes: u64,
    /// Seconds of recomputation in a step.
    pub recompute_seconds: f64,
}

/// The longest recomputation of a layer that is accepted: about 30 years.
pub const LONGEST_SECONDS: f64 = 1e9;

/// Returns the plan with the least recomputation for `layers` equal layers whose activations and temporaries never exceed
/// `budget` bytes on the device; of several, the one with the smallest peak.
///
/// # Errors
///
/// No layers, no choices, seconds out of range, bytes beyond 64 bits; or no plan fits, with the smallest budget that does.
pub fn least_recomputation<T: Copy>(
    layers: usize,
    choices: &[LayerChoice<T>],
    budget: u64,
) -> Result<ActivationPlan<T>, Error> {
    let mut search = Search::new(layers, choices)?;
    let first = loop {
        match search.least_units(budget, None) {
            Ok(plan) => break plan,
            Err(Crowded) => search.unit *= 4,
        }
    };
    let Some(mut best) = first else {
        let needed = search.least_budget();
        return Err(Error::NoPlanFits {
            layers,
            needed,
            needed_text: bytes_text(needed),
            available: bytes_text(budget),
        });
    };
    // The least recomputation never rises with the budget: bisect for the smallest budget that allows it.
    let mut lowest = search.least_budget();
    while lowest < best.peak {
        let middle = lowest + (best.peak - lowest) / 2;
        match search.least_units(middle, Some(best.units)) {
            Ok(Some(plan)) => best = plan,
            Ok(None) => lowest = middle + 1,
            Err(Crowded) => break,
        }
    }
    let order = best.order.iter().map(|&index| &choices[index]);
    Ok(ActivationPlan {
        layers: order.clone().map(|choice| choice.of).collect(),
        peak_bytes: best.peak,
        host_bytes: sum("bytes on the host", order.map(|choice| choice.cost.host_bytes))?,
        recompute_seconds: search.picoseconds(&best.order) as f64 / PICOSECONDS,
    })
}

/// Returns the peak bytes of the backward of layers with these costs, in the order of forward.
pub fn peak_bytes(costs: impl IntoIterator<Item = LayerCost>) -> Result<u64, Error> {
    const WHAT: &str = "bytes of a plan's activations";
    let (mut held, mut peak) = (0, 0);
    for cost in costs {
        held = sum(WHAT, [held, cost.held_bytes])?;
        peak = peak.max(sum(WHAT, [held, cost.transient_bytes])?);
    }
    Ok(peak)
}

/// Maximum number of pairs of a search before seconds are rounded to coarser units.
pub const MOST_PAIRS: usize = 1 << 18;

const PICOSECONDS: f64 = 1e12;

/// More than [`MOST_PAIRS`].
struct Crowded;

/// A choice, prepared for the search.
struct Kind {
    /// Index in the caller's list.
    index: usize,
    held: u64,
    transient: u64,
    picoseconds: u128,
}

/// A plan.
struct OrderedPlan {
    /// The index of each layer's choice, in the order of forward.
    order: Vec<usize>,
    peak: u64,
    units: u128,
}

/// A partial plan: the choices of the first layers of forward.
#[derive(Clone, Copy)]
struct Partial {
    held: u64,
    units: u128,
    peak: u64,
    /// Index in [`Trail`] of its last choice and its predecessor.
    trail: usize,
}

/// The last choice and the predecessor of every partial plan.
type Trail = Vec<(usize, usize)>;

struct Search {
    layers: usize,
    /// Picoseconds that seconds are counted in.
    unit: u128,
    /// By falling transient.
    kinds: Vec<Kind>,
}

impl Search {
    fn new<T>(layers: usize, choices: &[LayerChoice<T>]) -> Result<Self, Error> {
        positive("layers of a plan", layers as u64)?;
        positive("choices of a layer", choices.len() as u64)?;
        let mut kinds = Vec::new();
        for (index, LayerChoice { cost, .. }) in choices.iter().enumerate() {
            let seconds = cost.recompute_seconds;
            if !(0.0..=LONGEST_SECONDS).contains(&seconds) {
                return Err(Error::OutOfRange {
                    what: "a layer's recomputation in seconds",
                    given: seconds,
                    range: "0 to 1e9",
                    remedy: "give a positive rate of FLOPs and bytes",
                });
            }
            // No sum below can overflow.
            let all_layers = product("bytes of all layers", &[cost.held_bytes, layers as u64])?;
            sum("bytes of all layers", [all_layers, cost.transient_bytes])?;
            let (held, transient) = (cost.held_bytes, cost.transient_bytes);
            let picoseconds = (seconds * PICOSECONDS).round() as u128;
            kinds.push(Kind { index, held, transient, picoseconds });
        }
        let most = |bytes: fn(&Kind) -> u64| kinds.iter().map(bytes).max().unwrap_or(0);
        let all_layers = product("bytes of all layers", &[most(|kind| kind.held), layers as u64])?;
        sum("bytes of all layers", [all_layers, most(|kind| kind.transient)])?;
        kinds.sort_by_key(|kind| std::cmp::Reverse(kind.transient));
        Ok(Self { layers, unit: 1, kinds })
    }

    fn units(&self, kind: &Kind) -> u128 {
        (kind.picoseconds + self.unit / 2) / self.unit
    }

    /// Returns the picoseconds of layers with these choices.
    fn picoseconds(&self, order: &[usize]) -> u128 {
        let seconds =
            |index| self.kinds.iter().find(|kind| kind.index == index).map_or(0, |kind| kind.picoseconds);
        order.iter().map(|&index| seconds(index)).sum()
    }

    /// Returns the least recomputation within `budget`, if anything fits; with `limit`, only if it does not exceed that.
    fn least_units(&self, budget: u64, limit: Option<u128>) -> Result<Option<OrderedPlan>, Crowded> {
        let mut trail = Trail::new();
        // By number of layers: partial plans that no other beats in both bytes and seconds, by increasing bytes.
        let mut fronts: Vec<Vec<Partial>> = vec![Vec::new(); self.layers + 1];
        fronts[0].push(Partial { held: 0, units: 0, peak: 0, trail: usize::MAX });
        for (place, kind) in self.kinds.iter().enumerate() {
            let later = &self.kinds[place..];
            let cheapest = later.iter().map(|kind| self.units(kind)).min().unwrap_or(0);
            for count in 1..=self.layers {
                let left = (self.layers - count) as u128;
                let mut longer = Vec::new();
                for before in &fronts[count - 1] {
                    let held = before.held + kind.held;
                    let moment = held + kind.transient;
                    let units = before.units + self.units(kind);
                    let hopeless = limit.is_some_and(|limit| units + left * cheapest > limit);
                    if moment > budget || hopeless {
                        continue;
                    }
                    let peak = before.peak.max(moment);
                    longer.push((Partial { held, units, peak, trail: before.trail }, kind.index));
                }
                fronts[count] = merge(&fronts[count], longer, &mut trail);
                if trail.len() > MOST_PAIRS {
                    return Err(Crowded);
                }
            }
        }
        let Some(best) = fronts[self.layers].last() else { return Ok(None) };
        let mut order = Vec::with_capacity(self.layers);
        let mut at = best.trail;
        while let Some(&(index, before)) = trail.get(at) {
            order.push(index);
            at = before;
        }
        order.reverse();
        Ok(Some(OrderedPlan { order, peak: best.peak, units: best.units }))
    }

    /// Returns the smallest budget that any plan fits.
    fn least_budget(&self) -> u64 {
        let fits = |budget: u64| {
            let mut least_held: Vec<Option<u64>> = vec![None; self.layers + 1];
            least_held[0] = Some(0);
            for kind in &self.kinds {
                for count in 1..=self.layers {
                    let longer = least_held[count - 1].map(|held| held + kind.held);
                    let longer = longer.filter(|held| held + kind.transient <= budget);
                    least_held[count] = [least_held[count], longer].into_iter().flatten().min();
                }
            }
            least_held[self.layers].is_some()
        };
        if fits(0) {
            return 0;
        }
        let (mut too_small, mut enough) = (0, u64::MAX);
        while enough - too_small > 1 {
            let middle = too_small + (enough - too_small) / 2;
            if fits(middle) { enough = middle } else { too_small = middle }
        }
        enough
    }
}

/// Merges both lists without entries that another beats. Both have increasing bytes; entries of `longer` are recorded in
/// `trail`.
fn merge(front: &[Partial], longer: Vec<(Partial, usize)>, trail: &mut Trail) -> Vec<Partial> {
    let mut merged: Vec<Partial> = Vec::with_capacity(front.len().max(longer.len()));
    let (mut old, mut new) = (front.iter().peekable(), longer.into_iter().peekable());
    let rank = |partial: &Partial| (partial.held, partial.units, partial.peak);
    loop {
        let take_old = match (old.peek(), new.peek()) {
            (Some(old), Some((new, _))) => rank(old) <= rank(new),
            (Some(_), None) => true,
            (None, Some(_)) => false,
            (None, None) => break,
        };
        let (mut next, index) = match take_old {
            true => (old.next().copied(), None),
            false => match new.next() {
                Some((partial, index)) => (Some(partial), Some(index)),
                None => (None, None),
            },
        };
        let Some(next) = next.as_mut() else { break };
        if merged.last().is_some_and(|last| last.units <= next.units) {
            continue;
        }
        if let Some(index) = index {
            trail.push((index, next.trail));
            next.trail = trail.len() - 1;
        }
        merged.push(*next);
    }
    merged
}
