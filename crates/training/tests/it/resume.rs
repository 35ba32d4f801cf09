//! Checkpoints of failing trainings and resuming: no good checkpoint is lost, and no difference is silent.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use models::module::{LanguageModel, tensors, trainable};
use models::{Gpt2Like, Gpt2LikeConfig};
use runtime::random::RandomState;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use training::batches::Synthetic;
use training::checkpoint::{Checkpoint, Checkpoints, LazyTensor, Snapshot, latest, steps};
use training::observer::Observer;
use training::optimizer::{Adam, AdamW, Group, Rule};
use training::scaler::{GradScaler, UnscaleResult};
use training::schedule::{LrSchedule, Shape};
use training::trainer::{Best, BestWeights, StopReason, TrainerConfig};
use training::{DeviceOptimizer, Error, Optimizer, Result, Trainer};

#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Observer for Warnings {
    fn on_warning(&mut self, warning: &str) -> Result<()> {
        self.0.lock().unwrap().push(warning.to_owned());
        Ok(())
    }
}

impl Warnings {
    /// All messages so far, without the folder's name.
    fn take(&self, folder: &Path) -> Vec<String> {
        let folder = format!("{}/", folder.display());
        self.0.lock().unwrap().drain(..).map(|warning| warning.replace(&folder, "")).collect()
    }
}

fn data(seed: u64) -> Synthetic {
    Synthetic {
        seed,
        vocabulary: 16,
        rows: 4,
        length: 12,
        noise: 1,
        batches: None,
        device: Device::Cpu,
        position: 0,
    }
}

const CONFIG: Gpt2LikeConfig = Gpt2LikeConfig {
    vocab_size: 16,
    embedding_dim: 16,
    hidden_dim: 16,
    num_heads: 2,
    ff_dim: 32,
    max_length: 12,
    dropout: 0.0,
    attention: models::AttentionPath::Fused,
    norms: models::NormKernel::Fused,
};

fn options(steps: u64) -> TrainerConfig {
    TrainerConfig { steps, checkpoint_every: Some(5), ..TrainerConfig::default() }
}

struct Run {
    config: Gpt2LikeConfig,
    rule: Box<dyn Rule>,
    lr: f64,
    decay: f64,
    schedule: LrSchedule,
    options: TrainerConfig,
    keep: usize,
}

impl Run {
    fn new(steps: u64) -> Self {
        Self {
            config: CONFIG,
            rule: Box::new(AdamW::default()),
            lr: 1e-3,
            decay: 0.1,
            schedule: LrSchedule::default(),
            options: options(steps),
            keep: 3,
        }
    }

    fn open(self, folder: &Path) -> (Trainer, Warnings) {
        let model = Gpt2Like::new(&self.config, (Kind::Float, Device::Cpu)).unwrap();
        // Independent of the process's generator, because runs are compared.
        for (index, (_, weight)) in trainable(&model).into_iter().enumerate() {
            if weight.dim() == 2 {
                let count = weight.numel() as i64;
                let wave =
                    (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 1.7 + index as f64).sin() * 0.3;
                tch::no_grad(|| weight.shallow_clone().copy_(&wave.reshape(weight.size())));
            }
        }
        let groups = Group::by_dimension(trainable(&model), self.lr, self.decay);
        let optimizer = DeviceOptimizer::boxed(self.rule, groups).unwrap();
        let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), self.options).unwrap();
        trainer.schedule = self.schedule;
        trainer.checkpoints = Some(Checkpoints::open(folder, self.keep).unwrap());
        let warnings = Warnings::default();
        trainer.observers.push(Box::new(warnings.clone()));
        (trainer, warnings)
    }
}

/// Multiplies the weights in the middle of a step, as a bad batch may do.
#[derive(Debug)]
struct Spoiler {
    calls: u64,
    at: u64,
    factor: f64,
    weights: Vec<Tensor>,
}

impl Spoiler {
    fn put(trainer: &mut Trainer, at: u64, factor: f64) {
        let weights =
            trainable(trainer.model.as_ref()).into_iter().map(|(_, weight)| weight.detach()).collect();
        trainer.scaler = Box::new(Self { calls: 0, at, factor, weights });
    }
}

