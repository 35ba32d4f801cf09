//! `cargo xtask compare`: runs our programs and their PyTorch peers alternately on this machine.

mod peers;
mod turns;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use report::measurements::{IMPLEMENTATION_KEY, ROUND_KEY};
use report::progress::Step;
use report::spec::Comparison;
use report::{Case, Record, RunOutcome, RunState, Specs};

use crate::cargo::Optimization;
use crate::device::Device;
use crate::display::{Display, Running, duration};
use crate::interrupt::Interrupt;
use crate::pages::{Folder, Rounds};
use crate::programs::{Programs, packages};
use crate::run_all::show_failure;
use crate::runner::{self, Ending};
use crate::select::select;
use crate::stamp::{Setting, Stamp};
use crate::workspace::Workspace;
pub(crate) use peers::NO_MODULE;
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
    /// Dtypes that both sides measure, of a comparison that has several [default: bf16,fp32 on a GPU, else fp32]
    #[arg(long, value_name = "DTYPES", value_delimiter = ',')]
    dtype: Vec<String>,
    /// Take the smallest sizes and a fast build, which shows that both sides run and measures nothing
    #[arg(long)]
    smoke: bool,
    /// Only compile what the peers compile, into the caches that `TORCHINDUCTOR_CACHE_DIR` and `TRITON_CACHE_DIR` name
    #[arg(long)]
    compile_only: bool,
    /// Use this Python, with the newest or the linked torch, instead of private environments
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write the report to DIR instead of reports/, or target/smoke-report/ with --smoke
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    args.device.check()?;
    let specs = Specs::load(&workspace.root)?;
    let chosen = select("comparison", &specs.comparisons, |c| c.name.as_str(), &args.only)?;
    let chosen: Vec<Comparison> =
        chosen.into_iter().map(|comparison| sized(comparison, args)).collect::<Result<_>>()?;
    let smoke = args.smoke.then(|| workspace.smoke_reports());
    let folder = Folder::new(workspace, args.out.as_deref().or(smoke.as_deref()))?;
    folder.create()?;
    let pythons = Pythons::ready(workspace, args.python.as_deref(), &chosen)?;
    if args.compile_only {
        return compile(workspace, args, &pythons, &chosen, &folder);
    }
    let optimization = if args.smoke { Optimization::Dev } else { Optimization::Release };
    let packages = packages(chosen.iter().map(|c| &*c.package));
    let programs = Programs::prepare(workspace, &packages, args.device, optimization)?;
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

/// The comparison with the sizes and dtypes that the arguments ask for.
fn sized(comparison: &Comparison, args: &Args) -> Result<Comparison> {
    let mut sized = comparison.clone();
    if args.device != Device::Cpu {
        sized = sized.with(&comparison.gpu);
    }
    if args.smoke {
        sized = sized.with(&comparison.smoke);
    }
    if !args.dtype.is_empty() {
        if comparison.dtypes.is_empty() {
            bail!("the comparison {} has its dtypes in its cases; leave --dtype out", comparison.name);
        }
        sized.dtypes.clone_from(&args.dtype);
    }
    Ok(sized)
}

/// Lets the peers compile what they would compile before they measure.
fn compile(
    workspace: &Workspace,
    args: &Args,
    pythons: &Pythons,
    comparisons: &[Comparison],
    folder: &Folder,
) -> Result<()> {
    let interrupt = Interrupt::install()?;
    for comparison in comparisons {
        let mut command = peer(workspace, pythons, comparison)?;
        let unused = folder.run().join(format!("{}.compiled", comparison.name));
        arguments(&mut command, comparison, args, &unused);
        command.arg("--compile-only");
        let log = folder.fresh_log(&format!("{}-compiled", comparison.name))?;
        let (ending, time) = runner::run(command, &log, &interrupt, |_| {})?;
        if ending != Ending::Done {
            bail!("{}: the peer could not be compiled: {ending:?}; see {}", comparison.name, log.display());
        }
        eprintln!("{}: the peer is compiled, in {}", comparison.name, duration(time.as_secs_f64()));
    }
    Ok(())
}

