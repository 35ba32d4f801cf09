//! Bytes on the device and on the host during a step.
//!
//! On the device at every moment: the fixed part, the resident layers, the ring, and the optimizer's tensors if they
//! are on the device. In training with recomputation also
//!
//! ```text
//! forward of layer k     (k + 1) inputs + a forward's working bytes
//! head and loss          L inputs + the head's, including the output matrix' gradient
//! recomputation of k     (k + 1) inputs + a keeping forward's, + gradients of the head, and of other layers that have not left
//! backward of layer k    (k + 1) inputs + a backward's, including the layer's gradients as they are computed
//!                        + gradients of the head, and of other layers that have not left
//! embedding's backward   all gradients of the fixed part + the embedding's + gradients of layers that have not left
//! optimizer's step       all gradients + the step's copies, if every layer is resident and the optimizer is on the device
//! ```
//!
//! In inference there is one input instead of k + 1; of layers that are not recomputed the kept activations instead of their inputs. With
//! inputs in host memory there is the running layer's, and in backward also that of the recomputed layer before it.
//! Gradients are stored while other layers compute (or reduced over ranks: [`Layer::reducing_bytes`]), so their number follows from the
//! schedule: a backward's own gradients appear after the recomputation, when those of the layer before have often left. One layer at a time
//! is on the device only while it computes.

use super::setup::{Method, OptimizerPlace, Setup};
use super::step_costs::{Kept, Layer, StepCosts};
use super::timeline::{Operation, Span, StreamKind};
use crate::Error;
use crate::exact::{product, sum};
use crate::memory::{Item, total};
use crate::quantity::bytes_text;

/// Peak bytes on the device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// The moment of the peak.
    pub moment: Moment,
    /// Its parts, without those of 0 bytes.
    pub parts: Vec<Item>,
    /// Their sum, in bytes.
    pub total: u64,
}

impl Footprint {
    /// Returns the bytes of one part; 0 if it is absent.
    pub fn bytes(&self, part: &str) -> u64 {
        self.parts.iter().filter(|item| item.name == part).map(|item| item.bytes).sum()
    }

    /// Formats the parts in a line, the largest first.
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
    /// Forward of a teacher, before the pass.
    Teacher,
    /// Forward of a layer.
    Forward(usize),
    /// Head and loss.
    #[default]
    Head,
    /// Recomputation of a layer in backward.
    Recomputation(usize),
    /// Backward of a layer, after its recomputation.
    Backward(usize),
    /// Backward of the embedding.
    Embedding,
    /// Step of the optimizer on the device.
    Update,
}

impl std::fmt::Display for Moment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Forward(layer) => write!(f, "forward of layer {layer}"),
            Self::Teacher => f.write_str("forward of the teacher"),
            Self::Head => f.write_str("head"),
            Self::Recomputation(layer) => write!(f, "recomputation of layer {layer}"),
            Self::Backward(layer) => write!(f, "backward of layer {layer}"),
            Self::Embedding => f.write_str("backward of the embedding"),
            Self::Update => f.write_str("step of the optimizer"),
        }
    }
}

const RING: &str = "ring";

/// The parts of a footprint that live between steps.
pub(crate) const BETWEEN_STEPS: [&str; 5] =
    ["fixed weights", "optimizer state", "resident layers", RING, "constant"];

/// Returns the number of layers on the device at once, besides the resident ones: that of the ring's slots, or of streamed
/// layers if fewer.
fn slots(costs: &StepCosts, setup: &Setup) -> usize {
    match setup.method {
        Method::Resident { .. } => 0,
        Method::OneAtATime => 1.min(costs.layers.len() - setup.resident.len()),
        Method::Overlap { ring } => ring.min(costs.layers.len() - setup.resident.len()),
    }
}

pub(super) fn is_resident(setup: &Setup, layer: usize) -> bool {
    matches!(setup.method, Method::Resident { .. }) || setup.resident.binary_search(&layer).is_ok()
}

