//! `device::synchronize` over all CPU streams. It waits for the streams of the whole process, so no other test
//! may run at the same time.

use runtime::device::{self, Event, Stream};
use runtime::{Error, Result};
use tch::Device;

fn words(result: Result<()>) -> String {
    result.map_or_else(|error| error.to_string(), |()| "ok".into())
}

#[test]
fn synchronizing_a_device_waits_for_every_stream_and_keeps_failures() {
    let streams: Vec<Stream> = (0..3).map(|_| Stream::new(Device::Cpu).unwrap()).collect();
    let (sender, receiver) = std::sync::mpsc::channel();
    for (index, stream) in streams.iter().enumerate() {
        let sender = sender.clone();
        stream
            .submit(move || {
                for _ in 0..10_000 * index {
                    std::hint::spin_loop();
                }
                sender.send(index).map_err(|error| Error::Other(error.into()))
            })
            .unwrap();
    }
    assert_eq!(words(device::synchronize(Device::Cpu)), "ok");
    let mut finished: Vec<usize> = receiver.try_iter().collect();
    finished.sort_unstable();
    assert_eq!(finished, [0, 1, 2]);

    streams[1].submit(|| Err(Error::Other("no data".into()))).unwrap();
    let failure = "work on the stream failed: no data";
    assert_eq!(words(device::synchronize(Device::Cpu)), failure);
    assert_eq!(words(device::synchronize(Device::Cpu)), failure);
    assert_eq!(words(streams[0].synchronize()), "ok");
    assert_eq!(words(streams[1].synchronize()), failure);
    assert_eq!(words(device::synchronize(Device::Cpu)), "ok");

    drop(streams);
    assert_eq!(words(device::synchronize(Device::Cpu)), "ok");
}

/// As CUDA's host functions, which may not synchronise: another stream may wait for this work.
#[test]
fn work_of_a_stream_cannot_wait_for_all_streams() {
    let streams = [Stream::new(Device::Cpu).unwrap(), Stream::new(Device::Cpu).unwrap()];
    let (sender, receiver) = std::sync::mpsc::channel();
    let (begin, wait) = std::sync::mpsc::channel::<()>();
    streams[0]
        .submit(move || {
            let _ = wait.recv();
            sender.send(words(device::synchronize(Device::Cpu))).map_err(|error| Error::Other(error.into()))
        })
        .unwrap();
    let event = Event::new(Device::Cpu).unwrap();
    streams[0].record(&event).unwrap();
    streams[1].wait(&event).unwrap();
    begin.send(()).unwrap();
    let found = receiver.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    assert_eq!(
        found,
        "device synchronize: called from work of a CPU stream, for which other streams may wait; call it from outside"
    );
    assert_eq!(words(device::synchronize(Device::Cpu)), "ok");
}
