//! `cargo xtask gpu-day`: tests, experiments and comparisons on a GPU, within ten minutes.
//!
//! The parts run in the order of their value, each in a process group of its own with a deadline, so that a part that
//! fails, crashes or hangs costs only its own time. Records are written as they come. With `--device cpu` the same parts
//! run at scale smoke: a rehearsal without a GPU, whose tests of CUDA skip themselves.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::cargo::{self, Optimization};
use crate::device::Device;
use crate::interrupt::Interrupt;
use crate::pages::Folder;
use crate::programs::Programs;
use crate::runner;
use crate::workspace::Workspace;

/// Where to run, and for how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Device: cuda or cuda:N; cpu rehearses the same parts at scale smoke
    #[arg(long, default_value = "cuda")]
    device: Device,
    /// Minutes after which no further part begins and the running one is ended
    #[arg(long, value_name = "N", default_value_t = 9.0)]
    minutes: f64,
    /// Run only these parts, separated by commas; an unknown name lists all
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,
    /// Write the report to DIR
    #[arg(long, value_name = "DIR", default_value = "gpu-day")]
    out: PathBuf,
}

/// The command of a part.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Work {
    /// `frugal doctor`: driver, device, measured rates.
    Doctor,
    /// The tests whose name contains one of these.
    Tests(Vec<String>),
    /// The tests of the kernels under `compute-sanitizer`.
    Sanitizer,
    /// An experiment, with its claims.
    Experiment,
    /// A comparison with PyTorch and its libraries.
    Comparison,
}

/// A part. An experiment or a comparison has the name that it has in the report.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    name: String,
    work: Work,
    /// Deadline in seconds.
    seconds: u64,
}

/// Reads the parts in their order.
fn parts() -> Result<Vec<Part>> {
    #[derive(Deserialize)]
    struct Parts {
        parts: Vec<Part>,
    }
    let Parts { parts } = toml::from_str(include_str!("gpu_day.toml")).context("gpu_day.toml")?;
    Ok(parts)
}

/// How a part ended.
#[derive(Clone, Debug, PartialEq)]
enum Verdict {
    Passed,
    Failed(String),
    /// Ended at its deadline, in seconds.
    Late(u64),
    /// Not run, and why.
    Skipped(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Failed(why) => write!(f, "FAILED: {why}"),
            Self::Late(seconds) => write!(f, "LATE: ended after {seconds} s"),
            Self::Skipped(why) => write!(f, "skipped: {why}"),
        }
    }
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    args.device.check()?;
    let mut parts = parts()?;
    if let Some(unknown) = args.only.iter().find(|name| parts.iter().all(|part| part.name != **name)) {
        let known: Vec<&str> = parts.iter().map(|part| &*part.name).collect();
        bail!("there is no part `{unknown}`; there are: {}", known.join(", "));
    }
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let folder = Folder::new(workspace, Some(&args.out))?;
    folder.create()?;
    // Built before the clock starts, as the parts run them: those of a rehearsal at scale smoke.
    let packages = ["experiments".to_owned(), "frugal-cli".to_owned()];
    let rehearsal = args.device == Device::Cpu;
    let optimization = if rehearsal { Optimization::Dev } else { Optimization::Release };
    let programs = Programs::prepare(workspace, &packages, args.device, optimization)?;
    let day = Day {
        program,
        workspace,
        programs: &programs,
        folder: &folder,
        device: args.device,
        interrupt: Interrupt::install()?,
        end: Instant::now() + Duration::from_secs_f64(60.0 * args.minutes.max(0.0)),
    };
    let mut rows = Vec::new();
    parts.retain(|part| args.only.is_empty() || args.only.contains(&part.name));
    for part in &parts {
        eprintln!("{} …", part.name);
        let start = Instant::now();
        let verdict = day.one(part).unwrap_or_else(|error| Verdict::Failed(format!("{error:#}")));
        let seconds = start.elapsed().as_secs_f64();
        eprintln!("{}: {verdict} ({seconds:.0} s)", part.name);
        rows.push((&*part.name, verdict, seconds));
        write_table(&folder.out, &rows)?;
    }
    println!("{}", table(&rows));
    println!("records and logs: {}", folder.out.display());
    let failed =
        rows.iter().filter(|(_, verdict, _)| matches!(verdict, Verdict::Failed(_) | Verdict::Late(_)));
    match failed.map(|(name, ..)| *name).collect::<Vec<_>>().as_slice() {
        [] => Ok(()),
        names => bail!("{} of {} parts failed: {}", names.len(), rows.len(), names.join(", ")),
    }
}

