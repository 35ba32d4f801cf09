//! Fixed records as CSV, Markdown, sentences, ratios and SVG.

use crate::fixed_records::{record, rounds, specs, swiglu};
use expect_test::expect;
use report::table::Table;
use report::{Case, Measurements, Metric, comparison, finding, markdown, plot, spec, tidy_csv};

fn measured() -> Measurements {
    Measurements::select(&specs(), "swiglu", &swiglu())
}

fn shown(spec: &spec::Table, measured: &Measurements) -> String {
    Table::build(spec, measured).map_or_else(|| "no table".into(), |table| markdown::table(&table))
}

#[test]
fn csv_is_tidy() {
    expect![[r#"
        batch,level,metric,unit,value,spread,n,note
        1,SaveAll,backward_seconds,s,0.102,0.000999999999999994,3,
        1,SaveAll,peak_bytes,B,419430400,,1,
        1,InputOnly,backward_seconds,s,0.128,0.0012500000000000011,3,
        1,InputOnly,peak_bytes,B,262144000,,1,
        8,SaveAll,backward_seconds,s,,,0,needs 12 GiB
        8,SaveAll,peak_bytes,B,,,0,needs 12 GiB
        8,InputOnly,backward_seconds,s,1,0.004999999999999949,3,
        8,InputOnly,peak_bytes,B,1610612736,,1,
    "#]]
    .assert_eq(&tidy_csv::write(&swiglu()));
}

#[test]
fn csv_quotes_what_csv_gives_a_meaning() {
    let case = Case::new().with("name", "a,\"b\"\nc");
    let text = tidy_csv::write(&[record("e", case, Metric::exact("m", "", 1e300))]);
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let row = reader.records().next().unwrap().unwrap();
    assert_eq!(&row[0], "a,\"b\"\nc");
    assert_eq!(row[3].parse::<f64>(), Ok(1e300));
}

#[test]
fn a_table_has_one_unit_per_column_and_says_what_was_not_measured() {
    expect![[r#"
        | batch | level     |    backward (ms) |       peak (MiB) |
        | ----: | --------- | ---------------: | ---------------: |
        |     1 | SaveAll   |          102 ± 1 |              400 |
        |     1 | InputOnly |          128 ± 1 |              250 |
        |     8 | SaveAll   | not measured [a] | not measured [a] |
        |     8 | InputOnly |        1,000 ± 5 |            1,536 |

        - [a] needs 12 GiB
    "#]]
    .assert_eq(&shown(&specs().experiments[0].tables[0], &measured()));
}

#[test]
fn a_pivot_makes_columns_of_a_keys_values() {
    let spec = spec::Table {
        title: "t".into(),
        rows: vec!["batch".into()],
        columns: vec!["peak_bytes".into()],
        pivot: Some("level".into()),
        ..spec::Table::default()
    };
    expect![[r#"
        | batch |    SaveAll (MiB) | InputOnly (MiB) |
        | ----: | ---------------: | --------------: |
        |     1 |              400 |             250 |
        |     8 | not measured [a] |           1,536 |

        - [a] needs 12 GiB
    "#]]
    .assert_eq(&shown(&spec, &measured()));
}

#[test]
fn a_table_that_names_nothing_shows_everything() {
    let everything = spec::Table::default();
    let named = &specs().experiments[0].tables[0];
    assert_eq!(shown(&everything, &measured()), shown(named, &measured()));
}

#[test]
fn a_cell_never_picks_one_of_several_cases() {
    let spec = spec::Table { rows: vec!["batch".into()], ..spec::Table::default() };
    expect![[r#"
        | batch | backward (ms) |   peak (MiB) |
        | ----: | ------------: | -----------: |
        |     1 |  2 values [a] | 2 values [a] |
        |     8 |  2 values [a] | 2 values [a] |

        - [a] several cases share this cell; add a key that distinguishes them to `rows`
    "#]]
    .assert_eq(&shown(&spec, &measured()));
}

#[test]
fn a_table_without_records_is_left_out() {
    let filter = report::Filter(Case::new().with("batch", 99));
    assert_eq!(shown(&spec::Table { filter, ..spec::Table::default() }, &measured()), "no table");
    assert_eq!(
        shown(&spec::Table { columns: vec!["nope".into()], ..spec::Table::default() }, &measured()),
        "no table"
    );
}

#[test]
fn values_far_apart_carry_their_own_units() {
    let bytes = |size: u64, bytes: f64| {
        record("e", Case::new().with("size", size), Metric::exact("held_bytes", "B", bytes))
    };
    let measured = Measurements::from_records(&[bytes(1, 16.0), bytes(2, 5e9), bytes(3, 0.0)]);
    expect![[r#"
        | size |     held |
        | ---: | -------: |
        |    1 |     16 B |
        |    2 | 4.66 GiB |
        |    3 |      0 B |
    "#]]
    .assert_eq(&shown(&spec::Table::default(), &measured));
}

#[test]
fn the_newest_record_of_a_measurement_wins_whatever_its_place() {
    let at = |time: u64, value: f64| {
        let mut one = record("e", Case::new().with("batch", 8), Metric::exact("m", "", value));
        one.environment.unix_time = time;
        one
    };
    let value = |records: &[report::Record]| report::measurements::newest(records)[0].metric.value;
    assert_eq!(value(&[at(1, 10.0), at(2, 20.0)]), Some(20.0));
    assert_eq!(value(&[at(2, 20.0), at(1, 10.0)]), Some(20.0));
    assert_eq!(value(&[at(2, 10.0), at(2, 20.0)]), Some(20.0), "of two equally new, the later line");
    let float = record("e", Case::new().with("batch", 8.0), Metric::exact("m", "", 30.0));
    assert_eq!(report::measurements::newest(&[at(1, 10.0), float]).len(), 1, "8 and 8.0 are one case");
}

#[test]
fn findings_are_computed_per_group() {
    let sentences = finding::sentences(&specs().experiments[0].findings[0], &measured());
    expect![[r#"
        batch 1: InputOnly needs 37.5 % less memory for 25.5 % more time, 250 MiB against 400 MiB (0.625)
        batch 8: not measured (needs 12 GiB)"#]]
    .assert_eq(&sentences.join("\n"));
}

fn sentence(fields: &str) -> String {
    let finding: spec::Finding = toml::from_str(fields).unwrap();
    finding::sentences(&finding, &measured()).join("\n")
}

#[test]
fn findings_say_when_they_cannot_be_computed() {
    expect!["not measured (no record)"]
        .assert_eq(&sentence("of = { level = 'nope' }\ntext = '{of:peak_bytes}'"));
    expect!["not measured (4 records of peak_bytes match; add a key that distinguishes them)"]
        .assert_eq(&sentence("of = { batch = [1, 8] }\ntext = '{of:peak_bytes}'"));
    expect!["batch 1: not measured (no record of nope)"]
        .assert_eq(&sentence("per = ['batch']\nof = { batch = 1, level = 'SaveAll' }\ntext = '{of:nope}'"));
}

#[test]
fn a_finding_measures_every_level_against_one_baseline() {
    let text = sentence(
        "per = ['level']\nof = { batch = 1 }\nagainst = { batch = 1, level = 'SaveAll' }\n\
         text = '{{{level}}} takes {more:backward_seconds} time'",
    );
    expect!["{InputOnly} takes 25.5 % more time"].assert_eq(&text);
}

#[test]
fn a_change_within_the_spread_is_called_so() {
    let seconds = |level: &str, samples: &[f64]| {
        record("e", Case::new().with("level", level), Metric::of_samples("step_seconds", "s", samples))
    };
    let measured =
        Measurements::from_records(&[seconds("a", &[1.0, 1.1, 1.2]), seconds("b", &[1.0, 1.12, 1.2])]);
    let finding: spec::Finding =
        toml::from_str("of = { level = 'b' }\nagainst = { level = 'a' }\ntext = '{more:step_seconds} time'")
            .unwrap();
    expect!["neither more nor less time (undecided by the 95 % interval: step)"]
        .assert_eq(&finding::sentences(&finding, &measured).join("\n"));
}

#[test]
fn a_ratio_is_taken_within_each_round() {
    let specs = specs();
    let ratios = comparison::ratios(&specs.comparisons[0], &rounds());
    // Across rounds the times differ threefold; within each round the ratio is the same.
    assert_eq!(ratios.len(), 1);
    let metric = &ratios[0].metric;
    assert!((metric.value.unwrap() - 0.95).abs() < 1e-12 && metric.spread.unwrap() < 1e-12, "{metric:?}");
    assert_eq!((metric.n, metric.unit.as_str(), metric.name.as_str()), (3, "ratio", "step_time_ratio"));
    assert_eq!(ratios[0].case, Case::new().with("batch", 8).with("impl", "frugal"));
}

#[test]
fn a_ratio_says_why_it_is_missing() {
    let why = |keep: &dyn Fn(&report::Record) -> bool| {
        let records: Vec<_> = rounds().into_iter().filter(|r| keep(r)).collect();
        let ratios = comparison::ratios(&specs().comparisons[0], &records);
        (ratios[0].metric.n, ratios[0].metric.note.clone().unwrap_or_default())
    };
    let theirs = |r: &report::Record| r.case.get("impl").unwrap() == "pytorch";
    let first = |r: &report::Record| r.case.get("round").unwrap() == 0;
    assert_eq!(why(&|r| !theirs(r)), (0, "no record of step_seconds to divide by".into()));
    let left_out = "against PyTorch 2.11.0; a round is excluded: no record of step_seconds to divide by";
    assert_eq!(why(&|r| !(theirs(r) && first(r))), (2, left_out.into()));
}

#[test]
fn a_ratio_says_which_pytorch_it_is_against() {
    let check = |ours: Option<&str>, theirs: Option<&str>, expected: Option<&str>| {
        let mut records = rounds();
        for record in &mut records {
            let version = if record.case.get("impl").unwrap() == "frugal" { ours } else { theirs };
            record.environment.torch = version.map(str::to_owned);
        }
        let ratios = comparison::ratios(&specs().comparisons[0], &records);
        assert_eq!(ratios[0].metric.note.as_deref(), expected);
    };
    check(Some("2.11.0"), Some("2.11.0"), Some("against PyTorch 2.11.0"));
    check(Some("2.11.0"), Some("2.15.0"), Some("against PyTorch 2.15.0; ours links libtorch 2.11.0"));
    check(None, Some("2.15.0"), Some("against PyTorch 2.15.0"));
    check(Some("2.11.0"), None, None);
    // If both cases are ours there is no PyTorch to name.
    let mut specs = specs();
    specs.comparisons[0].ratios[0].theirs = report::Filter(Case::new().with("impl", "frugal"));
    let ratios = comparison::ratios(&specs.comparisons[0], &rounds());
    assert_eq!((ratios[0].metric.value, ratios[0].metric.note.as_deref()), (Some(1.0), None));
}

#[test]
fn one_sample_has_no_spread_to_show() {
    let measured = |samples: &[f64]| {
        let metric = Metric::of_samples("step_seconds", "s", samples);
        Measurements::from_records(&[record("e", Case::new().with("batch", 1), metric)])
    };
    assert!(!shown(&spec::Table::default(), &measured(&[2.0])).contains('±'));
    assert!(shown(&spec::Table::default(), &measured(&[2.0, 3.0])).contains("2.50 ± 0.25"));
}

#[test]
fn a_scatter_with_its_pareto_front() {
    expect![[r#"
        <svg xmlns="http://www.w3.org/2000/svg" class="frugal-plot" viewBox="0 0 960 404" width="960" height="404" role="img" aria-label="Time against memory">
        <path class="mark f0" d="M9.5 12a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z"></path>
        <text x="24" y="16">SaveAll</text>
        <path class="mark f1" d="M91.2 8L99.2 8L99.2 16L91.2 16z"></path>
        <text x="105.2" y="16">InputOnly</text>
        <polyline class="front" points="186.4,12 208.4,12"/>
        <text x="214.4" y="16">Pareto front (its points are filled)</text>
        <line class="grid" x1="37" y1="348" x2="938" y2="348"/>
        <text class="soft" text-anchor="end" x="31" y="352">0.0</text>
        <line class="grid" x1="37" y1="292.5" x2="938" y2="292.5"/>
        <text class="soft" text-anchor="end" x="31" y="296.5">0.2</text>
        <line class="grid" x1="37" y1="237.1" x2="938" y2="237.1"/>
        <text class="soft" text-anchor="end" x="31" y="241.1">0.4</text>
        <line class="grid" x1="37" y1="181.6" x2="938" y2="181.6"/>
        <text class="soft" text-anchor="end" x="31" y="185.6">0.6</text>
        <line class="grid" x1="37" y1="126.1" x2="938" y2="126.1"/>
        <text class="soft" text-anchor="end" x="31" y="130.1">0.8</text>
        <line class="grid" x1="37" y1="70.6" x2="938" y2="70.6"/>
        <text class="soft" text-anchor="end" x="31" y="74.6">1.0</text>
        <line class="grid" x1="37" y1="54" x2="37" y2="348"/>
        <text class="soft" text-anchor="middle" x="37" y="365">0.0</text>
        <line class="grid" x1="150.3" y1="54" x2="150.3" y2="348"/>
        <text class="soft" text-anchor="middle" x="150.3" y="365">0.2</text>
        <line class="grid" x1="263.6" y1="54" x2="263.6" y2="348"/>
        <text class="soft" text-anchor="middle" x="263.6" y="365">0.4</text>
        <line class="grid" x1="377" y1="54" x2="377" y2="348"/>
        <text class="soft" text-anchor="middle" x="377" y="365">0.6</text>
        <line class="grid" x1="490.3" y1="54" x2="490.3" y2="348"/>
        <text class="soft" text-anchor="middle" x="490.3" y="365">0.8</text>
        <line class="grid" x1="603.7" y1="54" x2="603.7" y2="348"/>
        <text class="soft" text-anchor="middle" x="603.7" y="365">1.0</text>
        <line class="grid" x1="717" y1="54" x2="717" y2="348"/>
        <text class="soft" text-anchor="middle" x="717" y="365">1.2</text>
        <line class="grid" x1="830.3" y1="54" x2="830.3" y2="348"/>
        <text class="soft" text-anchor="middle" x="830.3" y="365">1.4</text>
        <line class="base" x1="37" y1="348" x2="938" y2="348"/>
        <text x="8" y="42">backward (s)</text>
        <text text-anchor="end" x="938" y="383">peak (GiB)</text>
        <polyline class="front" points="175.3,312.5 258.3,319.7"/>
        <path class="mark f0" d="M253.8 319.7a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z"><title>batch 1, SaveAll: peak 400 MiB, backward 102 ms</title></path>
        <path class="mark f1" d="M171.3 308.5L179.3 308.5L179.3 316.5L171.3 316.5z"><title>batch 1, InputOnly: peak 250 MiB, backward 128 ms</title></path>
        <path class="mark k1 hollow" d="M883 66.6L891 66.6L891 74.6L883 74.6z"><title>batch 8, InputOnly: peak 1.50 GiB, backward 1 s</title></path>
        </svg>
    "#]].assert_eq(&body(&plot::draw(&specs().experiments[0].plots[0], &measured()).unwrap()));
}

#[test]
fn a_stacked_bar() {
    let parts = |model: &str, parameters: f64, gradients: f64| {
        let case = Case::new().with("model", model);
        [
            record("e", case.clone(), Metric::exact("parameter_bytes", "B", parameters)),
            record("e", case, Metric::exact("gradient_bytes", "B", gradients)),
        ]
    };
    let measured = Measurements::from_records(
        &[parts("small", 1024.0, 2048.0), parts("large", 4096.0, 8192.0)].concat(),
    );
    let spec: spec::Plot = toml::from_str(
        "name = 'p'\ntitle = 'P'\nkind = 'stacked-bar'\nx = 'model'\nstack = ['parameter_bytes', 'gradient_bytes']",
    )
    .unwrap();
    expect![[r#"
        <svg xmlns="http://www.w3.org/2000/svg" class="frugal-plot" viewBox="0 0 960 132" width="960" height="132" role="img" aria-label="P">
        <rect class="f0" x="8" y="6.5" width="11" height="11"><title>parameter</title></rect>
        <text x="24" y="16">parameter</text>
        <rect class="f1" x="105.4" y="6.5" width="11" height="11"><title>gradient</title></rect>
        <text x="121.4" y="16">gradient</text>
        <line class="grid" x1="52" y1="30" x2="52" y2="82"/>
        <text class="soft" text-anchor="middle" x="52" y="98">0</text>
        <line class="grid" x1="181.5" y1="30" x2="181.5" y2="82"/>
        <text class="soft" text-anchor="middle" x="181.5" y="98">2</text>
        <line class="grid" x1="311.1" y1="30" x2="311.1" y2="82"/>
        <text class="soft" text-anchor="middle" x="311.1" y="98">4</text>
        <line class="grid" x1="440.7" y1="30" x2="440.7" y2="82"/>
        <text class="soft" text-anchor="middle" x="440.7" y="98">6</text>
        <line class="grid" x1="570.2" y1="30" x2="570.2" y2="82"/>
        <text class="soft" text-anchor="middle" x="570.2" y="98">8</text>
        <line class="grid" x1="699.8" y1="30" x2="699.8" y2="82"/>
        <text class="soft" text-anchor="middle" x="699.8" y="98">10</text>
        <line class="grid" x1="829.4" y1="30" x2="829.4" y2="82"/>
        <text class="soft" text-anchor="middle" x="829.4" y="98">12</text>
        <text text-anchor="end" x="876" y="115">total (KiB)</text>
        <text text-anchor="end" x="44" y="47">small</text>
        <rect class="f0" x="52" y="34" width="64.8" height="18"><title>small: parameter 1.00 KiB</title></rect>
        <rect class="f1" x="116.7" y="34" width="129.6" height="18"><title>small: gradient 2.00 KiB</title></rect>
        <text class="soft" x="252.3" y="47">3.00</text>
        <text text-anchor="end" x="44" y="73">large</text>
        <rect class="f0" x="52" y="60" width="259.1" height="18"><title>large: parameter 4.00 KiB</title></rect>
        <rect class="f1" x="311.1" y="60" width="518.3" height="18"><title>large: gradient 8.00 KiB</title></rect>
        <text class="soft" x="835.4" y="73">12.00</text>
        <line class="base" x1="52" y1="30" x2="52" y2="82"/>
        </svg>
    "#]].assert_eq(&body(&plot::draw(&spec, &measured).unwrap()));
}

/// A drawing without the style that all drawings share.
fn body(svg: &str) -> String {
    let (head, rest) = svg.split_once("<style>").unwrap();
    format!("{head}{}", rest.split_once("</style>\n").unwrap().1)
}

#[test]
fn a_plot_without_records_is_left_out_and_odd_values_draw() {
    let plot = |fields: &str| -> spec::Plot {
        toml::from_str(&format!("name = 'p'\ntitle = 'P'\n{fields}")).unwrap()
    };
    assert_eq!(plot::draw(&plot("kind = 'line'\nx = 'nope'\ny = 'peak_bytes'"), &measured()), None);
    assert_eq!(plot::draw(&plot("kind = 'bar'\nx = 'level'\ny = 'nope'"), &measured()), None);
    for values in [
        vec![0.0],
        vec![-1.0, 1.0],
        vec![f64::INFINITY, 1.0],
        vec![f64::NAN],
        vec![1e300, -1e300],
        vec![5e-324, 1e-320],
        vec![1e308, -1e308, f64::MAX, f64::MIN],
        vec![7.0; 3],
        vec![1e-9, 1e9],
    ] {
        let records: Vec<_> = values
            .iter()
            .enumerate()
            .map(|(i, v)| record("e", Case::new().with("i", i).with("s", "t"), Metric::exact("m", "s", *v)))
            .collect();
        let measured = Measurements::from_records(&records);
        for kind in ["line", "scatter", "bar"] {
            for log in ["", "\nlog_x = true\nlog_y = true"] {
                if kind == "bar" && !log.is_empty() {
                    continue;
                }
                let svg = plot::draw(&plot(&format!("kind = '{kind}'\nx = 'i'\ny = 'm'{log}")), &measured);
                let svg = svg.unwrap_or_default();
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{kind}{log} of {values:?}: {svg}");
            }
        }
    }
}
