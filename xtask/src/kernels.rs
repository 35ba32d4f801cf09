//! `cargo xtask kernels`: what each CUDA kernel costs, without a GPU and without libtorch.
//!
//! `check`: NVRTC compiles the kernels, its assembler reports registers and spills, and the crate `ptx` runs a few rows of each and counts.
//! Times are predicted from those counts and the GPUs' data sheets. `sass` counts the instructions of the machine code.

mod compiler;
mod launches;
mod prediction;
mod sass;

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::setup::{self, CudaTools};
use crate::workspace::Workspace;
use compiler::{Compiled, Request, compile, registers};
use launches::{SAMPLES, Sample, run as run_sample};
use prediction::{MACHINES, Work};

/// The use of the kernels.
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
    /// Print counts of the machine code's instructions for each kernel, or one kernel's disassembly
    Sass {
        /// Architecture: 80 for A100, 90 for H100 and H200
        #[arg(long, default_value_t = 90)]
        architecture: u32,
        /// Print the disassembly of the kernels whose name contains this
        #[arg(long, value_name = "NAME")]
        kernel: Option<String>,
    },
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    workspace.need_sources("kernels")?;
    let tools = setup::cuda_tools(workspace)?;
    match &args.action {
        Action::Check { architecture } => check_all(workspace, &tools, *architecture),
        Action::Sass { architecture, kernel } => {
            sass::run(workspace, &tools, *architecture, kernel.as_deref())
        }
    }
}

fn check_all(workspace: &Workspace, tools: &CudaTools, architecture: u32) -> Result<()> {
    let mut rows = vec![header()];
    let mut problems = Vec::new();
    for sample in &SAMPLES {
        let row = check(&workspace.root, tools, sample, architecture, &mut problems);
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

/// Compiles a sample's kernel, and writes its machine code to a file if one is given.
fn compile_sample(
    root: &Path,
    tools: &CudaTools,
    sample: &Sample,
    architecture: u32,
    cubin: Option<&Path>,
) -> Result<Compiled> {
    let read = |name: &str| {
        let file = root.join(format!("crates/kernels/src/{name}.cuh"));
        std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))
    };
    let headers = [("prelude.cuh".to_owned(), read("cuda/prelude")?.into())].into_iter().collect();
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
        cubin,
    };
    compile(&tools.python, &request)
}

/// A row of the table.
fn check(
    root: &Path,
    tools: &CudaTools,
    sample: &Sample,
    architecture: u32,
    problems: &mut Vec<String>,
) -> Result<Vec<String>> {
    let Compiled { ptx, log, names } = compile_sample(root, tools, sample, architecture, None)?;
    let name = names.first().context("the compiler named no kernel")?;
    let (registers, spilled) = registers(&log, name).context("the assembler reported no registers")?;
    if spilled > 0 {
        problems.push(format!("{} spills {spilled} bytes of registers", sample.expression));
    }
    let module = ptx::Module::parse(&ptx)?;
    let kernel = module.kernel(name)?;
    let (few, many) = (2, 4);
    let (less, _) = run_sample(sample, kernel, few)?;
    let (more, shared) = run_sample(sample, kernel, many)?;
    let work = Work::extrapolated(
        (few.into(), Work::from_counts(&less)),
        (many.into(), Work::from_counts(&more)),
        sample.rows,
    );
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
