//! The parts of the loop: schedules, clipping, losses, accumulation, divergence.

use dataloading::IGNORE_INDEX;
use models::module::trainable;
use models::{Gpt2Like, Gpt2LikeConfig};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};
use training::accumulation::forward;
use training::batches::{Batches, Synthetic};
use training::clip::{self, NonFinite};
use training::divergence::{Divergence, DivergenceMonitor};
use training::loss::{LmAccuracy, LmCrossEntropyLoss, Reduction, labels};
use training::schedule::{LrSchedule, Shape};

proptest! {
    #[test]
    fn schedules_warm_up_then_decay_to_the_minimum(warmup in 0u64..50, more in 1u64..200, floor in 0.0f64..1.0, shape in 0usize..3) {
        let shape = [Shape::Constant, Shape::Linear, Shape::Cosine][shape];
        let schedule = LrSchedule { shape, warmup, steps: warmup + more, floor };
        schedule.check().unwrap();
        let factors: Vec<f64> = (0..warmup + more + 10).map(|step| schedule.factor(step)).collect();
        let (rise, fall) = factors.split_at(warmup as usize);
        prop_assert!(rise.windows(2).all(|pair| pair[0] < pair[1]) && rise.iter().all(|f| 0.0 < *f && *f < 1.0));
        prop_assert_eq!(fall[0], 1.0);
        prop_assert!(fall.windows(2).all(|pair| pair[0] >= pair[1]));
        let end = if shape == Shape::Constant { 1.0 } else { floor };
        prop_assert!(fall[more as usize..].iter().all(|factor| *factor == end));
        let text = serde_json::to_string(&schedule).unwrap();
        let read: LrSchedule = serde_json::from_str(&text).unwrap();
        prop_assert_eq!((read.shape, read.warmup, read.steps), (schedule.shape, schedule.warmup, schedule.steps));
        prop_assert!((read.floor - schedule.floor).abs() <= 1e-15);
    }
}

#[test]
fn schedules_match_their_formulas() {
    let linear = LrSchedule { shape: Shape::Linear, warmup: 4, steps: 24, floor: 0.2 };
    let cosine = LrSchedule { shape: Shape::Cosine, ..linear };
    for (schedule, step, expected) in [
        (linear, 0, 0.2),
        (linear, 3, 0.8),
        (linear, 14, 0.6),
        (linear, 19, 0.4),
        (cosine, 9, 0.2 + 0.8 * (1.0 + 0.5f64.sqrt()) / 2.0),
        (cosine, 14, 0.6),
        (cosine, 24, 0.2),
    ] {
        assert!((schedule.factor(step) - expected).abs() < 1e-12, "{schedule:?} {step}");
    }
    assert!(LrSchedule { floor: 1.5, ..linear }.check().is_err());
    assert!(LrSchedule { steps: 4, ..linear }.check().is_err());
}

