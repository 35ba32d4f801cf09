//! `training bench`: steps of the GPT-2-like model on given sizes, for a comparison with another program.

use anyhow::Context;
use models::module::{parameter_count, trainable};
use models::{Gpt2Like, Gpt2LikeConfig};
use report::measurements::IMPLEMENTATION_KEY;
use report::{Case, Metric};
use runtime::memory::Region;
use tch::{Device, Kind};
use training::Trainer;
use training::batches::{Batches, Synthetic};
use training::optimizer::{Adam, DeviceOptimizer, Group};
use training::trainer::{Capture, TrainerConfig};

use crate::driver::Bench;
use crate::dtype;
use crate::gpu_busy;
use crate::training::stepped::{Stepped, WARM_UP};

#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    /// Rows of a batch
    #[arg(long, default_value_t = 16)]
    rows: usize,
    /// Tokens of a row; each is between half as long and this long, and padded
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(2..))]
    length: u32,
    /// Width of the embeddings and of the layer
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(i64).range(1..))]
    width: i64,
    /// Attention heads
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(i64).range(1..))]
    heads: i64,
    /// Number of tokens that the model knows
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(i64).range(1..))]
    vocabulary: i64,
    /// Dtypes of the weights
    #[arg(long, value_delimiter = ',', default_value = "fp32", value_parser = dtype::parse)]
    dtype: Vec<Kind>,
    /// Measured steps of a round
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
}

pub(crate) fn run(bench: &mut Bench, arguments: &BenchArgs) -> anyhow::Result<()> {
    runtime::memory::track_cpu()?;
    bench.expect_turns(arguments.dtype.len());
    let label = |kind: &Kind| format!("GPT-2-like, a training step, {}", dtype::name(*kind));
    bench.each(arguments.dtype.clone(), label, |bench, kind| {
        // On a GPU the default, which captures steps, and the same step without a graph.
        let captures: &[Capture] =
            if bench.device.is_cuda() { &[Capture::Auto, Capture::Off] } else { &[Capture::Auto] };
        let mut prepared = Vec::new();
        for &capture in captures {
            prepared.push(Prepared::new(arguments, (kind, capture), bench.device, bench.seed)?);
        }
        bench.rounds(|bench| {
            prepared.iter_mut().try_for_each(|one| {
                let figures = one.measure(arguments)?;
                bench.put(&one.case, figures)
            })
        })?;
        prepared.iter_mut().try_for_each(|one| {
            let busy = gpu_busy::measure(bench.device, || one.step().map(drop))?;
            bench.put(&one.case, vec![busy])
        })
    })
}

/// A trainer after its first steps.
struct Prepared {
    stepped: Stepped,
    source: Synthetic,
    parameters: u64,
    /// Bytes at the peak of the first steps, which a graph keeps: a replay allocates none.
    peak: u64,
    device: Device,
    case: Case,
}

impl Prepared {
    fn new(
        arguments: &BenchArgs,
        (kind, capture): (Kind, Capture),
        device: Device,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let &BenchArgs { rows, length, width, heads, vocabulary, .. } = arguments;
        let config = Gpt2LikeConfig {
            vocab_size: vocabulary,
            embedding_dim: width,
            hidden_dim: width,
            num_heads: heads,
            ff_dim: 2 * width,
            max_length: i64::from(length),
            dropout: 0.0,
            ..Default::default()
        };
        let length = length as usize;
        let source =
            Synthetic { seed, vocabulary, rows, length, noise: 1, batches: None, device, position: 0 };
        let model = Box::new(Gpt2Like::new(&config, (kind, device))?);
        let parameters = parameter_count(&*model).total;
        let optimizer = DeviceOptimizer::new(Adam::default(), vec![Group::new(trainable(&*model), 1e-4)])?;
        let options = TrainerConfig { steps: 1, capture, ..Default::default() };
        let trainer = Trainer::new(model, Box::new(optimizer), options)?;
        let case = match capture {
            Capture::Auto => Case::new(),
            Capture::Off => Case::new().with(IMPLEMENTATION_KEY, "frugal, eager"),
        };
        let case = case
            .with("rows", rows as u64)
            .with("length", length as u64)
            .with("width", width)
            .with("vocabulary", vocabulary)
            .with("dtype", dtype::name(kind));
        let stepped = Stepped::new(trainer, device);
        let mut prepared = Self { stepped, source, parameters, peak: 0, device, case };
        let region = Region::start(device)?;
        for _ in 0..WARM_UP {
            prepared.step()?;
        }
        prepared.peak = region.finish()?.peak;
        Ok(prepared)
    }

    /// Runs a step on a batch that was drawn before it, and returns its seconds.
    fn step(&mut self) -> anyhow::Result<f64> {
        let drawn = self.source.next()?.context("the source has no end")?;
        self.stepped.step(drawn, self.source.state())
    }

    /// Figures of one round.
    fn measure(&mut self, arguments: &BenchArgs) -> anyhow::Result<Vec<Metric>> {
        let before = Region::start(self.device)?;
        let seconds = (0..arguments.steps).map(|_| self.step()).collect::<anyhow::Result<Vec<f64>>>()?;
        let peak = before.finish()?.peak;
        let replays = self.stepped.trainer.replays();
        let peak = if replays > 0 { self.peak } else { peak };
        let positions = (arguments.rows * arguments.length as usize) as f64;
        let rates: Vec<f64> = seconds.iter().map(|seconds| positions / seconds).collect();
        Ok(vec![
            Metric::of_samples("step_seconds", "s", &seconds),
            Metric::of_samples("positions_per_second", "tokens/s", &rates),
            Metric::exact("peak_bytes", "B", peak as f64),
            Metric::exact("parameters", "count", self.parameters as f64),
            Metric::exact("replayed_steps", "count", replays as f64),
        ])
    }
}
