//! The report as one self-contained HTML page: no scripts, no external fonts or images.

mod opening;
mod part;
mod section;

use crate::part::{Document, Part};
use crate::plot::{self, escape};
use crate::section::Section;

/// Returns the page's text.
pub fn html(document: &Document) -> String {
    let parts: String = document.parts.iter().map(part::html).collect();
    let main = opening::html(document) + &parts + &opening::runs(document);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>Frugal: measurements</title>\n<style>\n{}\n{}</style>\n</head>\n<body>\n{}<main>\n{main}</main>\n</body>\n\
         </html>\n",
        include_str!("page.css"),
        plot::style_sheet(),
        contents(document),
    )
}

fn contents(document: &Document) -> String {
    let entry = |to: &str, name: &str| format!("<a href=\"#{}\">{}</a>", escape(to), escape(name));
    let mut list = format!("<li>{}</li>\n", entry("top", "Overview"));
    for part in &document.parts {
        let sections: String =
            part.sections.iter().map(|s| format!("<li>{}</li>\n", entry(&section_id(s), &s.title))).collect();
        list += &format!(
            "<li>{}\n<details><summary>{} sections</summary>\n<ul>\n{sections}</ul></details></li>\n",
            entry(&part_id(part), &part.title),
            part.sections.len()
        );
    }
    list += &format!("<li>{}</li>\n", entry("experiments", "All experiments"));
    format!("<nav aria-label=\"Contents\">\n<ul>\n{list}</ul>\n</nav>\n")
}

/// The anchor of a section; the prefix keeps an experiment named `claims` apart from the claims.
fn section_id(section: &Section) -> String {
    format!("x-{}", section.name)
}

fn part_id(part: &Part) -> String {
    format!("part-{}", part.name)
}

fn badge(kind: &str, word: &str) -> String {
    format!("<span class=\"badge {kind}\">{word}</span>")
}