impl GradScaler for Spoiler {
    fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss.shallow_clone())
    }

    fn unscale_(&mut self, _: &[Tensor], _: bool) -> Result<UnscaleResult> {
        self.calls += 1;
        if self.calls == self.at {
            runtime::ops::foreach::mul_scalar_(&self.weights, self.factor)?;
        }
        Ok(UnscaleResult::default())
    }

    fn update(&mut self, _: bool) -> Result<()> {
        Ok(())
    }

    fn current(&self) -> f64 {
        1.0
    }

    fn state(&self) -> Value {
        Value::Null
    }

    fn load_state(&mut self, _: &Value) -> Result<()> {
        Ok(())
    }
}

/// An interval of no time is over after each step; at the end of the training its own checkpoint is enough.
#[test]
fn a_checkpoint_is_written_when_the_interval_is_over() {
    for (interval, expected) in [(Duration::ZERO, vec![3, 2, 1]), (Duration::from_secs(3600), vec![3])] {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint_interval = Some(interval);
        let options = TrainerConfig { checkpoint_every: None, checkpoint_interval, ..options(3) };
        Run { options, ..Run::new(3) }.open(folder.path()).0.run(&mut data(1), None).unwrap();
        assert_eq!(steps(folder.path()).unwrap(), expected, "{interval:?}");
    }
}

#[test]
fn a_diverging_run_keeps_the_last_good_checkpoint() {
    // If step 10 spoils the weights, the loss of that step is still good.
    for (at, good) in [(10, 5), (11, 10)] {
        let folder = tempfile::tempdir().unwrap();
        let (mut trainer, warnings) = Run { keep: 1, ..Run::new(100) }.open(folder.path());
        Spoiler::put(&mut trainer, at, f64::NAN);
        let error = trainer.run(&mut data(1), None).unwrap_err();
        assert!(matches!(error, Error::Diverged { .. }), "{error}");
        let error = error.to_string();
        let last = format!("; the last checkpoint is of step {good}; try a lower");
        assert!(error.contains(&last), "{error}");
        let since = format!("the loss is NaN at step {}, with a learning rate of ", at + 1);
        assert!(error.contains(&since), "{error}");
        let trouble = trainer.first_non_finite().unwrap();
        assert!(trouble.step == at + 1 && trouble.loss.is_nan() && trouble.learning_rate > 0.0, "{trouble}");
        assert_eq!(steps(folder.path()).unwrap(), [good]);
        let model = latest(folder.path()).unwrap().checkpoint.unwrap().model;
        assert!(model.iter().all(|(_, tensor)| tensor.isfinite().all().int64_value(&[]) == 1));
        let warnings = warnings.take(folder.path());
        let first = good + 5;
        // The step that explains it: the first without a finite loss, or that of the checkpoint.
        let explained = if first == at { first } else { at + 1 };
        let expected = format!("no checkpoint of step {first}: the weights are not finite: the loss is ");
        assert!(warnings[0].starts_with(&expected), "{}", warnings[0]);
        assert!(
            warnings[0].contains(&format!(" at step {explained}, with a learning rate of ")),
            "{}",
            warnings[0]
        );
        assert!(
            warnings[0].ends_with(&format!("; the last checkpoint is of step {good}")),
            "{}",
            warnings[0]
        );
    }
}

#[test]
fn diverging_losses_are_kept_and_evict_no_good_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    {
        let (mut trainer, warnings) = Run { keep: 1, ..Run::new(17) }.open(folder.path());
        Spoiler::put(&mut trainer, 8, 30.0);
        assert_eq!(trainer.run(&mut data(1), None).unwrap(), StopReason::Completed);
        assert_eq!(trainer.saved(), Some(17));
        assert_eq!(steps(folder.path()).unwrap(), [17, 5], "the last good one stays beside that of the end");
        assert_eq!(
            warnings.take(folder.path()),
            [
                "no checkpoint of step 10: 2 losses in a row are bad; the last checkpoint is of step 5",
                "no checkpoint of step 15: 7 losses in a row are bad; the last checkpoint is of step 5",
            ]
        );
    }
    let (mut trainer, warnings) = Run { keep: 1, ..Run::new(100) }.open(folder.path());
    let mut data = data(1);
    assert_eq!(trainer.resume(&mut data).unwrap(), Some(17));
    assert_eq!(
        warnings.take(folder.path()),
        [
            "step-000000000017 was written after 9 bad losses in a row; remove it to resume from an earlier one"
        ]
    );
    let error = trainer.run(&mut data, None).unwrap_err();
    // The twentieth: nine before, eleven after.
    assert!(matches!(error, Error::Diverged { step: 28, .. }), "{error}");
    assert_eq!(steps(folder.path()).unwrap(), [17, 5]);
}