/// Lists the device's bytes at every moment; one layer at a time is there only while it computes.
fn base(costs: &StepCosts, setup: &Setup) -> Result<Vec<Item>, Error> {
    let all = || costs.layers.iter().enumerate();
    let resident = all().filter(|(layer, _)| is_resident(setup, *layer)).map(|(_, cost)| cost.slot_bytes);
    let streamed = all().filter(|(layer, _)| !is_resident(setup, *layer)).map(|(_, cost)| cost.slot_bytes);
    let ring = product("bytes of the ring", &[slots(costs, setup) as u64, streamed.max().unwrap_or(0)])?;
    let state = match (costs.updates(), setup.optimizer) {
        (false, _) => 0,
        (true, OptimizerPlace::Device) => costs.state_bytes()?,
        (true, OptimizerPlace::Host) => {
            let resident =
                all().filter(|(layer, _)| is_resident(setup, *layer)).map(|(_, cost)| cost.state_bytes);
            sum("bytes of the optimizer's state", resident.chain([costs.fixed.state_bytes]))?
        }
    };
    Ok(vec![
        Item { name: "fixed weights", bytes: costs.fixed.weight_bytes },
        Item { name: "optimizer state", bytes: state },
        Item { name: "resident layers", bytes: sum("bytes of the resident layers", resident)? },
        Item { name: RING, bytes: ring },
        Item { name: "constant", bytes: costs.working.constant_bytes },
    ])
}

/// Returns the largest of these footprints, the first of several.
pub(super) fn peak(footprints: Vec<Footprint>) -> Footprint {
    let larger = |peak: Footprint, other: Footprint| if other.total > peak.total { other } else { peak };
    footprints.into_iter().fold(Footprint::default(), larger)
}

/// Returns the device's bytes at every moment of a step, in their order.
pub(super) fn footprints(costs: &StepCosts, setup: &Setup, spans: &[Span]) -> Result<Vec<Footprint>, Error> {
    let base = base(costs, setup)?;
    let kept = kept(costs, setup)?;
    let alive = gradients(costs, setup, spans);
    let footprint = |(moment, start): (Moment, f64)| {
        let are_freed = moment == Moment::Update && costs.fixed.are_reduced;
        let is_alive = |one: &&Gradient| !are_freed && one.from <= start && start < one.until;
        let alive = alive.iter().filter(is_alive).map(|one| one.bytes);
        let mut parts = base.clone();
        let (fixed, reducing) = match moment {
            Moment::Teacher | Moment::Forward(_) | Moment::Head => (0, 0),
            Moment::Recomputation(layer) | Moment::Backward(layer) => {
                (costs.fixed.head_gradient_bytes, costs.layers[layer].reducing_bytes)
            }
            Moment::Embedding => (costs.fixed.gradient_bytes, costs.fixed.reducing_bytes),
            Moment::Update if are_freed => (0, 0),
            Moment::Update => (costs.fixed.gradient_bytes, 0),
        };
        if setup.method == Method::OneAtATime && matches!(moment, Moment::Head | Moment::Embedding) {
            parts.retain(|item| item.name != RING);
        }
        parts.push(Item { name: "fixed gradients", bytes: fixed });
        parts.push(Item { name: "layer gradients", bytes: sum("bytes of gradients", alive)? });
        parts.push(Item { name: "gradients being reduced", bytes: reducing });
        parts.extend(passing(costs, &kept, moment)?);
        parts.retain(|item| item.bytes > 0);
        let total = total(&parts)?;
        Ok(Footprint { moment, parts, total })
    };
    moments(costs, setup, &kept, spans).into_iter().map(footprint).collect()
}

/// Returns the activations that each layer keeps; `None` for its input alone.
fn kept(costs: &StepCosts, setup: &Setup) -> Result<Vec<Option<Kept>>, Error> {
    let by_layer = || costs.layers.iter().map(|layer| layer.kept);
    if !costs.training {
        return Ok(vec![None; costs.layers.len()]);
    }
    match setup.method {
        Method::Resident { recompute: false } => {
            let all: Vec<Option<Kept>> = by_layer().map(|kept| kept.or(costs.working.kept)).collect();
            if all.iter().all(Option::is_some) {
                return Ok(all);
            }
            Err(Error::Shape {
                what: "training without recomputation needs `WorkingMemory::kept`".into(),
                remedy: "set it, or recompute".into(),
            })
        }
        Method::Overlap { .. } => Ok(by_layer().collect()),
        Method::Resident { recompute: true } | Method::OneAtATime => Ok(vec![None; costs.layers.len()]),
    }
}

