//! The contents of a measurement. No time is compared with that of another machine or run.

use std::cell::Cell;

use expect_test::{Expect, expect};
use runtime::measure::{self, Measurement, MeasurementPlan, Samples, Work};
use runtime::memory::RegionUsage;
use runtime::{Error, Result};
use tch::{Device, Tensor, kind};

const CPU: Device = Device::Cpu;

fn plan(warmup: usize, repeats: usize) -> MeasurementPlan {
    MeasurementPlan { warmup, repeats, ..MeasurementPlan::new(CPU) }
}

fn check<T>(result: Result<T>, expected: Expect) {
    expected.assert_eq(&result.map_or_else(|error| error.to_string(), |_| "ok".into()));
}

#[test]
fn repeats_are_samples_and_warmup_runs_are_not() {
    for (warmup, repeats) in [(0, 1), (2, 5), (3, 1)] {
        let runs = Cell::new(0);
        let measured = measure::run(&plan(warmup, repeats), |_| {
            runs.set(runs.get() + 1);
            Ok(())
        });
        let measured = measured.unwrap();
        assert_eq!(runs.get(), warmup + repeats);
        assert_eq!(measured.time.samples.len(), repeats);
        assert_eq!((measured.phases.len(), measured.rate()), (0, None));
    }
}

#[test]
fn phases_and_rest_sum_to_the_run() {
    let spin = |turns: usize| {
        for _ in 0..turns {
            std::hint::spin_loop();
        }
    };
    let measured = measure::run(&plan(1, 4), |timer| {
        for _ in 0..2 {
            spin(1000);
            timer.end("forward")?;
            spin(1000);
            timer.end("backward")?;
        }
        Ok(())
    });
    let measured = measured.unwrap();
    assert_eq!(measured.phases.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["forward", "backward"]);
    for repeat in 0..4 {
        let of = |name| measured.phase(name).unwrap().samples[repeat];
        let rest = measured.time.samples[repeat] - of("forward") - of("backward");
        assert!(of("forward") > 0.0 && of("backward") > 0.0);
        assert!(rest >= -1e-12, "{rest}");
    }
    assert_eq!(measured.phase("step"), None);
}

#[test]
fn a_budget_limits_repeats_above_the_minimum() {
    // The budget of a nanosecond is exceeded after the first run.
    let plan = MeasurementPlan {
        warmup: 5,
        repeats: 100,
        min_repeats: 4,
        budget: Some(1e-9),
        ..MeasurementPlan::new(CPU)
    };
    let runs = Cell::new(0);
    let measured = measure::run(&plan, |_| {
        runs.set(runs.get() + 1);
        Ok(())
    });
    assert_eq!((measured.unwrap().time.samples.len(), runs.get()), (4, 5));
    let unlimited = MeasurementPlan { budget: Some(1e6), ..plan };
    assert_eq!(measure::run(&unlimited, |_| Ok(())).unwrap().time.samples.len(), 100);
}

#[test]
fn statistics_of_fixed_samples_are_exact() {
    let measured = Measurement {
        time: Samples { samples: vec![0.5, 0.25, 4.0, 0.5, 1.0] },
        phases: Vec::new(),
        memory: RegionUsage { live_before: 0, live_after: 0, peak: 0 },
        work: Some(Work::tokens(1024.0)),
    };
    assert_eq!((measured.time.median(), measured.time.spread()), (0.5, 0.25));
    assert_eq!(measured.rate(), Some(2048.0));
    for (samples, share, expected) in [
        (vec![3.0], 0.25, 3.0),
        (vec![2.0, 1.0], 0.5, 1.5),
        (vec![1.0, 2.0, 4.0], -1.0, 1.0),
        (vec![1.0, 2.0, 4.0], 7.0, 4.0),
        (vec![1.0, f64::INFINITY], 0.0, 1.0),
    ] {
        assert_eq!(Samples { samples }.quantile(share), expected);
    }
    assert!(Samples::default().median().is_nan() && Samples::default().spread().is_nan());
    assert!(Samples { samples: vec![1.0] }.quantile(f64::NAN).is_nan());
}

#[test]
fn the_measured_peak_covers_the_repeats_only() {
    let kept = Tensor::zeros([1000], kind::FLOAT_CPU);
    let runs = Cell::new(0);
    let measured = measure::run(&plan(1, 3), |_| {
        // The warm-up's tensor is larger, and not in the measured peak.
        let elements = if runs.replace(runs.get() + 1) == 0 { 4 << 20 } else { 1 << 20 };
        drop(measure::black_box(Tensor::f_zeros([elements], kind::FLOAT_CPU)?));
        Ok(())
    });
    let memory = measured.unwrap().memory;
    // Less than the warm-up's 16 MiB.
    let above = memory.peak_above_start();
    assert!(((4 << 20)..(8 << 20)).contains(&above), "{above}");
    drop(kept);
}

#[test]
fn invalid_measurements_are_errors() {
    check(
        measure::run(&plan(0, 0), |_| Ok(())),
        expect!["measure: 0 repeats measure nothing; ask for at least 1"],
    );
    let budget = |budget| MeasurementPlan { budget: Some(budget), ..plan(0, 1) };
    check(
        measure::run(&budget(f64::NAN), |_| Ok(())),
        expect!["measure: a budget of NaN s; expected a positive number of seconds, or None"],
    );
    check(
        measure::run(&budget(-1.0), |_| Ok(())),
        expect!["measure: a budget of -1 s; expected a positive number of seconds, or None"],
    );
    let work = MeasurementPlan { work: Some(Work::tokens(f64::INFINITY)), ..plan(0, 1) };
    check(
        measure::run(&work, |_| Ok(())),
        expect!["measure: inf token in a run; expected a number from 0 on"],
    );
    check(
        measure::run(&plan(0, 1), |_| Err(Error::Other("the body's own".into()))),
        expect!["the body's own"],
    );
    let runs = Cell::new(0);
    let sometimes = measure::run(&plan(0, 3), |timer| {
        runs.set(runs.get() + 1);
        if runs.get() == 2 { Ok(()) } else { timer.end("forward") }
    });
    check(
        sometimes,
        expect![[
            r#"measure: the phase "forward" did not end in every repeat; end the same phases each time"#
        ]],
    );
    check(
        measure::run(&MeasurementPlan::new(Device::Vulkan), |_| Ok(())),
        expect!["vulkan is not available here: streams, events and memory figures exist for cpu and cuda"],
    );
}
