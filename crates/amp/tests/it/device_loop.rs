//! `Trainer` with a `DeviceScaler` computes the same bits as with a `Scaler` on the host: with micro-batches, clipping
//! after unscaling, groups, frozen parameters, and checkpoints from one to the other.

use std::sync::{Arc, Mutex};

use amp::{Autocast, DynamicGradScaler, DynamicScalerConfig, StaticGradScaler, StaticRule};
use models::module::{tensors, trainable};
use models::state_dict::state_dict;
use models::{Gpt2Like, Gpt2LikeConfig};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor, kind};
use training::checkpoint::Checkpoints;
use training::clip::NonFinite;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, DeviceOptimizer, Group, Sgd};
use training::scaler::GradScaler;
use training::trainer::{Trainer, TrainerConfig};

use crate::data::DATA;

#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<StepRecord>>>);

impl Observer for Notes {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        self.0.lock().unwrap().push(record.clone());
        Ok(())
    }
}

impl Notes {
    /// Returns each record in bits, without its times.
    fn figures(&self) -> Vec<(u64, u64, Option<u64>, bool, u64)> {
        let of = |r: &StepRecord| {
            (r.step, r.loss.to_bits(), r.gradient_norm.map(f64::to_bits), r.skipped, r.scale.to_bits())
        };
        self.0.lock().unwrap().iter().map(of).collect()
    }
}

fn model() -> Gpt2Like {
    let config = Gpt2LikeConfig {
        vocab_size: 32,
        embedding_dim: 16,
        hidden_dim: 16,
        num_heads: 2,
        ff_dim: 32,
        max_length: 16,
        dropout: 0.0,
        ..Gpt2LikeConfig::default()
    };
    let model = Gpt2Like::new(&config, kind::FLOAT_CPU).unwrap();
    let mut generator = Generator::new(1).unwrap();
    for named in tensors(&model).into_iter().filter(|named| !named.name.contains("norm")) {
        let drawn = generator.normal(&named.tensor.size(), kind::FLOAT_CPU).unwrap();
        named.tensor.detach().copy_(&(drawn * 0.25));
    }
    model
}

fn trainer(options: &TrainerConfig, frozen: bool, scaler: Box<dyn GradScaler>) -> (Trainer, Notes) {
    let model = model();
    let mut optimizer =
        DeviceOptimizer::new(AdamW::default(), Group::by_dimension(trainable(&model), 3e-3, 0.1)).unwrap();
    optimizer.freeze("no_decay", frozen).unwrap();
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options.clone()).unwrap();
    trainer.precision = Some(Autocast::new(Kind::Half).unwrap().policy());
    trainer.scaler = scaler;
    let notes = Notes::default();
    trainer.observers.push(Box::new(notes.clone()));
    (trainer, notes)
}

/// The scale starts too high and grows soon: some later steps are skipped too.
const DYNAMIC: DynamicScalerConfig = DynamicScalerConfig {
    init_scale: 1.8e16,
    growth_factor: 64.0,
    backoff_factor: 0.0625,
    growth_interval: 3,
    min_scale: 1.0,
    max_scale: 1e20,
    hysteresis: 1,
};

fn dynamic() -> DynamicGradScaler {
    DynamicGradScaler::new(DYNAMIC).unwrap()
}

fn on_device() -> Box<dyn GradScaler> {
    Box::new(dynamic().on_device(Device::Cpu).unwrap())
}

fn everything(trainer: &Trainer) -> Vec<(String, Tensor)> {
    state_dict(trainer.model.as_ref()).into_iter().chain(trainer.optimizer.state().unwrap()).collect()
}

