//! The report as one self-contained HTML page: no scripts, no external fonts or images.

use crate::claim::{CheckedClaim, Verdict};
use crate::plot::escape;
use crate::prose;
use crate::run::RunState;
use crate::section::Section;
use crate::table::{Cell, Table, mark};

/// The page's text. `environments` says where the records were taken.
pub fn html(checked: &[CheckedClaim], environments: &[String], sections: &[Section]) -> String {
    let mut main = String::from("<h1>Frugal: measurements</h1>\n");
    main += &format!("<p class=\"lead\">{}</p>\n", escape(&summary(checked, sections)));
    if !checked.is_empty() {
        main += &format!("<h2 id=\"claims\">Claims</h2>\n{}", claims(checked));
    }
    if !environments.is_empty() {
        let items: String =
            environments.iter().map(|place| format!("<li>{}</li>\n", escape(place))).collect();
        main += &format!("<h2 id=\"environment\">Environment</h2>\n<ul>\n{items}</ul>\n");
    }
    main += &format!("<h2 id=\"experiments\">Experiments</h2>\n{}", runs(sections));
    main += &sections.iter().map(section).collect::<String>();
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>Frugal: measurements</title>\n<style>\n{}</style>\n</head>\n<body>\n{}<main>\n{main}</main>\n</body>\n\
         </html>\n",
        include_str!("page.css"),
        contents(checked, environments, sections),
    )
}

fn summary(checked: &[CheckedClaim], sections: &[Section]) -> String {
    let count = |word: &str| checked.iter().filter(|claim| claim.word() == word).count();
    let state =
        |word: &str| sections.iter().filter(|s| s.run.as_ref().is_some_and(|r| r.word() == word)).count();
    let mut parts = Vec::new();
    if !checked.is_empty() {
        parts.push(format!("{} of {} claims hold", count("holds"), checked.len()));
    }
    let mut add = |number: usize, words: &str| {
        if number > 0 {
            parts.push(format!("{number} {words}"));
        }
    };
    add(count("falls short"), if count("falls short") == 1 { "falls short" } else { "fall short" });
    add(count("not measured"), "not measured");
    add(state("done"), if state("done") == 1 { "experiment done" } else { "experiments done" });
    add(state("failed"), "failed");
    add(state("skipped"), "skipped");
    if parts.is_empty() { format!("experiments: {}", sections.len()) } else { parts.join(" · ") }
}

fn contents(checked: &[CheckedClaim], environments: &[String], sections: &[Section]) -> String {
    let entry = |to: &str, name: &str| format!("<li><a href=\"#{}\">{}</a></li>\n", escape(to), escape(name));
    let mut list = String::new();
    if !checked.is_empty() {
        list += &entry("claims", "Claims");
    }
    if !environments.is_empty() {
        list += &entry("environment", "Environment");
    }
    list += &entry("experiments", "Experiments");
    list += &sections.iter().map(|s| entry(&id(s), &s.title)).collect::<String>();
    format!("<nav aria-label=\"Contents\">\n<ul>\n{list}</ul>\n</nav>\n")
}

/// The anchor of a section; the prefix keeps an experiment named `claims` apart from the claims.
fn id(section: &Section) -> String {
    format!("x-{}", section.name)
}

fn badge(kind: &str, word: &str) -> String {
    format!("<span class=\"badge {kind}\">{word}</span>")
}

fn claims(checked: &[CheckedClaim]) -> String {
    let mut rows = String::new();
    for one in checked {
        let (value, limit) = one.figures();
        let (kind, words) = match &one.verdict {
            Verdict::Holds { .. } => ("good", one.note.as_ref()),
            Verdict::FallsShort { .. } => ("bad", one.note.as_ref()),
            Verdict::NotMeasured { why } => ("open", Some(why)),
        };
        let words =
            words.map(|words| format!("<div class=\"small\">{}</div>", escape(words))).unwrap_or_default();
        rows += &format!(
            "<tr><td>{}{words}</td><td><strong>{}</strong><div class=\"small\">{}</div></td><td class=\"n\">{}</td><td \
             class=\"n\">{} {}</td><td><code>{}</code></td></tr>\n",
            badge(kind, one.word()),
            escape(&one.claim.name),
            prose::inline(&one.claim.what),
            value.map_or_else(|| "–".into(), |value| escape(&value)),
            escape(one.claim.op.symbol()),
            escape(&limit),
            escape(&one.claim.run),
        );
    }
    format!(
        "<div class=\"wide whole\"><table class=\"claims\">\n<thead><tr><th>verdict</th><th>claim</th><th class=\"n\">measured</th><th \
         class=\"n\">limit</th><th>command</th></tr></thead>\n<tbody>\n{rows}</tbody>\n\
         </table></div>\n"
    )
}

fn run_badge(section: &Section) -> String {
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

fn runs(sections: &[Section]) -> String {
    let row = |s: &Section| {
        format!(
            "<tr><td><a href=\"#{}\">{}</a></td><td>{}</td><td>{}</td></tr>\n",
            escape(&id(s)),
            escape(&s.title),
            escape(&s.name),
            run_badge(s)
        )
    };
    format!(
        "<div class=\"wide whole\"><table>\n<thead><tr><th>experiment</th><th>name</th><th>run</th></tr></thead>\n\
         <tbody>\n{}</tbody>\n</table></div>\n",
        sections.iter().map(row).collect::<String>()
    )
}

fn section(s: &Section) -> String {
    let mut html = format!(
        "<section id=\"{}\">\n<h2>{}</h2>\n<p class=\"state\">{}</p>\n{}",
        escape(&id(s)),
        escape(&s.title),
        run_badge(s),
        prose::html(&s.about)
    );
    html += &s.tables.iter().map(table).collect::<String>();
    for plot in &s.plots {
        // The drawing is our own writer's, which has escaped every text in it.
        html +=
            &format!("<figure>\n<figcaption>{}</figcaption>\n{}</figure>\n", escape(&plot.title), plot.svg);
    }
    if !s.findings.is_empty() {
        let items: String = s.findings.iter().map(|text| format!("<li>{}</li>\n", escape(text))).collect();
        html += &format!("<h3>Findings</h3>\n<ul>\n{items}</ul>\n");
    }
    if !s.command.is_empty() {
        html += &format!("<h3>Reproduce</h3>\n<pre><code>{}</code></pre>\n", escape(&s.command));
    }
    for place in &s.environments {
        html += &format!("<p class=\"small\">Measured on {}</p>\n", escape(place));
    }
    if s.has_records {
        let name = escape(&s.csv_file());
        html += &format!("<p class=\"small\">All measurements: <a href=\"{name}\">{name}</a></p>\n");
    }
    html + "</section>\n"
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
    format!(
        "<h3>{}</h3>\n<div class=\"wide\"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\
         </div>\n{notes}",
        escape(&t.title)
    )
}

fn content(cell: &Cell) -> String {
    let spread = cell.spread.as_ref().map(|s| format!(" <span class=\"spread\">± {}</span>", escape(s)));
    let note = cell.note.map(|note| format!("<sup>{}</sup>", mark(note)));
    let text = escape(&cell.text);
    let text = if cell.number { text } else { format!("<span class=\"word\">{text}</span>") };
    text + &spread.unwrap_or_default() + &note.unwrap_or_default()
}
