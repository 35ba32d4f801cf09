//! `training bench`: steps of the GPT-2-like model on given sizes, for a comparison with another program.

use std::collections::VecDeque;
use std::time::Instant;

use dataloading::Batch;
use models::module::{parameter_count, trainable};
use models::{Gpt2Like, Gpt2LikeConfig};
use report::{Case, Metric};
use runtime::memory::Region;
use serde_json::Value;
use tch::Kind;
use training::Trainer;
use training::batches::{Batches, Synthetic};
use training::optimizer::{Adam, DeviceOptimizer, Group};
use training::trainer::TrainerConfig;

use crate::driver::Bench;

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
    /// Measured steps
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
}

pub(crate) fn run(bench: &mut Bench, arguments: &BenchArgs) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let &BenchArgs { rows, length, width, heads, vocabulary, steps } = arguments;
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
    const WARMUP: u64 = 2;
    let length = length as usize;
    let mut batches = Drawn::new(Synthetic {
        seed: bench.seed,
        vocabulary,
        rows,
        length,
        noise: 1,
        batches: Some(WARMUP + steps),
        device,
        position: 0,
    })?;
    let before = Region::start(device)?;
    let model = Box::new(Gpt2Like::new(&config, (Kind::Float, device))?);
    let parameters = parameter_count(&*model).total;
    let optimizer = DeviceOptimizer::new(Adam::default(), vec![Group::new(trainable(&*model), 1e-4)])?;
    let mut trainer =
        Trainer::new(model, Box::new(optimizer), TrainerConfig { steps: WARMUP, ..Default::default() })?;
    trainer.run(&mut batches, None)?;
    bench.expect(steps as usize);
    let mut seconds = Vec::new();
    for step in 0..steps {
        bench.message("GPT-2-like, a training step");
        trainer.options.steps = WARMUP + step + 1;
        let start = Instant::now();
        // Losses are read at the end, which waits for the device.
        trainer.run(&mut batches, None)?;
        seconds.push(start.elapsed().as_secs_f64());
        bench.step();
    }
    let peak = before.finish()?.peak_above_start();
    let positions = (rows * length) as f64;
    let rates: Vec<f64> = seconds.iter().map(|seconds| positions / seconds).collect();
    let case = Case::new()
        .with("rows", rows as u64)
        .with("length", length as u64)
        .with("width", width)
        .with("vocabulary", vocabulary);
    let metrics = vec![
        Metric::of_samples("step_seconds", "s", &seconds),
        Metric::of_samples("positions_per_second", "tokens/s", &rates),
        Metric::exact("peak_bytes", "B", peak as f64),
        Metric::exact("parameters", "count", parameters as f64),
    ];
    bench.put(&case, metrics)
}

/// Batches that were drawn before, so that a step is measured without its data, as the other program measures its own.
struct Drawn {
    source: Synthetic,
    batches: VecDeque<Batch>,
}

impl Drawn {
    fn new(mut source: Synthetic) -> training::Result<Self> {
        let mut batches = VecDeque::new();
        while let Some(batch) = source.next()? {
            batches.push_back(batch);
        }
        Ok(Self { source, batches })
    }
}

impl Batches for Drawn {
    fn next(&mut self) -> training::Result<Option<Batch>> {
        Ok(self.batches.pop_front())
    }

    fn state(&self) -> Value {
        self.source.state()
    }

    /// Does nothing: a drawn batch is not drawn again.
    fn resume(&mut self, state: &Value) -> training::Result<()> {
        Err(training::Error::config("drawn batches", format!("they cannot go back to {state}")))
    }
}
