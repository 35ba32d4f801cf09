//! `dataloading`: what packing, sampling and loading cost on this machine.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use dataloading::bench::texts::Text;
use dataloading::bench::throughput::{Origin, STRATEGIES, Strategy};
use dataloading::bench::{self, Figures};
use dataloading::{Samples, TokenStore};
use report::cli::{CommonArgs, Scale};
use report::{Environment, Progress, Record, RecordWriter};
use tch::Device;

/// Datasets, samplers, packing and loaders that resume
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Subcommand)]
enum Command {
    /// Measure how full rows get, and how long packing takes on one thread
    Pack(Sized),
    /// Measure the balanced sampler by the size of the data set
    Sampler(Sized),
    /// Count the lengths of texts' lines, and what each way of making batches pads
    Lengths(Lengths),
    /// Measure tokens per second of the whole loader, by strategy and workers
    Throughput(Throughput),
    /// Write the embedded data sets (an encyclopedia, word problems, their tokenizer) as the generator makes them
    Embedded(Embedded),
}

#[derive(clap::Args)]
struct Embedded {
    /// The folder that they go to; what is there of the same names is replaced
    #[arg(long, value_name = "FOLDER")]
    out: std::path::PathBuf,
}

#[derive(clap::Args)]
struct Sized {
    /// Which sizes to measure
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    /// Measure these numbers of documents or samples instead
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(100..))]
    sizes: Vec<u32>,
}

#[derive(clap::Args)]
struct Lengths {
    /// How many epochs
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
}

#[derive(clap::Args)]
struct Throughput {
    /// How many samples
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    /// So many samples instead
    #[arg(long, value_parser = clap::value_parser!(u32).range(100..))]
    samples: Option<u32>,
    /// The documents of this token store instead
    #[arg(long, value_name = "FOLDER", conflicts_with = "samples")]
    data: Option<std::path::PathBuf>,
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

fn main() -> ExitCode {
    let cli = Cli::parse();
    report::cli::run(|| match &cli.command {
        Command::Embedded(Embedded { out }) => {
            Ok(dataloading::embedded::write(out, dataloading::embedded::SEED)?)
        }
        _ => run(&cli),
    })
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    let device = runtime::device::select(&cli.common.device)?;
    let mut sink = Sink {
        records: cli.common.open_records()?,
        environment: runtime::device::environment(device)?,
        json: cli.common.json,
    };
    let seed = cli.common.seed;
    match &cli.command {
        Command::Embedded(_) => {}
        Command::Pack(arguments) => {
            let sizes = sizes(arguments, bench::packing::sizes(arguments.scale));
            let mut progress = Progress::new((sizes.len() * bench::packing::PACKERS.len()) as u64);
            for size in sizes {
                for packer in bench::packing::PACKERS {
                    progress.message(&format!("{size} documents, {}", packer.name()));
                    sink.put(&bench::packing::measure(packer, size, seed, arguments.scale)?)?;
                    progress.step();
                }
            }
        }
        Command::Sampler(arguments) => {
            let sizes = sizes(arguments, bench::sampler::sizes(arguments.scale));
            let mut progress = Progress::new((sizes.len() * bench::sampler::GAPS.len()) as u64);
            for size in sizes {
                sink.put(&bench::sampler::permutation(size, seed, arguments.scale))?;
                for k in bench::sampler::GAPS {
                    progress.message(&format!("{size} samples, k {k}"));
                    sink.put(&bench::sampler::measure(size, k, seed, arguments.scale)?)?;
                    progress.step();
                }
            }
        }
        Command::Lengths(arguments) => {
            let mut progress = Progress::new(Text::ALL.len() as u64);
            for text in Text::ALL {
                progress.message(text.name());
                for figures in bench::lengths::measure(text, seed, arguments.scale)? {
                    sink.put(&figures)?;
                }
                progress.step();
            }
        }
        Command::Throughput(arguments) => throughput(arguments, device, seed, &mut sink)?,
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
    let count = arguments.samples.map_or_else(|| bench::throughput::size(arguments.scale), |n| n as usize);
    let samples = bench::throughput::synthetic(count, seed);
    cases(&samples, Origin::Memory, &chosen(&STRATEGIES), arguments, device, seed, sink)?;
    drop(samples);
    if arguments.strategies.is_empty() && arguments.samples.is_none() {
        let folder = tempfile::tempdir()?;
        let tokens = bench::throughput::store_tokens(arguments.scale);
        let store = Arc::new(bench::texts::repeated(&folder.path().join("store"), tokens)?);
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
        sink.put(&bench::throughput::measure(samples, origin, strategy, workers, device, epochs, seed)?)?;
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

/// Where figures go.
struct Sink {
    records: Option<RecordWriter>,
    environment: Environment,
    json: bool,
}

impl Sink {
    #[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
    fn put(&mut self, figures: &Figures) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        let case: Vec<String> = figures.case.0.iter().map(|(key, value)| format!("{key} {value}")).collect();
        if !self.json {
            writeln!(out, "{}", case.join(", ").replace('"', ""))?;
        }
        for metric in &figures.metrics {
            let record = Record {
                experiment: figures.experiment.into(),
                case: figures.case.clone(),
                metric: metric.clone(),
                environment: self.environment.clone(),
            };
            if let Some(records) = &mut self.records {
                records.write(&record)?;
            }
            if self.json {
                writeln!(out, "{}", serde_json::to_string(&record)?)?;
            } else if let Some(value) = metric.value {
                writeln!(out, "    {:24} {}", metric.name, report::unit::human(value, &metric.unit))?;
            }
        }
        Ok(())
    }
}
