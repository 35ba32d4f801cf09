//! Collectives, in processes: this binary starts itself as the ranks.

mod failures;
mod launch;
mod nccl;
mod operations;
mod wire;

use std::time::Duration;

use runtime::collectives::{Group, GroupConfig, Launch, Store};
use testing::ranks::Ranks;

/// What a rank does. A panic fails it.
type Case = fn(&Launch);

/// By name.
const CASES: &[(&str, Case)] = &[
    ("operations", operations::rank),
    ("wire", wire::rank),
    ("a peer that comes late", failures::late_peer),
    ("a peer that dies", failures::dying_peer),
    ("groups that fail", failures::failing_groups),
    ("a GPU that is missing", nccl::missing),
    ("a GPU for each rank", nccl::two),
    ("a stand-in for NCCL", nccl::stand_in),
    ("faults over a stand-in", nccl::faults),
];

/// A rank's process runs this test alone.
#[test]
fn a_rank() {
    testing::ranks::rank(|name: String, launch| {
        let (_, case) = CASES.iter().find(|(case, _)| *case == name).expect("the case is in the table");
        case(launch);
    });
}

fn ranks(count: usize) -> Ranks<'static> {
    Ranks::new("collectives::a_rank", count)
}

fn connect(launch: &Launch, timeout: Duration) -> (Store, Group) {
    let store = Store::connect(launch, Duration::from_secs(30)).unwrap();
    let group = Group::new(&store, "world", GroupConfig { timeout, ..GroupConfig::default() }).unwrap();
    (store, group)
}

/// Runs `work` in a group of the first `count` ranks. All ranks wait for its end.
fn among(
    world: &Group,
    store: &Store,
    count: usize,
    name: &str,
    timeout: Duration,
    work: impl FnOnce(&Group),
) {
    let first: Vec<usize> = (0..count).collect();
    let options = GroupConfig { timeout, ..GroupConfig::default() };
    let group = first.contains(&world.rank()).then(|| Group::of_ranks(store, name, &first, options).unwrap());
    if let Some(group) = &group {
        work(group);
    }
    world.barrier(name).unwrap();
}
