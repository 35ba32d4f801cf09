//! The report as HTML: one page that is read, and an appendix page for each part. No scripts, no external fonts.

mod appendix;
mod part;
mod section;

use crate::front::FrontPage;
use crate::part::{Document, Part};
use crate::plot::{self, escape};
use crate::section::Section;

/// Returns the page: of `front` where it is given, else a list of the appendix.
pub fn html(front: Option<&FrontPage>, document: &Document) -> String {
    let link = |part: &Part| {
        format!("<li><a href=\"{}\">{}</a></li>\n", escape(&appendix::file(part)), escape(&part.title))
    };
    let plain = || {
        let parts: String = document.parts.iter().map(link).collect();
        FrontPage {
            html: format!("<h1>Frugal: measurements</h1>\n<ul>\n{parts}</ul>\n"),
            ..FrontPage::default()
        }
    };
    let plain = front.is_none().then(plain);
    let front = front.or(plain.as_ref()).expect("one of both is given");
    let entries = front.contents.iter().map(|(name, title)| (format!("#{name}"), title.clone()));
    let appendix =
        (!front.contents.is_empty()).then(|| ("#appendix".to_owned(), "Machines and appendix".to_owned()));
    document_of("Frugal: measurements", &entries.chain(appendix).collect::<Vec<_>>(), &front.html, "page")
}

/// Returns the appendix: file names with their texts.
pub fn appendix(document: &Document) -> Vec<(String, String)> {
    document.parts.iter().map(|part| (appendix::file(part), appendix::html(document, part))).collect()
}

/// A whole document with its navigation: targets with names.
fn document_of(title: &str, contents: &[(String, String)], main: &str, kind: &str) -> String {
    let entry =
        |(to, name): &(String, String)| format!("<li><a href=\"{}\">{}</a></li>\n", escape(to), escape(name));
    let nav = match contents.is_empty() {
        true => String::new(),
        false => format!(
            "<nav aria-label=\"Contents\">\n<ul>\n{}</ul>\n</nav>\n",
            contents.iter().map(entry).collect::<String>()
        ),
    };
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{}</title>\n<style>\n{}\n{}</style>\n</head>\n<body class=\"{kind}\">\n<a class=\"skip\" href=\"#main\">Skip to the text</a>\n{nav}<main id=\"main\">\n{main}</main>\n</body>\n\
         </html>\n",
        escape(title),
        include_str!("page.css"),
        plot::style_sheet(),
    )
}

/// The anchor of a section; the prefix keeps an experiment named `claims` apart from the claims.
fn section_id(section: &Section) -> String {
    format!("x-{}", section.name)
}

fn badge(kind: &str, word: &str) -> String {
    format!("<span class=\"badge {kind}\">{word}</span>")
}
