//! The `Trainer`, with clipping, accumulation and checkpoints, over a model with offloaded layers.

use crate::support;
use std::path::Path;

use crate::support::{alone, tiny};
use models::module::{tensors, trainable};
use offload::{HostAdamW, HostAdamWConfig, Method, OffloadConfig, Tier};
use tch::{Device, Tensor};
use training::activations::{Activations, LayerPlan};
use training::batches::Synthetic;
use training::checkpoint::Checkpoints;
use training::clip::NonFinite;
use training::optimizer::{AdamW, DeviceOptimizer, Group, Optimizer};
use training::scaler::{GradScaler, NoScaler, UnscaleResult};
use training::schedule::{LrSchedule, Shape};
use training::trainer::StopReason;
use training::{Trainer, trainer};

const DATA: Synthetic = Synthetic {
    seed: 1,
    vocabulary: 60,
    rows: 2,
    length: 12,
    noise: 1,
    batches: None,
    device: Device::Cpu,
    position: 0,
};

fn open(folder: &Path, steps: u64, options: Option<&OffloadConfig>) -> Trainer {
    let mut model = tiny();
    // The handle can be dropped: the model holds what it needs.
    if let Some(options) = options {
        options.install(&mut *model).unwrap();
    }
    let optimizer =
        DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&*model), 1e-2)]).unwrap();
    let settings = trainer::TrainerConfig {
        steps,
        accumulation: 2,
        clip: Some(0.5),
        checkpoint_every: Some(3),
        evaluate_every: Some(2),
        ..trainer::TrainerConfig::default()
    };
    let mut trainer = Trainer::new(model, Box::new(optimizer), settings).unwrap();
    trainer.checkpoints = Some(Checkpoints::open(folder, 9).unwrap());
    trainer
}

fn values(trainer: &Trainer) -> Vec<(String, Tensor)> {
    tensors(trainer.model.as_ref()).into_iter().map(|named| (named.name, named.tensor.detach())).collect()
}

/// Evaluation between the steps changes the order of uses, which the ring had learned.
#[test]
fn training_evaluates_stops_and_resumes_bit_for_bit() {
    let _alone = alone();
    let [plain, whole, cut] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    let run = |trainer: &mut Trainer, data: &mut Synthetic| {
        let mut validation = Synthetic { seed: 7, batches: Some(2), ..DATA };
        assert_eq!(trainer.run(data, Some(&mut validation)).unwrap(), StopReason::Completed);
    };
    let mut ordinary = open(plain.path(), 8, None);
    run(&mut ordinary, &mut DATA.clone());
    for options in [
        OffloadConfig::default(),
        OffloadConfig { method: Method::Function, ..OffloadConfig::default() },
        OffloadConfig { ring: 2, resident: vec![1], ..OffloadConfig::default() },
    ] {
        let mut offloaded = open(whole.path(), 8, Some(&options));
        run(&mut offloaded, &mut DATA.clone());
        assert_eq!(values(&offloaded), values(&ordinary), "{options:?}");
        std::fs::remove_dir_all(whole.path()).unwrap();
    }

    // Checkpoints do not depend on offloading: one written with it loads without it, and vice versa.
    run(&mut open(cut.path(), 5, Some(&OffloadConfig::default())), &mut DATA.clone());
    let mut resumed = open(cut.path(), 6, None);
    let mut data = DATA.clone();
    assert_eq!(resumed.resume(&mut data).unwrap(), Some(5));
    run(&mut resumed, &mut data);
    drop(resumed);
    let mut resumed = open(cut.path(), 8, Some(&OffloadConfig { ring: 4, ..OffloadConfig::default() }));
    let mut data = DATA.clone();
    assert_eq!(resumed.resume(&mut data).unwrap(), Some(6));
    run(&mut resumed, &mut data);
    assert_eq!(values(&resumed), values(&ordinary));
}

#[test]
fn a_trained_model_cannot_be_in_files_alone() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut model = tiny();
    models::module::freeze(&*model, ".*", true).unwrap();
    let options = OffloadConfig { tier: Tier::File(folder.path().to_owned()), ..OffloadConfig::default() };
    options.install(&mut *model).unwrap();
    // Unfrozen too late: a step would change other values than the next load reads.
    models::module::freeze(&*model, r"layers\.2\.mlp.*", false).unwrap();
    let tokens = support::batch(60, 0);
    let input = models::module::Input::new(&tokens);
    let error = models::module::LanguageModel::loss(&*model, &input, &tokens).unwrap_err().to_string();
    assert!(error.contains("is to be trained, but it is stored in"), "{error}");
    assert!(error.contains("decide what is trained"), "{error}");
}

/// Where a training's optimizer is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Device,
    Host,
}

fn groups(model: &models::Llama) -> Vec<Group> {
    Group::by_dimension(trainable(model), 1e-2, 0.1)
}

/// A training with the optimizer on the device or, its layers offloaded, on the host.
fn placed(
    folder: &Path,
    place: Place,
    settings: trainer::TrainerConfig,
    plan: Option<&[LayerPlan]>,
) -> Trainer {
    let mut model = tiny();
    if let Some(plan) = plan {
        Activations::install(&mut *model, plan).unwrap();
    }
    let optimizer: Box<dyn Optimizer> = match place {
        Place::Device => Box::new(DeviceOptimizer::new(AdamW::default(), groups(&model)).unwrap()),
        Place::Host => {
            let offload = OffloadConfig::default().install(&mut *model).unwrap();
            let host = HostAdamWConfig { overlap: true, ..HostAdamWConfig::default() };
            Box::new(HostAdamW::new(&offload, groups(&model), AdamW::default(), host).unwrap())
        }
    };
    let mut trainer = Trainer::new(model, optimizer, settings).unwrap();
    trainer.schedule = LrSchedule { shape: Shape::Cosine, warmup: 2, steps: 8, floor: 0.1 };
    trainer.checkpoints = Some(Checkpoints::open(folder, 9).unwrap());
    trainer
}