/// The command of the peer, without the arguments of a run.
fn peer(workspace: &Workspace, pythons: &Pythons, comparison: &Comparison) -> Result<Command> {
    let script = workspace.peers().join(&comparison.peer);
    if !script.exists() {
        bail!("the comparison {} names the peer {}, which does not exist", comparison.name, script.display());
    }
    let mut command = Command::new(pythons.with(comparison.peer_torch));
    command.arg(script).args(&comparison.peer_args).current_dir(&workspace.root);
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONUNBUFFERED", "1");
    Ok(command)
}

/// Adds the arguments that both sides have.
fn arguments(command: &mut Command, comparison: &Comparison, args: &Args, records: &Path) {
    if !comparison.dtypes.is_empty() {
        command.arg("--dtype").arg(comparison.dtypes.join(","));
    }
    command.arg("--device").arg(args.device.to_string());
    command.arg("--seed").arg(args.seed.to_string());
    command.arg("--records").arg(records);
    let threads = threads();
    command.env("OMP_NUM_THREADS", &threads).env("MKL_NUM_THREADS", &threads);
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

/// Adds the comparison's name, the side and the round to a record, so that programs need not know that they are compared. A program that
/// takes turns numbers its rounds itself.
fn attribute(mut record: Record, comparison: &str, side: Side, round: Option<u32>) -> Record {
    record.experiment = comparison.to_owned();
    // A comparison's arguments give the sizes.
    record.environment.scale = None;
    let mut case = Case::new();
    if record.case.get(IMPLEMENTATION_KEY).is_none() {
        case = case.with(IMPLEMENTATION_KEY, side.label());
    }
    case.0.extend(std::mem::take(&mut record.case.0));
    record.case = match round {
        Some(round) => case.with(ROUND_KEY, round),
        None => case,
    };
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
    fn all(&self, comparisons: &[Comparison]) -> Result<Vec<String>> {
        let display = Display::new(comparisons.len());
        let mut failed = Vec::new();
        for comparison in comparisons {
            let start = Instant::now();
            let name = &comparison.name;
            let setting = self.setting();
            let estimate = Stamp::read(&self.folder.run(), name).and_then(|stamp| stamp.estimate(&setting));
            let mut running = display.start(name, estimate);
            self.folder.forget_rounds(name);
            self.folder.forget_unfinished(name)?;
            let ending = if comparison.in_turns && !comparison.peer_runs_ours {
                self.turns(comparison, &mut running)?
            } else {
                self.rounds(comparison, &mut running)?
            };
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
        let mut shown = Shown::new(self.folder, comparison)?;
        let log = self.folder.fresh_log(name)?;
        let turn = self.turn_file(name, "ours");
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
            shown.add(report::read_records(&turn)?, side, Some(round))?;
            let last_of_round = (done + 1).is_multiple_of(total / u64::from(comparison.rounds));
            if last_of_round {
                shown.publish(u64::from(round) + 1, u64::from(comparison.rounds))?;
            }
        }
        let _ = std::fs::remove_file(&turn);
        Ok(Ending::Done)
    }

    /// Lets both sides run once and measure alternately, into one records file.
    fn turns(&self, comparison: &Comparison, running: &mut Running<'_>) -> Result<Ending> {
        let name = &comparison.name;
        let mut shown = Shown::new(self.folder, comparison)?;
        let log = self.folder.fresh_log(name)?;
        let sides = [(Side::Ours, "ours"), (Side::Peer, "peer")];
        let files = sides.map(|(_, word)| self.turn_file(name, word));
        let mut commands = Vec::new();
        for ((side, _), file) in sides.into_iter().zip(&files) {
            commands.push((side, self.command(comparison, side, file)?));
        }
        let commands = commands.try_into().map_err(|_| anyhow::anyhow!("a comparison has two sides"))?;
        let mut read = [0, 0];
        let mut pairs = turns::Pair { done: 0, total: 0 };
        let ending = turns::play(
            commands,
            comparison.rounds,
            &log,
            &self.interrupt,
            |side, step| {
                let message = format!("{} {}", side.label(), step.message);
                running.step(&Step { message, ..step });
            },
            |pair| {
                pairs = pair;
                for (((side, _), file), read) in sides.iter().zip(&files).zip(&mut read) {
                    let records = if file.exists() { report::read_records(file)? } else { Vec::new() };
                    let new = records.into_iter().skip(*read).collect::<Vec<_>>();
                    *read += new.len();
                    shown.add(new, *side, None)?;
                }
                shown.publish(pair.done, pair.total)
            },
        )?;
        for ((_, word), (file, read)) in sides.iter().zip(files.iter().zip(read)) {
            let _ = std::fs::remove_file(file);
            if ending == Ending::Done && read == 0 {
                return Ok(Ending::Failed(format!("{word}: no record was written")));
            }
        }
        Ok(ending)
    }

    /// The file of the records that one side writes.
    fn turn_file(&self, name: &str, side: &str) -> PathBuf {
        self.folder.run().join(format!("{name}.{side}.{}.jsonl", std::process::id()))
    }

    fn command(&self, comparison: &Comparison, side: Side, records: &Path) -> Result<Command> {
        let mut command = match side {
            Side::Ours => {
                let mut command = self.programs.command(&comparison.package)?;
                command.args(&comparison.args);
                command
            }
            Side::Peer => {
                let mut command = peer(self.workspace, &self.pythons, comparison)?;
                command.env(crate::revision::VARIABLE, &self.programs.revision);
                // Some peers run our program on files that they have written.
                let program = self.programs.command(&comparison.package)?;
                command.env("FRUGAL_PROGRAM", program.get_program());
                command
            }
        };
        arguments(&mut command, comparison, self.args, records);
        Ok(command)
    }

    fn setting(&self) -> Setting {
        Setting {
            scale: if self.args.smoke { "smoke".into() } else { String::new() },
            device: self.args.device.to_string(),
            seed: self.args.seed,
            revision: self.programs.revision.clone(),
            program: String::new(),
        }
    }
}

/// The records of a run, which are shown after each round.
struct Shown<'a> {
    folder: &'a Folder,
    comparison: &'a Comparison,
    file: std::fs::File,
    fresh: bool,
}

