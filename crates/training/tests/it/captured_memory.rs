//! Memory that ends in a training whose steps are captured: the bits are those of a training without graphs.
//!
//! A recording keeps every tensor of its step, as a graph keeps its pool.

use std::sync::{Arc, Mutex};

use dataloading::Batch;
use models::module::trainable;
use models::{DecoderConfig, Llama};
use runtime::device::graph::OperatorsOnly;
use runtime::memory::{Region, fail_allocations, limit, live_bytes};
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use training::batches::{Batches, Synthetic};
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, Group};
use training::trainer::TrainerConfig;
use training::{DeviceOptimizer, Result, Trainer};

const STEPS: u64 = 14;
/// From here on, batches are large.
const LARGE_FROM: u64 = 7;

/// The loss and the norm of each step, to the last bit, and the notes.
type StepsAndNotes = (Vec<[u64; 2]>, Vec<String>);

#[derive(Clone, Default)]
struct Log(Arc<Mutex<StepsAndNotes>>);

impl Observer for Log {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        let norm = record.gradient_norm.unwrap_or(0.0);
        self.0.lock().unwrap().0.push([record.loss.to_bits(), norm.to_bits()]);
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> Result<()> {
        self.0.lock().unwrap().0.push([evaluation.loss.to_bits(), 0]);
        Ok(())
    }

    fn on_note(&mut self, text: &str) -> Result<()> {
        self.0.lock().unwrap().1.push(text.to_owned());
        Ok(())
    }
}

/// Small batches, then large ones.
struct Growing {
    small: Synthetic,
    large: Synthetic,
    position: u64,
}

impl Batches for Growing {
    fn next(&mut self) -> Result<Option<Batch>> {
        self.position += 1;
        if self.position > LARGE_FROM { self.large.next() } else { self.small.next() }
    }

    fn state(&self) -> Value {
        serde_json::json!([self.position, self.small.state(), self.large.state()])
    }

    fn resume(&mut self, state: &Value) -> Result<()> {
        self.position = state[0].as_u64().unwrap();
        self.small.resume(&state[1])?;
        self.large.resume(&state[2])
    }
}

fn synthetic(rows: usize, length: usize, batches: Option<u64>) -> Synthetic {
    let (seed, vocabulary, device) = (5, 32, Device::Cpu);
    Synthetic { seed, vocabulary, rows, length, noise: 1, batches, device, position: 0 }
}

struct Training {
    trainer: Trainer,
    data: Growing,
    log: Log,
}

struct Outcome {
    figures: Vec<[u64; 2]>,
    weights: Vec<Tensor>,
    notes: String,
    replays: u64,
}

impl Training {
    fn new(captured: bool) -> Self {
        runtime::memory::track_cpu().unwrap();
        runtime::random::seed(7).unwrap();
        let model = Llama::new(&DecoderConfig::llama(32, 32, 64, 2, 4), (Kind::Float, Device::Cpu)).unwrap();
        let groups = Group::by_dimension(trainable(&model), 1e-2, 0.1);
        let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
        let options =
            TrainerConfig { steps: STEPS, clip: Some(1.0), log_every: 1, ..TrainerConfig::default() };
        let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
        let log = Log::default();
        trainer.observers.push(Box::new(log.clone()));
        if captured {
            trainer.record_steps();
        }
        let data = Growing { small: synthetic(2, 16, None), large: synthetic(16, 96, None), position: 0 };
        Self { trainer, data, log }
    }

    fn advance(&mut self, until: u64) -> Result<()> {
        self.trainer.advance(until, &mut self.data, None).map(drop)
    }

    fn end(mut self) -> Outcome {
        self.advance(STEPS).unwrap();
        let weights = trainable(self.trainer.model.as_ref());
        let weights = weights.iter().map(|(_, tensor)| tensor.detach().copy()).collect();
        let (figures, notes) = std::mem::take(&mut *self.log.0.lock().unwrap());
        Outcome { figures, weights, notes: notes.join(""), replays: self.trainer.replays() }
    }
}

fn assert_same(one: &Outcome, other: &Outcome, at: &str) {
    assert_eq!(one.figures, other.figures, "{at}");
    assert_eq!(one.weights, other.weights, "{at}");
}

