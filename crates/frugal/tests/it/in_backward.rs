//! Updates during backward, crossed with every technique: the bits of updates after it, or refused by name.

use std::collections::BTreeMap;

use expect_test::expect;
use frugal::Error;
use frugal::config::{MasterWeights, OptimizerRule};
use frugal::training::trainer::Overflow;

use crate::objectives::{DISTILLATION, DPO, KTO, ORPO};
use crate::pairs::{Rounding, broken, run_over};
use crate::techniques::{Family, Promise, TECHNIQUES, Technique};

/// Without clipping, which needs all gradients.
const AFTER: Technique = Technique {
    name: "after",
    group: "update",
    promise: Promise::Nothing,
    set: |config, _| config.optimizer.clip = 0.0,
};

const DURING: Technique = Technique {
    name: "during",
    set: |config, _| (config.optimizer.clip, config.optimizer.in_backward) = (0.0, true),
    ..AFTER
};

const fn rule(name: &'static str, set: fn(&mut frugal::Config, Family)) -> Technique {
    Technique { name, group: "rule", promise: Promise::Nothing, set }
}

const OTHERS: [Technique; 9] = [
    DPO,
    KTO,
    ORPO,
    DISTILLATION,
    rule("8-bit AdamW", |config, _| config.optimizer.rule = OptimizerRule::AdamW8bit),
    rule("Muon", |config, _| config.optimizer.rule = OptimizerRule::Muon),
    rule("Adafactor", |config, _| config.optimizer.rule = OptimizerRule::Adafactor),
    rule("Lion", |config, _| config.optimizer.rule = OptimizerRule::Lion),
    rule("stochastic rounding", |config, _| config.optimizer.master_weights = MasterWeights::Stochastic),
];

#[test]
fn every_technique_has_the_bits_of_updates_after_backward_or_is_refused_by_name() {
    let (mut reasons, mut failures): (BTreeMap<String, usize>, _) = (BTreeMap::new(), Vec::new());
    for family in [Family::Wide, Family::Gemma4] {
        for technique in TECHNIQUES.iter().chain(&OTHERS) {
            let of = |update: &Technique| run_over(family, &[technique, update], None, Overflow::Skip);
            let name = format!("{family:?}, {}", technique.name);
            match (of(&DURING), of(&AFTER)) {
                // Without updates during backward it is refused, too.
                (Err(during), Err(after)) if during.to_string() == after.to_string() => {}
                (Err(Error::Conflict { .. }), Err(Error::Conflict { .. })) => {}
                (Err(Error::Conflict { why, .. }), Ok(_)) => *reasons.entry(why.to_owned()).or_default() += 1,
                (Ok(during), Ok(after)) => failures.extend(
                    broken(Promise::Bits, &during, &after, Rounding::Fp32)
                        .map(|found| format!("{name}: {found}")),
                ),
                (during, after) => failures.push(format!("{name}: {:?} and {:?}", during.err(), after.err())),
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    let reasons: Vec<String> = reasons.iter().map(|(reason, count)| format!("{count} × {reason}")).collect();
    expect![[r#"
        4 × all gradients would be in memory until the last micro-batch
        10 × offloaded layers are updated when their slot is free
        2 × the loss's own backward adds to a matrix that the embedding uses too, after which it would be updated twice
        2 × weights are updated during backward, before it is known whether a gradient overflows"#]].assert_eq(&reasons.join("\n"));
}
