//! A part of the appendix: its questions with their answers.

use crate::part::{Part, Row};
use crate::plot::escape;
use crate::prose;

pub(super) fn html(part: &Part) -> String {
    let rows: String = part.rows.iter().map(row).collect();
    let table = match rows.is_empty() {
        true => String::new(),
        false => format!(
            "<table class=\"asked\">\n<thead><tr><th>asked</th><th>answer</th><th>where</th></tr></thead>\n<tbody>\n\
             {rows}</tbody>\n</table>\n"
        ),
    };
    format!("{}{table}", prose::html(&part.about))
}

fn row(row: &Row) -> String {
    let answers: String =
        row.answers.iter().map(|answer| format!("<div>{}</div>\n", prose::inline(answer))).collect();
    let link = |(name, title): &(String, String)| {
        format!("<div><a href=\"#x-{}\">{}</a></div>", escape(name), escape(title))
    };
    let code = |path: &String| format!("<div><code>{}</code></div>", escape(path).replace('/', "/<wbr>"));
    format!(
        "<tr{}><td>{}</td><td>{answers}</td><td class=\"small\">{}{}</td></tr>\n",
        if row.measured { "" } else { " class=\"gap\"" },
        prose::inline(&row.asks),
        row.sections.iter().map(link).collect::<String>(),
        row.code.iter().map(code).collect::<String>()
    )
}
