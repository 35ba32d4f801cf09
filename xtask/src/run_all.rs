//! `cargo xtask run-all`: runs every experiment in a process of its own, and writes the reports.

use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail};
use parking_lot::Mutex;
use report::cli::Scale;
use report::spec::Experiment;
use report::{RunOutcome, RunState, Specs};

use crate::cargo::Optimization;
use crate::device::Device;
use crate::display::{Display, duration};
use crate::interrupt::Interrupt;
use crate::pages::Folder;
use crate::programs::{Programs, packages};
use crate::runner::{self, Ending};
use crate::select::select;
use crate::stamp::{Setting, Stamp};
use crate::workspace::Workspace;

/// The experiments to run, and where.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the experiments: seconds, ten minutes, hours, or a GPU's
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value_t)]
    device: Device,
    /// Run only these experiments, separated by commas; an unknown name lists all
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,
    /// Skip experiments that a run with the same revision, scale, device and seed has completed
    #[arg(long)]
    resume: bool,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write the report to DIR instead of reports/, or target/smoke-report/ at scale smoke
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    args.device.check()?;
    let specs = Specs::load(&workspace.root)?;
    let chosen = select("experiment", &specs.experiments, |e| e.name.as_str(), &args.only)?;
    // A check that everything runs must not replace the project's own measurements.
    let smoke = (args.scale == Scale::Smoke).then(|| workspace.smoke_reports());
    let folder = Folder::new(workspace, args.out.as_deref().or(smoke.as_deref()))?;
    folder.create()?;
    let (now, other): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|e| e.runs_at(args.scale));
    for experiment in other {
        eprintln!("{} is not run at scale {}", experiment.name, args.scale.name());
    }
    // A smoke run measures nothing, so it takes the build that the tests share.
    let optimization = if smoke.is_some() { Optimization::Dev } else { Optimization::Release };
    let packages = packages(now.iter().flat_map(|e| e.starts.iter().chain([&e.package])).map(|name| &**name));
    let programs = Programs::prepare(workspace, &packages, args.device, optimization)?;
    let run = Run { args, folder: &folder, programs: &programs, interrupt: Interrupt::install()? };
    let start = Instant::now();
    let failed = run.all(&now)?;
    folder.finish(&specs)?;
    eprintln!("the experiments took {}", duration(start.elapsed().as_secs_f64()));
    if args.scale == Scale::Laptop {
        over_budget(&now, &folder);
    }
    if run.interrupt.wanted() {
        bail!("interrupted; `cargo xtask run-all --resume` with the same flags continues from here");
    }
    match failed.as_slice() {
        [] => Ok(()),
        names => bail!("{} of {} experiments failed: {}", names.len(), now.len(), names.join(", ")),
    }
}

/// Names the experiments that took longer than their budget at scale laptop.
fn over_budget(experiments: &[&Experiment], folder: &Folder) {
    for experiment in experiments {
        let outcome = Stamp::read(&folder.run(), &experiment.name).map(|stamp| stamp.outcome.state);
        if let Some(RunState::Done { seconds }) = outcome
            && seconds > experiment.laptop_seconds
        {
            let (name, budget) = (&experiment.name, duration(experiment.laptop_seconds));
            eprintln!("{name} took {}; its budget at scale laptop is {budget}", duration(seconds));
        }
    }
}

struct Run<'a> {
    args: &'a Args,
    folder: &'a Folder,
    programs: &'a Programs<'a>,
    interrupt: Interrupt,
}

