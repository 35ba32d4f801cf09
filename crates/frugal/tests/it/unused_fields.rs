//! What records have and a chat template leaves out is noted, with the first record.

use std::path::Path;

use dataloading::chat::{ChatTemplate, Mask, TemplateConfig};
use dataloading::records::{Detected, Record, RecordFormat, RecordLocation};
use dataloading::{IGNORE_INDEX, Tokenizer};
use frugal::rows::{Counts, Overlong, RowConfig, RowEncoder};
use serde_json::{Value, json};
use training::masked_rows::MaskedRow;

/// Plain turns; a template with tools and reasoning; one that passes over system messages.
const PLAIN: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}\
                     {% if add_generation_prompt %}assistant: {% endif %}";
const READING: &str = "{% if tools %}{{ tools|tojson }}{% endif %}{% for m in messages %}{{ m.role }}:\n\
                       {% if m.name %}[{{ m.name }}]{% endif %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}\
                       {% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|endoftext|>\n{% endfor %}\
                       {% if add_generation_prompt %}assistant:\n{% endif %}";
const WITHOUT_SYSTEM: &str = "{% for m in messages if m.role != 'system' %}{{ m.role }}:\n{{ m.content.split('</think>')[-1] }}\
                              <|endoftext|>\n{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}";

fn encoder(source: &str) -> RowEncoder {
    let folder = dataloading::embedded::folder().unwrap();
    let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json")).unwrap();
    let options = RowConfig {
        longest: 400,
        overlong: Overlong::Error,
        mask: Mask::Answers,
        begin: None,
        end: 0,
        vocabulary: 4096,
        field: "text".to_owned(),
        templates: None,
    };
    let template = ChatTemplate::new("t.jinja", source, TemplateConfig::default()).unwrap();
    RowEncoder::new(tokenizer, Some(template), &[0], options)
}

fn encode(encoder: &RowEncoder, records: &[Value]) -> Result<(Vec<MaskedRow>, Counts), String> {
    let detected = Detected { formats: vec![(RecordFormat::Messages, 1)], ignored: Vec::new() };
    let (mut rows, mut counts) = (Vec::new(), Counts::default());
    for (number, fields) in (1..).zip(records) {
        let location = RecordLocation { path: Path::new("a.jsonl").into(), unit: "line", number, line: None };
        let record = Record { fields: fields.as_object().unwrap().clone(), location };
        let (of_record, of_counts) = encoder.record(&record, &detected).map_err(|error| error.to_string())?;
        rows.extend(of_record);
        counts.add(&of_counts);
    }
    Ok((rows, counts))
}

/// A record with a question and these fields of the answer.
fn answer(fields: Value) -> Value {
    let mut message = json!({ "role": "assistant", "content": "a" });
    message.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({ "messages": [{ "role": "user", "content": "q" }, message] })
}

fn call() -> Value {
    json!({ "content": "", "tool_calls": [{ "type": "function", "function": { "name": "f", "arguments": "{}" } }] })
}

