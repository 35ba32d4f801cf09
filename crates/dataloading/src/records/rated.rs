//! An answer with a label that says whether it is desirable, as TRL's unpaired preferences have it.
//!
//! | fields | prompt |
//! |---|---|
//! | `prompt`, `completion`: texts or lists of messages; `label`: true or false | `prompt` |
//! | `completion`: a conversation; `label` | the messages before its last answer |

use serde_json::{Map, Value};

use super::content::{Content, prompt_completion};
use super::messages;

/// Returns the label of a record, which CSV has as a text; `None` if it is nothing that is true or false.
pub(super) fn label(fields: &Map<String, Value>) -> Option<bool> {
    match fields.get("label")? {
        Value::Bool(label) => Some(*label),
        Value::String(label) if label.eq_ignore_ascii_case("true") => Some(true),
        Value::String(label) if label.eq_ignore_ascii_case("false") => Some(false),
        _ => None,
    }
}

pub(super) fn content(fields: &Map<String, Value>) -> Result<Content, String> {
    let is_desirable =
        label(fields).ok_or("`label` is neither true nor false; it says whether the answer is desirable")?;
    let has_prompt = fields.get("prompt").is_some_and(|prompt| !prompt.is_null());
    let answer = match has_prompt {
        true => prompt_completion(fields)?,
        false => conversation(fields)?,
    };
    Ok(Content::Rated { answer: Box::new(answer), is_desirable })
}

fn conversation(fields: &Map<String, Value>) -> Result<Content, String> {
    if !fields.get("completion").is_some_and(Value::is_array) {
        return Err(
            "`completion` is a text without a `prompt`; give the prompt, or write both as a list of messages"
                .to_owned(),
        );
    }
    let mut messages = messages::messages(fields, "completion")?;
    let last = messages.iter().rposition(crate::chat::Message::is_answer);
    let Some(last) = last.filter(|last| *last > 0) else {
        return Err("`completion` has no answer to an earlier message; give the `prompt`, or write both as a list of messages".to_owned());
    };
    messages[..last].iter_mut().for_each(|message| message.is_trained = false);
    messages::with_messages(fields, messages).map(Content::Conversation)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rated(record: &Value) -> Result<(Content, bool), String> {
        match content(record.as_object().unwrap())? {
            Content::Rated { answer, is_desirable } => Ok((*answer, is_desirable)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn answers_have_their_prompt_and_label() {
        let text = json!({ "prompt": "2+2=", "completion": " 4", "label": true });
        let completion = Content::Completion { prompt: "2+2=".to_owned(), completion: " 4".to_owned() };
        assert_eq!(rated(&text).unwrap(), (completion.clone(), true));
        let of_csv = json!({ "prompt": "2+2=", "completion": " 4", "label": "False" });
        assert_eq!(rated(&of_csv).unwrap(), (completion, false));
        let user = json!({ "role": "user", "content": "Hi" });
        let answer = json!({ "role": "assistant", "content": "Ho" });
        for record in [
            json!({ "prompt": [user], "completion": [answer], "label": false }),
            json!({ "prompt": "Hi", "completion": [answer], "label": false }),
            json!({ "completion": [user, answer], "label": false }),
        ] {
            let (Content::Conversation(conversation), false) = rated(&record).unwrap() else {
                panic!("{record}")
            };
            let turns = conversation.messages.iter();
            let turns: Vec<(&str, bool)> =
                turns.map(|message| (message.role(), message.is_trained)).collect();
            assert_eq!(turns, [("user", false), ("assistant", true)], "{record}");
        }
    }

    #[test]
    fn records_without_a_prompt_or_a_label_are_refused() {
        let refused = |record: Value| rated(&record).unwrap_err();
        assert!(refused(json!({ "completion": "4", "label": true })).contains("without a `prompt`"));
        let alone = json!({ "completion": [{ "role": "assistant", "content": "4" }], "label": true });
        assert!(refused(alone).contains("no answer to an earlier message"));
        assert!(
            refused(json!({ "prompt": "a", "completion": "b", "label": 3 }))
                .contains("neither true nor false")
        );
    }
}
