//! WikiText's format: headings ` = Title = ` on lines of their own, between blank lines.
//!
//! A paragraph may hold a formula (` = 1 m / s = `), so a line counts as an article's heading only where the lines before
//! and after it are blank. With that rule WikiText-2 has the 60 articles that its authors count, in valid and in test.

use super::Record;
use super::lines::{Line, Lines};
use crate::error::Result;

/// The level of a heading (1 for ` = Title = `, 2 for ` = = History = = `), or `None` for other lines.
pub fn heading_level(line: &str) -> Option<usize> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let level = words.iter().take_while(|word| **word == "=").count();
    let closing = words.iter().rev().take_while(|word| **word == "=").count();
    (level > 0 && level == closing && words.len() > 2 * level).then_some(level)
}

/// Whether a line holds white space only.
pub fn is_blank(line: &str) -> bool {
    line.trim().is_empty()
}

/// The next article, whole; text before the first heading is an article of its own. `held` carries the heading that ended
/// it to the next call.
pub(super) fn next_article(lines: &mut Lines, held: &mut Option<Line>) -> Result<Option<Record>> {
    let mut article: Option<(String, u64)> = held.take().map(|line| (line.text, line.number));
    // A held heading comes with the blank line after it.
    let mut after_blank = article.is_some();
    // A title is known only with the line after it.
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
                *held = Some(title);
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

/// Blank lines before an article are no part of it.
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

/// The next line that is not blank, trimmed.
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
