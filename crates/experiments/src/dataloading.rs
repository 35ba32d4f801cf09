//! `dataloading`: the cost of packing, sampling and loading, over one table of sizes.

pub mod embedded;
pub mod lengths;
mod packing;
mod sampler;
mod synthetic;
pub mod texts;
mod throughput;

use std::path::PathBuf;
use std::sync::Arc;

use clap::Subcommand;
use dataloading::{Samples, TokenStore};
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use tch::Device;

use texts::Text;
use throughput::{Origin, STRATEGIES, Strategy};

/// What is measured.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Measure padding and time of packing on one thread
    Pack(Sized),
    /// Measure the balanced sampler by the size of the data set
    Sampler(Sized),
    /// Count the lengths of texts' lines, and the padding of each batching strategy
    Lengths(Lengths),
    /// Measure tokens per second of the whole loader, by strategy and workers
    Throughput(Throughput),
    /// Generate the embedded data sets: an encyclopedia, word problems, their tokenizer
    Embedded(Embedded),
}

impl Verb {
    /// The scale of its records.
    fn scale(&self) -> Option<Scale> {
        match self {
            Self::Pack(arguments) | Self::Sampler(arguments) => Some(arguments.scale),
            Self::Lengths(arguments) => Some(arguments.scale),
            Self::Throughput(arguments) => Some(arguments.scale),
            Self::Embedded(_) => None,
        }
    }
}

#[derive(clap::Args)]
pub(crate) struct Embedded {
    /// Output folder; files of the same names are replaced
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
}

#[derive(clap::Args)]
pub(crate) struct Sized {
    /// Which sizes to measure
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    /// Measure these numbers of documents or samples instead
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(100..))]
    sizes: Vec<u32>,
}

#[derive(clap::Args)]
pub(crate) struct Lengths {
    /// How many epochs
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
}

#[derive(clap::Args)]
pub(crate) struct Throughput {
    /// How many samples
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    /// Number of samples, instead of the scale's
    #[arg(long, value_parser = clap::value_parser!(u32).range(100..))]
    samples: Option<u32>,
    /// A token store to read documents from, instead of generated samples
    #[arg(long, value_name = "FOLDER", conflicts_with = "samples")]
    data: Option<PathBuf>,
    /// These only: base, standard, balanced, sequenced, packed
    #[arg(long, value_delimiter = ',', value_parser = strategy)]
    strategies: Vec<Strategy>,
    /// Numbers of workers
    #[arg(long, value_delimiter = ',', default_value = "0,1,2")]
    workers: Vec<usize>,
    /// Measured epochs of each case, after one to warm up
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
}

fn strategy(text: &str) -> Result<Strategy, String> {
    let known = || STRATEGIES.iter().map(|strategy| strategy.name());
    STRATEGIES
        .into_iter()
        .find(|strategy| strategy.name() == text)
        .ok_or_else(|| format!("expected one of {}", known().collect::<Vec<_>>().join(", ")))
}

/// Figures of one case.
#[derive(Debug, Clone)]
pub struct Figures {
    /// The experiment.
    pub experiment: &'static str,
    /// Which case.
    pub case: Case,
    /// What came out.
    pub metrics: Vec<Metric>,
}

impl Figures {
    fn put(self, sink: &mut Sink) -> anyhow::Result<()> {
        sink.put(self.experiment, &self.case, self.metrics)
    }
}

/// How often a fast piece of work is repeated.
fn repeats(scale: Scale) -> usize {
    match scale {
        Scale::Smoke => 3,
        Scale::Laptop | Scale::Full | Scale::Paper => 21,
    }
}

