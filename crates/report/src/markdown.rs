//! Markdown, for a forge's page or a terminal: aligned tables, an index of the report, the claims.

use crate::claim::{CheckedClaim, Verdict};
use crate::front::FrontPage;
use crate::part::Document;
use crate::table::{Table, mark};

/// Returns a table with padded columns, numbers flush right, and its notes under it.
pub fn table(table: &Table) -> String {
    let rows: Vec<Vec<String>> = table
        .rows
        .iter()
        .map(|row| {
            let cell = |cell: &crate::table::Cell| {
                let spread = cell.spread.as_ref().map(|spread| format!(" ± {spread}")).unwrap_or_default();
                let note = cell.note.map(|note| format!(" [{}]", mark(note))).unwrap_or_default();
                format!("{}{spread}{note}", cell.text)
            };
            row.iter().map(cell).collect()
        })
        .collect();
    let right: Vec<bool> = (0..table.header.len())
        .map(|column| column >= table.keys || table.rows.iter().all(|row| row[column].number))
        .collect();
    let mut text = grid(&table.header, &rows, &right);
    if !table.notes.is_empty() {
        text.push('\n');
        for (index, note) in table.notes.iter().enumerate() {
            text += &format!("- [{}] {}\n", mark(index), one_line(note));
        }
    }
    text
}

/// A grid of cells with padded columns; `right` marks the columns that are set flush right.
pub(crate) fn grid(header: &[String], rows: &[Vec<String>], right: &[bool]) -> String {
    let escape = |cell: &String| one_line(cell).replace('|', "\\|");
    let header: Vec<_> = header.iter().map(escape).collect();
    let rows: Vec<Vec<_>> = rows.iter().map(|row| row.iter().map(escape).collect()).collect();
    let width = |text: &str| text.chars().count();
    let widths: Vec<usize> = (0..header.len())
        .map(|column| {
            rows.iter().map(|row| width(&row[column])).chain([width(&header[column]), 3]).max().unwrap_or(3)
        })
        .collect();
    let line = |cells: &[String]| {
        let mut text = String::from("|");
        for ((cell, &wide), &right) in cells.iter().zip(&widths).zip(right) {
            let pad = " ".repeat(wide - width(cell));
            text += &if right { format!(" {pad}{cell} |") } else { format!(" {cell}{pad} |") };
        }
        text + "\n"
    };
    let rule: Vec<String> = widths
        .iter()
        .zip(right)
        .map(|(&wide, &right)| if right { format!("{}:", "-".repeat(wide - 1)) } else { "-".repeat(wide) })
        .collect();
    line(&header) + &line(&rule) + &rows.iter().map(|row| line(row)).collect::<String>()
}

/// Returns the claims as a table.
pub fn claims(claims: &[CheckedClaim]) -> String {
    let header = ["verdict", "claim", "description", "measured", "limit", "command"].map(str::to_owned);
    let rows: Vec<Vec<String>> = claims
        .iter()
        .map(|checked| {
            let (value, limit) = checked.figures();
            let word = match &checked.verdict {
                Verdict::FallsShort { .. } => "**falls short**",
                _ => checked.word(),
            };
            let remarks = checked.remarks().map(|words| format!(" ({words})")).unwrap_or_default();
            vec![
                word.to_owned() + &remarks,
                checked.claim.name.clone(),
                checked.claim.what.clone(),
                value.unwrap_or_else(|| "–".into()),
                format!("{} {limit}", checked.claim.op.symbol()),
                format!("`{}`", checked.claim.run),
            ]
        })
        .collect();
    grid(&header, &rows, &[false, false, false, true, true, false])
}

/// Returns the Markdown files: the first figures with links, and the claims.
pub fn files(front: Option<&FrontPage>, document: &Document) -> Vec<(String, String)> {
    let mut files = vec![("report.md".to_owned(), index(front, document))];
    if !document.claims.is_empty() {
        files.push(("claims.md".to_owned(), format!("# Claims\n\n{}", claims(&document.claims))));
    }
    files
}

fn index(front: Option<&FrontPage>, document: &Document) -> String {
    let mut text = String::from("# Frugal: measurements\n");
    if let Some(front) = front {
        text += "\nThe report is one page: [index.html](index.html), or [report.pdf](report.pdf). Its first machine's figures against the fastest \
                 peer; less is better:\n\n";
        let rows: Vec<Vec<String>> =
            front.headlines.iter().map(|(what, figure)| vec![what.clone(), figure.clone()]).collect();
        text += &grid(&["figure", "measured"].map(str::to_owned), &rows, &[false, true]);
    }
    text += "\nEverything else is in the appendix:\n\n";
    for part in &document.parts {
        text += &format!(
            "- [{0}](appendix/{1}.html), {2} sections\n",
            part.title,
            part.name,
            part.sections.len()
        );
    }
    if !document.claims.is_empty() {
        let count = |word: &str| document.claims.iter().filter(|claim| claim.word() == word).count();
        text += &format!(
            "\n[Claims](claims.md): {} hold, {} are a tie, {} fall short, {} are not measured.\n",
            count("holds"),
            count("tie"),
            count("falls short"),
            count("not measured")
        );
    }
    text
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
