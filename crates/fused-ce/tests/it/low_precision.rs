//! bf16 and fp16 on the CPU: no result is farther from the exact one than the naive implementation's, except for one
//! rounding of the result. The exact result is the naive implementation in f64 over the same rounded operands. With a rounded gradient of
//! the logits, no result is farther on average.

#![expect(clippy::print_stdout, reason = "shares of the tolerance are printed")]

use fused_ce::{Chunk, Denominator, Gradients, Inputs, LinearCrossEntropy, Output, Reduction, Result};
use runtime::autograd::{Keep, backward_with};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use crate::naive;

const LOW: [Kind; 2] = [Kind::BFloat16, Kind::Half];

/// Returns hidden states and a weight in `kind`, of the size of a trained model's, and targets; every seventh is ignored.
fn operands(kind: Kind, [tokens, hidden, vocabulary]: [i64; 3], seed: u64) -> [Tensor; 3] {
    let mut generator = Generator::new(seed).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
    let (x, w) = (normal(&[tokens, hidden]), normal(&[vocabulary, hidden]) * 0.3);
    let place = Tensor::arange(tokens, (Kind::Int64, Device::Cpu));
    let targets = (&place * 31 + 5).remainder(vocabulary);
    let targets = targets.where_self(&place.remainder(7).ne(3), &Tensor::from(-100i64));
    [x.to_kind(kind), w.to_kind(kind), targets]
}

