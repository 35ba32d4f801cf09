//! Bytes on the device and on the host while a step runs.
//!
//! On the device, at every moment: the fixed part with its gradients, the resident layers, the ring, and what the optimizer
//! keeps there. Beside them, in training with recomputation,
//!
//! ```text
//! forward of layer k     (k + 1) inputs + a forward's working bytes
//! head and loss          L inputs + the head's
//! backward of layer k    (k + 1) inputs + a backward's + gradients: its own, and those that have not left
//! ```
//!
//! in inference one input instead of k + 1, none at the head; without recomputation what a layer keeps in the place of its input.
//! Gradients leave while other layers compute, so how many are there is read off the schedule.

use super::job::{Job, Kept};
use super::schedule::{Lane, Method, OptimizerPlace, Setup, Span, Work};
use crate::exact::{product, sum};
use crate::memory::{Item, total};
use crate::quantity::bytes_text;
use crate::{Error, exact};

/// The device's bytes at their peak.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// When that is.
    pub moment: Moment,
    /// What is there; none of them of 0 bytes.
    pub parts: Vec<Item>,
    /// Their sum, in bytes.
    pub total: u64,
}

impl Footprint {
    /// Bytes of one part, 0 where it is not there.
    pub fn bytes(&self, part: &str) -> u64 {
        self.parts.iter().filter(|item| item.name == part).map(|item| item.bytes).sum()
    }

    /// The parts in a line, the largest first.
    pub fn summary(&self) -> String {
        let mut parts = self.parts.clone();
        parts.sort_by_key(|item| std::cmp::Reverse(item.bytes));
        let texts: Vec<_> =
            parts.iter().map(|item| format!("{} {}", item.name, bytes_text(item.bytes))).collect();
        texts.join(", ")
    }
}

/// A moment of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moment {
    /// Forward of a layer.
    Forward(usize),
    /// Head and loss.
    #[default]
    Head,
    /// Backward of a layer.
    Backward(usize),
}

impl std::fmt::Display for Moment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Forward(layer) => write!(f, "forward of layer {layer}"),
            Self::Head => f.write_str("head"),
            Self::Backward(layer) => write!(f, "backward of layer {layer}"),
        }
    }
}

/// How many layers are on the device at once, beside the resident ones: as many as the ring has slots, or are streamed.
fn slots(job: &Job, setup: &Setup) -> usize {
    match setup.method {
        Method::Resident { .. } => 0,
        Method::OneAtATime => 1.min(job.layers.len() - setup.resident.len()),
        Method::Overlap { ring } => ring.min(job.layers.len() - setup.resident.len()),
    }
}

pub(super) fn is_resident(setup: &Setup, layer: usize) -> bool {
    matches!(setup.method, Method::Resident { .. }) || setup.resident.binary_search(&layer).is_ok()
}

/// What is there at every moment.
fn base(job: &Job, setup: &Setup) -> Result<Vec<Item>, Error> {
    let all = || job.layers.iter().enumerate();
    let resident = all().filter(|(layer, _)| is_resident(setup, *layer)).map(|(_, cost)| cost.slot_bytes);
    let streamed = all().filter(|(layer, _)| !is_resident(setup, *layer)).map(|(_, cost)| cost.slot_bytes);
    let ring = product("bytes of the ring", &[slots(job, setup) as u64, streamed.max().unwrap_or(0)])?;
    let on_device = job.updates() && setup.optimizer == OptimizerPlace::Device;
    let gradients = if job.training { job.fixed.gradient_bytes } else { 0 };
    Ok(vec![
        Item { name: "fixed weights", bytes: job.fixed.weight_bytes },
        Item { name: "fixed gradients", bytes: gradients },
        Item { name: "optimizer state", bytes: if on_device { job.state_bytes()? } else { 0 } },
        Item { name: "resident layers", bytes: sum("bytes of the resident layers", resident)? },
        Item { name: "ring", bytes: ring },
        Item { name: "constant", bytes: job.working.constant_bytes },
    ])
}

pub(super) fn footprint(job: &Job, setup: &Setup, spans: &[Span]) -> Result<Footprint, Error> {
    let base = base(job, setup)?;
    let kept = match (job.training, setup.method) {
        (true, Method::Resident { recompute: false }) => {
            Some(job.working.kept.ok_or_else(|| Error::Shape {
                what:
                    "a training without recomputation, of which no bytes that a layer keeps are given".into(),
                remedy: "give Working::kept, or recompute".into(),
            })?)
        }
        _ => None,
    };
    let alive = gradients(job, setup, spans);
    let mut peak = Footprint::default();
    for (moment, start) in moments(job, spans) {
        let alive = alive.iter().filter(|one| one.from <= start && start < one.until).map(|one| one.bytes);
        let mut parts = base.clone();
        parts.push(Item { name: "layer gradients", bytes: sum("bytes of gradients", alive)? });
        parts.extend(passing(job, kept, moment)?);
        parts.retain(|item| item.bytes > 0);
        let total = total(&parts)?;
        if total > peak.total {
            peak = Footprint { moment, parts, total };
        }
    }
    Ok(peak)
}

