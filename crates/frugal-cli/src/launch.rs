//! `frugal launch`: the ranks of this machine as processes that end together, alone or beside those of other machines.

mod screen;

use std::ffi::OsString;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, CommandFactory};
use frugal::training::interrupt;
use report::cli::Failure;
use runtime::collectives::Machines;
use runtime::collectives::ranks::{Progress, Ranks, RanksConfig, ending};
use signal_hook::iterator::Signals;

use crate::common_flags::Common;
use crate::run::plan::NOTHING_FITS;
use crate::run::ranks::{INTERRUPTED, Interrupted, TIMEOUT};
use screen::Screen;

#[derive(Args)]
#[command(after_help = "\
Each process gets the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, …), and an equal share of the processors in \
OMP_NUM_THREADS, unless that is set. Each line of output begins with its rank, but for the standard output of rank 0 where the \
command has --json, beside which that of the others is on standard error; on a terminal, the progress of rank 0 is shown below. \
When a rank fails, the others are ended. Ctrl-C is passed on once; a second one kills all ranks.

On several machines the same command is started on each, with its own --node-rank; Slurm's srun, with one task for each machine, \
says all of it. The first machine keeps the port of --master, which the others must reach, and so must each the ports of the others. \
Rank 0, on the first machine, writes --out and prints the progress. A machine that is silent for --timeout is given up, and all \
ranks end.

Examples:
  frugal launch -n 2 -- train --data corpus.txt --out run --accumulation 4
  frugal launch -n 2 --restarts 3 -- finetune --model model --data my.jsonl --out run --resume
  frugal launch -n 4 -- python train.py
  frugal launch --nodes 2 --node-rank 0 --master 10.0.0.1 -n 4 -- train --data corpus.txt --out run --accumulation 8
  srun --nodes 2 --ntasks-per-node 1 frugal launch -n 4 -- train --data corpus.txt --out run --accumulation 8")]
pub(crate) struct Launch {
    /// Number of processes on this machine
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    ranks: u16,
    /// How long a rank waits for the others in one operation before all give up [default: 300]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    timeout: Option<u32>,
    /// Number of machines; each starts as many processes [default: 1, or those of Slurm's step]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u16).range(1..))]
    nodes: Option<u16>,
    /// Number of this machine, from 0; rank 0 is on machine 0
    #[arg(long, value_name = "R", requires = "nodes")]
    node_rank: Option<u16>,
    /// Name or address of machine 0, as the others reach it, and a free port there [default port: 29500]
    #[arg(long, value_name = "HOST[:PORT]", requires = "nodes", value_parser = host_and_port)]
    master: Option<(String, u16)>,
    /// How often all ranks are restarted after one has failed; give the training --resume, too
    #[arg(long, value_name = "K", default_value_t = 0)]
    restarts: u64,
    /// Grace period in seconds: how long the other ranks get to exit after one has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    patience: u64,
    /// The program and its arguments; a subcommand's name runs this program
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// How often the ranks are looked at.
const PAUSE: Duration = Duration::from_millis(20);
/// torchrun's.
const PORT: u16 = 29_500;

/// Reads `host`, `host:port`, `[address]:port` or an address with colons.
fn host_and_port(text: &str) -> Result<(String, u16), String> {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, rest)) => (host, Some(rest.strip_prefix(':').unwrap_or_default())),
        None => match text.split_once(':') {
            Some((host, port)) if !port.contains(':') => (host, Some(port)),
            _ => (text, None),
        },
    };
    let port = port.map_or(Ok(PORT), str::parse).ok().filter(|port| *port > 0);
    match port {
        Some(port) if !host.is_empty() => Ok((host.to_owned(), port)),
        _ => {
            Err("expected a name or an address, and a port: node-0, node-0:29500, [fd00::1]:29500".to_owned())
        }
    }
}

