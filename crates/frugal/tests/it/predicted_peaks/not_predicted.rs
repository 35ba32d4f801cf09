//! Steps that are not predicted.

use frugal::config::{Compute, Config, OptimizerRule};
use frugal::planning::{self, DataShape, KnownRates};
use kernels::quantized::blocks;
use tch::{Device, Kind};

use super::{ADAPTED, batches, config, models};

#[test]
fn what_is_not_predicted_is_named() {
    let (_, shape) = &models()[0];
    let data = DataShape::of(&batches(&ADAPTED), 10).unwrap();
    let why = |set: fn(&mut Config)| {
        let mut config = config(&ADAPTED);
        set(&mut config);
        let found = planning::job(
            &config,
            shape,
            (Kind::Float, Device::Cpu),
            &data,
            &KnownRates::nominal(Device::Cpu).unwrap(),
        );
        found.unwrap_err().0
    };
    let biases = |config: &mut Config| config.adapter.as_mut().unwrap().bias = lora::BiasTraining::All;
    assert_eq!(why(biases), "trained biases and modules saved whole");
    let level = "`mlp.level` beside adapters or in mixed precision";
    assert_eq!(why(|config| config.mlp.level = Some("input-only".into())), level);
    assert_eq!(why(|config| config.mlp.level = Some("save-one".into())), "`mlp.level` save-one");
    assert_eq!(why(|config| config.precision.compute = Compute::Fp8), "mixed precision in fp8");
    let passes = |config: &mut Config| {
        (config.adapter, config.precision.compute, config.training.accumulation) = (None, Compute::Bf16, 2);
    };
    assert_eq!(why(passes), "mixed precision of all weights over several passes in a step");
    assert_eq!(
        why(|config| config.adapter.as_mut().unwrap().target_modules = Some(["q_proj", "lm_head"].into())),
        "an adapter on `lm_head`"
    );
    let several = |config: &mut Config| {
        let adapter = config.adapter.as_mut().unwrap();
        adapter.rank_pattern.insert("v_proj".to_owned(), 4.into());
    };
    assert_eq!(why(several), "adapters of several ranks");
    let sgd = |config: &mut Config| (config.adapter, config.optimizer.rule) = (None, OptimizerRule::Sgd);
    assert_eq!(why(sgd), "sgd, momentum, nesterov, adagrad or rmsprop on all weights");
    // The bytes of a file's blocks are the file's.
    let rates = KnownRates::nominal(Device::Cpu).unwrap();
    let blocks = planning::job(&config(&ADAPTED), shape, (blocks::KIND, Device::Cpu), &data, &rates);
    assert_eq!(blocks.unwrap_err().0, "a base in the blocks of a GGUF file that is not here");
}
