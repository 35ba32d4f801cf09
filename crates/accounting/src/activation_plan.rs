//! Which layers keep their activations and which compute them again: the plan of least recomputation under a budget.
//!
//! Each of `L` equal layers is given one choice `c` of few: it holds `h_c` bytes between its forward and its backward,
//! costs `r_c` seconds of recomputation, and needs `t_c` bytes for a moment when its backward comes (what it makes
//! again, and the gradients inside it). Backward runs from the last layer to the first and frees as it goes, so while
//! it is at layer `i` the device holds
//!
//! ```text
//! m_i = h_0 + … + h_i + t_i            peak = max_i m_i
//! ```
//!
//! The order matters: a layer pays for its moment on top of everything before it, and nothing after it. **Sorted by
//! falling `t`, the peak is least.** Let neighbours `a`, `b` stand in this order with `t_a < t_b`, and `S` be held
//! before them. They need `S + h_a + t_a` and `S + h_a + h_b + t_b`; exchanged they need `S + h_b + t_b` and
//! `S + h_a + h_b + t_a`, neither of which is above the second of the former, and no other layer sees a difference.
//! (It is Jackson's rule for jobs with delivery times: longest tail first.) Layers that are computed again therefore
//! come first, those that are kept last, and the last layer, whose activations are wanted as soon as its forward is
//! done, is kept whenever that holds no more than making them again: a plan that recomputes it for nothing loses to
//! the one that does not.
//!
//! So a plan is a number of layers per choice, and the least recomputation is an unbounded knapsack with choices in
//! that order. It is solved exactly: for every number of layers so far, the pairs (bytes held, seconds) that no other
//! pair beats in both. Seconds are counted in whole picoseconds, so that ties are ties. Of the plans of least
//! recomputation the one of least peak is taken.
//!
//! The costs of a decoder's layers come from [`layer_costs`], or from measurements.
//!
//! Herrmann, Beaumont et al., "Optimal checkpointing for heterogeneous chains" (arXiv:1911.13214), solve unequal layers by dynamic
//! programming over a discretized budget; here layers are equal, and no byte is rounded.
//!
//! ```
//! use accounting::activation_plan::{Choice, LayerCost, least_recomputation};
//!
//! let keep = LayerCost { held_bytes: 100, host_bytes: 0, recompute_seconds: 0.0, transient_bytes: 10 };
//! let again = LayerCost { held_bytes: 20, host_bytes: 0, recompute_seconds: 1.0, transient_bytes: 90 };
//! let choices = [Choice { of: "keep", cost: keep }, Choice { of: "again", cost: again }];
//! let plan = least_recomputation(4, &choices, 250)?;
//! assert_eq!(plan.layers, ["again", "again", "keep", "keep"]);
//! assert_eq!((plan.peak_bytes, plan.recompute_seconds), (250, 2.0));
//! # Ok::<(), accounting::Error>(())
//! ```

use crate::Error;
pub mod layer_costs;

use crate::exact::{positive, product, sum};
use crate::quantity::bytes_text;

/// What one layer costs under one way of keeping its activations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Bytes on the device between the layer's forward and its backward.
    pub held_bytes: u64,
    /// Bytes on the host in that time. They are not part of the budget.
    pub host_bytes: u64,
    /// Seconds that the backward takes longer than with everything kept: finite, from 0 to [`LONGEST_SECONDS`].
    pub recompute_seconds: f64,
    /// Bytes on the device beyond `held_bytes` at the largest moment of the layer's backward.
    pub transient_bytes: u64,
}

/// A way of keeping a layer's activations, and its cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice<T> {
    /// What the caller knows it by.
    pub of: T,
    /// What it costs.
    pub cost: LayerCost,
}

/// What each layer does.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan<T> {
    /// The choice of each layer, the first of the forward first.
    pub layers: Vec<T>,
    /// Bytes on the device at the largest moment of the backward, by the layers' activations and temporaries.
    pub peak_bytes: u64,
    /// Bytes on the host when the forward is done.
    pub host_bytes: u64,
    /// Seconds of recomputation in a step.
    pub recompute_seconds: f64,
}

/// The longest recomputation of a layer that is taken for one: about 30 years.
pub const LONGEST_SECONDS: f64 = 1e9;

/// The plan of least recomputation for `layers` equal layers whose activations, with the temporaries of the layer whose
/// backward runs, must never take more than `budget` bytes on the device. Of several, the one of least peak.
///
/// # Errors
///
/// No layers, no choices, seconds out of range, bytes beyond 64 bits; or no plan fits, with the least budget that one
/// does fit.
pub fn least_recomputation<T: Copy>(
    layers: usize,
    choices: &[Choice<T>],
    budget: u64,
) -> Result<Plan<T>, Error> {
    let search = Search::new(layers, choices)?;
    let Some(mut best) = search.least_seconds(budget, None) else {
        let needed = search.least_budget();
        return Err(Error::NoPlanFits {
            layers,
            needed,
            needed_text: bytes_text(needed),
            available: bytes_text(budget),
        });
    };
    // The least recomputation never rises with the budget: bisect for the smallest one that allows as little.
    let mut lowest = search.least_budget();
    while lowest < best.peak {
        let middle = lowest + (best.peak - lowest) / 2;
        match search.least_seconds(middle, Some(best.picoseconds)) {
            Some(found) => best = found,
            None => lowest = middle + 1,
        }
    }
    let order = best.order.iter().map(|&index| &choices[index]);
    Ok(Plan {
        layers: order.clone().map(|choice| choice.of).collect(),
        peak_bytes: best.peak,
        host_bytes: sum("bytes on the host", order.map(|choice| choice.cost.host_bytes))?,
        recompute_seconds: best.picoseconds as f64 / PICOSECONDS,
    })
}

