//! Traces and ranges. A process can run only one trace at a time.

use std::collections::HashSet;
use std::path::Path;
use std::thread;

use runtime::profile::{self, Trace, TraceConfig};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// The name of the range in `step` as Kineto writes it: it has every character that Kineto cannot write.
const FORWARD: &str = "forward: x?x '/?";

fn step() {
    let _step = profile::range("step");
    let x = Tensor::randn([32, 32], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let loss = {
        let _forward = profile::range("forward: x·x \"\\\n");
        x.mm(&x).sum(Kind::Float)
    };
    let _backward = profile::range("backward");
    loss.backward();
}

fn events(path: &Path) -> Vec<Value> {
    let json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    json["traceEvents"].as_array().unwrap().clone()
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["name"] == name && event["ph"] == "X").collect()
}

#[test]
fn a_trace_has_operators_ranges_threads_shapes_and_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");

    // Without a trace, ranges have no effect.
    drop(profile::range("before"));
    drop(profile::kernel("before", []));

    let trace = Trace::start(TraceConfig::default()).unwrap();
    let error = Trace::start(TraceConfig::default()).unwrap_err().to_string();
    assert_eq!(error, "Trace::start: another trace is running in this process; save it or drop it first");
    step();
    thread::spawn(step).join().unwrap();
    let inputs = [3, 5].map(|width| Tensor::ones([2, width], (Kind::BFloat16, Device::Cpu)));
    drop(profile::kernel("of our own", [&inputs[0], &inputs[1]]));
    trace.save(&path).unwrap();

    let recorded = events(&path);
    for name in ["step", FORWARD, "backward", "aten::mm"] {
        let found = named(&recorded, name);
        assert!(found.len() >= 2, "{name}: {found:?}");
        assert!(found.iter().all(|event| event["dur"].as_f64().unwrap() > 0.0), "{found:?}");
        let threads: HashSet<String> = found.iter().map(|event| event["tid"].to_string()).collect();
        assert_eq!(threads.len(), 2, "{name} on both threads");
    }
    assert!(named(&recorded, "before").is_empty());
    let own = named(&recorded, "of our own");
    assert!(own.len() == 1 && own[0]["cat"] == "cpu_op", "an operator among the others: {own:?}");
    assert_eq!(own[0]["args"]["Input Dims"].to_string(), "[[2,3],[2,5]]");
    assert_eq!(own[0]["args"]["Input type"].to_string(), r#"["c10::BFloat16","c10::BFloat16"]"#);
    assert_eq!(named(&recorded, "aten::mm")[0]["args"]["Input Dims"].to_string(), "[[32,32],[32,32]]");
    assert!(
        recorded.iter().any(|event| event["name"].as_str().is_some_and(|name| name.contains("MmBackward")))
    );
    let allocations: Vec<_> = recorded.iter().filter(|event| event["name"] == "[memory]").collect();
    // If an earlier test of this process has installed the counting allocator, the figure includes its header of 64 bytes.
    let of_a_tensor = 4 * 32 * 32..=4 * 32 * 32 + 64;
    let seen =
        |event: &&Value| event["args"]["Bytes"].as_i64().is_some_and(|bytes| of_a_tensor.contains(&bytes));
    assert!(allocations.iter().any(seen), "{allocations:?}");
    let range = named(&recorded, FORWARD)[0];
    let (start, end) =
        (range["ts"].as_f64().unwrap(), range["ts"].as_f64().unwrap() + range["dur"].as_f64().unwrap());
    assert!(named(&recorded, "aten::mm").iter().any(|mm| (start..end).contains(&mm["ts"].as_f64().unwrap())));

    // A large block that is freed and reused counts as an allocation each time, even if it was cached.
    runtime::memory::track_cpu().unwrap();
    let large = 3 << 20;
    let use_it = || drop(Tensor::empty([large / 4], (Kind::Float, Device::Cpu)));
    use_it();
    let trace = Trace::start(TraceConfig::default()).unwrap();
    (0..3).for_each(|_| use_it());
    trace.save(&path).unwrap();
    let bytes: Vec<i64> = events(&path)
        .iter()
        .filter(|event| event["name"] == "[memory]")
        .map(|event| event["args"]["Bytes"].as_i64().unwrap())
        .filter(|bytes| bytes.abs() >= large)
        .collect();
    assert_eq!(
        bytes.iter().map(|bytes| bytes.signum()).collect::<Vec<_>>(),
        [1, -1, 1, -1, 1, -1],
        "{bytes:?}"
    );

    // Fewer events on request.
    let trace = Trace::start(TraceConfig { shapes: false, memory: false, ..TraceConfig::default() }).unwrap();
    step();
    trace.save(&path).unwrap();
    let recorded = events(&path);
    assert!(recorded.iter().all(|event| event["name"] != "[memory]"));
    assert!(named(&recorded, "aten::mm").iter().all(|event| event["args"]["Input Dims"].is_null()));

    // A path that cannot be written is an error, and the next trace can start.
    let nowhere = folder.path().join("missing").join("trace.json");
    let trace = Trace::start(TraceConfig::default()).unwrap();
    step();
    let error = trace.save(&nowhere).unwrap_err().to_string();
    assert_eq!(error, format!("{}: No such file or directory (os error 2)", nowhere.display()));

    // Dropped without being saved, by a panic too, it is off.
    drop(Trace::start(TraceConfig::default()).unwrap());
    let panicked = std::panic::catch_unwind(|| {
        let _trace = Trace::start(TraceConfig::default()).unwrap();
        panic!("on purpose");
    });
    assert!(panicked.is_err());

    // A range that is open when the trace ends, a concurrent counter, and an empty trace.
    let trace = Trace::start(TraceConfig::default()).unwrap();
    let range = profile::range("open");
    let counter = profile::Counter::on_this_thread().unwrap();
    step();
    trace.save(&path).unwrap();
    drop(range);
    assert_eq!(counter.finish().unwrap().op("aten::mm").calls, 3);
    Trace::start(TraceConfig::default()).unwrap().save(&path).unwrap();
    events(&path);
}
