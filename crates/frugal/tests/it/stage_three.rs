//! Layers in shards, one rank: tensors that were thawed too late, and going on after a probe and after a backward that failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use models::module::{
    self, Block, Context, Module, ModuleMapper, Visitor, VisitorMut, freeze, map_modules, replace, trainable,
};
use models::{DecoderConfig, Llama};
use offload::{Offload, OffloadConfig};
use runtime::autograd::{Backward, Forward, Function, apply};
use runtime::collectives::Group as Ranks;
use sharding::{FrozenWeights, ShardedOptimizer, ShardingConfig, Shards, Stage};
use tch::{Device, Kind, Tensor};
use training::batches::Synthetic;
use training::checkpoint::Checkpoints;
use training::optimizer::{AdamW, DeviceOptimizer, Group, Optimizer};
use training::probe::StepProbe;
use training::{Trainer, trainer};

const DATA: Synthetic = Synthetic {
    seed: 3,
    vocabulary: 61,
    rows: 2,
    length: 12,
    noise: 2,
    batches: None,
    device: Device::Cpu,
    position: 0,
};

const LATE: &str = r"layers\.0\..*";

fn model() -> Llama {
    runtime::random::seed(1).unwrap();
    Llama::new(&DecoderConfig::qwen2(61, 24, 56, 3, 2), (Kind::Float, Device::Cpu)).unwrap()
}

/// Divides the layers of a model.
fn divide(model: &mut Llama) -> (Offload, Shards, Ranks) {
    let ranks = Ranks::alone();
    let shards = Shards::new(&ranks, FrozenWeights::Sharded).unwrap();
    let options = OffloadConfig { source: Some(Arc::new(shards.clone())), ..OffloadConfig::default() };
    (options.install(model).unwrap(), shards, ranks)
}

fn optimizer(model: &Llama, shards: Shards, ranks: &Ranks) -> training::Result<ShardedOptimizer> {
    let groups = vec![Group::new(trainable(model), 3e-3)];
    let order = trainable(model).into_iter().map(|(name, _)| name).collect();
    let options =
        ShardingConfig { stage: Stage::Three, order, shards: Some(shards), ..ShardingConfig::default() };
    ShardedOptimizer::new(AdamW::default(), groups, ranks, options)
}

fn trainer_of(model: Llama, optimizer: Box<dyn Optimizer>) -> Trainer {
    let options = trainer::TrainerConfig { steps: 4, log_every: 1, ..trainer::TrainerConfig::default() };
    Trainer::new(Box::new(model), optimizer, options).unwrap()
}

/// A training over shards; the handle on the layers lives as long.
fn open() -> (Trainer, Offload) {
    let mut model = model();
    let (offload, shards, ranks) = divide(&mut model);
    let optimizer = optimizer(&model, shards, &ranks).unwrap();
    (trainer_of(model, Box::new(optimizer)), offload)
}

fn weights(trainer: &Trainer) -> Vec<(String, Tensor)> {
    let all = module::parameters(trainer.model.as_ref()).into_iter();
    all.map(|(name, w)| (name, trainer.optimizer.whole_weight(w).unwrap().copy())).collect()
}

fn expected() -> Vec<(String, Tensor)> {
    let model = model();
    let groups = vec![Group::new(trainable(&model), 3e-3)];
    let mut plain = trainer_of(model, Box::new(DeviceOptimizer::new(AdamW::default(), groups).unwrap()));
    plain.run(&mut DATA.clone(), None).unwrap();
    weights(&plain)
}

fn assert_equal(expected: &[(String, Tensor)], found: &[(String, Tensor)], case: &str) {
    for ((name, expected), (_, found)) in expected.iter().zip(found) {
        assert!(expected.equal(found), "{case}: {name}");
    }
}

