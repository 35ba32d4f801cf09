//! Groups over NCCL: the error without a GPU, and with one or two of them the bits of the same operations over Gloo. The same operations over
//! what stands for NCCL on a machine without a GPU, which finds orders that differ among ranks, and waits that are missing.

use std::time::Duration;

use runtime::Error;
use runtime::collectives::{Division, Group, GroupConfig, Launch, Order, ReduceConfig, ReduceOp};
use runtime::device::cuda_count;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn a_gpu_that_is_missing_is_an_error_with_the_remedy() {
    super::ranks(2).run(&"a GPU that is missing");
}

pub(super) fn missing(launch: &Launch) {
    let (store, world) = super::connect(launch, TIMEOUT);
    let device = Device::Cuda(cuda_count().unwrap());
    let on_gpus = GroupConfig { timeout: TIMEOUT, device, ..GroupConfig::default() };
    for error in [
        Group::new(&store, "gpus", on_gpus.clone()).unwrap_err(),
        // One rank needs no connection, but its tensors are there, too.
        Group::of_ranks(&store, "gpus", &[launch.rank], on_gpus).unwrap_err(),
    ] {
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        let told = error.to_string();
        let Device::Cuda(index) = device else { unreachable!() };
        assert!(told.starts_with(&format!("cuda:{index} is not available here: ")), "{told}");
        assert!(told.contains("use cpu") || told.contains("choose one of them"), "{told}");
    }
    // Nothing was connected, and the name is still free.
    let group = Group::new(&store, "gpus", GroupConfig::default()).unwrap();
    group.barrier("end").unwrap();
    world.barrier("end").unwrap();
}

#[test]
fn ranks_over_nccl_compute_the_bits_of_ranks_over_gloo() {
    match cuda_count().unwrap() {
        0 => eprintln!("skipped: no CUDA device"),
        1 => testing::ranks::Ranks { variables_of: testing::ranks::on_one_gpu, ..super::ranks(2) }
            .run(&"a GPU for each rank")
            .clear(),
        _ => super::ranks(2).run(&"a GPU for each rank").clear(),
    }
}

pub(super) fn two(launch: &Launch) {
    let (store, cpus) = super::connect(launch, TIMEOUT);
    let device = Device::Cuda(launch.local_rank % cuda_count().unwrap());
    let gpus = Group::new(&store, "gpus", GroupConfig { timeout: TIMEOUT, device, ..GroupConfig::default() })
        .unwrap();
    compare(&cpus, &gpus, device);
    compare(&cpus, &gpus.duplicate("gpus again").unwrap(), device);
    misplaced(&cpus, &gpus, device);
    gpus.barrier("end").unwrap();
    cpus.barrier("end").unwrap();
}

#[test]
fn ranks_over_the_stand_in_compute_the_bits_of_ranks_over_gloo() {
    super::ranks(2).run(&"a stand-in for NCCL");
}

pub(super) fn stand_in(launch: &Launch) {
    let (store, cpus) = super::connect(launch, TIMEOUT);
    let group = Group::new(&store, "stand-in", standing_in(TIMEOUT)).unwrap();
    compare(&cpus, &group, Device::Cpu);
    compare(&cpus, &group.duplicate("stand-in again").unwrap(), Device::Cpu);
    group.barrier("end").unwrap();
    cpus.barrier("end").unwrap();
}

fn standing_in(timeout: Duration) -> GroupConfig {
    GroupConfig { timeout, nccl_stand_in: true, ..GroupConfig::default() }
}

#[test]
fn the_stand_in_finds_other_orders_and_missing_waits() {
    super::ranks(2).run(&"faults over a stand-in");
}

pub(super) fn faults(launch: &Launch) {
    let (store, cpus) = super::connect(launch, TIMEOUT);
    let (own, peer) = (launch.rank, 1 - launch.rank);
    let group = Group::new(&store, "missing waits", standing_in(TIMEOUT)).unwrap();
    let vector = |value: f64| Tensor::full([50_000], value, (Kind::Float, Device::Cpu));
    let division = Division::even(100_000, 2);
    let gather = |whole: &Tensor, shard: &Tensor| group.all_gather(whole, division, shard, "shards").unwrap();
    let sum = |whole: &Tensor| whole.sum(Kind::Double).double_value(&[]);
    // A result that is read before the wait is not there; after it, it is.
    let whole = Tensor::zeros([100_000], (Kind::Float, Device::Cpu));
    let work = gather(&whole, &vector(1.0));
    let early = sum(&whole);
    work.wait().unwrap();
    assert_ne!(early, 100_000.0);
    assert_eq!(sum(&whole), 100_000.0);
    // A source that is overwritten before the wait was not sent.
    let shard = vector(2.0);
    let work = gather(&whole, &shard);
    let _ = shard.shallow_clone().fill_(3.0);
    work.wait().unwrap();
    assert_eq!(sum(&whole), 300_000.0);
    group.barrier("end").unwrap();

    let limit = Duration::from_millis(700);
    let failed = |name: &str, run: &dyn Fn(&Group) -> runtime::Result<()>| {
        let group = Group::new(&store, name, standing_in(limit)).unwrap();
        let failure = run(&group).unwrap_err();
        assert!(matches!(failure, Error::Collective(_)), "{name}: {failure}");
        let again = group.broadcast(&vector(0.0), 0, "later").unwrap_err();
        assert_eq!(again.to_string(), failure.to_string(), "{name}: the group is dead");
        cpus.barrier(name).unwrap();
    };
    // Both send first. Over Gloo the messages would wait in a queue.
    failed("both send first", &|group| {
        group.send(&vector(1.0), peer, "first")?.wait()?;
        group.recv(&vector(0.0), peer, "second")?.wait()
    });
    failed("another order", &|group| {
        let roots = if own == 0 { [0, 1] } else { [1, 0] };
        roots.iter().try_for_each(|&root| group.broadcast(&vector(own as f64), root, "weights"))
    });
    failed("another size", &|group| {
        let tensor = vector(1.0).narrow(0, 0, 40_000 + own as i64);
        group.all_reduce(&tensor, ReduceConfig::default(), "gradients")
    });
    cpus.barrier("end").unwrap();
}

