//! Every operation against arithmetic, for 1 to 4 ranks, odd sizes and dtypes.

use std::time::Duration;

use runtime::collectives::{
    Bytes, Division, Group, GroupConfig, Launch, Order, ReduceConfig, ReduceOp, Store,
};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

#[test]
fn every_operation_computes_what_one_process_would() {
    super::ranks(4).run(&"operations");
}

/// Small sizes, one that is not divisible, one of several pieces for each rank.
const SIZES: [i64; 5] = [0, 1, 7, 1000, 2_100_003];
const TIMEOUT: Duration = Duration::from_secs(30);
const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Int64];

pub(super) fn rank(launch: &Launch) {
    let (store, world) = super::connect(launch, TIMEOUT);
    for count in 1..=world.size() {
        super::among(&world, &store, count, &format!("{count} ranks"), TIMEOUT, operations);
    }
    parts_of_the_run(&world, &store);
    world.barrier("end").unwrap();
}

fn operations(group: &Group) {
    for kind in KINDS {
        for elements in SIZES {
            if elements > 1000 && kind == Kind::Int64 {
                continue;
            }
            let given: Vec<Tensor> = (0..group.size()).map(|rank| values(rank, elements, kind)).collect();
            gather(group, &given);
            reduce(group, &given);
            broadcast(group, &given);
            ring(group, &given);
            exchange(group, elements, kind);
        }
    }
    native(group);
    blocks(group);
    first_failure(group);
    group.barrier("end").unwrap();
}

/// All ranks learn the text of the first that has one.
fn first_failure(group: &Group) {
    let told = |failed: &dyn Fn(usize) -> bool| {
        let text = format!("rank {} has no space", group.rank());
        group.first_failure(failed(group.rank()).then_some(text.as_str()), "save").unwrap()
    };
    assert_eq!(told(&|_| false), None);
    for first in 0..group.size() {
        let expected = Some((first, format!("rank {first} has no space")));
        assert_eq!(told(&|rank| rank == first), expected);
        assert_eq!(told(&|rank| rank >= first), expected);
    }
    assert_eq!(group.first_failure(Some(""), "save").unwrap(), Some((0, String::new())));
}

/// What rank `rank` brings. Sums of these in another order have other bits.
fn values(rank: usize, elements: i64, kind: Kind) -> Tensor {
    let mut generator = Generator::new(rank as u64 + 1).unwrap();
    let normal = generator.normal(&[elements], (Kind::Float, Device::Cpu)).unwrap();
    (normal * 100.0).to_kind(kind)
}

/// `(((g₀ + g₁) + g₂) + …)` in the dtype of accumulation.
fn sequential(given: &[Tensor], op: ReduceOp) -> Tensor {
    let wide = match (op, given[0].kind()) {
        (ReduceOp::Sum, Kind::BFloat16) => Kind::Float,
        (_, kind) => kind,
    };
    let mut terms = given.iter().map(|term| term.to_kind(wide));
    let first = terms.next().unwrap().copy();
    terms.fold(first, |sum, term| match op {
        ReduceOp::Sum => sum + term,
        ReduceOp::Max => sum.maximum(&term),
    })
}

/// Equal to the last bit.
#[track_caller]
fn same(ours: &Tensor, expected: &Tensor) {
    assert_eq!(ours.kind(), expected.kind());
    assert_eq!(ours.size(), expected.size());
    let bits = |tensor: &Tensor| match tensor.kind() {
        Kind::Float => tensor.view_dtype(Kind::Int),
        Kind::BFloat16 => tensor.view_dtype(Kind::Int16),
        _ => tensor.shallow_clone(),
    };
    assert!(bits(ours).equal(&bits(expected)), "{:?} of {:?}", ours.kind(), ours.size());
}

/// Checks the bytes that `work` sends and receives.
#[track_caller]
fn counted(group: &Group, sent: i64, received: i64, work: impl FnOnce()) {
    let before = group.bytes();
    work();
    let after = group.bytes();
    let moved = Bytes { sent: after.sent - before.sent, received: after.received - before.received };
    assert_eq!(moved, Bytes { sent: sent as u64, received: received as u64 });
}