#[test]
fn clipping_limits_the_norm_of_all() {
    let grads = || {
        let f = |values: &[f32]| Tensor::from_slice(values);
        [f(&[3.0, 0.0]), f(&[4.0]).to_kind(Kind::BFloat16), f(&[12.0]).to_kind(Kind::Double)]
    };
    let lengths = |grads: &[Tensor]| {
        grads
            .iter()
            .map(|g| g.to_kind(Kind::Double).abs().sum(Kind::Double).double_value(&[]))
            .collect::<Vec<_>>()
    };
    let clipped = grads();
    assert!((clip::clip_(&clipped, 6.5, NonFinite::Fail).unwrap() - 13.0).abs() < 1e-6);
    for (have, want) in lengths(&clipped).iter().zip([1.5, 2.0, 6.0]) {
        assert!((have - want).abs() < 1e-5 * want, "{have} {want}");
    }
    let on_device = grads();
    clip::scale_to_(&on_device, &clip::norm(&on_device).unwrap(), 6.5).unwrap();
    for (have, want) in lengths(&on_device).iter().zip(lengths(&clipped)) {
        assert!((have - want).abs() < 1e-2 * want, "{have} {want}");
    }
    let kept = grads();
    clip::clip_(&kept, 14.0, NonFinite::Fail).unwrap();
    assert_eq!(lengths(&kept), lengths(&grads()));
    // The squares of fp16 would overflow; the norm does not.
    let large = [Tensor::from_slice(&[3e4f32, 4e4]).to_kind(Kind::Half)];
    assert!((clip::norm(&large).unwrap().read().unwrap() / 5e4 - 1.0).abs() < 1e-3);
    let bad = [Tensor::from_slice(&[1.0f32, f32::INFINITY])];
    assert!(clip::clip_(&bad, 1.0, NonFinite::Fail).unwrap_err().to_string().contains("norm is inf"));
    assert_eq!(clip::clip_(&bad, 1.0, NonFinite::Skip).unwrap(), f64::INFINITY);
    assert_eq!(bad[0], Tensor::from_slice(&[1.0f32, f32::INFINITY]));
    clip::clip_(&bad, 1.0, NonFinite::Ignore).unwrap();
    assert_eq!(bad[0].double_value(&[0]), 0.0);
    assert!(clip::clip_(&bad, 0.0, NonFinite::Skip).is_err());
}

/// The mean loss and accuracy, one number at a time.
fn oracle(logits: &Tensor, labels: &Tensor, smoothing: f64) -> (f64, f64, f64) {
    let (size, mut sum, mut right, mut count) = (logits.size(), 0.0, 0.0, 0.0);
    for b in 0..size[0] {
        for t in 0..size[1] {
            let label = labels.int64_value(&[b, t]);
            if label == IGNORE_INDEX {
                continue;
            }
            let z: Vec<f64> = (0..size[2]).map(|v| logits.double_value(&[b, t, v])).collect();
            let total: f64 = z.iter().map(|z| z.exp()).sum();
            let loss = |v: usize| total.ln() - z[v];
            let all: f64 = (0..z.len()).map(loss).sum();
            sum += (1.0 - smoothing) * loss(label as usize) + smoothing / z.len() as f64 * all;
            let best = (0..z.len()).max_by(|a, b| z[*a].total_cmp(&z[*b])).unwrap();
            right += f64::from(u8::from(best == label as usize));
            count += 1.0;
        }
    }
    (sum, sum / f64::max(count, 1.0), right / f64::max(count, 1.0))
}

#[test]
fn losses_match_their_formulas() {
    let (b, t, v) = (3, 5, 7);
    let logits =
        (Tensor::arange(b * t * v, (Kind::Double, Device::Cpu)) * 1.7).sin().reshape([b, t, v]) * 3.0;
    let tokens = (Tensor::arange(b * t, (Kind::Int64, Device::Cpu)) * 3).remainder(v).reshape([b, t]);
    let lengths = Tensor::from_slice(&[5i64, 1, 3]);
    let labels = labels(&tokens, &lengths, IGNORE_INDEX).unwrap();
    let counted: Vec<i64> =
        Vec::try_from(labels.not_equal(IGNORE_INDEX).sum_dim_intlist([1].as_slice(), false, Kind::Int64))
            .unwrap();
    assert_eq!(counted, [4, 0, 2]);
    for (kind, tolerance) in
        [(Kind::Double, 1e-12), (Kind::Float, 1e-6), (Kind::BFloat16, 1e-6), (Kind::Half, 1e-6)]
    {
        let logits = logits.to_kind(kind);
        for smoothing in [0.0, 0.2] {
            let (sum, mean, accuracy) = oracle(&logits, &labels, smoothing);
            let of = |reduction| LmCrossEntropyLoss {
                reduction,
                label_smoothing: smoothing,
                ..Default::default()
            };
            let value = |t: training::Result<Tensor>| t.unwrap().double_value(&[]);
            let pairs = [
                (value(of(Reduction::Mean).with_lengths(&logits, &tokens, &lengths)), mean),
                (value(of(Reduction::Mean).with_labels(&logits, &labels)), mean),
                (value(of(Reduction::Sum).with_labels(&logits, &labels)), sum),
                (value(LmAccuracy::default().with_lengths(&logits, &tokens, &lengths)), accuracy),
            ];
            for (index, (have, want)) in pairs.into_iter().enumerate() {
                // The accuracy is a number of fp32 whatever the logits are.
                let tolerance = if index == 3 { 1e-7 } else { tolerance };
                assert!(
                    (have - want).abs() <= tolerance * want.abs().max(1.0),
                    "{kind:?} {smoothing}: {have} {want}"
                );
            }
        }
    }
    // Without labels: 0, with a gradient of 0.
    let leaf = logits.copy().set_requires_grad(true);
    let loss = LmCrossEntropyLoss::default()
        .with_lengths(&leaf, &tokens, &Tensor::from_slice(&[1i64, 0, 1]))
        .unwrap();
    runtime::autograd::backward(&[&loss]).unwrap();
    assert_eq!(loss.double_value(&[]), 0.0);
    assert_eq!(leaf.grad(), leaf.detach().zeros_like());
    let error =
        LmCrossEntropyLoss::default().with_labels(&logits, &tokens.narrow(1, 0, 4)).unwrap_err().to_string();
    assert!(error.contains("expected Int64 [3, 5] on Cpu, for logits [3, 5, 7]"), "{error}");
}