#[test]
fn a_failed_final_checkpoint_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (mut trainer, _) = Run::new(7).open(folder.path());
    assert_eq!(trainer.saved(), None);
    assert_eq!(trainer.advance(5, &mut data(1), None).unwrap(), StopReason::Completed);
    assert_eq!(trainer.saved(), Some(5));
    Spoiler::put(&mut trainer, 1, f64::INFINITY);
    let mut data = Synthetic { position: 5, ..data(1) };
    assert_eq!(trainer.run(&mut data, None).unwrap(), StopReason::Completed);
    assert_eq!((trainer.step(), trainer.saved()), (7, Some(5)));
}

/// The evaluations whose weights were kept.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<Best>>>);

impl BestWeights for Kept {
    fn keep(&mut self, _: &dyn LanguageModel, _: &dyn Optimizer, best: &Best) -> Result<()> {
        self.0.lock().unwrap().push(*best);
        Ok(())
    }
}

#[test]
fn the_best_evaluation_and_patience_survive_a_resume() {
    let open = |folder: &Path| {
        let mut run = Run::new(60);
        run.options.evaluate_every = Some(2);
        run.options.patience = Some(4);
        // Biases are drawn.
        runtime::random::seed(1).unwrap();
        let (mut trainer, _) = run.open(folder);
        let kept = Kept::default();
        trainer.best = Some(Box::new(kept.clone()));
        (trainer, kept)
    };
    let validation = || Synthetic { batches: Some(1), ..data(9) };
    let spoil = |trainer: &mut Trainer, from: u64| {
        let weights =
            trainable(trainer.model.as_ref()).into_iter().map(|(_, weight)| weight.detach()).collect();
        trainer.scaler = Box::new(Worse { step: from, weights });
    };
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let (mut whole, kept) = open(folders[0].path());
    spoil(&mut whole, 0);
    assert_eq!(whole.run(&mut data(1), Some(&mut validation())).unwrap(), StopReason::StoppedEarly);
    let best = whole.best_evaluation().unwrap();
    assert_eq!((whole.step(), best.evaluations_since), (best.step + 8, 4));
    let all = kept.0.lock().unwrap().clone();
    assert!(all.len() > 2 && all.last().unwrap().step == best.step, "{all:?}");

    // Cut two evaluations after the best, in the middle of the patience.
    let (mut cut, before) = open(folders[1].path());
    spoil(&mut cut, 0);
    cut.advance(best.step + 5, &mut data(1), Some(&mut validation())).unwrap();
    drop(cut);
    let (mut rest, after) = open(folders[1].path());
    let mut data = data(1);
    let step = rest.resume(&mut data).unwrap().unwrap();
    spoil(&mut rest, step);
    assert_eq!(rest.run(&mut data, Some(&mut validation())).unwrap(), StopReason::StoppedEarly);
    assert_eq!((rest.step(), rest.best_evaluation()), (whole.step(), Some(best)));
    let before: Vec<Best> =
        before.0.lock().unwrap().iter().filter(|best| best.step <= step).copied().collect();
    assert_eq!([before, after.0.lock().unwrap().clone()].concat(), all);
}

/// Multiplies the weights by more than one in each step after the twelfth.
#[derive(Debug)]
struct Worse {
    step: u64,
    weights: Vec<Tensor>,
}

