//! The seconds of a layer as it runs in the model, measured on a few layers.
//!
//! The rate of one product, measured alone in the dtype of this project's own products, leaves out most of a layer's time: plain
//! projections are libtorch's products in the weights' dtype (bf16 runs at 50 to 55 GFLOP/s on two threads of an Intel Xeon without AMX,
//! fp32 at 90, whether the weights are in a cache or not), adapted ones cast their weights, other operators run between them, and the
//! loads that run beside them take the same cores. A few layers of the model, in files and through a ring as the whole model's, have all
//! of these. What does not repeat with the layers (embedding, head, loss, optimizer) is measured with them.

use accounting::offload::{Rates, StepCosts};
use offload::{Direction, Span, StreamKind};
use runtime::measure::Samples;

use super::passes::Passes;

/// Layers that are measured.
pub(super) const LAYERS: i64 = 4;
/// Slots of their ring: fewer than the layers, so that layers are loaded beside others.
pub(super) const RING: usize = 2;

/// Seconds of the parts of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartTimes {
    forward: f64,
    backward: f64,
    /// Seconds outside of the layers.
    outside: f64,
    /// Bytes per second of loads beside layers.
    load: Option<f64>,
}

impl PartTimes {
    /// Medians over the layers of all passes.
    pub(super) fn new(passes: &Passes) -> Self {
        let layers = |direction: Direction| -> Vec<f64> {
            let computes = passes.traces.iter().flatten().filter(|span| span.stream == StreamKind::Compute);
            computes.filter(|span| span.direction == direction).map(|span| span.end - span.start).collect()
        };
        let pairs = passes.traces.iter().zip(&passes.seconds);
        let outside = pairs.map(|(trace, seconds)| seconds - within(trace)).collect();
        let loads = passes.traces.iter().filter_map(|trace| offload::load_rate(trace)).collect();
        Self {
            forward: median(layers(Direction::Forward)).unwrap_or(0.0),
            backward: median(layers(Direction::Backward)).unwrap_or(0.0),
            outside: median(outside).unwrap_or(0.0).max(0.0),
            load: median(loads),
        }
    }

    /// Returns the costs with these seconds.
    pub(super) fn calibrated(&self, costs: &StepCosts) -> StepCosts {
        let mut costs = costs.clone();
        for layer in &mut costs.layers {
            (layer.forward_seconds, layer.backward_seconds) = (self.forward, self.backward);
        }
        costs.fixed.seconds = self.outside;
        costs
    }

    /// Returns the rates with that of these loads.
    pub(super) fn rates(&self, rates: &Rates) -> Rates {
        Rates { load: self.load.unwrap_or(rates.load), ..*rates }
    }

    /// How many times the seconds of `costs` a layer takes.
    pub(super) fn over(&self, costs: &StepCosts) -> f64 {
        let backward = |seconds: f64| if costs.training { seconds } else { 0.0 };
        let predicted = costs
            .layers
            .first()
            .map_or(f64::NAN, |layer| layer.forward_seconds + backward(layer.backward_seconds));
        (self.forward + backward(self.backward)) / predicted
    }
}

/// Seconds of a pass in which a layer computes, or waits between two layers of one direction or for the first layer's load.
fn within(trace: &[Span]) -> f64 {
    let mut computes: Vec<&Span> = trace.iter().filter(|span| span.stream == StreamKind::Compute).collect();
    computes.sort_by(|a, b| a.start.total_cmp(&b.start));
    let Some(first) = computes.first() else { return 0.0 };
    let layers: f64 = computes.iter().map(|span| span.end - span.start).sum();
    let gaps = computes.windows(2).filter(|pair| pair[0].direction == pair[1].direction);
    let waits: f64 = gaps.map(|pair| pair[1].start - pair[0].end).sum();
    let loads = trace.iter().filter(|span| span.stream == StreamKind::Load);
    let before = loads.map(|load| (load.end.min(first.start) - load.start.max(0.0)).max(0.0)).sum::<f64>();
    layers + waits + before
}

fn median(samples: Vec<f64>) -> Option<f64> {
    (!samples.is_empty()).then(|| Samples { samples }.median())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_layers_is_what_remains() {
        let span = |stream, direction, start, end| Span { stream, layer: 0, direction, start, end, bytes: 1 };
        let (forward, backward) = (Direction::Forward, Direction::Backward);
        let trace = [
            // The first layer's load; half a second of it runs before the layer.
            span(StreamKind::Load, forward, 0.5, 1.0),
            span(StreamKind::Compute, forward, 1.0, 2.0),
            span(StreamKind::Compute, forward, 2.5, 3.5),
            // The head takes a second.
            span(StreamKind::Compute, backward, 4.5, 6.5),
        ];
        assert_eq!(within(&trace), 0.5 + 4.0 + 0.5);
    }
}