#[test]
fn a_tensor_that_was_thawed_after_the_division_is_refused() {
    let frozen = || {
        let mut model = model();
        freeze(&model, LATE, true).unwrap();
        let divided = divide(&mut model);
        (model, divided)
    };
    // Before the optimizer is made.
    let (model, (_offload, shards, ranks)) = frozen();
    freeze(&model, LATE, false).unwrap();
    let error = optimizer(&model, shards, &ranks).unwrap_err().to_string();
    assert!(error.contains("`layers.0."), "{error}");
    assert!(error.contains("was frozen when its layer was divided"), "{error}");
    // After it.
    let (model, (_offload, shards, ranks)) = frozen();
    let optimizer = optimizer(&model, shards, &ranks).unwrap();
    freeze(&model, LATE, false).unwrap();
    let mut trainer = trainer_of(model, Box::new(optimizer));
    let error = trainer.advance(1, &mut DATA.clone(), None).unwrap_err().to_string();
    assert!(
        error.contains("`layers.0.") && error.contains("was frozen when its layer was divided"),
        "{error}"
    );
}

#[test]
fn a_probe_changes_nothing_and_sees_every_gradient() {
    let expected = expected();
    for before in 0..2 {
        let ((mut trainer, _offload), mut data) = (open(), DATA.clone());
        trainer.advance(before, &mut data, None).unwrap();
        let probe = StepProbe::run(&mut trainer, &mut data).unwrap().unwrap();
        assert_eq!(probe.without_gradient, Vec::<String>::new());
        trainer.run(&mut data, None).unwrap();
        assert_equal(&expected, &weights(&trainer), &format!("after step {before}"));
    }
}

/// The identity, whose backward fails when it is told to.
struct Fails(Arc<AtomicBool>);

impl Function for Fails {
    fn forward(&mut self, _: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        Ok(vec![inputs[0].shallow_clone()])
    }

    fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> runtime::Result<Vec<Option<Tensor>>> {
        match self.0.load(Ordering::SeqCst) {
            true => Err(runtime::Error::Other("no memory for a gradient".into())),
            false => Ok(grads),
        }
    }
}

/// A block with that identity on its input.
#[derive(Debug)]
struct Failing(Box<dyn Block>, Arc<AtomicBool>);

impl Module for Failing {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.0.visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        self.0.visit_mut(visitor)
    }
}

impl Block for Failing {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> models::Result<Tensor> {
        let [x_btd] = apply(Fails(self.1.clone()), &[x_btd])?;
        self.0.forward(&x_btd, context)
    }
}

/// Puts it into the first block.
struct Install(Arc<AtomicBool>);

impl ModuleMapper for Install {
    fn block(&mut self, name: &str, slot: &mut Box<dyn Block>) -> models::Result<()> {
        if name == "layers.0" {
            replace(slot, |block| Box::new(Failing(block, self.0.clone())));
        }
        Ok(())
    }
}

/// The first layer's backward fails: those behind it have been reduced by then.
#[test]
fn a_step_goes_on_after_a_backward_that_failed() {
    let expected = expected();
    let folder = tempfile::tempdir().unwrap();
    let fails = Arc::new(AtomicBool::new(false));
    let mut model = model();
    map_modules(&mut model, &mut Install(fails.clone())).unwrap();
    let (_offload, shards, ranks) = divide(&mut model);
    let optimizer = optimizer(&model, shards, &ranks).unwrap();
    let (mut trainer, mut data) = (trainer_of(model, Box::new(optimizer)), DATA.clone());
    trainer.checkpoints = Some(Checkpoints::open(folder.path(), 2).unwrap());
    trainer.options.checkpoint_every = Some(1);
    trainer.advance(2, &mut data, None).unwrap();
    fails.store(true, Ordering::SeqCst);
    let error = trainer.advance(3, &mut data, None).unwrap_err().to_string();
    assert!(error.contains("no memory for a gradient"), "{error}");
    fails.store(false, Ordering::SeqCst);
    assert_eq!(trainer.resume(&mut data).unwrap(), Some(2));
    trainer.run(&mut data, None).unwrap();
    assert_equal(&expected, &weights(&trainer), "after a failure");
}
