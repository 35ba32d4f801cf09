//! Buffers that a stream copies from and that are written again: on the CPU, with a stream that the test blocks.

use expect_test::expect;
use runtime::device::{PinnedBuffer, Stream};
use tch::{Device, Kind, Tensor};

use crate::held::{Gate, check, fail, stream};

const I64: (Kind, Device) = (Kind::Int64, Device::Cpu);

fn values(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.reshape([-1])).unwrap()
}

#[test]
fn a_borrow_waits_only_for_the_copy() {
    let (copies, other, held, forever) = (stream(), stream(), Gate::default(), Gate::default());
    let mut buffer = PinnedBuffer::new(32, Device::Cpu).unwrap();
    assert!(!buffer.is_being_copied().unwrap());
    let targets: Vec<Tensor> = (0..3).map(|_| Tensor::zeros([2, 2], I64)).collect();
    other.submit(forever.work()).unwrap();
    for (round, target) in (1..).zip(&targets) {
        buffer.as_mut_slice::<i64>().unwrap().fill(round);
        let gate = Gate::default();
        copies.submit(gate.work()).unwrap();
        buffer.copy_to(target, &copies).unwrap();
        // Work behind the copy does not delay the buffer.
        copies.submit(held.work()).unwrap_or_else(|error| panic!("{error}"));
        assert!(buffer.is_being_copied().unwrap());
        assert_eq!(values(target), [0; 4]);
        let opener = std::thread::spawn(move || gate.open());
        assert_eq!(buffer.as_slice::<i64>().unwrap(), [round; 4], "it waits until the copy is done");
        opener.join().unwrap();
        assert!(!buffer.is_being_copied().unwrap());
        assert_eq!(values(target), [round; 4]);
        held.open();
    }
    assert!(!other.query().unwrap());
}

#[test]
fn a_borrow_waits_for_two_copies() {
    let streams = [stream(), stream()];
    let gates = [Gate::default(), Gate::default()];
    let mut buffer = PinnedBuffer::new(8, Device::Cpu).unwrap();
    buffer.as_mut_slice::<i64>().unwrap()[0] = 7;
    let targets = [Tensor::zeros([1], I64), Tensor::zeros([1], I64)];
    for ((stream, gate), target) in streams.iter().zip(&gates).zip(&targets) {
        stream.submit(gate.work()).unwrap();
        buffer.copy_to(target, stream).unwrap();
    }
    for gate in &gates {
        assert!(buffer.is_being_copied().unwrap());
        gate.open();
    }
    buffer.as_mut_slice::<i64>().unwrap()[0] = 8;
    assert_eq!(targets.each_ref().map(values), [[7], [7]]);
}

#[test]
fn a_failed_copy_releases_the_buffer() {
    // The stream returns the failure.
    let stream = stream();
    let mut buffer = PinnedBuffer::new(8, Device::Cpu).unwrap();
    stream.submit(fail("the disk is full")).unwrap();
    let target = Tensor::zeros([1], I64);
    buffer.copy_to(&target, &stream).unwrap();
    buffer.as_mut_slice::<i64>().unwrap()[0] = 1;
    check(stream.synchronize(), expect!["work on the stream failed: the disk is full"]);
    assert_eq!(values(&target), [0]);
}

#[test]
fn invalid_copies_are_refused() {
    let stream = stream();
    let mut buffer = PinnedBuffer::new(12, Device::Cpu).unwrap();
    check(
        buffer.copy_to(&Tensor::zeros([2], I64), &stream),
        expect!["pinned buffer copy: the target has 16 bytes and the buffer 12"],
    );
    let transposed = Tensor::zeros([2, 3], (Kind::Uint8, Device::Cpu)).tr();
    check(
        buffer.copy_to(&transposed, &stream),
        expect!["pinned buffer copy: the target has strides [1, 3]; make it contiguous"],
    );
    // The calling thread's stream copies at once, and a part of the buffer is a copy too.
    buffer.as_mut_slice::<u8>().unwrap().fill(5);
    let part = Tensor::zeros([3], (Kind::Uint8, Device::Cpu));
    buffer.copy_to(&part, &Stream::current(Device::Cpu).unwrap()).unwrap();
    assert!(!buffer.is_being_copied().unwrap());
    assert_eq!(values(&part.to_kind(Kind::Int64)), [5; 3]);
    buffer.copy_to(&Tensor::zeros([0], I64), &stream).unwrap();
}
