//! The first screen: what the project is, its figures, the machine, what was not measured; below it, the claims.

use super::{badge, part_id, section, section_id};
use crate::claim::{CheckedClaim, Verdict};
use crate::part::{Document, Headline};
use crate::plot::escape;
use crate::prose;
use crate::section::Section;
use crate::spec::Op;

pub(super) fn html(document: &Document) -> String {
    let mut html = String::from("<header class=\"opening\" id=\"top\">\n<h1>Frugal</h1>\n");
    if let Some(opening) = &document.opening {
        html += &format!("<div class=\"lead\">{}</div>\n", prose::html(&opening.about));
        html += &format!(
            "<div class=\"cards\">\n{}</div>\n",
            opening.headlines.iter().map(card).collect::<String>()
        );
    }
    html += &machines(document);
    html += &gaps(document);
    html += "</header>\n";
    html + &claims(&document.claims)
}

fn card(headline: &Headline) -> String {
    let Headline { title, claim, baseline } = headline;
    let (value, limit) = claim.figures();
    let (kind, note) = match &claim.verdict {
        Verdict::Holds { .. } => ("good", None),
        Verdict::Tie { .. } => ("open", None),
        Verdict::FallsShort { .. } => ("bad", None),
        Verdict::NotMeasured { why } => ("open", Some(why)),
    };
    let figure = match (&value, baseline) {
        (Some(value), Some(baseline)) => {
            format!("<strong>{}</strong> × {}", escape(value), escape(baseline))
        }
        (Some(value), None) => format!("<strong>{}</strong>", escape(value)),
        (None, _) => format!("<span class=\"small\">{}</span>", escape(note.map_or("", String::as_str))),
    };
    let machine = claim.machine.as_ref().map(|name| format!(" · {}", escape(name))).unwrap_or_default();
    format!(
        "<a class=\"card\" href=\"#x-{}\"><span class=\"title\">{}</span><span class=\"figure\">{figure}</span>\n{}<span \
         class=\"small\">{} limit {} {}{machine}</span></a>\n",
        escape(&claim.claim.experiment),
        escape(title),
        bars(headline),
        badge(kind, claim.word()),
        match claim.claim.op {
            Op::AtMost => "≤",
            Op::AtLeast => "≥",
            Op::Equal => "=",
        },
        escape(&limit),
    )
}

/// Ours, the baseline, and a line at the limit, over one scale.
fn bars(headline: &Headline) -> String {
    let limit = headline.claim.claim.limit;
    let (Verdict::Holds { value } | Verdict::Tie { value, .. } | Verdict::FallsShort { value }) =
        headline.claim.verdict
    else {
        return String::new();
    };
    let base = headline.baseline.as_ref().map(|name| (name.as_str(), 1.0));
    let most = [Some(value), Some(limit), base.map(|(_, one)| one)].into_iter().flatten().fold(0.0, f64::max);
    if most <= 0.0 {
        return String::new();
    }
    let percent = |value: f64| format!("{:.1}", (100.0 * value / most).clamp(0.0, 100.0));
    let bar = |class: &str, name: &str, value: f64| {
        format!(
            "<span class=\"bar\"><i class=\"{class}\" style=\"width:{}%\"></i><b style=\"left:{}%\"></b><em>{}</em></span>\n",
            percent(value),
            percent(limit),
            escape(name)
        )
    };
    let theirs = base.map(|(name, one)| bar("theirs", name, one)).unwrap_or_default();
    format!("<span class=\"bars\">{}{theirs}</span>\n", bar("ours", "Frugal", value))
}

fn machines(document: &Document) -> String {
    let mut lines = Vec::new();
    if let Some(machine) = &document.machine {
        let more = match document.environments.len() - 1 {
            0 => String::new(),
            1 => "; and one other revision or setting".into(),
            several => format!("; and {several} other revisions or settings"),
        };
        lines.push(format!("{}{more}", escape(machine)));
    }
    lines.extend(
        document
            .others
            .iter()
            .map(|(name, page)| format!("<a href=\"{}\">{}</a>", escape(page), escape(name))),
    );
    if lines.is_empty() {
        return String::new();
    }
    let all: String =
        document.environments.iter().map(|place| format!("<li>{}</li>\n", escape(place))).collect();
    let folded = match document.environments.len() {
        0 | 1 => String::new(),
        _ => format!("<details><summary>every machine and revision</summary>\n<ul>\n{all}</ul></details>\n"),
    };
    format!(
        "<p id=\"environment\"><strong>Measured on</strong> {}</p>\n{folded}",
        lines.join("; on another machine: ")
    )
}

