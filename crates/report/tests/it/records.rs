//! Records on disk: what is written is what is read, and what a person reads when that fails.

use std::path::Path;

use crate::fixed_records::{record, rounds, swiglu};
use expect_test::expect;
use report::{Case, Metric, Record, RecordWriter, read_records};
use serde_json::json;

#[test]
fn what_is_appended_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    for record in swiglu() {
        // Opened anew for each: appending never loses what is there.
        RecordWriter::append(&path).unwrap().write(&record).unwrap();
    }
    assert_eq!(read_records(&path).unwrap(), swiglu());
    let keys: Vec<_> = read_records(&path).unwrap()[0].case.0.keys().cloned().collect();
    assert_eq!(keys, ["batch", "level"], "the order of the keys is kept");
}

#[test]
fn a_value_that_is_no_number_reads_as_not_measured() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    let nan = record("e", Case::new(), Metric::exact("m", "s", f64::NAN));
    RecordWriter::append(&path).unwrap().write(&nan).unwrap();
    assert_eq!(read_records(&path).unwrap()[0].metric.value, None);
}

#[test]
fn a_line_is_readable_by_other_programs() {
    let one = Record { case: Case::new().with("batch", 8).with("level", "SaveAll"), ..swiglu().remove(0) };
    expect![[r#"{"experiment":"swiglu","case":{"batch":8,"level":"SaveAll"},"metric":{"name":"backward_seconds","unit":"s","value":0.102,"spread":0.000999999999999994,"n":3},"environment":{"device":"cpu","cpu":"Test CPU","threads":2,"memory_bytes":8589934592,"torch":"2.11.0","revision":"abc1234","unix_time":1795248000}}"#]]
    .assert_eq(&serde_json::to_string(&one).unwrap());
}

#[test]
fn a_line_that_is_no_record_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    let line = serde_json::to_string(&swiglu()[0]).unwrap();
    let message = |text: String| {
        std::fs::write(&path, text).unwrap();
        let error = read_records(&path).unwrap_err().to_string();
        error.replace(&format!("{}/", folder.path().display()), "")
    };
    expect!["records.jsonl:3: not a record: expected value at line 1 column 1; remove the line, or run the experiment again"].assert_eq(&message(format!("{line}\n\nhello\n")));
    expect!["records.jsonl:2: not a record: EOF while parsing an object at line 1 column 40; remove the line, or run the experiment again"].assert_eq(&message(format!("{line}\n{}", &line[..40])));
    std::fs::write(&path, [0xff, 0xfe, b'\n']).unwrap();
    assert!(read_records(&path).is_err(), "bytes that are no text");
}

#[test]
fn a_torn_last_line_does_not_spoil_the_next_record() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    let line = serde_json::to_string(&swiglu()[0]).unwrap();
    std::fs::write(&path, format!("{line}\n{}", &line[..40])).unwrap();
    RecordWriter::append(&path).unwrap().write(&swiglu()[1]).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 3);
    assert_eq!(serde_json::from_str::<Record>(text.lines().last().unwrap()).unwrap(), swiglu()[1]);
}

#[test]
fn a_path_that_cannot_be_written() {
    let error = RecordWriter::append(Path::new("/nonexistent/records.jsonl")).unwrap_err();
    expect![[r#"cannot open the records file /nonexistent/records.jsonl: No such file or directory (os error 2); give --records a path in a folder that you may write"#]]
    .assert_eq(&error.to_string());
}

#[test]
fn cases_match_by_value() {
    let case = Case::new().with("batch", 8).with("ratio", 0.5).with("level", "SaveAll").with("fused", true);
    for (filter, expected) in [
        (json!({}), true),
        (json!({"batch": 8}), true),
        (json!({"batch": 8.0}), true),
        (json!({"batch": "8"}), false),
        (json!({"batch": 9}), false),
        (json!({"level": "SaveAll", "fused": true}), true),
        (json!({"level": "saveall"}), false),
        (json!({"missing": null}), false),
    ] {
        let filter = Case(filter.as_object().unwrap().clone());
        assert_eq!(case.matches(&filter), expected, "{filter:?}");
    }
}

#[test]
fn an_environment_that_is_left_out_is_that_of_the_line_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("records.jsonl");
    let mut records = [swiglu(), rounds()].concat();
    let later = records.len() / 2;
    records[later..].iter_mut().for_each(|record| record.environment.unix_time += 1);
    let lines = report::record::lines(&records);
    assert_eq!(lines.matches("\"environment\"").count(), 2, "{lines}");
    std::fs::write(&path, &lines).unwrap();
    assert_eq!(read_records(&path).unwrap(), records);
    // The first line has none before it.
    std::fs::write(&path, lines.lines().nth(1).unwrap()).unwrap();
    let error = read_records(&path).unwrap_err().to_string();
    assert!(error.contains(":1: not a record: missing field `environment`"), "{error}");
}
