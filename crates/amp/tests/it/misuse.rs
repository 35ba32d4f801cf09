//! Calls out of order are errors with a remedy and change nothing, for a scaler on the host and on the device.

use amp::{DeviceScaler, DynamicGradScaler, DynamicRule, DynamicScalerConfig, Result};
use expect_test::{Expect, expect};
use serde_json::Value;
use tch::{Device, Kind, Tensor, kind};
use training::optimizer::{AdamW, DeviceOptimizer, Group};
use training::scaler::GradScaler;

/// Both scalers behind one interface.
enum Either {
    Host(DynamicGradScaler),
    Device(DeviceScaler<DynamicRule>),
}

impl Either {
    fn both() -> [Self; 2] {
        let make =
            || DynamicGradScaler::new(DynamicScalerConfig { init_scale: 8.0, ..Default::default() }).unwrap();
        [Self::Host(make()), Self::Device(make().on_device(Device::Cpu).unwrap())]
    }

    fn unscale(&mut self, name: &str, grads: &[Tensor]) -> Result<()> {
        match self {
            Self::Host(scaler) => scaler.unscale_(name, grads, false).map(drop),
            Self::Device(scaler) => scaler.unscale_(name, grads, false).map(drop),
        }
    }

    fn step(&mut self, name: &str, optimizer: &mut DeviceOptimizer) -> Result<()> {
        match self {
            Self::Host(scaler) => scaler.step(name, optimizer).map(drop),
            Self::Device(scaler) => scaler.step(name, optimizer),
        }
    }

    fn update(&mut self) -> Result<()> {
        match self {
            Self::Host(scaler) => scaler.update().map(drop),
            Self::Device(scaler) => scaler.update(),
        }
    }

    fn state(&self) -> Value {
        match self {
            Self::Host(scaler) => scaler.state(),
            Self::Device(scaler) => scaler.state().unwrap(),
        }
    }

    fn in_the_loop(self) -> Box<dyn GradScaler> {
        match self {
            Self::Host(scaler) => Box::new(scaler),
            Self::Device(scaler) => Box::new(scaler),
        }
    }
}

fn adam(w: &Tensor) -> DeviceOptimizer {
    DeviceOptimizer::new(AdamW::default(), vec![Group::new(vec![("w".into(), w.shallow_clone())], 0.5)])
        .unwrap()
}

fn leaf(kind: Kind) -> Tensor {
    let w = Tensor::ones([2], (kind, Device::Cpu)).set_requires_grad(true);
    runtime::autograd::set_grad(&w, Some(&(w.detach() * 16.0))).unwrap();
    w
}

/// Returns the parameter, its gradient, and the states of the optimizer and the scaler.
fn everything(w: &Tensor, optimizer: &DeviceOptimizer, scaler: &Either) -> (Vec<Tensor>, Value) {
    let tensors = [w.detach(), w.grad()].into_iter().chain(optimizer.state().into_iter().map(|(_, t)| t));
    (tensors.map(|t| t.copy()).collect(), scaler.state())
}

fn refused(
    words: &Expect,
    scaler: &mut Either,
    (w, optimizer): (&Tensor, &mut DeviceOptimizer),
    what: impl FnOnce(&mut Either, &mut DeviceOptimizer) -> Result<()>,
) {
    let before = everything(w, optimizer, scaler);
    words.assert_eq(&what(scaler, optimizer).unwrap_err().to_string());
    assert_eq!(everything(w, optimizer, scaler), before, "nothing was changed");
}

