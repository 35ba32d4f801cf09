//! The Markdown that an experiment's `about` is written in, as HTML.
//!
//! CommonMark with formulas in `$…$` and `$$…$$`, but HTML is shown as it is written, a picture as its words, and a link leads to the web,
//! to this page or to a file of the report, so that a page runs no script and loads nothing from elsewhere.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd, html::push_html};

use crate::math;

/// Returns the paragraphs and lists of `text` as HTML.
pub fn html(text: &str) -> String {
    let mut html = String::new();
    push_html(&mut html, events(&plain_characters(text)).into_iter());
    html
}

/// Returns the marks within one line of text as HTML.
pub fn inline(text: &str) -> String {
    let mut html = String::new();
    let text = &plain_characters(text);
    let paragraph =
        |event: &Event<'_>| matches!(event, Event::Start(Tag::Paragraph) | Event::End(TagEnd::Paragraph));
    push_html(&mut html, events(text).into_iter().filter(|event| !paragraph(event)));
    html
}

/// The text with spaces for control characters, which a page must not have.
fn plain_characters(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect()
}

fn events(text: &str) -> Vec<Event<'_>> {
    // Whether each link that is open at an event is shown as one.
    let mut links = Vec::new();
    let shown = Parser::new_ext(text, Options::ENABLE_MATH).filter_map(|event| match event {
        Event::Start(Tag::Link { ref dest_url, .. }) => {
            let safe = is_safe(dest_url);
            links.push(safe);
            safe.then_some(event)
        }
        Event::End(TagEnd::Link) => links.pop().unwrap_or(false).then_some(event),
        Event::Start(Tag::Image { .. }) | Event::End(TagEnd::Image) => None,
        Event::Start(Tag::HtmlBlock) => Some(Event::Start(Tag::Paragraph)),
        Event::End(TagEnd::HtmlBlock) => Some(Event::End(TagEnd::Paragraph)),
        Event::Html(html) | Event::InlineHtml(html) => Some(Event::Text(html)),
        Event::InlineMath(tex) => Some(formula(&tex, false)),
        Event::DisplayMath(tex) => Some(formula(&tex, true)),
        Event::SoftBreak => Some(Event::Text(" ".into())),
        event => Some(event),
    });
    shown.collect()
}

/// A formula as MathML, or as it is written where it is beyond what [`math`] knows.
fn formula(tex: &str, display: bool) -> Event<'static> {
    match math::mathml(tex, display) {
        Ok(mathml) => Event::InlineHtml(mathml.into()),
        Err(_) => Event::Code(tex.to_owned().into()),
    }
}

/// Only what cannot run a script: the web, this page, and files of the report.
fn is_safe(target: &str) -> bool {
    let scheme = target.split(['/', '?', '#']).next().is_some_and(|start| start.contains(':'));
    target.starts_with("https://") || target.starts_with("http://") || !scheme
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
            ("[a](javascript:x)", "<p>a</p>\n"),
            ("![a](https://e.org/a.png)", "<p>a</p>\n"),
            ("see:\n- one\n  more\n- two", "<p>see:</p>\n<ul>\n<li>one more</li>\n<li>two</li>\n</ul>\n"),
            ("```\na  < b\n\n**c**\n```", "<pre><code>a  &lt; b\n\n**c**\n</code></pre>\n"),
            ("```\nnever closed", "<pre><code>never closed</code></pre>\n"),
            ("a ` b * c [ d", "<p>a ` b * c [ d</p>\n"),
            ("<b>&amp;", "<p>&lt;b&gt;&amp;</p>\n"),
            ("<script>\nx\n</script>", "<p>&lt;script&gt;\nx\n&lt;/script&gt;</p>\n"),
            ("$a < b$", "<p><math><mi>a</mi><mo>&lt;</mo><mi>b</mi></math></p>\n"),
            ("$\\oint$", "<p><code>\\oint</code></p>\n"),
            ("", ""),
        ] {
            assert_eq!(html(markdown), expected, "{markdown}");
        }
        assert_eq!(inline("a *b* < `c`"), "a <em>b</em> &lt; <code>c</code>");
    }
}