struct Day<'a> {
    /// This program: found before tests are built, which puts a new file in its place.
    program: PathBuf,
    workspace: &'a Workspace,
    programs: &'a Programs<'a>,
    folder: &'a Folder,
    device: Device,
    interrupt: Interrupt,
    end: Instant,
}

impl Day<'_> {
    fn one(&self, part: &Part) -> Result<Verdict> {
        let left = self.end.saturating_duration_since(Instant::now()).as_secs();
        if self.interrupt.wanted() {
            return Ok(Verdict::Skipped("interrupted".into()));
        }
        if left < 5 {
            return Ok(Verdict::Skipped("no time left".into()));
        }
        let mut command = match self.command(part)? {
            Ok(command) => command,
            Err(why) => return Ok(Verdict::Skipped(why)),
        };
        let log = self.folder.fresh_log(&format!("gpu-day-{}", part.name))?;
        let file = File::create(&log).with_context(|| format!("cannot write the log {}", log.display()))?;
        let errors = file.try_clone().context("cannot write a log twice")?;
        let seconds = part.seconds.min(left);
        let child = command
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(errors)
            // Its own children end with it.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run {}", command.get_program().display()))?;
        let status = self.wait(child, Duration::from_secs(seconds))?;
        Ok(match status {
            None => Verdict::Late(seconds),
            Some(status) if status.success() => Verdict::Passed,
            Some(status) => {
                let tail = runner::tail(&log, 50);
                let error = tail.iter().rev().find_map(|line| line.strip_prefix("error: "));
                Verdict::Failed(error.map_or_else(|| status.to_string(), str::to_owned))
            }
        })
    }

    /// Waits for a process group's leader; ends the group at the deadline or when the user interrupts. `None` if it was ended.
    fn wait(&self, mut child: Child, limit: Duration) -> Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait().context("cannot wait for a part")? {
                return Ok(Some(status));
            }
            if start.elapsed() >= limit || self.interrupt.wanted() {
                let group = format!("kill -KILL -{}", child.id());
                Command::new("sh").args(["-c", &group]).status().context("cannot end a part")?;
                child.wait().context("cannot wait for a part")?;
                return Ok(None);
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the part's process, or why it cannot run here.
    fn command(&self, part: &Part) -> Result<std::result::Result<Command, String>> {
        let (device, rehearsal) = (self.device.to_string(), self.device == Device::Cpu);
        let verb = |arguments: &[&str]| {
            let mut command = Command::new(&self.program);
            command.current_dir(&self.workspace.root).args(arguments);
            command
        };
        let out = |mut command: Command| {
            command.arg("--out").arg(&self.folder.out);
            command
        };
        Ok(Ok(match &part.work {
            Work::Doctor => {
                let mut command = self.programs.command("frugal-cli")?;
                command.arg("doctor");
                command
            }
            // After the second `--` because cargo takes one name, and the tests' own programs take several.
            Work::Tests(names) => {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                verb(&[&["test", "--", "--"], &names[..]].concat())
            }
            Work::Experiment => {
                let scale = if rehearsal { "smoke" } else { "paper" };
                out(verb(&["run-all", "--only", &part.name, "--device", &device, "--scale", scale]))
            }
            Work::Comparison => {
                if rehearsal {
                    return Ok(Err("not rehearsed; `cargo xtask compare` runs it on a CPU".into()));
                }
                let mut command = out(verb(&["compare", "--only", &part.name, "--device", &device]));
                if let Some(python) =
                    std::env::var_os("FRUGAL_PYTHON").filter(|_| self.workspace.bundle.is_some())
                {
                    command.arg("--python").arg(absolute(&python));
                }
                command
            }
            Work::Sanitizer => {
                let Some(sanitizer) = found("compute-sanitizer") else {
                    return Ok(Err("compute-sanitizer is neither in PATH nor in /usr/local/cuda/bin".into()));
                };
                let tests = self.workspace.bundle.iter().flat_map(|bundle| &bundle.tests);
                let Some(test) =
                    tests.into_iter().find(|test| (&*test.package, &*test.name) == ("kernels", "it"))
                else {
                    return Ok(Err("runs from a bundle, which has the tests as programs".into()));
                };
                let mut command = Command::new(sanitizer);
                command.args(["--tool", "memcheck", "--error-exitcode", "1"]);
                command.arg(self.workspace.root.join(&test.path)).arg("kernels_cuda");
                command.current_dir(&self.workspace.root).env("RUST_TEST_THREADS", "1");
                cargo::with_libtorch(&mut command, self.workspace);
                command
            }
        }))
    }
}

