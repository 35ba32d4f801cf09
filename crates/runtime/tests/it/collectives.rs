//! Collectives, in processes: this binary starts itself as the ranks.

mod failures;
mod launch;
mod operations;
mod processes;
mod wire;

use std::time::Duration;

use processes::{Case, run_as_rank};
use runtime::collectives::{Group, GroupOptions, Launch, Store};

/// What a rank does, by name.
const CASES: &[(&str, Case)] = &[
    ("operations", operations::rank),
    ("wire", wire::rank),
    ("a peer that dies", failures::dying_peer),
    ("a peer that hangs", failures::hanging_peer),
    ("a rank that is late for the barrier", failures::late_for_the_barrier),
    ("ranks that disagree", failures::disagreement),
    ("a rank that does not come to agree", failures::absent),
    ("messages of two sizes", failures::two_sizes),
    ("arguments", failures::arguments),
];

/// A rank's process runs this test alone, with its case's name in the environment.
#[test]
fn a_rank() {
    run_as_rank(CASES);
}

fn connect(launch: &Launch, timeout: Duration) -> (Store, Group) {
    let store = Store::connect(launch, Duration::from_secs(30)).unwrap();
    let group = Group::new(&store, "world", GroupOptions { timeout, ..GroupOptions::default() }).unwrap();
    (store, group)
}
