//! A table of records: its rows, columns and cells.

use std::collections::HashMap;

use crate::measurements::{Measurements, distinct, plain, words};
use crate::record::{Case, Metric};
use crate::spec;
use crate::unit::{self, Multiple};

/// A table ready to be written as Markdown or HTML.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Caption.
    pub title: String,
    /// Headings: first those of the case keys, then those of the values.
    pub header: Vec<String>,
    /// How many of the columns are case keys.
    pub keys: usize,
    /// Rows, each as long as the header.
    pub rows: Vec<Vec<Cell>>,
    /// The footnotes of cells: note `i` has the mark [`mark`]`(i)`.
    pub notes: Vec<String>,
}

/// The content of a cell.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Cell {
    /// The text without spread.
    pub text: String,
    /// The spread, in the text's unit.
    pub spread: Option<String>,
    /// Which of the table's notes belongs here.
    pub note: Option<usize>,
    /// Whether it is a number, to be set flush right.
    pub number: bool,
}

impl Cell {
    fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }
}

/// Returns the mark of a note: `a`, `b`, … `z`, `27`, …
pub fn mark(note: usize) -> String {
    match u8::try_from(note) {
        Ok(small) if small < 26 => char::from(b'a' + small).to_string(),
        _ => (note + 1).to_string(),
    }
}

struct Column<'a> {
    metric: &'a str,
    pivot: Option<Case>,
    heading: String,
    unit: &'a str,
}

impl Table {
    /// Fills the table that `spec` describes. `None` where no record belongs in it.
    pub fn build(spec: &spec::Table, measured: &Measurements) -> Option<Self> {
        let cases: Vec<_> = measured.cases().filter(|case| spec.filter.matches(case)).collect();
        let named: Vec<_> = spec.columns.iter().map(String::as_str).collect();
        let metrics: Vec<&str> = if named.is_empty() { measured.metrics() } else { named };
        let has = |case: &Case, metric: &str| measured.metric(case, metric).is_some();
        let cases: Vec<_> = cases.into_iter().filter(|case| metrics.iter().any(|m| has(case, m))).collect();
        // Records of other metrics may live at cases that this table does not show, so units and columns are asked
        // of the cases shown.
        let metrics: Vec<_> = metrics.into_iter().filter(|m| cases.iter().any(|case| has(case, m))).collect();
        if metrics.is_empty() {
            return None;
        }
        let keys = row_keys(spec, &cases);
        let pivots: Vec<Option<Case>> = match &spec.pivot {
            None => vec![None],
            Some(key) => {
                distinct(cases.iter().filter_map(|case| case.project(&[key]))).into_iter().map(Some).collect()
            }
        };
        let mut columns = Vec::new();
        for &metric in &metrics {
            for pivot in &pivots {
                let unit = measured.unit(metric).unwrap_or_default();
                let value = pivot.as_ref().and_then(|case| case.0.values().next().map(plain));
                let name = unit::heading(metric, unit);
                let heading = match value {
                    None => name,
                    Some(value) if metrics.len() == 1 => value,
                    Some(value) => format!("{name}, {value}"),
                };
                columns.push(Column { metric, pivot: pivot.clone(), heading, unit });
            }
        }
        Some(fill(spec, measured, &cases, &keys, &columns))
    }
}

fn row_keys(spec: &spec::Table, cases: &[&Case]) -> Vec<String> {
    let all = distinct(cases.iter().flat_map(|case| case.0.keys().cloned()));
    let keys = if spec.rows.is_empty() { all } else { spec.rows.clone() };
    keys.into_iter().filter(|key| spec.pivot.as_ref() != Some(key)).collect()
}

