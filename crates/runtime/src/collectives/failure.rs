//! Why a group is dead, and what the other ranks say about it.

use std::fmt;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::Store;

/// How long a rank that has failed waits for the other ranks' reports.
const PATIENCE: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(20);
/// Of how many ranks reports are asked.
const ASKED: usize = 16;

/// The first failure of a group. The group is dead from then on, and every later call returns this again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveError {
    /// The group's name.
    pub group: String,
    /// This process's rank in the group.
    pub rank: usize,
    /// Number of ranks of the group.
    pub size: usize,
    /// The operation that failed.
    pub operation: &'static str,
    /// The caller's name for it, such as a layer's.
    pub label: String,
    /// The other rank of the transfer that failed.
    pub peer: Option<usize>,
    /// Description of the failure.
    pub cause: String,
    /// Failures that other ranks reported within half a second, with their ranks.
    pub reports: Vec<(usize, String)>,
}

impl CollectiveError {
    /// Returns what this rank reports to the others.
    pub(super) fn report(&self) -> String {
        let Self { operation, label, cause, .. } = self;
        let with = self.peer.map_or_else(String::new, |peer| format!(" with rank {peer}"));
        format!("{operation} of `{label}`{with}: {cause}")
    }
}

impl fmt::Display for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, rank, size, .. } = self;
        write!(f, "rank {rank} of {size}, group `{group}`: {}", self.report())?;
        for (rank, report) in &self.reports {
            write!(f, "; rank {rank} reports: {report}")?;
        }
        Ok(())
    }
}

impl std::error::Error for CollectiveError {}

/// Returns the message of Gloo without the line of its source, and without its advice.
pub(super) fn without_source_line(message: &str) -> &str {
    let message = message.split(". This is typically caused by").next().unwrap_or(message).trim();
    let rest = message.strip_prefix('[').and_then(|rest| rest.split_once("] "));
    rest.filter(|(place, _)| place.contains(".cc:")).map_or(message, |(_, rest)| rest)
}

/// Tells the other ranks of a failure, and returns what they tell. Takes [`PATIENCE`] at most: the process that keeps the store may
/// be the one that hangs, so a thread asks, which is left behind then.
pub(super) fn exchange(
    store: &Store,
    prefix: &str,
    (rank, size): (usize, usize),
    own: String,
) -> Vec<(usize, String)> {
    let (sender, receiver) = mpsc::channel();
    let (store, prefix) = (store.clone(), prefix.to_owned());
    let until = Instant::now() + PATIENCE;
    thread::spawn(move || {
        let key = |rank: usize| format!("{prefix}/failed/{rank}");
        if store.set(&key(rank), own.as_bytes()).is_err() {
            return;
        }
        let mut missing: Vec<usize> = (0..size).filter(|&other| other != rank).take(ASKED).collect();
        while !missing.is_empty() && Instant::now() < until {
            let mut index = 0;
            while let Some(&other) = missing.get(index) {
                match store.has(&key(other)) {
                    Ok(false) => index += 1,
                    Ok(true) => {
                        let report = store.get(&key(other), PAUSE).unwrap_or_default();
                        let _ = sender.send((other, String::from_utf8_lossy(&report).into_owned()));
                        missing.remove(index);
                    }
                    Err(_) => return,
                }
            }
            thread::sleep(PAUSE);
        }
    });
    let mut reports = Vec::new();
    while let Ok(report) = receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
        reports.push(report);
    }
    reports.sort();
    reports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_gloos_source_is_left_out() {
        let check = |message, expected| assert_eq!(without_source_line(message), expected);
        check(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3. This is \
             typically caused by a remote worker crashing.",
            "Connection closed by peer [127.0.0.1]:3",
        );
        check("[Rank 0]: Ranks 1 failed", "[Rank 0]: Ranks 1 failed");
        check("wait timeout", "wait timeout");
    }

    #[test]
    fn an_error_names_rank_peer_operation_and_label() {
        let error = CollectiveError {
            group: "world".into(),
            rank: 0,
            size: 2,
            operation: "all_gather",
            label: "layer 3".into(),
            peer: Some(1),
            cause: "Connection closed by peer".into(),
            reports: vec![(1, "send of `x`: broken".into())],
        };
        assert_eq!(
            error.to_string(),
            "rank 0 of 2, group `world`: all_gather of `layer 3` with rank 1: Connection closed by peer; rank 1 reports: \
             send of `x`: broken"
        );
    }
}
