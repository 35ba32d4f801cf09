//! Tolerances relative to f64.

use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::launch::Outcome;

/// Numbers that are exact in the dtype, in f64.
pub(super) fn normal(generator: &mut Generator, shape: &[i64], kind: Kind) -> Tensor {
    generator.normal(shape, (Kind::Float, Device::Cpu)).unwrap().to_kind(kind).to_kind(Kind::Double)
}

/// Half the distance between 1 and the next number; in fp32 all of it.
pub(super) fn epsilon(kind: Kind) -> f64 {
    match kind {
        Kind::BFloat16 => 2f64.powi(-8),
        Kind::Half => 2f64.powi(-11),
        _ => 2f64.powi(-23),
    }
}

/// Compares both results of a launch with the expected outputs.
pub(super) fn check(what: &str, outcome: &Outcome, expected: &[&Tensor], tolerance: f64) {
    for (name, outputs) in [("exact", &outcome.outputs), ("approximate", &outcome.perturbed)] {
        assert_eq!(outputs.len(), expected.len(), "{what}");
        for (index, (found, expected)) in outputs.iter().zip(expected).enumerate() {
            close(&format!("{what}, output {index}, {name} instructions"), found, expected, tolerance);
        }
    }
}

/// Compares numbers that are computed in fp32 and rounded to a dtype once with exact ones: within half a spacing of the number, and
/// `tolerance` of the largest. NaN and ∞ must be where they are expected.
pub(super) fn rounded(what: &str, found: &Tensor, exact: &Tensor, tolerance: f64) {
    // Half the distance between the smallest numbers.
    let smallest = if found.kind() == Kind::Half { 2f64.powi(-25) } else { 0.0 };
    let (kind, found) = (found.kind(), found.to_kind(Kind::Double));
    let finite = exact.isfinite();
    close(what, &found.masked_fill(&finite, 0.0), &exact.masked_fill(&finite, 0.0), 0.0);
    let [found, exact] = [found, exact.shallow_clone()].map(|t| t.masked_fill(&finite.logical_not(), 0.0));
    let allowed = exact.abs() * epsilon(kind) + exact.abs().max() * tolerance + smallest;
    let share = ((found - exact).abs() / allowed.clamp_min(1e-30)).max().double_value(&[]);
    assert!(share <= 1.0, "{what}: {share} of one rounding");
}

/// The largest difference over the largest number; NaN and ∞ must be where they are expected.
pub(super) fn close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    let found = found.to_kind(Kind::Double).reshape([-1]);
    let expected = expected.to_kind(Kind::Double).reshape([-1]);
    assert_eq!(found.size(), expected.size(), "{what}");
    let special = |t: &Tensor| t.masked_fill(&t.isfinite(), 0.0).nan_to_num(7.0, 1.0, -1.0);
    assert!(special(&found).equal(&special(&expected)), "{what}: NaN or ∞ elsewhere: {found} {expected}");
    let finite = expected.isfinite();
    let (found, expected) = (found.masked_select(&finite), expected.masked_select(&finite));
    if found.numel() == 0 {
        return;
    }
    let largest = expected.abs().max().double_value(&[]).max(1e-30);
    let distance = (found - expected).abs().max().double_value(&[]) / largest;
    assert!(distance <= tolerance, "{what}: {distance:e} of {tolerance:e}");
}
