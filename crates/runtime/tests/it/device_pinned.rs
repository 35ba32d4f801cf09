//! Pinned memory: its bytes, its views, and invalid uses. The counts are the whole process's, so no
//! other test may run at the same time.

use expect_test::{Expect, expect};
use runtime::Result;
use runtime::device::{self, PinnedBuffer};
use tch::{Device, Kind, Tensor};

const KINDS: [Kind; 9] = [
    Kind::Uint8,
    Kind::Bool,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::Float8e4m3fn,
];

fn check<T>(result: Result<T>, expected: Expect) {
    expected.assert_eq(&result.map_or_else(|error| error.to_string(), |_| "ok".into()));
}

fn live() -> u64 {
    device::pinned_bytes(Device::Cpu).unwrap().live
}

#[test]
fn bytes_views_and_borrows_of_pinned_memory_are_exact() {
    tensors_have_pages_of_their_own_and_are_counted();
    buffers_are_viewed_or_borrowed_never_both();
    bad_requests_are_errors();
    an_asynchronous_copy_is_a_copy();
    assert_eq!(live(), 0);
}

fn tensors_have_pages_of_their_own_and_are_counted() {
    for kind in KINDS {
        for shape in [&[][..], &[0], &[3], &[2, 0, 5], &[7, 11]] {
            let tensor = device::pinned_empty(shape, kind, Device::Cpu).unwrap();
            assert_eq!((tensor.size().as_slice(), tensor.kind()), (shape, kind));
            assert_eq!(tensor.device(), Device::Cpu);
            assert!(tensor.is_contiguous());
            let bytes = tensor.numel() * kind.elt_size_in_bytes();
            assert_eq!(live(), bytes as u64);
            if bytes > 0 {
                assert_eq!(tensor.data_ptr() as usize % 4096, 0);
            }
        }
    }
    assert_eq!(live(), 0);
    assert_eq!(device::pinned_bytes(Device::Cpu).unwrap().peak, 7 * 11 * 8);

    // In whole pages, compared with powers of two.
    let tensors = [(3_000, 1), (70_000, 2)].map(|(bytes, times)| {
        let one = || device::pinned_empty(&[bytes], Kind::Uint8, Device::Cpu).unwrap();
        std::iter::repeat_with(one).take(times).collect::<Vec<_>>()
    });
    let all = device::pinned_bytes(Device::Cpu).unwrap();
    assert_eq!((all.live, all.held, all.powers_of_two), (143_000, 4096 + 2 * 73_728, 4096 + 2 * 131_072));
    assert_eq!((all.fallback, device::pinned_fallback(Device::Cpu).unwrap()), (0, None));
    drop(tensors);
    let none = device::PinnedBytes { live: 0, peak: 143_000, held: 0, powers_of_two: 0, fallback: 0 };
    assert_eq!(device::pinned_bytes(Device::Cpu).unwrap(), none);

    // A view keeps the memory after the tensor is gone.
    let mut tensor = device::pinned_empty(&[4, 8], Kind::Float, Device::Cpu).unwrap();
    let _ = tensor.fill_(3.0);
    let row = tensor.get(2);
    drop(tensor);
    assert_eq!(live(), 128);
    assert_eq!(Vec::<f32>::try_from(&row).unwrap(), [3.0; 8]);
}

