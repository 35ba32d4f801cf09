//! Twenty steps of a student with a teacher of another width beside TRL's loss: `data/fixtures/distillation/train.py`.

use std::path::{Path, PathBuf};

use frugal::fused_ce::LinearCrossEntropy;
use frugal::models::distillation::{DistillationConfig, Divergence};
use frugal::models::hugging_face::Folder;
use frugal::models::module;
use frugal::recipe::Teacher;
use frugal::training::distillation::Distillation;
use frugal::training::masked_rows::{Layout, MaskedBatches, MaskedRow};
use frugal::training::observer::Collect;
use frugal::training::optimizer::{AdamW, DeviceOptimizer, Group};
use frugal::training::trainer::{Trainer, TrainerConfig};
use frugal::{Config, config::TeacherPlace};
use serde::Deserialize;
use tch::{Device, Kind};

#[derive(Deserialize)]
struct Fixture {
    rows: Vec<Row>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Row {
    tokens: Vec<i64>,
    labels: Vec<i64>,
}

#[derive(Deserialize)]
struct Case {
    beta: f64,
    temperature: f64,
    label_weight: f64,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    loss: f64,
    divergence: f64,
    cross_entropy: f64,
    norm: f64,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fixtures")
}

#[test]
fn twenty_steps_are_those_of_trl() {
    let text = std::fs::read_to_string(fixtures().join("distillation/steps.json")).unwrap();
    let fixture: Fixture = serde_json::from_str(&text).unwrap();
    let teacher_folder = Folder::open(&fixtures().join("preference/model")).unwrap();
    for case in &fixture.cases {
        for place in [TeacherPlace::Device, TeacherPlace::Offloaded] {
            let mut config = Config::default();
            config.objective.teacher_place = place;
            let teacher = Teacher::open(&config, &teacher_folder, Device::Cpu).unwrap();
            assert_eq!(teacher.offload.is_some(), place == TeacherPlace::Offloaded);
            let student = Folder::open(&fixtures().join("distillation/student")).unwrap();
            let mut student = student.load(Some(Kind::Float), Device::Cpu).unwrap();
            LinearCrossEntropy::default().install(&mut student).unwrap();
            let groups = Group::by_dimension(module::trainable(&student), 3e-3, 0.1);
            let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
            let options = TrainerConfig { steps: 20, clip: Some(1.0), ..TrainerConfig::default() };
            let mut trainer = Trainer::new(Box::new(student), Box::new(optimizer), options).unwrap();
            let learned = DistillationConfig {
                divergence: match case.beta {
                    0.0 => Divergence::ForwardKl,
                    1.0 => Divergence::ReverseKl,
                    beta => Divergence::JensenShannon { beta },
                },
                temperature: case.temperature,
                label_weight: case.label_weight,
            };
            trainer.distillation = Some(Distillation::new(teacher.model, learned).unwrap());
            let records = Collect::default();
            trainer.observers.push(Box::new(records.clone()));
            let rows = fixture.rows.iter().map(|row| MaskedRow::new(row.tokens.clone(), row.labels.clone()));
            let layout = Layout { batch: 4, ..Layout::default() };
            let mut batches = MaskedBatches::new(rows.collect(), layout, Device::Cpu).unwrap();
            trainer.run(&mut batches, None).unwrap();
            let records = records.take();
            assert_eq!(records.len(), case.steps.len());
            for (own, theirs) in records.iter().zip(&case.steps) {
                let parts = own.distilled.unwrap();
                for (own, theirs) in [
                    (own.loss, theirs.loss),
                    (parts.divergence, theirs.divergence),
                    (parts.cross_entropy, theirs.cross_entropy),
                    (own.gradient_norm.unwrap(), theirs.norm),
                ] {
                    assert!(
                        (own - theirs).abs() <= 1e-5 * theirs.abs().max(1.0),
                        "{learned:?}: {own} {theirs}"
                    );
                }
            }
        }
    }
}
