//! Adapters as on a GPU, where projections of one input are one function, with every technique, and over ranks: the results of the
//! adapters alone, of one rank, and of separate functions.

use std::time::Duration;

use frugal::Error;
use frugal::kernels::gpu;
use frugal::lora::{LoraConfig, Names};
use frugal::runtime::collectives::{Group, GroupConfig, Store};
use frugal::training::trainer::Overflow;
use testing::ranks::Ranks;

use crate::pairs::{Outcome, Rounding, broken, run_over};
use crate::techniques::{Family, Promise, TECHNIQUES, Technique};
use crate::techniques_over_ranks::DIVIDED;

/// Adapters with dropout of every projection: q, k and v are one function, and gate and up another.
const EVERYWHERE: Technique = Technique {
    name: "LoRA everywhere",
    group: "adapter",
    promise: Promise::Nothing,
    set: |config, _| {
        config.adapter = Some(LoraConfig {
            r: 2,
            lora_dropout: 0.25,
            init_lora_weights: false.into(),
            target_modules: Some(Names::Pattern("all-linear".to_owned())),
            ..LoraConfig::default()
        });
    },
};

/// How far sums in another order may move a loss or a norm in two steps.
const ANOTHER_ORDER: Promise = Promise::Within(1e-4);

#[allow(clippy::result_large_err, reason = "a test's errors are few")]
fn run(techniques: &[&Technique], on_gpu: bool, ranks: Option<&Group>) -> Result<Outcome, Error> {
    let _gpu = on_gpu.then(gpu::assume);
    run_over(Family::Llama, techniques, ranks.map(Into::into), Overflow::Skip)
}

#[test]
fn every_technique_computes_what_it_computes_beside_separate_projections() {
    let mut compared = 0;
    for adapter in [&TECHNIQUES[0], &TECHNIQUES[1], &EVERYWHERE] {
        assert_eq!(adapter.group, "adapter");
        let alone = run(&[adapter], true, None).unwrap();
        for technique in TECHNIQUES.iter().filter(|other| other.group != "adapter") {
            let name = format!("{} + {}", adapter.name, technique.name);
            let separate = run(&[adapter, technique], false, None);
            let joint = match (run(&[adapter, technique], true, None), &separate) {
                (Ok(joint), Ok(_)) => joint,
                (Err(Error::Conflict { .. }), Err(Error::Conflict { .. })) => continue,
                (joint, _) => panic!("{name}: {:?}, {:?}", joint.err(), separate.err()),
            };
            // Noise, which is larger than the embeddings, enlarges a rounding of the first step as much as 16 bits do.
            let precise = !["precision", "noise"].contains(&technique.group);
            // Rows in two batches or another order have other masks.
            let masks = ["accumulation", "rows", "packing"].contains(&technique.group);
            if adapter.name != EVERYWHERE.name || !masks {
                let promise = match technique.promise {
                    Promise::Within(_) => ANOTHER_ORDER,
                    other => other,
                };
                let rounding = if precise { Rounding::Fp32 } else { Rounding::Low };
                let differs = broken(promise, &joint, &alone, rounding);
                assert!(differs.is_none(), "{name}: {differs:?}");
            }
            let separate = separate.unwrap();
            if precise {
                let differs = broken(ANOTHER_ORDER, &joint, &separate, Rounding::Fp32);
                assert!(differs.is_none(), "{name}, as on a CPU: {differs:?}");
            } else {
                // The first step: the second enlarges roundings, which differ.
                for (joint, separate) in
                    [(joint.losses[0], separate.losses[0]), (joint.norms[0], separate.norms[0])]
                {
                    assert!((joint / separate - 1.0).abs() < 0.1, "{name}, as on a CPU: {joint}, {separate}");
                }
            }
            compared += 1;
        }
    }
    assert!(compared > 50, "{compared}");
}

/// A rank's process runs this test alone.
#[test]
#[allow(clippy::print_stdout, reason = "what a rank prints is its result")]
fn a_rank() {
    testing::ranks::rank(|(): (), launch| {
        let store = Store::connect(launch, Duration::from_secs(30)).unwrap();
        for stage in &DIVIDED {
            for adapter in [&TECHNIQUES[0], &TECHNIQUES[1], &EVERYWHERE] {
                let name = format!("{}, {}", stage.name, adapter.name);
                // A step in stage 3 makes a second group of its ranks.
                let over = |on_gpu: bool| {
                    let group = format!("{name}, {on_gpu}");
                    let ranks = Group::new(&store, &group, GroupConfig::default()).unwrap();
                    let outcome = run(&[stage, adapter], on_gpu, Some(&ranks)).unwrap();
                    ranks.barrier("the next one").unwrap();
                    outcome
                };
                let (over, separate) = (over(true), over(false));
                let alone = run(&[stage, adapter], true, Some(&Group::alone())).unwrap();
                let different = broken(Promise::Bits, &over, &alone, Rounding::Fp32);
                assert!(different.is_none(), "{name}: {different:?}");
                let different = broken(ANOTHER_ORDER, &over, &separate, Rounding::Fp32);
                assert!(different.is_none(), "{name}, as on a CPU: {different:?}");
                println!("{name}");
            }
        }
    });
}

#[test]
fn divided_layers_compute_the_bits_of_one_rank() {
    let printed = Ranks::new("joint_projections::a_rank", 2).run(&());
    assert_eq!(printed[0], printed[1]);
    assert_eq!(printed[0].len(), 6, "{printed:?}");
}
