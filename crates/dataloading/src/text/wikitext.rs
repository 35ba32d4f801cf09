//! The WikiText format: headings ` = Title = ` on lines of their own, between blank lines.
//!
//! A paragraph may contain a formula (` = 1 m / s = `), so a line is a heading only if the lines before and after it are
//! blank. With this rule the validation and test splits of WikiText-2 have 60 articles each, as published.

use super::Record;
use super::lines::{Line, Lines};
use crate::error::Result;

/// Returns the level of a heading (1 for ` = Title = `, 2 for ` = = History = = `), or `None` for other lines.
pub fn heading_level(line: &str) -> Option<usize> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let level = words.iter().take_while(|word| **word == "=").count();
    let closing = words.iter().rev().take_while(|word| **word == "=").count();
    (level > 0 && level == closing && words.len() > 2 * level).then_some(level)
}

/// Returns whether a line is empty or white space.
pub fn is_blank(line: &str) -> bool {
    line.trim().is_empty()
}

/// Returns the next article; text before the first heading is an article too. `lookahead` passes the heading that ended the
/// article to the next call.
pub(super) fn next_article(lines: &mut Lines, lookahead: &mut Option<Line>) -> Result<Option<Record>> {
    let mut article: Option<(String, u64)> = lookahead.take().map(|line| (line.text, line.number));
    // A heading read ahead includes the blank line after it.
    let mut after_blank = article.is_some();
    // Whether a line is a title depends on the line after it.
    let mut candidate: Option<Line> = None;
    loop {
        let line = lines.next()?;
        let blank = line.as_ref().is_none_or(|line| is_blank(&line.text));
        if let Some(mut title) = candidate.take() {
            if blank && article.is_some() {
                if let Some(line) = line {
                    title.text.push('\n');
                    title.text.push_str(&line.text);
                }
                *lookahead = Some(title);
                break;
            }
            append(&mut article, title, lines)?;
        }
        let Some(line) = line else { break };
        let starts_file = line.number == 1;
        if (after_blank || starts_file) && heading_level(&line.text) == Some(1) {
            candidate = Some(line);
            after_blank = false;
        } else {
            after_blank = blank;
            append(&mut article, line, lines)?;
        }
    }
    Ok(article.and_then(|(text, start)| {
        let text = text.trim_matches(|c: char| c == '\n' || c == ' ');
        (!is_blank(text)).then(|| lines.record(text.to_owned(), start))
    }))
}

/// Appends a line to the article, skipping blank lines at its start.
fn append(article: &mut Option<(String, u64)>, line: Line, lines: &Lines) -> Result<()> {
    match article {
        None if is_blank(&line.text) => {}
        None => *article = Some((line.text, line.number)),
        Some((text, start)) => {
            text.push('\n');
            text.push_str(&line.text);
            lines.check_size(text.len() as u64, *start)?;
        }
    }
    Ok(())
}

/// Returns the next non-blank line, trimmed.
pub(super) fn next_line(lines: &mut Lines) -> Result<Option<Record>> {
    while let Some(line) = lines.next()? {
        let text = line.text.trim();
        if !text.is_empty() {
            return Ok(Some(lines.record(text.to_owned(), line.number)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_have_levels() {
        for (line, level) in [
            (" = Homarus gammarus = ", Some(1)),
            (" = = Life cycle = = ", Some(2)),
            (" = = = Diet = = = ", Some(3)),
            (" = <unk> for the next round ", None),
            (" = = = ", None),
            (" = Level = = ", None),
            (" A word = another ", None),
            ("", None),
        ] {
            assert_eq!(heading_level(line), level, "{line:?}");
        }
    }
}
