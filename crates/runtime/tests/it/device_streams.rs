//! Order, asynchrony and events of CPU streams. Delays are gates that the test opens, never time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::held::{Gate, Log, check, event, fail, stream};
use expect_test::expect;
use runtime::device::{self, Event, Stream};
use tch::{Device, Tensor, kind};

#[test]
fn a_stream_runs_work_in_order() {
    let (stream, log, gate) = (stream(), Log::default(), Gate::default());
    stream.submit(gate.work()).unwrap();
    for entry in 0..1000 {
        stream.submit(log.push(entry)).unwrap();
    }
    gate.open();
    stream.synchronize().unwrap();
    assert_eq!(log.read(), (0..1000).collect::<Vec<_>>());
}

#[test]
fn submit_returns_while_the_work_is_held() {
    let (stream, gate, done) = (stream(), Gate::default(), event());
    assert!(stream.query().unwrap());
    stream.submit(gate.work()).unwrap();
    stream.record(&done).unwrap();
    // This thread continues although the work cannot have ended.
    assert!(!stream.query().unwrap());
    assert!(!done.query().unwrap());
    gate.open();
    stream.synchronize().unwrap();
    assert!(stream.query().unwrap());
    assert!(done.query().unwrap());
}

#[test]
fn two_streams_run_concurrently() {
    // Each opens the other's gate: run sequentially they would deadlock.
    let (a, b, first, second) = (stream(), stream(), Gate::default(), Gate::default());
    let (opens, waits) = (second.key(), first.key());
    a.submit(move || {
        opens.open();
        waits.pass();
        Ok(())
    })
    .unwrap();
    let (opens, waits) = (first.key(), second.key());
    b.submit(move || {
        waits.pass();
        opens.open();
        Ok(())
    })
    .unwrap();
    a.synchronize().unwrap();
    b.synchronize().unwrap();
}

#[test]
fn a_wait_orders_streams() {
    let (producer, consumer, log, gate) = (stream(), stream(), Log::default(), Gate::default());
    let ready = event();
    producer.submit(gate.work()).unwrap();
    producer.submit(log.push(1)).unwrap();
    producer.record(&ready).unwrap();
    consumer.wait(&ready).unwrap();
    consumer.submit(log.push(2)).unwrap();
    assert!(!consumer.query().unwrap());
    gate.open();
    consumer.synchronize().unwrap();
    assert_eq!(log.read(), [1, 2]);
}

#[test]
fn an_event_that_was_never_recorded_is_complete() {
    let (stream, event) = (stream(), event());
    assert!(event.query().unwrap());
    event.synchronize().unwrap();
    stream.wait(&event).unwrap();
    stream.synchronize().unwrap();
    Stream::current(Device::Cpu).unwrap().wait(&event).unwrap();
}

#[test]
fn a_wait_keeps_the_recording_it_saw() {
    let (producer, early, late) = (stream(), stream(), stream());
    let (mark, second) = (event(), Gate::default());
    producer.record(&mark).unwrap();
    early.wait(&mark).unwrap();
    producer.submit(second.work()).unwrap();
    producer.record(&mark).unwrap();
    late.wait(&mark).unwrap();
    // The second recording is held, so `early` ends here only if it waits for the first.
    early.synchronize().unwrap();
    assert!(!mark.query().unwrap());
    assert!(!late.query().unwrap());
    second.open();
    late.synchronize().unwrap();
    mark.synchronize().unwrap();
}

#[test]
fn elapsed_measures_the_time_between_events() {
    let (stream, start, end) = (stream(), event(), event());
    stream.record(&start).unwrap();
    let spent = Arc::new(Mutex::new(0.0));
    let of_work = spent.clone();
    stream
        .submit(move || {
            let begin = std::time::Instant::now();
            for _ in 0..100_000 {
                std::hint::spin_loop();
            }
            *of_work.lock().unwrap() = begin.elapsed().as_secs_f64();
            Ok(())
        })
        .unwrap();
    stream.record(&end).unwrap();
    end.synchronize().unwrap();
    let (elapsed, injected) = (start.elapsed(&end).unwrap(), *spent.lock().unwrap());
    assert!(elapsed >= injected && injected > 0.0, "{elapsed} s measured, {injected} s injected");
    assert_eq!(end.elapsed(&start).unwrap(), -elapsed);
}

