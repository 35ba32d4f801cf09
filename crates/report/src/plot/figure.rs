//! The data of a plot: panels of points or bars, taken from records.

use serde_json::Value;

use crate::measurements::{Measurements, distinct, plain, words};
use crate::record::{Case, Metric};
use crate::spec::{Plot, PlotKind};
use crate::unit;

/// Points in panels.
pub(super) struct Points {
    pub(super) x: Dimension,
    pub(super) y: Dimension,
    pub(super) series: Vec<String>,
    pub(super) panels: Vec<Panel<Point>>,
}

/// Bars in panels.
pub(super) struct Bars {
    /// The metric's name and unit.
    pub(super) value: Dimension,
    /// The heading of the categories.
    pub(super) series: Vec<String>,
    pub(super) panels: Vec<Panel<Group>>,
}

/// A small multiple, with the values of the facet's keys as its title.
pub(super) struct Panel<T> {
    pub(super) title: String,
    pub(super) items: Vec<T>,
}

/// The quantity of an axis.
pub(super) struct Dimension {
    pub(super) heading: String,
    pub(super) unit: String,
    /// The values of a case key that are not numbers; their places on the axis are 0, 1, 2, …
    pub(super) names: Option<Vec<String>>,
    /// Whether the values are a case key's.
    pub(super) key: bool,
}

pub(super) struct Point {
    pub(super) series: usize,
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) x_spread: f64,
    pub(super) y_spread: f64,
    pub(super) label: Option<String>,
    pub(super) hover: String,
}

/// The bars of one category.
pub(super) struct Group {
    pub(super) name: String,
    /// A bar for each series, in the series' order; `None` without a record.
    pub(super) bars: Vec<Option<Bar>>,
}

pub(super) struct Bar {
    /// `None` where it was not measured.
    pub(super) value: Option<f64>,
    pub(super) spread: f64,
    pub(super) hover: String,
}

pub(super) fn cases<'a>(spec: &Plot, measured: &'a Measurements) -> Vec<&'a Case> {
    measured.cases().filter(|case| spec.filter.matches(case)).collect()
}

/// Splits cases by the facet's keys. A case that lacks one of them is in no panel.
pub(super) fn panels<'a>(spec: &Plot, cases: &[&'a Case]) -> Vec<(String, Vec<&'a Case>)> {
    let facets = distinct(cases.iter().filter_map(|case| case.project(&spec.facet)));
    let of = |facet: &Case| cases.iter().copied().filter(|case| case.matches(facet)).collect();
    facets.iter().map(|facet| (facet.describe(), of(facet))).collect()
}

pub(super) fn series_of(spec: &Plot, case: &Case) -> String {
    spec.series.as_ref().and_then(|key| case.get(key)).map(plain).unwrap_or_default()
}

/// The names of the series in a legend: a number needs its key beside it.
fn titles(spec: &Plot, series: Vec<String>) -> Vec<String> {
    let title = |name: String| match &spec.series {
        Some(key) if name.parse::<f64>().is_ok() => format!("{} {name}", words(key)),
        _ => name,
    };
    series.into_iter().map(title).collect()
}

impl Dimension {
    fn new(name: &str, cases: &[&Case], measured: &Measurements) -> Self {
        let values: Vec<&Value> = cases.iter().filter_map(|case| case.get(name)).collect();
        if values.is_empty() {
            let unit = measured.unit(name).unwrap_or_default().to_owned();
            return Self { heading: unit::heading(name, &unit), unit, names: None, key: false };
        }
        let numbers = values.iter().all(|value| value.as_f64().is_some());
        let names = (!numbers).then(|| distinct(values.into_iter().map(plain)));
        Self { heading: words(name), unit: String::new(), names, key: true }
    }

    /// The value and spread of `name` in `case`.
    fn value(&self, name: &str, case: &Case, measured: &Measurements) -> Option<(f64, f64)> {
        if !self.key {
            let metric = measured.metric(case, name)?;
            let value = metric.value.filter(drawable)?;
            return Some((value, shown_spread(metric)));
        }
        let value = case.get(name)?;
        let place = match &self.names {
            Some(names) => names.iter().position(|have| *have == plain(value))? as f64,
            None => value.as_f64()?,
        };
        Some((place, 0.0))
    }

    fn show(&self, value: f64) -> String {
        match &self.names {
            Some(names) => names.get(value as usize).cloned().unwrap_or_default(),
            None if self.key => value.to_string(),
            None => unit::human(value, &self.unit),
        }
    }
}

