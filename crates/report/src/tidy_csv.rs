//! CSV: one tidy file per experiment, a row per measurement.

use crate::measurements::{Measurements, plain};
use crate::record::Record;

/// Returns the records of one experiment: the case's keys, then metric, unit, value, spread, n and note.
///
/// Values are written in full, in the record's unit; a case without a key has an empty field there.
pub fn write(records: &[Record]) -> String {
    let measured = Measurements::from_records(records);
    let keys = measured.keys();
    let mut writer = csv::Writer::from_writer(Vec::new());
    let header = keys.iter().copied().chain(["metric", "unit", "value", "spread", "n", "note"]);
    let mut rows = vec![header.map(str::to_owned).collect::<Vec<_>>()];
    let number = |value: Option<f64>| value.map(|v| v.to_string()).unwrap_or_default();
    for Record { case, metric, .. } in measured.records() {
        let mut row: Vec<_> = keys.iter().map(|key| case.get(key).map(plain).unwrap_or_default()).collect();
        row.extend([
            metric.name.clone(),
            metric.unit.clone(),
            number(metric.value),
            number(metric.spread),
            metric.n.to_string(),
            metric.note.clone().unwrap_or_default(),
        ]);
        rows.push(row);
    }
    for row in rows {
        writer.write_record(&row).expect("a row in memory has the header's length");
    }
    let bytes = writer.into_inner().expect("memory does not fail to flush");
    String::from_utf8(bytes).expect("every field is a string")
}
