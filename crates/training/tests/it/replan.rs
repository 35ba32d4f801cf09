//! A limit that is lowered in the middle of a training changes the activation plan, and no bit of the result.

use std::sync::{Arc, Mutex};

use models::module::trainable;
use models::{Gpt2, Gpt2Config};
use runtime::memory::{Limit, Region, limit};
use tch::{Device, Kind, Tensor};
use training::activations::{Activations, LayerPlan};
use training::batches::Synthetic;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, Group};
use training::trainer::{CheaperPlan, CheaperPlans, StopReason, TrainerConfig};
use training::{DeviceOptimizer, Result, Trainer};

const LAYERS: usize = 6;

/// Lowers the limit after a step, and keeps the notes.
#[derive(Clone, Default)]
struct Tighten {
    after: Option<(u64, u64)>,
    held: Arc<Mutex<(Option<Limit>, Vec<String>)>>,
}

impl Observer for Tighten {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        if let Some((_, bytes)) = self.after.filter(|(step, _)| *step == record.step) {
            self.held.lock().unwrap().0 = Some(limit(Device::Cpu, bytes)?);
        }
        Ok(())
    }

    fn on_note(&mut self, text: &str) -> Result<()> {
        self.held.lock().unwrap().1.push(text.to_owned());
        Ok(())
    }
}

struct Run {
    ended: Result<StopReason>,
    weights: Vec<Tensor>,
    notes: Vec<String>,
    plan: Vec<LayerPlan>,
    /// Of the third step on.
    peak: u64,
}

/// Six steps with dropout and two batches each; the limit falls to `bytes` after the third.
fn run(plan: LayerPlan, bytes: Option<u64>, plans: Option<Vec<CheaperPlan>>) -> Run {
    runtime::random::seed(7).unwrap();
    let config = Gpt2Config {
        vocabulary: 64,
        max_sequence: 64,
        hidden: 64,
        heads: 4,
        layers: LAYERS as i64,
        dropout: 0.1,
        ..Gpt2Config::small()
    };
    let mut model = Gpt2::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let activations = Activations::install(&mut model, &[plan; LAYERS]).unwrap();
    let groups = Group::by_dimension(trainable(&model), 1e-2, 0.1);
    let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
    let options = TrainerConfig {
        steps: 6,
        accumulation: 2,
        clip: Some(1.0),
        log_every: 1,
        ..TrainerConfig::default()
    };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    trainer.cheaper_plans = plans.map(|plans| CheaperPlans::new(activations.clone(), None, plans));
    let tighten = Tighten { after: bytes.map(|bytes| (3, bytes)), ..Tighten::default() };
    trainer.observers.push(Box::new(tighten.clone()));
    let mut data = Synthetic {
        seed: 5,
        vocabulary: 64,
        rows: 8,
        length: 64,
        noise: 1,
        batches: None,
        device: Device::Cpu,
        position: 0,
    };
    trainer.advance(3, &mut data, None).unwrap();
    let region = Region::start(Device::Cpu).unwrap();
    let ended = trainer.run(&mut data, None);
    let peak = region.finish().unwrap().peak;
    let mut held = tighten.held.lock().unwrap();
    let notes = std::mem::take(&mut held.1);
    held.0 = None;
    let weights =
        trainable(trainer.model.as_ref()).iter().map(|(_, tensor)| tensor.detach().copy()).collect();
    Run { ended, weights, notes, plan: activations.plan(), peak }
}

#[test]
fn a_refused_allocation_changes_the_plan_and_no_bit() {
    runtime::memory::track_cpu().unwrap();
    let whole = run(LayerPlan::KeepAll, None, None);
    let least = run(LayerPlan::RecomputeAll, None, None);
    assert!(whole.ended.is_ok() && least.ended.is_ok());
    assert!(least.peak < whole.peak, "{} and {}", least.peak, whole.peak);
    assert_eq!(whole.weights, least.weights);
    let tight = least.peak + (whole.peak - least.peak) / 3;

    let refused = run(LayerPlan::KeepAll, Some(tight), None);
    let error = refused.ended.unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");

    let quarters = CheaperPlans::by_quarters(LAYERS);
    assert_eq!(quarters.len(), 4);
    let changed = run(LayerPlan::KeepAll, Some(tight), Some(quarters.clone()));
    assert_eq!(changed.ended.unwrap(), StopReason::Completed);
    assert_eq!(changed.weights, whole.weights);
    assert!(changed.plan.contains(&LayerPlan::RecomputeAll), "{:?}", changed.plan);
    assert!(
        changed.notes[0].starts_with("step 4: an allocation was refused; the step is repeated"),
        "{:?}",
        changed.notes
    );

    // What cannot fit ends as it did.
    let none = run(LayerPlan::KeepAll, Some(least.peak - (least.peak >> 3)), Some(quarters));
    assert!(none.ended.unwrap_err().is_out_of_memory());
    assert_eq!(none.notes.len(), 4, "{:?}", none.notes);
}

#[test]
fn a_machine_with_too_little_free_memory_changes_the_plan_before_a_step() {
    runtime::memory::track_cpu().unwrap();
    let whole = run(LayerPlan::KeepAll, None, None);
    runtime::random::seed(7).unwrap();
    let more_than_there_is = Some(u64::MAX / 2);
    let mut plans = CheaperPlans::by_quarters(LAYERS);
    plans[0].peak_bytes = more_than_there_is;
    plans[1].peak_bytes = Some(1 << 20);
    // The first has a prediction that no machine has room for, and is left at the next step.
    let refused = run(LayerPlan::KeepAll, Some(whole.peak - (whole.peak >> 6)), Some(plans));
    assert_eq!(refused.weights, whole.weights);
    let notes = refused.notes.join("");
    assert!(notes.contains("step 4: an allocation was refused"), "{notes}");
    assert!(notes.contains("step 5: ") && notes.contains("are not free any more"), "{notes}");
    assert_eq!(refused.plan.iter().filter(|plan| **plan == LayerPlan::RecomputeAll).count(), 3);
}
