//! Stochastic rounding of parameters in bf16 and fp16.

use tch::{Device, Kind, Tensor};
use training::optimizer::{
    AdaGrad, Adafactor, Adam, AdamW, AdamW8bit, DeviceOptimizer, Group, Implementation, Lion, Momentum,
    Nesterov, RmsProp, Rule, Sgd,
};

const SEED: u64 = 11;
const NUMBERS: i64 = 8192;

fn rules() -> Vec<Box<dyn Rule>> {
    vec![
        Box::new(Sgd),
        Box::new(Momentum::default()),
        Box::new(Nesterov::default()),
        Box::new(AdaGrad::default()),
        Box::new(RmsProp::default()),
        Box::new(Adam::default()),
        Box::new(AdamW::default()),
        Box::new(AdamW8bit::default()),
        Box::new(Lion::default()),
        Box::new(Adafactor::default()),
    ]
}

fn leaf(values: &Tensor, kind: Kind) -> Tensor {
    values.to_kind(kind).copy().set_requires_grad(true)
}

fn start() -> Tensor {
    Tensor::arange(NUMBERS, (Kind::Float, Device::Cpu)) / NUMBERS + 1.0
}

fn gradient(step: i64) -> Tensor {
    (Tensor::arange(NUMBERS, (Kind::Float, Device::Cpu)) * 0.01 + step as f64).sin() * 0.25 + 1.0
}

fn optimizer(rule: Box<dyn Rule>, parameters: &[(&str, &Tensor)], lr: f64) -> DeviceOptimizer {
    let parameters = parameters.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.shallow_clone()));
    let group = Group { weight_decay: 0.01, ..Group::new(parameters.collect::<Vec<_>>(), lr) };
    DeviceOptimizer::boxed(rule, vec![group]).unwrap()
}

fn step(optimizer: &mut DeviceOptimizer, parameters: &[(&Tensor, Tensor)]) {
    for (parameter, gradient) in parameters {
        let gradient = gradient.to_kind(parameter.kind());
        runtime::autograd::set_grad(parameter, Some(&gradient)).unwrap();
    }
    optimizer.step().unwrap();
}

fn mean_change(parameter: &Tensor) -> f64 {
    let start = start().to_kind(parameter.kind()).to_kind(Kind::Double);
    (parameter.detach().to_kind(Kind::Double) - start).mean(Kind::Double).double_value(&[])
}

/// Every rule in every implementation moves parameters of 16 bits as far as it moves those of fp32, by steps of a hundredth of their last
/// digit; rounded to nearest, they stay where they are.
#[test]
fn small_updates_count_on_average() {
    for implementation in [Implementation::ForLoop, Implementation::Foreach, Implementation::Fused] {
        for number in 0..rules().len() {
            for (kind, lr) in [(Kind::BFloat16, 5e-5), (Kind::Half, 6e-6)] {
                let run = |kind, stochastic: bool| {
                    let rule = rules().swap_remove(number);
                    // Momentum adds up ten gradients.
                    let lr =
                        if rule.name().ends_with('v') || rule.name() == "momentum" { lr / 10.0 } else { lr };
                    let w =
                        leaf(&start().to_kind(if kind == Kind::Float { Kind::BFloat16 } else { kind }), kind);
                    let made = optimizer(rule, &[("w", &w)], lr).with_implementation(implementation);
                    let mut made = if stochastic { made.with_stochastic_rounding(SEED) } else { made };
                    (0..40).for_each(|number| step(&mut made, &[(&w, gradient(number))]));
                    mean_change(&w)
                };
                let (exact, found, nearest) = (run(Kind::Float, false), run(kind, true), run(kind, false));
                let what = format!("{:?} {implementation:?} {kind:?}", rules()[number].name());
                assert!(exact < 0.0 && (found / exact - 1.0).abs() < 0.05, "{what}: {found:e} for {exact:e}");
                assert!(nearest.abs() < 0.2 * exact.abs(), "{what}: {nearest:e} for {exact:e}");
            }
        }
    }
}

