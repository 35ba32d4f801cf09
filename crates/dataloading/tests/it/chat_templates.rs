//! Renderings compared with those of jinja2 under transformers' settings.
//!
//! `chat_templates.json` has templates of Qwen2.5, Qwen3 and gpt-oss (Apache-2.0), Phi-3, DeepSeek-V3 and GLM-4 (MIT), and those of TRL for
//! training (Apache-2.0); `xtask/peers/chat_templates.py` made it, and makes one of any other templates, which `FRUGAL_CHAT_TEMPLATES`
//! names.

use std::ops::Range;

use dataloading::chat::{ChatTemplate, Conversation, Message, TemplateConfig};
use serde_json::{Map, Value, json};

pub(crate) fn fixtures() -> Value {
    match std::env::var_os("FRUGAL_CHAT_TEMPLATES") {
        Some(path) => serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap(),
        None => serde_json::from_str(include_str!("chat_templates.json")).unwrap(),
    }
}

pub(crate) fn template(name: &str, source: &str) -> ChatTemplate {
    let special = json!({ "bos_token": "<s>", "eos_token": "</s>" });
    let options = TemplateConfig {
        special_tokens: special.as_object().unwrap().clone(),
        arguments: Map::new(),
        date: "2026-01-02".parse().unwrap(),
    };
    ChatTemplate::new(name, source, options).unwrap()
}

pub(crate) fn conversation(json: &Value) -> Conversation {
    let messages = json["messages"].as_array().unwrap().iter();
    Conversation {
        messages: messages
            .map(|fields| Message { fields: fields.as_object().unwrap().clone(), is_trained: true })
            .collect(),
        tools: json.get("tools").cloned(),
        documents: None,
        arguments: json.get("arguments").and_then(Value::as_object).cloned().unwrap_or_default(),
    }
}

fn in_bytes(text: &str, spans: &Value) -> Vec<Range<usize>> {
    let at = |value: &Value| {
        let count = value.as_u64().unwrap() as usize;
        text.char_indices().nth(count).map_or(text.len(), |(at, _)| at)
    };
    spans.as_array().unwrap().iter().map(|span| at(&span[0])..at(&span[1])).collect()
}

#[test]
fn renderings_and_spans_are_those_of_transformers() {
    let fixtures = fixtures();
    let (mut equal, mut refused, mut with_spans) = (0, 0, 0);
    for (name, source) in fixtures["templates"].as_object().unwrap() {
        let template = template(name, source.as_str().unwrap());
        for case in fixtures["cases"].as_array().unwrap().iter().filter(|case| case["template"] == **name) {
            let about = format!("{name}, {}", case["conversation"]);
            let json = &fixtures["conversations"][case["conversation"].as_str().unwrap()];
            let prompt = json["add_generation_prompt"].as_bool().unwrap_or(false);
            let rendered = template.render(&conversation(json), prompt);
            match (case["text"].as_str(), rendered) {
                (Some(text), Ok(rendered)) => {
                    assert_eq!(rendered.text, text, "{about}");
                    assert_eq!(rendered.spans, in_bytes(text, &case["spans"]), "{about}");
                    equal += 1;
                    with_spans += usize::from(!rendered.spans.is_empty());
                }
                (None, Err(_)) => refused += 1,
                (text, rendered) => panic!("{about}: expected {text:?}, got {rendered:?}"),
            }
        }
    }
    eprintln!(
        "{equal} renderings are equal, {with_spans} of them with spans; {refused} conversations are refused by both"
    );
    assert!(equal >= 70 && refused >= 1 && with_spans >= 14, "{equal} {refused} {with_spans}");
}

#[test]
fn errors_name_the_line_and_what_the_template_says() {
    let check = |source: &str, expected: &str| {
        let options = TemplateConfig::default();
        let rendered = ChatTemplate::new("chat_template.jinja", source, options)
            .and_then(|template| template.render(&Conversation::new([Message::new("user", "a")]), false));
        let error = rendered.unwrap_err().to_string();
        assert!(error.contains(expected), "{source}: {error}");
    };
    check("a\n{% if %}", "chat_template.jinja, line 2: syntax error");
    check(
        "\n\n{{ raise_exception('Roles must alternate ') }}",
        "chat_template.jinja, line 3: the template refuses the conversation: Roles must alternate",
    );
    check(
        "{% macro f() %}\n{{ raise_exception('no') }}{% endmacro %}\n\n{{ f() }}",
        "line 2: the template refuses the conversation: no",
    );
    check("{{ messages[0].a.b }}", "line 1: undefined value");
    check(
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "takes more than",
    );
    let doubling =
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    check(doubling, "takes more than");
    check("{{ 'a' * 1000000000000 }}", "line 1");
    check("{{ strftime_now('%Q') }}", "`%Q`, which is not supported");
    check("{{ [1]|tojson(separators=[1]) }}", "separators");
    check("{% filter upper %}{% generation %}a{% endgeneration %}", "syntax error");
}