/// Whether there is a place for a value on an axis: the ends of f64 leave no room for the axis itself.
pub(super) fn drawable(value: &f64) -> bool {
    value.abs() < 1e300
}

fn shown_spread(metric: &Metric) -> f64 {
    metric.spread.filter(|spread| metric.n > 1 && spread.is_finite()).unwrap_or(0.0)
}

pub(super) fn points(spec: &Plot, measured: &Measurements) -> Option<Points> {
    let cases = cases(spec, measured);
    let x = Dimension::new(&spec.x, &cases, measured);
    let y = Dimension::new(&spec.y, &cases, measured);
    let has_both = |case: &&Case| {
        x.value(&spec.x, case, measured).is_some() && y.value(&spec.y, case, measured).is_some()
    };
    let cases: Vec<_> = cases.into_iter().filter(has_both).collect();
    let series = distinct(cases.iter().map(|case| series_of(spec, case)));
    let point = |case: &Case| {
        let ((px, x_spread), (py, y_spread)) =
            (x.value(&spec.x, case, measured)?, y.value(&spec.y, case, measured)?);
        let name = series_of(spec, case);
        Some(Point {
            series: series.iter().position(|have| *have == name)?,
            x: px,
            y: py,
            x_spread,
            y_spread,
            label: spec.label.as_ref().and_then(|key| case.get(key)).map(plain),
            hover: format!("{}: {} {}, {} {}", case.describe(), x.heading, x.show(px), y.heading, y.show(py)),
        })
    };
    let build = |(title, cases): (String, Vec<&Case>)| {
        let items = cases.into_iter().filter_map(point).collect();
        Panel { title, items }
    };
    let panels: Vec<_> = panels(spec, &cases).into_iter().map(build).collect();
    (!panels.is_empty()).then_some(Points { x, y, series: titles(spec, series), panels })
}

pub(super) fn bars(spec: &Plot, measured: &Measurements) -> Option<Bars> {
    let stacked = spec.kind == PlotKind::StackedBar;
    let metrics: Vec<&str> =
        if stacked { spec.stack.iter().map(String::as_str).collect() } else { vec![spec.y.as_str()] };
    let has_any = |case: &&Case| {
        case.get(&spec.x).is_some() && metrics.iter().any(|metric| measured.metric(case, metric).is_some())
    };
    let cases: Vec<_> = cases(spec, measured).into_iter().filter(has_any).collect();
    let first = metrics.iter().find(|metric| measured.unit(metric).is_some())?;
    let unit = measured.unit(first).unwrap_or_default().to_owned();
    let series = match stacked {
        true => metrics.iter().map(|metric| unit::heading(metric, &unit)).collect(),
        false => distinct(cases.iter().map(|case| series_of(spec, case))),
    };
    let bar = |case: &Case, metric: &str| {
        let metric = measured.metric(case, metric)?;
        let shown = match metric.value {
            Some(value) => unit::human(value, &metric.unit),
            None => format!("not measured ({})", metric.note.as_deref().unwrap_or("no value")),
        };
        let hover = format!("{}: {} {shown}", case.describe(), unit::heading(&metric.name, &metric.unit));
        Some(Bar { value: metric.value.filter(drawable), spread: shown_spread(metric), hover })
    };
    let group = |cases: &[&Case], name: String| {
        let here: Vec<_> =
            cases.iter().filter(|case| case.get(&spec.x).map(plain).as_ref() == Some(&name)).collect();
        let bars = match stacked {
            true => metrics.iter().map(|metric| here.iter().find_map(|case| bar(case, metric))).collect(),
            false => {
                let of = |one: &String| here.iter().find(|case| series_of(spec, case) == *one);
                series.iter().map(|one| of(one).and_then(|case| bar(case, &spec.y))).collect()
            }
        };
        Group { name, bars }
    };
    let build = |(title, cases): (String, Vec<&Case>)| {
        let names = distinct(cases.iter().filter_map(|case| case.get(&spec.x)).map(plain));
        Panel { title, items: names.into_iter().map(|name| group(&cases, name)).collect() }
    };
    let heading = if stacked { "total".to_owned() } else { unit::heading(&spec.y, &unit) };
    let value = Dimension { heading, unit, names: None, key: false };
    let panels: Vec<_> = panels(spec, &cases).into_iter().map(build).collect();
    (!panels.is_empty()).then_some(Bars { value, series: titles(spec, series), panels })
}
