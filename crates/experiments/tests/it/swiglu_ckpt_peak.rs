//! `accounting`'s peak of a step is the allocator's. The counts are the whole process's, so no other test may run at the same time.

use experiments::swiglu_ckpt::bench::{Configuration, Gradients, SMOKE, Variant, measure};
use runtime::measure::MeasurementPlan;
use swiglu_ckpt::CheckpointLevel;
use tch::{Device, Kind};

#[test]
fn predicted_peaks_are_within_five_percent_and_kept_bytes_exact() {
    runtime::memory::track_cpu().unwrap();
    let deep = Configuration { batch: 3, seq: 50, hidden: 64, intermediate: 176, layers: 6 };
    let single = Configuration { batch: 1, seq: 700, hidden: 96, intermediate: 64, layers: 1 };
    let tiny_tile = Variant::Level(CheckpointLevel::InputOnlyTiled { bytes: 50_000 });
    for config in SMOKE.iter().chain([&deep, &single]) {
        for variant in Variant::all().chain([tiny_tile]) {
            for gradients in [Gradients::Freed, Gradients::Accumulated] {
                let plan = MeasurementPlan { warmup: 1, repeats: 1, ..MeasurementPlan::new(Device::Cpu) };
                let outcome = measure(config, variant, Kind::Float, gradients, &plan).unwrap();
                let (measured, expected) = (outcome.peak_bytes as f64, outcome.predicted.bytes as f64);
                let (case, error) = (
                    format!("{} {variant}, {gradients:?}", config.name()),
                    (expected - measured).abs() / measured,
                );
                eprintln!("{case}: {:.2} % of the tolerance", error / 0.02 * 100.0);
                assert!(error <= 0.02, "{case}: predicted {expected}, measured {measured}");
                assert_eq!(outcome.held_bytes, outcome.predicted.kept, "{case}");
            }
        }
    }
}
