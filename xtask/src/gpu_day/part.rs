//! One part of a day: its command, its deadline, and what it leaves.

use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use report::cli::Scale;
use report::environment::BESIDE_VARIABLE;
use report::{RunState, Specs};

use super::background::{Background, cores};
use super::plan::{Part, Work};
use super::table::Verdict;
use crate::cargo;
use crate::compare::NO_MODULE;
use crate::device::Device;
use crate::interrupt::Interrupt;
use crate::pages::Folder;
use crate::programs::Programs;
use crate::runner::{self, TICK};
use crate::stamp::Stamp;
use crate::workspace::Workspace;

/// What all parts share.
pub(super) struct Day<'a> {
    /// This program: found before tests are built, which puts a new file in its place.
    pub(super) program: PathBuf,
    pub(super) workspace: &'a Workspace,
    pub(super) specs: &'a Specs,
    pub(super) programs: &'a Programs<'a>,
    pub(super) folder: &'a Folder,
    pub(super) device: Device,
    pub(super) interrupt: Interrupt,
    pub(super) end: Instant,
    /// Share of each deadline: a half in a rehearsal.
    pub(super) share: f64,
    /// Folder of the caches that peers compile into and read.
    pub(super) caches: PathBuf,
    /// The part to kill, for a rehearsal.
    pub(super) kill: Option<String>,
    /// The Python of the peers, where one was given.
    pub(super) python: Option<PathBuf>,
    pub(super) background: Vec<Background>,
}

/// How a process was left.
#[derive(Debug, PartialEq)]
enum Left {
    Ended(ExitStatus),
    Late,
}

