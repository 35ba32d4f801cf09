//! Conversations of several turns, and their template.

use std::fmt::Write as _;

use serde_json::json;

use super::tiny_folder::Tiny;

/// Turns end with the tokenizer's end token; earlier answers lose what is between brackets, as Qwen3 removes its reasoning.
pub(crate) const TEMPLATE: &str = "{{ strftime_now('%d %b %Y') }}\n\
    {% for m in messages %}\
    {% set text = m.content.split(']')[-1] if m.role == 'assistant' and not loop.last else m.content %}\
    {{ m.role }}:\n{{ text }}<|endoftext|>\n\
    {% endfor %}\
    {% if add_generation_prompt %}assistant:\n{% endif %}";

/// Writes them, and the template into the model's folder.
pub(crate) fn conversations(tiny: &Tiny) {
    let mut lines = String::new();
    for n in 0..24 {
        let (a, b) = (n % 5, n % 7);
        let weight = i32::from(n % 3 != 0);
        let messages = json!([
            { "role": "user", "content": format!("Ann has {a} pears and buys {b} more.") },
            { "role": "assistant", "content": format!("[{a} + {b}] She has {}.", a + b), "weight": weight },
            { "role": "user", "content": "And one more?" },
            { "role": "assistant", "content": format!("[+ 1] {}.", a + b + 1) },
        ]);
        writeln!(lines, "{}", json!({ "messages": messages, "id": n })).unwrap();
    }
    std::fs::write(tiny.path("chat.jsonl"), lines).unwrap();
    std::fs::write(tiny.path("model/chat_template.jinja"), TEMPLATE).unwrap();
}
