//! Configurations of models that also read images: the text model's is their `text_config`.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use crate::strict_json;

/// `model_type` of such a model, and that of its text model.
const NESTED: [(&str, &str); 3] =
    [("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text"), ("gemma4", "gemma4_text")];

/// Fields that stand beside the text model's and hold for it, if it does not have them itself.
const SHARED: [&str; 5] =
    ["tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "transformers_version"];

/// Returns the configuration of the text model, if the file is that of a model which also reads images and whose text model is supported; any
/// other text as it is.
pub fn text_config(text: &str) -> Cow<'_, str> {
    let Ok(file) = strict_json::from_str::<Map<String, Value>>(text) else { return Cow::Borrowed(text) };
    let of_file = file.get("model_type").and_then(Value::as_str);
    let text_type = NESTED.iter().find(|(name, _)| Some(*name) == of_file).map(|(_, text_type)| *text_type);
    let (Some(text_type), Some(Value::Object(nested))) = (text_type, file.get("text_config")) else {
        return Cow::Borrowed(text);
    };
    let mut fields = nested.clone();
    fields.entry("model_type").or_insert_with(|| json!(text_type));
    for name in SHARED {
        if let Some(value) = file.get(name).filter(|_| fields.get(name).is_none_or(Value::is_null)) {
            fields.insert(name.to_owned(), value.clone());
        }
    }
    Cow::Owned(Value::Object(fields).to_string())
}