impl Day<'_> {
    /// Runs a part. Returns its verdict, and what ran beside it.
    pub(super) fn one(&mut self, part: &Part) -> Result<(Verdict, Option<String>)> {
        let skipped = |why: &str| Ok((Verdict::Skipped(why.into()), None));
        if self.interrupt.wanted() {
            return skipped("interrupted");
        }
        self.wait_for(part);
        let left = self.end.saturating_duration_since(Instant::now());
        if left.as_secs() < 2 {
            return skipped("no time left");
        }
        let command = match self.command(part)? {
            Ok(command) => command,
            Err(why) => return skipped(&why),
        };
        let (mut command, beside) = self.beside(part, command);
        let log = self.folder.fresh_log(&format!("gpu-day-{}", part.name))?;
        let file = File::create(&log).with_context(|| format!("cannot write the log {}", log.display()))?;
        let errors = file.try_clone().context("cannot write a log twice")?;
        self.folder.forget_rounds(part.subject());
        let limit = Duration::from_secs_f64(part.seconds as f64 * self.share).min(left);
        let child = command
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(errors)
            // Its own children end with it.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run {}", command.get_program().display()))?;
        let (process, start) = (child.id(), Instant::now());
        let killed = self.kill.as_ref() == Some(&part.name);
        let has_recorded = |day: &Self| match part.work {
            Work::Experiment => day.folder.has_unfinished(part.subject(), process),
            _ => day.folder.rounds(part.subject()).is_some(),
        };
        let left = self.wait(child, limit, |day| killed && has_recorded(day))?;
        let verdict = match left {
            Left::Ended(status) if status.success() => Verdict::Passed,
            Left::Ended(status) if status.code() == Some(i32::from(NO_MODULE)) => {
                Verdict::Skipped(error_of(&log).unwrap_or_default())
            }
            Left::Ended(status) => {
                let how = self.message_of(part, status).unwrap_or_else(|| how_it_ended(status, &log));
                self.incomplete(part, process, &how, None)?
            }
            Left::Late => {
                let seconds = start.elapsed().as_secs();
                self.incomplete(part, process, &format!("ended after {seconds} s"), Some(seconds))?
            }
        };
        Ok((verdict, beside))
    }

    /// The verdict on a part that did not come to its end, `late` at its deadline. Keeps what it has recorded.
    fn incomplete(&self, part: &Part, process: u32, how: &str, late: Option<u64>) -> Result<Verdict> {
        let kept = match part.work {
            Work::Comparison => match self.folder.rounds(part.subject()) {
                Some(rounds) if rounds.are_enough() => {
                    return Ok(Verdict::Enough { rounds, how: how.to_owned() });
                }
                Some(rounds) => {
                    format!("{} of {} rounds, {} needed", rounds.done, rounds.total, rounds.needed)
                }
                None => "no round was finished".to_owned(),
            },
            Work::Experiment => {
                format!("{} records are kept", self.folder.publish_unfinished(part.subject(), process)?)
            }
            _ => "its log is kept".to_owned(),
        };
        Ok(match late {
            Some(seconds) => Verdict::Late { seconds, kept },
            None => Verdict::Failed(format!("{how}; {kept}")),
        })
    }

    /// The message with which an experiment or a comparison failed.
    fn message_of(&self, part: &Part, status: ExitStatus) -> Option<String> {
        let measures = matches!(part.work, Work::Experiment | Work::Comparison) && status.code().is_some();
        let stamp = Stamp::read(&self.folder.run(), part.subject()).filter(|_| measures)?;
        match stamp.outcome.state {
            RunState::Failed { message } => Some(message),
            _ => None,
        }
    }

    /// Waits until the background work that a part needs has ended.
    fn wait_for(&mut self, part: &Part) {
        let Some(name) = &part.waits_for else { return };
        let (end, interrupt) = (self.end, self.interrupt.clone());
        if let Some(work) = self.background.iter_mut().find(|work| work.name == *name) {
            while work.runs() && Instant::now() < end && !interrupt.wanted() {
                thread::sleep(TICK);
            }
        }
    }

    /// The command, on cores that the background leaves free while it runs. A timed part's records say what runs beside it.
    fn beside(&mut self, part: &Part, command: Command) -> (Command, Option<String>) {
        let running = |work: &mut Background| work.runs().then(|| work.name.clone());
        let running: Vec<String> = self.background.iter_mut().filter_map(running).collect();
        let divided = cores().filter(|_| !running.is_empty());
        let Some((cores, others)) = divided else { return (command, None) };
        let mut command = self.pinned(&cores, command);
        let beside = format!("{} on {} other cores", running.join(", "), others.len());
        command.env(BESIDE_VARIABLE, &beside);
        (command, Some(beside).filter(|_| part.work.is_timed()))
    }

    /// The command on these cores only.
    pub(super) fn pinned(&self, cores: &[usize], command: Command) -> Command {
        let mut pinned = Command::new("taskset");
        let list: Vec<String> = cores.iter().map(usize::to_string).collect();
        pinned.arg("-c").arg(list.join(",")).arg(command.get_program()).args(command.get_args());
        pinned.current_dir(command.get_current_dir().unwrap_or(&self.workspace.root));
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => pinned.env(name, value),
                None => pinned.env_remove(name),
            };
        }
        pinned
    }

    /// Waits for a process group's leader; ends the group at the deadline, when the user interrupts, or to rehearse a part that is killed.
    fn wait(&self, mut child: Child, limit: Duration, kills: impl Fn(&Self) -> bool) -> Result<Left> {
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait().context("cannot wait for a part")? {
                return Ok(Left::Ended(status));
            }
            let killed = kills(self);
            if killed || start.elapsed() >= limit || self.interrupt.wanted() {
                let status = end_group(&mut child)?;
                return Ok(if killed { Left::Ended(status) } else { Left::Late });
            }
            thread::sleep(TICK);
        }
    }

    /// A verb of this program, which takes the programs that the day has built.
    fn verb(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(&self.program);
        command.current_dir(&self.workspace.root).args(arguments);
        self.programs.give(&mut command)?;
        Ok(command)
    }

    /// `compare` of one comparison, with the Python of the peers and the caches of what they compile.
    pub(super) fn compare(&self, name: &str, dtype: Option<&str>, arguments: &[&str]) -> Result<Command> {
        let mut command = self.verb(&["compare", "--only", name, "--device", &self.device.to_string()])?;
        command.args(arguments).arg("--out").arg(&self.folder.out);
        if let Some(dtype) = dtype {
            command.args(["--dtype", dtype]);
        }
        if self.device == Device::Cpu {
            command.arg("--smoke");
        }
        let linked = || crate::torch::python_beside(&self.workspace.libtorch());
        if let Some(python) = self.python.clone().or_else(|| linked().filter(|_| self.rehearses())) {
            command.arg("--python").arg(absolute(&python));
        }
        command.env("TORCHINDUCTOR_CACHE_DIR", self.caches.join("inductor"));
        command.env("TRITON_CACHE_DIR", self.caches.join("triton"));
        Ok(command)
    }

    fn rehearses(&self) -> bool {
        self.device == Device::Cpu
    }

    /// Returns the part's process, or why it cannot run here.
    fn command(&self, part: &Part) -> Result<std::result::Result<Command, String>> {
        let device = self.device.to_string();
        Ok(Ok(match &part.work {
            Work::Doctor => {
                let mut command = self.programs.command("frugal-cli")?;
                command.arg("doctor");
                command
            }
            // After the second `--` because cargo takes one name, and the tests' own programs take several.
            Work::Tests(names) => {
                let mut arguments = vec!["test", "--"];
                if self.workspace.bundle.is_none() {
                    arguments.extend(["--workspace", "--tests"]);
                }
                arguments.push("--");
                arguments.extend(names.iter().map(String::as_str));
                self.verb(&arguments)?
            }
            Work::Experiment => {
                let scale = if self.rehearses() { Scale::Smoke } else { Scale::Paper };
                let (name, scale_name) = (part.subject(), scale.name());
                if self.specs.experiments.iter().any(|known| known.name == name && !known.runs_at(scale)) {
                    return Ok(Err(format!("it does not run at scale {scale_name}")));
                }
                let mut command =
                    self.verb(&["run-all", "--only", name, "--device", &device, "--scale", scale_name])?;
                command.arg("--out").arg(&self.folder.out);
                command
            }
            Work::Comparison => self.compare(part.subject(), part.dtype.as_deref(), &[])?,
            Work::Sanitizer => return self.sanitizer(),
        }))
    }

    /// The tests of the kernels under `compute-sanitizer`.
    fn sanitizer(&self) -> Result<std::result::Result<Command, String>> {
        let Some(sanitizer) = found("compute-sanitizer") else {
            return Ok(Err("compute-sanitizer is neither in PATH nor in /usr/local/cuda/bin".into()));
        };
        let tests = self.workspace.bundle.iter().flat_map(|bundle| &bundle.tests);
        let Some(test) = tests.into_iter().find(|test| (&*test.package, &*test.name) == ("kernels", "it"))
        else {
            return Ok(Err("runs from a bundle, which has the tests as programs".into()));
        };
        let mut command = Command::new(sanitizer);
        command.args(["--tool", "memcheck", "--error-exitcode", "1"]);
        command.arg(self.workspace.root.join(&test.path)).arg("kernels_cuda");
        command.current_dir(&self.workspace.root).env("RUST_TEST_THREADS", "1");
        cargo::with_libtorch(&mut command, self.workspace);
        Ok(Ok(command))
    }
}

