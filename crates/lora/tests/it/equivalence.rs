//! The function compared with libtorch's operators, and the rounding of low-precision bases.

use lora::{LoraLinear, LoraLinearConfig};
use models::Linear;
use models::module::{Context, Projection, parameters};
use proptest::prelude::*;
use runtime::autograd::{backward, set_grad};
use runtime::random::{Generator, RandomState};
use std::sync::Mutex;
use tch::{Device, Kind, Tensor, kind};

/// Dropout draws its seed from the process's shared generator, so tests that replay it run alone.
static GENERATOR: Mutex<()> = Mutex::new(());

const TRAINING: Context<'_> = Context {
    documents: None,
    positions: None,
    extension: None,
    training: true,
    accuracy: false,
    labelled_tokens: None,
    label_weights: None,
    embedding_noise: None,
    balance: None,
    sequence: None,
};

fn linear(inner: i64, out: i64, bias: bool, generator: &mut Generator, options: (Kind, Device)) -> Linear {
    let mut normal = |shape: &[i64]| generator.normal(shape, options).unwrap();
    Linear { weight: normal(&[out, inner]), bias: bias.then(|| normal(&[out])) }
}

/// A layer whose B is not zero, and its A, B and magnitudes.
fn adapted(
    linear: Linear,
    options: &LoraLinearConfig,
    generator: &mut Generator,
) -> (LoraLinear, Vec<Tensor>) {
    let layer = LoraLinear::new(linear, options).unwrap();
    let mut learned = Vec::new();
    for (name, tensor) in parameters(&layer) {
        if name.starts_with("lora_") {
            let _no_grad = tch::no_grad_guard();
            let noise = generator.normal(&tensor.size(), (tensor.kind(), Device::Cpu)).unwrap() * 0.3;
            let _ = tensor.shallow_clone().g_add_(&noise);
            learned.push(tensor.shallow_clone());
        }
    }
    (layer, learned)
}

/// The same with operators; `keep` is dropout's mask times 1/(1 − p).
fn by_operators(
    x: &Tensor,
    (weight, bias): (&Tensor, Option<&Tensor>),
    learned: &[Tensor],
    scaling: f64,
    keep: Option<&Tensor>,
) -> Tensor {
    let dropped = keep.map_or_else(|| x.shallow_clone(), |keep| x * keep);
    let low_rank = dropped.matmul(&learned[0].tr()).matmul(&learned[1].tr()) * scaling;
    let Some(magnitude) = learned.get(2) else { return x.linear(weight, bias) + low_rank };
    let norms = (weight + learned[1].detach().matmul(&learned[0].detach()) * scaling).square();
    let norms = norms.sum_dim_intlist([1].as_slice(), false, weight.kind()).sqrt();
    let factor = magnitude / norms;
    x.linear(weight, bias) + (&factor - 1) * dropped.linear::<&Tensor>(weight, None) + &factor * low_rank
}

fn gradients(y: &Tensor, upstream: &Tensor, leaves: &[&Tensor]) -> Vec<Option<Tensor>> {
    backward(&[&(y * upstream).sum(y.kind())]).unwrap();
    let taken = leaves.iter().map(|leaf| {
        let grad = leaf.grad();
        set_grad(leaf, None).unwrap();
        Some(grad).filter(Tensor::defined)
    });
    taken.collect()
}

/// The share of the tolerance, in percent.
fn error(found: &Tensor, expected: &Tensor, tolerance: f64) -> f64 {
    if expected.numel() == 0 {
        assert_eq!(found.size(), expected.size());
        return 0.0;
    }
    let scale = expected.abs().max().double_value(&[]).max(1e-3);
    (found - expected).abs().max().double_value(&[]) / (scale * tolerance) * 100.0
}

