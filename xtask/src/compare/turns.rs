//! Two programs that each run once and measure alternately: one is granted a round while the other waits.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use report::progress::{PROGRESS_VARIABLE, Step};
use report::turns::{TURNS_VARIABLE, Turn};

use super::Side;
use crate::interrupt::Interrupt;
use crate::runner::{self, Ending, Line, TICK};

/// One side, while it runs.
struct Player {
    side: Side,
    child: Child,
    input: ChildStdin,
    lines: Receiver<Line>,
    reader: Option<JoinHandle<()>>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// It prepares a case, or measures.
    Works,
    /// It waits for its turn.
    Waits(Turn),
    Ended(ExitStatus),
}

impl Player {
    fn start(side: Side, mut command: Command, rounds: u32, log: &Path) -> Result<Self> {
        let open = || -> Result<File> {
            let file = OpenOptions::new().create(true).append(true).open(log);
            file.with_context(|| format!("cannot write the log {}", log.display()))
        };
        command.env(PROGRESS_VARIABLE, "lines").env(TURNS_VARIABLE, rounds.to_string());
        command.stdin(Stdio::piped()).stdout(open()?).stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .with_context(|| format!("{}: cannot run {}", side.label(), command.get_program().display()))?;
        let input = child.stdin.take().expect("standard input is piped");
        let stderr = child.stderr.take().expect("standard error is piped");
        let (sender, lines) = mpsc::channel();
        let mut file = open()?;
        let reader = Some(thread::spawn(move || runner::read(stderr, &mut file, &sender)));
        Ok(Self { side, child, input, lines, reader, state: State::Works })
    }

    /// Takes notice of what it wrote and whether it ended.
    fn look(&mut self, on_step: &mut impl FnMut(Side, Step)) -> Result<()> {
        let line = self.lines.recv_timeout(TICK).ok();
        for line in line.into_iter().chain(self.lines.try_iter()) {
            match line {
                Line::Step(step) => on_step(self.side, step),
                Line::Turn(turn) => self.state = State::Waits(turn),
            }
        }
        if let Some(status) = self.child.try_wait().context("cannot wait for a program")? {
            // Its last words are in the log when the reader has ended.
            if let Some(reader) = self.reader.take() {
                drop(reader.join());
            }
            self.state = State::Ended(status);
        }
        Ok(())
    }

    fn grant(&mut self) {
        // One that has just ended does not read it, which the next look finds.
        let _ = self.input.write_all(b"\n").and_then(|()| self.input.flush());
        self.state = State::Works;
    }

    /// Why it failed, if it did.
    fn failure(&self, log: &Path) -> Option<String> {
        match self.state {
            State::Ended(status) if !status.success() => {
                Some(format!("{}: {}", self.side.label(), runner::why(status, &runner::tail(log, 50))))
            }
            _ => None,
        }
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        if !matches!(self.state, State::Ended(_)) {
            // It ends by itself meanwhile, at worst.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// How far both sides are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    /// Rounds that both sides have measured.
    pub(super) done: u64,
    /// Rounds in all, of all cases: the larger count of the two sides.
    pub(super) total: u64,
}

/// Runs both programs to their ends, `rounds` rounds of each of their cases. After each round of both, `on_round` takes their records.
/// Which of them is first changes from round to round.
pub(super) fn play(
    sides: [(Side, Command); 2],
    rounds: u32,
    log: &Path,
    interrupt: &Interrupt,
    mut on_step: impl FnMut(Side, Step),
    mut on_round: impl FnMut(Pair) -> Result<()>,
) -> Result<Ending> {
    let [one, other] = sides;
    let mut players =
        [Player::start(one.0, one.1, rounds, log)?, Player::start(other.0, other.1, rounds, log)?];
    let mut pair = Pair { done: 0, total: 0 };
    // Both prepare at the same time, since nothing is measured yet.
    for player in &mut players {
        if let Some(ending) = settle(player, log, interrupt, &mut on_step)? {
            return Ok(ending);
        }
    }
    while players.iter().any(|player| matches!(player.state, State::Waits(_))) {
        let order = if pair.done.is_multiple_of(2) { [0, 1] } else { [1, 0] };
        for index in order {
            let player = &mut players[index];
            let State::Waits(turn) = player.state else { continue };
            pair.total = pair.total.max(turn.total);
            player.grant();
            if let Some(ending) = settle(player, log, interrupt, &mut on_step)? {
                return Ok(ending);
            }
        }
        pair.done += 1;
        on_round(pair)?;
    }
    Ok(Ending::Done)
}

/// Waits until a side waits for its turn or has ended. Returns an ending if the comparison cannot go on.
fn settle(
    player: &mut Player,
    log: &Path,
    interrupt: &Interrupt,
    on_step: &mut impl FnMut(Side, Step),
) -> Result<Option<Ending>> {
    while player.state == State::Works {
        player.look(on_step)?;
        if interrupt.wanted() {
            return Ok(Some(Ending::Interrupted));
        }
    }
    Ok(player.failure(log).map(Ending::Failed))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shell script that takes `turns` turns and notes each in the file `turns`.
    fn script(name: &str, turns: u32) -> String {
        format!(
            "for i in $(seq {turns}); do echo \"@turn $((i-1)) {turns}\" >&2; read -r _ || exit 9; echo {name}$i >> turns; done"
        )
    }

    fn played(ours: &str, theirs: &str) -> (Ending, Vec<Pair>, String) {
        let dir = tempfile::tempdir().unwrap();
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).current_dir(dir.path());
            command
        };
        let sides = [(Side::Ours, shell(ours)), (Side::Peer, shell(theirs))];
        let mut pairs = Vec::new();
        let ending = play(
            sides,
            3,
            &dir.path().join("log"),
            &Interrupt::default(),
            |_, _| {},
            |pair| {
                pairs.push(pair);
                Ok(())
            },
        )
        .unwrap();
        let turns = std::fs::read_to_string(dir.path().join("turns")).unwrap_or_default();
        (ending, pairs, turns.split_whitespace().collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn the_sides_alternate_and_the_first_changes() {
        let (ending, pairs, turns) = played(&script("o", 3), &script("p", 3));
        assert_eq!(ending, Ending::Done);
        assert_eq!(turns, "o1 p1 p2 o2 o3 p3");
        assert_eq!(pairs, [1, 2, 3].map(|done| Pair { done, total: 3 }));
    }

    #[test]
    fn the_side_with_more_cases_goes_on_alone() {
        let (ending, pairs, turns) = played(&script("o", 1), &script("p", 3));
        assert_eq!(ending, Ending::Done);
        assert_eq!(turns, "o1 p1 p2 p3");
        assert_eq!(pairs.last(), Some(&Pair { done: 3, total: 3 }));
    }

    #[test]
    fn a_side_that_fails_ends_the_other_and_what_was_measured_stays() {
        let fails = "echo '@turn 0 3' >&2; read -r _; echo '@turn 1 3' >&2; read -r _; echo 'error: no memory' >&2; exit 1";
        let (ending, pairs, turns) = played(&script("o", 3), fails);
        assert_eq!(ending, Ending::Failed("pytorch: no memory".into()));
        assert_eq!(pairs, [Pair { done: 1, total: 3 }]);
        assert_eq!(turns, "o1");
    }
}
