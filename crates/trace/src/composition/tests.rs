//! Steps whose times are set by hand, so that each figure is known.

use super::*;

/// A trace in microseconds: two threads, a step of 100 and one of 50.
fn trace(events: &[(&str, &str, i64, f64, f64)]) -> Profile {
    let events: Vec<serde_json::Value> = events
        .iter()
        .map(|&(cat, name, tid, ts, dur)| {
            let args = serde_json::json!({ "Bytes": dur as i64, "bytes": 64 });
            let (ph, dur) = if name == "[memory]" { ("i", 0.0) } else { ("X", dur) };
            serde_json::json!({ "ph": ph, "cat": cat, "name": name, "tid": tid, "ts": ts, "dur": dur, "args": args })
        })
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json");
    std::fs::write(&path, serde_json::json!({ "traceEvents": events }).to_string()).unwrap();
    Profile::read(&path).unwrap()
}

const EVENTS: &[(&str, &str, i64, f64, f64)] = &[
    ("user_annotation", "step", 1, 0.0, 100.0),
    ("user_annotation", "forward", 1, 10.0, 40.0),
    ("user_annotation", "backward", 1, 50.0, 30.0),
    // A range within a part belongs to the part.
    ("user_annotation", "data", 1, 12.0, 3.0),
    ("cpu_op", "aten::linear", 1, 10.0, 30.0),
    ("cpu_op", "aten::t", 1, 11.0, 2.0),
    ("cpu_op", "aten::addmm", 1, 15.0, 20.0),
    ("cpu_op", "aten::copy_", 1, 16.0, 5.0),
    // The engine's thread runs the backward.
    ("cpu_op", "AddmmBackward0", 2, 52.0, 20.0),
    ("cpu_op", "aten::mm", 2, 54.0, 16.0),
    ("[memory]", "[memory]", 1, 17.0, 4096.0),
    ("[memory]", "[memory]", 1, 18.0, -4096.0),
    // A worker of the loader runs all the time, and is no part of any step.
    ("user_annotation", "load", 9, 0.0, 150.0),
    ("cpu_op", "aten::cat", 9, 0.0, 150.0),
    // Between the steps.
    ("cpu_op", "aten::mm", 1, 101.0, 7.0),
    ("user_annotation", "step", 1, 110.0, 50.0),
    ("user_annotation", "forward", 1, 110.0, 20.0),
    ("cpu_op", "aten::mm", 1, 110.0, 20.0),
];

fn microseconds(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}

#[test]
fn the_times_of_a_step_match_the_events() {
    let composition = Composition::new(&trace(EVENTS)).unwrap();
    let [first, second] = composition.steps[..] else { panic!("{:?}", composition.steps) };
    assert_eq!(first.phases.map(microseconds), [0.0, 40.0, 30.0, 0.0, 0.0, 30.0]);
    assert_eq!(second.phases.map(microseconds), [0.0, 20.0, 0.0, 0.0, 0.0, 30.0]);
    // 10..40 on one thread and 52..72 on the other.
    assert_eq!(microseconds(first.idle_seconds), 50.0);
    // `linear` 30 − 2 − 20, `t` 2, the node 20 − 16, and `addmm`, which calls a copy: 20 − 5.
    assert_eq!(microseconds(first.host_seconds), 8.0 + 2.0 + 4.0 + 15.0);
    assert_eq!(first.calls, [0, 1, 1, 0, 0, 0]);
    assert_eq!((first.copies.count, microseconds(first.copies.seconds)), (1.0, 5.0));
    assert_eq!(first.allocated_bytes, 4096.0);
    assert_eq!(microseconds(composition.median.seconds), 75.0);

    let mm = composition.operator("aten::mm").unwrap();
    assert_eq!((mm.calls, microseconds(mm.seconds)), (1.0, 18.0), "within the steps: 16 and 20");
    assert!(composition.operator("aten::cat").is_none(), "a worker's");
    assert!(composition.median.device.is_none());
}

#[test]
fn device_time_is_separate_from_host_time() {
    let mut events = EVENTS.to_vec();
    events.extend([
        ("kernel", "sgemm", 7, 20.0, 30.0),
        ("kernel", "relu", 8, 40.0, 20.0),
        ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7, 5.0, 5.0),
        // It ends in the second step.
        ("kernel", "late", 7, 90.0, 30.0),
    ]);
    let composition = Composition::new(&trace(&events)).unwrap();
    let device = composition.steps[0].device.unwrap();
    assert_eq!((device.kernels, device.copies, device.copy_bytes), (3.0, 1.0, 64.0));
    assert_eq!(microseconds(device.busy_seconds), 40.0 + 5.0 + 10.0);
    assert!((device.idle_share - 0.45).abs() < 1e-9, "{device:?}");
    assert_eq!(microseconds(composition.steps[1].device.unwrap().busy_seconds), 10.0);
}

#[test]
fn a_trace_without_steps_is_refused() {
    let error = Composition::new(&trace(&EVENTS[4..8])).unwrap_err();
    expect_test::expect![[r#"the trace has 4 operators but no range named "step"; record whole steps, each within runtime::profile::range("step")"#]]
        .assert_eq(&error.to_string());
}

#[test]
fn a_composition_prints_as_a_table() {
    expect_test::expect![[r#"
        step 75.0 µs (median of the steps, 2 of them): 1.5 operators, 2.00 KiB allocated, 0.5 copies
          forward      30.0 µs   40.0 %  1 operators
          backward     15.0 µs   20.0 %  0.5 operators
          rest         30.0 µs   40.0 %  0 operators
          idle         40.0 µs   53.3 %  no operator ran
          host         14.5 µs   19.3 %  in operators that compute nothing
          aten::mm          18.0 µs   24.0 %  1 ×
          aten::addmm       7.50 µs   10.0 %  0.5 ×
          aten::linear      4.00 µs    5.3 %  0.5 ×
          aten::copy_       2.50 µs    3.3 %  0.5 ×
          AddmmBackward0    2.00 µs    2.7 %  0.5 ×
          aten::t           1.00 µs    1.3 %  0.5 ×
    "#]]
    .assert_eq(&Composition::new(&trace(EVENTS)).unwrap().to_string());
}
