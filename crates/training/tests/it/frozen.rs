//! Checkpoints without frozen parameters: their contents, and which trainings can resume from them.

use std::path::Path;

use models::module::{freeze, parameters, tensors, trainable};
use models::{Gpt2, Gpt2Config};
use tch::{Device, Kind, Tensor};
use training::batches::Synthetic;
use training::checkpoint::{Checkpoints, latest};
use training::optimizer::{AdamW, Group};
use training::trainer::{Frozen, TrainerConfig};
use training::{DeviceOptimizer, Trainer};

const DATA: Synthetic = Synthetic {
    seed: 1,
    vocabulary: 16,
    rows: 4,
    length: 12,
    noise: 1,
    batches: None,
    device: Device::Cpu,
    position: 0,
};

/// A training of the first layer; the frozen base has the values of a sine of this phase.
fn open(folder: &Path, steps: u64, frozen: Frozen, phase: f64) -> Trainer {
    let config = Gpt2Config {
        vocabulary: 16,
        max_sequence: 12,
        hidden: 16,
        heads: 2,
        layers: 2,
        dropout: 0.0,
        ..Gpt2Config::small()
    };
    let model = Gpt2::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    for (index, named) in tensors(&model).into_iter().enumerate() {
        let count = named.tensor.numel() as i64;
        let wave = (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 1.7 + index as f64).sin() * 0.3;
        // The first layer has the same initial values over every base.
        let wave = if named.name.starts_with("h.0.") { wave } else { wave + phase };
        tch::no_grad(|| named.tensor.shallow_clone().copy_(&wave.reshape(named.tensor.size())));
    }
    freeze(&model, ".*", true).unwrap();
    freeze(&model, r"h\.0\..*", false).unwrap();
    let optimizer =
        DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&model), 1e-2)]).unwrap();
    let options = TrainerConfig { steps, checkpoint_every: Some(3), frozen, ..TrainerConfig::default() };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    trainer.checkpoints = Some(Checkpoints::open(folder, 9).unwrap());
    trainer
}

fn values(trainer: &Trainer) -> Vec<(String, Tensor)> {
    tensors(trainer.model.as_ref()).into_iter().map(|named| (named.name, named.tensor.detach())).collect()
}

#[test]
fn a_checkpoint_of_trained_parameters_resumes_bit_for_bit() {
    let (whole, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut unbroken = open(whole.path(), 8, Frozen::LeftOut, 0.0);
    unbroken.run(&mut DATA.clone(), None).unwrap();
    open(cut.path(), 5, Frozen::LeftOut, 0.0).run(&mut DATA.clone(), None).unwrap();

    let checkpoint = latest(cut.path()).unwrap().checkpoint.unwrap();
    let mut names: Vec<&str> = checkpoint.model.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    let mut expected: Vec<String> =
        trainable(unbroken.model.as_ref()).into_iter().map(|(name, _)| name).collect();
    expected.sort_unstable();
    assert_eq!(names, expected);
    assert!(names.iter().all(|name| name.starts_with("h.0.")) && names.len() > 8, "{names:?}");

    let mut resumed = open(cut.path(), 8, Frozen::LeftOut, 0.0);
    let mut data = DATA.clone();
    assert_eq!(resumed.resume(&mut data).unwrap(), Some(5));
    resumed.run(&mut data, None).unwrap();
    assert_eq!(values(&resumed), values(&unbroken));
}

#[test]
fn another_base_and_another_kind_of_checkpoint_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    open(folder.path(), 3, Frozen::LeftOut, 0.0).run(&mut DATA.clone(), None).unwrap();
    for (frozen, phase, said) in [
        (Frozen::LeftOut, 1e-3, "the frozen parameters was "),
        (Frozen::Saved, 0.0, " and is now none; resume with that model"),
    ] {
        let mut other = open(folder.path(), 8, frozen, phase);
        let before: Vec<_> = values(&other).into_iter().map(|(name, value)| (name, value.copy())).collect();
        let error = other.resume(&mut DATA.clone()).unwrap_err().to_string();
        assert!(error.contains("it is of another model") && error.contains(said), "{error}");
        assert_eq!(values(&other), before, "nothing is changed");
    }
    let whole = tempfile::tempdir().unwrap();
    open(whole.path(), 3, Frozen::Saved, 0.0).run(&mut DATA.clone(), None).unwrap();
    let error = open(whole.path(), 8, Frozen::LeftOut, 0.0).resume(&mut DATA.clone()).unwrap_err();
    assert!(error.to_string().contains("the frozen parameters was none and is now "), "{error}");
}

/// Gradual unfreezing: the checkpoints after it have the second layer, and a new process that has unfrozen it goes on from them.
#[test]
fn a_training_that_unfroze_a_layer_resumes() {
    let folder = tempfile::tempdir().unwrap();
    // Both layers are in the group; the second one is frozen at first.
    let both = |steps| {
        let mut trainer = open(folder.path(), steps, Frozen::LeftOut, 0.0);
        let named = parameters(trainer.model.as_ref()).into_iter();
        let layers = named.filter(|(name, _)| name.starts_with("h."));
        let group = Group::new(layers, 1e-2);
        trainer.optimizer = Box::new(DeviceOptimizer::new(AdamW::default(), vec![group]).unwrap());
        trainer
    };
    let thaw = |trainer: &Trainer| drop(freeze(trainer.model.as_ref(), r"h\.1\..*", false).unwrap());
    let mut data = DATA.clone();
    let mut trainer = both(6);
    trainer.advance(3, &mut data, None).unwrap();
    thaw(&trainer);
    trainer.run(&mut data, None).unwrap();
    let expected = values(&trainer);
    drop(trainer);
    let saved = latest(folder.path()).unwrap().checkpoint.unwrap();
    assert!(saved.step == 6 && saved.model.iter().any(|(name, _)| name.starts_with("h.1.")));

    let mut resumed = both(6);
    thaw(&resumed);
    assert_eq!(resumed.resume(&mut DATA.clone()).unwrap(), Some(6));
    for ((name, expected), (_, found)) in expected.iter().zip(values(&resumed)) {
        assert!(expected.equal(&found), "{name}");
    }
}
