//! Two answers to one prompt, as TRL, Anthropic and UltraFeedback write them.
//!
//! | fields | prompt |
//! |---|---|
//! | `prompt`, `chosen`, `rejected`: texts | `prompt` |
//! | the same as lists of messages, or some of them | `prompt`; a text is the user's message, an answer the assistant's |
//! | `chosen`, `rejected`: conversations, with their first message as `prompt` or without | the messages that both begin with |
//! | `chosen`, `rejected`: texts | up to the last `Assistant:` that both begin with (Anthropic's), else what both begin with |

use serde_json::{Map, Value};

use super::content::{Content, string};
use super::messages;
use crate::chat::Message;

/// Where an answer begins in Anthropic's texts.
const TURN: &str = "\n\nAssistant:";

pub(super) fn content(fields: &Map<String, Value>) -> Result<Content, String> {
    let is_list = |field: &str| fields.get(field).is_some_and(Value::is_array);
    let has_prompt = fields.get("prompt").is_some_and(|prompt| !prompt.is_null());
    let sides = match ["prompt", "chosen", "rejected"].into_iter().any(is_list) {
        true => conversations(fields, has_prompt)?,
        false => texts(fields, has_prompt)?,
    };
    let [chosen, rejected] = sides.map(Box::new);
    Ok(Content::Pair { chosen, rejected })
}

/// Returns the sides of a record of texts.
fn texts(fields: &Map<String, Value>, has_prompt: bool) -> Result<[Content; 2], String> {
    let (chosen, rejected) = (string(fields, "chosen")?, string(fields, "rejected")?);
    if has_prompt {
        let prompt = string(fields, "prompt")?;
        return Ok(
            [chosen, rejected].map(|completion| Content::Completion { prompt: prompt.clone(), completion })
        );
    }
    let same: usize = chosen
        .chars()
        .zip(rejected.chars())
        .take_while(|(own, other)| own == other)
        .map(|(own, _)| own.len_utf8())
        .sum();
    let common = &chosen[..same];
    let end = match common.rfind(TURN) {
        Some(at) => at + TURN.len(),
        // A word that both answers begin with is of both.
        None => common.rfind(char::is_whitespace).unwrap_or(0),
    };
    if end == 0 {
        return Err("`chosen` and `rejected` begin with different words, and there is no `prompt`; give it, or let both begin with it"
            .to_owned());
    }
    Ok([chosen, rejected].map(|text| {
        let (prompt, completion) = text.split_at(end);
        Content::Completion { prompt: prompt.to_owned(), completion: completion.to_owned() }
    }))
}

/// Returns the sides of a record of messages.
fn conversations(fields: &Map<String, Value>, has_prompt: bool) -> Result<[Content; 2], String> {
    let part = |field: &str, role: &str| match fields.get(field) {
        Some(Value::Array(_)) => messages::messages(fields, field),
        _ => Ok(vec![Message::new(role, &string(fields, field)?)]),
    };
    let mut sides = [part("chosen", "assistant")?, part("rejected", "assistant")?];
    let prompt = if has_prompt { part("prompt", "user")? } else { Vec::new() };
    // Some repeat the prompt in both answers.
    let has_prompt_within = |side: &Vec<Message>| {
        side.first().is_some_and(|first| !first.is_answer())
            && prompt.last().is_none_or(|last| side.iter().any(|message| message.fields == last.fields))
    };
    if !sides.iter().all(has_prompt_within) {
        sides = sides.map(|side| prompt.iter().cloned().chain(side).collect());
    }
    let [chosen, rejected] = &sides;
    let same =
        chosen.iter().zip(rejected.iter()).take_while(|(own, other)| own.fields == other.fields).count();
    if same == 0 {
        return Err("`chosen` and `rejected` begin with different messages, and there is no `prompt`; give it, or let both begin with it"
            .to_owned());
    }
    let side = |mut messages: Vec<Message>| {
        messages.iter_mut().take(same).for_each(|message| message.is_trained = false);
        messages::with_messages(fields, messages).map(Content::Conversation)
    };
    let [chosen, rejected] = sides;
    Ok([side(chosen)?, side(rejected)?])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pair(record: &Value) -> [Content; 2] {
        match content(record.as_object().unwrap()).unwrap() {
            Content::Pair { chosen, rejected } => [*chosen, *rejected],
            other => panic!("{other:?}"),
        }
    }

    fn completion(prompt: &str, completion: &str) -> Content {
        Content::Completion { prompt: prompt.to_owned(), completion: completion.to_owned() }
    }

    /// The role, the text and whether it is learned, of each message.
    fn turns(side: &Content) -> Vec<(String, String, bool)> {
        let Content::Conversation(conversation) = side else { panic!("{side:?}") };
        let turn = |message: &Message| {
            let text = message.fields["content"].as_str().unwrap().to_owned();
            (message.role().to_owned(), text, message.is_trained)
        };
        conversation.messages.iter().map(turn).collect()
    }

    #[test]
    fn texts_have_their_prompt_or_begin_with_it() {
        let given = json!({ "prompt": "2+2=", "chosen": " 4", "rejected": " 5" });
        assert_eq!(pair(&given), [completion("2+2=", " 4"), completion("2+2=", " 5")]);
        let anthropic = json!({
            "chosen": "\n\nHuman: Hi\n\nAssistant: I am well", "rejected": "\n\nHuman: Hi\n\nAssistant: I am not",
        });
        let prompt = "\n\nHuman: Hi\n\nAssistant:";
        assert_eq!(pair(&anthropic), [completion(prompt, " I am well"), completion(prompt, " I am not")]);
        let words = json!({ "chosen": "Two and two is four", "rejected": "Two and two is five" });
        assert_eq!(
            pair(&words),
            [completion("Two and two is", " four"), completion("Two and two is", " five")]
        );
        let apart = json!({ "chosen": "Yes", "rejected": "No" });
        let refused = content(apart.as_object().unwrap()).unwrap_err();
        assert!(refused.contains("there is no `prompt`"), "{refused}");
    }

    #[test]
    fn of_conversations_what_differs_is_learned() {
        let user = |text: &str| json!({ "role": "user", "content": text });
        let answer = |text: &str| json!({ "role": "assistant", "content": text });
        let expected = |text: &str| {
            vec![("user".to_owned(), "Hi".to_owned(), false), ("assistant".to_owned(), text.to_owned(), true)]
        };
        for record in [
            json!({ "prompt": [user("Hi")], "chosen": [answer("Hello")], "rejected": [answer("Go")] }),
            json!({ "prompt": [user("Hi")], "chosen": "Hello", "rejected": "Go" }),
            json!({ "prompt": "Hi", "chosen": [answer("Hello")], "rejected": [answer("Go")] }),
            // UltraFeedback's.
            json!({ "prompt": "Hi", "chosen": [user("Hi"), answer("Hello")], "rejected": [user("Hi"), answer("Go")] }),
            json!({ "chosen": [user("Hi"), answer("Hello")], "rejected": [user("Hi"), answer("Go")] }),
        ] {
            let [chosen, rejected] = pair(&record);
            assert_eq!(turns(&chosen), expected("Hello"), "{record}");
            assert_eq!(turns(&rejected), expected("Go"), "{record}");
        }
        let apart =
            json!({ "chosen": [user("Hi"), answer("Hello")], "rejected": [user("Ho"), answer("Go")] });
        assert!(content(apart.as_object().unwrap()).is_err());
    }
}