impl Run<'_> {
    /// How many experiments run beside each other, and the threads of each; `None`: all that it likes. A measurement has the machine to
    /// itself. A smoke run only checks that everything runs, but on one GPU its experiments would share the memory that their plans count on.
    fn at_once(&self) -> (usize, Option<usize>) {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        if self.args.scale != Scale::Smoke || self.args.device != Device::Cpu || processors == 1 {
            return (1, None);
        }
        let count = processors.min(4);
        (count, Some(processors / count))
    }

    /// Runs the experiments, shows the logs of those that fail, and returns their names.
    fn all(&self, experiments: &[&Experiment]) -> Result<Vec<String>> {
        let display = Display::new(experiments.len());
        let waiting = Mutex::new(experiments.iter());
        let failed = Mutex::new(Vec::new());
        let next = || waiting.lock().next();
        let work = || -> Result<()> {
            while !self.interrupt.wanted()
                && let Some(experiment) = next()
            {
                // After an error of its own, not an experiment's, nothing more is started.
                let outcome = self.one(experiment, &display).inspect_err(|_| *waiting.lock() = [].iter())?;
                if let RunState::Failed { message } = &outcome.state
                    && !self.interrupt.wanted()
                {
                    failed.lock().push((experiment.name.clone(), message.clone()));
                }
            }
            Ok(())
        };
        thread::scope(|scope| {
            let workers: Vec<_> = (0..self.at_once().0).map(|_| scope.spawn(work)).collect();
            let ends = workers.into_iter().map(|worker| worker.join().expect("a worker does not panic"));
            // All are waited for, whatever the first returns.
            ends.collect::<Vec<_>>().into_iter().collect::<Result<()>>()
        })?;
        drop(display);
        let mut failed = failed.into_inner();
        failed.sort_by_key(|(name, _)| experiments.iter().position(|experiment| experiment.name == *name));
        for (name, message) in &failed {
            show_failure(name, message, self.folder);
        }
        Ok(failed.into_iter().map(|(name, _)| name).collect())
    }

    fn one(&self, experiment: &Experiment, display: &Display) -> Result<RunOutcome> {
        let (name, run) = (&experiment.name, self.folder.run());
        let setting = self.setting(experiment)?;
        let before = Stamp::read(&run, name);
        let estimate = before.as_ref().and_then(|stamp| stamp.estimate(&setting));
        let mut running = display.start(name, estimate);
        if let Some(stamp) = before.filter(|stamp| self.args.resume && stamp.covers(&setting)) {
            self.folder.publish_again(name)?;
            running.finish(&format!("{name}: already done, skipped"));
            return Ok(stamp.outcome);
        }
        let stamp = |state, usual_seconds| Stamp {
            setting: setting.clone(),
            usual_seconds,
            outcome: RunOutcome { experiment: name.clone(), state },
        };
        // A run counts as failed until it has ended, even if this process is killed.
        stamp(RunState::Failed { message: "the run did not finish".into() }, estimate).write(&run)?;
        self.folder.forget_unfinished(name)?;
        let command = self.command(experiment)?;
        let log = self.folder.fresh_log(name)?;
        let (ending, time) = runner::run(command, &log, &self.interrupt, |step| running.step(&step))?;
        let seconds = time.as_secs_f64();
        let (state, usual, line) = match ending {
            Ending::Done => {
                self.folder.publish(name)?;
                (RunState::Done { seconds }, Some(seconds), format!("{name}: done in {}", duration(seconds)))
            }
            Ending::Failed(message) => {
                let line = format!("{name}: failed after {}: {message}", duration(seconds));
                (RunState::Failed { message }, estimate, line)
            }
            Ending::Interrupted => {
                (RunState::Failed { message: "interrupted".into() }, estimate, format!("{name}: interrupted"))
            }
        };
        let stamp = stamp(state, usual);
        stamp.write(&run)?;
        running.finish(&line);
        Ok(stamp.outcome)
    }

    fn setting(&self, experiment: &Experiment) -> Result<Setting> {
        Ok(Setting {
            scale: if experiment.one_size { String::new() } else { self.args.scale.name().into() },
            device: self.args.device.to_string(),
            seed: self.args.seed,
            revision: self.programs.revision.clone(),
            program: self.programs.digest(&experiment.package)?.to_owned(),
        })
    }

    fn command(&self, experiment: &Experiment) -> Result<Command> {
        let mut command = self.programs.command(&experiment.package)?;
        if let (_, Some(threads)) = self.at_once() {
            // Threads that wait for each other spin: more of them than processors take several times as long.
            let threads = threads.to_string();
            command.env("OMP_NUM_THREADS", &threads).env("MKL_NUM_THREADS", &threads);
        }
        command.args(&experiment.args);
        if !experiment.one_size {
            command.args(["--scale", self.args.scale.name()]);
        }
        command.arg("--device").arg(self.args.device.to_string());
        command.arg("--seed").arg(self.args.seed.to_string());
        command.arg("--records").arg(self.folder.unfinished_records(&experiment.name));
        Ok(command)
    }
}

/// Prints the end of the log of a failed program.
pub(crate) fn show_failure(name: &str, message: &str, folder: &Folder) {
    let log = folder.log(name);
    eprintln!("\n{name} failed: {message}; the end of {}:", log.display());
    for line in runner::tail(&log, 12) {
        eprintln!("    {line}");
    }
}
