//! `frugal launch`: the ranks of one machine as processes that end together.

mod screen;

use std::ffi::OsString;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, CommandFactory};
use frugal::training::interrupt;
use report::cli::Failure;
use runtime::collectives::ranks::{Progress, Ranks, RanksConfig, ending};
use signal_hook::iterator::Signals;

use crate::common_flags::Common;
use crate::run::plan::NOTHING_FITS;
use crate::run::ranks::Interrupted;
use screen::Screen;

#[derive(Args)]
#[command(after_help = "\
Each process gets the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, …), and an equal share of the processors in \
OMP_NUM_THREADS, unless that is set. Each line of output begins with its rank, but for the standard output of rank 0 where the \
command has --json, beside which that of the others is on standard error; on a terminal, the progress of rank 0 is shown below. \
When a rank fails, the others are ended. Ctrl-C is passed on once; a second one kills all ranks.

Examples:
  frugal launch -n 2 -- train --data corpus.txt --out run --accumulation 4
  frugal launch -n 2 --restarts 3 -- finetune --model model --data my.jsonl --out run --resume
  frugal launch -n 4 -- python train.py")]
pub(crate) struct Launch {
    /// Number of processes
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    ranks: u16,
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

pub(crate) fn run(common: &Common, arguments: &Launch) -> anyhow::Result<()> {
    let mut signals =
        Signals::new(interrupt::signals()).context("a handler of signals cannot be registered")?;
    let run_id = std::process::id().to_string();
    for restart_count in 0..=arguments.restarts {
        let options = RanksConfig { ranks: arguments.ranks.into(), restart_count, run_id: run_id.clone() };
        let screen = Arc::new(Screen::new(common.quiet, arguments.is_json()));
        let printing = screen.clone();
        let command = |rank| {
            let mut command = arguments.command();
            screen.ask(rank, &mut command);
            command
        };
        let mut ranks =
            Ranks::start(&options, command, move |rank, output, line| printing.line(rank, output, line))?;
        let (progress, interrupts) = watch((common, &screen), arguments, &mut ranks, &mut signals)?;
        screen.clear();
        let (failure, code) = match progress {
            Progress::Failed { rank, status } => {
                (format!("rank {rank} of {} {}", arguments.ranks, ending(status)), status.code())
            }
            Progress::Running | Progress::Done => return Ok(()),
        };
        match interrupts {
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