/// The same bits from parameters in parts and whole, beside other parameters or alone, from a loaded state, and after skipped steps.
#[test]
fn bits_follow_from_seed_name_step_and_index() {
    const CUT: i64 = 1001;
    for kind in [Kind::BFloat16, Kind::Half] {
        for implementation in [Implementation::Foreach, Implementation::Fused] {
            let adam = || Box::new(AdamW::default()) as Box<dyn Rule>;
            let of = |parameters: &[(&str, &Tensor)], seed| {
                let made = optimizer(adam(), parameters, 1e-4).with_implementation(implementation);
                made.with_stochastic_rounding(seed)
            };
            let whole = leaf(&start(), kind);
            let mut alone = of(&[("w", &whole)], SEED);
            (0..3).for_each(|number| step(&mut alone, &[(&whole, gradient(number))]));
            let (middle, state) = (whole.detach().copy(), alone.state());
            let state: Vec<(String, Tensor)> =
                state.into_iter().map(|(name, tensor)| (name, tensor.copy())).collect();
            (3..5).for_each(|number| step(&mut alone, &[(&whole, gradient(number))]));

            // Another parameter before it.
            let (other, beside) = (leaf(&gradient(9), kind), leaf(&start(), kind));
            let mut both = of(&[("v", &other), ("w", &beside)], SEED);
            (0..5).for_each(|number| step(&mut both, &[(&other, gradient(7)), (&beside, gradient(number))]));
            assert!(beside.equal(&whole), "{kind:?} {implementation:?}");

            // Its last part, as a rank has it.
            let part = |tensor: &Tensor| tensor.narrow(0, CUT, NUMBERS - CUT);
            let last = leaf(&part(&start()), kind);
            let made = optimizer(adam(), &[("w", &last)], 1e-4).with_implementation(implementation);
            let mut made = made.with_stochastic_rounding_of_parts(SEED, |_| CUT as u64);
            (0..5).for_each(|number| step(&mut made, &[(&last, part(&gradient(number)))]));
            // libtorch's fused kernel rounds the last elements, which fill no vector, in another way: by a last digit of fp32.
            let differ = last.ne_tensor(&part(&whole)).to_kind(Kind::Int64).sum(Kind::Int64).int64_value(&[]);
            assert!(differ <= 2, "{kind:?} {implementation:?}: {differ} elements differ");

            // Resumed in the middle, with a skipped step, which takes no random numbers.
            let resumed = leaf(&middle, kind);
            let mut made = of(&[("w", &resumed)], SEED);
            made.load_state(&state).unwrap();
            for number in 3..5 {
                if implementation == Implementation::Fused {
                    let gradient = Tensor::full([NUMBERS], f64::INFINITY, (kind, Device::Cpu));
                    runtime::autograd::set_grad(&resumed, Some(&gradient)).unwrap();
                    made.step_unless(&Tensor::from_slice(&[1f32])).unwrap();
                }
                step(&mut made, &[(&resumed, gradient(number))]);
            }
            assert!(resumed.equal(&whole), "{kind:?} {implementation:?}");

            let seeded = leaf(&start(), kind);
            let mut made = of(&[("w", &seeded)], SEED + 1);
            (0..5).for_each(|number| step(&mut made, &[(&seeded, gradient(number))]));
            assert!(!seeded.equal(&whole), "{kind:?} {implementation:?}");
        }
    }
}

/// Parameters of fp32, and those with an fp32 copy, are not rounded stochastically.
#[test]
fn what_needs_no_stochastic_rounding_has_none() {
    let run = |kind, masters: bool, stochastic: bool| {
        let w = leaf(&start(), kind);
        let made = optimizer(Box::new(AdamW::default()), &[("w", &w)], 1e-4);
        let made = if masters { made.with_master_weights() } else { made };
        let mut made = if stochastic { made.with_stochastic_rounding(SEED) } else { made };
        (0..3).for_each(|number| step(&mut made, &[(&w, gradient(number))]));
        w
    };
    assert!(run(Kind::Float, false, true).equal(&run(Kind::Float, false, false)));
    assert!(run(Kind::BFloat16, true, true).equal(&run(Kind::BFloat16, true, false)));
}