/// One allocation of the run that warms up (step 2), of the one that is captured (3), or of a replay's first operators (5) is refused.
#[test]
fn a_step_that_is_refused_memory_while_it_is_captured_goes_on_without_a_graph() {
    let _operators = OperatorsOnly::enter();
    let eager = Training::new(false).end();
    assert_eq!((eager.replays, eager.notes.as_str()), (0, ""));
    for step in [2, 3, 5] {
        let mut refused_steps = 0;
        // The first allocations are those of the batch.
        for number in (20..400).step_by(23) {
            let mut training = Training::new(true);
            training.advance(step - 1).unwrap();
            let failures = fail_allocations(number..number + 1).unwrap();
            let at = format!("step {step}, allocation {number}");
            training.advance(step).unwrap_or_else(|error| panic!("{at}: {error}"));
            let refused = failures.failed().unwrap();
            drop(failures);
            if refused == 0 || step == 5 && number > 100 {
                break;
            }
            refused_steps += 1;
            let outcome = training.end();
            assert_same(&eager, &outcome, &at);
            let note = format!("steps are not captured from step {step} on: ");
            assert!(outcome.notes.starts_with(&note), "{at}: {}", outcome.notes);
            assert!(outcome.notes.contains("out of memory"), "{at}: {}", outcome.notes);
            // A replay after the capture has run before the fifth step.
            assert_eq!(outcome.replays, u64::from(step == 5), "{at}");
        }
        assert!(refused_steps >= 4, "step {step}: {refused_steps}");
    }
}

/// What graphs of other shapes keep is given back before anything else is changed.
#[test]
fn a_larger_step_gets_the_memory_of_the_graphs_before_it() {
    let _operators = OperatorsOnly::enter();
    runtime::memory::track_cpu().unwrap();
    let region = Region::start(Device::Cpu).unwrap();
    let eager = Training::new(false).end();
    let peak = region.finish().unwrap().peak;
    let mut training = Training::new(true);
    let before = live_bytes(Device::Cpu).unwrap();
    training.advance(LARGE_FROM).unwrap();
    assert!(training.trainer.replays() >= 4);
    let graphs = live_bytes(Device::Cpu).unwrap() - before;
    // There is room for a large step, or for the recording of a small one.
    let held = limit(Device::Cpu, peak + graphs / 8).unwrap();
    let outcome = training.end();
    drop(held);
    assert_same(&eager, &outcome, "a larger step");
    let note = "step 8: an allocation was refused; the step is repeated without the memory of captured steps";
    assert!(outcome.notes.starts_with(note), "{}", outcome.notes);
    // A recording keeps more than a step has at a time, so large steps have none.
    assert_eq!(outcome.replays, 4);
}

#[test]
fn an_evaluation_gets_the_memory_of_the_graphs() {
    let _operators = OperatorsOnly::enter();
    let validation = || synthetic(24, 96, Some(1));
    let run = |captured: bool, tight: bool| {
        let mut training = Training::new(captured);
        training.advance(5).unwrap();
        let region = Region::start(Device::Cpu).unwrap();
        let live = live_bytes(Device::Cpu).unwrap();
        let held = tight.then(|| limit(Device::Cpu, live + (1 << 10)).unwrap());
        let evaluated = training.trainer.evaluate(&mut validation());
        drop(held);
        let refused = evaluated.is_err();
        let peak = region.finish().unwrap().peak_above_start();
        training.advance(LARGE_FROM).unwrap();
        (refused, live, peak, training)
    };
    // Without graphs to give back there is no other way.
    let (refused, ..) = run(false, true);
    assert!(refused);
    let (_, live, needed, eager) = run(false, false);
    let (refused, with_graphs, _, captured) = run(true, false);
    assert!(!refused);
    let graphs = with_graphs - live;
    assert_eq!(eager.log.0.lock().unwrap().0, captured.log.0.lock().unwrap().0);
    drop((eager, captured));

    let mut training = Training::new(true);
    training.advance(5).unwrap();
    let live = live_bytes(Device::Cpu).unwrap();
    let held = limit(Device::Cpu, live + needed - graphs / 2).unwrap();
    training.trainer.evaluate(&mut validation()).unwrap();
    drop(held);
    let before = training.trainer.replays();
    training.advance(LARGE_FROM).unwrap();
    assert_eq!(
        (before, training.trainer.replays()),
        (2, 2),
        "two steps are run before the third is captured"
    );
    let outcome = training.end();
    let (_, _, _, eager) = run(false, false);
    assert_same(&eager.end(), &outcome, "an evaluation");
}
