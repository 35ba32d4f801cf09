//! Steps that the recorder repeats, as a CUDA graph would, have the bits of the loop's own.

use std::sync::{Arc, Mutex};

use dataloading::{Batch, Counts, IGNORE_INDEX, Packing};
use models::module::{LanguageModel, trainable};
use models::{DecoderConfig, Gpt2, Gpt2Config, Llama};
use runtime::device::graph::OperatorsOnly;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use training::activations::{Activations, LayerPlan};
use training::batches::{Batches, Synthetic};
use training::checkpoint::Checkpoints;
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, Group, Optimizer, Sgd, ZeroGrad};
use training::schedule::{LrSchedule, Shape};
use training::trainer::{Best, BestWeights, Capture, CheaperPlan, CheaperPlans, TrainerConfig};
use training::{DeviceOptimizer, Result, Trainer};

const VOCABULARY: i64 = 32;
const LENGTH: i64 = 24;

/// The figures of a training, to the last bit.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Observer for Log {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        let StepRecord { step, loss, accuracy, learning_rate, gradient_norm, skipped, scale, .. } = record;
        let bits = |number: f64| format!("{number:e}");
        let line = format!(
            "step {step}: {} {:?} {} {:?} {skipped} {}",
            bits(*loss),
            accuracy.map(bits),
            bits(*learning_rate),
            gradient_norm.map(bits),
            bits(*scale)
        );
        self.0.lock().unwrap().push(line);
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> Result<()> {
        self.0.lock().unwrap().push(format!("evaluation: {:e}", evaluation.loss));
        Ok(())
    }
}

/// Packed rows with other documents in each batch.
struct Packed {
    position: u64,
}

impl Batches for Packed {
    fn next(&mut self) -> Result<Option<Batch>> {
        let (rows, mut starts, mut ids, mut positions) = (2, vec![0i32], Vec::new(), Vec::new());
        let (mut tokens, mut labels) = (Vec::new(), Vec::new());
        let mut number = self.position * 1000;
        for _ in 0..rows {
            let mut left = LENGTH;
            while left > 0 {
                number += 1;
                let length = (2 + (number * number * 7 + number) as i64 % 9).min(left);
                let id = starts.len() as i64 - 1;
                for at in 0..length {
                    ids.push(id);
                    positions.push(at);
                    tokens.push((number as i64 * 3 + at * 5) % VOCABULARY);
                    labels.push(if at + 1 < length {
                        (number as i64 * 3 + at * 5 + 5) % VOCABULARY
                    } else {
                        IGNORE_INDEX
                    });
                }
                starts.push(starts.last().unwrap() + length as i32);
                left -= length;
            }
        }
        self.position += 1;
        let matrix = |values: &[i64]| Tensor::from_slice(values).reshape([rows, LENGTH]);
        let targets = labels.iter().filter(|label| **label != IGNORE_INDEX).count();
        let longest = starts.windows(2).map(|pair| i64::from(pair[1] - pair[0])).max().unwrap();
        let counts =
            Counts { tokens: tokens.len(), targets, documents: starts.len() - 1, ..Counts::default() };
        Ok(Some(Batch {
            tokens: matrix(&tokens),
            labels: matrix(&labels),
            packing: Some(Packing {
                positions: matrix(&positions),
                document_ids: matrix(&ids),
                cu_seqlens: Tensor::from_slice(&starts),
                starts,
                longest,
                is_padding_free: false,
            }),
            padding: Vec::new(),
            sequences: None,
            taught: None,
            weights: None,
            counts,
        }))
    }

    fn state(&self) -> Value {
        json!(self.position)
    }

    fn resume(&mut self, state: &Value) -> Result<()> {
        self.position = state.as_u64().unwrap();
        Ok(())
    }
}

/// The step of a best evaluation, and copies of its weights.
type StepWeights = (u64, Vec<Tensor>);

/// The weights of each best evaluation.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<StepWeights>>>);

impl BestWeights for Kept {
    fn keep(&mut self, model: &dyn LanguageModel, optimizer: &dyn Optimizer, best: &Best) -> Result<()> {
        let weights =
            trainable(model).into_iter().map(|(_, tensor)| Ok(optimizer.whole_weight(tensor)?.copy()));
        self.0.lock().unwrap().push((best.step, weights.collect::<Result<_>>()?));
        Ok(())
    }
}

