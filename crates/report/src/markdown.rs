//! Markdown: aligned tables, an index of the report and a file for each part, for a forge's page or a terminal.

use crate::claim::{CheckedClaim, Verdict};
use crate::part::{Document, Headline, Part, Row};
use crate::section::Section;
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

/// Returns the Markdown files: an index of one screen, the claims, and one for each part.
pub fn files(document: &Document) -> Vec<(String, String)> {
    let mut files = vec![("report.md".to_owned(), index(document))];
    if !document.claims.is_empty() {
        files.push(("claims.md".to_owned(), format!("# Claims\n\n{}", claims(&document.claims))));
    }
    files.extend(document.parts.iter().map(|one| (file_of(one), part(one))));
    files
}

fn file_of(part: &Part) -> String {
    format!("part-{}.md", part.name)
}

fn index(document: &Document) -> String {
    let mut text = String::from("# Frugal: measurements\n");
    if let Some(opening) = &document.opening {
        let header = ["figure", "measured", "limit", "verdict"].map(str::to_owned);
        let row = |headline: &Headline| {
            let Headline { title, claim, baseline } = headline;
            let (value, limit) = claim.figures();
            let factor = baseline.as_ref().map(|name| format!(" × {name}")).unwrap_or_default();
            let on = claim.machine.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
            let value = value.map_or_else(|| "–".into(), |value| format!("{value}{factor}{on}"));
            vec![
                title.clone(),
                value,
                format!("{} {limit}", claim.claim.op.symbol()),
                claim.word().to_owned(),
            ]
        };
        let rows: Vec<_> = opening.headlines.iter().map(row).collect();
        text +=
            &format!("\n{}\n\n{}", opening.about.trim(), grid(&header, &rows, &[false, true, true, false]));
    }
    let header = ["part", "questions", "not measured", "sections"].map(str::to_owned);
    let row = |part: &Part| {
        let open = part.rows.iter().filter(|row| !row.measured).count();
        let link = format!("[{}]({})", part.title, file_of(part));
        vec![link, part.rows.len().to_string(), open.to_string(), part.sections.len().to_string()]
    };
    let rows: Vec<_> = document.parts.iter().map(row).collect();
    text += &format!("\n{}", grid(&header, &rows, &[false, true, true, true]));
    if !document.claims.is_empty() {
        let count = |word: &str| document.claims.iter().filter(|claim| claim.word() == word).count();
        text += &format!(
            "\n[Claims](claims.md): {} hold, {} fall short, {} are not measured.\n",
            count("holds"),
            count("falls short"),
            count("not measured")
        );
    }
    if let Some(environment) = &document.machine {
        text += &format!("\nMeasured on {environment}; each section names its own machine and revision.\n");
    }
    for (machine, page) in &document.others {
        text += &format!("\nAnother machine: [{machine}]({})\n", page.replace("index.html", "report.md"));
    }
    text
}

fn part(part: &Part) -> String {
    let mut text = format!("# {}\n", part.title);
    if !part.about.trim().is_empty() {
        text += &format!("\n{}\n", part.about.trim());
    }
    if !part.rows.is_empty() {
        let header = ["asked", "answer", "where"].map(str::to_owned);
        let row = |row: &Row| {
            let links = row.sections.iter().map(|(_, title)| format!("[{title}](#{})", anchor(title)));
            let code = row.code.iter().map(|path| format!("`{path}`"));
            let places: Vec<String> = links.chain(code).collect();
            vec![row.asks.clone(), row.answers.join("<br>"), places.join(", ")]
        };
        let rows: Vec<_> = part.rows.iter().map(row).collect();
        text += &format!("\n{}", loose(&header, &rows));
    }
    text + &part.sections.iter().map(section).collect::<String>()
}

/// A grid without padding, for cells that are sentences.
fn loose(header: &[String], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| {
        let cells: Vec<_> = cells.iter().map(|cell| one_line(cell).replace('|', "\\|")).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let rule = vec!["---".to_owned(); header.len()];
    line(header) + &line(&rule) + &rows.iter().map(|row| line(row)).collect::<String>()
}

fn section(section: &Section) -> String {
    let mut text = format!("\n## {}\n\n{}\n", section.title, section.about.trim());
    if section.run.is_some() || !section.has_records {
        text += &format!("\nRun: {}\n", section.run_words());
    }
    for built in &section.tables {
        text += &format!("\n**{}**\n\n{}", built.title, table(built));
    }
    for plot in &section.plots {
        text += &format!("\n![{}]({})\n", plot.title, plot.file);
        if let Some((file, _)) = &plot.trace {
            text += &format!("\n[Trace for ui.perfetto.dev]({file})\n");
        }
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
    for (machine, page) in &section.elsewhere {
        let also = if section.has_records { "Also measured" } else { "Measured" };
        text += &format!("\n{also} on [{machine}]({page})\n");
    }
    for environment in &section.environments {
        text += &format!("\nMeasured on {environment}\n");
    }
    if section.has_records {
        text += &format!("\nAll measurements: [{0}]({0})\n", section.csv_file());
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
