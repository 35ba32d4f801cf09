//! Markdown: aligned tables and the whole report as one file, for a forge's page or a terminal.

use crate::claim::{CheckedClaim, Verdict};
use crate::section::Section;
use crate::table::{Table, mark};

/// A table with padded columns, numbers flush right, and its notes under it.
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

/// A grid of cells with padded columns; `right` says which are set flush right.
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

/// The claims as a table.
pub fn claims(claims: &[CheckedClaim]) -> String {
    let header = ["verdict", "claim", "description", "measured", "limit", "command"].map(str::to_owned);
    let rows: Vec<Vec<String>> = claims
        .iter()
        .map(|checked| {
            let (value, limit) = checked.figures();
            let (word, words) = match &checked.verdict {
                Verdict::NotMeasured { why } => ("not measured", Some(why)),
                Verdict::Holds { .. } => ("holds", checked.note.as_ref()),
                Verdict::FallsShort { .. } => ("**falls short**", checked.note.as_ref()),
            };
            let verdict = words.map_or_else(|| word.to_owned(), |words| format!("{word} ({words})"));
            vec![
                verdict,
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

/// The whole report.
pub fn report(checked: &[CheckedClaim], sections: &[Section]) -> String {
    let mut text = String::from("# Report\n\n");
    if !checked.is_empty() {
        text += &format!("## Claims\n\n{}\n", claims(checked));
    }
    text += "## Experiments\n\n";
    let header = ["experiment", "title", "run"].map(str::to_owned);
    let rows: Vec<_> = sections
        .iter()
        .map(|s| vec![format!("[{}](#{})", s.name, anchor(&s.title)), s.title.clone(), s.run_words()])
        .collect();
    text += &grid(&header, &rows, &[false; 3]);
    for section in sections {
        text += &format!("\n## {}\n\n{}\n", section.title, section.about.trim());
        for built in &section.tables {
            text += &format!("\n**{}**\n\n{}", built.title, table(built));
        }
        for plot in &section.plots {
            text += &format!("\n![{}]({})\n", plot.title, plot.file);
        }
        if !section.findings.is_empty() {
            text.push('\n');
            for finding in &section.findings {
                text += &format!("- {}\n", one_line(finding));
            }
        }
        if !section.command.is_empty() {
            text += &format!("\nReproduce: `{}`\n", section.command);
        }
        for environment in &section.environments {
            text += &format!("\nMeasured on {environment}\n");
        }
        if section.has_records {
            text += &format!("\nAll measurements: [{0}]({0})\n", section.csv_file());
        }
    }
    text
}

/// A heading's anchor as forges make it.
fn anchor(title: &str) -> String {
    let kept = title
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .collect::<String>();
    kept.replace(' ', "-")
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
