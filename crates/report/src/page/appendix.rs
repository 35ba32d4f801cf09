//! The appendix page of a part: its questions, its claims on every machine, and everything that was measured.

use super::{badge, document_of, part, section, section_id};
use crate::claim::{CheckedClaim, Verdict};
use crate::part::{Document, Part};
use crate::plot::escape;
use crate::prose;

/// The file of a part, relative to the page.
pub(super) fn file(part: &Part) -> String {
    format!("appendix/{}.html", part.name)
}

pub(super) fn html(document: &Document, of: &Part) -> String {
    let sections =
        of.sections.iter().map(|section| (format!("#{}", section_id(section)), section.title.clone()));
    let contents: Vec<(String, String)> =
        [("../index.html".to_owned(), "Back to the page".to_owned())].into_iter().chain(sections).collect();
    let main = format!(
        "<h1>Appendix: {}</h1>\n{}{}{}",
        escape(&of.title),
        part::html(of),
        claims(document, of),
        of.sections.iter().map(section::html).collect::<String>()
    );
    document_of(&format!("Frugal: appendix, {}", of.title), &contents, &main, "appendix")
}

/// The claims about a part's experiments: those that fall short first, a column for each machine.
fn claims(document: &Document, part: &Part) -> String {
    let about = |checked: &&CheckedClaim| {
        part.sections.iter().any(|section| section.name == checked.claim.experiment)
    };
    let columns: Vec<(&str, Vec<&CheckedClaim>)> = document
        .by_machine
        .iter()
        .map(|(machine, all)| (machine.as_str(), all.iter().filter(about).collect()))
        .collect();
    let Some((_, first)) = columns.first().filter(|(_, claims)| !claims.is_empty()) else {
        return String::new();
    };
    let rank = |row: usize| {
        let words = columns.iter().map(|(_, claims)| claims[row].word());
        words
            .map(|word| ["falls short", "tie", "holds", "not measured"].iter().position(|one| *one == word))
            .min()
    };
    let mut order: Vec<usize> = (0..first.len()).collect();
    order.sort_by_key(|row| rank(*row));
    let mut rows = String::new();
    for row in order {
        let claim = &first[row].claim;
        rows += &format!(
            "<tr><td><strong>{}</strong><div class=\"small\">{}</div><div class=\"small\"><code>{}</code></div></td><td class=\"n\">{} {}</td>{}</tr>\n",
            escape(&claim.name),
            prose::inline(&claim.what),
            escape(&claim.run),
            escape(claim.op.symbol()),
            escape(&first[row].figures().1),
            columns.iter().map(|(_, claims)| verdict(claims[row])).collect::<String>()
        );
    }
    let head: String =
        columns.iter().map(|(machine, _)| format!("<th class=\"n\">{}</th>", escape(machine))).collect();
    format!(
        "<h2 id=\"claims\">Claims</h2>\n<div class=\"wide whole\" tabindex=\"0\"><table class=\"claims\">\n<thead><tr><th>claim</th><th class=\"n\">limit</th>{head}</tr></thead>\n\
         <tbody>\n{rows}</tbody>\n</table></div>\n"
    )
}

fn verdict(one: &CheckedClaim) -> String {
    let kind = match &one.verdict {
        Verdict::Holds { .. } => "good",
        Verdict::FallsShort { .. } => "bad",
        Verdict::Tie { .. } => "open",
        Verdict::NotMeasured { .. } => return "<td class=\"n\">–</td>".into(),
    };
    let remarks = one
        .remarks()
        .map(|words| format!("<div class=\"small\">{}</div>", escape(&words)))
        .unwrap_or_default();
    format!(
        "<td class=\"n\">{} {}{remarks}</td>",
        escape(&one.figures().0.unwrap_or_default()),
        badge(kind, one.word())
    )
}
