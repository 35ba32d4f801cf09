//! Figures that a table or a plot would hide: tiny numbers, series without words, stacks without values.

use expect_test::expect;
use report::table::Table;
use report::{Case, Measurements, Metric, markdown, plot, spec};

use crate::fixed_records::record;

#[test]
fn what_a_columns_decimals_would_hide_has_an_exponent() {
    let error = |dtype: &str, value: f64, spread: f64| {
        let metric = Metric { spread: Some(spread), n: 3, ..Metric::exact("relative_error", "exact", value) };
        record("e", Case::new().with("dtype", dtype), metric)
    };
    let records = [error("bf16", 3.26e-3, 1e-5), error("fp32", 4.12e-8, 7.87e-10), error("fp64", 0.0, 0.0)];
    let spec = spec::Table { columns: vec!["relative_error".into()], ..spec::Table::default() };
    expect![[r#"
        | dtype |    relative error |
        | ----- | ----------------: |
        | bf16  | 0.00326 ± 0.00001 |
        | fp32  |   4.12e-8 ± 8e-10 |
        | fp64  | 0.00000 ± 0.00000 |
    "#]]
    .assert_eq(&markdown::table(&Table::build(&spec, &Measurements::from_records(&records)).unwrap()));
}

#[test]
fn a_legend_names_the_key_of_a_number() {
    let one = |level: u64, bytes: f64| {
        let case = Case::new().with("level", level);
        let seconds = record("e", case.clone(), Metric::exact("step_seconds", "s", 1.0));
        [record("e", case, Metric::exact("peak_bytes", "B", bytes)), seconds]
    };
    let records: Vec<_> = [one(0, 2048.0), one(1, 1024.0)].concat();
    let spec: spec::Plot = toml::from_str(
        "name = 'p'\ntitle = 'P'\nkind = 'scatter'\nx = 'peak_bytes'\ny = 'step_seconds'\nseries = 'level'",
    )
    .unwrap();
    let svg = plot::draw(&spec, &Measurements::from_records(&records)).unwrap();
    assert!(svg.contains(">level 0<") && svg.contains(">level 1<"), "{svg}");
}

#[test]
fn a_stack_without_a_value_is_not_measured() {
    let case = Case::new().with("model", "small");
    let missing =
        Metric { value: None, note: Some("no GPU".into()), ..Metric::exact("parameter_bytes", "B", 0.0) };
    let spec: spec::Plot = toml::from_str(
        "name = 'p'\ntitle = 'P'\nkind = 'stacked-bar'\nx = 'model'\nstack = ['parameter_bytes']",
    )
    .unwrap();
    let svg = plot::draw(&spec, &Measurements::from_records(&[record("e", case, missing)])).unwrap();
    assert!(svg.contains(">not measured<"), "{svg}");
}