pub(crate) fn run(common: &Common, arguments: &Launch) -> anyhow::Result<()> {
    let mut signals =
        Signals::new(interrupt::signals()).context("a handler of signals cannot be registered")?;
    let run_id = std::process::id().to_string();
    let machines = arguments.machines()?;
    if machines.is_some() && arguments.restarts > 0 {
        anyhow::bail!(
            "--restarts is for one machine: the launchers of several do not know when the others have restarted; start all of them again, \
             with the training's --resume, or use torchrun, which does"
        );
    }
    let machines_of_run = machines.as_ref().map_or(1, |machines| machines.count);
    let ranks_of_all = arguments.ranks as usize * machines_of_run;
    if let Some(Machines { count, rank, master: (host, port), .. }) = &machines {
        let (first, own) = (rank * usize::from(arguments.ranks), usize::from(arguments.ranks));
        let ranks =
            if own == 1 { format!("rank {first}") } else { format!("ranks {first} to {}", first + own - 1) };
        common.note(&match rank {
            0 => format!("machine 0 of {count}: {ranks}; the others are awaited at {host}:{port}"),
            _ => format!(
                "machine {rank} of {count}: {ranks}; rank 0, which prints the progress and writes the output, is on {host}"
            ),
        });
    }
    for restart_count in 0..=arguments.restarts {
        let (ranks, machines) = (arguments.ranks.into(), machines.clone());
        let options = RanksConfig { ranks, machines, restart_count, run_id: run_id.clone() };
        let screen = Arc::new(Screen::new(common.quiet, arguments.is_json()));
        let printing = screen.clone();
        let command = |rank| {
            let mut command = arguments.command();
            if let Some(seconds) = arguments.timeout {
                command.env(TIMEOUT, seconds.to_string());
            }
            screen.ask(rank, &mut command);
            command
        };
        let mut ranks =
            Ranks::start(&options, command, move |rank, output, line| printing.line(rank, output, line))?;
        let (progress, interrupts) = watch((common, &screen), arguments, &mut ranks, &mut signals)?;
        screen.clear();
        let (failure, code) = match progress {
            Progress::Failed { rank, status } => {
                (format!("rank {rank} of {ranks_of_all} {}", ending(status)), status.code())
            }
            Progress::Running | Progress::Done if machines_of_run > 1 && interrupts > 0 => {
                return Err(Interrupted("interrupted".to_owned()).into());
            }
            Progress::Running | Progress::Done => return Ok(()),
        };
        match interrupts {
            // On another machine, or this rank alone.
            0 if code == Some(INTERRUPTED.into()) => return Err(Interrupted(failure).into()),
            0 if restart_count == arguments.restarts => {
                let status = if code == Some(NOTHING_FITS.into()) { NOTHING_FITS } else { 1 };
                return Err(Failure { status, message: failure }.into());
            }
            0 => common.note(&format!("{failure}; restart {} of {}", restart_count + 1, arguments.restarts)),
            1 => return Err(Interrupted(format!("interrupted; {failure}")).into()),
            _ => return Err(Interrupted("interrupted twice; the ranks were killed".to_owned()).into()),
        }
    }
    Ok(())
}

/// Waits until all ranks have ended. Returns how, and the number of interruptions.
fn watch(
    (common, screen): (&Common, &Screen),
    arguments: &Launch,
    ranks: &mut Ranks,
    signals: &mut Signals,
) -> anyhow::Result<(Progress, u32)> {
    let mut interrupts = 0;
    let mut deadline = None;
    loop {
        for _ in signals.pending() {
            interrupts += 1;
            if interrupts == 1 {
                screen
                    .above(|| common.note("interrupted; waiting for the ranks, a second Ctrl-C kills them"));
                ranks.interrupt();
            } else {
                ranks.kill();
            }
        }
        let progress = ranks.poll()?;
        if let Progress::Failed { .. } = progress
            && interrupts == 0
        {
            // The others see the connection close, and say what they were doing.
            let patience = Duration::from_secs(arguments.patience);
            if Instant::now() >= *deadline.get_or_insert_with(|| Instant::now() + patience) {
                ranks.kill();
            }
        }
        if ranks.have_ended() {
            ranks.end(Duration::ZERO)?;
            return Ok((progress, interrupts));
        }
        std::thread::sleep(PAUSE);
    }
}

impl Launch {
    /// The machines of the run, if there are several.
    fn machines(&self) -> anyhow::Result<Option<Machines>> {
        let Some(count) = self.nodes else {
            return Ok(Machines::of_slurm(|name| std::env::var(name).ok())?);
        };
        if count == 1 {
            return Ok(None);
        }
        let missing = |flag: &str| {
            format!(
                "--nodes {count} needs {flag}: each machine is told its place, and where the first one is"
            )
        };
        let rank = self.node_rank.with_context(|| missing("--node-rank"))?;
        let (host, port) = self.master.clone().with_context(|| missing("--master HOST[:PORT]"))?;
        // One port has one run.
        let run_id = "none".to_owned();
        Ok(Some(Machines { count: count.into(), rank: rank.into(), master: (host, port), run_id }))
    }

    /// Whether the ranks print a result for programs, which a number before each line would break.
    fn is_json(&self) -> bool {
        self.command.iter().any(|word| word == "--json")
    }

    fn command(&self) -> Command {
        let own = self.command[0]
            .to_str()
            .is_some_and(|name| crate::Cli::command().find_subcommand(name).is_some());
        let mut words = self.command.iter();
        let program = match own.then(std::env::current_exe) {
            Some(Ok(program)) => program.into_os_string(),
            _ => words.next().cloned().unwrap_or_default(),
        };
        let mut command = Command::new(program);
        command.args(words);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::host_and_port;

    #[test]
    fn the_first_machine_is_a_name_or_an_address_with_or_without_a_port() {
        let check = |text: &str, host: &str, port: u16| {
            assert_eq!(host_and_port(text), Ok((host.to_owned(), port)), "{text}");
        };
        check("node-0", "node-0", 29_500);
        check("node-0:1234", "node-0", 1234);
        check("10.0.0.1:1", "10.0.0.1", 1);
        check("fd00::1", "fd00::1", 29_500);
        check("[fd00::1]", "fd00::1", 29_500);
        check("[fd00::1]:80", "fd00::1", 80);
        for text in ["", ":1", "node:", "node:0", "node:70000", "node:x", "[fd00::1]80"] {
            assert!(host_and_port(text).is_err(), "{text}");
        }
    }
}