/// A program of CUDA's in `PATH`, or where CUDA installs itself.
fn found(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/local/cuda/bin")]);
    folders.map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// The program's path, if the name has none in it.
fn absolute(program: &OsString) -> PathBuf {
    let path = Path::new(program);
    if path.components().count() > 1 {
        path.to_owned()
    } else {
        found(&program.to_string_lossy()).unwrap_or(path.into())
    }
}

fn table(rows: &[(&str, Verdict, f64)]) -> String {
    let width = rows.iter().map(|(name, ..)| name.len()).max().unwrap_or(0);
    let line = |(name, verdict, seconds): &(&str, Verdict, f64)| {
        format!("{name:width$}  {seconds:5.0} s  {verdict}")
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn write_table(out: &Path, rows: &[(&str, Verdict, f64)]) -> Result<()> {
    let path = out.join("gpu-day.txt");
    std::fs::write(&path, table(rows) + "\n").with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn day<'a>(
        workspace: &'a Workspace,
        programs: &'a Programs<'a>,
        folder: &'a Folder,
        seconds: u64,
    ) -> Day<'a> {
        Day {
            program: std::env::current_exe().unwrap(),
            workspace,
            programs,
            folder,
            device: Device::Cpu,
            interrupt: Interrupt::default(),
            end: Instant::now() + Duration::from_secs(seconds),
        }
    }

    #[test]
    fn every_measured_part_is_an_experiment_or_a_comparison() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let specs = report::Specs::load(root).unwrap();
        for part in parts().unwrap() {
            let known = match part.work {
                Work::Experiment => specs.experiments.iter().any(|e| e.name == part.name),
                Work::Comparison => specs.comparisons.iter().any(|c| c.name == part.name),
                _ => true,
            };
            assert!(known, "{}", part.name);
        }
    }

    #[test]
    fn a_part_that_hangs_ends_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let workspace =
            Workspace { root: dir.path().to_owned(), bundle: Some(crate::workspace::Manifest::default()) };
        let programs = Programs::prepare_release(&workspace, &[], Device::Cpu).unwrap();
        let folder = Folder::new(&workspace, Some(dir.path())).unwrap();
        let day = day(&workspace, &programs, &folder, 60);
        let mut hangs = Command::new("sh");
        hangs.args(["-c", "sleep 1000 & wait"]).process_group(0).stdout(Stdio::piped());
        let mut child = hangs.spawn().unwrap();
        let mut output = child.stdout.take().unwrap();
        assert_eq!(day.wait(child, Duration::from_millis(100)).unwrap(), None);
        // The pipe is closed when the last process that holds it has ended.
        assert_eq!(std::io::read_to_string(&mut output).unwrap(), "");
        let child = Command::new("sh").args(["-c", "exit 3"]).process_group(0).spawn().unwrap();
        assert_eq!(day.wait(child, Duration::from_secs(10)).unwrap().and_then(|s| s.code()), Some(3));
    }

    #[test]
    fn without_time_nothing_begins() {
        let dir = tempfile::tempdir().unwrap();
        let workspace =
            Workspace { root: dir.path().to_owned(), bundle: Some(crate::workspace::Manifest::default()) };
        let programs = Programs::prepare_release(&workspace, &[], Device::Cpu).unwrap();
        let folder = Folder::new(&workspace, Some(dir.path())).unwrap();
        let verdict = day(&workspace, &programs, &folder, 0).one(&parts().unwrap()[0]).unwrap();
        assert_eq!(verdict, Verdict::Skipped("no time left".into()));
        assert_eq!(table(&[("doctor", verdict, 0.2)]), "doctor      0 s  skipped: no time left");
    }
}
