//! The table of a day: how each part ended.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use report::measurements::{IMPLEMENTATION_KEY, ROUND_KEY};

use super::plan::{Part, Work};
use crate::pages::{Folder, Rounds};

/// How a part ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Verdict {
    Passed,
    /// Ended early with enough rounds.
    Enough {
        rounds: Rounds,
        how: String,
    },
    Failed(String),
    /// Ended at its deadline, in seconds, and what it has recorded.
    Late {
        seconds: u64,
        kept: String,
    },
    /// Not run, and why.
    Skipped(String),
}

impl Verdict {
    pub(super) fn is_failure(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Late { .. })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Enough { rounds: Rounds { done, total, needed, .. }, how } => {
                write!(f, "{done} of {total} rounds, {needed} needed ({how})")
            }
            Self::Failed(why) => write!(f, "FAILED: {why}"),
            Self::Late { seconds, kept } => write!(f, "LATE: ended after {seconds} s; {kept}"),
            Self::Skipped(why) => write!(f, "skipped: {why}"),
        }
    }
}

/// A part and how it ended.
pub(super) struct Row {
    pub(super) name: String,
    pub(super) verdict: Verdict,
    pub(super) seconds: f64,
    /// What ran on other cores meanwhile.
    pub(super) beside: Option<String>,
    /// Whether it ran in the background.
    pub(super) background: bool,
}

pub(super) fn text(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    let line = |Row { name, verdict, seconds, beside, .. }: &Row| {
        let beside = beside.as_ref().map(|beside| format!("; beside {beside}")).unwrap_or_default();
        format!("{name:width$}  {seconds:5.0} s  {verdict}{beside}")
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

pub(super) fn write(out: &Path, rows: &[Row]) -> Result<()> {
    let path = out.join("gpu-day.txt");
    std::fs::write(&path, text(rows) + "\n").with_context(|| format!("cannot write {}", path.display()))
}

/// Checks a rehearsal in which one part was killed: the table says so, its finished rounds are there, and it cost no other part.
pub(super) fn check_rehearsal(rows: &[Row], part: &Part, folder: &Folder) -> Result<()> {
    let (killed, subject) = (&*part.name, part.subject());
    let row = rows.iter().find(|row| row.name == killed);
    let row = row.with_context(|| format!("{killed} was to be killed, and is not in the table"))?;
    let said = row.verdict.to_string();
    ensure!(
        said.contains("SIGKILL") && !matches!(row.verdict, Verdict::Skipped(_)),
        "{killed} was killed, and its verdict is: {said}"
    );
    let kept = match part.work {
        Work::Comparison => format!("{} finished rounds", check_rounds(part, folder)?),
        _ => format!("{} records", kept_records(subject, folder)?.len()),
    };
    check_others(rows, killed)?;
    println!("rehearsed: {killed} was killed, and kept its {kept}");
    Ok(())
}

/// Checks that no other row failed, and that a part after the killed one passed. Background work does not count as one: it began before.
fn check_others(rows: &[Row], killed: &str) -> Result<()> {
    let failed = rows.iter().filter(|row| row.name != killed && row.verdict.is_failure());
    let failed: Vec<&str> = failed.map(|row| &*row.name).collect();
    if !failed.is_empty() {
        bail!("{killed} was killed, and these parts failed too: {}", failed.join(", "));
    }
    let after = rows.iter().skip_while(|row| row.name != killed).skip(1);
    ensure!(
        after.filter(|row| !row.background).any(|row| row.verdict == Verdict::Passed),
        "no part ran after {killed} was killed"
    );
    Ok(())
}

fn kept_records(subject: &str, folder: &Folder) -> Result<Vec<report::Record>> {
    let records = report::read_records(&folder.records().join(format!("{subject}.jsonl")))?;
    ensure!(!records.is_empty(), "{subject} has no record");
    Ok(records)
}

/// Checks that each round of a comparison that was killed has records of both sides. Returns the number of rounds.
fn check_rounds(part: &Part, folder: &Folder) -> Result<u64> {
    let (killed, subject) = (&*part.name, part.subject());
    let rounds = folder.rounds(subject).with_context(|| format!("{killed} has no finished round"))?;
    let records = kept_records(subject, folder)?;
    let mut sides: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
    for record in &records {
        if let Some(round) = record.case.get(ROUND_KEY).and_then(serde_json::Value::as_u64) {
            let side = record.case.get(IMPLEMENTATION_KEY).map(ToString::to_string).unwrap_or_default();
            sides.entry(round).or_default().insert(side);
        }
    }
    for (round, sides) in &sides {
        ensure!(sides.len() > 1, "round {round} of {killed} has records of {sides:?} only");
    }
    ensure!(
        !sides.is_empty() && rounds.done >= 1 && rounds.done < rounds.total,
        "{killed} had {} of {} rounds when it was killed",
        rounds.done,
        rounds.total
    );
    Ok(rounds.done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_part_costs_no_other_and_a_part_runs_after_it() {
        let row = |name: &str, verdict: Verdict, background: bool| Row {
            name: name.into(),
            verdict,
            seconds: 1.0,
            beside: None,
            background,
        };
        let killed = || row("killed", Verdict::Failed("ended by SIGKILL".into()), false);
        let passed = |background| row("next", Verdict::Passed, background);
        let skipped = row("next", Verdict::Skipped("no time left".into()), false);
        let check = |rows: &[Row]| check_others(rows, "killed").map_err(|error| error.to_string());

        assert_eq!(check(&[killed(), passed(false)]), Ok(()));
        let none = Err("no part ran after killed was killed".into());
        assert_eq!(check(&[passed(false), killed()]), none);
        assert_eq!(check(&[killed(), skipped, passed(true)]), none, "background work began before");
        let failed = row("next", Verdict::Failed("exit status: 1".into()), false);
        let too = Err("killed was killed, and these parts failed too: next".into());
        assert_eq!(check(&[killed(), failed, passed(false)]), too);
    }
}
