//! `experiments accounting experiment`: the report's sections about accounting.

#[test]
fn an_experiment_appends_the_records_of_every_section() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    let mut program = crate::program("accounting");
    let output = program.args(["experiment", "--scale", "paper", "--records"]).arg(&path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let records = report::read_records(&path).unwrap();
    let mut names: Vec<_> = records.iter().map(|record| record.experiment.as_str()).collect();
    names.dedup();
    assert_eq!(
        names,
        [
            "accounting-published",
            "accounting-dtypes",
            "accounting-flops",
            "accounting-estimate",
            "accounting-fit",
            "accounting-time",
            "long-context",
            "offload-condition",
            "accounting-scale",
            "accounting-sequence"
        ]
    );
    let off = records.iter().filter(|record| record.metric.name == "error_in_half_units");
    let worst = off.map(|record| record.metric.value.unwrap()).fold(0.0, f64::max);
    assert!(worst <= 1.0, "a published figure is missed by {worst} half units");
}

#[test]
fn every_cell_of_the_lecture_gives_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    let mut program = crate::program("accounting");
    let output = program.args(["lecture", "--scale", "smoke", "--records"]).arg(&path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let records = report::read_records(&path).unwrap();
    let records_of =
        |name: &str| records.iter().filter(|record| record.metric.name == name).collect::<Vec<_>>();
    let wrong: Vec<String> = records_of("agrees")
        .into_iter()
        .filter(|record| record.metric.value != Some(1.0))
        .map(|record| record.case.describe())
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let parts: std::collections::BTreeSet<_> =
        records_of("found").into_iter().filter_map(|record| record.case.get("part")?.as_str()).collect();
    assert_eq!(parts.len(), 17, "{parts:?}");
    assert!(records_of("agrees").len() >= 60, "{}", records_of("agrees").len());
}