fn gaps(document: &Document) -> String {
    let gaps = document.gaps();
    let asked: usize = document.parts.iter().map(|part| part.rows.len()).sum();
    if asked == 0 {
        return String::new();
    }
    if gaps.is_empty() {
        return format!(
            "<p><strong>Not measured</strong>: nothing; all {asked} questions have an answer.</p>\n"
        );
    }
    let item = |(part, row): &(&crate::part::Part, &crate::part::Row)| {
        format!(
            "<li><a href=\"#{}\">{}</a>: {}</li>\n",
            escape(&part_id(part)),
            escape(&part.title),
            prose::inline(&row.asks)
        )
    };
    format!(
        "<details class=\"gaps\"><summary><strong>Not measured</strong>: {} of the assignments’ {asked} questions</summary>\n\
         <ul>\n{}</ul></details>\n",
        gaps.len(),
        gaps.iter().map(item).collect::<String>()
    )
}

/// Three tables; the claims that fall short are open.
fn claims(checked: &[CheckedClaim]) -> String {
    if checked.is_empty() {
        return String::new();
    }
    let group = |word: &str, heading: &str, open: &str| {
        let claims: Vec<&CheckedClaim> = checked.iter().filter(|claim| claim.word() == word).collect();
        match claims.len() {
            0 => String::new(),
            count => format!(
                "<details class=\"folded\"{open}><summary>{count} of {} claims {heading}</summary>\n{}</details>\n",
                checked.len(),
                claim_table(&claims)
            ),
        }
    };
    format!(
        "<div class=\"claims-of\" id=\"claims\">\n{}{}{}{}</div>\n",
        group("falls short", "fall short", " open"),
        group("tie", "are a tie", " open"),
        group("not measured", "are not measured", ""),
        group("holds", "hold", ""),
    )
}

fn claim_table(checked: &[&CheckedClaim]) -> String {
    let mut rows = String::new();
    for one in checked {
        let (value, limit) = one.figures();
        let kind = match &one.verdict {
            Verdict::Holds { .. } => "good",
            Verdict::Tie { .. } => "open",
            Verdict::FallsShort { .. } => "bad",
            Verdict::NotMeasured { .. } => "open",
        };
        let words = one.remarks().map(|words| format!("<div class=\"small\">{}</div>", escape(&words)));
        let words = words.unwrap_or_default();
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

/// Every experiment with how its run ended; open where one failed.
pub(super) fn runs(document: &Document) -> String {
    let row = |s: &Section| {
        format!(
            "<tr><td><a href=\"#{}\">{}</a></td><td>{}</td><td>{}</td></tr>\n",
            escape(&section_id(s)),
            escape(&s.title),
            escape(&s.name),
            section::run_badge(s)
        )
    };
    let count = |word: &str| {
        document.sections().filter(|s| s.run.as_ref().is_some_and(|state| state.word() == word)).count()
    };
    let total = document.sections().count();
    let mut words = vec![format!("{total} experiments")];
    for (number, word) in
        [(count("done"), "done"), (count("failed"), "failed"), (count("skipped"), "skipped")]
    {
        if number > 0 {
            words.push(format!("{number} {word}"));
        }
    }
    format!(
        "<details class=\"folded\" id=\"experiments\"{}><summary>{}</summary>\n<div class=\"wide whole\"><table>\n\
         <thead><tr><th>experiment</th><th>name</th><th>run</th></tr></thead>\n<tbody>\n{}</tbody>\n</table></div>\n\
         </details>\n",
        if count("failed") > 0 { " open" } else { "" },
        words.join(", "),
        document.sections().map(row).collect::<String>()
    )
}