fn buffers_are_viewed_or_borrowed_never_both() {
    let mut buffer = PinnedBuffer::new(48, Device::Cpu).unwrap();
    assert_eq!(buffer.as_slice::<u8>().unwrap(), [0; 48]);
    buffer.as_mut_slice::<i64>().unwrap().copy_from_slice(&[1, 2, 3, 4, 5, 6]);

    let mut view = buffer.view(16, &[2, 2], Kind::Int64).unwrap();
    assert_eq!(Vec::<i64>::try_from(view.reshape([4])).unwrap(), [3, 4, 5, 6]);
    let _ = view.fill_(9);
    let other = buffer.view(0, &[12], Kind::Int).unwrap();
    check(buffer.as_slice::<u8>(), expect!["pinned buffer: tensors still view it; drop them first"]);
    check(buffer.as_mut_slice::<u8>(), expect!["pinned buffer: tensors still view it; drop them first"]);
    drop(view);
    drop(other);
    assert_eq!(buffer.as_slice::<i64>().unwrap(), [1, 2, 9, 9, 9, 9]);

    // Each borrow after a view is like the first.
    for round in 0..3 {
        let mut view = buffer.view(0, &[1], Kind::Int64).unwrap();
        let _ = view.fill_(round);
        assert!(buffer.as_slice::<i64>().is_err());
        drop(view);
        assert_eq!(buffer.as_mut_slice::<i64>().unwrap()[0], round);
        assert_eq!(buffer.as_slice::<i64>().unwrap()[1..3], [2, 9]);
    }

    // A view outlives its buffer, and a graph that holds one counts as a view.
    let x = Tensor::ones([6], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    let y = &x * buffer.view(0, &[6], Kind::Double).unwrap();
    assert!(buffer.as_slice::<u8>().is_err());
    drop(y);
    let view = buffer.view(40, &[1], Kind::Int64).unwrap();
    drop(buffer);
    assert_eq!(i64::try_from(&view).unwrap(), 9);
    assert_eq!(live(), 48);

    let mut empty = PinnedBuffer::new(0, Device::Cpu).unwrap();
    assert!(empty.is_empty());
    assert_eq!(empty.as_slice::<f64>().unwrap(), [0.0; 0]);
    assert_eq!(empty.view(0, &[0, 3], Kind::Float).unwrap().size(), [0, 3]);
}

fn bad_requests_are_errors() {
    let cpu = Device::Cpu;
    check(
        device::pinned_empty(&[2, -1], Kind::Float, cpu),
        expect!["pinned tensor: the shape [2, -1] has a negative size, -1"],
    );
    check(
        device::pinned_empty(&[i64::MAX, 2], Kind::Float, cpu),
        expect!["pinned tensor: the shape [9223372036854775807, 2] of Float has more than 2^63 bytes"],
    );
    check(
        device::pinned_empty(&[1 << 61], Kind::Float, cpu),
        expect!["pinned tensor: the shape [2305843009213693952] of Float has more than 2^63 bytes"],
    );
    check(
        device::pinned_empty(&[1 << 60], Kind::Uint8, cpu),
        expect!["out of host memory: 1152921504606846976 bytes were asked for"],
    );
    check(
        device::pinned_empty(&[2], Kind::QInt8, cpu),
        expect!["pinned tensor: QInt8 tensors carry scales; use the integer kind of its size"],
    );
    check(
        PinnedBuffer::new(usize::MAX, cpu),
        expect!["pinned buffer: 18446744073709551615 bytes is more than a tensor can hold"],
    );
    let mut buffer = PinnedBuffer::new(10, cpu).unwrap();
    check(buffer.as_slice::<f32>(), expect!["pinned buffer: 10 bytes are not a whole number of Float"]);
    check(
        buffer.view(2, &[2], Kind::Float),
        expect!["pinned buffer view: the offset 2 is not a multiple of Float's 4 bytes"],
    );
    check(
        buffer.view(4, &[2], Kind::Float),
        expect!["pinned buffer view: 8 bytes from 4 on reach beyond the buffer's 10"],
    );
    check(
        buffer.view(usize::MAX, &[1], Kind::Uint8),
        expect!["pinned buffer view: 1 bytes from 18446744073709551615 on reach beyond the buffer's 10"],
    );
    check(
        buffer.view(0, &[-1], Kind::Uint8),
        expect!["pinned buffer view: the shape [-1] of Uint8 is not one of a tensor"],
    );
}

fn an_asynchronous_copy_is_a_copy() {
    let mut target = device::pinned_empty(&[2, 3], Kind::Double, Device::Cpu).unwrap();
    let source = Tensor::arange(3, (Kind::Int64, Device::Cpu));
    device::copy_async(&mut target, &source).unwrap();
    assert_eq!(Vec::<f64>::try_from(target.reshape([6])).unwrap(), [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]);
    check(
        device::copy_async(&mut target, &Tensor::zeros([2, 2], (Kind::Float, Device::Cpu))),
        expect!["The size of tensor a (3) must match the size of tensor b (2) at non-singleton dimension 1"],
    );
    check(device::copy_async(&mut target, &Tensor::new()), expect!["copy_async: a tensor is undefined"]);
    let mut leaf = Tensor::zeros([3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    check(
        device::copy_async(&mut leaf, &source),
        expect!["a leaf Variable that requires grad is being used in an in-place operation."],
    );
}