impl GradScaler for Worse {
    fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss.shallow_clone())
    }

    fn unscale_(&mut self, _: &[Tensor], _: bool) -> Result<UnscaleResult> {
        self.step += 1;
        if self.step > 12 {
            runtime::ops::foreach::mul_scalar_(&self.weights, 1.2)?;
        }
        Ok(UnscaleResult::default())
    }

    fn update(&mut self, _: bool) -> Result<()> {
        Ok(())
    }

    fn current(&self) -> f64 {
        1.0
    }

    fn state(&self) -> Value {
        Value::Null
    }

    fn load_state(&mut self, _: &Value) -> Result<()> {
        Ok(())
    }
}

/// Resumes a checkpoint of five steps of `Run::new(5)` in another run.
fn resumed(run: Run) -> (Result<Option<u64>>, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    Run::new(5).open(folder.path()).0.run(&mut data(1), None).unwrap();
    let (mut trainer, warnings) = run.open(folder.path());
    let result = trainer.resume(&mut data(1));
    (result, warnings.take(folder.path()))
}

#[test]
fn another_model_is_refused() {
    for (config, difference) in [
        (Gpt2LikeConfig { num_heads: 4, ..CONFIG }, "num_heads was 2 and is now 4"),
        (Gpt2LikeConfig { ff_dim: 64, ..CONFIG }, "ff_dim was 32 and is now 64"),
    ] {
        let message = resumed(Run { config, ..Run::new(9) }).0.unwrap_err().to_string();
        assert!(message.contains(&format!("it is of another model: {difference}; resume with")), "{message}");
    }
    let message = resumed(Run { rule: Box::new(Adam::default()), ..Run::new(9) }).0.unwrap_err().to_string();
    assert!(message.contains("saved by the optimizer \"adam_w\", but this run uses adam"), "{message}");
}

#[test]
fn other_settings_are_reported() {
    let with = |options: TrainerConfig| Run { options, ..Run::new(9) };
    let cosine = LrSchedule { shape: Shape::Cosine, warmup: 2, steps: 9, floor: 0.1 };
    let dropout = Gpt2LikeConfig { dropout: 0.1, ..CONFIG };
    let beta = Box::new(AdamW { beta2: 0.95, ..AdamW::default() });
    let cases: [(Run, &[&str]); 8] = [
        (Run::new(9), &[]),
        // More steps make no difference to a constant schedule.
        (Run { schedule: LrSchedule { steps: 9, ..LrSchedule::default() }, ..Run::new(9) }, &[]),
        (
            Run { lr: 0.1 + 0.2, ..Run::new(9) },
            &[
                "learning rate of group decay was 0.001 and is now 0.30000000000000004",
                "learning rate of group no_decay was 0.001 and is now 0.30000000000000004",
            ],
        ),
        (Run { decay: 0.2, ..Run::new(9) }, &["weight decay of group decay was 0.1 and is now 0.2"]),
        (
            Run { schedule: cosine, ..Run::new(9) },
            &["schedule was constant and is now cosine to 0.1 at step 9 after 2 steps of warm-up"],
        ),
        (Run { config: dropout, ..Run::new(9) }, &["dropout was 0.0 and is now 0.1"]),
        (
            Run { rule: beta, ..Run::new(9) },
            &[
                "optimizer was AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 } and is now AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }",
            ],
        ),
        (
            with(TrainerConfig { accumulation: 2, clip: Some(0.5), ..options(9) }),
            &["accumulation was 1 and is now 2", "clip was none and is now 0.5"],
        ),
    ];
    for (run, expected) in cases {
        let (result, warnings) = resumed(run);
        assert_eq!(result.unwrap(), Some(5));
        let expected: Vec<String> = expected
            .iter()
            .map(|setting| format!("settings differ from step-000000000005: {setting}"))
            .collect();
        assert_eq!(warnings, expected);
    }
}

#[test]
fn a_learning_rate_of_many_digits_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    let lr = 1.0 / 3.0 * 1e-3;
    let run = || Run { lr, ..Run::new(5) };
    run().open(folder.path()).0.run(&mut data(1), None).unwrap();
    let (mut trainer, warnings) = run().open(folder.path());
    trainer.resume(&mut data(1)).unwrap();
    assert_eq!(warnings.take(folder.path()), Vec::<String>::new());
}

