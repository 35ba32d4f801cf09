//! `cargo xtask kernels check`: what each CUDA kernel costs, without a GPU and without libtorch.
//!
//! NVRTC compiles the kernels, its assembler reports registers and spills, and the crate `ptx` runs a few rows of each and counts.
//! Times are predicted from those counts and the GPUs' data sheets.

mod compiler;
mod launches;
mod prediction;

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::setup;
use crate::workspace::Workspace;
use compiler::{Compiled, Request, compile, registers};
use launches::{SAMPLES, Sample, run as run_sample};
use prediction::{MACHINES, Work};

/// What is done with the kernels.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Print registers, shared memory, sectors and predicted times of each kernel
    Check {
        /// Architecture: 80 for A100, 90 for H100 and H200
        #[arg(long, default_value_t = 90)]
        architecture: u32,
    },
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    workspace.need_sources("kernels")?;
    let Action::Check { architecture } = args.action;
    let tools = setup::cuda_tools(workspace)?;
    let mut rows = vec![header()];
    let mut problems = Vec::new();
    for sample in &SAMPLES {
        let row = check(&workspace.root, &tools, sample, architecture, &mut problems);
        rows.push(row.with_context(|| sample.expression)?);
    }
    print(&rows);
    println!(
        "\nTimes are predicted for sm_{architecture} from bytes, instructions and data sheets (memory at 0.9 of its nominal rate), and \
         not measured."
    );
    if !problems.is_empty() {
        bail!("{}", problems.join("; "));
    }
    Ok(())
}

fn header() -> Vec<String> {
    let fixed = ["kernel", "size", "registers", "spilled", "shared", "sectors", "bound"];
    fixed.into_iter().chain(MACHINES.iter().map(|machine| machine.name)).map(str::to_owned).collect()
}

/// A row of the table.
fn check(
    root: &Path,
    tools: &setup::CudaTools,
    sample: &Sample,
    architecture: u32,
    problems: &mut Vec<String>,
) -> Result<Vec<String>> {
    let folder = root.join("crates/runtime/cpp/cuda");
    let read = |name: &str| {
        let file = folder.join(format!("{name}.cuh"));
        std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))
    };
    let headers = [("prelude.cuh".to_owned(), read("prelude")?.into())].into_iter().collect();
    let options = [
        format!("--gpu-architecture=sm_{architecture}"),
        "-std=c++17".to_owned(),
        "--ptxas-options=-v".to_owned(),
    ];
    let (text, expressions) = (read(sample.file)?, [sample.expression]);
    let request = Request {
        folder: &tools.libraries,
        text: &text,
        headers,
        expressions: &expressions,
        options: &options,
    };
    let Compiled { ptx, log, names } = compile(&tools.python, &request)?;
    let name = names.first().context("the compiler named no kernel")?;
    let (registers, spilled) = registers(&log, name).context("the assembler told no registers")?;
    if spilled > 0 {
        problems.push(format!("{} spills {spilled} bytes of registers", sample.expression));
    }
    let module = ptx::Module::parse(&ptx)?;
    let kernel = module.kernel(name)?;
    let (few, many) = (2, 4);
    let (less, _) = run_sample(sample, kernel, few)?;
    let (more, shared) = run_sample(sample, kernel, many)?;
    let work = Work::extrapolated((few.into(), Work::of(&less)), (many.into(), Work::of(&more)), sample.rows);
    let mut row = vec![
        sample.expression.to_owned(),
        sample.size.to_owned(),
        registers.to_string(),
        format!("{spilled} B"),
        format!("{shared} B"),
        format!("{:.2} × least", more.sector_ratio()),
        work.on(&MACHINES[MACHINES.len() - 1]).1.to_owned(),
    ];
    row.extend(MACHINES.iter().map(|machine| format!("{:.0} µs", 1e6 * work.on(machine).0)));
    Ok(row)
}

fn print(rows: &[Vec<String>]) {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        println!("{}", cells.join("  ").trim_end());
    }
}