fn fill(
    spec: &spec::Table,
    measured: &Measurements,
    cases: &[&Case],
    keys: &[String],
    columns: &[Column],
) -> Table {
    let mut order: Vec<Vec<String>> = Vec::new();
    let mut rows: HashMap<Vec<String>, Vec<&Case>> = HashMap::new();
    for case in cases {
        let row: Vec<_> = keys.iter().map(|key| case.get(key).map(plain).unwrap_or_default()).collect();
        rows.entry(row.clone())
            .or_insert_with(|| {
                order.push(row);
                Vec::new()
            })
            .push(case);
    }
    let found = |row: &[String], column: &Column| -> Vec<&Metric> {
        let here =
            rows[row].iter().filter(|case| column.pivot.as_ref().is_none_or(|pivot| case.matches(pivot)));
        here.filter_map(|case| measured.metric(case, column.metric)).collect()
    };
    let mut notes = Vec::new();
    let mut header: Vec<String> = keys.iter().map(|key| words(key)).collect();
    let mut table: Vec<Vec<Cell>> = order.iter().map(|row| row.iter().map(key_cell).collect()).collect();
    for column in columns {
        let metrics: Vec<_> = order.iter().map(|row| found(row, column)).collect();
        let values: Vec<f64> = metrics.iter().flatten().filter_map(|metric| metric.value).collect();
        let shared = match spec.units.get(column.metric) {
            Some(symbol) => unit::multiple_named(symbol, column.unit),
            // Figures of several units have theirs in the cells.
            None if metrics.iter().flatten().any(|metric| metric.unit != column.unit) => None,
            None => unit::shared_multiple(&values, column.unit),
        };
        let decimals = shared.as_ref().map_or(0, |multiple| {
            let quotients: Vec<f64> = values.iter().map(|value| value / multiple.divisor).collect();
            unit::decimals(&quotients, multiple, column.unit)
        });
        let symbol = shared.as_ref().map_or("", |multiple| &multiple.symbol);
        header.push(if symbol.is_empty() {
            column.heading.clone()
        } else {
            format!("{} ({symbol})", column.heading)
        });
        for (row, metrics) in table.iter_mut().zip(metrics) {
            row.push(value_cell(&metrics, shared.as_ref().map(|multiple| (multiple, decimals)), &mut notes));
        }
    }
    Table { title: spec.title.clone(), header, keys: keys.len(), rows: table, notes }
}

fn key_cell(value: &String) -> Cell {
    Cell { number: value.parse::<f64>().is_ok(), ..Cell::text(value) }
}

fn value_cell(metrics: &[&Metric], shared: Option<(&Multiple, usize)>, notes: &mut Vec<String>) -> Cell {
    let mut note = |text: String| {
        let at = notes.iter().position(|have| *have == text);
        Some(at.unwrap_or_else(|| {
            notes.push(text);
            notes.len() - 1
        }))
    };
    match metrics {
        [] => Cell::text("–"),
        [metric] => {
            let Some(value) = metric.value else {
                return Cell { note: metric.note.clone().and_then(note), ..Cell::text("not measured") };
            };
            let multiple = unit::multiple(value, &metric.unit);
            let (multiple, decimals, symbol) = match shared {
                Some((multiple, decimals)) => (multiple, decimals, ""),
                None => (
                    &multiple,
                    unit::decimals(&[value / multiple.divisor], &multiple, &metric.unit),
                    multiple.symbol.as_str(),
                ),
            };
            let seen =
                |quotient: f64| quotient == 0.0 || quotient.abs() >= 0.5 * 0.1f64.powi(decimals as i32);
            let show = |quotient: f64| match metric.unit.as_str() {
                // An exact value never looks like 0.
                "exact" if !seen(quotient) => format!("{quotient:.2e}"),
                _ => unit::fixed(quotient, decimals),
            };
            // A spread that these decimals would round to nothing gets as many as show its first digit, or an exponent.
            let spread = metric.spread.filter(|_| metric.n > 1).map(|spread| {
                let quotient = spread / multiple.divisor;
                let needed = if seen(quotient) { decimals } else { -quotient.log10().floor() as usize };
                if needed > decimals + 2 { format!("{quotient:.0e}") } else { unit::fixed(quotient, needed) }
            });
            Cell {
                text: unit::with_symbol(&show(value / multiple.divisor), symbol),
                spread,
                note: metric.note.clone().and_then(note),
                number: true,
            }
        }
        several => Cell {
            note: note("several cases share this cell; add a key that distinguishes them to `rows`".into()),
            ..Cell::text(format!("{} values", several.len()))
        },
    }
}