/// Lists every moment of a step with its start, including layers that take no time. Layers that keep their activations are not
/// recomputed.
fn moments(costs: &StepCosts, setup: &Setup, kept: &[Option<Kept>], spans: &[Span]) -> Vec<(Moment, f64)> {
    let find = |operation, layer| {
        spans.iter().find(move |span| {
            span.stream == StreamKind::Compute && span.operation == operation && span.layer == layer
        })
    };
    let start = |operation, layer| find(operation, layer).map_or(f64::NEG_INFINITY, |span| span.start);
    let count = costs.layers.len();
    let mut all: Vec<_> =
        (0..count).map(|layer| (Moment::Forward(layer), start(Operation::Forward, Some(layer)))).collect();
    all.push((Moment::Head, start(Operation::Head, None)));
    if costs.training {
        for layer in (0..count).rev() {
            let start = start(Operation::Backward, Some(layer));
            if kept[layer].is_some() {
                all.push((Moment::Backward(layer), start));
            } else {
                let recomputed = start + costs.layers[layer].forward_seconds;
                all.extend([(Moment::Recomputation(layer), start), (Moment::Backward(layer), recomputed)]);
            }
        }
        if costs.fixed.gradient_bytes > 0 {
            let end = find(Operation::Backward, Some(0)).map_or(f64::NEG_INFINITY, |span| span.end);
            all.push((Moment::Embedding, end));
        }
        let resident = matches!(setup.method, Method::Resident { .. });
        if resident && setup.optimizer == OptimizerPlace::Device && costs.working.update_bytes > 0 {
            all.push((Moment::Update, f64::MAX));
        }
    }
    all
}

/// Lists inputs, or the kept activations instead, and working memory.
fn passing(costs: &StepCosts, kept: &[Option<Kept>], moment: Moment) -> Result<[Item; 2], Error> {
    let working = costs.working;
    let input = working.input_bytes;
    let kept_input = if working.inputs_on_host { 0 } else { input };
    let first_layers = |count: usize| {
        let bytes = |kept: &Option<Kept>| kept.map_or(kept_input, |kept| kept.bytes);
        let on_device = if working.inputs_on_host { inputs_in_transfer(kept, moment) * input } else { 0 };
        sum("bytes that layers keep", kept[..count].iter().map(bytes).chain([on_device]))
    };
    let (activations, bytes) = match moment {
        Moment::Head if !costs.training => (0, working.head_bytes),
        Moment::Head => (first_layers(kept.len())?, working.head_bytes),
        Moment::Forward(_) if !costs.training => (input, working.forward_bytes),
        Moment::Forward(layer) => match kept[layer] {
            None => (first_layers(layer + 1)?, working.forward_bytes),
            Some(layer_kept) => (first_layers(layer)?, layer_kept.forward_bytes),
        },
        Moment::Recomputation(layer) => (first_layers(layer + 1)?, working.recomputation_bytes),
        Moment::Backward(layer) => {
            let bytes = kept[layer].map_or(working.backward_bytes, |kept| kept.backward_bytes);
            (first_layers(layer + 1)?, bytes)
        }
        Moment::Teacher => (0, 0),
        Moment::Embedding => (0, working.embedding_bytes),
        Moment::Update => (0, working.update_bytes),
    };
    let name = if kept.iter().any(Option::is_some) { "kept activations" } else { "layer inputs" };
    Ok([Item { name, bytes: activations }, Item { name: "working memory", bytes }])
}

