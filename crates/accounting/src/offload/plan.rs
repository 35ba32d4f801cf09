//! Finds the fastest setup that fits.

use std::fmt;

use super::condition::{Condition, Direction, least_tokens};
use super::setup::{Method, OptimizerPlace, Setup, Start};
use super::simulate::{SimulatedStep, simulate};
use super::step_costs::{Rates, StepCosts};
use crate::Error;
use crate::quantity::{bytes_text, grouped};

/// Maximum number of slots in a plan.
pub const MOST_PLANNED_SLOTS: usize = 4;

/// Available bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvailableMemory {
    /// On the device.
    pub device: u64,
    /// On the host; `None` for no limit.
    pub host: Option<u64>,
}

/// A setup, with its predicted cost.
#[derive(Clone, Debug, PartialEq)]
pub struct OffloadPlan {
    /// Ring, resident layers, and where the optimizer is.
    pub setup: Setup,
    /// The place of the optimizer; `None` if nothing is trained.
    pub optimizer: Option<OptimizerPlace>,
    /// A later step, not the first.
    pub step: SimulatedStep,
    /// The fraction of resident layers.
    pub resident_share: f64,
    /// Seconds of a step with every layer on the device, whether or not it fits.
    pub resident_seconds: f64,
    /// Number of layers.
    pub layers: usize,
    /// The budget.
    pub budget: AvailableMemory,
}

/// Returns the fastest plan that fits `budget`: any number of resident layers, rings of 1 to [`MOST_PLANNED_SLOTS`], the
/// optimizer on the device or on the host. Of equally fast plans, the one with the fewest bytes, then with the smallest ring.
///
/// # Errors
/// The errors of [`simulate`]; or nothing fits, with the smallest budget that does and its parts.
pub fn plan(costs: &StepCosts, rates: &Rates, budget: AvailableMemory) -> Result<OffloadPlan, Error> {
    let count = costs.layers.len();
    let places: &[OptimizerPlace] = if costs.updates() {
        &[OptimizerPlace::Device, OptimizerPlace::Host]
    } else {
        &[OptimizerPlace::Host]
    };
    let mut best: Option<(Setup, SimulatedStep)> = None;
    // With every layer and the optimizer on the device nothing is on the host, so at least this is within its budget.
    let mut least: Option<SimulatedStep> = None;
    for &optimizer in places {
        for stay in 0..=count {
            for ring in 1..=MOST_PLANNED_SLOTS.min((count - stay).max(1)) {
                let method = Method::Overlap { ring };
                let setup = Setup { method, resident: interleaved(count, stay), optimizer };
                let step = simulate(costs, rates, &setup, Start::Warm)?;
                if budget.host.is_some_and(|host| step.host_bytes > host) {
                    continue;
                }
                let fits = step.device.total <= budget.device;
                if fits && best.as_ref().is_none_or(|(_, best)| is_better(&step, best)) {
                    best = Some((setup, step.clone()));
                }
                if least.as_ref().is_none_or(|least| step.device.total < least.device.total) {
                    least = Some(step);
                }
            }
        }
    }
    let (setup, step) = match (best, least) {
        (Some(best), _) => best,
        (None, Some(least)) => return Err(nothing_fits(count, budget, &least)),
        (None, None) => return Err(Error::Zero { what: "layers of a step" }),
    };
    let stays = Setup { resident: (0..count).collect(), ..setup.clone() };
    Ok(OffloadPlan {
        optimizer: costs.updates().then_some(setup.optimizer),
        resident_share: setup.resident.len() as f64 / count as f64,
        resident_seconds: simulate(costs, rates, &stays, Start::Warm)?.seconds,
        layers: count,
        setup,
        step,
        budget,
    })
}

/// Chooses `stay` of `count` layers, spread as evenly as possible, including the last.
pub fn interleaved(count: usize, stay: usize) -> Vec<usize> {
    (0..count).filter(|layer| (layer + 1) * stay / count > layer * stay / count).collect()
}

fn is_better(step: &SimulatedStep, than: &SimulatedStep) -> bool {
    (step.seconds, step.device.total) < (than.seconds, than.device.total)
}

fn nothing_fits(layers: usize, budget: AvailableMemory, least: &SimulatedStep) -> Error {
    Error::NoOffloadFits {
        layers,
        host: budget.host.map_or(String::new(), |host| format!(" and {} of the host", bytes_text(host))),
        needed: least.device.total,
        needed_text: bytes_text(least.device.total),
        parts: least.device.summary(),
        available: bytes_text(budget.device),
    }
}

impl OffloadPlan {
    /// Slots of the ring; 0 if every layer is resident.
    pub fn ring(&self) -> usize {
        match self.setup.method {
            Method::Overlap { ring } if self.setup.resident.len() < self.layers => ring,
            _ => 0,
        }
    }

    /// Returns the plan's speed as a share of the speed with every layer on the device, 0 to 1.
    pub fn share_of_resident_speed(&self) -> f64 {
        if self.step.seconds > 0.0 { self.resident_seconds / self.step.seconds } else { 1.0 }
    }

    /// Returns the smallest number of tokens of a pass whose loads are hidden by compute, for the resident fraction.
    ///
    /// # Errors
    /// As [`least_tokens`].
    pub fn least_tokens(
        &self,
        flops: f64,
        rates: &Rates,
        bytes_per_parameter: f64,
        direction: Direction,
    ) -> Result<u64, Error> {
        let resident_share = self.resident_share;
        least_tokens(&Condition { flops, link: rates.load, bytes_per_parameter, resident_share }, direction)
    }

    /// Returns every figure with its name: counts, bytes (exact and formatted), seconds.
    pub fn lines(&self) -> Vec<(String, String)> {
        let bytes = |bytes: u64| format!("{} ({})", grouped(bytes.into()), bytes_text(bytes));
        let place = match self.optimizer {
            None => "none",
            Some(OptimizerPlace::Device) => "device",
            Some(OptimizerPlace::Host) => "host",
        };
        let mut lines = vec![
            ("resident layers".to_owned(), format!("{} of {}", self.setup.resident.len(), self.layers)),
            ("slots of the ring".into(), self.ring().to_string()),
            ("optimizer".into(), place.into()),
        ];
        lines.extend(self.step.device.parts.iter().map(|part| (part.name.to_owned(), bytes(part.bytes))));
        lines.push((format!("peak, {}", self.step.device.moment), bytes(self.step.device.total)));
        lines.push(("device budget".into(), bytes(self.budget.device)));
        lines.push(("host".into(), bytes(self.step.host_bytes)));
        lines.push(("loaded per step".into(), bytes(self.step.load_bytes)));
        lines.push(("stored per step".into(), bytes(self.step.store_bytes)));
        lines.push(("step".into(), seconds(self.step.seconds)));
        lines.push(("compute waits".into(), seconds(self.step.idle_seconds)));
        lines.push(("step, all resident".into(), seconds(self.resident_seconds)));
        lines.push(("share of resident speed".into(), format!("{:.3}", self.share_of_resident_speed())));
        lines
    }
}

fn seconds(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.3} ms", seconds * 1e3) } else { format!("{seconds:.3} s") }
}

impl fmt::Display for OffloadPlan {
    /// Prints each of [`OffloadPlan::lines`] in two columns.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.lines();
        let width = lines.iter().map(|(what, _)| what.chars().count()).max().unwrap_or(0);
        lines.iter().try_for_each(|(what, value)| writeln!(f, "{what:<width$}  {value}"))
    }
}