#[test]
fn host_and_device_scalers_train_alike() {
    let plain = TrainerConfig { steps: 24, log_every: 5, ..TrainerConfig::default() };
    for (name, options, frozen) in [
        ("plain", plain.clone(), false),
        ("micro-batches", TrainerConfig { accumulation: 3, ..plain.clone() }, false),
        ("clipped", TrainerConfig { clip: Some(0.05), accumulation: 2, ..plain.clone() }, false),
        (
            "clipped, and anything goes",
            TrainerConfig { clip: Some(0.05), non_finite: NonFinite::Ignore, ..plain.clone() },
            false,
        ),
        (
            "clipped loosely",
            TrainerConfig { clip: Some(1e6), non_finite: NonFinite::Fail, ..plain.clone() },
            false,
        ),
        (
            "a frozen group",
            TrainerConfig { clip: Some(0.5), accumulation: 2, accuracy: true, ..plain.clone() },
            true,
        ),
    ] {
        let (mut host, on_host) = trainer(&options, frozen, Box::new(dynamic()));
        let (mut device, seen) = trainer(&options, frozen, on_device());
        let before = state_dict(host.model.as_ref());
        let before: Vec<(String, Tensor)> = before.iter().map(|(n, t)| (n.clone(), t.copy())).collect();
        host.run(&mut DATA.clone(), None).unwrap();
        device.run(&mut DATA.clone(), None).unwrap();
        assert_eq!(seen.figures(), on_host.figures(), "{name}");
        assert_eq!(everything(&device), everything(&host), "{name}");
        assert_eq!(device.scaler.state(), host.scaler.state(), "{name}");
        let skipped: Vec<u64> =
            on_host.0.lock().unwrap().iter().filter(|r| r.skipped).map(|r| r.step).collect();
        assert!(skipped[0] == 1 && skipped.iter().any(|&step| step > 8), "{name}: {skipped:?}");
        assert!(skipped.len() < 16, "{name}: {skipped:?}");
        let norms = seen.0.lock().unwrap().iter().filter(|r| r.gradient_norm.is_some()).count();
        assert_eq!(norms, if options.clip.is_some() { 24 } else { 0 }, "{name}");
        // Vectors are frozen, matrices are not.
        for ((parameter, tensor), (_, old)) in state_dict(device.model.as_ref()).iter().zip(&before) {
            let stays = frozen && tensor.dim() < 2;
            assert_eq!(tensor == old, stays, "{name}: {parameter}");
        }
    }
}

#[test]
fn host_and_device_scalers_load_each_others_checkpoints() {
    let options = TrainerConfig {
        steps: 16,
        accumulation: 2,
        clip: Some(0.5),
        log_every: 7,
        ..TrainerConfig::default()
    };
    let (mut whole, whole_notes) = trainer(&options, false, Box::new(dynamic()));
    whole.run(&mut DATA.clone(), None).unwrap();
    let sides = [|| Box::new(dynamic()) as Box<dyn GradScaler>, on_device];
    for (first, second) in [(0, 1), (1, 0), (1, 1)] {
        let folder = tempfile::tempdir().unwrap();
        let open = || Some(Checkpoints::open(folder.path(), 1).unwrap());
        {
            // Steps were skipped before, and the growth tracker is in the middle of an interval.
            let (mut begun, _) =
                trainer(&TrainerConfig { steps: 8, ..options.clone() }, false, sides[first]());
            begun.checkpoints = open();
            begun.run(&mut DATA.clone(), None).unwrap();
        }
        let (mut resumed, notes) = trainer(&options, false, sides[second]());
        resumed.checkpoints = open();
        let mut data = DATA.clone();
        assert_eq!(resumed.resume(&mut data).unwrap(), Some(8));
        resumed.run(&mut data, None).unwrap();
        assert_eq!(everything(&resumed), everything(&whole), "from {first} to {second}");
        assert_eq!(resumed.scaler.state(), whole.scaler.state());
        assert_eq!(notes.figures(), whole_notes.figures()[8..]);
    }
}

#[test]
fn errors_appear_at_the_read_and_weights_are_unchanged() {
    // A static scale at which every step overflows.
    let patient = StaticRule::new(1e30).unwrap().with_patience(3);
    let scaler = amp::DeviceScaler::new(patient, Device::Cpu).unwrap();
    let options = TrainerConfig { steps: 40, log_every: 10, ..TrainerConfig::default() };
    let (mut trainer, notes) = trainer(&options, false, Box::new(scaler));
    let before: Vec<Tensor> =
        tensors(trainer.model.as_ref()).iter().map(|n| n.tensor.detach().copy()).collect();
    let error = trainer.run(&mut DATA.clone(), None).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "gradient scaler: 4 steps in a row had infinite or NaN gradients at the static scale"
        ),
        "{error}"
    );
    assert_eq!(trainer.step(), 10, "it is known when the tenth step is read");
    assert_eq!(notes.figures().len(), 10, "every step that was taken is recorded");
    let after = tensors(trainer.model.as_ref());
    assert!(before.iter().zip(&after).all(|(before, after)| before == after.tensor));
}

#[test]
fn an_optimizer_that_cannot_skip_on_the_device_is_an_error() {
    let model = model();
    let optimizer = DeviceOptimizer::new(Sgd, vec![Group::new(trainable(&model), 0.1)]).unwrap();
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), TrainerConfig::default()).unwrap();
    trainer.scaler = Box::new(StaticGradScaler::new(8.0).unwrap().on_device(Device::Cpu).unwrap());
    let error = trainer.run(&mut DATA.clone(), None).unwrap_err().to_string();
    assert!(error.contains("sgd has no fused kernel"), "{error}");
}