fn snapshot(checkpoint: &Checkpoint, random: RandomState) -> Snapshot<'static> {
    let Checkpoint { step, model, optimizer, state, .. } = checkpoint;
    let (model, optimizer) = (LazyTensor::from_tensors(model), LazyTensor::from_tensors(optimizer));
    Snapshot::new(*step, model, optimizer, random, state.clone())
}

#[test]
fn a_checkpoint_from_a_machine_with_more_devices_resumes() {
    let folder = tempfile::tempdir().unwrap();
    Run::new(5).open(folder.path()).0.run(&mut data(1), None).unwrap();
    let checkpoint = latest(folder.path()).unwrap().checkpoint.unwrap();
    let cpu = RandomState::capture(Device::Cpu).unwrap().to_bytes().len();
    assert_eq!(checkpoint.random.to_bytes().len(), cpu, "only what a training on the CPU draws from is kept");
    let mut bytes = checkpoint.random.to_bytes();
    bytes.extend((runtime::device::cuda_count().unwrap() as u64 + 1).to_le_bytes());
    bytes.extend(16u64.to_le_bytes());
    bytes.extend([7; 16]);
    let random = RandomState::from_bytes(&bytes).unwrap();
    Checkpoints::open(folder.path(), 3).unwrap().save(snapshot(&checkpoint, random)).unwrap();
    let (mut trainer, warnings) = Run::new(9).open(folder.path());
    assert_eq!(trainer.resume(&mut data(1)).unwrap(), Some(5));
    assert_eq!(warnings.take(folder.path()), Vec::<String>::new());
}

#[test]
fn a_resume_that_fails_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    Run::new(5).open(folder.path()).0.run(&mut data(1), None).unwrap();
    let checkpoint = latest(folder.path()).unwrap().checkpoint.unwrap();
    let (mut trainer, _) = Run::new(9).open(folder.path());
    let copies = |trainer: &Trainer| -> Vec<Tensor> {
        tensors(trainer.model.as_ref()).iter().map(|named| named.tensor.copy()).collect()
    };
    let before = copies(&trainer);
    let mut other = data(2);
    let message = trainer.resume(&mut other).unwrap_err().to_string();
    assert!(message.contains("does not belong to synthetic data with seed 2"), "{message}");
    assert_eq!(copies(&trainer), before);
    // The optimizer's state is read last: everything before it is restored.
    let mut damaged = checkpoint;
    drop(damaged.optimizer.remove(0));
    let damaged = snapshot(&damaged, damaged.random.clone());
    trainer.checkpoints.as_ref().unwrap().save(damaged).unwrap();
    let mut same = data(1);
    let message = trainer.resume(&mut same).unwrap_err().to_string();
    assert!(message.contains("the optimizer's state does not fit"), "{message}");
    assert_eq!(copies(&trainer), before);
    assert_eq!((same.position, trainer.step(), trainer.saved()), (0, 0, None));
    assert!(trainer.optimizer.state().unwrap().is_empty());
}

#[test]
fn a_damaged_newest_checkpoint_is_skipped() {
    let folder = tempfile::tempdir().unwrap();
    Run::new(15).open(folder.path()).0.run(&mut data(1), None).unwrap();
    let good = std::fs::read(folder.path().join("step-000000000010").join("model.safetensors")).unwrap();
    std::fs::write(folder.path().join("step-000000000015").join("state.json"), json!({}).to_string())
        .unwrap();
    let (mut trainer, warnings) = Run::new(15).open(folder.path());
    let mut data = data(1);
    assert_eq!(trainer.resume(&mut data).unwrap(), Some(10));
    assert_eq!((data.position, trainer.step(), trainer.saved()), (10, 10, Some(10)));
    let warnings = warnings.take(folder.path());
    let [passed, aside] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(passed.starts_with("a checkpoint was skipped: step-000000000015/state.json: "), "{passed}");
    assert!(
        aside.starts_with("step-000000000015 does not belong to this training, which resumes from step 10; "),
        "{aside}"
    );
    let again = models::state_dict::state_dict(trainer.model.as_ref());
    let path = folder.path().join("again.safetensors");
    models::tensors_file::write_to(&mut std::fs::File::create(&path).unwrap(), &again).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), good);
    trainer.run(&mut data, None).unwrap();
    assert_eq!(steps(folder.path()).unwrap(), [15, 10, 5]);
}
