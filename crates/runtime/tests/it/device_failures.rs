//! Failures of work on CPU streams, and streams that end while they have work.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::held::{Gate, Key, Log, check, event, fail, stream, words};
use expect_test::expect;
use runtime::Result;
use runtime::device::{self, Stream};
use tch::{Device, Tensor, kind};

#[test]
fn a_failure_is_returned_once_with_its_message() {
    let (stream, log) = (stream(), Log::default());
    stream
        .submit(|| {
            let product =
                Tensor::zeros([2, 3], kind::FLOAT_CPU).f_mm(&Tensor::zeros([2, 3], kind::FLOAT_CPU))?;
            drop(product);
            Ok(())
        })
        .unwrap();
    stream.submit(log.push(1)).unwrap();
    stream.submit(fail("a second failure, of work that is skipped")).unwrap();
    check(
        stream.synchronize(),
        expect!["work on the stream failed: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"],
    );
    assert_eq!(log.read(), [0; 0], "work behind the failure was not skipped");
    check(stream.synchronize(), expect!["ok"]);
    stream.submit(log.push(2)).unwrap();
    check(stream.synchronize(), expect!["ok"]);
    assert_eq!(log.read(), [2]);
}

#[test]
fn a_panic_is_returned_as_a_failure() {
    type Work = Box<dyn FnOnce() -> Result<()> + Send>;
    let table: [(Work, &str); 3] = [
        (Box::new(|| -> Result<()> { panic!("boom") }), "work on the stream failed: panicked: boom"),
        (
            Box::new(|| -> Result<()> { panic!("{} is odd", 3) }),
            "work on the stream failed: panicked: 3 is odd",
        ),
        (
            Box::new(|| -> Result<()> { std::panic::panic_any(7_u8) }),
            "work on the stream failed: panicked: without a message",
        ),
    ];
    for (panic, expected) in table {
        let stream = stream();
        stream.submit(panic).unwrap();
        assert_eq!(words(stream.synchronize()), expected);
        assert_eq!(words(stream.synchronize()), "ok");
    }
}

#[test]
fn a_failure_propagates_to_streams_that_wait_for_its_events() {
    let (producer, consumer, after, log) = (stream(), stream(), stream(), Log::default());
    let (before, ready, passed_on) = (event(), event(), event());
    producer.record(&before).unwrap();
    producer.submit(fail("no data")).unwrap();
    producer.record(&ready).unwrap();
    consumer.wait(&ready).unwrap();
    consumer.submit(log.push(1)).unwrap();
    consumer.record(&passed_on).unwrap();
    after.wait(&passed_on).unwrap();
    after.submit(log.push(2)).unwrap();

    let inherited =
        expect!["work on the stream failed: an event that it waited for carries an earlier failure: no data"];
    inherited.assert_eq(&words(after.synchronize()));
    inherited.assert_eq(&words(consumer.synchronize()));
    check(before.synchronize(), expect!["ok"]);
    let own = expect!["work on the stream failed: no data"];
    own.assert_eq(&words(ready.synchronize()));
    own.assert_eq(&words(Stream::current(Device::Cpu).unwrap().wait(&ready)));
    own.assert_eq(&words(before.elapsed(&ready).map(drop)));
    // An event returns the failure every time; the stream returns it once.
    own.assert_eq(&words(producer.synchronize()));
    check(producer.synchronize(), expect!["ok"]);
    assert_eq!(log.read(), [0; 0]);

    producer.record(&ready).unwrap();
    check(ready.synchronize(), expect!["ok"]);
}

#[test]
fn dropping_a_stream_finishes_the_queued_work() {
    let finished = Arc::new(AtomicUsize::new(0));
    let stream = stream();
    for _ in 0..100 {
        let finished = finished.clone();
        stream
            .submit(move || {
                finished.fetch_add(1, Ordering::SeqCst);
                Ok(())
            })
            .unwrap();
    }
    let clone = stream.clone();
    drop(stream);
    clone.submit(fail("lost with its stream")).unwrap();
    drop(clone);
    assert_eq!(finished.load(Ordering::SeqCst), 100);
}

#[test]
fn a_stream_can_be_dropped_by_its_own_work() {
    let (stream, gate, log, last) = (stream(), Gate::default(), Log::default(), event());
    let (inside, of_work) = (stream.clone(), gate.key());
    stream
        .submit(move || {
            of_work.pass();
            drop(inside);
            Ok(())
        })
        .unwrap();
    stream.submit(log.push(1)).unwrap();
    stream.record(&last).unwrap();
    // The handle is dropped while the work is held, on another thread because the drop waits for the work.
    let (dropping, dropped) = (stream, Key::default());
    let done = dropped.clone();
    let thread = std::thread::spawn(move || {
        gate.open();
        drop(dropping);
        done.open();
    });
    last.synchronize().unwrap();
    dropped.pass();
    thread.join().unwrap();
    assert_eq!(log.read(), [1]);
}

#[test]
fn the_last_handle_can_be_inside_the_queue() {
    let (stream, gate, log, last) = (stream(), Gate::default(), Log::default(), event());
    let (sender, receiver) = std::sync::mpsc::channel::<Stream>();
    let of_work = gate.key();
    stream
        .submit(move || {
            of_work.pass();
            drop(receiver.recv());
            Ok(())
        })
        .unwrap();
    stream.submit(log.push(1)).unwrap();
    stream.record(&last).unwrap();
    sender.send(stream).unwrap();
    gate.open();
    last.synchronize().unwrap();
    assert_eq!(log.read(), [1]);
}

#[test]
fn work_can_drop_a_stream_that_waits_for_it() {
    let (outer, inner, gate, mark) = (stream(), stream(), Gate::default(), event());
    let (sender, receiver) = std::sync::mpsc::channel::<Stream>();
    let of_work = gate.key();
    outer
        .submit(move || {
            of_work.pass();
            drop(receiver.recv());
            Ok(())
        })
        .unwrap();
    outer.record(&mark).unwrap();
    inner.wait(&mark).unwrap();
    sender.send(inner).unwrap();
    gate.open();
    // Joining `inner` from the work of `outer` would never end.
    outer.synchronize().unwrap();
}

#[test]
fn a_stream_refuses_to_wait_for_itself() {
    let stream = stream();
    let inside = stream.clone();
    stream.submit(move || inside.synchronize()).unwrap();
    check(
        stream.synchronize(),
        expect![
            "work on the stream failed: stream synchronize: called from work of the same stream, which would wait for itself; call it from outside"
        ],
    );
    // The device's synchronise leaves the caller's own stream out.
    let inside = stream.clone();
    stream
        .submit(move || {
            inside.submit(|| Ok(()))?;
            let _others = device::synchronize(Device::Cpu);
            Ok(())
        })
        .unwrap();
    check(stream.synchronize(), expect!["ok"]);
}