#[derive(Clone)]
struct Case {
    kind: Kind,
    rounding: Rounding,
    packed: bool,
    options: TrainerConfig,
    schedule: LrSchedule,
    /// The plan of the layers of a Llama.
    plan: Option<LayerPlan>,
    /// Stops and resumes from a checkpoint after this step.
    resume: Option<u64>,
    /// Some steps have a token whose loss and gradients are NaN.
    bad: bool,
}

impl Case {
    fn vocabulary(&self) -> i64 {
        if self.bad { 512 } else { VOCABULARY }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Rounding {
    Nearest,
    Master,
    Stochastic,
}

impl Default for Case {
    fn default() -> Self {
        let options = TrainerConfig {
            steps: 50,
            clip: Some(0.5),
            log_every: 7,
            accuracy: true,
            ..TrainerConfig::default()
        };
        let schedule = LrSchedule { shape: Shape::Cosine, warmup: 5, steps: 50, floor: 0.1 };
        Self {
            kind: Kind::Float,
            rounding: Rounding::Nearest,
            packed: false,
            options,
            schedule,
            plan: None,
            resume: None,
            bad: false,
        }
    }
}

struct Outcome {
    log: Vec<String>,
    weights: Vec<Tensor>,
    state: Vec<(String, Tensor)>,
    best: Vec<(u64, Vec<Tensor>)>,
    replays: u64,
}

fn data(case: &Case) -> Box<dyn Batches> {
    if case.packed {
        return Box::new(Packed { position: 0 });
    }
    Box::new(Synthetic {
        seed: 5,
        vocabulary: case.vocabulary(),
        rows: 4,
        length: LENGTH as usize,
        noise: 1,
        batches: None,
        device: Device::Cpu,
        position: 0,
    })
}

fn trainer(case: &Case, captured: bool) -> (Trainer, Log) {
    runtime::random::seed(7).unwrap();
    let config =
        DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::llama(case.vocabulary(), 16, 40, 2, 4) };
    let mut model = Llama::new(&config, (case.kind, Device::Cpu)).unwrap();
    if let Some(plan) = case.plan {
        Activations::install(&mut model, &[plan; 2]).unwrap();
    }
    if case.bad {
        let (_, embedding) = trainable(&model).into_iter().next().unwrap();
        let _ = embedding.detach().get(3).fill_(f64::NAN);
    }
    let groups = Group::by_dimension(trainable(&model), 1e-2, 0.1);
    let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
    let optimizer = match case.rounding {
        Rounding::Nearest => optimizer,
        Rounding::Master => optimizer.with_master_weights(),
        Rounding::Stochastic => optimizer.with_stochastic_rounding(3),
    };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), case.options.clone()).unwrap();
    trainer.schedule = case.schedule;
    let log = Log::default();
    trainer.observers.push(Box::new(log.clone()));
    if captured {
        trainer.record_steps();
    }
    (trainer, log)
}

fn outcome(trainer: &Trainer, log: &Log) -> Outcome {
    // NaN differs from itself.
    let copies = trainable(trainer.model.as_ref())
        .into_iter()
        .map(|(_, tensor)| tensor.detach().nan_to_num(1e9, None, None));
    Outcome {
        log: log.0.lock().unwrap().clone(),
        weights: copies.collect(),
        state: trainer.optimizer.state().unwrap(),
        best: Vec::new(),
        replays: trainer.replays(),
    }
}

fn run(case: &Case, captured: bool) -> Outcome {
    let _operators = OperatorsOnly::enter();
    let folder = tempfile::tempdir().unwrap();
    let mut train = data(case);
    let (mut validation, ..) = (Synthetic {
        seed: 9,
        vocabulary: VOCABULARY,
        rows: 2,
        length: LENGTH as usize,
        noise: 1,
        batches: Some(2),
        device: Device::Cpu,
        position: 0,
    },);
    let (mut trainer, mut log) = self::trainer(case, captured);
    trainer.checkpoints = Some(Checkpoints::open(folder.path(), 2).unwrap());
    if let Some(step) = case.resume {
        trainer.advance(step, train.as_mut(), Some(&mut validation)).unwrap();
        let before = log.0.lock().unwrap().clone();
        drop(trainer);
        (trainer, log) = self::trainer(case, captured);
        trainer.checkpoints = Some(Checkpoints::open(folder.path(), 2).unwrap());
        train = data(case);
        let resumed = trainer.resume(train.as_mut()).unwrap().unwrap();
        assert!(resumed > 0 && resumed <= step);
        *log.0.lock().unwrap() = before;
    }
    let best = Kept::default();
    trainer.best = Some(Box::new(best.clone()));
    trainer.run(train.as_mut(), Some(&mut validation)).unwrap();
    Outcome { best: best.0.lock().unwrap().drain(..).collect(), ..outcome(&trainer, &log) }
}