/// Seconds of each of `repeats` runs, after one to warm up.
fn seconds<R>(repeats: usize, mut run: impl FnMut() -> R) -> Vec<f64> {
    std::hint::black_box(run());
    let sample = |_| {
        let began = std::time::Instant::now();
        let result = run();
        let seconds = began.elapsed().as_secs_f64();
        std::hint::black_box(result);
        seconds
    };
    (0..repeats).map(sample).collect()
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    if let Verb::Embedded(Embedded { out }) = verb {
        return Ok(embedded::write(out, embedded::SEED)?);
    }
    let device = runtime::device::select(&common.device)?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, verb.scale())?;
    let seed = common.seed;
    match verb {
        Verb::Embedded(_) => {}
        Verb::Pack(arguments) => {
            let sizes = sizes(arguments, packing::sizes(arguments.scale));
            let mut progress = Progress::new((sizes.len() * packing::PACKERS.len()) as u64);
            for size in sizes {
                for packer in packing::PACKERS {
                    progress.message(&format!("{size} documents, {}", packer.name()));
                    packing::measure(packer, size, seed, arguments.scale)?.put(&mut sink)?;
                    progress.step();
                }
            }
        }
        Verb::Sampler(arguments) => {
            let sizes = sizes(arguments, sampler::sizes(arguments.scale));
            let mut progress = Progress::new((sizes.len() * sampler::GAPS.len()) as u64);
            for size in sizes {
                sampler::permutation(size, seed, arguments.scale).put(&mut sink)?;
                for k in sampler::GAPS {
                    progress.message(&format!("{size} samples, k {k}"));
                    sampler::measure(size, k, seed, arguments.scale)?.put(&mut sink)?;
                    progress.step();
                }
            }
        }
        Verb::Lengths(arguments) => {
            let mut progress = Progress::new(Text::ALL.len() as u64);
            for text in Text::ALL {
                progress.message(text.name());
                for figures in lengths::measure(text, seed, arguments.scale)? {
                    figures.put(&mut sink)?;
                }
                progress.step();
            }
        }
        Verb::Throughput(arguments) => throughput(arguments, device, seed, &mut sink)?,
    }
    Ok(())
}

/// Strategies over samples in memory, or over a store. Where nothing was chosen: over both.
fn throughput(arguments: &Throughput, device: Device, seed: u64, sink: &mut Sink) -> anyhow::Result<()> {
    let chosen = |usual: &[Strategy]| {
        let strategies =
            if arguments.strategies.is_empty() { usual.to_vec() } else { arguments.strategies.clone() };
        let workers = |strategy| arguments.workers.iter().map(move |&workers| (strategy, workers));
        strategies.into_iter().flat_map(workers).collect::<Vec<_>>()
    };
    if let Some(folder) = &arguments.data {
        let store = Arc::new(TokenStore::open(folder)?);
        return cases(&store, Origin::Store, &chosen(&STRATEGIES), arguments, device, seed, sink);
    }
    let count = arguments.samples.map_or_else(|| throughput::size(arguments.scale), |n| n as usize);
    let samples = throughput::synthetic(count, seed);
    cases(&samples, Origin::Memory, &chosen(&STRATEGIES), arguments, device, seed, sink)?;
    drop(samples);
    if arguments.strategies.is_empty() && arguments.samples.is_none() {
        let folder = tempfile::tempdir()?;
        let tokens = throughput::store_tokens(arguments.scale);
        let store = Arc::new(texts::repeated(&folder.path().join("store"), tokens)?);
        let strategies = chosen(&[Strategy::Standard, Strategy::Packed]);
        cases(&store, Origin::Store, &strategies, arguments, device, seed, sink)?;
    }
    Ok(())
}

fn cases<S: Samples + 'static>(
    samples: &Arc<S>,
    origin: Origin,
    cases: &[(Strategy, usize)],
    arguments: &Throughput,
    device: Device,
    seed: u64,
    sink: &mut Sink,
) -> anyhow::Result<()> {
    let mut progress = Progress::new(cases.len() as u64);
    for &(strategy, workers) in cases {
        progress.message(&format!("{}, {workers} workers", strategy.name()));
        let samples = samples.clone();
        let epochs = arguments.epochs;
        throughput::measure(samples, origin, strategy, workers, device, epochs, seed)?.put(sink)?;
        progress.step();
    }
    Ok(())
}

fn sizes(arguments: &Sized, usual: &[usize]) -> Vec<usize> {
    if arguments.sizes.is_empty() {
        usual.to_vec()
    } else {
        arguments.sizes.iter().map(|&n| n as usize).collect()
    }
}