#[test]
fn calls_out_of_order_are_errors() {
    let nothing = expect![
        "gradient scaler: no optimizer has stepped since the last update; call `step` for each optimizer, then `update` once"
    ];
    let twice = expect![
        "gradient scaler: the gradients of optimizer `w` are unscaled already; call `unscale_` once between two updates, after the backward pass of the last micro-batch"
    ];
    let stepped = expect![
        "gradient scaler: optimizer `w` has stepped since the last update; call `update` once after all optimizers have stepped"
    ];
    for mut scaler in Either::both() {
        let w = leaf(Kind::Float);
        let mut optimizer = adam(&w);
        let grads = optimizer.gradients().unwrap();
        // Between micro-batches the scale cannot change: no optimizer has stepped.
        refused(&nothing, &mut scaler, (&w, &mut optimizer), |scaler, _| scaler.update());
        scaler.unscale("w", &grads).unwrap();
        assert_eq!(Vec::<f32>::try_from(&grads[0]).unwrap(), [2.0, 2.0]);
        refused(&twice, &mut scaler, (&w, &mut optimizer), |scaler, _| scaler.unscale("w", &grads));
        refused(&nothing, &mut scaler, (&w, &mut optimizer), |scaler, _| scaler.update());
        scaler.step("w", &mut optimizer).unwrap();
        refused(&stepped, &mut scaler, (&w, &mut optimizer), |scaler, optimizer| scaler.step("w", optimizer));
        refused(&stepped, &mut scaler, (&w, &mut optimizer), |scaler, _| scaler.unscale("w", &grads));
        scaler.update().unwrap();
        refused(&nothing, &mut scaler, (&w, &mut optimizer), |scaler, _| scaler.update());
    }
}

#[test]
fn fp16_gradients_are_refused_with_and_without_master_copies() {
    let half = expect![
        "gradient scaler: gradient 0 of optimizer `w` is fp16; dividing it by the scale would bring back the underflow that scaling prevents, with or without master weights. Keep the parameters in fp32 and let autocast cast them, or use bf16 parameters, which need no scaler"
    ];
    for masters in [false, true] {
        for mut scaler in Either::both() {
            let w = leaf(Kind::Half);
            let mut optimizer = adam(&w);
            if masters {
                optimizer = optimizer.with_master_weights();
            }
            refused(&half, &mut scaler, (&w, &mut optimizer), |scaler, optimizer| {
                scaler.step("w", optimizer)
            });
            // As the trainer calls it.
            let grads = optimizer.gradients().unwrap();
            let error = scaler.in_the_loop().unscale_(&grads, true).unwrap_err().to_string();
            assert!(
                error.starts_with("gradient scaler: gradient 0 of optimizer `training` is fp16"),
                "{error}"
            );
            assert_eq!(Vec::<f64>::try_from(grads[0].to_kind(Kind::Double)).unwrap(), [16.0, 16.0]);
        }
    }
}

#[test]
fn bf16_parameters_with_master_copies_accumulate_small_steps() {
    for mut scaler in Either::both() {
        let w = leaf(Kind::BFloat16);
        let group = Group { weight_decay: 0.0, ..Group::new(vec![("w".into(), w.shallow_clone())], 1e-4) };
        let mut optimizer =
            DeviceOptimizer::new(AdamW::default(), vec![group]).unwrap().with_master_weights();
        for _ in 0..40 {
            runtime::autograd::set_grad(&w, Some(&Tensor::full([2], 16.0, (Kind::BFloat16, Device::Cpu))))
                .unwrap();
            scaler.step("w", &mut optimizer).unwrap();
            scaler.update().unwrap();
        }
        // Each step is 10⁻⁴; bf16 numbers below 1 are 2⁻⁸ apart.
        let state = optimizer.state();
        let (_, master) = state.iter().find(|(name, _)| name == "w.master").unwrap();
        assert!(
            (master.double_value(&[0]) - (1.0 - 40.0 * 1e-4)).abs() < 1e-5,
            "{}",
            master.double_value(&[0])
        );
        assert_eq!(w.detach().to_kind(Kind::Float), master.to_kind(Kind::BFloat16).to_kind(Kind::Float));
        assert!(w.double_value(&[0]) < 1.0);
        assert_eq!(master.kind(), kind::FLOAT_CPU.0);
    }
}
