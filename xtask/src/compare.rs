//! `cargo xtask compare`: runs our programs and their PyTorch peers alternately on this machine.

mod peers;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use report::measurements::{IMPLEMENTATION_KEY, ROUND_KEY};
use report::progress::Step;
use report::spec::Comparison;
use report::{Case, Record, RunOutcome, RunState, Specs};

use crate::device::Device;
use crate::display::{Display, Running, duration};
use crate::interrupt::Interrupt;
use crate::pages::Folder;
use crate::programs::{Programs, packages};
use crate::run_all::show_failure;
use crate::runner::{self, Ending};
use crate::select::select;
use crate::stamp::{Setting, Stamp};
use crate::workspace::Workspace;
use peers::Pythons;

/// The comparisons to run, and their libtorch.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only these comparisons, separated by commas; an unknown name lists all
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value_t)]
    device: Device,
    /// Use this Python, with the newest or the linked torch, instead of private environments
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write the report to DIR instead of reports/
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    args.device.check()?;
    let specs = Specs::load(&workspace.root)?;
    let chosen = select("comparison", &specs.comparisons, |c| c.name.as_str(), &args.only)?;
    let folder = Folder::new(workspace, args.out.as_deref())?;
    folder.create()?;
    let pythons = Pythons::ready(workspace, args.python.as_deref(), &chosen)?;
    let programs =
        Programs::prepare_release(workspace, &packages(chosen.iter().map(|c| &*c.package)), args.device)?;
    let turns = Turns {
        args,
        workspace,
        folder: &folder,
        programs: &programs,
        pythons,
        interrupt: Interrupt::install()?,
    };
    let failed = turns.all(&chosen)?;
    folder.finish(&specs)?;
    if turns.interrupt.wanted() {
        bail!("interrupted; the current comparison was discarded");
    }
    match failed.as_slice() {
        [] => Ok(()),
        names => bail!("{} of {} comparisons failed: {}", names.len(), chosen.len(), names.join(", ")),
    }
}

/// A side of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Ours,
    Peer,
}

impl Side {
    /// The value of the case key `impl`.
    fn label(self) -> &'static str {
        match self {
            Self::Ours => "frugal",
            Self::Peer => "pytorch",
        }
    }
}

/// The order of the sides alternates from round to round, so that neither always runs on the warm machine. Where the peer runs our
/// program itself, there is one side.
fn schedule(rounds: u32, peer_alone: bool) -> Vec<(u32, Side)> {
    let sides = |round| match (peer_alone, round % 2) {
        (true, _) => vec![Side::Peer],
        (false, 0) => vec![Side::Ours, Side::Peer],
        (false, _) => vec![Side::Peer, Side::Ours],
    };
    (0..rounds).flat_map(|round| sides(round).into_iter().map(move |side| (round, side))).collect()
}

/// Adds the comparison's name, the side and the round to a record, so that programs need not know that they are compared.
fn attribute(mut record: Record, comparison: &str, side: Side, round: u32) -> Record {
    record.experiment = comparison.to_owned();
    // A comparison's arguments give the sizes.
    record.environment.scale = None;
    let mut case = Case::new();
    if record.case.get(IMPLEMENTATION_KEY).is_none() {
        case = case.with(IMPLEMENTATION_KEY, side.label());
    }
    case.0.extend(std::mem::take(&mut record.case.0));
    record.case = case.with(ROUND_KEY, round);
    record
}

struct Turns<'a> {
    args: &'a Args,
    workspace: &'a Workspace,
    folder: &'a Folder,
    programs: &'a Programs<'a>,
    pythons: Pythons,
    interrupt: Interrupt,
}

