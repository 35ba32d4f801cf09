//! Padding that is computed of the lengths alone is the padding that the batches have.

use std::sync::Arc;

use dataloading::LengthStatistics;
use experiments::dataloading::lengths::{BATCHINGS, Batching};
use experiments::dataloading::texts::Text;

fn lines() -> Arc<Vec<Vec<u32>>> {
    Arc::new(Text::EmbeddedValid.lines().unwrap().unwrap())
}

#[test]
fn computed_and_counted_padding_agree() {
    let lines = lines();
    let statistics = LengthStatistics::from_samples(&*lines).unwrap();
    for batching in BATCHINGS {
        let Some(waste) = batching.computed(&statistics) else { continue };
        let epochs = if batching == Batching::Longest { 40 } else { 2 };
        let counted = batching.count(lines.clone(), epochs, 7).unwrap();
        let n = counted.positions.len() as f64;
        let mean = counted.positions.iter().sum::<f64>() / n;
        if batching == Batching::Longest {
            let variance =
                counted.positions.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / (n - 1.0);
            let error = (variance / n).sqrt();
            // The mean is known to within a percent of the places, so the next line proves something.
            assert!(error > 0.0 && error < 0.01 * mean, "{error} of {mean}");
            assert!(
                (mean - waste.positions).abs() < 4.0 * error,
                "{mean} ± {error}, computed {}",
                waste.positions
            );
        } else {
            assert!(counted.positions.iter().all(|&count| count == waste.positions), "{batching:?}");
            assert!(
                counted.padding.iter().all(|padding| (padding - waste.share()).abs() < 1e-12),
                "{batching:?}"
            );
        }
        assert!(counted.dropped.iter().all(|&dropped| dropped == waste.dropped), "{batching:?}");
    }
}

#[test]
fn each_way_pads_less_than_the_one_before() {
    let lines = lines();
    let padding: Vec<f64> = BATCHINGS[..6]
        .iter()
        .map(|batching| batching.count(lines.clone(), 1, 0).unwrap().padding[0])
        .collect();
    assert!(padding.is_sorted_by(|more, less| more > less), "{padding:?}");
    let packed = Batching::Packed.count(lines.clone(), 1, 0).unwrap();
    assert!(packed.padding[0] < 0.02, "{packed:?}");
    assert_eq!(packed.dropped, [0.0]);
    let tokens: usize = lines.iter().map(Vec::len).sum();
    assert_eq!(packed.positions[0] * (1.0 - packed.padding[0]), tokens as f64);
}
