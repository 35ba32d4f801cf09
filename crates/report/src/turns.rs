//! Turns of a program that is compared with another: each measures one round when the parent process says so.
//!
//! Two programs that measure alternately see the same drift of the machine. Both are started once, prepare a case (weights,
//! compilation, warm-up), and write `@turn DONE TOTAL` to standard error whenever they could measure the next round: `DONE` of
//! `TOTAL` turns are behind them. Then they wait for a line on standard input. Without a parent process nothing is written and nothing
//! is waited for, and each case has one round.

use std::io::BufRead;

/// The variable in which a parent process gives the number of rounds of each case.
pub const TURNS_VARIABLE: &str = "FRUGAL_TURNS";

/// The turns of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turns {
    /// Rounds of each case; `None` without a parent process.
    rounds: Option<u64>,
    done: u64,
    total: u64,
}

impl Turns {
    /// Returns the turns that the parent process asks for, over `cases` cases.
    pub fn from_environment(cases: u64) -> Self {
        let rounds = std::env::var(TURNS_VARIABLE).ok().and_then(|text| text.parse().ok()).filter(|n| *n > 0);
        Self { rounds, done: 0, total: cases * rounds.unwrap_or(1) }
    }

    /// Returns the rounds of one case: their numbers for the records, or one round without a number.
    pub fn rounds(&self) -> Vec<Option<u64>> {
        self.rounds.map_or_else(|| vec![None], |rounds| (0..rounds).map(Some).collect())
    }

    /// Waits until it is this program's turn.
    ///
    /// # Errors
    /// Standard input that ends: the parent process is gone.
    pub fn wait(&mut self) -> std::io::Result<()> {
        if self.rounds.is_some() {
            eprintln!("{}", Turn { done: self.done, total: self.total }.line());
            if std::io::stdin().lock().read_line(&mut String::new())? == 0 {
                return Err(std::io::Error::other("the process that gives the turns has ended"));
            }
        }
        self.done += 1;
        Ok(())
    }
}

/// A `@turn DONE TOTAL` line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Number of turns behind the program.
    pub done: u64,
    /// Number of turns in all.
    pub total: u64,
}

impl Turn {
    /// Reads a line; `None` for another.
    ///
    /// ```
    /// use report::turns::Turn;
    ///
    /// assert_eq!(Turn::parse("@turn 3 20"), Some(Turn { done: 3, total: 20 }));
    /// assert_eq!(Turn::parse("@progress 3 20"), None);
    /// ```
    pub fn parse(line: &str) -> Option<Self> {
        let (done, total) = line.strip_prefix("@turn ")?.trim().split_once(' ')?;
        Some(Self { done: done.parse().ok()?, total: total.parse().ok()? })
    }

    fn line(self) -> String {
        format!("@turn {} {}", self.done, self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_parent_each_case_has_one_round_and_nothing_is_waited_for() {
        let mut turns = Turns { rounds: None, done: 0, total: 2 };
        assert_eq!(turns.rounds(), [None]);
        turns.wait().unwrap();
        assert_eq!(turns.done, 1);
    }

    #[test]
    fn a_turn_is_read_as_it_was_written() {
        let turn = Turn { done: 7, total: 20 };
        assert_eq!(Turn::parse(&turn.line()), Some(turn));
        for other in ["@turn", "@turn 1", "@turn a b", "turn 1 2", "@turn 1 2 3"] {
            assert_eq!(Turn::parse(other), None, "{other}");
        }
    }
}
