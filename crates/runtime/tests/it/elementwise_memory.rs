//! What an elementwise pass allocates and keeps, to the byte. Alone in its file: it counts every allocation of the process.

use runtime::autograd::{self, Keep};
use runtime::fused::elementwise::Elementwise;
use runtime::memory::{Region, live_bytes, track_cpu};
use tch::{Device, Kind, Tensor};

const BYTES: u64 = 300 * 400 * 4;

fn tensor() -> Tensor {
    Tensor::ones([300, 400], (Kind::Float, Device::Cpu))
}

#[test]
fn an_output_is_all_that_forward_allocates_and_a_gradient_takes_its_upstreams_memory() {
    track_cpu().unwrap();
    let live = || live_bytes(Device::Cpu).unwrap();
    let gated = Elementwise::new(|[x, gate, bias]| (x + bias).gelu() * gate.sigmoid());
    let scaled = Elementwise::new(|[x]| x * 3.0 - 1.0);
    let leaf = |x: Tensor| x.set_requires_grad(true);
    let (x, gate) = (leaf(tensor()), leaf(tensor()));
    let bias = leaf(Tensor::zeros([400], (Kind::Float, Device::Cpu)));

    let before = live();
    let region = Region::start(Device::Cpu).unwrap();
    let y = gated.apply([&x, &gate, &bias]).unwrap();
    assert_eq!(region.finish().unwrap().peak_above_start(), BYTES);
    assert_eq!(live() - before, BYTES);

    // Backward: the gradients, and nothing beside them. The caller holds the upstream gradient, so that it stays.
    let upstream = tensor();
    let region = Region::start(Device::Cpu).unwrap();
    let found = autograd::grad(&[&y], &[Some(&upstream)], &[&x, &gate, &bias], Keep::default()).unwrap();
    let peak = region.finish().unwrap().peak_above_start();
    // The sum for the bias comes from a list in f64.
    assert!((2 * BYTES + 1600..=2 * BYTES + 1600 + 3200 + 1600).contains(&peak), "{peak} B");
    drop((found, y));
    assert_eq!(live(), before + BYTES, "the upstream gradient is left");

    // What the derivative does not read is not kept: the sum that goes in is free again.
    let y = scaled.apply([&(&x + &gate)]).unwrap();
    assert_eq!(live(), before + 2 * BYTES);
    drop(y);

    // A chain of four: the first backward allocates a gradient, the others work in its memory.
    let mut y = x.shallow_clone();
    for _ in 0..4 {
        y = scaled.apply([&y]).unwrap();
    }
    let region = Region::start(Device::Cpu).unwrap();
    let found = autograd::grad(&[&y], &[Some(&upstream)], &[&x], Keep::default()).unwrap();
    assert_eq!(region.finish().unwrap().peak_above_start(), BYTES);
    assert_eq!(found[0].as_ref().unwrap().double_value(&[7, 7]), 81.0);

    // The same input twice is kept once, and both gradients come from one pass.
    let product = Elementwise::new(|[a, b]| a * b);
    let inner = &x * 1.0;
    let z = product.apply([&inner, &inner]).unwrap();
    let held = live();
    drop(inner);
    assert_eq!(live(), held, "the node holds it");
    drop(z);
    assert_eq!(held - live(), 2 * BYTES, "an output and one input");
}
