//! Large 16-bit parameters, which are updated a slice at a time: the bits of their parts, and the memory of a slice.

use runtime::memory::Region;
use tch::{Device, Kind, Tensor};
use training::optimizer::{AdamW, AdamW8bit, DeviceOptimizer, Group, Implementation, Momentum, Rule};

const SEED: u64 = 11;
/// Copies of values and gradient take 40 MB, and those of a slice 32 MiB.
const WHOLE: i64 = 5_000_077;
const CUT: i64 = 4 << 20;

fn rules() -> Vec<Box<dyn Rule>> {
    vec![Box::new(Momentum::default()), Box::new(AdamW::default()), Box::new(AdamW8bit::default())]
}

fn wave(count: i64, factor: f64) -> Tensor {
    (Tensor::arange(count, (Kind::Float, Device::Cpu)) * factor).sin().to_kind(Kind::BFloat16)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Rounding {
    Nearest,
    Stochastic,
    Master,
}

/// An optimizer of the elements from `first` on of a parameter.
fn optimizer(
    (rule, implementation, rounding): (Box<dyn Rule>, Implementation, Rounding),
    tensor: &Tensor,
    first: i64,
) -> DeviceOptimizer {
    let parameters = vec![("w".to_owned(), tensor.shallow_clone())];
    let group = Group { weight_decay: 0.1, ..Group::new(parameters, 1e-3) };
    let made = DeviceOptimizer::boxed(rule, vec![group]).unwrap().with_implementation(implementation);
    match rounding {
        Rounding::Nearest => made,
        Rounding::Stochastic => made.with_stochastic_rounding_of_parts(SEED, |_| first as u64),
        Rounding::Master => made.with_master_weights(),
    }
    .with_parts(|_| WHOLE)
}

#[test]
fn slices_have_the_bits_of_the_whole() {
    let (start, gradients) = (wave(WHOLE, 0.3), [wave(WHOLE, 0.7), wave(WHOLE, 1.1)]);
    for number in 0..rules().len() {
        let cases = [
            (Implementation::Foreach, Rounding::Nearest),
            (Implementation::Fused, Rounding::Stochastic),
            (Implementation::Fused, Rounding::Master),
        ];
        for (implementation, rounding) in cases {
            let run = |from: i64, count: i64| {
                let leaf = start.narrow(0, from, count).copy().set_requires_grad(true);
                let rule = (rules().swap_remove(number), implementation, rounding);
                let mut made = optimizer(rule, &leaf, from);
                for gradient in &gradients {
                    let gradient = gradient.narrow(0, from, count);
                    runtime::autograd::set_grad(&leaf, Some(&gradient)).unwrap();
                    made.step().unwrap();
                }
                (leaf.detach(), made.state())
            };
            let (whole, first, last) = (run(0, WHOLE), run(0, CUT), run(CUT, WHOLE - CUT));
            let name = format!("{} {implementation:?} {rounding:?}", rules()[number].name());
            let joined = Tensor::cat(&[&first.0, &last.0], 0);
            assert!(whole.0.equal(&joined), "{name}");
            assert!(!whole.0.equal(&start), "{name}");
            let (name_of_step, step) = &whole.1[0];
            assert!(name_of_step == "w.step" && step.int64_value(&[]) == 2, "{name}: {step}");
            for (((slot, whole), (_, first)), (_, last)) in whole.1.iter().zip(&first.1).zip(&last.1).skip(1)
            {
                assert!(whole.equal(&Tensor::cat(&[first, last], 0)), "{name}: {slot}");
            }
        }
    }
}

#[test]
fn an_update_copies_a_slice_at_a_time() {
    for rule in rules().into_iter().take(2) {
        let name = rule.name();
        let leaf = wave(3 * WHOLE, 0.3).set_requires_grad(true);
        let mut made = optimizer((rule, Implementation::Fused, Rounding::Stochastic), &leaf, 0);
        for _ in 0..2 {
            runtime::autograd::set_grad(&leaf, Some(&wave(3 * WHOLE, 0.7))).unwrap();
            let state = made.state_bytes();
            let region = Region::start(Device::Cpu).unwrap();
            made.step().unwrap();
            let usage = region.finish().unwrap();
            let taken = usage.peak_above_start() - (made.state_bytes() - state);
            // A rule in several operators has a temporary or two of a slice's size beside the copies.
            assert!(taken < 80 << 20, "{name}: {taken} bytes");
        }
    }
}
