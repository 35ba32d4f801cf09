//! The little Markdown that an experiment's `about` is written in, as HTML.
//!
//! Paragraphs, lists with `-`, fenced code, `code`, **strong**, *emphasis* and [links](https://example.org). Anything
//! else, HTML too, is shown as it is written.

use crate::plot::escape;

/// The paragraphs and lists of `text` as HTML.
pub fn html(text: &str) -> String {
    let mut html = String::new();
    let mut block: Vec<&str> = Vec::new();
    let mut code: Option<Vec<&str>> = None;
    for line in text.lines().chain([""]) {
        if line.trim_start().starts_with("```") {
            html += &paragraph(&std::mem::take(&mut block));
            match code.take() {
                None => code = Some(Vec::new()),
                Some(lines) => html += &pre(&lines),
            }
        } else if let Some(lines) = &mut code {
            lines.push(line);
        } else if line.trim().is_empty() {
            html += &paragraph(&std::mem::take(&mut block));
        } else {
            block.push(line);
        }
    }
    // A fence without its end still shows what is in it.
    html + &code.map(|lines| pre(&lines)).unwrap_or_default()
}

fn pre(lines: &[&str]) -> String {
    format!(
        "<pre><code>{}</code></pre>\n",
        lines.iter().map(|line| escape(line)).collect::<Vec<_>>().join("\n")
    )
}

fn item(line: &str) -> Option<&str> {
    let line = line.trim_start();
    line.strip_prefix("- ").or_else(|| line.strip_prefix("* "))
}

fn paragraph(lines: &[&str]) -> String {
    let start = lines.iter().position(|line| item(line).is_some()).unwrap_or(lines.len());
    let (words, list) = lines.split_at(start);
    let mut html = String::new();
    if !words.is_empty() {
        html += &format!("<p>{}</p>\n", inline(&words.join(" ")));
    }
    if !list.is_empty() {
        let mut items: Vec<String> = Vec::new();
        for line in list {
            match (item(line), items.last_mut()) {
                (None, Some(last)) => *last += &format!(" {}", line.trim()),
                (text, _) => items.push(text.unwrap_or(line).to_owned()),
            }
        }
        let items = items.iter().map(|item| format!("<li>{}</li>\n", inline(item)));
        html += &format!("<ul>\n{}</ul>\n", items.collect::<String>());
    }
    html
}

/// The marks within one line of text as HTML.
pub fn inline(text: &str) -> String {
    let mut html = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['`', '*', '[']) {
        let (before, from) = rest.split_at(at);
        html += &escape(before);
        let (shown, after) = code(from)
            .or_else(|| strong(from))
            .or_else(|| emphasis(from))
            .or_else(|| link(from))
            .unwrap_or_else(|| (from[..1].to_owned(), &from[1..]));
        html += &shown;
        rest = after;
    }
    html + &escape(rest)
}

type Marked<'a> = Option<(String, &'a str)>;

fn code(text: &str) -> Marked<'_> {
    let (inside, after) = text.strip_prefix('`')?.split_once('`')?;
    Some((format!("<code>{}</code>", escape(inside)), after))
}

fn strong(text: &str) -> Marked<'_> {
    let (inside, after) = text.strip_prefix("**")?.split_once("**")?;
    Some((format!("<strong>{}</strong>", inline(inside)), after))
}

fn emphasis(text: &str) -> Marked<'_> {
    let (inside, after) = text.strip_prefix('*')?.split_once('*')?;
    // `2 * 3 * 4` is arithmetic.
    let words = !inside.is_empty() && !inside.starts_with(' ') && !inside.ends_with(' ');
    words.then(|| (format!("<em>{}</em>", inline(inside)), after))
}

fn link(text: &str) -> Marked<'_> {
    let (name, rest) = text.strip_prefix('[')?.split_once("](")?;
    let (target, after) = rest.split_once(')')?;
    // Only what cannot run a script: the web, this page, and files of the report.
    let scheme = target.split(['/', '?', '#']).next()?.contains(':');
    let safe = target.starts_with("https://") || target.starts_with("http://") || !scheme;
    safe.then(|| (format!("<a href=\"{}\">{}</a>", escape(target), inline(name)), after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_become_elements_and_everything_else_is_text() {
        for (markdown, expected) in [
            ("a\nb\n\nc", "<p>a b</p>\n<p>c</p>\n"),
            ("`x < 1`", "<p><code>x &lt; 1</code></p>\n"),
            ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>\n"),
            ("2 * 3 * 4", "<p>2 * 3 * 4</p>\n"),
            ("[a](https://e.org/?x&y)", "<p><a href=\"https://e.org/?x&amp;y\">a</a></p>\n"),
            ("[a](javascript:x)", "<p>[a](javascript:x)</p>\n"),
            ("see:\n- one\n  more\n- two", "<p>see:</p>\n<ul>\n<li>one more</li>\n<li>two</li>\n</ul>\n"),
            ("```\na  < b\n\n**c**\n```", "<pre><code>a  &lt; b\n\n**c**</code></pre>\n"),
            ("```\nnever closed", "<pre><code>never closed\n</code></pre>\n"),
            ("a ` b * c [ d", "<p>a ` b * c [ d</p>\n"),
            ("<b>&amp;", "<p>&lt;b&gt;&amp;amp;</p>\n"),
            ("", ""),
        ] {
            assert_eq!(html(markdown), expected, "{markdown}");
        }
    }
}
