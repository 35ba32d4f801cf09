//! Defaults of a chat template's variables, written into its text.
//!
//! A training may set a variable, such as `enable_thinking`. Other programs do not know that, so the template that they get sets it where
//! they do not: `{%- if enable_thinking is not defined %}{%- set enable_thinking = false %}{%- endif %}`, in a line of its own, which
//! leaves the rest as it is rendered.

use serde_json::{Map, Value};

/// Returns a template that sets variables to these values where they are not given.
pub(super) fn with_defaults(source: &str, arguments: &Map<String, Value>) -> String {
    let set = |(name, value): (&String, &Value)| {
        let value = literal(value);
        format!("{{%- if {name} is not defined %}}{{%- set {name} = {value} %}}{{%- endif %}}\n")
    };
    let defaults: String = arguments.iter().map(set).collect();
    // The text of a run has them already.
    if source.starts_with(&defaults) { source.to_owned() } else { format!("{defaults}{source}") }
}

/// A value as Jinja reads it.
fn literal(value: &Value) -> String {
    let list = |parts: Vec<String>| parts.join(", ");
    match value {
        Value::Null => "none".to_owned(),
        Value::Array(values) => format!("[{}]", list(values.iter().map(literal).collect())),
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| {
                format!("{}: {}", Value::from(name.as_str()), literal(value))
            };
            format!("{{{}}}", list(fields.iter().map(field).collect()))
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use dataloading::chat::{ChatTemplate, Conversation, Message, TemplateConfig};
    use serde_json::json;

    use super::*;

    #[test]
    fn variables_have_the_training_s_values_unless_they_are_given() {
        let arguments = json!({ "think": false, "name": "a \"b\"\n", "list": [1, null, { "k": 1.5 }] });
        let arguments = arguments.as_object().unwrap();
        let source = "\n  {% if true %}{{ think }} {{ name }}{{ list[1] is none }} {{ list[2].k }} {{ messages[0].content }}{% endif %}";
        let text = with_defaults(source, arguments);
        assert_eq!(with_defaults(&text, arguments), text, "once");
        let render = |given: &Value| {
            let options =
                TemplateConfig { arguments: given.as_object().unwrap().clone(), ..TemplateConfig::default() };
            let template = ChatTemplate::new("t", &text, options).unwrap();
            template.render(&Conversation::new([Message::new("user", "hi")]), true).unwrap().text
        };
        assert_eq!(render(&json!({})), "\nFalse a \"b\"\nTrue 1.5 hi");
        assert_eq!(render(&json!({ "think": true, "name": "n " })), "\nTrue n True 1.5 hi");
        assert_eq!(with_defaults("x", &Map::new()), "x");
    }
}
