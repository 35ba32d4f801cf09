//! Why a group is dead, and what the other ranks say about it.

use std::fmt;
use std::sync::{Arc, mpsc};
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
    /// The name of each rank's machine; none where all are on one.
    pub machines: Arc<[String]>,
    /// Description of the failure.
    pub cause: String,
    /// Failures that other ranks reported within half a second, with their ranks.
    pub reports: Vec<(usize, String)>,
}

impl CollectiveError {
    /// Returns what this rank reports to the others.
    pub(super) fn report(&self) -> String {
        let Self { operation, label, cause, machines, .. } = self;
        let with = self.peer.map_or_else(String::new, |peer| format!(" with {}", named(machines, peer)));
        format!("{operation} of `{label}`{with}: {cause}")
    }
}

impl fmt::Display for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, size, machines, .. } = self;
        write!(f, "{} of {size}, group `{group}`: {}", named(machines, self.rank), self.report())?;
        for (rank, report) in &self.reports {
            write!(f, "; {} reports: {report}", named(machines, *rank))?;
        }
        Ok(())
    }
}

impl std::error::Error for CollectiveError {}

/// Returns what a rank is called in messages: `rank 3`, or `rank 3 on node-1` where there are several machines.
pub(super) fn named(machines: &[String], rank: usize) -> String {
    machines.get(rank).map_or_else(|| format!("rank {rank}"), |machine| format!("rank {rank} on {machine}"))
}

/// Returns what a failed barrier means. Rank 0 names the ranks that are missing (`Ranks 1, 3 failed to pass monitoredBarrier in 1000 ms`),
/// and the others see that rank 0 has given up (`… received errors while waiting for send/recv from rank 0 …`).
pub(super) fn of_barrier(message: &str, machines: &[String]) -> String {
    let ranks = |before: &str, after: &str| -> Vec<String> {
        let ranks = message.split_once(before).and_then(|(_, rest)| rest.split_once(after));
        let ranks = ranks.into_iter().flat_map(|(ranks, _)| ranks.split(", "));
        ranks.filter_map(|rank| rank.parse().ok()).map(|rank| named(machines, rank)).collect()
    };
    let late = ranks("Ranks ", " failed to pass monitoredBarrier");
    if !late.is_empty() {
        return format!("{} did not come, or ended before; see the output there", late.join(", "));
    }
    let first = ranks("send/recv from rank ", ". Please check");
    match first.first() {
        Some(first) => format!("{first} gave up, or ended before; see the output there"),
        None => message.to_owned(),
    }
}

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
                        let report = store.get(&key(other), PATIENCE).unwrap_or_default();
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
    fn a_barrier_names_the_ranks_that_are_missing() {
        let machines = ["a", "b", "c", "d"].map(str::to_owned);
        let message = "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 1000 ms";
        let text = "rank 1 on b, rank 3 on d did not come, or ended before; see the output there";
        assert_eq!(of_barrier(message, &machines), text);
        assert_eq!(of_barrier(message, &[]), text.replace(" on b", "").replace(" on d", ""));
        let message = "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please \
                       check rank 0 logs for faulty rank.";
        assert_eq!(
            of_barrier(message, &machines),
            "rank 0 on a gave up, or ended before; see the output there"
        );
        assert_eq!(of_barrier("another", &machines), "another");
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
            machines: Arc::default(),
            cause: "Connection closed by peer".into(),
            reports: vec![(1, "send of `x`: broken".into())],
        };
        assert_eq!(
            error.to_string(),
            "rank 0 of 2, group `world`: all_gather of `layer 3` with rank 1: Connection closed by peer; rank 1 reports: \
             send of `x`: broken"
        );
        let machines = ["node-0", "node-1"].map(str::to_owned);
        let error = CollectiveError { machines: machines.into(), ..error };
        assert_eq!(
            error.to_string(),
            "rank 0 on node-0 of 2, group `world`: all_gather of `layer 3` with rank 1 on node-1: Connection closed by peer; \
             rank 1 on node-1 reports: send of `x`: broken"
        );
    }
}
