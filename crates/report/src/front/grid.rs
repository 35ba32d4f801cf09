//! Tables of the page: a value, or a ratio with its interval, in each cell.

use super::Builder;
use super::machines::{Machines, describe};
use super::sentence::ratio;
use crate::estimate::{Certainty, Direction, Estimate};
use crate::plot::escape;
use crate::prose;
use crate::spec::{Grid, GridColumn, GridRow, Measure, Peer};
use crate::unit;

impl Builder<'_> {
    pub(super) fn grid(&mut self, place: &str, grid: &Grid) -> String {
        let columns = columns(grid);
        let machines: Vec<String> = grid.machines.clone();
        let mut head = String::new();
        if !machines.is_empty() {
            head += "<tr><td></td>";
            for name in &machines {
                let title = escape(&self.machines.title(name));
                head += &format!("<th class=\"over\" colspan=\"{}\">{title}</th>", grid.columns.len());
            }
            head += "</tr>\n";
        }
        head += &format!("<tr><th>{}</th>", escape(&grid.heading));
        for (column, _) in &columns {
            let unit = column
                .unit
                .as_ref()
                .filter(|unit| !column.title.contains(*unit))
                .map(|unit| format!(" <span class=\"unit\">{}</span>", escape(unit)));
            head +=
                &format!("<th class=\"n\">{}{}</th>", prose::inline(&column.title), unit.unwrap_or_default());
        }
        head += "</tr>\n";
        let mut body = String::new();
        for row in &grid.rows {
            let note = if row.note.is_empty() {
                String::new()
            } else {
                format!("<span class=\"ci\">{}</span>", prose::inline(&row.note))
            };
            body += &format!("<tr><th scope=\"row\">{}{note}</th>", prose::inline(&row.label));
            let mut filled = false;
            for (column, machine) in &columns {
                let title = match machine {
                    Some(name) => format!("{}, {}", self.machines.title(name), column.title),
                    None => column.title.clone(),
                };
                let cell = cell(&self.machines, grid, row, column, machine.as_deref());
                filled |= cell.is_ok();
                if let Err(why) = &cell
                    && why.contains("name one")
                {
                    self.problems.push(format!("{place}, {}, {title}: {why}", row.label));
                }
                body += &format!(
                    "<td class=\"n\" data-column=\"{}\">{}</td>",
                    escape(&title),
                    cell.map_or_else(|_| "–".into(), |cell| cell.html(column))
                );
            }
            if !filled {
                self.problems.push(format!("{place}: the row \"{}\" has no value", row.label));
            }
            body += "</tr>\n";
        }
        format!(
            "<div class=\"sheet\"><table>\n<thead>{head}</thead>\n<tbody>\n{body}</tbody></table></div>\n"
        )
    }
}

/// Each column with its machine.
fn columns(grid: &Grid) -> Vec<(GridColumn, Option<String>)> {
    match grid.machines.is_empty() {
        true => grid.columns.iter().map(|column| (column.clone(), None)).collect(),
        false => {
            let of = |machine: &String| {
                grid.columns.iter().map(|column| (column.clone(), Some(machine.clone()))).collect::<Vec<_>>()
            };
            grid.machines.iter().flat_map(of).collect()
        }
    }
}

/// A filled cell.
pub(super) struct Cell {
    estimate: Estimate,
    is_ratio: bool,
    peer: Option<String>,
}

/// The measure of a cell before a peer is chosen; where a quantity has no metric in the row, there is none.
fn measure(grid: &Grid, row: &GridRow, column: &GridColumn, machine: Option<&str>) -> Option<Measure> {
    let mut all = grid.all.and(&row.all).and(&column.all);
    all.machine = machine.map(str::to_owned).or(all.machine);
    if let Some(quantity) = &column.quantity {
        all.metric = Some(row.metrics.get(quantity)?.clone());
    }
    Some(all)
}

fn cell(
    machines: &Machines,
    grid: &Grid,
    row: &GridRow,
    column: &GridColumn,
    machine: Option<&str>,
) -> Result<Cell, String> {
    let wanted = measure(grid, row, column, machine).ok_or("not a quantity of the row")?;
    let peer = fastest(machines, grid, row, &wanted);
    let with = match &peer {
        Some(peer) => wanted.and(&Measure { against: Some(peer.against.clone()), ..Measure::default() }),
        None if !row.peers.is_empty() => return Err("no peer has a record".into()),
        None => wanted,
    };
    let mut estimate = machines.value(&with).map_err(|why| format!("{why} ({})", describe(&with.of)))?;
    if column.quantity.is_some() && is_rate(machines, &with) && with.against.is_some() {
        estimate = estimate.inverse();
    }
    let peer = peer
        .filter(|_| row.peers.len() > 1 && column.quantity.as_deref() == Some("time"))
        .map(|peer| peer.label.clone());
    Ok(Cell {
        estimate,
        is_ratio: with.against.is_some() || with.metric.as_ref().is_some_and(|metric| is_relative(metric)),
        peer,
    })
}

