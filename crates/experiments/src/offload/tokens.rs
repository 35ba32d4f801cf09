//! `offload tokens`: the tokens of a step at which loads hide behind compute.

use std::path::PathBuf;

use accounting::offload::{Condition, Direction, least_tokens};
use anyhow::Context;
use clap::Args;
use kernels::physical;
use offload::{Method, OffloadConfig, StreamKind, Tier};
use report::cli::Scale;
use report::{Case, Metric};
use runtime::measure::Samples;
use tch::Kind;

use super::folder::scratch;
use super::measured_model::{MeasuredModel, random_tokens};
use super::spans;
use crate::driver::Bench;
use crate::shape::Shape;

const RING: usize = 3;

#[derive(Args)]
pub(crate) struct Tokens {
    /// Tokens of a step
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(i64).range(1..))]
    tokens: Vec<i64>,
    /// How often all take turns
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Where layers in files lie [default: beside this program]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

/// Measurements of a tier at a number of tokens.
#[derive(Default)]
struct Seen {
    seconds: Vec<f64>,
    shares: Vec<f64>,
    overlaps: Vec<f64>,
    idle: Vec<f64>,
    links: Vec<f64>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Tokens) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let (layers, sweep, rounds, vocabulary): (_, &[i64], _, _) = bench.sized([
        (4, &[4, 16], 1, 512),
        (4, &[16, 128, 512], 3, 8192),
        (6, &[16, 64, 128, 256, 512, 1024, 2048], 4, 8192),
        (24, &[64, 256, 1024, 4096, 16_384], 4, 151_936),
    ]);
    // Sizes of the flags replace those of the scale.
    let sweep = if arguments.tokens.is_empty() { sweep } else { &arguments.tokens };
    let rounds = arguments.rounds.map_or(rounds, |rounds| rounds as usize);
    let longest = sweep.iter().copied().max().unwrap_or(1);
    let shape = if bench.scale == Scale::Smoke { Shape::Tiny } else { Shape::Small };
    let config = shape.resized(layers, vocabulary, longest)?;
    // The resident model, the same with its layers in each tier, and the rate of a product.
    let scratch = scratch(arguments.folder.as_deref())?;
    let tiers = [("host", Tier::Host), ("file", Tier::File(scratch.path().to_owned()))];
    let make = |options: Option<&OffloadConfig>| {
        MeasuredModel::new(&config, (Kind::Float, device), options, (longest, bench.seed))
    };
    let mut resident = make(None)?;
    let mut offloaded = Vec::new();
    for (name, tier) in tiers {
        let options =
            OffloadConfig { device, method: Method::Overlap, ring: RING, tier, ..OffloadConfig::default() };
        offloaded.push((name, make(Some(&options))?));
    }
    let flops =
        physical::gemm_rate(device, Kind::Float, longest, config.intermediate_size, config.hidden_size)?
            .rate()
            .context("the rate of a product")?;
    // Each tier beside the resident model, over the tokens.
    let mut links: Vec<Vec<f64>> = vec![Vec::new(); offloaded.len()];
    let label = |tokens: &&i64| format!("{tokens} tokens");
    bench.each(sweep, label, |bench, &tokens| {
        let ids = random_tokens(config.vocab_size, &[1, tokens], bench.seed, device)?;
        resident.tokens = ids.shallow_clone();
        resident.infer()?;
        for (_, subject) in &mut offloaded {
            subject.tokens = ids.shallow_clone();
            subject.infer()?;
        }
        let mut seen: Vec<Seen> = offloaded.iter().map(|_| Seen::default()).collect();
        for _ in 0..rounds {
            let reference = resident.infer()?;
            for ((_, subject), seen) in offloaded.iter().zip(&mut seen) {
                seen.measure(subject, reference)?;
            }
        }
        for (((tier, _), seen), links) in offloaded.iter().zip(&seen).zip(&mut links) {
            let case = Case::new().with("shows", "sweep").with("tier", *tier).with("tokens", tokens);
            bench.put(&case, seen.metrics(tokens))?;
            links.extend(&seen.links);
        }
        Ok(())
    })?;
    // The least tokens by the measured rates.
    for ((tier, _), links) in offloaded.iter().zip(links) {
        let link = Samples { samples: links.clone() }.median();
        let condition = Condition { flops, link, bytes_per_parameter: 4.0, resident_share: 0.0 };
        let mut metrics = vec![
            Metric::exact("compute_rate", "FLOP/s", flops),
            Metric::of_samples("link_rate", "B/s", &links),
        ];
        for (name, direction) in
            [("min_forward_tokens", Direction::Forward), ("min_backward_tokens", Direction::Backward)]
        {
            metrics.push(Metric::exact(name, "tokens", least_tokens(&condition, direction)? as f64));
        }
        bench.put(&Case::new().with("shows", "condition").with("tier", *tier), metrics)?;
    }
    Ok(())
}

impl Seen {
    fn measure(&mut self, subject: &MeasuredModel, reference: f64) -> anyhow::Result<()> {
        let offload = subject.offload.as_ref().context("the model is not offloaded")?;
        offload.start_trace()?;
        let seconds = subject.infer()?;
        let trace = offload.take_trace()?;
        let (first, last) = ends(&trace);
        self.seconds.push(seconds);
        self.shares.push(reference / seconds);
        self.overlaps.push(offload::overlap(&trace));
        self.idle.push(1.0 - spans::busy(&trace, StreamKind::Compute) / (last - first));
        self.links.extend(offload::load_rate(&trace));
        Ok(())
    }

    fn metrics(&self, tokens: i64) -> Vec<Metric> {
        let rates: Vec<f64> = self.seconds.iter().map(|seconds| tokens as f64 / seconds).collect();
        vec![
            Metric::of_samples("forward_seconds", "s", &self.seconds),
            Metric::of_samples("tokens_per_second", "tokens/s", &rates),
            Metric::of_samples("share_of_resident", "ratio", &self.shares),
            Metric::of_samples("overlap", "ratio", &self.overlaps),
            Metric::of_samples("idle_share", "ratio", &self.idle),
            Metric::of_samples("link_rate", "B/s", &self.links),
        ]
    }
}

/// From the beginning of the first layer, or of its load, to the end of the last one.
fn ends(trace: &[offload::Span]) -> (f64, f64) {
    let first = trace.iter().map(|span| span.start).fold(f64::INFINITY, f64::min);
    let compute = trace.iter().filter(|span| span.stream == StreamKind::Compute);
    (first, compute.map(|span| span.end).fold(first, f64::max))
}