impl Turns<'_> {
    fn all(&self, comparisons: &[&Comparison]) -> Result<Vec<String>> {
        let display = Display::new(comparisons.len());
        let mut failed = Vec::new();
        for comparison in comparisons {
            let start = Instant::now();
            let name = &comparison.name;
            let setting = self.setting();
            let estimate = Stamp::read(&self.folder.run(), name).and_then(|stamp| stamp.estimate(&setting));
            let mut running = display.start(name, estimate);
            let ending = self.rounds(comparison, &mut running)?;
            let seconds = start.elapsed().as_secs_f64();
            let (state, usual_seconds) = match ending {
                Ending::Done => {
                    self.folder.publish(name)?;
                    running.finish(&format!("{name}: done in {}", duration(seconds)));
                    (RunState::Done { seconds }, Some(seconds))
                }
                Ending::Failed(message) => {
                    running.finish(&format!("{name}: failed: {message}"));
                    failed.push((name.clone(), message.clone()));
                    (RunState::Failed { message }, estimate)
                }
                Ending::Interrupted => break,
            };
            let outcome = RunOutcome { experiment: name.clone(), state };
            Stamp { setting, usual_seconds, outcome }.write(&self.folder.run())?;
        }
        drop(display);
        for (name, message) in &failed {
            show_failure(name, message, self.folder);
        }
        Ok(failed.into_iter().map(|(name, _)| name).collect())
    }

    /// Runs all rounds of one comparison into one records file.
    fn rounds(&self, comparison: &Comparison, running: &mut Running<'_>) -> Result<Ending> {
        let name = &comparison.name;
        self.folder.forget_unfinished(name)?;
        let records = self.folder.unfinished_records(name);
        let log = self.folder.fresh_log(name)?;
        let turn = self.folder.run().join(format!("{name}.turn.{}.jsonl", std::process::id()));
        let mut file =
            std::fs::File::create(&records).with_context(|| format!("cannot write {}", records.display()))?;
        let turns = schedule(comparison.rounds, comparison.peer_runs_ours);
        let total = turns.len() as u64;
        for (done, (round, side)) in (0..).zip(turns) {
            let about = format!("round {} of {}: {}", round + 1, comparison.rounds, side.label());
            running.step(&Step { done, total, message: about.clone() });
            if turn.exists() {
                std::fs::remove_file(&turn).with_context(|| format!("cannot remove {}", turn.display()))?;
            }
            let command = self.command(comparison, side, &turn)?;
            let (ending, _) = runner::run(command, &log, &self.interrupt, |step| {
                let message = format!("{about} {}/{} {}", step.done, step.total, step.message);
                running.step(&Step { done, total, message });
            })?;
            match ending {
                Ending::Done => {}
                Ending::Failed(why) => return Ok(Ending::Failed(format!("{about}: {why}"))),
                Ending::Interrupted => return Ok(Ending::Interrupted),
            }
            if !turn.exists() {
                return Ok(Ending::Failed(format!("{about}: no record was written")));
            }
            for record in report::read_records(&turn)? {
                let record = attribute(record, name, side, round);
                let line = serde_json::to_string(&record).context("a record is plain data")?;
                writeln!(file, "{line}").with_context(|| format!("cannot write {}", records.display()))?;
            }
        }
        let _ = std::fs::remove_file(&turn);
        Ok(Ending::Done)
    }

    fn command(&self, comparison: &Comparison, side: Side, records: &Path) -> Result<Command> {
        let mut command = match side {
            Side::Ours => {
                let mut command = self.programs.command(&comparison.package)?;
                command.args(&comparison.args);
                command
            }
            Side::Peer => {
                let script = self.workspace.peers().join(&comparison.peer);
                if !script.exists() {
                    bail!(
                        "the comparison {} names the peer {}, which does not exist",
                        comparison.name,
                        script.display()
                    );
                }
                let mut command = Command::new(self.pythons.with(comparison.peer_torch));
                command.arg(script).args(&comparison.peer_args);
                command.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONUNBUFFERED", "1");
                command
                    .env(crate::revision::VARIABLE, &self.programs.revision)
                    .current_dir(&self.workspace.root);
                // Some peers run our program on files that they have written.
                let program = self.programs.command(&comparison.package)?;
                command.env("FRUGAL_PROGRAM", program.get_program());
                command
            }
        };
        command.arg("--device").arg(self.args.device.to_string());
        command.arg("--seed").arg(self.args.seed.to_string());
        command.arg("--records").arg(records);
        let threads = threads();
        command.env("OMP_NUM_THREADS", &threads).env("MKL_NUM_THREADS", &threads);
        Ok(command)
    }

    fn setting(&self) -> Setting {
        Setting {
            scale: String::new(),
            device: self.args.device.to_string(),
            seed: self.args.seed,
            revision: self.programs.revision.clone(),
            program: String::new(),
        }
    }
}

/// Number of threads of both sides: the caller's choice, else one per processor.
fn threads() -> String {
    let processors = || std::thread::available_parallelism().map_or(1, usize::from).to_string();
    std::env::var("OMP_NUM_THREADS").ok().filter(|n| n.parse::<u32>().is_ok()).unwrap_or_else(processors)
}

#[cfg(test)]
mod tests {
    use report::{Environment, Metric};

    use super::*;

    #[test]
    fn the_order_alternates_by_round() {
        use Side::{Ours, Peer};
        let turns = schedule(3, false);
        assert_eq!(turns, [(0, Ours), (0, Peer), (1, Peer), (1, Ours), (2, Ours), (2, Peer)]);
        assert_eq!(schedule(2, true), [(0, Peer), (1, Peer)]);
    }

    #[test]
    fn records_learn_their_side_and_round() {
        let record = Record {
            experiment: "swiglu-ckpt".into(),
            case: Case::new().with("batch", 8),
            metric: Metric::exact("seconds", "s", 1.0),
            environment: Environment::detect("cpu", None),
        };
        let ours = attribute(record.clone(), "swiglu-time", Side::Ours, 2);
        assert_eq!(ours.experiment, "swiglu-time");
        assert_eq!(ours.case, Case::new().with("impl", "frugal").with("batch", 8).with("round", 2));
        let named = Record { case: Case::new().with("batch", 8).with("impl", "checkpoint"), ..record };
        let peer = attribute(named, "swiglu-time", Side::Peer, 0);
        assert_eq!(peer.case, Case::new().with("batch", 8).with("impl", "checkpoint").with("round", 0));
    }
}