#[test]
fn tojson_is_pythons() {
    let render = |source: &str| {
        let template = ChatTemplate::new("t", source, TemplateConfig::default()).unwrap();
        let mut conversation = Conversation::new([Message::new("user", "<ä\u{7f}\u{1}\"\\\n日😀>")]);
        conversation.tools = Some(json!({ "b": [1, -2.5, 1e16, true, null], "a": {}, "c": [] }));
        template.render(&conversation, false).unwrap().text
    };
    for (source, expected) in [
        ("{{ messages[0].content|tojson }}", "\"<ä\u{7f}\\u0001\\\"\\\\\\n日😀>\""),
        (
            "{{ messages[0].content|tojson(ensure_ascii=true) }}",
            "\"<\\u00e4\\u007f\\u0001\\\"\\\\\\n\\u65e5\\ud83d\\ude00>\"",
        ),
        ("{{ tools|tojson }}", r#"{"b": [1, -2.5, 1e+16, true, null], "a": {}, "c": []}"#),
        ("{{ tools|tojson(sort_keys=true) }}", r#"{"a": {}, "b": [1, -2.5, 1e+16, true, null], "c": []}"#),
        ("{{ tools|tojson(separators=[',', ':']) }}", r#"{"b":[1,-2.5,1e+16,true,null],"a":{},"c":[]}"#),
        ("{{ tools.b|tojson(indent=2) }}", "[\n  1,\n  -2.5,\n  1e+16,\n  true,\n  null\n]"),
        (
            "{{ {'a': {'b': [1]}}|tojson(indent='\t') }}",
            "{\n\t\"a\": {\n\t\t\"b\": [\n\t\t\t1\n\t\t]\n\t}\n}",
        ),
        ("{{ tools.a|tojson(indent=4) }}{{ [1, 2]|tojson(indent=none) }}", "{}[1, 2]"),
    ] {
        assert_eq!(render(source), expected, "{source}");
    }
}

#[test]
fn the_template_of_a_folder_is_found_as_transformers_finds_it() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let open = || ChatTemplate::from_folder(folder.path(), TemplateConfig::default());
    let render = |with_tools: bool| {
        let mut conversation = Conversation::new([Message::new("user", "hi")]);
        conversation.tools = with_tools.then(|| json!([{}]));
        open().unwrap().unwrap().render(&conversation, false).unwrap().text
    };
    assert!(open().unwrap().is_none());
    write("special_tokens_map.json", r#"{"bos_token": "<old>", "eos_token": {"content": "<e>"}}"#);
    write(
        "tokenizer_config.json",
        r#"{"bos_token": {"content": "<b>"}, "chat_template": "{{ bos_token }}{{ eos_token }}1"}"#,
    );
    assert_eq!(render(false), "<b><e>1");
    let named = |name: &str| json!({ "name": name, "template": format!("{name}{{{{ messages|length }}}}") });
    write(
        "tokenizer_config.json",
        &json!({ "chat_template": [named("default"), named("tool_use")] }).to_string(),
    );
    assert_eq!((render(false).as_str(), render(true).as_str()), ("default1", "tool_use1"));
    write("chat_template.jinja", "file");
    assert_eq!((render(false).as_str(), render(true).as_str()), ("file", "tool_use1"));
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    write(
        "tokenizer_config.json",
        &json!({ "chat_template": [named("rag"), named("tool_use")] }).to_string(),
    );
    let error = open().unwrap_err().to_string();
    assert!(error.contains("it has the chat templates rag, tool_use, and none named `default`"), "{error}");
    for (text, expected) in [
        (r#"{"chat_template": 5}"#, "neither a text nor a list"),
        (r#"{"chat_template": [{"name": "default"}]}"#, "neither a text nor a list"),
        ("[]", "not a JSON object"),
        (r#"{"chat_template": "{% if %}"}"#, "tokenizer_config.json, line 1: syntax error"),
    ] {
        write("tokenizer_config.json", text);
        let error = open().unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}
