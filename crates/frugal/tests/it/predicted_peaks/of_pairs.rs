//! Trainings on preferences: their predicted peaks, and the memory of an ordinary training on the same tokens.

use super::*;

const DPO: Case = Case { name: "DPO", objective: ObjectiveKind::Dpo, ..ADAPTED };
const KTO: Case = Case { name: "KTO", objective: ObjectiveKind::Kto, ..ADAPTED };
const ORPO: Case = Case { name: "ORPO, full", objective: ObjectiveKind::Orpo, ..FULL };

const PAIRS: [Case; 14] = [
    DPO,
    Case { name: "DPO, bf16", kind: Kind::BFloat16, ..DPO },
    Case { name: "DPO, bf16, recomputed", kind: Kind::BFloat16, placement: recompute, length: 100, ..DPO },
    Case { name: "DPO, without padding", arrangement: PaddingFree, ..DPO },
    Case { name: "DPO, packed", arrangement: Packed(64), length: 25, ..DPO },
    Case {
        name: "DPO, bf16, layers in files",
        kind: Kind::BFloat16,
        placement: files,
        accumulation: 2,
        ..DPO
    },
    KTO,
    Case { name: "KTO, bf16, recomputed", kind: Kind::BFloat16, placement: recompute, length: 100, ..KTO },
    Case { name: "KTO, without padding", arrangement: PaddingFree, ..KTO },
    Case { name: "KTO, packed", arrangement: Packed(64), length: 25, ..KTO },
    Case { name: "SimPO, adapters", objective: ObjectiveKind::Simpo, ..ADAPTED },
    ORPO,
    Case { name: "ORPO, full, bf16", kind: Kind::BFloat16, length: 40, ..ORPO },
    Case { name: "ORPO, full, recomputed", placement: recompute, ..ORPO },
];

#[test]
fn predicted_peaks_of_pairs_are_those_of_the_allocator() {
    let wrong: Vec<String> =
        models().iter().flat_map(|(model, shape)| compare(model, shape, &PAIRS, TOLERANCE)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn pairs_take_the_memory_of_ordinary_fine_tuning() {
    let rows = Case { adapters: Some(alone), ..ADAPTED };
    let bf16 = Case { kind: Kind::BFloat16, ..rows };
    let recomputed = Case { placement: recompute, length: 100, ..bf16 };
    let all = [("adapters", rows), ("bf16", bf16), ("recomputed", recomputed)];
    for (model, shape) in models() {
        let path = tempfile::tempdir().unwrap();
        let weights = Llama::new(&shape, (Kind::Float, Device::Cpu)).unwrap();
        hugging_face::save(&weights, path.path(), hugging_face::SHARD_BYTES).unwrap();
        drop(weights);
        let folder = Folder::open(path.path()).unwrap();
        for (name, case) in all {
            let ordinary = measured(&case, &folder);
            for objective in [ObjectiveKind::Dpo, ObjectiveKind::Kto, ObjectiveKind::Orpo] {
                let share = measured(&Case { objective, ..case }, &folder) as f64 / ordinary as f64;
                eprintln!("{model}, {name}, {objective:?}: {share:.3}");
                assert!((0.9..=1.1).contains(&share), "{model}, {name}, {objective:?}: {share}");
            }
        }
    }
}
