//! Answers that end with an end token of their own, before the one that the chat template writes.

use dataloading::chat::{Conversation, EndTokens, Segment};
use serde_json::Value;

/// Returns the end token with which the text of a learned answer ends, where the template writes an end after it. Both are learned, as
/// by transformers.
pub(super) fn second_end<'a>(
    conversation: &Conversation,
    rows: &[Vec<Segment>],
    ends: &'a EndTokens,
) -> Option<&'a str> {
    let tokens = || ends.model.iter().chain(&ends.added).filter(|token| !token.is_empty());
    let answers = conversation.messages.iter().filter(|message| message.is_answer() && message.is_trained);
    let mut texts = answers.filter_map(|message| message.fields.get("content").and_then(Value::as_str));
    let is_followed = |own: &str| {
        let is_end = |rest: &str| {
            let is_of_model = ends.model.iter().any(|token| token == own);
            rest.starts_with(own)
                || is_of_model
                    && ends.model.iter().any(|end| !end.is_empty() && rest.starts_with(end.as_str()))
        };
        rows.iter().any(|segments| {
            let text: String = segments.iter().map(|segment| segment.text.as_str()).collect();
            text.match_indices(own).any(|(at, _)| is_end(text[at + own.len()..].trim_start()))
        })
    };
    texts.find_map(|text| {
        let trailing = tokens().filter(|token| text.trim_end().ends_with(token.as_str()));
        trailing.max_by_key(|token| token.len()).map(String::as_str).filter(|trailing| is_followed(trailing))
    })
}