#[test]
fn unequal_micro_batches_give_the_gradients_of_the_whole_batch() {
    let config = Gpt2LikeConfig {
        vocab_size: 16,
        embedding_dim: 8,
        hidden_dim: 8,
        num_heads: 2,
        ff_dim: 16,
        max_length: 12,
        dropout: 0.0,
        ..Gpt2LikeConfig::default()
    };
    let model = Gpt2Like::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let mut data = Synthetic {
        seed: 3,
        vocabulary: 16,
        rows: 5,
        length: 12,
        noise: 3,
        batches: None,
        device: Device::Cpu,
        position: 0,
    };
    let whole = data.next().unwrap().unwrap();
    let gradients = || -> Vec<Tensor> {
        let list = trainable(&model);
        let grads = list.iter().map(|(_, tensor)| tensor.grad().copy()).collect();
        list.iter().for_each(|(_, tensor)| runtime::autograd::set_grad(tensor, None).unwrap());
        grads
    };
    let targets = whole.counts.targets as f64;
    let loss = forward(&model, &whole, true, false).unwrap().sum / targets;
    runtime::autograd::backward(&[&loss]).unwrap();
    let expected = gradients();
    for (start, rows) in [(0, 1), (1, 4)] {
        let part = dataloading::Batch {
            tokens: whole.tokens.narrow(0, start, rows),
            labels: whole.labels.narrow(0, start, rows),
            packing: None,
            padding: Vec::new(),
            sequences: None,
            taught: None,
            weights: None,
            counts: whole.counts,
        };
        let loss = forward(&model, &part, true, false).unwrap().sum / targets;
        runtime::autograd::backward(&[&loss]).unwrap();
    }
    for (have, want) in gradients().iter().zip(&expected) {
        assert!((have - want).abs().max().double_value(&[]) <= 1e-6);
    }
}

#[test]
fn divergence_is_reported_after_the_patience() {
    let rule = Divergence { above: 2.0, patience: 3 };
    let see = |losses: &[f64]| {
        let mut watch = DivergenceMonitor::default();
        losses.iter().zip(1..).try_for_each(|(loss, step)| watch.observe(step, *loss, rule))
    };
    see(&[4.0, 3.0, 5.1, f64::NAN, 3.0, 6.0, 6.0, 4.9]).unwrap();
    let message = see(&[4.0, 3.0, 5.1, 6.0, 7.0]).unwrap_err().to_string();
    assert!(message.starts_with("training diverged at step 5: the loss is 7.0000, more than 2 above its minimum of 3.0000, for 3 steps; try a lower learning rate"), "{message}");
    assert!(see(&[f64::NAN; 3]).is_err());
}