/// The largest moment of the backward of layers with these costs, the first of the forward first.
pub fn peak_bytes(costs: impl IntoIterator<Item = LayerCost>) -> Result<u64, Error> {
    const WHAT: &str = "bytes of a plan's activations";
    let (mut held, mut peak) = (0, 0);
    for cost in costs {
        held = sum(WHAT, [held, cost.held_bytes])?;
        peak = peak.max(sum(WHAT, [held, cost.transient_bytes])?);
    }
    Ok(peak)
}

const PICOSECONDS: f64 = 1e12;

/// One choice as the search sees it.
struct Kind {
    /// Its place in the caller's list.
    index: usize,
    held: u64,
    transient: u64,
    picoseconds: u128,
}

/// A plan that was found.
struct Found {
    /// The caller's choice of each layer, the first of the forward first.
    order: Vec<usize>,
    peak: u64,
    picoseconds: u128,
}

/// Some layers that were given their choices, the first ones of the forward.
#[derive(Clone, Copy)]
struct Partial {
    held: u64,
    picoseconds: u128,
    peak: u64,
    /// Where [`Trail`] says which choice came last, and what before it.
    trail: usize,
}

/// Last choice and what came before, for every partial plan ever made.
type Trail = Vec<(usize, usize)>;

struct Search {
    layers: usize,
    /// By falling transient.
    kinds: Vec<Kind>,
}

impl Search {
    fn new<T>(layers: usize, choices: &[Choice<T>]) -> Result<Self, Error> {
        positive("layers of a plan", layers as u64)?;
        positive("choices of a layer", choices.len() as u64)?;
        let mut kinds = Vec::new();
        for (index, Choice { cost, .. }) in choices.iter().enumerate() {
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
            let held = product("bytes of all layers", &[cost.held_bytes, layers as u64])?;
            sum("bytes of all layers", [held, cost.transient_bytes])?;
            let (held, transient) = (cost.held_bytes, cost.transient_bytes);
            let picoseconds = (seconds * PICOSECONDS).round() as u128;
            kinds.push(Kind { index, held, transient, picoseconds });
        }
        let most = |bytes: fn(&Kind) -> u64| kinds.iter().map(bytes).max().unwrap_or(0);
        let held = product("bytes of all layers", &[most(|kind| kind.held), layers as u64])?;
        sum("bytes of all layers", [held, most(|kind| kind.transient)])?;
        kinds.sort_by_key(|kind| std::cmp::Reverse(kind.transient));
        Ok(Self { layers, kinds })
    }

    /// The least recomputation within `budget`, if anything fits; with `limit`, only if it is no more than that.
    fn least_seconds(&self, budget: u64, limit: Option<u128>) -> Option<Found> {
        let mut trail = Trail::new();
        // By number of layers: partial plans that none other beats in bytes held and seconds, by rising bytes.
        let mut fronts: Vec<Vec<Partial>> = vec![Vec::new(); self.layers + 1];
        fronts[0].push(Partial { held: 0, picoseconds: 0, peak: 0, trail: usize::MAX });
        for (place, kind) in self.kinds.iter().enumerate() {
            let later = &self.kinds[place..];
            let cheapest = later.iter().map(|kind| kind.picoseconds).min().unwrap_or(0);
            for count in 1..=self.layers {
                let left = (self.layers - count) as u128;
                let mut longer = Vec::new();
                for before in &fronts[count - 1] {
                    let held = before.held + kind.held;
                    let moment = held + kind.transient;
                    let picoseconds = before.picoseconds + kind.picoseconds;
                    let hopeless = limit.is_some_and(|limit| picoseconds + left * cheapest > limit);
                    if moment > budget || hopeless {
                        continue;
                    }
                    let peak = before.peak.max(moment);
                    longer.push((Partial { held, picoseconds, peak, trail: before.trail }, kind.index));
                }
                fronts[count] = merge(&fronts[count], longer, &mut trail);
            }
        }
        let best = fronts[self.layers].last()?;
        let mut order = Vec::with_capacity(self.layers);
        let mut at = best.trail;
        while let Some(&(index, before)) = trail.get(at) {
            order.push(index);
            at = before;
        }
        order.reverse();
        Some(Found { order, peak: best.peak, picoseconds: best.picoseconds })
    }

    /// The smallest budget that any plan fits.
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

/// Both lists as one, without what another beats. Both rise in bytes held; what is taken in of `longer` is noted in
/// `trail`.
fn merge(front: &[Partial], longer: Vec<(Partial, usize)>, trail: &mut Trail) -> Vec<Partial> {
    let mut merged: Vec<Partial> = Vec::with_capacity(front.len().max(longer.len()));
    let (mut old, mut new) = (front.iter().peekable(), longer.into_iter().peekable());
    let rank = |partial: &Partial| (partial.held, partial.picoseconds, partial.peak);
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
        if merged.last().is_some_and(|last| last.picoseconds <= next.picoseconds) {
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
