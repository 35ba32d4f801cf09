//! Mixed-precision training with `Trainer`.

use amp::{Autocast, DynamicGradScaler, DynamicScalerConfig, StaticGradScaler};
use models::module::{tensors, trainable};
use models::{Gpt2Like, Gpt2LikeConfig};
use tch::{Kind, Tensor, kind};
use training::batches::Synthetic;
use training::optimizer::{Adam, DeviceOptimizer, Group};
use training::scaler::{GradScaler, NoScaler};
use training::trainer::{Trainer, TrainerConfig};

use crate::data::DATA;

fn data(position: u64) -> Synthetic {
    Synthetic { rows: 8, position, ..DATA }
}

fn trainer(steps: u64, dtype: Option<Kind>, scaler: Box<dyn GradScaler>) -> Trainer {
    let config = Gpt2LikeConfig {
        vocab_size: 32,
        embedding_dim: 32,
        hidden_dim: 32,
        num_heads: 4,
        ff_dim: 64,
        max_length: 16,
        dropout: 0.0,
        ..Gpt2LikeConfig::default()
    };
    let model = Gpt2Like::new(&config, kind::FLOAT_CPU).unwrap();
    // The same weights for every run, independent of the default generator.
    for (index, (name, weight)) in trainable(&model).into_iter().enumerate() {
        let wave = (Tensor::arange(weight.numel() as i64, kind::FLOAT_CPU) * 1.7 + index as f64).sin() * 0.25;
        if !name.contains("norm") {
            tch::no_grad(|| weight.shallow_clone().copy_(&wave.reshape(weight.size())));
        }
    }
    let optimizer = DeviceOptimizer::new(Adam::default(), vec![Group::new(trainable(&model), 3e-3)]).unwrap();
    let options = TrainerConfig { steps, accumulation: 2, clip: Some(1.0), ..TrainerConfig::default() };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    trainer.precision = dtype.map(|dtype| Autocast::new(dtype).unwrap().policy());
    trainer.scaler = scaler;
    trainer
}

/// Returns the loss in fp32 on held-out batches.
fn validation(trainer: &Trainer) -> f64 {
    let mut held_out = Synthetic { batches: Some(1004), ..data(1000) };
    training::evaluation::evaluate(trainer.model.as_ref(), &mut held_out, 0).unwrap().loss
}

#[test]
fn mixed_precision_learns_what_fp32_learns() {
    const STEPS: u64 = 120;
    let run = |dtype, scaler| {
        let mut trainer = trainer(STEPS, dtype, scaler);
        let before = validation(&trainer);
        trainer.run(&mut data(0), None).unwrap();
        assert!(tensors(trainer.model.as_ref()).iter().all(|named| named.tensor.kind() != Kind::Half));
        (before, validation(&trainer))
    };
    let (before, full) = run(None, Box::new(NoScaler));
    assert!(full < before - 1.0, "fp32 learned nothing: {before} to {full}");
    // A scale that starts far too high is corrected within a few skipped steps.
    let high = DynamicScalerConfig { init_scale: 2f32.powi(30), ..DynamicScalerConfig::default() };
    let cases: [(&str, Kind, Box<dyn GradScaler>); 3] = [
        ("bf16", Kind::BFloat16, Box::new(NoScaler)),
        ("fp16, static", Kind::Half, Box::new(StaticGradScaler::new(1024.0).unwrap())),
        ("fp16, dynamic", Kind::Half, Box::new(DynamicGradScaler::new(high).unwrap())),
    ];
    for (name, dtype, scaler) in cases {
        let (_, low) = run(Some(dtype), scaler);
        eprintln!("{name}: {low:.5} against {full:.5}");
        // On the steep part of the curve rounding and skipped steps change the loss of a run by several per cent, up or
        // down.
        assert!((low / full - 1.0).abs() < 0.15, "{name}: {low}, not {full}");
    }
}

#[test]
fn overflowing_steps_are_skipped_and_the_scale_falls() {
    let options = DynamicScalerConfig { init_scale: 2f32.powi(40), ..DynamicScalerConfig::default() };
    let mut trainer = trainer(30, Some(Kind::Half), Box::new(DynamicGradScaler::new(options).unwrap()));
    let before: Vec<Tensor> =
        tensors(trainer.model.as_ref()).iter().map(|named| named.tensor.detach().copy()).collect();
    trainer.advance(1, &mut data(0), None).unwrap();
    let after = tensors(trainer.model.as_ref());
    assert!(before.iter().zip(&after).all(|(before, after)| before == after.tensor), "nothing moved");
    assert_eq!(trainer.scaler.current(), 2f64.powi(39));
    trainer.advance(30, &mut data(2), None).unwrap();
    let scale = trainer.scaler.current();
    assert!((2f64.powi(8)..2f64.powi(36)).contains(&scale), "{scale}");
    assert!(validation(&trainer).is_finite());
}