/// Returns how many of the inputs that are kept in host memory are on the device: the running layer's, and in backward also that of the
/// recomputed layer before it, which is copied while this one, or one that keeps its activations, runs.
fn inputs_in_transfer(kept: &[Option<Kept>], moment: Moment) -> u64 {
    let any_recomputed = |layers: &[Option<Kept>]| layers.iter().any(Option::is_none);
    let count = |layer: usize, next: bool| u64::from(kept[layer].is_none()) + u64::from(next);
    match moment {
        Moment::Forward(layer) => count(layer, false),
        Moment::Recomputation(layer) | Moment::Backward(layer) => {
            count(layer, any_recomputed(&kept[..layer]) && any_recomputed(&kept[layer..]))
        }
        Moment::Teacher | Moment::Head | Moment::Embedding | Moment::Update => 0,
    }
}

/// A layer's gradient, and the interval in which it is on the device.
struct Gradient {
    bytes: u64,
    from: f64,
    until: f64,
}

fn gradients(costs: &StepCosts, setup: &Setup, spans: &[Span]) -> Vec<Gradient> {
    if !costs.training {
        return Vec::new();
    }
    let find =
        |operation, layer| spans.iter().find(|span| span.operation == operation && span.layer == Some(layer));
    let one = |(layer, cost): (usize, &Layer)| {
        let computed = find(Operation::Backward, layer);
        let until = match (setup.optimizer, setup.method) {
            (OptimizerPlace::Device, Method::Resident { .. }) => Some(f64::INFINITY),
            (OptimizerPlace::Host, _) if is_resident(setup, layer) => Some(f64::INFINITY),
            (OptimizerPlace::Device, _) => spans
                .iter()
                .find(|span| {
                    span.stream == StreamKind::Compute
                        && span.operation == Operation::Step
                        && span.layer == Some(layer)
                })
                .map(|span| span.end),
            (OptimizerPlace::Host, _) => find(Operation::Gradients, layer).map(|span| span.end),
        };
        Gradient {
            bytes: cost.gradient_bytes,
            // Until its backward has ended, its gradients count as that backward's working bytes.
            from: computed.map_or(f64::NEG_INFINITY, |span| span.end),
            until: until.or(computed.map(|span| span.end)).unwrap_or(f64::INFINITY),
        }
    };
    costs.layers.iter().enumerate().map(one).collect()
}

/// Streamed layers, their optimizer state if it is on the host, the maximum of gradients that are in flight or not yet
/// consumed, and inputs that are kept on the host.
pub(super) fn host_bytes(costs: &StepCosts, setup: &Setup, spans: &[Span]) -> Result<u64, Error> {
    const WHAT: &str = "bytes on the host";
    let streamed = || costs.layers.iter().enumerate().filter(|(layer, _)| !is_resident(setup, *layer));
    let working = costs.working;
    let inputs = match costs.training && working.inputs_on_host {
        true => kept(costs, setup)?.iter().filter(|kept| kept.is_none()).count() as u64,
        false => 0,
    };
    let inputs = product(WHAT, &[inputs, working.input_bytes])?;
    let weights = sum(WHAT, streamed().map(|(_, cost)| cost.slot_bytes).chain([inputs]))?;
    if !costs.updates() || setup.optimizer == OptimizerPlace::Device {
        return Ok(weights);
    }
    let find = |layer: usize, is: &dyn Fn(&Span) -> bool| {
        spans.iter().find(|span| span.layer == Some(layer) && is(span)).copied()
    };
    let buffer = |(layer, cost): (usize, &Layer)| {
        let coming = find(layer, &|span| span.operation == Operation::Gradients)?;
        let stepped = find(layer, &|span| span.stream == StreamKind::Host);
        let until = stepped.map_or(coming.end, |span| span.end);
        Some(Gradient { bytes: cost.gradient_bytes, from: coming.start, until })
    };
    let buffers: Vec<Gradient> = streamed().filter_map(buffer).collect();
    let mut most = 0;
    for moment in buffers.iter().map(|buffer| buffer.from) {
        let there = buffers.iter().filter(|buffer| buffer.from <= moment && moment < buffer.until);
        most = most.max(sum(WHAT, there.map(|buffer| buffer.bytes))?);
    }
    let state = sum(WHAT, streamed().map(|(_, cost)| cost.state_bytes))?;
    sum(WHAT, [weights, state, most])
}
