use super::*;
use crate::decoder_flops::Workload;
use crate::{Dtype, presets};

/// H100s at 392 TFLOP/s, eight to a node with a 400 Gb/s link each.
const GPUS: Gpus = Gpus {
    peak: 989.5e12,
    flops: 392e12,
    network: Network { node: 8, local: 380e9, between: 8.0 * 46e9, latency: 10e-6, direct: false },
};

fn run(model: &crate::Decoder, gpus: u64, shard: u64, tokens: u64) -> Run<'_> {
    Run {
        model,
        work: Workload { batch: 1, sequence: tokens },
        recomputed: 0.0,
        weights: Dtype::Bf16,
        gradients: Dtype::Fp32,
        parallelism: Parallelism { gpus, shard, model: 1, bubble: 0.0 },
    }
}

#[test]
fn critical_tokens_depend_on_rates_alone() {
    let critical = |rate| critical_tokens(2.0, 4.0, 392e12, rate).round();
    assert_eq!([368e9, 46e9, 11.5e9].map(critical), [1598.0, 12_783.0, 51_130.0]);
}

/// Four ranks on two nodes: each sends half of its gradients to the other node, so 2 of 4 quarters from two ranks, where a ring has 3.
#[test]
fn direct_messages_cross_nodes_more_often_than_a_ring() {
    assert_eq!([1, 8].map(|ranks| direct_bytes_over_ring(ranks, 8)), [1.0; 2]);
    assert_eq!(direct_bytes_over_ring(4, 2), 4.0 / 3.0);
    assert_eq!(direct_bytes_over_ring(64, 1), 1.0);
    let many = direct_bytes_over_ring(100_000, 8);
    assert!((7.99..8.0).contains(&many), "{many}");
    let ring = Network { node: 2, local: 1e9, between: 3e8, latency: 0.0, direct: false };
    let direct = Network { direct: true, ..ring };
    assert_eq!([2, 4].map(|ranks| ring.rate(ranks)), [1e9, 3e8]);
    assert_eq!([2, 4].map(|ranks| direct.rate(ranks).round()), [1e9, 2.25e8]);
}

/// Few tokens per GPU wait for transfers; many compute. Hybrid sharding reduces over replicas instead.
#[test]
fn what_bounds_a_step_follows_the_tokens() {
    let model = presets::find("llama-3-8b").unwrap();
    let bound = |gpus, shard, tokens| run(&model, gpus, shard, tokens).step(&GPUS).unwrap().bound(1.0);
    assert_eq!(bound(512, 512, 8192), Bound::Compute);
    assert_eq!(bound(8192, 8192, 256), Bound::Reduce);
    assert_eq!(bound(8192, 8, 256), Bound::Replicas);
    let step = run(&model, 8, 8, 8192).step(&GPUS).unwrap();
    assert!(step.exposed() < 0.01 * step.seconds(), "{step:?}");
    let short = run(&model, 4096, 4096, 1024).step(&GPUS).unwrap().seconds();
    let shorter = run(&model, 8192, 8192, 512).step(&GPUS).unwrap().seconds();
    assert!((shorter / short - 1.0).abs() < 0.05, "both wait for the same transfers: {short}, {shorter}");
}

#[test]
fn a_calibrated_run_has_the_published_speed() {
    let model = presets::find("llama-3-8b").unwrap();
    let run = Run { recomputed: 0.5, ..run(&model, 8, 8, 8192) };
    let gpus = run.calibrate(&GPUS, 6667.0).unwrap();
    assert!((run.tokens_per_second(&gpus).unwrap() - 6667.0).abs() < 1.0);
    assert!((0.37..0.40).contains(&run.utilization(&gpus).unwrap()));
}

#[test]
fn effective_time_falls_with_the_number_of_gpus() {
    let effective = |gpus| (LLAMA_3_FAILURES.effective(gpus) * 1000.0).round();
    assert_eq!([512, 4096, 16_384, 100_000].map(effective), [985.0, 950.0, 873.0, 490.0]);
    assert_eq!(LLAMA_3_FAILURES.effective(10_000_000), 0.0);
    let hours = LLAMA_3_FAILURES.gpu_mtbf / 3600.0;
    assert!((hours - 50_677.0).abs() < 1.0, "{hours}");
    let step = Step { compute: 1.0, ..Step::default() };
    assert_eq!((step.bound(0.49), step.bound(0.9)), (Bound::Failures, Bound::Compute));
}

#[test]
fn stages_expose_what_they_cannot_overlap() {
    let network = Network { node: 4, local: 1e9, between: 1e9, latency: 0.0, direct: false };
    let work = Work {
        exchange: Exchange::default(),
        layers: 4,
        forward: 1.0,
        backward: 2.0,
        outside: 1.0,
        optimizer: 0.5,
        weights: 1e9,
        gradients: 2e9,
        outside_weights: 0.0,
        outside_gradients: 0.0,
    };
    let of = |stage| step(&work, Division { stage, shard: 2, replicas: 1 }, &network);
    // Half of each layer's bytes is sent: 0.5 s of a gather, 1 s of a reduction.
    assert_eq!(of(ZeroStage::Three), Step { compute: 13.5, gather: 0.5, reduce: 1.0, ..Step::default() });
    assert_eq!(of(ZeroStage::Two), Step { compute: 13.5, gather: 2.0, reduce: 1.0, ..Step::default() });
    assert_eq!(of(ZeroStage::One), Step { compute: 13.5, gather: 2.0, reduce: 4.0, ..Step::default() });
    assert_eq!(of(ZeroStage::Zero), Step { compute: 13.5, reduce: 1.0, ..Step::default() });
    let alone = step(&work, Division { stage: ZeroStage::Two, shard: 1, replicas: 1 }, &network);
    assert_eq!(alone.seconds(), 13.5);
    // Four nodes of one rank each, connected at a tenth of the rate.
    let slow = Network { node: 1, between: 1e8, ..network };
    assert!(step(&work, Division { stage: ZeroStage::Three, shard: 4, replicas: 1 }, &slow).exposed() > 50.0);
}