fn check(name: &str, case: &Case, fewest_replays: u64) {
    let (eager, captured) = (run(case, false), run(case, true));
    assert_eq!(eager.log, captured.log, "{name}");
    assert_eq!(eager.weights, captured.weights, "{name}");
    assert_eq!(eager.state.len(), captured.state.len());
    for ((a, x), (b, y)) in eager.state.iter().zip(&captured.state) {
        assert_eq!((a, x), (b, y), "{name}");
    }
    assert_eq!(eager.best, captured.best, "{name}");
    let none_is_expected = case.options.evaluate_every.is_none() || case.resume.is_some();
    assert!(none_is_expected || !eager.best.is_empty(), "{name}");
    assert_eq!(eager.replays, 0);
    assert!(captured.replays >= fewest_replays, "{name}: {} replays", captured.replays);
}

#[test]
fn a_schedule_with_clipping_evaluations_checkpoints_and_a_resume() {
    let every =
        TrainerConfig { evaluate_every: Some(10), checkpoint_every: Some(20), ..Case::default().options };
    let case = Case { options: every, ..Case::default() };
    check("periodic", &case, 30);
    check("resumed", &Case { resume: Some(33), ..case.clone() }, 20);
    let sum = TrainerConfig { clip: None, zero_grad: ZeroGrad::ToZeros, ..case.options.clone() };
    check("without clipping", &Case { options: sum, ..case }, 30);
}

/// The optimizer's state gets other memory, which the graphs of before must not use.
#[test]
fn a_resume_in_the_middle_drops_the_graphs() {
    let run = |captured: bool| {
        let _operators = OperatorsOnly::enter();
        let folder = tempfile::tempdir().unwrap();
        let options = TrainerConfig { checkpoint_every: Some(10), ..Case::default().options };
        let case = Case { options, ..Case::default() };
        let (mut trainer, log) = trainer(&case, captured);
        trainer.checkpoints = Some(Checkpoints::open(folder.path(), 2).unwrap());
        let mut train = data(&case);
        trainer.advance(15, train.as_mut(), None).unwrap();
        assert_eq!(trainer.resume(train.as_mut()).unwrap(), Some(10));
        trainer.advance(25, train.as_mut(), None).unwrap();
        outcome(&trainer, &log)
    };
    let (eager, captured) = (run(false), run(true));
    assert_eq!(eager.log, captured.log);
    assert_eq!(eager.weights, captured.weights);
    assert!(captured.replays >= 20, "{}", captured.replays);
}

#[test]
fn accumulation_over_micro_batches() {
    let options = TrainerConfig { accumulation: 3, rows: Some(2), ..Case::default().options };
    check("accumulation", &Case { options, ..Case::default() }, 20);
}

#[test]
fn weights_in_bf16_with_copies_and_with_stochastic_rounding() {
    for (name, rounding) in
        [("nearest", Rounding::Nearest), ("master", Rounding::Master), ("stochastic", Rounding::Stochastic)]
    {
        let options = TrainerConfig { clip: None, ..Case::default().options };
        check(name, &Case { kind: Kind::BFloat16, rounding, options, ..Case::default() }, 30);
    }
}

#[test]
fn packed_rows_of_other_documents_each_step() {
    check("packed", &Case { packed: true, ..Case::default() }, 30);
}

#[test]
fn plans_that_recompute() {
    for plan in [LayerPlan::RecomputeAll, LayerPlan::RecomputeElementwise, LayerPlan::RecomputeMlp] {
        let options = TrainerConfig { steps: 20, ..Case::default().options };
        check(&format!("{plan:?}"), &Case { plan: Some(plan), options, ..Case::default() }, 5);
    }
}

