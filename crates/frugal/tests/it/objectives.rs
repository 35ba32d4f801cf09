//! Objectives over preferences, and that of a teacher, crossed with every technique.

use std::collections::BTreeMap;

use expect_test::expect;
use frugal::Error;
use frugal::config::{DivergenceKind, ObjectiveKind};
use frugal::training::trainer::Overflow;

use crate::pairs::{Outcome, Rounding, broken, run_over};
use crate::techniques::{Family, Promise, TECHNIQUES, Technique};

/// With adapters, which the reference is without.
pub(crate) const DPO: Technique = Technique {
    name: "DPO",
    group: "adapter",
    promise: Promise::Nothing,
    set: |config, family| {
        (TECHNIQUES[0].set)(config, family);
        if let Some(adapter) = &mut config.adapter {
            adapter.init_lora_weights = true.into();
        }
        config.objective.kind = ObjectiveKind::Dpo;
    },
};

/// Of rated answers, with adapters.
pub(crate) const KTO: Technique = Technique {
    name: "KTO",
    set: |config, family| {
        (DPO.set)(config, family);
        config.objective.kind = ObjectiveKind::Kto;
    },
    ..DPO
};

/// With all weights.
pub(crate) const ORPO: Technique = Technique {
    name: "ORPO",
    group: "objective",
    promise: Promise::Nothing,
    set: |config, _| config.objective.kind = ObjectiveKind::Orpo,
};

/// A teacher of another width.
pub(crate) const DISTILLATION: Technique = Technique {
    name: "distillation",
    group: "objective",
    promise: Promise::Nothing,
    set: |config, _| {
        let own = &mut config.objective;
        (own.kind, own.teacher) = (ObjectiveKind::Distillation, Some("teacher".to_owned()));
        (own.divergence, own.beta) = (Some(DivergenceKind::JensenShannon), Some(0.3));
        (own.temperature, own.label_weight) = (Some(1.5), Some(0.4));
    },
};

/// Crosses an objective with every technique of another group, on two families. Returns the reasons of refusals with their numbers.
///
/// # Panics
/// A technique that breaks its promise, or fails in another way.
pub(crate) fn refusals(
    objectives: &[&Technique],
    run: impl Fn(Family, &[&Technique]) -> Result<Outcome, Error>,
    check: impl Fn(&Technique, &Outcome),
) -> String {
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let mut failures = Vec::new();
    for objective in objectives {
        for family in [Family::Llama, Family::Gpt2] {
            let plain = run(family, &[objective]).unwrap();
            check(objective, &plain);
            for technique in TECHNIQUES.iter().filter(|technique| technique.group != objective.group) {
                let name = format!("{family:?}: {} + {}", objective.name, technique.name);
                match run(family, &[technique, objective]) {
                    Err(Error::Conflict { why, .. }) => *reasons.entry(why.to_owned()).or_default() += 1,
                    Err(error) => failures.push(format!("{name}: {error}")),
                    Ok(with) => {
                        let rounding =
                            if technique.group == "precision" { Rounding::Low } else { Rounding::Fp32 };
                        failures.extend(
                            broken(technique.promise, &with, &plain, rounding)
                                .map(|found| format!("{name}: {found}")),
                        );
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    let reasons: Vec<String> = reasons.iter().map(|(reason, count)| format!("{count} × {reason}")).collect();
    reasons.join("\n")
}

#[test]
fn every_technique_keeps_its_promise_or_is_refused_by_name() {
    let run = |family: Family, techniques: &[&Technique]| run_over(family, techniques, None, Overflow::Skip);
    let check = |objective: &Technique, plain: &Outcome| {
        let first = match objective.name {
            "DPO" => 2f64.ln(),
            "KTO" => 0.5,
            _ => return,
        };
        assert!((plain.losses[0] - first).abs() < 1e-6, "{:?}", plain.losses);
    };
    let reasons = refusals(&[&DPO, &KTO, &ORPO, &DISTILLATION], run, check);
    expect![[r#"
        4 × an adapter freezes the whole base
        6 × answers that are compared are in one micro-batch
        4 × the optimizer's state of trained layers in files is in files, too
        8 × the update on the host is that of offloaded layers"#]]
    .assert_eq(&reasons);
}
