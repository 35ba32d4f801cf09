//! Peers that die, hang or disagree: what the others say, and that the group stays dead.

use std::time::{Duration, Instant};

use expect_test::expect;
use runtime::Error;
use runtime::collectives::{CollectiveError, Division, Group, GroupConfig, Launch, ReduceConfig, Store};
use tch::{Device, Kind, Tensor};
use testing::ranks::Ranks;

/// The timeout of the groups here.
const TIMEOUT: Duration = Duration::from_secs(1);
/// What an error may take beyond it.
const SLACK: Duration = Duration::from_secs(2);

fn zeros(elements: i64) -> Tensor {
    Tensor::zeros([elements], (Kind::Float, Device::Cpu))
}

#[track_caller]
fn collective(error: Error) -> CollectiveError {
    match error {
        Error::Collective(error) => *error,
        other => panic!("another error: {other}"),
    }
}

/// Gathers until that fails.
fn gather_until_it_fails(group: &Group) -> CollectiveError {
    let start = Instant::now();
    let (whole, division) = (zeros(1 << 20), Division::even(1 << 20, group.size()));
    let own = division.range(group.rank());
    let shard = whole.narrow(0, own.start, own.end - own.start);
    let error = loop {
        let work = group.all_gather(&whole, division, &shard, "layer 7");
        if let Err(error) = work.and_then(|work| work.wait()) {
            break collective(error);
        }
    };
    assert!(start.elapsed() < TIMEOUT + SLACK, "{:?}", start.elapsed());
    error
}

#[test]
fn a_peer_that_dies_is_named_and_the_operations_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dump");
    let variables = [("FRUGAL_COLLECTIVES_DUMP", path.to_str().unwrap())];
    Ranks { lost: &[1], variables: &variables, ..super::ranks(3) }.run(&"a peer that dies");
    for rank in [0, 2] {
        let text = std::fs::read_to_string(path.join(format!("collectives-world-rank-{rank}.txt"))).unwrap();
        assert!(text.contains("all_gather of `layer 7`"), "{text}");
        let last = text.lines().find(|line| line.ends_with(": failed")).unwrap();
        assert!(last.contains("all_gather `layer 7`, "), "{text}");
    }
}

pub(super) fn dying_peer(launch: &Launch) {
    let (_store, group) = super::connect(launch, TIMEOUT);
    group.barrier("start").unwrap();
    if group.rank() == 1 {
        std::process::exit(9);
    }
    let error = gather_until_it_fails(&group);
    assert_eq!((error.operation, &*error.label, error.size), ("all_gather", "layer 7", 3));
    // A rank may see its other peer go first, because that one has seen the death.
    let told = error.to_string();
    assert!(told.contains("with rank 1: "), "{told}");
    // The group is dead, and says why.
    let later = collective(group.all_reduce(&zeros(1), ReduceConfig::default(), "norm").unwrap_err());
    assert_eq!(later, error);
    let later = collective(group.barrier("end").unwrap_err());
    assert_eq!(later, error);
    assert_eq!(collective(group.agree(&[]).unwrap_err()), error);
}

#[test]
fn a_store_that_not_all_ranks_have_reached_can_be_tried_again() {
    super::ranks(2).run(&"a peer that comes late");
}

/// The second rank comes when the first has failed once, which it sees by a file named after their parent.
pub(super) fn late_peer(launch: &Launch) {
    let failed = std::env::temp_dir().join(format!("frugal-late-peer-{}", launch.master_port));
    if launch.rank == 0 {
        let error = Store::connect(launch, Duration::from_millis(100)).unwrap_err().to_string();
        assert!(error.contains("rank 1 of 2 did not come for "), "{error}");
        std::fs::write(&failed, "").unwrap();
    } else {
        while !failed.exists() {
            std::thread::yield_now();
        }
    }
    let (_store, group) = super::connect(launch, Duration::from_secs(30));
    group.barrier("end").unwrap();
    let _ = std::fs::remove_file(failed);
}

#[test]
fn groups_that_fail_say_why_and_leave_their_processes_alive() {
    super::ranks(3).run(&"groups that fail");
}

pub(super) fn failing_groups(launch: &Launch) {
    let (store, world) = super::connect(launch, Duration::from_secs(30));
    let among = |count: usize, name: &str, check: &dyn Fn(&Group)| {
        super::among(&world, &store, count, name, TIMEOUT, check);
    };
    among(2, "a peer that hangs", &hanging_peer);
    among(3, "a rank that is late for the barrier", &late_for_the_barrier);
    among(3, "ranks that disagree", &disagreement);
    among(3, "a rank that does not come to agree", &absent);
    among(2, "messages of two sizes", &two_sizes);
    among(2, "arguments", &|group| arguments(launch, &store, group));
}

