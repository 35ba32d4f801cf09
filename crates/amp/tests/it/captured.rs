//! Steps with a scaler on the device, repeated by the recorder in the place of a CUDA graph: overflows are skipped in replays, too.

use std::sync::{Arc, Mutex};

use amp::{Autocast, DynamicGradScaler, DynamicScalerConfig, ScaleRule, Scaler};
use models::module::trainable;
use models::{DecoderConfig, Llama};
use runtime::device::graph::OperatorsOnly;
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use training::batches::Synthetic;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, DeviceOptimizer, Group};
use training::trainer::{Overflow, Trainer, TrainerConfig};

use crate::data::DATA;

/// Number, loss, scale, and whether it was skipped; floating-point numbers as bits.
type Step = (u64, u64, u64, bool);

#[derive(Clone, Default)]
struct Steps(Arc<Mutex<Vec<Step>>>);

impl Observer for Steps {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        let bits = (record.step, record.loss.to_bits(), record.scale.to_bits(), record.skipped);
        self.0.lock().unwrap().push(bits);
        Ok(())
    }
}

fn trainer(on_device: bool) -> (Trainer, Steps) {
    runtime::random::seed(3).unwrap();
    let model = Llama::new(&DecoderConfig::llama(32, 16, 40, 2, 4), (Kind::Float, Device::Cpu)).unwrap();
    let optimizer =
        DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&model), 1e-2)]).unwrap();
    let options = TrainerConfig { steps: 50, clip: Some(1.0), log_every: 6, ..TrainerConfig::default() };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    trainer.precision = Some(Autocast::new(Kind::Half).unwrap().policy());
    // It grows until gradients overflow.
    let config = DynamicScalerConfig {
        init_scale: 65536.0,
        growth_interval: 2,
        growth_factor: 16.0,
        backoff_factor: 1.0 / 256.0,
        ..DynamicScalerConfig::default()
    };
    let scaler = DynamicGradScaler::new(config).unwrap();
    trainer.scaler = match on_device {
        true => Box::new(scaler.on_device(Device::Cpu).unwrap()),
        false => Box::new(scaler),
    };
    let steps = Steps::default();
    trainer.observers.push(Box::new(steps.clone()));
    (trainer, steps)
}

fn data() -> Synthetic {
    Synthetic { seed: 5, ..DATA }
}

#[test]
fn replays_skip_overflows_and_update_the_scale() {
    let run = |captured: bool, on_device: bool| {
        let _operators = OperatorsOnly::enter();
        let (mut trainer, steps) = trainer(on_device);
        if captured {
            trainer.record_steps();
        }
        trainer.run(&mut data(), None).unwrap();
        let weights: Vec<Tensor> =
            trainable(trainer.model.as_ref()).iter().map(|(_, weight)| weight.detach().copy()).collect();
        let steps = steps.0.lock().unwrap().clone();
        (steps, weights, trainer.scaler.state(), trainer.replays())
    };
    // Steps by the host's decisions, by the device's, and repeated ones: of a scaler that was on the device from the start, and of one
    // that the trainer moves there.
    let host = run(false, false);
    let captured = run(true, true);
    for other in [&run(false, true), &run(true, false), &captured] {
        assert_eq!(host.0, other.0);
        assert_eq!(host.1, other.1);
        assert_eq!(host.2, other.2);
    }
    assert!(captured.3 >= 30, "{} replays", captured.3);
    let skipped = captured.0.iter().filter(|step| step.3).count();
    assert!((3..40).contains(&skipped), "{skipped} steps were skipped");
}

/// A rule that the host alone can apply.
#[derive(Debug)]
struct OnHost;

impl ScaleRule for OnHost {
    const NAME: &'static str = "on the host";

    fn scale(&self) -> f32 {
        2.0
    }

    fn update(&mut self, _: bool) -> amp::Result<()> {
        Ok(())
    }

    fn state(&self) -> Value {
        Value::Null
    }

    fn load_state(&mut self, _: &Value) -> amp::Result<()> {
        Ok(())
    }
}

#[test]
fn a_scaler_that_must_decide_on_the_host_is_refused() {
    let refused = |set: &dyn Fn(&mut Trainer)| {
        let (mut trainer, _) = trainer(false);
        set(&mut trainer);
        trainer.record_steps();
        trainer.run(&mut data(), None).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&|trainer| trainer.scaler = Box::new(Scaler::with_rule(OnHost))),
        "captured steps: the loss scaler decides on the host; give one that decides on the device"
    );
    assert_eq!(
        refused(&|trainer| trainer.options.overflow = Overflow::Retry { most: 2 }),
        "captured steps: the host decides whether a step that overflows is computed again"
    );
}
