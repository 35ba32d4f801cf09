//! A part of the appendix: its questions, and where their answers are.

use crate::part::{Part, Row};
use crate::plot::escape;
use crate::prose;

pub(super) fn html(part: &Part) -> String {
    let rows: String = part.rows.iter().map(row).collect();
    let table = match rows.is_empty() {
        true => String::new(),
        false => format!(
            "<table class=\"asked\">\n<thead><tr><th>asked</th><th>answer</th><th>code</th></tr></thead>\n<tbody>\n\
             {rows}</tbody>\n</table>\n"
        ),
    };
    format!("{}{table}", prose::html(&part.about))
}

fn row(row: &Row) -> String {
    let link = |(name, title): &(String, String)| {
        format!("<div><a href=\"#x-{}\">{}</a></div>", escape(name), escape(title))
    };
    let code = |path: &String| format!("<div><code>{}</code></div>", escape(path).replace('/', "/<wbr>"));
    let short =
        row.short.as_ref().map(|short| format!("<div>Less than asked: {}</div>", prose::inline(short)));
    format!(
        "<tr><td>{}</td><td>{}{}{}</td><td class=\"small\">{}</td></tr>\n",
        prose::inline(&row.asks),
        prose::html(&row.says),
        short.unwrap_or_default(),
        row.sections.iter().map(link).collect::<String>(),
        row.code.iter().map(code).collect::<String>()
    )
}
