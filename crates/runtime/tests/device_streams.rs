//! Order, asynchrony, failures and the end of CPU streams. Delays are gates that the test opens, never time.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use expect_test::{Expect, expect};
use runtime::device::{self, Event, Stream};
use runtime::{Error, Result};
use tch::{Device, Tensor, kind};

/// Holds threads until it is opened.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let mut open = self.0.0.lock().unwrap();
        while !*open {
            open = self.0.1.wait(open).unwrap();
        }
    }

    /// Work that passes the gate.
    fn work(&self) -> impl FnOnce() -> Result<()> + Send + 'static {
        let gate = self.clone();
        move || {
            gate.pass();
            Ok(())
        }
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<usize>>>);

impl Log {
    fn push(&self, entry: usize) -> impl FnOnce() -> Result<()> + Send + 'static {
        let log = self.clone();
        move || {
            log.0.lock().unwrap().push(entry);
            Ok(())
        }
    }

    fn read(&self) -> Vec<usize> {
        self.0.lock().unwrap().clone()
    }
}

fn stream() -> Stream {
    Stream::new(Device::Cpu).unwrap()
}

fn event() -> Event {
    Event::new(Device::Cpu).unwrap()
}

fn words(result: Result<()>) -> String {
    result.map_or_else(|error| error.to_string(), |()| "ok".into())
}

fn fail(text: &'static str) -> impl FnOnce() -> Result<()> + Send + 'static {
    move || Err(Error::Other(text.into()))
}

fn check(result: Result<()>, expected: Expect) {
    expected.assert_eq(&words(result));
}

#[test]
fn a_stream_keeps_order() {
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
    // This thread gets here although the work cannot have ended.
    assert!(!stream.query().unwrap());
    assert!(!done.query().unwrap());
    gate.open();
    stream.synchronize().unwrap();
    assert!(stream.query().unwrap());
    assert!(done.query().unwrap());
}

#[test]
fn two_streams_run_at_the_same_time() {
    // Each holds the other's gate: in turn they would wait for ever.
    let (a, b, first, second) = (stream(), stream(), Gate::default(), Gate::default());
    let (opens, waits) = (second.clone(), first.clone());
    a.submit(move || {
        opens.open();
        waits.pass();
        Ok(())
    })
    .unwrap();
    b.submit(move || {
        second.pass();
        first.open();
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
fn elapsed_covers_what_lies_between() {
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
fn elapsed_says_what_is_missing() {
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
fn a_failure_surfaces_once_and_whole() {
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
fn a_panic_is_a_failure() {
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
fn a_failure_goes_where_its_events_are_waited_for() {
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
    // An event tells whoever asks; the stream tells its owner, once.
    own.assert_eq(&words(producer.synchronize()));
    check(producer.synchronize(), expect!["ok"]);
    assert_eq!(log.read(), [0; 0]);

    producer.record(&ready).unwrap();
    check(ready.synchronize(), expect!["ok"]);
}

#[test]
fn the_calling_thread_is_a_stream_too() {
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
fn dropping_a_stream_finishes_its_work() {
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
fn a_stream_may_be_dropped_by_its_own_work() {
    let (stream, gate, log, last) = (stream(), Gate::default(), Log::default(), event());
    let (inside, of_work) = (stream.clone(), gate.clone());
    stream
        .submit(move || {
            of_work.pass();
            drop(inside);
            Ok(())
        })
        .unwrap();
    stream.submit(log.push(1)).unwrap();
    stream.record(&last).unwrap();
    // The handle goes while the work is held, from another thread because the drop waits for the work.
    let (dropping, dropped) = (stream, Gate::default());
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
fn the_last_handle_may_be_inside_the_queue() {
    let (stream, gate, log, last) = (stream(), Gate::default(), Log::default(), event());
    let (sender, receiver) = std::sync::mpsc::channel::<Stream>();
    let of_work = gate.clone();
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
fn work_may_drop_a_stream_that_waits_for_it() {
    let (outer, inner, gate, mark) = (stream(), stream(), Gate::default(), event());
    let (sender, receiver) = std::sync::mpsc::channel::<Stream>();
    let of_work = gate.clone();
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
fn a_stream_does_not_wait_for_itself() {
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