/// Whether a metric is a ratio to a baseline where less is better, paired within its rounds by the program that measured it.
fn is_relative(metric: &str) -> bool {
    metric.contains("_vs_") || metric.ends_with("_ratio")
}

/// Whether more of the metric is better.
fn is_rate(machines: &Machines, measure: &Measure) -> bool {
    let one = Measure { against: None, ..measure.clone() };
    machines.value(&one).is_ok_and(|value| value.unit.ends_with("/s"))
}

/// The peer that is fastest beside the row's program on one machine.
fn fastest<'a>(machines: &Machines, grid: &Grid, row: &'a GridRow, wanted: &Measure) -> Option<&'a Peer> {
    let time = row.metrics.get("time").cloned().or_else(|| wanted.metric.clone())?;
    let base = grid.all.and(&row.all);
    let speed = |peer: &&'a Peer| {
        let measure = Measure { machine: wanted.machine.clone(), metric: Some(time.clone()), ..base.clone() }
            .and(&Measure { against: Some(peer.against.clone()), ..Measure::default() });
        let estimate = machines.value(&measure).ok()?;
        let estimate = if is_rate(machines, &measure) { estimate.inverse() } else { estimate };
        Some((*peer, estimate.value))
    };
    row.peers.iter().filter_map(|peer| speed(&peer)).max_by(|a, b| a.1.total_cmp(&b.1)).map(|(peer, _)| peer)
}

impl Cell {
    fn html(&self, column: &GridColumn) -> String {
        let Estimate { value, unit, certainty, .. } = &self.estimate;
        let write = |value: f64| match &column.unit {
            _ if unit == "ratio" && column.unit.as_deref() == Some("%") => format!("{:.0}", 100.0 * value),
            Some(symbol) => unit::multiple_named(symbol, unit)
                .map_or_else(|| unit::human(value, unit), |multiple| digits(value / multiple.divisor)),
            None if unit == "ratio" => ratio(value),
            None => unit::human(value, unit),
        };
        let kind = match (self.is_ratio, self.estimate.direction()) {
            (false, _) => "",
            (_, Direction::Less) => " class=\"less\"",
            (_, Direction::More) => " class=\"more\"",
            (_, Direction::Same) => " class=\"same\"",
            (_, Direction::Unclear) => " class=\"unclear\"",
        };
        let below = match certainty {
            Certainty::Interval(low, high) if unit == "ratio" => format!("{}–{}", write(*low), write(*high)),
            // What is not compared needs no interval where it is narrow.
            Certainty::Interval(low, high) if high - low < 0.04 * value => String::new(),
            Certainty::Interval(low, high) if *low > 0.0 => format!("±{:.0} %", 50.0 * (high - low) / value),
            Certainty::Interval(..) => format!("{} runs", self.estimate.n),
            Certainty::Single if self.is_ratio => "one run".into(),
            Certainty::Single | Certainty::Exact => String::new(),
        };
        let peer = self.peer.as_ref().map(|peer| escape(peer));
        let below: String = [Some(below).filter(|text| !text.is_empty()), peer]
            .into_iter()
            .flatten()
            .map(|text| format!("<span class=\"ci\">{text}</span>"))
            .collect();
        format!("<b{kind}>{}</b>{below}", write(*value))
    }
}

fn digits(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => unit::grouped(&format!("{value:.0}")),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.0995 || size == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// The figures of the first machine: the row's label with the quantity, and the ratio with the peer.
pub(super) fn headlines(machines: &Machines, grid: &Grid) -> Vec<(String, String)> {
    let Some(machine) = machines.0.first() else { return Vec::new() };
    let mut all = Vec::new();
    for row in &grid.rows {
        for column in &grid.columns {
            let Ok(cell) = cell(machines, grid, row, column, Some(&machine.machine.name)) else { continue };
            let Some(wanted) = measure(grid, row, column, Some(&machine.machine.name)) else { continue };
            let peer = fastest(machines, grid, row, &wanted).map_or("", |peer| peer.label.as_str());
            all.push((
                format!("{}: {}", row.label, column.title),
                format!("{} × {peer}", ratio(cell.estimate.value)),
            ));
        }
    }
    all
}