#[test]
fn steps_that_are_skipped_on_the_device() {
    let case = Case { bad: true, ..Case::default() };
    let log = run(&case, true).log;
    for skipped in [" true ", " false "] {
        assert!(log.iter().any(|line| line.contains(skipped)), "{log:?}");
    }
    check("skipped", &case, 30);
}

/// The recorder refuses what a graph would not repeat, with the name of the operator.
#[test]
fn a_step_that_cannot_be_captured_is_refused() {
    let _operators = OperatorsOnly::enter();
    // A rule whose update the host decides.
    let model =
        Llama::new(&DecoderConfig::llama(VOCABULARY, 16, 40, 1, 4), (Kind::Float, Device::Cpu)).unwrap();
    let optimizer = DeviceOptimizer::new(Sgd, vec![Group::new(trainable(&model), 1e-2)]).unwrap();
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), TrainerConfig::default()).unwrap();
    assert_eq!(trainer.capture_refusal(&[Device::Cpu]).unwrap(), "on a CPU a launch is a call");
    trainer.record_steps();
    let error = trainer.run(data(&Case::default()).as_mut(), None).unwrap_err().to_string();
    assert_eq!(
        error,
        "captured steps: steps by the fused kernel of Adam or AdamW only are decided on the device; the rule is sgd"
    );
    trainer.options.capture = Capture::Off;
    assert_eq!(trainer.capture_refusal(&[Device::Cpu]).unwrap(), "capture is off");
    // Dropout in a segment that backward runs again.
    let config = Gpt2Config {
        vocabulary: VOCABULARY,
        max_sequence: LENGTH,
        hidden: 16,
        heads: 2,
        layers: 1,
        dropout: 0.1,
        ..Gpt2Config::small()
    };
    let mut model = Gpt2::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    Activations::install(&mut model, &[LayerPlan::RecomputeAll]).unwrap();
    let optimizer =
        DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&model), 1e-2)]).unwrap();
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), TrainerConfig::default()).unwrap();
    trainer.record_steps();
    let error = trainer.run(data(&Case::default()).as_mut(), None).unwrap_err().to_string();
    assert!(error.contains("a part of a model that backward runs again draws random numbers"), "{error}");
}

/// Dropout outside of recomputed segments draws from libtorch's generator, which a replay advances.
#[test]
fn dropout_and_a_plan_that_changes_in_the_middle() {
    let run = |captured: bool, tight: bool| {
        let _operators = OperatorsOnly::enter();
        runtime::random::seed(7).unwrap();
        let config = Gpt2Config {
            vocabulary: VOCABULARY,
            max_sequence: LENGTH,
            hidden: 16,
            heads: 2,
            layers: 2,
            dropout: if tight { 0.0 } else { 0.1 },
            ..Gpt2Config::small()
        };
        let mut model = Gpt2::new(&config, (Kind::Float, Device::Cpu)).unwrap();
        let activations = Activations::install(&mut model, &[LayerPlan::KeepAll; 2]).unwrap();
        let groups = Group::by_dimension(trainable(&model), 1e-2, 0.1);
        let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
        let options = TrainerConfig { steps: 40, ..Case::default().options };
        let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
        let log = Log::default();
        trainer.observers.push(Box::new(log.clone()));
        if captured {
            trainer.record_steps();
        }
        let mut train = data(&Case::default());
        trainer.advance(20, train.as_mut(), None).unwrap();
        if tight {
            // A plan that claims more memory than any machine has is left before the next step.
            let plan = |peak| CheaperPlan {
                name: "recompute both".into(),
                layers: vec![LayerPlan::RecomputeAll; 2],
                peak_bytes: Some(peak),
            };
            trainer.cheaper_plans =
                Some(CheaperPlans::new(activations.clone(), Some(1 << 60), vec![plan(1)]));
        }
        trainer.run(train.as_mut(), None).unwrap();
        assert_eq!(activations.plan()[0] == LayerPlan::RecomputeAll, tight);
        outcome(&trainer, &log)
    };
    for tight in [false, true] {
        let (eager, captured) = (run(false, tight), run(true, tight));
        assert_eq!(eager.log, captured.log, "tight {tight}");
        assert_eq!(eager.weights, captured.weights, "tight {tight}");
        assert!(captured.replays >= 15, "{}", captured.replays);
    }
}