/// An implementation of the loss.
type Run = fn(&Inputs<'_>, &LinearCrossEntropy) -> Result<Output>;

const NAIVE: Run = naive::run;
const OURS: Run = |inputs, options| options.run(inputs);

/// Returns the loss, and ∂/∂x and ∂/∂W times `upstream`, in f64.
fn run(
    how: Run,
    options: &LinearCrossEntropy,
    [x, w, targets]: &[Tensor; 3],
    denominator: Option<f64>,
    upstream: f64,
) -> [Tensor; 3] {
    let (x, w) = (x.copy().set_requires_grad(true), w.copy().set_requires_grad(true));
    let denominator = denominator.map(Denominator::Number);
    let loss = how(&Inputs { denominator, ..Inputs::new(&x, &w, targets) }, options).unwrap().loss;
    let upstream = loss.full_like(upstream);
    backward_with(&[&loss], &[Some(&upstream)], Keep::default()).unwrap();
    assert_eq!((x.grad().kind(), w.grad().kind()), (x.kind(), w.kind()));
    [loss.detach(), x.grad(), w.grad()].map(|tensor| tensor.to_kind(Kind::Double))
}

fn largest(tensor: &Tensor) -> f64 {
    tensor.abs().max().double_value(&[])
}

#[test]
fn results_are_at_least_as_accurate_as_the_naive_implementations() {
    for kind in LOW {
        // Half a unit in the last place, and half the smallest positive number.
        let (rounding, smallest) = match kind {
            Kind::BFloat16 => (f64::from(2f32.powi(-8)), 0.0),
            _ => (f64::from(2f32.powi(-11)), f64::from(2f32.powi(-25))),
        };
        for (index, shape) in [[251, 67, 1013], [123, 252, 507], [5, 3, 2]].into_iter().enumerate() {
            let mut worst = [[f64::NEG_INFINITY; 2]; 3];
            let low = operands(kind, shape, index as u64);
            let [x, w, targets] = &low;
            let wide = [x.to_kind(Kind::Double), w.to_kind(Kind::Double), targets.shallow_clone()];
            for reduction in [Reduction::Mean, Reduction::Sum] {
                let options = LinearCrossEntropy { reduction, ..LinearCrossEntropy::default() };
                let exact = run(NAIVE, &options, &wide, None, 1.0);
                let naive = run(NAIVE, &options, &low, None, 1.0);
                for (chunk, gradients) in [7, 64, 251]
                    .into_iter()
                    .flat_map(|chunk| [(chunk, Gradients::Forward), (chunk, Gradients::Backward)])
                {
                    let options = LinearCrossEntropy {
                        chunk: Some(Chunk::Tokens(chunk)),
                        gradients,
                        ..options.clone()
                    };
                    let ours = run(OURS, &options, &low, None, 1.0);
                    for (place, name) in ["loss", "x", "w"].into_iter().enumerate() {
                        let exact = &exact[place];
                        let (error, allowed) = ((&ours[place] - exact).abs(), (&naive[place] - exact).abs());
                        // The loss is fp32; gradients are rounded once, after sums in fp32.
                        let once =
                            if place == 0 { exact.zeros_like() } else { exact.abs() * rounding + smallest };
                        let tolerance = once + 2e-6 * largest(exact);
                        let share = ((&error - &allowed) / &tolerance).max().double_value(&[]);
                        let case = format!("{kind:?} {shape:?} {reduction:?} {chunk} {gradients:?} {name}");
                        assert!(share <= 1.0, "{case}: {share}");
                        // Stricter than required: one rounding, whatever the error of the naive implementation.
                        let of_one = (&error / &tolerance).max().double_value(&[]);
                        assert!(of_one <= 1.0, "{case}: {of_one} of one rounding");
                        let mean = |tensor: &Tensor| tensor.mean(Kind::Double).double_value(&[]);
                        let against = mean(&error) / mean(&allowed);
                        assert!(against <= 1.0, "{case}: mean error {against} of the naive way's");
                        worst[place] = [worst[place][0].max(of_one), worst[place][1].max(against)];
                    }
                }
            }
            for (name, [of_one, against]) in ["loss", "x", "w"].iter().zip(worst) {
                println!(
                    "{kind:?} {shape:?} {name}: {of_one:.2} of the tolerance; mean error {against:.3} of the naive way's"
                );
            }
        }
    }
}

/// A rounded gradient of the logits has an error of the naive implementation's kind; logits are not rounded, and sums are in fp32.
#[test]
fn results_with_a_rounded_gradient_of_the_logits_are_as_accurate_as_the_naive_implementations_on_average() {
    for (index, shape) in [[251, 67, 1013], [123, 252, 507]].into_iter().enumerate() {
        let low = operands(Kind::BFloat16, shape, index as u64);
        let [x, w, targets] = &low;
        let wide = [x.to_kind(Kind::Double), w.to_kind(Kind::Double), targets.shallow_clone()];
        let options = LinearCrossEntropy { round_logits_gradient: true, ..LinearCrossEntropy::default() };
        let (exact, naive) = (run(NAIVE, &options, &wide, None, 1.0), run(NAIVE, &options, &low, None, 1.0));
        for chunk in [7, 64, 251] {
            let options = LinearCrossEntropy { chunk: Some(Chunk::Tokens(chunk)), ..options.clone() };
            let ours = run(OURS, &options, &low, None, 1.0);
            let precise = LinearCrossEntropy { round_logits_gradient: false, ..options };
            let precise = run(OURS, &precise, &low, None, 1.0);
            for (place, name) in ["loss", "x", "w"].into_iter().enumerate() {
                let error = |of: &Tensor| (of - &exact[place]).square().mean(Kind::Double).double_value(&[]);
                let share = (error(&ours[place]) / error(&naive[place])).sqrt();
                assert!(
                    share <= 1.0,
                    "{shape:?} {chunk} {name}: {share} of the naive implementation's error"
                );
                let rounds = place > 0 && kernels::processor::multiplies_into_fp32(Kind::BFloat16);
                assert_eq!(ours[place] == precise[place], !rounds, "{shape:?} {chunk} {name}");
            }
        }
    }
}

/// Unscaled, every gradient here underflows in fp16. The loss scale arrives in backward and must find the gradients intact.
#[test]
fn a_loss_scale_saves_gradients_that_fp16_alone_would_lose() {
    let low = operands(Kind::Half, [64, 16, 509], 3);
    let [x, w, targets] = &low;
    let wide = [x.to_kind(Kind::Double), w.to_kind(Kind::Double), targets.shallow_clone()];
    let denominator = Some(1e9);
    for gradients in [Gradients::Forward, Gradients::Backward] {
        let options = LinearCrossEntropy { gradients, ..LinearCrossEntropy::default() };
        let unscaled = run(OURS, &options, &low, denominator, 1.0);
        assert_eq!([largest(&unscaled[1]), largest(&unscaled[2])], [0.0; 2], "the case is too easy");
        for power in [14, 16, 18, 20] {
            let scale = 2f64.powi(power);
            let exact = run(NAIVE, &options, &wide, denominator, scale);
            let ours = run(OURS, &options, &low, denominator, scale);
            for place in [1, 2] {
                let error = largest(&(&ours[place] - &exact[place]));
                // One rounding, in subnormal numbers if the result is that small.
                let allowed = largest(&exact[place]) * 2f64.powi(-11) * 1.01 + 2f64.powi(-25);
                assert!(error <= allowed, "{gradients:?} 2^{power}: {error:e} of {allowed:e}");
                assert!(largest(&ours[place]) > 0.0);
            }
        }
    }
}
