//! Twenty steps of each objective over preferences beside TRL's, from the texts of the pairs on: `data/fixtures/preference/train.py`.

use std::path::{Path, PathBuf};

use dataloading::Tokenizer;
use dataloading::chat::Mask;
use frugal::dataloading::records::RecordFormat;
use frugal::fused_ce::LinearCrossEntropy;
use frugal::lora::Adapters;
use frugal::models::hugging_face::Folder;
use frugal::models::module;
use frugal::rows::{self, Overlong, RowConfig, RowEncoder};
use frugal::training::masked_rows::{Layout, MaskedBatches};
use frugal::training::observer::Collect;
use frugal::training::optimizer::{AdamW, DeviceOptimizer, Group};
use frugal::training::preference::{Objective, Preference, Switch};
use frugal::training::trainer::{Trainer, TrainerConfig};
use serde::Deserialize;
use tch::{Device, Kind};

/// A step, as TRL logs it.
#[derive(Deserialize)]
struct Step {
    loss: f64,
    rewards_chosen: f64,
    rewards_rejected: f64,
    accuracy: Option<f64>,
    reference_point: Option<f64>,
    grad_norm: f64,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fixtures/preference")
}

fn batches(folder: &Folder, objective: &Objective) -> MaskedBatches {
    let tokenizer = Tokenizer::from_file(&folder.path().join("tokenizer.json")).unwrap();
    let ends: Vec<u32> = folder.all_end_tokens().iter().map(|id| *id as u32).collect();
    let options = RowConfig {
        longest: 1024,
        overlong: Overlong::Error,
        mask: Mask::Answers,
        begin: None,
        end: ends[0],
        vocabulary: folder.config().vocab_size as usize,
        field: "text".to_owned(),
        templates: None,
    };
    let encoder = RowEncoder::new(tokenizer, None, &ends, options);
    let files = [fixtures().join("data.jsonl")];
    let detected = rows::detect_records(&files, "text").unwrap();
    assert_eq!(detected.formats, [(RecordFormat::Preference, 24)]);
    let rows = rows::prepare(&files, &encoder, &detected, None).unwrap();
    // KTO has the answers of four pairs one by one.
    let batch = if objective.is_rated() { 8 } else { 4 };
    let layout = Layout { batch, grouping: objective.grouping(), ..Layout::default() };
    MaskedBatches::over(&rows.rows, layout, Device::Cpu).unwrap()
}

#[test]
fn twenty_steps_are_those_of_trl() {
    for (name, objective) in [
        ("dpo", Objective::Dpo { beta: 0.1, label_smoothing: 0.0 }),
        ("ipo", Objective::Ipo { beta: 0.1 }),
        ("simpo", Objective::SimPo { beta: 2.0, gamma: 0.5 }),
        ("cpo", Objective::Cpo { beta: 0.1, alpha: 1.0 }),
        ("orpo", Objective::Orpo { lambda: 0.1 }),
        ("kto", Objective::Kto { beta: 0.1, desirable_weight: 1.0, undesirable_weight: 1.0 }),
    ] {
        let text = std::fs::read_to_string(fixtures().join(format!("steps/{name}.jsonl"))).unwrap();
        let expected: Vec<Step> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let folder = Folder::open(&fixtures().join("model")).unwrap();
        let mut model = folder.load(Some(Kind::Float), Device::Cpu).unwrap();
        LinearCrossEntropy::default().install(&mut model).unwrap();
        let adapters = Adapters::load(&mut model, &fixtures().join("adapter")).unwrap();
        let groups = Group::by_dimension(module::trainable(&model), 1e-3, 0.0);
        let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
        let options = TrainerConfig { steps: 20, clip: Some(1.0), ..TrainerConfig::default() };
        let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
        let off = adapters.switch();
        let switch: Switch = Box::new(move || Ok(Box::new(off.disable()?)));
        trainer.preference = Some(Preference { objective, switch: Some(switch) });
        let records = Collect::default();
        trainer.observers.push(Box::new(records.clone()));
        trainer.run(&mut batches(&folder, &objective), None).unwrap();
        let records = records.take();
        assert_eq!(records.len(), expected.len());
        for (own, theirs) in records.iter().zip(&expected) {
            let close = |own: f64, theirs: f64| (own - theirs).abs() <= 1e-5 * theirs.abs().max(1.0);
            let [chosen, rejected] = own.rewards.unwrap();
            let pairs = [
                (own.loss, theirs.loss),
                (chosen, theirs.rewards_chosen),
                (rejected, theirs.rewards_rejected),
                // TRL's KTO logs no accuracy, and the other objectives have no reference point.
                (own.accuracy.unwrap(), theirs.accuracy.unwrap_or(own.accuracy.unwrap())),
                (own.reference_point.unwrap_or(0.0), theirs.reference_point.unwrap_or(0.0)),
                (own.gradient_norm.unwrap(), theirs.grad_norm),
            ];
            assert!(
                pairs.iter().all(|(own, theirs)| close(*own, *theirs)),
                "{name}, step {}: {pairs:?}",
                own.step
            );
        }
    }
}
