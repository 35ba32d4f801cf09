//! `offload timeline`: the streams during a step.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use offload::{Method, OffloadConfig, Span, StreamKind};
use report::cli::Scale;
use report::{Case, Metric};
use tch::Kind;

use super::measured_model::MeasuredModel;
use super::spans;
use crate::driver::Bench;
use crate::shape::Shape;

const METHODS: [(&str, Method, usize); 4] = [
    ("function", Method::Function, 1),
    ("ring of 1", Method::Overlap, 1),
    ("ring of 2", Method::Overlap, 2),
    ("ring of 3", Method::Overlap, 3),
];

#[derive(Args)]
pub(crate) struct Timeline {
    /// Tokens of the step
    #[arg(long, value_parser = clap::value_parser!(i64).range(2..))]
    tokens: Option<i64>,
    /// Write the trace of the ring of 3 to FILE, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Timeline) -> anyhow::Result<()> {
    let device = bench.device;
    let (layers, tokens, vocabulary, steps) =
        bench.sized([(4, 16, 512, 1), (8, 64, 8192, 3), (8, 64, 8192, 9), (24, 1024, 151_936, 9)]);
    let tokens = arguments.tokens.unwrap_or(tokens);
    let shape = if bench.scale == Scale::Smoke { Shape::Tiny } else { Shape::Small };
    let config = shape.resized(layers, vocabulary, tokens)?;
    let label = |(name, ..): &(&str, Method, usize)| (*name).to_owned();
    bench.each(METHODS, label, |bench, (name, method, ring)| {
        let options = OffloadConfig { device, method, ring, ..OffloadConfig::default() };
        let subject =
            MeasuredModel::new(&config, (Kind::Float, device), Some(&options), (tokens, bench.seed))?;
        let offload = subject.offload.as_ref().context("the model is not offloaded")?;
        // The first step makes the ring and learns the order; the second finds its memory warm.
        for _ in 0..2 {
            subject.gradients()?;
            subject.drop_gradients()?;
        }
        let mut seen = Seen::default();
        let mut trace = Vec::new();
        for _ in 0..steps {
            offload.start_trace()?;
            let passes = subject.gradients()?;
            trace = offload.take_trace()?;
            seen.add(&trace, passes.total());
            subject.drop_gradients()?;
        }
        let shown = Case::new().with("shows", "timeline").with("method", name);
        bench.put_all(spans::timeline(&shown, &trace))?;
        bench.put(&Case::new().with("shows", "streams").with("method", name), seen.metrics())?;
        if let Some(path) = arguments.trace.as_ref().filter(|_| ring == 3) {
            std::fs::write(path, offload::to_chrome(&trace).to_string())
                .with_context(|| format!("the trace {}", path.display()))?;
        }
        Ok(())
    })
}

/// Activity of the streams in the traces of some steps.
#[derive(Default)]
struct Seen {
    seconds: Vec<f64>,
    shares: [Vec<f64>; 3],
    overlaps: Vec<f64>,
    held_up: Vec<f64>,
}

impl Seen {
    const STREAMS: [StreamKind; 3] = [StreamKind::Compute, StreamKind::Load, StreamKind::Store];

    fn add(&mut self, trace: &[Span], seconds: f64) {
        self.seconds.push(seconds);
        for (stream, shares) in Self::STREAMS.into_iter().zip(&mut self.shares) {
            shares.push(spans::busy(trace, stream) / seconds);
        }
        self.overlaps.push(offload::overlap(trace));
        self.held_up.push(spans::held_up(trace) / spans::busy(trace, StreamKind::Load));
    }

    fn metrics(&self) -> Vec<Metric> {
        let mut metrics = vec![Metric::of_samples("step_seconds", "s", &self.seconds)];
        let shares = Self::STREAMS.into_iter().zip(&self.shares);
        metrics.extend(shares.map(|(stream, shares)| {
            Metric::of_samples(&format!("{}_share", stream.name()), "ratio", shares)
        }));
        metrics.push(Metric::of_samples("overlap", "ratio", &self.overlaps));
        metrics.push(Metric::of_samples("held_up_share", "ratio", &self.held_up));
        metrics
    }
}