/// Dropout of ones, 1/(1 − p) or 0 per element, computed by a layer whose W is zero and whose A and B are the identity.
fn mask(state: &RandomState, shape: &[i64], rate: f64) -> Tensor {
    let width = *shape.last().unwrap();
    let zero = Linear { weight: Tensor::zeros([width, width], kind::DOUBLE_CPU), bias: None };
    let options =
        LoraLinearConfig { r: width, alpha: width as f64, dropout: rate, ..LoraLinearConfig::default() };
    let layer = LoraLinear::new(zero, &options).unwrap();
    let _no_grad = tch::no_grad_guard();
    for (name, tensor) in parameters(&layer) {
        if name.starts_with("lora_") {
            tensor.shallow_clone().copy_(&Tensor::eye(width, kind::DOUBLE_CPU));
        }
    }
    let _replay = state.replay().unwrap();
    layer.forward(&Tensor::ones(shape, kind::DOUBLE_CPU), &TRAINING).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape_and_gradient_pattern_matches_operators(
        leading in prop::collection::vec(0i64..5, 0..4),
        (inner, out, r) in (1i64..12, 1i64..12, 1i64..6),
        (bias, rslora, dora, drops) in any::<(bool, bool, bool, bool)>(),
        needs in any::<[bool; 4]>(),
        seed in any::<u64>(),
    ) {
        let _alone = GENERATOR.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut generator = Generator::new(seed).unwrap();
        let dropout = if drops { 0.4 } else { 0.0 };
        let options = LoraLinearConfig { r, alpha: 3.0, dropout, rslora, dora, seed, ..LoraLinearConfig::default() };
        let base = linear(inner, out, bias, &mut generator, kind::DOUBLE_CPU);
        let (weight, of_bias) = (base.weight.shallow_clone(), base.bias.as_ref().map(Tensor::shallow_clone));
        let (layer, learned) = adapted(base, &options, &mut generator);
        let shape = [&leading[..], &[inner]].concat();
        let x = generator.normal(&shape, kind::DOUBLE_CPU).unwrap();
        let _ = x.set_requires_grad(needs[0]);
        for (tensor, needed) in learned.iter().zip(&needs[1..]) {
            let _ = tensor.set_requires_grad(*needed);
        }
        let leaves: Vec<&Tensor> = std::iter::once(&x).chain(&learned).collect();

        if dora {
            // Rows of W + s·BA that almost cancel have norms of rounding errors.
            let update = learned[1].detach().matmul(&learned[0].detach()) * options.scaling();
            let norm = |matrix: &Tensor| matrix.square().sum_dim_intlist([1].as_slice(), false, Kind::Double).sqrt();
            let share = norm(&(&weight + &update)) / (norm(&weight) + norm(&update));
            prop_assume!(share.min().double_value(&[]) > 1e-2);
        }
        let state = RandomState::capture(Device::Cpu).unwrap();
        let found = {
            let _replay = state.replay().unwrap();
            layer.forward(&x, &TRAINING).unwrap()
        };
        let keep = drops.then(|| mask(&state, &shape, dropout));
        let expected = by_operators(&x, (&weight, of_bias.as_ref()), &learned, options.scaling(), keep.as_ref());
        prop_assert!(error(&found, &expected, 1e-11) < 100.0);
        let wanted = leaves.iter().any(|leaf| leaf.requires_grad());
        prop_assert_eq!(found.requires_grad(), wanted);
        if wanted {
            let upstream = generator.normal(&found.size(), kind::DOUBLE_CPU).unwrap();
            let found = gradients(&found, &upstream, &leaves);
            let expected = gradients(&expected, &upstream, &leaves);
            for ((leaf, found), expected) in leaves.iter().zip(&found).zip(&expected) {
                prop_assert_eq!(found.is_some(), leaf.requires_grad());
                if let (Some(found), Some(expected)) = (found, expected) {
                    prop_assert!(error(found, expected, 1e-11) < 100.0, "{} {}", found, expected);
                }
            }
        }
        prop_assert!(!weight.grad().defined());
    }
}

#[test]
fn low_precision_bases_are_rounded_once() {
    for low in [Kind::BFloat16, Kind::Half] {
        for (rows, bias) in [(40, false), (40, true)] {
            let mut generator = Generator::new(9).unwrap();
            let base = linear(64, 48, bias, &mut generator, (low, Device::Cpu));
            let (weight, of_bias) =
                (base.weight.to_kind(Kind::Double), base.bias.as_ref().map(|b| b.to_kind(Kind::Double)));
            let options = LoraLinearConfig { r: 4, alpha: 9.0, ..LoraLinearConfig::default() };
            let (layer, learned) = adapted(base, &options, &mut generator);
            assert!(learned.iter().all(|tensor| tensor.kind() == Kind::Float));
            let x = generator.normal(&[rows, 64], (low, Device::Cpu)).unwrap().set_requires_grad(true);
            let y = layer.forward(&x, &TRAINING).unwrap();
            assert_eq!(y.kind(), low);
            let wide: Vec<Tensor> =
                learned.iter().map(|tensor| tensor.detach().to_kind(Kind::Double)).collect();
            let exact = by_operators(
                &x.detach().to_kind(Kind::Double),
                (&weight, of_bias.as_ref()),
                &wide,
                options.scaling(),
                None,
            );
            // One rounding: half a unit in the last place of each value, and the rounding of fp32 sums.
            let unit = if low == Kind::BFloat16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
            let off = (y.to_kind(Kind::Double) - &exact).abs() - exact.abs() * unit;
            let over = off.max().double_value(&[]);
            assert!(over <= 1e-4, "{low:?} bias {bias}: {over} beyond one rounding");
            backward(&[&y.sum(Kind::Float)]).unwrap();
            assert_eq!(x.grad().kind(), low);
            assert!(learned.iter().all(|tensor| tensor.grad().kind() == Kind::Float));
        }
    }
}
