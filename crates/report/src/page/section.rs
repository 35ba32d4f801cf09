//! A section of the appendix: one experiment's tables, plots and conclusion, on each machine.

use super::{badge, section_id};
use crate::plot::escape;
use crate::prose;
use crate::run::RunState;
use crate::section::Section;
use crate::table::{Cell, Table, mark};

/// A table with more rows than this is folded.
const FOLDED: usize = 12;

pub(super) fn html(s: &Section) -> String {
    // Records without a run have no line about a run.
    let state = match s.run.is_none() && (s.has_records || !s.elsewhere.is_empty()) {
        true => String::new(),
        false => format!("<p class=\"state\">{}</p>\n", run_badge(s)),
    };
    let mut html = format!(
        "<section id=\"{}\">\n<h2>{}</h2>\n{state}{}",
        escape(&section_id(s)),
        escape(&s.title),
        prose::html(&s.about)
    );
    if !s.command.is_empty() {
        html += &format!("<p class=\"small\">Reproduce: <code>{}</code></p>\n", escape(&s.command));
    }
    let named = !s.elsewhere.is_empty();
    if s.has_records {
        html += &measured(s, named);
    }
    html += &s.elsewhere.iter().map(|other| measured(other, true)).collect::<String>();
    html + "</section>\n"
}

/// What one machine measured.
fn measured(s: &Section, named: bool) -> String {
    let mut html = String::new();
    if named {
        html += &format!("<h3>{}</h3>\n", escape(&s.machine));
    }
    html += &s.tables.iter().map(table).collect::<String>();
    for plot in &s.plots {
        let trace = plot.trace.as_ref().map(|(file, _)| {
            let file = escape(file);
            format!(" <a class=\"small\" href=\"../{file}\">trace for ui.perfetto.dev</a>")
        });
        let (title, file) = (escape(&plot.title), escape(&plot.file));
        html += &format!(
            "<figure>\n<figcaption>{title}{}</figcaption>\n<a href=\"../{file}\"><img loading=\"lazy\" src=\"../{file}\" width=\"{:.0}\" height=\"{:.0}\" alt=\"{title}\"/></a>\n</figure>\n",
            trace.unwrap_or_default(),
            plot.size.0,
            plot.size.1
        );
    }
    if !s.findings.is_empty() {
        let items: String =
            s.findings.iter().map(|text| format!("<li>{}</li>\n", prose::inline(text))).collect();
        html += &format!("<ul class=\"conclusion\">\n{items}</ul>\n");
    }
    let mut source: Vec<String> =
        s.environments.iter().map(|place| format!("Measured on {}", escape(place))).collect();
    let name = escape(&s.csv_file());
    source.push(format!("All measurements: <a href=\"../{name}\">{name}</a>"));
    html + &source.iter().map(|line| format!("<p class=\"small\">{line}</p>\n")).collect::<String>()
}

pub(super) fn run_badge(section: &Section) -> String {
    let words = section.run_words();
    match &section.run {
        Some(state) => {
            let kind = match state {
                RunState::Done { .. } => "good",
                RunState::Failed { .. } => "bad",
                RunState::Skipped { .. } => "open",
            };
            format!("{} <span class=\"small\">{}</span>", badge(kind, state.word()), escape(&state.detail()))
        }
        None => badge("open", &escape(&words)),
    }
}

fn table(t: &Table) -> String {
    let numeric: Vec<bool> =
        (0..t.header.len()).map(|i| i >= t.keys || t.rows.iter().all(|row| row[i].number)).collect();
    let class = |i: usize| if numeric[i] { " class=\"n\"" } else { "" };
    let head: String =
        t.header.iter().enumerate().map(|(i, h)| format!("<th{}>{}</th>", class(i), escape(h))).collect();
    let mut body = String::new();
    let mut last: Option<&Vec<Cell>> = None;
    for row in &t.rows {
        // Keys that repeat the row above step back, and a line parts the groups: the eye finds what changes.
        let same = last.map_or(0, |last| (0..t.keys).take_while(|&i| last[i] == row[i]).count());
        let parts = last.is_some() && t.keys > 1 && same + 1 < t.keys;
        body += if parts { "<tr class=\"part\">" } else { "<tr>" };
        for (i, cell) in row.iter().enumerate() {
            body += &match (i < same, numeric[i]) {
                (true, true) => format!("<td class=\"n again\">{}</td>", escape(&cell.text)),
                (true, false) => format!("<td class=\"again\">{}</td>", escape(&cell.text)),
                (false, _) => format!("<td{}>{}</td>", class(i), content(cell)),
            };
        }
        body += "</tr>\n";
        last = Some(row);
    }
    let note = |(i, note): (usize, &String)| {
        format!("<p class=\"small\"><sup>{}</sup> {}</p>\n", mark(i), escape(note))
    };
    let notes: String = t.notes.iter().enumerate().map(note).collect();
    let table = format!(
        "<div class=\"wide\" tabindex=\"0\"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n{notes}"
    );
    let title = escape(&t.title);
    if t.rows.len() > FOLDED {
        let rows = t.rows.len();
        return format!(
            "<details class=\"folded\"><summary>{title} <span class=\"small\">({rows} rows)</span></summary>\n{table}</details>\n"
        );
    }
    format!("<h4>{title}</h4>\n{table}")
}

fn content(cell: &Cell) -> String {
    let spread = cell.spread.as_ref().map(|s| format!(" <span class=\"spread\">± {}</span>", escape(s)));
    let note = cell.note.map(|note| format!("<sup>{}</sup>", mark(note)));
    let text = escape(&cell.text);
    let text = if cell.number { text } else { format!("<span class=\"word\">{text}</span>") };
    text + &spread.unwrap_or_default() + &note.unwrap_or_default()
}