fn width(kind: Kind) -> i64 {
    kind.elt_size_in_bytes() as i64
}

fn gather(group: &Group, given: &[Tensor]) {
    let (whole, kind) = (&given[0], given[0].kind());
    let elements = whole.size()[0];
    let division = Division::even(elements, group.size());
    let own = division.range(group.rank());
    let shard = whole.narrow(0, own.start, own.end - own.start).copy();
    let others = group.size() as i64 - 1;
    let sent = (own.end - own.start) * others * width(kind);
    let received = (elements - (own.end - own.start)) * width(kind);
    let target = Tensor::zeros([elements], (kind, Device::Cpu)) - 1;
    counted(group, sent, received, || {
        group.all_gather(&target, division, &shard, "shard").unwrap().wait().unwrap();
    });
    same(&target, whole);
    // From its place in the whole, and with a work that is dropped.
    let target = Tensor::zeros([elements], (kind, Device::Cpu));
    let in_place = target.narrow(0, own.start, own.end - own.start);
    in_place.shallow_clone().copy_(&shard);
    drop(group.all_gather(&target, division, &in_place, "in place").unwrap());
    same(&target, whole);
}

/// Part r of each rank's tensor arrives on rank r, in the order of ranks.
fn exchange(group: &Group, per_part: i64, kind: Kind) {
    let ranks = group.size() as i64;
    let given: Vec<Tensor> = (0..group.size()).map(|rank| values(rank, per_part * ranks, kind)).collect();
    let own = per_part * group.rank() as i64;
    let expected: Vec<Tensor> = given.iter().map(|source| source.narrow(0, own, per_part)).collect();
    let source = &given[group.rank()];
    let target = source.zeros_like() - 1;
    let bytes = per_part * (ranks - 1) * width(kind);
    counted(group, bytes, bytes, || {
        group.all_to_all(&target, source, "parts").unwrap().wait().unwrap();
    });
    same(&target, &Tensor::cat(&expected, 0));
}

fn reduce(group: &Group, given: &[Tensor]) {
    let (source, kind) = (&given[group.rank()], given[0].kind());
    let elements = source.size()[0];
    let division = Division::even(elements, group.size());
    let own = division.range(group.rank());
    let mine = |whole: &Tensor| whole.narrow(0, own.start, own.end - own.start).copy();
    let sum = sequential(given, ReduceOp::Sum);
    let sent = (elements - (own.end - own.start)) * width(kind);
    let received = (own.end - own.start) * (group.size() as i64 - 1) * width(kind);

    let ordered = ReduceConfig::default();
    let shard = mine(&sum).zeros_like();
    counted(group, sent, received, || {
        group.reduce_scatter(source, division, &shard, ordered, "wide").unwrap().wait().unwrap();
    });
    same(&shard, &mine(&sum));
    // Two rounds onto one accumulator are the order of global micro-batches.
    let onto = ReduceConfig { accumulate: true, ..ordered };
    let first = group.reduce_scatter(source, division, &shard, onto, "second round").unwrap();
    first.wait().unwrap();
    let twice = given.iter().fold(sum.copy(), |sum, term| &sum + term.to_kind(sum.kind()));
    same(&shard, &mine(&twice));
    // Rounded once, in the source's own memory, under way while another operation runs.
    let copy = source.copy();
    let part = copy.narrow(0, own.start, own.end - own.start);
    let work = group.reduce_scatter(&copy, division, &part, ordered, "in place").unwrap();
    let count = Tensor::from(group.rank() as i64);
    group.all_reduce(&count, ordered, "count").unwrap();
    work.wait().unwrap();
    same(&part, &mine(&sum).to_kind(kind));
    let ranks = group.size() as i64;
    assert_eq!(count.int64_value(&[]), ranks * (ranks - 1) / 2);

    for op in [ReduceOp::Sum, ReduceOp::Max] {
        let tensor = source.copy();
        let options = ReduceConfig { op, ..ordered };
        let bytes = elements * width(kind);
        // Whole tensors, or the terms of the other parts and the sum of the own.
        let moved = if bytes <= 64 << 10 { bytes * (group.size() as i64 - 1) } else { sent + received };
        counted(group, moved, moved, || group.all_reduce(&tensor, options, "all").unwrap());
        same(&tensor, &sequential(given, op).to_kind(kind));
    }
}