impl<'a> Shown<'a> {
    fn new(folder: &'a Folder, comparison: &'a Comparison) -> Result<Self> {
        let path = folder.unfinished_records(&comparison.name);
        let file =
            std::fs::File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { folder, comparison, file, fresh: folder.is_fresh(&comparison.name) })
    }

    fn add(&mut self, records: Vec<Record>, side: Side, round: Option<u32>) -> Result<()> {
        for record in records {
            let record = attribute(record, &self.comparison.name, side, round);
            let line = serde_json::to_string(&record).context("a record is plain data")?;
            writeln!(self.file, "{line}").context("cannot write the records of a comparison")?;
        }
        Ok(())
    }

    fn publish(&self, done: u64, total: u64) -> Result<()> {
        let needed = u64::from(self.comparison.needed_rounds());
        self.folder.publish_rounds(&self.comparison.name, Rounds { done, total, needed, fresh: self.fresh })
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
        let ours = attribute(record.clone(), "swiglu-time", Side::Ours, Some(2));
        assert_eq!(ours.experiment, "swiglu-time");
        assert_eq!(ours.case, Case::new().with("impl", "frugal").with("batch", 8).with("round", 2));
        let named = Record { case: Case::new().with("batch", 8).with("impl", "checkpoint"), ..record };
        let peer = attribute(named, "swiglu-time", Side::Peer, Some(0));
        assert_eq!(peer.case, Case::new().with("batch", 8).with("impl", "checkpoint").with("round", 0));
    }
}
