//! The last operations of a rank, for the report of a failure.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

/// How many operations are kept.
const KEPT: usize = 256;
/// The folder that the log of a failure is written to.
const FOLDER: &str = "FRUGAL_COLLECTIVES_DUMP";

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Posted,
    Done,
    Failed,
}

#[derive(Debug)]
struct Entry {
    operation: &'static str,
    label: Box<str>,
    bytes: u64,
    posted: Instant,
    progress: Progress,
}

/// The last operations of a group.
#[derive(Debug)]
pub(super) struct OperationLog {
    start: Instant,
    /// Number of the first entry.
    first: u64,
    entries: VecDeque<Entry>,
}

impl OperationLog {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), first: 0, entries: VecDeque::with_capacity(KEPT) }
    }

    /// Adds an operation that sends `bytes`, and returns its number.
    pub(super) fn add(&mut self, operation: &'static str, label: &str, bytes: u64) -> u64 {
        if self.entries.len() == KEPT {
            self.entries.pop_front();
            self.first += 1;
        }
        let (posted, progress) = (Instant::now(), Progress::Posted);
        self.entries.push_back(Entry { operation, label: label.into(), bytes, posted, progress });
        self.first + self.entries.len() as u64 - 1
    }

    pub(super) fn set(&mut self, number: u64, progress: Progress) {
        let index = number.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        if let Some(entry) = index.and_then(|index| self.entries.get_mut(index)) {
            entry.progress = progress;
        }
    }

    /// Writes the operations into a file of the folder that `FRUGAL_COLLECTIVES_DUMP` names, if it is set.
    pub(super) fn dump(&self, group: &str, rank: usize, failure: &str) {
        let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
        let text = self.text(group, rank, failure);
        let name = format!("collectives-{}-rank-{rank}.txt", group.replace('/', "-"));
        let written =
            std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(folder.join(name), &text));
        if let Err(cause) = written {
            eprint!("{FOLDER}={}: {cause}\n{text}", folder.display());
        }
    }

    fn text(&self, group: &str, rank: usize, failure: &str) -> String {
        let count = self.entries.len();
        let mut text = format!("{failure}\nthe last {count} operations of rank {rank} in group `{group}`:\n");
        for (number, entry) in (self.first..).zip(&self.entries) {
            let seconds = entry.posted.duration_since(self.start).as_secs_f64();
            let Entry { operation, label, bytes, progress, .. } = entry;
            let progress = match progress {
                Progress::Posted => "not done",
                Progress::Done => "done",
                Progress::Failed => "failed",
            };
            let _ = writeln!(
                text,
                "  {number:>8}  {seconds:>10.3} s  {operation} `{label}`, {bytes} B sent: {progress}"
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_operations_are_kept_with_their_numbers() {
        let mut log = OperationLog::new();
        for number in 0..300 {
            assert_eq!(log.add("send", &format!("message {number}"), 8), number);
        }
        log.set(3, Progress::Done);
        log.set(298, Progress::Done);
        log.set(299, Progress::Failed);
        let text = log.text("world", 1, "why");
        assert!(
            text.starts_with("why\nthe last 256 operations of rank 1 in group `world`:\n        44 "),
            "{text}"
        );
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[lines.len() - 3].ends_with("send `message 297`, 8 B sent: not done"), "{text}");
        assert!(lines[lines.len() - 2].ends_with("send `message 298`, 8 B sent: done"), "{text}");
        assert!(lines[lines.len() - 1].ends_with("send `message 299`, 8 B sent: failed"), "{text}");
    }
}
