//! Every technique over two ranks computes the bits of one, or is refused by name before anything is made; the same over groups as ranks
//! on GPUs have them, with what stands for NCCL.

use std::time::Duration;

use expect_test::expect;
use frugal::Error;
use frugal::config::{Compute, ScalerConfig, ZeroStage};
use frugal::runtime::collectives::{Group, GroupConfig, Store};
use frugal::sharding::Mesh;
use frugal::training::trainer::Overflow;
use sha2::{Digest, Sha256};
use tch::Kind;
use testing::ranks::Ranks;

use crate::objectives::{DISTILLATION, DPO, KTO, ORPO};
use crate::pairs::{Outcome, ROWS, Rounding, broken, run_over};
use crate::techniques::{Family, Promise, TECHNIQUES, Technique};

/// What a step that overflows crosses: its gradients are infinite at the first scales.
const OVERFLOWING: Technique = Technique {
    name: "fp16, a scale that overflows",
    group: "precision",
    promise: Promise::Nothing,
    set: |config, _| {
        config.precision.compute = Compute::Fp16;
        config.precision.scaler = Some(ScalerConfig::Dynamic {
            init_scale: 1e10,
            growth_factor: 2.0,
            backoff_factor: 0.125,
            growth_interval: 1,
        });
    },
};

/// Ranks need a micro-batch each, and ZeRO-2 does more than ZeRO-1.
pub(crate) const DIVIDED: [Technique; 2] = [
    Technique {
        name: "stage 2",
        group: "accumulation",
        promise: Promise::Nothing,
        set: |config, _| {
            (config.training.batch, config.training.accumulation) = (ROWS / 2, 2);
            config.optimizer.zero_stage = ZeroStage::Two;
        },
    },
    Technique {
        name: "stage 3",
        group: "accumulation",
        promise: Promise::Nothing,
        set: |config, _| {
            (config.training.batch, config.training.accumulation) = (ROWS / 2, 2);
            config.optimizer.zero_stage = ZeroStage::Three;
        },
    },
];

/// A stage and a family. `layers_over_ranks` has GPT-2 in stage 3.
const CROSSED: [(usize, Family); 3] = [(0, Family::Llama), (0, Family::Gpt2), (1, Family::Llama)];

/// A rank's process runs this test alone.
#[test]
#[allow(
    clippy::print_stdout,
    clippy::result_large_err,
    reason = "what a rank prints is its result; a test's errors are few"
)]
fn a_rank() {
    testing::ranks::rank(|(): (), launch| {
        let store = Store::connect(launch, Duration::from_secs(30)).unwrap();
        for (number, (stage, family)) in CROSSED.into_iter().enumerate() {
            let stage = &DIVIDED[stage];
            let techniques = TECHNIQUES.iter().chain([&OVERFLOWING, &DPO, &KTO, &ORPO, &DISTILLATION]);
            for (technique, overflow) in techniques
                .map(|technique| (technique, Overflow::Skip))
                .chain([(&OVERFLOWING, Overflow::Retry { most: 20 })])
            {
                let run = |ranks: Mesh| run_over(family, &[stage, technique], Some(ranks), overflow);
                let name = technique.name;
                // Stage 3 makes a second group of these ranks.
                let group = format!("training {number}, {name}, {overflow:?}");
                let ranks = Group::new(&store, &group, GroupConfig::default()).unwrap();
                match run((&ranks).into()) {
                    Err(error @ Error::Conflict { .. }) => println!("{}, {name}: {error}", stage.name),
                    Err(error) => panic!("{}, {family:?}, {name}: {error}", stage.name),
                    Ok(over) => {
                        check_overflow(technique, overflow, &over);
                        println!("bits {number}, {name}: {}", digest(&over));
                        // The other rank prints the same.
                        if ranks.rank() == 0 {
                            let alone = run((&Group::alone()).into()).unwrap();
                            let different = broken(Promise::Bits, &over, &alone, Rounding::Fp32);
                            assert!(different.is_none(), "{}, {family:?}, {name}: {different:?}", stage.name);
                        }
                        let options = GroupConfig { nccl_stand_in: true, ..GroupConfig::default() };
                        let devices = ranks.reconnect(&format!("{group}, devices"), options).unwrap();
                        let over_devices = run(Mesh::over_devices(&ranks, &devices, 1).unwrap()).unwrap();
                        let different = broken(Promise::Bits, &over_devices, &over, Rounding::Fp32);
                        assert!(
                            different.is_none(),
                            "{}, {family:?}, {name}, devices: {different:?}",
                            stage.name
                        );
                    }
                }
                ranks.barrier("the next one").unwrap();
            }
        }
    });
}

