//! Spans of time as SVG.

use crate::fixed_records::record;
use expect_test::expect;
use report::{Case, Measurements, Metric, Record, plot, spec};

fn span(method: &str, lane: &str, what: &str, index: u64, times: [f64; 2]) -> [Record; 2] {
    let case = Case::new().with("method", method).with("lane", lane).with("what", what).with("index", index);
    let [start, end] = times;
    [
        record("e", case.clone(), Metric::exact("start", "s", start)),
        record("e", case, Metric::exact("end", "s", end)),
    ]
}

fn timeline(fields: &str) -> spec::Plot {
    let required = "name = 'p'\ntitle = 'P'\nkind = 'timeline'\nx = 'start'\nend = 'end'\ny = 'lane'";
    toml::from_str(&format!("{required}\n{fields}")).unwrap()
}

/// A drawing without the style that all drawings share.
fn body(svg: &str) -> String {
    let (head, rest) = svg.split_once("<style>").unwrap();
    format!("{head}{}", rest.split_once("</style>\n").unwrap().1)
}

#[test]
fn lanes_are_rows_and_spans_are_bars_on_one_axis() {
    let records = [
        span("simple", "compute", "forward", 0, [0.02, 0.05]),
        span("simple", "load", "weights", 0, [0.0, 0.02]),
        span("simple", "load", "weights", 1, [0.05, 0.07]),
        span("overlap", "compute", "forward", 0, [0.02, 0.05]),
        span("overlap", "load", "weights", 1, [0.02, 0.04]),
    ]
    .concat();
    let spec = timeline("series = 'what'\nlabel = 'index'\nfacet = ['method']");
    let svg = plot::draw(&spec, &Measurements::from_records(&records)).unwrap();
    expect![[r#"
        <svg xmlns="http://www.w3.org/2000/svg" class="frugal-plot" viewBox="0 0 960 250" width="960" height="250" role="img" aria-label="P">
        <style>.frugal-plot text.inside{fill:#fff;font-size:10px}@media screen and (prefers-color-scheme:dark){.frugal-plot text.inside{fill:#15181c}}</style>
        <rect class="f0" x="8" y="6.5" width="11" height="11"><title>forward</title></rect>
        <text x="24" y="16">forward</text>
        <rect class="f1" x="90.2" y="6.5" width="11" height="11"><title>weights</title></rect>
        <text x="106.2" y="16">weights</text>
        <text class="head" x="8" y="42">simple</text>
        <line class="grid" x1="71.8" y1="50" x2="71.8" y2="102"/>
        <text class="soft" text-anchor="middle" x="71.8" y="118">0</text>
        <line class="grid" x1="189.3" y1="50" x2="189.3" y2="102"/>
        <text class="soft" text-anchor="middle" x="189.3" y="118">10</text>
        <line class="grid" x1="306.9" y1="50" x2="306.9" y2="102"/>
        <text class="soft" text-anchor="middle" x="306.9" y="118">20</text>
        <line class="grid" x1="424.4" y1="50" x2="424.4" y2="102"/>
        <text class="soft" text-anchor="middle" x="424.4" y="118">30</text>
        <line class="grid" x1="542" y1="50" x2="542" y2="102"/>
        <text class="soft" text-anchor="middle" x="542" y="118">40</text>
        <line class="grid" x1="659.5" y1="50" x2="659.5" y2="102"/>
        <text class="soft" text-anchor="middle" x="659.5" y="118">50</text>
        <line class="grid" x1="777.1" y1="50" x2="777.1" y2="102"/>
        <text class="soft" text-anchor="middle" x="777.1" y="118">60</text>
        <line class="grid" x1="894.6" y1="50" x2="894.6" y2="102"/>
        <text class="soft" text-anchor="middle" x="894.6" y="118">70</text>
        <text text-anchor="end" x="63.8" y="67">compute</text>
        <rect class="f0" x="306.9" y="53" width="351.7" height="20"><title>simple, compute, forward, index 0: 20.0 ms to 50.0 ms, 30.0 ms</title></rect>
        <text class="inside" text-anchor="middle" x="482.7" y="66.5">0</text>
        <text text-anchor="end" x="63.8" y="93">load</text>
        <rect class="f1" x="71.8" y="79" width="234.1" height="20"><title>simple, load, weights, index 0: 0 s to 20.0 ms, 20.0 ms</title></rect>
        <text class="inside" text-anchor="middle" x="188.8" y="92.5">0</text>
        <rect class="f1" x="659.5" y="79" width="234.1" height="20"><title>simple, load, weights, index 1: 50.0 ms to 70.0 ms, 20.0 ms</title></rect>
        <text class="inside" text-anchor="middle" x="776.6" y="92.5">1</text>
        <line class="base" x1="71.8" y1="50" x2="71.8" y2="102"/>
        <text class="head" x="8" y="142">overlap</text>
        <line class="grid" x1="71.8" y1="150" x2="71.8" y2="202"/>
        <text class="soft" text-anchor="middle" x="71.8" y="218">0</text>
        <line class="grid" x1="189.3" y1="150" x2="189.3" y2="202"/>
        <text class="soft" text-anchor="middle" x="189.3" y="218">10</text>
        <line class="grid" x1="306.9" y1="150" x2="306.9" y2="202"/>
        <text class="soft" text-anchor="middle" x="306.9" y="218">20</text>
        <line class="grid" x1="424.4" y1="150" x2="424.4" y2="202"/>
        <text class="soft" text-anchor="middle" x="424.4" y="218">30</text>
        <line class="grid" x1="542" y1="150" x2="542" y2="202"/>
        <text class="soft" text-anchor="middle" x="542" y="218">40</text>
        <line class="grid" x1="659.5" y1="150" x2="659.5" y2="202"/>
        <text class="soft" text-anchor="middle" x="659.5" y="218">50</text>
        <line class="grid" x1="777.1" y1="150" x2="777.1" y2="202"/>
        <text class="soft" text-anchor="middle" x="777.1" y="218">60</text>
        <line class="grid" x1="894.6" y1="150" x2="894.6" y2="202"/>
        <text class="soft" text-anchor="middle" x="894.6" y="218">70</text>
        <text text-anchor="end" x="63.8" y="167">compute</text>
        <rect class="f0" x="306.9" y="153" width="351.7" height="20"><title>overlap, compute, forward, index 0: 20.0 ms to 50.0 ms, 30.0 ms</title></rect>
        <text class="inside" text-anchor="middle" x="482.7" y="166.5">0</text>
        <text text-anchor="end" x="63.8" y="193">load</text>
        <rect class="f1" x="306.9" y="179" width="234.1" height="20"><title>overlap, load, weights, index 1: 20.0 ms to 40.0 ms, 20.0 ms</title></rect>
        <text class="inside" text-anchor="middle" x="423.9" y="192.5">1</text>
        <line class="base" x1="71.8" y1="150" x2="71.8" y2="202"/>
        <text text-anchor="end" x="944" y="240">time (ms)</text>
        </svg>
    "#]].assert_eq(&body(&svg));
    assert_eq!(Some(svg), plot::draw(&spec, &Measurements::from_records(&records)), "the same bytes");
}

#[test]
fn hundreds_of_spans_are_a_bar_each_and_the_shortest_is_seen() {
    let mut records = Vec::new();
    for index in 0..400u64 {
        let start = index as f64 * 1e-3;
        records.extend(span("m", "compute", &format!("layer {}", index % 28), index, [start, start + 1e-9]));
    }
    let svg = plot::draw(&timeline("series = 'what'"), &Measurements::from_records(&records)).unwrap();
    assert_eq!(svg.matches("<rect").count(), 400, "28 layers have no legend");
    assert_eq!(svg.matches("width=\"0.6\"").count(), 400);
    let within = |rect: &str| {
        let x: f64 = rect.split("x=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap();
        (0.0..960.0).contains(&x)
    };
    assert!(svg.split("<rect").skip(1).all(within));
}

#[test]
fn what_has_no_start_no_end_or_no_lane_is_no_span() {
    let whole = span("m", "load", "weights", 0, [0.0, 1.0]);
    let [start, _] = span("m", "load", "weights", 1, [1.0, 2.0]);
    let [_, end] = span("m", "load", "weights", 2, [1.0, 2.0]);
    let nowhere = record("e", Case::new().with("method", "m"), Metric::exact("start", "s", 1.0));
    let missing =
        record("e", whole[0].case.clone().with("index", 3), Metric::not_measured("start", "s", "no events"));
    let mut records = whole.to_vec();
    let alone = plot::draw(&timeline(""), &Measurements::from_records(&records)).unwrap();
    records.extend([start, end, nowhere, missing]);
    assert_eq!(plot::draw(&timeline(""), &Measurements::from_records(&records)), Some(alone));
    assert_eq!(plot::draw(&timeline(""), &Measurements::from_records(&records[2..])), None);
    assert_eq!(plot::draw(&timeline(""), &Measurements::from_records(&[])), None);
}

#[test]
fn odd_times_draw() {
    for times in [
        [0.0, 0.0],
        [2.0, 1.0],
        [-1.0, 1.0],
        [f64::NAN, 1.0],
        [0.0, f64::INFINITY],
        [5e-324, 1e299],
        [-1e299, 1e299],
    ] {
        let records = span("m", "<lane & \"lane\">", "a\u{1}b", 0, times);
        let spec = timeline("label = 'what'\nseries = 'what'");
        let svg = plot::draw(&spec, &Measurements::from_records(&records)).unwrap_or_default();
        assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("<lane"), "{times:?}: {svg}");
        assert!(!svg.contains("width=\"-"), "{times:?}: {svg}");
    }
}

#[test]
fn a_timeline_is_a_trace_too() {
    let spans = [
        span("overlap", "load", "weights", 0, [0.0, 0.01]),
        span("overlap", "compute", "forward", 0, [0.02, 0.05]),
    ];
    let records: Vec<_> = spans.into_iter().flatten().collect();
    let measured = Measurements::from_records(&records);
    let text = plot::trace(
        &timeline("trace = true\nseries = 'what'\nlabel = 'index'\nfacet = ['method']"),
        &measured,
    )
    .unwrap();
    let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let names: Vec<_> =
        events.iter().filter(|event| event["ph"] == "M").map(|event| event["args"]["name"].clone()).collect();
    assert_eq!(names, ["overlap", "load", "compute"]);
    let last = events.last().unwrap();
    assert_eq!((last["name"].as_str(), last["tid"].as_u64()), (Some("forward 0"), Some(1)));
    assert!(
        (last["ts"].as_f64().unwrap() - 2e4).abs() < 1e-6
            && (last["dur"].as_f64().unwrap() - 3e4).abs() < 1e-6
    );
    assert_eq!(plot::trace(&timeline(""), &measured), None, "only where it is asked for");
}
