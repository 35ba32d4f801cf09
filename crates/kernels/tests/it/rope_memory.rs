//! Exact bytes that the rotary embedding and SwiGLU's product save and allocate. The counts are the
//! whole process's, so no other test may run at the same time.

use kernels::rope::RotaryTable;
use kernels::swiglu::silu_mul;
use runtime::autograd::{self, Keep};
use runtime::memory::{Region, live_bytes, track_cpu};
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

fn ones(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::ones(shape, (kind, CPU))
}

#[test]
fn saved_bytes_equal_the_prediction() {
    track_cpu().unwrap();
    let live = || live_bytes(CPU).unwrap();
    let table = RotaryTable::new(16, 64, 1e4, CPU).unwrap();
    let zeros = Tensor::zeros([2, 50], (Kind::Int64, CPU));
    for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
        let (q_size, k_size) = ([2, 50, 4, 16], [2, 50, 2, 16]);
        let size = |shape: &[i64]| shape.iter().product::<i64>() as u64 * kind.elt_size_in_bytes() as u64;
        let both = size(&q_size) + size(&k_size);
        let leaves = [q_size, k_size].map(|shape| ones(&shape, kind).set_requires_grad(true));
        for positions in [None, Some(&zeros)] {
            // Nothing else holds the rotated tensor, as with a projection's output: it is freed after the rotation.
            let (q, k) = (&leaves[0] * 1.0, &leaves[1] * 1.0);
            let before = live() - both;
            let region = Region::start(CPU).unwrap();
            let (rotated_q, rotated_k) = table.rotate(&q, &k, positions).unwrap();
            assert_eq!(region.finish().unwrap().peak_above_start(), both, "{kind:?}: the outputs alone");
            drop((q, k));
            assert_eq!(live() - before, both, "{kind:?}: nothing is kept beside the outputs");

            let upstream = [ones(&q_size, kind), ones(&k_size, kind)].map(Some);
            let outputs = [&rotated_q * 1.0, &rotated_k * 1.0];
            drop((rotated_q, rotated_k));
            let references = [upstream[0].as_ref(), upstream[1].as_ref()];
            let region = Region::start(CPU).unwrap();
            let gradients = autograd::grad(
                &[&outputs[0], &outputs[1]],
                &references,
                &[&leaves[0], &leaves[1]],
                Keep::default(),
            )
            .unwrap();
            // The products' gradients, which the rotation overwrites, one earlier product at a time, and scalars.
            let peak = region.finish().unwrap().peak_above_start();
            assert!(peak <= both + size(&q_size) + 64, "{kind:?}: {peak} of {both}");
            drop((gradients, upstream, outputs));
            assert_eq!(live(), before, "{kind:?}: all is free");
        }
    }

    let shape = [40, 96];
    let bytes = 40 * 96 * 4;
    let leaves = [(); 2].map(|()| ones(&shape, Kind::Float).set_requires_grad(true));
    let before = live();
    let (gate, up) = (&leaves[0] * 1.0, &leaves[1] * 1.0);
    let product = silu_mul(&gate, &up).unwrap();
    drop((gate, up));
    assert_eq!(live() - before, 3 * bytes, "the product, gate and up");
    let end = product.sum(Kind::Float);
    drop(product);
    assert_eq!(live() - before, 2 * bytes + 4, "gate, up, and a scalar");
    let region = Region::start(CPU).unwrap();
    let gradients = autograd::grad(&[&end], &[None], &[&leaves[0], &leaves[1]], Keep::default()).unwrap();
    let peak = region.finish().unwrap().peak_above_start();
    assert!(peak <= 3 * bytes + 64, "{peak} of {bytes}");
    drop((gradients, end));
    assert_eq!(live(), before);
}