/// Every moment of a step with its start; a layer of no seconds has its moment too.
fn moments(job: &Job, spans: &[Span]) -> Vec<(Moment, f64)> {
    let start = |work, layer| {
        let found =
            spans.iter().find(|span| span.lane == Lane::Compute && span.work == work && span.layer == layer);
        found.map_or(f64::NEG_INFINITY, |span| span.start)
    };
    let count = job.layers.len();
    let mut all: Vec<_> =
        (0..count).map(|layer| (Moment::Forward(layer), start(Work::Forward, Some(layer)))).collect();
    all.push((Moment::Head, start(Work::Head, None)));
    if job.training {
        let backward = |layer| (Moment::Backward(layer), start(Work::Backward, Some(layer)));
        all.extend((0..count).rev().map(backward));
    }
    all
}

/// Inputs, or what is kept in their place, and what works.
fn passing(job: &Job, kept: Option<Kept>, moment: Moment) -> Result<[Item; 2], Error> {
    let working = job.working;
    let before = match moment {
        Moment::Head if job.training => job.layers.len(),
        Moment::Head => 0,
        Moment::Forward(_) if !job.training => 1,
        Moment::Forward(layer) | Moment::Backward(layer) => layer + 1,
    };
    let each = kept.map_or(working.input_bytes, |kept| kept.bytes);
    let bytes = match (moment, kept) {
        (Moment::Head, _) => working.head_bytes,
        (Moment::Forward(_), None) => working.forward_bytes,
        (Moment::Forward(_), Some(kept)) => kept.forward_bytes,
        (Moment::Backward(_), None) => working.backward_bytes,
        (Moment::Backward(_), Some(kept)) => kept.backward_bytes,
    };
    let name = if kept.is_some() { "kept activations" } else { "layer inputs" };
    let held = exact::product("bytes that layers keep", &[before as u64, each])?;
    Ok([Item { name, bytes: held }, Item { name: "working memory", bytes }])
}

/// A layer's gradient, and when it is on the device.
struct Gradient {
    bytes: u64,
    from: f64,
    until: f64,
}

fn gradients(job: &Job, setup: &Setup, spans: &[Span]) -> Vec<Gradient> {
    if !job.training {
        return Vec::new();
    }
    let find = |work, layer| spans.iter().find(|span| span.work == work && span.layer == Some(layer));
    let one = |(layer, cost): (usize, &super::Layer)| {
        let computed = find(Work::Backward, layer);
        let until = match (setup.optimizer, setup.method) {
            (OptimizerPlace::Device, Method::Resident { .. }) => Some(f64::INFINITY),
            (OptimizerPlace::Device, _) => spans
                .iter()
                .find(|span| {
                    span.lane == Lane::Compute && span.work == Work::Step && span.layer == Some(layer)
                })
                .map(|span| span.end),
            (OptimizerPlace::Host, _) => find(Work::Gradients, layer).map(|span| span.end),
        };
        Gradient {
            bytes: cost.gradient_bytes,
            from: computed.map_or(f64::NEG_INFINITY, |span| span.start),
            until: until.or(computed.map(|span| span.end)).unwrap_or(f64::INFINITY),
        }
    };
    job.layers.iter().enumerate().map(one).collect()
}

/// Streamed layers, the optimizer's state and resident trainable weights if it is there, and the most gradients at a time
/// that came or are coming and have not been consumed.
pub(super) fn host_bytes(job: &Job, setup: &Setup, spans: &[Span]) -> Result<u64, Error> {
    const WHAT: &str = "bytes on the host";
    let on_host = job.updates() && setup.optimizer == OptimizerPlace::Host;
    let layer = |(layer, cost): (usize, &super::Layer)| match (is_resident(setup, layer), on_host) {
        (false, _) => cost.slot_bytes,
        (true, true) => cost.trainable_bytes,
        (true, false) => 0,
    };
    let weights = sum(WHAT, job.layers.iter().enumerate().map(layer))?;
    if !on_host {
        return Ok(weights);
    }
    let coming =
        |layer: Option<usize>| spans.iter().find(move |s| s.work == Work::Gradients && s.layer == layer);
    let stepped = |layer: Option<usize>| {
        spans.iter().find(move |span| span.lane == Lane::Host && span.layer == layer).map(|span| span.end)
    };
    let buffers: Vec<Gradient> = (0..job.layers.len())
        .map(|layer| (Some(layer), job.layers[layer].gradient_bytes))
        .chain([(None, job.fixed.gradient_bytes)])
        .filter_map(|(layer, bytes)| {
            let coming = coming(layer)?;
            Some(Gradient { bytes, from: coming.start, until: stepped(layer).unwrap_or(coming.end) })
        })
        .collect();
    let mut most = 0;
    for moment in buffers.iter().map(|buffer| buffer.from) {
        let there = buffers.iter().filter(|buffer| buffer.from <= moment && moment < buffer.until);
        most = most.max(sum(WHAT, there.map(|buffer| buffer.bytes))?);
    }
    sum(WHAT, [weights, job.state_bytes()?, job.fixed.trainable_bytes, most])
}