fn hanging_peer(group: &Group) {
    if group.rank() == 1 {
        return;
    }
    let start = Instant::now();
    let (gradients, shard) = (zeros(1 << 20), zeros(1 << 19));
    let division = Division::even(1 << 20, 2);
    let work = group.reduce_scatter(&gradients, division, &shard, ReduceConfig::default(), "layer 2");
    let error = collective(work.unwrap().wait().unwrap_err());
    assert!((TIMEOUT..TIMEOUT + SLACK).contains(&start.elapsed()), "{:?}", start.elapsed());
    assert_eq!((error.operation, &*error.label, error.peer), ("reduce_scatter", "layer 2", Some(1)));
    assert!(error.cause.contains("Timed out"), "{error}");
    assert_eq!(collective(group.send(&shard, 1, "x").unwrap_err()), error);
}

fn late_for_the_barrier(group: &Group) {
    if group.rank() == 2 {
        return;
    }
    let start = Instant::now();
    let error = collective(group.barrier("before saving").unwrap_err());
    assert!(start.elapsed() < TIMEOUT + SLACK, "{:?}", start.elapsed());
    let told = error.to_string();
    assert!(
        told.contains("barrier of `before saving`") && told.contains("rank 2 did not come, or ended before"),
        "{told}"
    );
}

fn disagreement(group: &Group) {
    let layers = if group.rank() == 2 { "14" } else { "12" };
    group.agree(&[("torch", "2.13.0")]).unwrap();
    let fields = [("torch", "2.13.0"), ("layers", layers), ("hidden", layers)];
    let error = collective(group.agree(&fields).unwrap_err());
    assert_eq!(error.cause, "`layers` is 12 on rank 0 and 14 on rank 2");
    assert_eq!(group.bytes().sent + group.bytes().received, 0);
    assert_eq!(collective(group.barrier("end").unwrap_err()), error);
}

fn absent(group: &Group) {
    if group.rank() == 1 {
        return;
    }
    let error = collective(group.agree(&[("layers", "12")]).unwrap_err());
    assert_eq!(error.cause, "rank 1 did not come within 1s");
}

fn two_sizes(group: &Group) {
    let work = match group.rank() {
        0 => group.send(&zeros(4), 1, "four"),
        _ => group.recv(&zeros(3), 0, "three"),
    };
    let error = collective(work.unwrap().wait().unwrap_err());
    let told = error.to_string();
    assert!(told.contains("send of `four`") && told.contains("recv of `three`"), "{told}");
}

/// Invalid arguments are refused, and leave the group alive.
fn arguments(launch: &Launch, store: &Store, group: &Group) {
    let rank = group.rank();
    let refused = |result: runtime::Result<()>| result.unwrap_err().to_string();
    let wait = |work: runtime::Result<runtime::collectives::Work>| work.and_then(|work| work.wait());
    let (options, division) = (ReduceConfig::default(), Division::even(6, 2));
    let told = [
        refused(wait(group.send(&zeros(3), rank, "x"))),
        refused(wait(group.recv(&zeros(6).view([2, 3]).transpose(0, 1), 1 - rank, "x"))),
        refused(wait(group.all_gather(&zeros(6), division, &zeros(2), "x"))),
        refused(wait(group.all_gather(&zeros(6), division, &zeros(3).to_kind(Kind::Double), "x"))),
        refused(wait(group.all_to_all(&zeros(6), &zeros(4), "x"))),
        refused(wait(group.all_to_all(&zeros(5), &zeros(5), "x"))),
        refused(wait(group.reduce_scatter(&zeros(6), division, &zeros(3).to_kind(Kind::Half), options, "x"))),
        refused(group.all_reduce(&zeros(3).to_kind(Kind::Bool), options, "x")),
        refused(group.broadcast(&zeros(3), 2, "x")),
        refused(Group::new(store, "world", GroupConfig::default()).map(drop)),
        refused(Group::of_ranks(store, "b", &[1 - rank], GroupConfig::default()).map(drop)),
        refused(Store::connect(launch, TIMEOUT).map(drop).and(Err(Error::invalid("store", "connected")))),
    ];
    if rank == 0 {
        expect![[r#"
            send: rank 0 has no peer 0 in a group of 2
            recv: the tensor of shape [3, 2] is not contiguous; expected contiguous memory on the CPU
            all_gather: the whole tensor has 6 elements and the shard of rank 0 has 2; expected 6 and 3, as 3 per rank give for 2 ranks
            all_gather: `x`: the shard is Double; expected Float, as the whole tensor
            all_to_all: `x`: the target has 6 elements of Float and the source 4 of Float; expected the same
            all_to_all: `x`: 5 elements; expected a multiple of 2, a part for each rank
            reduce_scatter: `x`: the shard is Half; expected Float, in which Float is reduced, or without accumulation Float
            reduce: Bool is not a dtype that is summed
            broadcast: `x`: there is no rank 2 in a group of 2
            group: `world`: a group of that name was made before; give each its own name
            group: `b`: the ranks [1] leave out this process's, 0
            store: this process has connected before; clone the store that it has
        "#]]
        .assert_eq(&(told.join("\n") + "\n"));
    }
    group.all_reduce(&zeros(3), options, "alive").unwrap();
    group.barrier("end").unwrap();
}