#[test]
fn elapsed_names_the_missing_recording() {
    let (stream, gate) = (stream(), Gate::default());
    let (start, end, untimed) = (event(), event(), Event::untimed(Device::Cpu).unwrap());
    stream.record(&start).unwrap();
    stream.record(&untimed).unwrap();
    stream.synchronize().unwrap();
    let elapsed = |start: &Event, end: &Event| start.elapsed(end).map(drop);
    check(
        elapsed(&start, &end),
        expect!["event elapsed: the end event was never recorded; record it on a stream first"],
    );
    check(
        elapsed(&untimed, &start),
        expect!["event elapsed: the start event was made without timing; make it with Event::new"],
    );
    stream.submit(gate.work()).unwrap();
    stream.record(&end).unwrap();
    check(
        elapsed(&start, &end),
        expect!["event elapsed: the end event is not complete; call synchronize on it first"],
    );
    gate.open();
    end.synchronize().unwrap();
    check(elapsed(&start, &end), expect!["ok"]);
}

#[test]
fn the_calling_thread_is_a_stream() {
    let (current, stream, gate, mark) =
        (Stream::current(Device::Cpu).unwrap(), stream(), Gate::default(), event());
    let done = Arc::new(AtomicBool::new(false));
    let of_work = done.clone();
    current
        .submit(move || {
            of_work.store(true, Ordering::SeqCst);
            Ok(())
        })
        .unwrap();
    assert!(done.load(Ordering::SeqCst), "work of the calling thread runs at once");
    check(current.submit(fail("at once")), expect!["at once"]);
    check(current.submit(|| panic!("boom")), expect!["work on the stream failed: panicked: boom"]);
    check(current.synchronize(), expect!["ok"]);

    current.record(&mark).unwrap();
    assert!(mark.query().unwrap());
    stream.submit(gate.work()).unwrap();
    stream.record(&mark).unwrap();
    gate.open();
    current.wait(&mark).unwrap();
    assert!(mark.query().unwrap(), "wait on the calling thread's stream blocks it");

    let _guard = current.enter().unwrap();
    check(
        stream.enter().map(drop),
        expect![
            "stream enter: a CPU stream has a thread of its own and cannot be made current on this one; use submit"
        ],
    );
}

#[test]
fn work_has_the_grad_mode_of_its_submitter() {
    let stream = stream();
    let modes = Arc::new(Mutex::new(Vec::new()));
    let note = || {
        let modes = modes.clone();
        move || {
            let x = Tensor::ones([1], kind::FLOAT_CPU).set_requires_grad(true);
            modes.lock().unwrap().push((&x * 2.0).requires_grad());
            Ok(())
        }
    };
    stream.submit(note()).unwrap();
    {
        let _no_grad = tch::no_grad_guard();
        stream.submit(note()).unwrap();
    }
    stream.submit(note()).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(*modes.lock().unwrap(), [true, false, true]);
}

#[test]
fn a_recorded_tensor_lives_until_the_work_is_done() {
    let (stream, gate) = (stream(), Gate::default());
    let before = device::pinned_bytes(Device::Cpu).unwrap();
    assert_eq!(before.live, 0, "no other test of this file holds pinned memory");
    let tensor = device::pinned_empty(&[1000], tch::Kind::Float, Device::Cpu).unwrap();
    stream.submit(gate.work()).unwrap();
    device::record_stream(&tensor, &stream).unwrap();
    drop(tensor);
    assert_eq!(device::pinned_bytes(Device::Cpu).unwrap().live, 4000);
    gate.open();
    stream.synchronize().unwrap();
    assert_eq!(device::pinned_bytes(Device::Cpu).unwrap().live, 0);
    check(device::record_stream(&Tensor::new(), &stream), expect!["record_stream: the tensor is undefined"]);
}

#[test]
fn streams_and_events_cross_threads() {
    fn send_and_sync<T: Send + Sync>() {}
    send_and_sync::<Stream>();
    send_and_sync::<Event>();
    // Many threads feed one stream; each one's own work stays in order.
    let (stream, log) = (stream(), Log::default());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (stream, log) = (&stream, &log);
            scope.spawn(move || {
                for entry in 0..100 {
                    stream.submit(log.push(thread * 1000 + entry)).unwrap();
                }
            });
        }
    });
    stream.synchronize().unwrap();
    for thread in 0..4 {
        let own: Vec<usize> = log.read().into_iter().filter(|entry| entry / 1000 == thread).collect();
        assert_eq!(own, (0..100).map(|entry| thread * 1000 + entry).collect::<Vec<_>>());
    }
}