/// How a process ended without success: by a signal, or with the last error in its log.
pub(super) fn how_it_ended(status: ExitStatus, log: &Path) -> String {
    match status.signal() {
        Some(signal) => format!("ended by {}", runner::signal_name(signal)),
        None => error_of(log).unwrap_or_else(|| status.to_string()),
    }
}

/// The last error in a log.
fn error_of(log: &Path) -> Option<String> {
    runner::tail(log, 50).iter().rev().find_map(|line| line.strip_prefix("error: ")).map(str::to_owned)
}

/// Ends a process and its children.
pub(super) fn end_group(child: &mut Child) -> Result<ExitStatus> {
    let group = format!("kill -KILL -{}", child.id());
    Command::new("sh").args(["-c", &group]).status().context("cannot end a part")?;
    child.wait().context("cannot wait for a part")
}

/// A program of CUDA's or of the system in `PATH`, or where CUDA installs itself.
pub(super) fn found(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/local/cuda/bin")]);
    folders.map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// The program's path, if the name has none in it.
fn absolute(program: &Path) -> PathBuf {
    if program.components().count() > 1 {
        program.to_owned()
    } else {
        found(&program.to_string_lossy()).unwrap_or(program.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cargo::Optimization;
    use crate::workspace::Manifest;

    /// Runs `check` with a day of so many seconds.
    fn with_day(seconds: u64, check: impl FnOnce(Day<'_>)) {
        let dir = tempfile::tempdir().unwrap();
        let workspace = Workspace { root: dir.path().to_owned(), bundle: Some(Manifest::default()) };
        let programs = Programs::prepare(&workspace, &[], Device::Cpu, Optimization::Dev).unwrap();
        let specs = Specs::default();
        let folder = Folder::new(&workspace, Some(dir.path())).unwrap();
        check(Day {
            program: std::env::current_exe().unwrap(),
            workspace: &workspace,
            specs: &specs,
            programs: &programs,
            folder: &folder,
            device: Device::Cpu,
            interrupt: Interrupt::default(),
            end: Instant::now() + Duration::from_secs(seconds),
            share: 0.5,
            caches: dir.path().join("caches"),
            kill: None,
            python: None,
            background: Vec::new(),
        });
    }

    #[test]
    fn a_part_that_hangs_ends_with_its_children() {
        with_day(60, |day| {
            let mut hangs = Command::new("sh");
            hangs.args(["-c", "sleep 1000 & wait"]).process_group(0).stdout(Stdio::piped());
            let mut child = hangs.spawn().unwrap();
            let mut output = child.stdout.take().unwrap();
            assert_eq!(day.wait(child, Duration::from_millis(100), |_| false).unwrap(), Left::Late);
            // The pipe is closed when the last process that holds it has ended.
            assert_eq!(std::io::read_to_string(&mut output).unwrap(), "");
            let exits =
                |script: &str| Command::new("sh").args(["-c", script]).process_group(0).spawn().unwrap();
            let left = day.wait(exits("exit 3"), Duration::from_secs(10), |_| false).unwrap();
            assert!(matches!(left, Left::Ended(status) if status.code() == Some(3)));
            let left = day.wait(exits("exec sleep 1000"), Duration::from_secs(10), |_| true).unwrap();
            assert!(matches!(left, Left::Ended(status) if status.signal() == Some(9)));
        });
    }

    #[test]
    fn without_time_nothing_begins() {
        with_day(0, |mut day| {
            let part = Part {
                name: "doctor".into(),
                work: Work::Doctor,
                of: None,
                dtype: None,
                seconds: 9,
                waits_for: None,
            };
            let (verdict, beside) = day.one(&part).unwrap();
            assert_eq!((verdict, beside), (Verdict::Skipped("no time left".into()), None));
        });
    }

    #[test]
    fn a_command_keeps_its_environment_on_other_cores() {
        with_day(1, |day| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo $A"]).env("A", "1").env_remove("B");
            let pinned = day.pinned(&[0, 3], command);
            let arguments: Vec<_> = pinned.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
            assert_eq!(arguments, ["-c", "0,3", "sh", "-c", "echo $A"]);
            let variables: Vec<_> = pinned.get_envs().collect();
            assert_eq!(variables, [("A".as_ref(), Some("1".as_ref())), ("B".as_ref(), None)]);
        });
    }
}
