//! `offload timeline`: the streams during a step.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use offload::{Method, Options, StreamKind};
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Sink};
use runtime::device;
use tch::Kind;

use super::measured_model::MeasuredModel;
use super::shape;
use super::spans;

const EXPERIMENT: &str = "offload-timeline";
const METHODS: [(&str, Method, usize); 4] = [
    ("function", Method::Function, 1),
    ("ring of 1", Method::Overlap, 1),
    ("ring of 2", Method::Overlap, 2),
    ("ring of 3", Method::Overlap, 3),
];

#[derive(Args)]
pub(crate) struct Timeline {
    /// How large it is
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    /// Tokens of the step
    #[arg(long, value_parser = clap::value_parser!(i64).range(2..))]
    tokens: Option<i64>,
    /// Write the trace of the ring of 3 to FILE, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Timeline) -> anyhow::Result<()> {
    let device = device::select(&common.device)?;
    let mut sink = Sink::new(common, crate::environment::of(device)?)?;
    let (layers, tokens, vocabulary) = match arguments.scale {
        Scale::Smoke => (4, 16, 512),
        Scale::Laptop | Scale::Full => (8, 64, 8192),
        Scale::Paper => (24, 1024, 151_936),
    };
    let tokens = arguments.tokens.unwrap_or(tokens);
    let config = match arguments.scale {
        Scale::Smoke => shape::tiny(layers, tokens),
        _ => shape::small(layers, vocabulary, tokens),
    };
    let mut progress = report::Progress::new(METHODS.len() as u64);
    for (name, method, ring) in METHODS {
        progress.message(name);
        let options = Options { device, method, ring, ..Options::default() };
        let subject =
            MeasuredModel::new(&config, (Kind::Float, device), Some(&options), (tokens, common.seed))?;
        let offload = subject.offload.as_ref().context("the model is not offloaded")?;
        // The first step makes the ring and learns the order; the second finds its memory warm.
        for _ in 0..2 {
            subject.gradients()?;
            subject.drop_gradients()?;
        }
        offload.start_trace()?;
        let passes = subject.gradients()?;
        let trace = offload.take_trace()?;
        let shown = Case::new().with("shows", "timeline").with("method", name);
        for (case, metric) in spans::timeline(&shown, &trace) {
            sink.put(EXPERIMENT, &case, vec![metric])?;
        }
        let share = |stream: StreamKind| {
            Metric::exact(
                &format!("{}_share", stream.name()),
                "ratio",
                spans::busy(&trace, stream) / passes.total(),
            )
        };
        let mut metrics = vec![Metric::exact("step_seconds", "s", passes.total())];
        metrics.extend([StreamKind::Compute, StreamKind::Load, StreamKind::Store].map(share));
        metrics.push(Metric::exact("overlap", "ratio", offload::overlap(&trace)));
        sink.put(EXPERIMENT, &Case::new().with("shows", "streams").with("method", name), metrics)?;
        if let Some(path) = arguments.trace.as_ref().filter(|_| ring == 3) {
            std::fs::write(path, offload::to_chrome(&trace).to_string())
                .with_context(|| format!("the trace {}", path.display()))?;
        }
        progress.step();
    }
    Ok(())
}