fn compare(cpus: &Group, gpus: &Group, device: Device) {
    for kind in [Kind::Float, Kind::BFloat16, Kind::Int64, Kind::Int16] {
        for elements in [0, 1, 7, 1000, 2_100_002, 2_100_003] {
            let mut generator = Generator::new(gpus.rank() as u64 + 1).unwrap();
            let values = generator.normal(&[elements], (Kind::Float, Device::Cpu)).unwrap();
            let values = (values * 100.0).to_kind(kind);
            let expected = results(cpus, &values);
            for (index, (ours, expected)) in
                results(gpus, &values.to_device(device)).iter().zip(&expected).enumerate()
            {
                let (ours, expected) = (ours.to_device(Device::Cpu), expected);
                assert!(ours.equal(expected), "result {index} of {elements} {kind:?}");
            }
        }
    }
    let told =
        |group: &Group| group.first_failure((group.rank() == 1).then_some("disk full"), "save").unwrap();
    assert_eq!(told(gpus), told(cpus));
    assert_eq!(gpus.bytes().sent > 0, gpus.bytes().received > 0);
}

/// What every operation leaves, on the device of `values`.
fn results(group: &Group, values: &Tensor) -> Vec<Tensor> {
    let (elements, device) = (values.size()[0], values.device());
    let division = Division::even(elements, group.size());
    let own = division.range(group.rank());
    let mine = |whole: &Tensor| whole.narrow(0, own.start, own.end - own.start);
    let kind = if values.is_floating_point() { Kind::Float } else { Kind::Int64 };
    let sum = Tensor::zeros([own.end - own.start], (kind, device));
    let whole = values.zeros_like();
    let mut results = Vec::new();

    group.all_gather(&whole, division, &mine(values).copy(), "shard").unwrap().wait().unwrap();
    results.push(whole.copy());
    let in_place = values.copy();
    group.all_gather(&in_place, division, &mine(&in_place), "in place").unwrap().wait().unwrap();
    results.push(in_place);
    let parts = values.narrow(0, 0, elements / group.size() as i64 * group.size() as i64);
    let exchanged = parts.zeros_like();
    group.all_to_all(&exchanged, &parts.copy(), "parts").unwrap().wait().unwrap();
    results.push(exchanged);
    for accumulate in [false, true] {
        let options = ReduceConfig { accumulate, ..ReduceConfig::default() };
        group.reduce_scatter(values, division, &sum, options, "wide").unwrap().wait().unwrap();
        results.push(sum.copy());
    }
    let source = values.copy();
    let work = group.reduce_scatter(&source, division, &mine(&source), ReduceConfig::default(), "rounded");
    let count = Tensor::full([1], group.rank() as i64, (Kind::Int64, device));
    group.all_reduce(&count, ReduceConfig::default(), "meanwhile").unwrap();
    work.unwrap().wait().unwrap();
    results.extend([mine(&source).copy(), count]);
    for op in [ReduceOp::Sum, ReduceOp::Max] {
        let tensor = values.copy();
        group.all_reduce(&tensor, ReduceConfig { op, ..ReduceConfig::default() }, "all").unwrap();
        results.push(tensor);
    }
    for root in 0..group.size() {
        let tensor = values.copy();
        group.broadcast(&tensor, root, "weights").unwrap();
        results.push(tensor);
    }
    // Over NCCL, one of the two receives first.
    let (peer, received) = (1 - group.rank(), values.zeros_like());
    let receive = || group.recv(&received, peer, "values").unwrap();
    if group.rank() == 0 {
        group.send(values, peer, "values").unwrap().wait().unwrap();
        receive().wait().unwrap();
    } else {
        receive().wait().unwrap();
        group.send(values, peer, "values").unwrap().wait().unwrap();
    }
    results.push(received);
    // A sum of integers is the same in any order.
    if elements % 2 == 0 && values.kind() == Kind::Int64 {
        let native = ReduceConfig { order: Order::Native, ..ReduceConfig::default() };
        let (tensor, shard) = (values.copy(), mine(values).copy());
        group.all_reduce(&tensor, native, "native").unwrap();
        group.reduce_scatter(values, division, &shard, native, "native").unwrap().wait().unwrap();
        group.all_gather_native(&whole, &shard, "native").unwrap().wait().unwrap();
        results.extend([tensor, shard, whole]);
    }
    results
}

/// Tensors of another device are refused, and leave the groups alive.
fn misplaced(cpus: &Group, gpus: &Group, device: Device) {
    let on = |device: Device| Tensor::zeros([3], (Kind::Float, device));
    let told = |group: &Group, tensor: &Tensor| {
        group.all_reduce(tensor, ReduceConfig::default(), "x").unwrap_err().to_string()
    };
    let name = runtime::device::flag(device);
    assert_eq!(
        told(cpus, &on(device)),
        format!("all_reduce: the tensor is on {name}; expected contiguous memory on the CPU")
    );
    assert_eq!(
        told(gpus, &on(Device::Cpu)),
        format!("all_reduce: the tensor is on cpu; expected contiguous memory on {name}, the group's device")
    );
    gpus.barrier("alive").unwrap();
}
