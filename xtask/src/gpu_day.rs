//! `cargo xtask gpu-day`: tests, experiments and comparisons on a GPU, within minutes.
//!
//! A plan ([`plan`]) lists parts in the order of their value, each in a process group of its own with a deadline, so that a part that
//! fails, crashes or hangs costs only its own time. What it has recorded until then stays: comparisons publish their records round by
//! round. Peers that compile begin when the day begins, in the background on cores of their own. With `--device cpu` the same parts run
//! at their smallest sizes within half of their deadlines: a rehearsal without a GPU, whose tests of CUDA skip themselves.

mod background;
mod part;
mod plan;
mod table;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use report::Specs;

use crate::cargo::Optimization;
use crate::device::Device;
use crate::interrupt::Interrupt;
use crate::pages::Folder;
use crate::programs::Programs;
use crate::workspace::Workspace;
use background::Background;
use part::Day;
use plan::Plans;
use table::{Row, Verdict};

/// Where to run, and for how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Device: cuda or cuda:N; cpu rehearses the same parts at their smallest sizes
    #[arg(long, default_value = "cuda")]
    device: Device,
    /// Parts to run; `help` lists the plans with their parts and deadlines
    #[arg(long, value_name = "NAME", default_value = "next")]
    plan: String,
    /// Minutes after which no further part begins and the running one is ended [default: the plan's]
    #[arg(long, value_name = "N")]
    minutes: Option<f64>,
    /// Run only these parts of the plan, separated by commas; an unknown name lists all
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,
    /// Use this Python for the comparisons [default: FRUGAL_PYTHON]
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Write the report to a folder in DIR that has the device's name
    #[arg(long, value_name = "DIR", default_value = "gpu-day")]
    out: PathBuf,
    /// Kill this part when it has its first records, and check that this costs its remaining records only
    #[arg(long, value_name = "NAME", hide = true)]
    kill: Option<String>,
    /// Read the plans from FILE
    #[arg(long, value_name = "FILE", hide = true)]
    plans: Option<PathBuf>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let plans = Plans::read(args.plans.as_deref())?;
    if args.plan == "help" {
        println!("{}", plans.help());
        return Ok(());
    }
    let plan = plans.select(&args.plan, &args.only)?;
    let specs = Specs::load(&workspace.root)?;
    args.device.check()?;
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let folder = Folder::new(workspace, Some(&args.out.join(args.device.folder_name())))?;
    folder.create()?;
    // Built before the clock starts, as the parts run them: those of a rehearsal at scale smoke.
    let packages = ["experiments".to_owned(), "frugal-cli".to_owned()];
    let rehearsal = args.device == Device::Cpu;
    let optimization = if rehearsal { Optimization::Dev } else { Optimization::Release };
    let programs = if rehearsal && workspace.bundle.is_none() {
        Programs::beside_tests(workspace, &packages, args.device)?
    } else {
        Programs::prepare(workspace, &packages, args.device, optimization)?
    };
    let share = if rehearsal { 0.5 } else { 1.0 };
    let minutes = args.minutes.unwrap_or(plan.minutes * share).max(0.0);
    let caches = tempfile::tempdir().context("cannot create a folder for what peers compile")?;
    let mut day = Day {
        program,
        workspace,
        specs: &specs,
        programs: &programs,
        folder: &folder,
        device: args.device,
        interrupt: Interrupt::install()?,
        end: Instant::now() + Duration::from_secs_f64(60.0 * minutes),
        share,
        caches: caches.path().to_owned(),
        kill: args.kill.clone(),
        python: args.python.clone().or_else(|| std::env::var_os("FRUGAL_PYTHON").map(PathBuf::from)),
        background: Vec::new(),
    };
    for work in &plan.background {
        let started = Background::start(work, &day)?;
        day.background.push(started);
    }
    let mut rows: Vec<Row> = Vec::new();
    for part in &plan.parts {
        eprintln!("{} …", part.name);
        let start = Instant::now();
        let (verdict, beside) =
            day.one(part).unwrap_or_else(|error| (Verdict::Failed(format!("{error:#}")), None));
        let seconds = start.elapsed().as_secs_f64();
        eprintln!("{}: {verdict} ({seconds:.0} s)", part.name);
        rows.push(Row { name: part.name.clone(), verdict, seconds, beside, background: false });
        table::write(&folder.out, &rows)?;
    }
    rows.extend(day.background.drain(..).map(|work| work.finish(&folder)));
    table::write(&folder.out, &rows)?;
    println!("{}", table::text(&rows));
    println!("records and logs: {}", folder.out.display());
    if let Some(killed) = &args.kill {
        let part = plan.parts.iter().find(|part| part.name == *killed);
        let part =
            part.with_context(|| format!("the part {killed}, which was to be killed, is not in the plan"))?;
        return table::check_rehearsal(&rows, part, &folder);
    }
    let failed: Vec<&str> =
        rows.iter().filter(|row| row.verdict.is_failure()).map(|row| &*row.name).collect();
    match failed.as_slice() {
        [] => Ok(()),
        names => bail!("{} of {} parts failed: {}", names.len(), rows.len(), names.join(", ")),
    }
}
