//! Tensors whose memory moves while a graph has saved them.

use expect_test::expect;
use kernels::matmul::mm;
use kernels::norm::{Options, rms_norm};
use kernels::swiglu::silu_mul;
use runtime::autograd::{Keep, backward_with, set_grad};
use runtime::memory::{MovableMemory, is_sole_owner, live_bytes, track_cpu};
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

fn bytes(values: &Tensor) -> Tensor {
    values.contiguous().view([-1]).view_dtype(Kind::Uint8)
}

/// A linear layer's graph saves a transposed view of the weight, and the product of a norm the weight itself.
#[test]
fn a_graph_reads_the_memory_that_is_attached() {
    let normal = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Float, CPU));
    let (values, x) = (normal([6, 6]), normal([3, 6]).set_requires_grad(true));
    let run =
        |weight: &Tensor| (x.linear(weight, None::<Tensor>).gelu("none") * weight.get(0)).sum(Kind::Float);
    let plain = values.copy().set_requires_grad(true);
    backward_with(&[&run(&plain)], &[None], Keep::default()).unwrap();
    let expected = [x.grad().copy(), plain.grad().copy()];
    set_grad(&x, None).unwrap();

    let moved = MovableMemory::new(36 * 4, CPU).unwrap();
    let weight = moved.bytes().view_dtype(Kind::Float).view([6, 6]).detach().set_requires_grad(true);
    let first = bytes(&values).copy();
    let attached = moved.attach(&first).unwrap();
    let y = run(&weight);
    drop(attached);
    assert!(is_sole_owner(&first).unwrap(), "it is given back");
    let _ = first.shallow_clone().fill_(255);
    for keep in [true, false] {
        let elsewhere = bytes(&values).copy();
        let attached = moved.attach(&elsewhere).unwrap();
        backward_with(&[&y], &[None], Keep { graph: keep, ..Keep::default() }).unwrap();
        drop(attached);
        for (expected, leaf) in expected.iter().zip([&x, &weight]) {
            assert!(expected.equal(&leaf.grad()));
            set_grad(leaf, None).unwrap();
        }
    }
}

#[test]
fn without_memory_it_takes_none_and_cannot_be_read() {
    track_cpu().unwrap();
    let before = live_bytes(CPU).unwrap();
    let moved = MovableMemory::new(1 << 20, CPU).unwrap();
    assert_eq!(live_bytes(CPU).unwrap(), before);
    let weight = moved.bytes().view_dtype(Kind::Float).view([512, 512]);
    let error = weight.f_mm(&weight).unwrap_err().to_string();
    assert!(error.contains("no memory") || error.contains("not allocated"), "{error}");
    let memory = Tensor::ones([1 << 20], (Kind::Uint8, CPU));
    let attached = moved.attach(&memory).unwrap();
    drop(memory);
    assert_eq!(live_bytes(CPU).unwrap(), before + (1 << 20), "attached memory stays");
    assert_eq!(moved.bytes().sum(Kind::Int64).int64_value(&[]), 1 << 20);
    drop(attached);
    assert_eq!(live_bytes(CPU).unwrap(), before);
    assert!(weight.f_sum(Kind::Float).is_err());
    // Nothing to read.
    assert_eq!(MovableMemory::new(0, CPU).unwrap().bytes().size(), [0]);
}

#[test]
fn other_memory_is_refused() {
    let moved = MovableMemory::new(8, CPU).unwrap();
    let refused = |memory: &Tensor| moved.attach(memory).unwrap_err().to_string() + "\n";
    let flat = Tensor::zeros([16], (Kind::Uint8, CPU));
    expect![[r#"
        MovableMemory::attach: the memory is Uint8 [16] on Cpu; expected Uint8 [8] on Cpu, contiguous
        MovableMemory::attach: the memory is Float [8] on Cpu; expected Uint8 [8] on Cpu, contiguous
        MovableMemory::attach: the memory is Uint8 [8] on Cpu; expected Uint8 [8] on Cpu, contiguous
    "#]]
    .assert_eq(
        &[
            refused(&flat),
            refused(&Tensor::zeros([8], (Kind::Float, CPU))),
            refused(&flat.view([8, 2]).select(1, 0)),
        ]
        .concat(),
    );
}

/// The second guard would end with nothing attached, or the first would take the second's memory away.
#[test]
fn memory_is_attached_once_at_a_time() {
    let moved = MovableMemory::new(4, CPU).unwrap();
    let memory = Tensor::ones([4], (Kind::Uint8, CPU));
    let attached = moved.attach(&memory).unwrap();
    expect!["MovableMemory::attach: memory is attached already; drop its guard first"]
        .assert_eq(&moved.attach(&memory).unwrap_err().to_string());
    assert_eq!(moved.bytes().sum(Kind::Int64).int64_value(&[]), 4);
    drop(attached);
    // A refused attempt changes nothing either.
    assert!(moved.attach(&memory.narrow(0, 0, 2)).is_err());
    let _attached = moved.attach(&memory).unwrap();
    assert_eq!(moved.bytes().sum(Kind::Int64).int64_value(&[]), 4);
}

#[test]
fn kernels_refuse_tensors_without_memory() {
    let moved = MovableMemory::new(64 * 64 * 4, CPU).unwrap();
    let weight = moved.bytes().view_dtype(Kind::Float).view([64, 64]);
    let x = Tensor::ones([64, 64], (Kind::Float, CPU));
    for result in [
        mm(&x, &weight),
        mm(&weight, &x),
        rms_norm(&weight, None, Options::default()),
        rms_norm(&x, Some(&weight.get(0)), Options::default()),
        silu_mul(&weight, &x),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("no memory") || error.contains("not allocated"), "{error}");
    }
}
