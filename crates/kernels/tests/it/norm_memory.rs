//! Bytes that the graph of a norm keeps, compared with the prediction. The counts are the whole process's, so no other test may run
//! at the same time.

use kernels::norm::{Keep, Norm, Options, add_norm};
use runtime::memory::{Region, live_bytes};
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

/// Tensors on one device, whose bytes are those that the allocator counts.
fn bytes(count: i64, kind: Kind) -> u64 {
    count as u64 * kind.elt_size_in_bytes() as u64
}

#[test]
fn saved_bytes_equal_the_prediction() {
    live_bytes(CPU).unwrap();
    let (rows, width) = (128, 96);
    for (norm, statistics_of_input) in [(Norm::Layer, 2), (Norm::Rms, 1)] {
        for (kind, output) in [
            (Kind::Float, Kind::Float),
            (Kind::BFloat16, Kind::BFloat16),
            (Kind::BFloat16, Kind::Float),
            (Kind::Double, Kind::Double),
        ] {
            let compute = if kind == Kind::Double { kind } else { Kind::Float };
            for (keep, weight_value) in [(Keep::Input, 1.0), (Keep::Output, 1.0), (Keep::Output, 0.0)] {
                for follower in [false, true] {
                    let weight = Tensor::full([width], weight_value, (kind, CPU)).set_requires_grad(true);
                    let leaf = Tensor::ones([rows, width], (kind, CPU)).set_requires_grad(true);
                    let before = live_bytes(CPU).unwrap();
                    // A residual that only the norm holds.
                    let (y, sum) = add_norm(
                        norm,
                        &leaf,
                        &leaf,
                        Some(&weight),
                        None,
                        Options { keep, output: Some(output), ..Options::default() },
                    )
                    .unwrap();
                    drop(sum);
                    // A product keeps its input, and with it y.
                    let kept_by_follower = if follower { Some(y.square()) } else { None };
                    let end = y.sum(Kind::Float);
                    drop(y);
                    let held = live_bytes(CPU).unwrap() - before;
                    let matrix = |kind| bytes(rows * width, kind);
                    let statistics = |count| bytes(count * rows, compute);
                    let output_kept = keep == Keep::Output && weight_value != 0.0;
                    let norm_bytes = match output_kept {
                        true => matrix(output) + statistics(1),
                        false => matrix(kind) + statistics(statistics_of_input),
                    };
                    let follower_bytes = match (follower, output_kept) {
                        (false, _) => 0,
                        // Its result, and its input unless the norm has kept that anyway.
                        (true, true) => matrix(output),
                        (true, false) => 2 * matrix(output),
                    };
                    let name = format!(
                        "{norm:?} {kind:?} to {output:?} {keep:?} weight {weight_value} follower {follower}"
                    );
                    assert_eq!(held, norm_bytes + follower_bytes + bytes(1, end.kind()), "{name}");
                    // Backward needs only the gradients, and the partial sums of the parameters' gradients.
                    let region = Region::start(CPU).unwrap();
                    let upstream = Tensor::ones([], (end.kind(), CPU));
                    runtime::autograd::backward_with(&[&end], &[Some(&upstream)], Default::default())
                        .unwrap();
                    drop((end, upstream, kept_by_follower));
                    let usage = region.finish().unwrap();
                    assert!(usage.live_after < usage.live_before, "{name}: the graph is freed");
                }
            }
        }
    }
}
