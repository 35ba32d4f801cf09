//! A base in NF4, or in the blocks of a GGUF file, with every technique.

use std::time::Duration;

use expect_test::expect;
use frugal::Error;
use frugal::config::{Dtype, OffloadConfig, OptimizerPlace, ZeroStage};
use frugal::runtime::collectives::{Group, GroupConfig, Store};
use frugal::training::trainer::Overflow;
use testing::ranks::Ranks;

use crate::pairs::{Outcome, ROWS, Rounding, broken, run_over};
use crate::techniques::{Family, Promise, TECHNIQUES, Technique};

const NF4: Technique = Technique {
    name: "NF4",
    group: "dtype",
    promise: Promise::Nothing,
    set: |config, _| config.model.dtype = Some(Dtype::Nf4),
};

const BLOCKS: Technique = Technique {
    name: "blocks",
    group: "dtype",
    promise: Promise::Nothing,
    set: |config, _| config.model.dtype = Some(Dtype::Gguf),
};

/// The optimizer's place without offloading is refused in any dtype.
const ON_THE_HOST: Technique = Technique {
    name: "offload, optimizer on the host",
    group: "offload",
    promise: Promise::Bits,
    set: |config, _| {
        config.offload = Some(OffloadConfig::default());
        config.optimizer.place = OptimizerPlace::Host;
    },
};

fn run(techniques: &[&Technique]) -> Result<Outcome, Box<Error>> {
    run_over(Family::Llama, techniques, None, Overflow::Skip).map_err(Box::new)
}

/// Returns what is refused beside the base.
fn refused(base: &Technique) -> String {
    let mut refused = Vec::new();
    for adapter in &TECHNIQUES[..2] {
        assert_eq!(adapter.group, "adapter");
        let without = run(&[base, adapter]).unwrap();
        for technique in TECHNIQUES.iter().chain([&ON_THE_HOST]).filter(|other| other.group != "adapter") {
            match run(&[base, adapter, technique]) {
                Ok(with) => {
                    let found = broken(technique.promise, &with, &without, Rounding::Low);
                    assert!(found.is_none(), "{} + {}: {found:?}", adapter.name, technique.name);
                }
                Err(error) if matches!(*error, Error::Conflict { .. }) => {
                    refused.push(format!("{}: {error}", technique.name));
                }
                Err(error) => panic!("{} + {}: {error}", adapter.name, technique.name),
            }
        }
    }
    let error = run(&[base]).err().expect("an adapter is needed");
    refused.push(format!("no adapter: {error}"));
    refused.sort();
    refused.dedup();
    refused.join("\n")
}

/// Compares what is refused beside a base of this dtype, written as for NF4.
fn check_refused(base: &Technique, dtype: &str) {
    expect![[r#"
        MLP level input-only-tiled: `model.dtype = "nf4"` and `mlp.level` cannot be combined: the recomputed MLP is one function over three weights of a floating dtype; leave `mlp.level` out and use `activations.recompute = "mlp"`
        MLP level input-only: `model.dtype = "nf4"` and `mlp.level` cannot be combined: the recomputed MLP is one function over three weights of a floating dtype; leave `mlp.level` out and use `activations.recompute = "mlp"`
        MLP level save-one: `model.dtype = "nf4"` and `mlp.level` cannot be combined: the recomputed MLP is one function over three weights of a floating dtype; leave `mlp.level` out and use `activations.recompute = "mlp"`
        a frozen layer: `model.freeze` and `adapter` cannot be combined: an adapter freezes the whole base; leave `model.freeze` out
        fp8: `model.dtype = "nf4"` and `precision.compute = "fp8"` cannot be combined: a product in fp8 rounds its weight again; use `precision.compute = "bf16"`
        no adapter: `model.dtype = "nf4"` and full fine-tuning cannot be combined: quantized weights cannot take the steps of an optimizer; train an adapter, or use `model.dtype = "bfloat16"`
        optimizer on the host: `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`"#]].assert_eq(&refused(base).replace(dtype, "nf4"));
}

#[test]
fn every_technique_keeps_its_promise_over_blocks_or_is_refused_by_name() {
    check_refused(&BLOCKS, "gguf");
}

#[test]
fn every_technique_keeps_its_promise_over_nf4_or_is_refused_by_name() {
    check_refused(&NF4, "nf4");
}

/// A rank's process runs this test alone.
#[test]
#[allow(clippy::print_stdout, reason = "what a rank prints is its result")]
fn a_rank() {
    testing::ranks::rank(|(): (), launch| {
        let store = Store::connect(launch, Duration::from_secs(30)).unwrap();
        let stage = |number: u8| Technique {
            name: "stage",
            group: "accumulation",
            promise: Promise::Nothing,
            set: match number {
                2 => |config, _| {
                    (config.training.batch, config.training.accumulation) = (ROWS / 2, 2);
                    config.optimizer.zero_stage = ZeroStage::Two;
                },
                _ => |config, _| {
                    (config.training.batch, config.training.accumulation) = (ROWS / 2, 2);
                    config.optimizer.zero_stage = ZeroStage::Three;
                },
            },
        };
        let group = Group::new(&store, "quantized", GroupConfig::default()).unwrap();
        for base in [NF4, BLOCKS] {
            let over = |number: u8, ranks: &Group| {
                let all = [&base, &LORA, &stage(number)];
                run_over(Family::Llama, &all, Some(ranks.into()), Overflow::Skip).map_err(Box::new)
            };
            let (divided, alone) = (over(2, &group).unwrap(), over(2, &Group::alone()).unwrap());
            assert!(broken(Promise::Bits, &divided, &alone, Rounding::Fp32).is_none(), "{}", base.name);
            println!("{}", over(3, &group).map(|_| ()).unwrap_err());
        }
        group.barrier("end").unwrap();
    });
}

/// As in the table, which has no copies.
const LORA: Technique = Technique {
    name: "LoRA",
    group: "adapter",
    promise: Promise::Nothing,
    set: |config, family| (TECHNIQUES[0].set)(config, family),
};

#[test]
fn two_ranks_compute_the_bits_of_one() {
    let printed = Ranks::new("quantized_base::a_rank", 2).run(&());
    assert_eq!(printed[0], printed[1]);
    expect![[r#"
        `model.dtype = "nf4"` and 2 ranks cannot be combined: layers that are divided are placeholders of NaN between their uses, which bytes of quantized weights do not have; use `optimizer.zero_stage = 2`, where each rank has the whole base
        `model.dtype = "gguf"` and 2 ranks cannot be combined: layers that are divided are placeholders of NaN between their uses, which bytes of quantized weights do not have; use `optimizer.zero_stage = 2`, where each rank has the whole base"#]].assert_eq(&printed[0].join("\n"));
}
