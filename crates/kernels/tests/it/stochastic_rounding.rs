//! Stochastic rounding over whole tensors.

use kernels::stochastic_rounding::{Rounding, StepNumber, Stream, round};
use tch::{Device, Kind, Tensor};

fn rounded(source: &Tensor, kind: Kind, stream: Stream, step: u64) -> Tensor {
    let target = Tensor::zeros(source.size(), (kind, Device::Cpu));
    round(&[Rounding { source, target: &target, stream, step: StepNumber::Host(step) }]).unwrap();
    target
}

/// More than one task, and more than one block after an odd beginning.
const NUMBERS: i64 = 3 * 64 * 1024 + 77;

fn source() -> Tensor {
    tch::manual_seed(1);
    Tensor::randn([NUMBERS], (Kind::Float, Device::Cpu))
}

#[test]
fn a_division_of_the_tensor_does_not_change_its_bits() {
    let (source, stream) = (source(), Stream::new(7, "w"));
    for kind in [Kind::BFloat16, Kind::Half] {
        let whole = rounded(&source, kind, stream, 3);
        for cuts in [vec![1, 2, 3], vec![64, 65_600], vec![NUMBERS - 1]] {
            let mut start = 0;
            let parts = cuts.into_iter().chain([NUMBERS]).map(|end| {
                let part = source.narrow(0, start, end - start).copy();
                let part_stream = stream.from_element(start as u64);
                start = end;
                rounded(&part, kind, part_stream, 3)
            });
            let parts: Vec<Tensor> = parts.collect();
            assert!(Tensor::cat(&parts, 0).equal(&whole), "{kind:?}");
        }
        // A target with gaps gets the same numbers.
        let wide = Tensor::zeros([NUMBERS, 2], (kind, Device::Cpu));
        let target = wide.select(1, 1);
        round(&[Rounding { source: &source, target: &target, stream, step: StepNumber::Host(3) }]).unwrap();
        assert!(target.equal(&whole), "{kind:?}");
        assert_eq!(wide.select(1, 0).count_nonzero(0).int64_value(&[]), 0);
    }
}

#[test]
fn seeds_names_and_steps_give_other_bits() {
    let (source, of) = (source(), |seed, name| Stream::new(seed, name));
    let base = rounded(&source, Kind::BFloat16, of(7, "w"), 3);
    assert!(base.equal(&rounded(&source, Kind::BFloat16, of(7, "w"), 3)));
    for (stream, step) in [(of(8, "w"), 3), (of(7, "v"), 3), (of(7, "w"), 4), (of(7, ""), 3)] {
        let other = rounded(&source, Kind::BFloat16, stream, step);
        // Half of all random bits differ: a third of the elements are rounded to the other neighbour.
        let share = other.ne_tensor(&base).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
        assert!((0.32..0.35).contains(&share), "{stream:?} {step}: {share}");
    }
}

/// Errors of neighbours, of elements that share a hash and of consecutive steps do not follow each other.
#[test]
fn errors_are_independent() {
    let source = Tensor::full([NUMBERS], 1.0 + 2f64.powi(-8), (Kind::Float, Device::Cpu));
    let up = |step| {
        let rounded = rounded(&source, Kind::BFloat16, Stream::new(7, "w"), step);
        rounded.gt(1.0).to_kind(Kind::Double) * 2.0 - 1.0
    };
    let (first, second) = (up(1), up(2));
    // Five standard deviations of a mean of so many independent signs.
    let bound = 5.0 / (NUMBERS as f64).sqrt();
    let mean = |x: &Tensor| x.mean(Kind::Double).double_value(&[]).abs();
    assert!(mean(&first) < bound, "{}", mean(&first));
    assert!(mean(&(&first * &second)) < bound);
    for distance in [1, 2, 3, 4, 8, 64] {
        let count = NUMBERS - distance;
        let product = first.narrow(0, 0, count) * first.narrow(0, distance, count);
        assert!(mean(&product) < bound, "{distance}: {}", mean(&product));
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let source = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    let refuses = |source: &Tensor, target: &Tensor, expected: &str| {
        let (stream, step) = (Stream::new(1, "w"), StepNumber::Host(1));
        let error = round(&[Rounding { source, target, stream, step }]).unwrap_err().to_string();
        assert!(error.starts_with("stochastic rounding: ") && error.contains(expected), "{error}");
    };
    refuses(&source, &source, "expected a bf16 or fp16 tensor");
    refuses(&source, &Tensor::zeros([3], (Kind::Half, Device::Cpu)), "expected one shape and device");
    let half = Tensor::zeros([2], (Kind::Half, Device::Cpu));
    refuses(&half, &half, "expected a contiguous fp32 tensor");
}
