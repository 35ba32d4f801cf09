//! Steps with a teacher: its weights, its forward, and the tiles of its logits.

use std::path::PathBuf;
use std::sync::OnceLock;

use frugal::config::{DivergenceKind, TeacherPlace};
use frugal::planning::TeacherShape;
use frugal::recipe::{Prepared, Teacher};

use super::*;

/// The folder of a teacher that is wider than the students.
fn folder() -> PathBuf {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let made = FOLDER.get_or_init(|| {
        let path = tempfile::tempdir().unwrap();
        let shape = DecoderConfig {
            num_key_value_heads: 2,
            max_position_embeddings: 256,
            ..DecoderConfig::llama(600, 160, 400, 5, 4)
        };
        let weights = Llama::new(&shape, (Kind::Float, Device::Cpu)).unwrap();
        hugging_face::save(&weights, path.path(), hugging_face::SHARD_BYTES).unwrap();
        path
    });
    made.path().to_owned()
}

fn teach(config: &mut Config) {
    let own = &mut config.objective;
    own.kind = ObjectiveKind::Distillation;
    own.teacher = Some(folder().display().to_string());
    own.teacher_place = TeacherPlace::Device;
}

fn reverse(config: &mut Config) {
    teach(config);
    config.objective.divergence = Some(DivergenceKind::ReverseKl);
}

fn offloaded(config: &mut Config) {
    teach(config);
    config.objective.divergence = Some(DivergenceKind::JensenShannon);
    config.objective.teacher_place = TeacherPlace::Offloaded;
}

/// The data with the teacher of a configuration, if it has one.
pub(super) fn with_teacher(config: &Config, data: DataShape) -> DataShape {
    let Some(path) = &config.objective.teacher else { return data };
    let folder = Folder::open(path.as_ref()).unwrap();
    let format = WeightFormat::of(&folder, Teacher::kind(config, &folder).unwrap()).unwrap();
    DataShape { teacher: Some(TeacherShape { config: Box::new(folder.config().clone()), format }), ..data }
}

/// The model with the teacher of its configuration, if it has one.
pub(super) fn taught(config: &Config, prepared: Prepared) -> Prepared {
    let Some(path) = &config.objective.teacher else { return prepared };
    let folder = Folder::open(path.as_ref()).unwrap();
    prepared.with_teacher(Teacher::open(config, &folder, Device::Cpu).unwrap())
}

const TAUGHT: Case = Case { name: "taught", further: teach, ..ADAPTED };

const CASES: [Case; 10] = [
    TAUGHT,
    Case { name: "taught, larger chunks", chunk: 200, ..TAUGHT },
    Case { name: "taught, reverse, bf16", kind: Kind::BFloat16, further: reverse, ..TAUGHT },
    Case { name: "taught, recomputed", placement: recompute, length: 100, ..TAUGHT },
    Case { name: "taught, without padding", arrangement: PaddingFree, ..TAUGHT },
    Case { name: "taught, packed", arrangement: Packed(64), length: 25, ..TAUGHT },
    Case { name: "taught by offloaded layers", further: offloaded, ..TAUGHT },
    Case {
        name: "taught by offloaded layers, layers in files",
        further: offloaded,
        placement: files,
        ..TAUGHT
    },
    Case { name: "taught, full", further: teach, ..FULL },
    Case {
        name: "taught, full, accumulated",
        further: offloaded,
        accumulation: 2,
        placement: recompute,
        ..FULL
    },
];

#[test]
fn predicted_peaks_with_a_teacher_are_those_of_the_allocator() {
    let wrong: Vec<String> =
        models().iter().flat_map(|(model, shape)| compare(model, shape, &CASES, TOLERANCE)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