#[test]
fn fields_that_a_template_leaves_out_are_noted_with_the_first_record() {
    let mut with_tools = answer(json!({}));
    with_tools["tools"] = json!([{ "type": "function", "function": { "name": "f" } }]);
    with_tools["chat_template_kwargs"] = json!({ "enable_thinking": false });
    let records = [
        answer(json!({ "reasoning_content": "hard" })),
        answer(json!({ "thinking": "hard", "name": null })),
        answer(json!({ "name": "bob" })),
        answer(call()),
        with_tools,
        answer(json!({ "reasoning_content": "hard", "tool_call_id": "x" })),
    ];
    let (_, counts) = encode(&encoder(PLAIN), &records).unwrap();
    let left_out = |part: &str, records: &str| {
        format!("{part}: the chat template leaves it out, so the model does not see it ({records})")
    };
    let expected = [
        left_out("`enable_thinking` of `chat_template_kwargs`", "1 record: a.jsonl: line 5"),
        left_out("`name` of messages", "1 record: a.jsonl: line 3"),
        left_out("`reasoning_content` of messages", "2 records, the first: a.jsonl: line 1"),
        left_out("`thinking` of messages", "1 record: a.jsonl: line 2"),
        left_out("`tool_calls` of messages", "1 record: a.jsonl: line 4"),
        left_out("`tools`", "1 record: a.jsonl: line 5"),
    ];
    let lines: Vec<String> =
        counts.notes.lines().into_iter().filter(|line| !line.starts_with("a token joins")).collect();
    assert_eq!(lines, expected);
    assert_eq!(counts.empty_answers, 1, "the calls are not written, so the model would learn to end at once");
    let (_, counts) = encode(&encoder(READING), &records).unwrap();
    let expected = [
        left_out("`enable_thinking` of `chat_template_kwargs`", "1 record: a.jsonl: line 5"),
        left_out("`thinking` of messages", "1 record: a.jsonl: line 2"),
    ];
    assert_eq!((counts.notes.lines(), counts.empty_answers), (expected.to_vec(), 0));
    let system = json!({ "messages": [
        { "role": "system", "content": "Be kind." }, { "role": "user", "content": "q" },
        { "role": "assistant", "content": "<think>hard</think>a" },
    ] });
    let (_, counts) = encode(&encoder(WITHOUT_SYSTEM), &[system]).unwrap();
    let expected = [
        left_out("messages with the role `system`", "1 record: a.jsonl: line 1"),
        left_out("the reasoning before `</think>` in answers", "1 record: a.jsonl: line 1"),
    ];
    assert_eq!(counts.notes.lines(), expected);
}

/// As axolotl's `message_field_training`.
#[test]
fn turns_that_are_not_to_be_trained_have_no_labels() {
    let encoder = encoder(READING);
    let two = |first: Value| {
        let mut record = answer(first);
        let rest = json!([{ "role": "user", "content": "q" }, { "role": "assistant", "content": "b" }]);
        record["messages"].as_array_mut().unwrap().extend(rest.as_array().unwrap().clone());
        record
    };
    let learned = |record: Value| {
        let (rows, counts) = encode(&encoder, &[record]).unwrap();
        assert_eq!(counts.notes.lines(), Vec::<String>::new());
        let labels = rows[0].labels.iter().filter(|label| **label != IGNORE_INDEX).map(|id| *id as u32);
        encoder.tokenizer().decode(&labels.collect::<Vec<_>>()).unwrap()
    };
    let both = "a<|endoftext|>\nb<|endoftext|>\n";
    for (mark, expected) in [
        (json!({ "train": false }), "b<|endoftext|>\n"),
        (json!({ "training": false }), "b<|endoftext|>\n"),
        (json!({ "weight": 0, "train": true }), "b<|endoftext|>\n"),
        (json!({ "train": true }), both),
        (json!({ "train": null }), both),
    ] {
        assert_eq!(learned(two(mark.clone())), expected, "{mark}");
    }
    let error = encode(&encoder, &[two(json!({ "train": "no" }))]).unwrap_err();
    assert!(error.contains("message 2: `train` is \"no\"; expected false"), "{error}");
    // A question is never learned.
    let mut asked = answer(json!({}));
    asked["messages"][0]["train"] = json!(true);
    let (_, counts) = encode(&encoder, &[asked]).unwrap();
    assert!(counts.notes.lines()[0].starts_with("`train` of messages: "), "{:?}", counts.notes);
}

/// A prompt that ends with a blank has other tokens alone than before an answer.
#[test]
fn tokens_that_join_a_prompt_with_its_answer_are_noted() {
    let (rows, counts) = encode(&encoder(PLAIN), &[answer(json!({}))]).unwrap();
    let lines = counts.notes.lines();
    assert!(
        lines[0].starts_with("a token joins the end of the prompt with the start of the answer"),
        "{lines:?}"
    );
    let tokenizer = encoder(PLAIN).tokenizer().clone();
    let whole = tokenizer.encode("user: q<|endoftext|>\nassistant: a<|endoftext|>\n").unwrap();
    assert_eq!(rows[0].tokens, whole.into_iter().map(i64::from).collect::<Vec<_>>());
}