fn broadcast(group: &Group, given: &[Tensor]) {
    for (root, expected) in given.iter().enumerate() {
        let tensor = given[group.rank()].copy();
        group.broadcast(&tensor, root, "weights").unwrap();
        same(&tensor, expected);
    }
}

/// Every rank sends to the next one and receives from the last one, two messages at a time.
fn ring(group: &Group, given: &[Tensor]) {
    let (rank, size) = (group.rank(), group.size());
    if size == 1 {
        return;
    }
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    let (first, second) = (given[rank].zeros_like(), given[rank].zeros_like());
    let works = [
        group.recv(&first, last, "first").unwrap(),
        group.recv(&second, last, "second").unwrap(),
        group.send(&given[rank], next, "first").unwrap(),
        group.send(&given[next], next, "second").unwrap(),
    ];
    for work in works.into_iter().rev() {
        work.wait().unwrap();
    }
    same(&first, &given[last]);
    same(&second, &given[rank]);
}

fn native(group: &Group) {
    let native = ReduceConfig { order: Order::Native, ..ReduceConfig::default() };
    let size = group.size() as i64;
    let given: Vec<Tensor> = (0..group.size()).map(|rank| values(rank, 5 * size, Kind::Int64)).collect();
    let (source, sum) = (&given[group.rank()], sequential(&given, ReduceOp::Sum));
    let division = Division::even(5 * size, group.size());
    let shard = Tensor::zeros([5], (Kind::Int64, Device::Cpu));
    group.reduce_scatter(source, division, &shard, native, "native").unwrap().wait().unwrap();
    same(&shard, &sum.narrow(0, 5 * group.rank() as i64, 5).copy());
    let tensor = source.copy();
    group.all_reduce(&tensor, native, "native").unwrap();
    same(&tensor, &sum);
    let whole = sum.zeros_like();
    group.all_gather_native(&whole, &shard, "native").unwrap().wait().unwrap();
    same(&whole, &sum);
}

/// Shards of whole blocks, the last ones empty.
fn blocks(group: &Group) {
    let whole = values(0, 10, Kind::Float);
    let division = Division { elements: 10, per_rank: if group.size() == 1 { 12 } else { 8 } };
    let own = division.range(group.rank());
    let shard = whole.narrow(0, own.start, own.end - own.start).copy();
    let target = whole.zeros_like();
    group.all_gather(&target, division, &shard, "blocks").unwrap().wait().unwrap();
    same(&target, &whole);
    let work = group.reduce_scatter(&whole, division, &shard, ReduceConfig::default(), "blocks");
    work.unwrap().wait().unwrap();
    let times = (0..group.size()).map(|_| whole.shallow_clone()).reduce(|sum, term| sum + term).unwrap();
    same(&shard, &times.narrow(0, own.start, own.end - own.start).copy());
}

/// Groups of some ranks: the first, and all others.
fn parts_of_the_run(world: &Group, store: &Store) {
    let (name, ranks): (&str, Vec<usize>) = match world.rank() {
        0 => ("first", vec![0]),
        _ => ("others", (1..world.size()).collect()),
    };
    let group = Group::of_ranks(store, name, &ranks, GroupConfig::default()).unwrap();
    assert_eq!((group.size(), ranks[group.rank()]), (ranks.len(), world.rank()));
    let tensor = Tensor::from(world.rank() as i64);
    group.all_reduce(&tensor, ReduceConfig::default(), "ranks").unwrap();
    assert_eq!(tensor.int64_value(&[]), ranks.iter().sum::<usize>() as i64);
    group.barrier("end").unwrap();
}
