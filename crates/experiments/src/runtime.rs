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

use crate::driver::{Bench, Driver};
use cost::Part;

/// The group of figures to measure.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Print the device, its memory, and libtorch's version
    Info,
    /// Measure the overhead of tracking, counting and hand-written functions
    Cost,
    /// Measure the matrix products of training, by every implementation that is there
    Products,
    /// Compare the fused norms with libtorch's
    Norms,
    /// Compare the rotary embedding and SwiGLU's product with chains of libtorch's operators
    FusedPieces,
    /// Measure each fused kernel against a copy of as many bytes and against libtorch's operators
    Kernels,
    /// Compare a step of Adam on the CPU with libtorch's fused kernel, in fp32 and in mixed precision
    Adam {
        /// Parameters of the step; those of `smoke` fit a cache
        #[arg(long, value_parser = clap::value_parser!(i64).range(1..))]
        parameters: Option<i64>,
    },
    /// Compare transfers between two processes with Gloo's own collectives
    Collectives,
    /// A process of `collectives`; rank 0 prints the seconds of each round
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

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        let parts = |name: &str, parts: fn(&Bench) -> Vec<Part>| {
            driver.run(name, |bench| measure(bench, parts(bench)))
        };
        match self {
            Self::Info => info(&driver.common),
            Self::Cost => parts("runtime-cost", cost::parts),
            Self::Products => parts("products", products::parts),
            Self::Norms => parts("norms", norms::parts),
            Self::FusedPieces => parts("fused-pieces", pieces::parts),
            Self::Kernels => parts("kernels", kernels::parts),
            Self::Adam { parameters } => {
                driver.run("cpu-adam", |bench| measure(bench, adam::parts(bench, *parameters)))
            }
            Self::Collectives => parts("collectives", collectives::parts),
            Self::CollectivesRank { rounds } => collectives::rank(*rounds),
            Self::SmallOperators { tracked, operators } => {
                writeln!(std::io::stdout(), "{:e}", cost::small_operators(*tracked, *operators)?)?;
                Ok(())
            }
        }
    }
}

/// Measures groups of figures, one after the other.
fn measure(bench: &mut Bench, parts: Vec<Part>) -> anyhow::Result<()> {
    let device = bench.device_flag().to_owned();
    let label = |part: &Part| part.about.to_owned();
    bench.each(parts, label, |bench, part| {
        for (case, metric) in (part.run)(bench.device, bench.scale)? {
            bench.put(&case.with("device", device.as_str()), vec![metric])?;
        }
        Ok(())
    })
}

fn info(common: &report::cli::CommonArgs) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    let memory = runtime::device::memory_info(device)?;
    let environment = crate::environment::detect(device)?;
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
