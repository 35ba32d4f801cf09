//! Snippets of Jinja2 with what it makes of them under transformers' settings, and templates that ask for too much.
//!
//! `xtask/peers/jinja_snippets.py` made `jinja_snippets.json`.

use dataloading::chat::{ChatTemplate, Conversation, Message, TemplateConfig};
use serde_json::Value;

/// Snippets in which Jinja2 has what templates of conversations do not need, and which are an error here.
const REFUSED: &[&str] = &[
    "{{ '%r' % text }}",
    "{{ '{!r}'.format(text) }}",
    "{{ '%10s|%-10s|' % ('é', 'é') }}",
    "{{ '{:>5}'.format('é') }}",
    "{{ 'hello world this is'|wordwrap(7) }}",
    "{{ d|pprint }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}",
    "{{ text.encode('utf-8') }}",
    "{{ n.bit_length() }}",
    "{{ 'abc'.translate({97: 'x'}) }}",
    "{{ 'abc'|random in 'abc' }}",
    "{{ 1234567|filesizeformat }} {{ 'http://a.b'|urlize }}",
    "{{ d|xmlattr }}",
];

fn render(source: &str, arguments: &Value) -> dataloading::Result<String> {
    let options = TemplateConfig {
        arguments: arguments.as_object().cloned().unwrap_or_default(),
        date: "2026-01-02".parse().unwrap(),
        ..TemplateConfig::default()
    };
    let conversation = Conversation::new([Message::new("user", "Hi"), Message::new("assistant", "4")]);
    Ok(ChatTemplate::new("snippet", source, options)?.render(&conversation, false)?.text)
}

#[test]
fn snippets_are_rendered_as_jinja2_renders_them() {
    let fixtures: Value = serde_json::from_str(include_str!("jinja_snippets.json")).unwrap();
    let mut wrong = Vec::new();
    let snippets = fixtures["snippets"].as_array().unwrap();
    for snippet in snippets {
        let (source, expected) = (snippet[0].as_str().unwrap(), snippet[1].as_str());
        let rendered = render(source, &fixtures["arguments"]);
        match (expected, &rendered) {
            (Some(expected), Ok(text)) if expected == text => assert!(!REFUSED.contains(&source), "{source}"),
            (None, Err(_)) => {}
            (Some(_), Err(_)) if REFUSED.contains(&source) => {}
            (expected, rendered) => {
                wrong.push(format!("{source}\n  jinja2: {expected:?}\n  here:   {rendered:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), snippets.len(), wrong.join("\n"));
}

/// A template's request for memory is refused before the memory is taken.
#[test]
fn a_template_cannot_take_all_memory() {
    for source in [
        "{{ '{:>1999999999}'.format('a') }}",
        "{{ '{:>99999999999}'.format('a') }}",
        "{{ '{:.99999999999f}'.format(1.5) }}",
        "{{ '{:.1999999f}'.format(1.5) }}",
        "{{ '{:01999999999d}'.format(1) }}",
        "{{ '{0:>1999999999}{0:>1999999999}'.format('a') }}",
        "{{ ('{0:>1000000}' * 4000).format('a') }}",
        "{{ ('{0}' * 100000).format('a' * 100000) }}",
        "{{ '%1999999999d' % 1 }}",
        "{{ '%.1999999999f' % 1.5 }}",
        "{{ '%*d' % (1999999999, 1) }}",
        "{{ '%1999999999s'|format('a') }}",
        "{{ '%.99999999999f'|format(1.5) }}",
        "{{ 'a'.center(1999999999) }}",
        "{{ 'a'.ljust(99999999999) }}",
        "{{ 'a'.rjust(1999999999, 'é') }}",
        "{{ 'a'.zfill(1999999999) }}",
        "{{ 'a'|center(1999999999) }}",
        "{{ '\t'.expandtabs(1999999999) }}",
        "{{ 'a\nb'|indent(1999999999) }}",
        "{{ 'a\nb'|indent(99999999999) }}",
        "{{ [1]|tojson(indent=1999999999) }}",
        "{{ ([1] * 100000)|tojson(indent='a' * 1000000) }}",
        "{{ range(1000000)|join('a' * 1000000) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
        "{{ [1]|slice(1999999999)|list|length }}",
        "{{ [1]|batch(1999999999, 0)|list|length }}",
        "{{ [1] * 1999999999 }}",
        "{{ 1.5|round(1999999999) }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s.center(2 ** i) %}{% endfor %}",
    ] {
        if let Ok(text) = render(source, &Value::Null) {
            assert!(text.len() < 1 << 21, "{source}: {} bytes", text.len());
        }
    }
}