/// A digest of losses, norms and weights.
fn digest(outcome: &Outcome) -> String {
    let mut digest = Sha256::new();
    outcome.losses.iter().chain(&outcome.norms).for_each(|value| digest.update(value.to_le_bytes()));
    for (_, weight) in &outcome.weights {
        let bytes = weight.contiguous().view([-1]).view_dtype(Kind::Uint8);
        digest.update(Vec::<u8>::try_from(bytes).unwrap());
    }
    format!("{:x?}", digest.finalize())
}

fn check_overflow(technique: &Technique, overflow: Overflow, outcome: &Outcome) {
    let (skipped, retries) = (outcome.skipped, outcome.retries);
    match overflow {
        _ if technique.name != OVERFLOWING.name => {
            assert_eq!((skipped, retries), (0, 0), "{}", technique.name)
        }
        Overflow::Skip => assert!(skipped > 0 && retries == 0, "{skipped} skipped"),
        Overflow::Retry { .. } => assert!(skipped == 0 && retries > 0, "{retries} retries"),
    }
}

#[test]
fn every_technique_computes_the_bits_of_one_rank_or_is_refused_by_name() {
    let printed = Ranks::new("techniques_over_ranks::a_rank", 2).run(&());
    assert_eq!(printed[0], printed[1]);
    let refused: Vec<&str> =
        printed[0].iter().filter(|line| !line.starts_with("bits ")).map(String::as_str).collect();
    assert!(printed[0].len() > 2 * refused.len(), "{printed:?}");
    let half = refused.iter().filter(|line| line.starts_with("stage 2")).count() / 2;
    let (stage_2, rest) = refused.split_at(half);
    let (again, stage_3) = rest.split_at(half);
    assert_eq!(stage_2, again, "what is refused depends on the techniques alone");
    expect![[r#"
        stage 2, offload, overlap: `offload` and 2 ranks cannot be combined: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; use `optimizer.zero_stage = 3`, or leave `offload` out
        stage 2, offload, function: `offload` and 2 ranks cannot be combined: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; use `optimizer.zero_stage = 3`, or leave `offload` out
        stage 2, offload, checkpointing: `offload` and 2 ranks cannot be combined: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; use `optimizer.zero_stage = 3`, or leave `offload` out
        stage 2, offload, a resident layer: `offload` and 2 ranks cannot be combined: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; use `optimizer.zero_stage = 3`, or leave `offload` out
        stage 2, offload to files: `offload.tier = "file"` with full fine-tuning and `optimizer.place = "device"` cannot be combined: the optimizer's state of trained layers in files is in files, too; use `optimizer.place = "host"`, train an adapter, or use `offload.tier = "host"`
        stage 2, layers and optimizer in files: `offload` and 2 ranks cannot be combined: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; use `optimizer.zero_stage = 3`, or leave `offload` out
        stage 2, optimizer on the host: `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`
        stage 3, recompute elementwise: `activations` and 2 ranks cannot be combined: a divided layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"`, or `optimizer.zero_stage = 2`
        stage 3, recompute MLPs: `activations` and 2 ranks cannot be combined: a divided layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"`, or `optimizer.zero_stage = 2`
        stage 3, recompute attention: `activations` and 2 ranks cannot be combined: a divided layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"`, or `optimizer.zero_stage = 2`
        stage 3, offload inputs: `activations` and 2 ranks cannot be combined: a divided layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"`, or `optimizer.zero_stage = 2`
        stage 3, activation plan: `activations` and 2 ranks cannot be combined: a divided layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"`, or `optimizer.zero_stage = 2`
        stage 3, offload, function: `offload.method` and 2 ranks cannot be combined: layers are gathered into the ring's slots; use `offload.method = "overlap"`
        stage 3, offload, checkpointing: `offload.method` and 2 ranks cannot be combined: layers are gathered into the ring's slots; use `offload.method = "overlap"`
        stage 3, offload to files: `offload.tier = "file"` with full fine-tuning and `optimizer.place = "device"` cannot be combined: the optimizer's state of trained layers in files is in files, too; use `optimizer.place = "host"`, train an adapter, or use `offload.tier = "host"`
        stage 3, optimizer on the host: `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`"#]].assert_eq(&[stage_2, stage_3].concat().join("\n"));
}
