//! `runtime`: the rates of this machine, and the runtime's overhead.

mod adam;
mod collectives;
mod cost;
mod kernels;
mod norms;
mod pieces;
mod products;

use std::io::Write;

use clap::Subcommand;
use report::cli::{CommonArgs, Scale};
use report::{Progress, Sink};

/// What is measured.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Print the device, its memory, and libtorch's version
    Info,
    /// Measure the overhead of tracking, counting and hand-written functions
    Cost {
        /// How long to measure
        #[arg(long, value_enum, default_value_t)]
        scale: Scale,
    },
    /// Measure the matrix products of training, by every implementation that is there
    Products {
        /// How long to measure
        #[arg(long, value_enum, default_value_t)]
        scale: Scale,
    },
    /// Compare the fused norms with libtorch's
    Norms {
        /// How long to measure
        #[arg(long, value_enum, default_value_t)]
        scale: Scale,
    },
    /// Compare the rotary embedding and SwiGLU's product with chains of libtorch's operators
    FusedPieces {
        /// How long to measure
        #[arg(long, value_enum, default_value_t)]
        scale: Scale,
    },
    /// Measure each fused kernel against a copy of as many bytes and against libtorch's operators
    Kernels {
        /// How long to measure
        #[arg(long, value_enum, default_value_t)]
        scale: Scale,
    },
    /// Compare a step of Adam on the CPU with libtorch's fused kernel, in fp32 and in mixed precision
    Adam {
        /// How long to measure
        #[arg(long, value_enum, default_value_t)]
        scale: Scale,
        /// Parameters of the step; those of `smoke` fit a cache
        #[arg(long, value_parser = clap::value_parser!(i64).range(1..))]
        parameters: Option<i64>,
    },
    /// Compare transfers between two processes with Gloo's own collectives
    Collectives {
        /// How long to measure
        #[arg(long, value_enum, default_value_t)]
        scale: Scale,
    },
    /// One of the processes of `collectives`; rank 0 prints the seconds of each round
    #[command(hide = true)]
    CollectivesRank {
        #[arg(long)]
        rounds: usize,
    },
    /// A loop of small operators; prints seconds per operator (run by `cost`, in processes of their own)
    #[command(hide = true)]
    SmallOperators {
        #[arg(long)]
        tracked: bool,
        #[arg(long)]
        operators: u32,
    },
}

pub(crate) fn run(common: &CommonArgs, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Info => info(common),
        Verb::Cost { scale } => measure(common, *scale, cost::parts),
        Verb::Products { scale } => measure(common, *scale, products::parts),
        Verb::Norms { scale } => measure(common, *scale, norms::parts),
        Verb::FusedPieces { scale } => measure(common, *scale, pieces::parts),
        Verb::Kernels { scale } => measure(common, *scale, kernels::parts),
        Verb::Adam { scale, parameters } => measure(common, *scale, |_| adam::parts(*scale, *parameters)),
        Verb::Collectives { scale } => measure(common, *scale, |_| collectives::parts()),
        Verb::CollectivesRank { rounds } => collectives::rank(*rounds),
        Verb::SmallOperators { tracked, operators } => {
            writeln!(std::io::stdout(), "{:e}", cost::small_operators(*tracked, *operators)?)?;
            Ok(())
        }
    }
}

fn info(common: &CommonArgs) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    let memory = runtime::device::memory_info(device)?;
    let environment = crate::environment::of(device)?;
    let mut out = std::io::stdout().lock();
    if common.json {
        let text = serde_json::json!({
            "environment": environment,
            "memory_free_bytes": memory.free,
            "memory_total_bytes": memory.total,
        });
        writeln!(out, "{text}")?;
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    writeln!(out, "libtorch  {}", runtime::torch_version())?;
    writeln!(out, "device    {}", environment.device)?;
    writeln!(out, "memory    {:.1} of {:.1} GiB free", gib(memory.free), gib(memory.total))?;
    writeln!(out, "processor {}, {} threads", environment.cpu, environment.threads)?;
    Ok(())
}

fn measure(
    common: &CommonArgs,
    scale: Scale,
    parts: impl FnOnce(tch::Device) -> Vec<cost::Part>,
) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    runtime::random::seed(common.seed)?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, scale)?;
    let parts = parts(device);
    let mut progress = Progress::new(parts.len() as u64);
    for part in parts {
        progress.message(part.about);
        for (case, metric) in (part.run)(device, scale)? {
            sink.put(part.experiment, &case.with("device", common.device.as_str()), vec![metric])?;
        }
        progress.step();
    }
    Ok(())
}
