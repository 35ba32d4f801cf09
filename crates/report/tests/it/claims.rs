//! Tests the line of each claim, and what decides it.

use crate::fixed_records::{record, rounds, specs, swiglu};
use expect_test::expect;
use report::{Case, Metric, RunOutcome, RunState, claim, spec};

fn claim_lines(records: &[report::Record], runs: &[RunOutcome]) -> String {
    claim::check(&specs(), records, runs).iter().map(|claim| format!("{claim}\n")).collect()
}

#[test]
fn claims_are_one_line_each_and_the_worst_case_decides() {
    expect![[r#"
        claim swiglu/time 0.95 <= 1.00 holds (against PyTorch 2.11.0)
        claim swiglu/peak 1.50 GiB <= 1.00 GiB falls short
        claim swiglu/save-all-peak not measured (needs 12 GiB)
    "#]]
    .assert_eq(&claim_lines(&[swiglu(), rounds()].concat(), &[]));
}

#[test]
fn claims_without_records_say_why() {
    let outcome = |experiment: &str, state| RunOutcome { experiment: experiment.into(), state };
    let runs = [
        outcome("swiglu-time", RunState::Skipped { why: "no GPU".into() }),
        outcome("swiglu", RunState::Failed { message: "killed".into() }),
    ];
    expect![[r#"
        claim swiglu/time not measured (no GPU)
        claim swiglu/peak not measured (swiglu failed)
        claim swiglu/save-all-peak not measured (swiglu failed)
    "#]]
    .assert_eq(&claim_lines(&[], &runs));
    assert!(claim_lines(&[], &[]).starts_with("claim swiglu/time not measured (no record)\n"));
}

#[test]
fn the_worst_of_all_cases_decides_in_every_direction() {
    let verdict = |op: &str, limit: f64, values: &[Option<f64>]| {
        let mut specs = specs();
        specs.claims.truncate(1);
        (specs.claims[0].op, specs.claims[0].limit) =
            (toml::from_str::<Wrapped>(&format!("op = '{op}'")).unwrap().op, limit);
        let one = |(i, value): (usize, &Option<f64>)| {
            let metric = match value {
                Some(value) => Metric::exact("step_time_ratio", "ratio", *value),
                None => Metric::not_measured("step_time_ratio", "ratio", "no GPU"),
            };
            record("swiglu-time", Case::new().with("i", i), metric)
        };
        let records: Vec<_> = values.iter().enumerate().map(one).collect();
        claim::check(&specs, &records, &[])[0].to_string().replace("claim swiglu/time ", "")
    };
    let (a, b) = (Some(0.5), Some(2.0));
    assert_eq!(verdict("<=", 3.0, &[a, b]), "2.00 <= 3.00 holds");
    assert_eq!(verdict("<=", 1.0, &[b, a]), "2.00 <= 1.00 falls short");
    assert_eq!(verdict(">=", 0.5, &[a, b]), "0.50 >= 0.50 holds");
    assert_eq!(verdict(">=", 1.0, &[b, a]), "0.50 >= 1.00 falls short");
    assert_eq!(verdict("==", 2.0, &[b, b]), "2.00 == 2.00 holds");
    assert_eq!(verdict("==", 2.0, &[a, b]), "0.50 == 2.00 falls short");
    // A limit is written as it was stated.
    assert_eq!(verdict(">=", 0.997, &[Some(0.99712)]), "0.997 >= 0.997 holds");
    // A missing value leaves a claim open, but never hides a case that falls short.
    assert_eq!(verdict("<=", 3.0, &[a, None, b]), "not measured (no GPU)");
    assert_eq!(verdict("<=", 1.0, &[a, None, b]), "2.00 <= 1.00 falls short");
}

#[derive(serde::Deserialize)]
struct Wrapped {
    op: spec::Op,
}

#[test]
fn a_claim_shows_the_decimals_that_its_verdict_needs() {
    let one = |value: f64| {
        let case = Case::new().with("impl", "frugal").with("batch", 8);
        claim_lines(&[record("swiglu-time", case, Metric::exact("step_time_ratio", "ratio", value))], &[])
            .lines()
            .next()
            .unwrap()
            .to_owned()
    };
    assert_eq!(one(1.0), "claim swiglu/time 1.00 <= 1.00 holds");
    assert_eq!(one(1.08), "claim swiglu/time 1.08 <= 1.00 falls short");
    assert_eq!(one(1.0004), "claim swiglu/time 1.0004 <= 1.0000 falls short");
    assert_eq!(one(f64::NAN), "claim swiglu/time NaN <= 1.00 falls short");
}

/// Verdict on `time <= 1` of one comparison, with the ratio of each round.
fn verdict_of_rounds(ratios: &[f64], change: impl Fn(usize, &mut report::Record)) -> String {
    let mut specs = specs();
    specs.claims.truncate(1);
    let sides = |(round, ratio): (usize, &f64)| {
        [("frugal", *ratio), ("pytorch", 1.0)].map(|(side, seconds)| {
            let case = Case::new().with("impl", side).with("batch", 1).with("round", round as u64);
            let mut one = record("swiglu-time", case, Metric::exact("step_seconds", "s", seconds));
            change(round, &mut one);
            one
        })
    };
    let records: Vec<_> = ratios.iter().enumerate().flat_map(sides).collect();
    claim::check(&specs, &records, &[])[0].to_string().replace("claim swiglu/time ", "")
}

#[test]
fn a_limit_within_the_interval_of_the_rounds_is_a_tie() {
    let verdict = |ratios: &[f64]| verdict_of_rounds(ratios, |_, _| {});
    let ten = |shift: f64| (0..10).map(|i| 0.951 + 0.01 * f64::from(i) + shift).collect::<Vec<f64>>();
    let against = "against PyTorch 2.11.0)";
    assert_eq!(verdict(&ten(0.0)), format!("1.00 <= 1.00 tie (95 % interval 0.96 to 1.03; {against}"));
    assert_eq!(verdict(&ten(0.1)), format!("1.10 <= 1.00 falls short ({against}"));
    assert_eq!(verdict(&ten(-0.1)), format!("0.90 <= 1.00 holds ({against}"));
    // Below six rounds the interval is Student's.
    assert_eq!(
        verdict(&[0.9, 0.95, 1.01, 1.1, 1.2]),
        format!("1.01 <= 1.00 tie (95 % interval 0.89 to 1.18; {against}")
    );
    assert_eq!(verdict(&[1.09, 1.1, 1.11]), format!("1.10 <= 1.00 falls short ({against}"));
}

#[test]
fn records_of_two_gpus_are_not_judged_together() {
    let gpu = |name: fn(usize) -> &'static str| {
        move |round: usize, record: &mut report::Record| record.environment.device = name(round).into()
    };
    assert!(verdict_of_rounds(&[0.5, 0.5], gpu(|_| "NVIDIA H100")).starts_with("0.50 <= 1.00 holds"));
    assert_eq!(
        verdict_of_rounds(&[0.5, 0.5], gpu(|round| ["NVIDIA H100", "NVIDIA H200"][round])),
        "not measured (the records are of NVIDIA H100 and NVIDIA H200)"
    );
}

#[test]
fn a_claim_of_a_gpu_is_not_judged_on_a_processor() {
    let mut specs = specs();
    specs.claims.truncate(1);
    specs.claims[0].device = Some(spec::DeviceKind::Gpu);
    assert_eq!(
        claim::check(&specs, &rounds(), &[])[0].to_string(),
        "claim swiglu/time not measured (no record of a GPU)"
    );
    let on_gpu = |mut record: report::Record| {
        record.environment.device = "NVIDIA H200".into();
        record
    };
    let records: Vec<_> = rounds().into_iter().map(on_gpu).collect();
    assert!(claim::check(&specs, &records, &[])[0].is_measured());
}