/// Weights and optimizer state, by name.
fn everything(trainer: &Trainer) -> Vec<(String, Tensor)> {
    let mut state = trainer.optimizer.state().unwrap();
    state.extend(values(trainer));
    state.sort_by(|a, b| a.0.cmp(&b.0));
    state
}

#[test]
fn the_trainer_runs_the_host_optimizer_with_the_same_bits() {
    let _alone = alone();
    let mixed = [LayerPlan::RecomputeAll, LayerPlan::KeepAll, LayerPlan::RecomputeMlp];
    let mixed: Vec<LayerPlan> =
        mixed.into_iter().cycle().take(tiny().decoder_config().num_hidden_layers as usize).collect();
    for (clip, accumulation) in [(None, 1), (None, 3), (Some(0.3), 1), (Some(0.3), 2)] {
        for plan in [None, Some(mixed.as_slice())] {
            let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
            let settings = trainer::TrainerConfig {
                steps: 5,
                accumulation,
                clip,
                evaluate_every: Some(2),
                checkpoint_every: Some(2),
                ..trainer::TrainerConfig::default()
            };
            let run = |folder: &Path, place| {
                let mut trainer = placed(folder, place, settings.clone(), plan);
                let mut validation = Synthetic { seed: 7, batches: Some(2), ..DATA };
                assert_eq!(
                    trainer.run(&mut DATA.clone(), Some(&mut validation)).unwrap(),
                    StopReason::Completed
                );
                trainer
            };
            let expected = everything(&run(folders[0].path(), Place::Device));
            let found = everything(&run(folders[1].path(), Place::Host));
            assert_eq!(found, expected, "clip {clip:?}, {accumulation} micro-batches, plan {plan:?}");
        }
    }
}

/// Each of the two resumes from the other's checkpoint, and back, with the bits of an uninterrupted training.
#[test]
fn a_checkpoint_of_either_optimizer_loads_into_the_other() {
    let _alone = alone();
    for clip in [None, Some(0.3)] {
        let settings = |steps| trainer::TrainerConfig {
            steps,
            clip,
            accumulation: 2,
            ..trainer::TrainerConfig::default()
        };
        let whole = tempfile::tempdir().unwrap();
        let mut unbroken = placed(whole.path(), Place::Device, settings(8), None);
        unbroken.run(&mut DATA.clone(), None).unwrap();
        for places in [[Place::Device, Place::Host, Place::Device], [Place::Host, Place::Device, Place::Host]]
        {
            let folder = tempfile::tempdir().unwrap();
            let mut last = None;
            for (place, steps) in places.into_iter().zip([3, 5, 8]) {
                drop(last.take());
                let mut trainer = placed(folder.path(), place, settings(steps), None);
                let mut data = DATA.clone();
                trainer.resume(&mut data).unwrap();
                trainer.run(&mut data, None).unwrap();
                last = Some(trainer);
            }
            assert_eq!(everything(&last.unwrap()), everything(&unbroken), "{places:?}, clip {clip:?}");
        }
    }
}

/// Scales by 2 as one for fp16 does.
#[derive(Debug)]
struct Twice;

impl GradScaler for Twice {
    fn scale(&self, loss: &Tensor) -> training::Result<Tensor> {
        Ok(loss * 2.0)
    }
    fn unscale_(&mut self, _: &[Tensor], _: bool) -> training::Result<UnscaleResult> {
        Ok(UnscaleResult::default())
    }
    fn update(&mut self, _: bool) -> training::Result<()> {
        Ok(())
    }
    fn current(&self) -> f64 {
        2.0
    }
    fn state(&self) -> serde_json::Value {
        NoScaler.state()
    }
    fn load_state(&mut self, _: &serde_json::Value) -> training::Result<()> {
        Ok(())
    }
}

#[test]
fn a_loss_scaler_is_refused_at_construction() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = placed(folder.path(), Place::Host, trainer::TrainerConfig::default(), None);
    trainer.scaler = Box::new(Twice);
    let mut data = DATA.clone();
    let error = trainer.run(&mut data, None).unwrap_err().to_string();
    assert_eq!(
        error,
        "offload: optimizer: HostAdamW cannot use a loss scaler: it updates layers during backward, before every gradient is known \
         to be finite. Train in bf16 or fp32, which need no scaler, or use DeviceOptimizer, whose state is on the device"
    );
    assert_eq!(data.position, 0, "no batch was fetched");
    assert_eq!(trainer.step(), 0);
}

#[test]
fn non_finite_gradients_follow_the_options() {
    let _alone = alone();
    for (non_finite, ends) in [(NonFinite::Skip, true), (NonFinite::Fail, false)] {
        let folder = tempfile::tempdir().unwrap();
        let settings = trainer::TrainerConfig {
            steps: 1,
            clip: Some(1.0),
            non_finite,
            ..trainer::TrainerConfig::default()
        };
        let mut trainer = placed(folder.path(), Place::Host, settings, None);
        let before: Vec<_> = values(&trainer).into_iter().map(|(_, tensor)| tensor.copy()).collect();
        // An embedding of infinity.
        let (_, first) = values(&trainer).swap_remove(0);
        let _ = tch::no_grad(|| first.shallow_clone().fill_(f64::INFINITY));
        let result = trainer.advance(1, &mut DATA.clone(), None);
        assert_eq!(result.is_ok(), ends, "{result:?}");
        for (before, (name, after)) in before.iter().zip(values(&trainer)).skip(1) {
            assert!(before.equal(&after), "{name} is as it was");
        }
    }
}
