//! The peak of a step is the one that `accounting` predicts, for every combination of techniques. The counts are the whole
//! process's, so no other test may run at the same time.

use experiments::offload::predicted_peaks::{Row, rows, rows_of_families};

#[test]
fn the_peak_of_every_combination_is_within_two_percent_of_the_prediction() {
    let rows = rows();
    assert!(rows.len() >= 40);
    compare(rows, 0.02);
}

#[test]
fn the_peaks_of_other_families_are_within_three_percent_of_the_prediction() {
    compare(rows_of_families(), 0.03);
}

/// Compares each row's peak with its prediction, within this relative tolerance.
fn compare(rows: Vec<Row>, tolerance: f64) {
    runtime::memory::track_cpu().unwrap();
    // The first run makes all that a process makes once.
    rows[0].measure().unwrap();
    let mut wrong = Vec::new();
    for row in rows {
        let (measured, predicted) = (row.measure().unwrap(), row.predict().unwrap());
        let error = predicted.total as f64 / measured as f64 - 1.0;
        let line = format!(
            "{:+.2} %, {measured} bytes measured, {} predicted in the {}: {}, {}, {}, {:?}, {}",
            error * 100.0,
            predicted.total,
            predicted.moment,
            row.shape,
            row.pass_name(),
            row.place_names().join(", "),
            row.kind,
            row.head_name(),
        );
        eprintln!("{line}");
        if error.abs() > tolerance {
            wrong.push(format!("{line}: {}; {row:?}", predicted.summary()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
