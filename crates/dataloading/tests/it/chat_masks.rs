//! Which part of a conversation is learned.

use std::collections::BTreeMap;

use dataloading::chat::{
    ChatTemplate, Conversation, EndTokens, Mask, Message, Segment, TemplateConfig, TrainingVariant,
};
use serde_json::json;

use crate::chat_templates::{fixtures, template};

fn ends() -> EndTokens {
    let added = [
        "<|im_end|>",
        "<|im_start|>",
        "<|end|>",
        "</s>",
        "<|return|>",
        "<|call|>",
        "<|user|>",
        "<|observation|>",
        "<｜end▁of▁sentence｜>",
        "<end_of_turn>",
        "<|eot_id|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|end_of_text|>",
    ];
    let texts = |tokens: &[&str]| tokens.iter().map(|token| (*token).to_owned()).collect();
    EndTokens { added: texts(&added), model: texts(&["</s>", "<|user|>", "<|observation|>"]) }
}

fn turns(answers: [&str; 2]) -> Conversation {
    Conversation::new([
        Message::new("user", "Hi there"),
        Message::new("assistant", answers[0]),
        Message::new("user", "2+2?"),
        Message::new("assistant", answers[1]),
    ])
}

fn learned(row: &[Segment]) -> Vec<&str> {
    row.iter().filter(|segment| segment.is_trained).map(|segment| segment.text.as_str()).collect()
}

fn text(row: &[Segment]) -> String {
    row.iter().map(|segment| segment.text.as_str()).collect()
}

const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                      {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn chatml() -> ChatTemplate {
    template("chatml", CHATML)
}

#[test]
fn a_history_that_stays_is_one_row_and_one_that_changes_is_a_row_for_each_answer() {
    let fixtures = fixtures();
    let rows = |name: &str, answers| {
        let source = fixtures["templates"][name].as_str()?;
        Some(template(name, source).rows(&turns(answers), Mask::Answers, &ends()))
    };
    let plain = ["Hello!", "4"];
    let thinking = ["<think>\nr1\n</think>\n\nHello!", "<think>\nr2\n</think>\n\n4"];
    let check = |name: &str, answers, expected: &[&[&str]]| {
        let Some(rows) = rows(name, answers) else { return };
        let rows = rows.unwrap();
        let texts: Vec<Vec<&str>> = rows.iter().map(|row| learned(row)).collect();
        assert_eq!(texts, expected, "{name}");
    };
    check("qwen2_5", plain, &[&["Hello!<|im_end|>\n", "4<|im_end|>\n"]]);
    check(
        "qwen3_training",
        plain,
        &[&["<think>\n\n</think>\n\nHello!<|im_end|>\n", "<think>\n\n</think>\n\n4<|im_end|>\n"]],
    );
    // Qwen3 removes the reasoning of earlier turns, and Phi-3 ends the last one with a further token.
    check(
        "qwen3",
        thinking,
        &[&["<think>\nr1\n</think>\n\nHello!<|im_end|>\n"], &["<think>\nr2\n</think>\n\n4<|im_end|>\n"]],
    );
    check("phi3", plain, &[&["Hello!<|end|>\n</s>"], &["4<|end|>\n</s>"]]);
    check("phi3_training", plain, &[&["Hello!<|end|>\n", "4<|end|>\n</s>"]]);
    // GLM-4's turns end where the next one begins.
    if let Some(rows) = rows("glm4moe", plain) {
        let rows = rows.unwrap();
        assert!(
            rows.iter().flat_map(|row| learned(row)).all(|answer| answer.ends_with("<|user|>")),
            "{rows:?}"
        );
    }
}

#[test]
fn a_prompt_that_does_not_begin_the_answer_is_refused_with_both_texts() {
    let source =
        CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\nAnswer: {% endif %}");
    let rows = template("other", &source).rows(&turns(["Hello!", "4"]), Mask::Answers, &ends());
    let error = rows.unwrap_err().to_string();
    assert!(error.contains("before the answer in message 2 it writes `…"), "{error}");
    assert!(error.contains("Answer: ") && error.contains("Hello!"), "both texts are shown: {error}");
}

/// Mistral Nemo's template: the system message is in the last turn of the user, and in no turn where an answer is the last.
#[test]
fn a_prompt_with_another_text_before_its_question_has_its_answer() {
    let source = "{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.last and messages[0].role == 'system' %}\
                  {{ messages[0].content + '\n\n' }}{% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %}\
                  {{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}";
    let mut conversation = turns(["Hi there", "2+2?"]);
    conversation.messages.insert(0, Message::new("system", "Be kind."));
    let rows = template("nemo", source).rows(&conversation, Mask::Answers, &ends()).unwrap();
    let texts: Vec<String> = rows.iter().map(|row| text(row)).collect();
    assert_eq!(
        texts,
        [
            "[INST]Be kind.\n\nHi there[/INST] Hi there<|im_end|>",
            "[INST]Hi there[/INST] Hi there<|im_end|>[INST]Be kind.\n\n2+2?[/INST] 2+2?<|im_end|>",
        ]
    );
    // An answer that repeats its question is one answer.
    assert_eq!(learned(&rows[0]), [" Hi there<|im_end|>"]);
    assert_eq!(learned(&rows[1]), [" 2+2?<|im_end|>"]);
}

/// DeepSeek-R1's template: the prompt opens the reasoning, which is left out of answers.
const R1: &str = "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}\
                  {% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
                  {{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{% else %}\
                  {{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}\
                  {% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}";

#[test]
fn a_reasoning_that_the_prompt_opens_is_learned_after_it() {
    let template = template("r1", R1);
    let variant = template.training_variant();
    assert_eq!(variant, Some(TrainingVariant::OpenedReasoning { tag: "<think>".to_owned() }));
    let named = variant.unwrap().to_string();
    assert!(named.starts_with("opened-reasoning: the template's prompt ends with `<think>`"), "{named}");
    for (answer, expected) in [
        ("4", "</think>\n\n4<|im_end|>\n"),
        ("<think>\nr\n</think>\n\n4", "r\n</think>\n\n4<|im_end|>\n"),
        // The answers of DeepSeek-R1, which are written after the opening.
        ("r\n</think>\n\n4", "r\n</think>\n\n4<|im_end|>\n"),
    ] {
        let rows = template
            .rows(&turns(["<think>\nr\n</think>\n\nHello!", answer]), Mask::Answers, &ends())
            .unwrap();
        assert_eq!(rows.len(), 2, "the reasoning of the first is no history");
        assert_eq!(learned(&rows[0]), ["r\n</think>\n\nHello!<|im_end|>\n"]);
        assert_eq!(learned(&rows[1]), [expected]);
        let read = "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n\n\nHello!<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n\
                    <|im_start|>assistant\n<think>\n";
        assert_eq!(text(&rows[1]), format!("{read}{expected}"));
    }
    let mut answer = Message::new("assistant", "4");
    answer.fields.insert("reasoning_content".to_owned(), "r\n".into());
    let rows =
        template.rows(&Conversation::new([Message::new("user", "2+2?"), answer]), Mask::Answers, &ends());
    assert_eq!(learned(&rows.unwrap()[0]), ["r\n</think>\n\n4<|im_end|>\n"]);
    // Prompts that open no reasoning, and templates that write it.
    assert_eq!(chatml().training_variant(), None);
}

/// The rows of DeepSeek's own templates are TRL's text of its training templates, where the answer has its reasoning.
#[test]
fn templates_of_thinking_models_have_variants_for_training() {
    let fixtures = fixtures();
    let sources = &fixtures["templates"];
    let thinking = ["<think>\nr1\n</think>\n\nHello!", "<think>\nr2\n</think>\n\n4"];
    for (name, is_opened) in [("deepseekv3", true), ("qwen3", false), ("qwen2_5", false), ("phi3", false)] {
        let Some(source) = sources[name].as_str() else { continue };
        let template = template(name, source);
        match template.training_variant() {
            Some(TrainingVariant::OpenedReasoning { tag }) => {
                assert!(is_opened && tag == "<think>", "{name}")
            }
            Some(TrainingVariant::ReasoningOfLastAnswer) => assert_eq!(name, "qwen3"),
            None => assert!(matches!(name, "qwen2_5" | "phi3"), "{name}"),
        }
        if is_opened {
            let rows = template.rows(&turns(thinking), Mask::Answers, &ends()).unwrap();
            let expected =
                "<s><｜User｜>Hi there<｜Assistant｜><think>\nr1\n</think>\n\nHello!<｜end▁of▁sentence｜>";
            assert_eq!((rows.len(), text(&rows[0]).as_str()), (2, expected), "{name}");
        }
    }
}

/// Inference reads before each answer exactly the text before it in its row.
#[test]
fn every_answer_stands_after_what_inference_reads() {
    let fixtures = fixtures();
    let mut checked = BTreeMap::new();
    for (name, source) in fixtures["templates"].as_object().unwrap() {
        let template = template(name, source.as_str().unwrap());
        if template.marks_generation() {
            continue;
        }
        let conversation = turns(["<think>\nr1\n</think>\n\nHello!", "<think>\nr2\n</think>\n\n4"]);
        let Ok(rows) = template.rows(&conversation, Mask::Answers, &ends()) else { continue };
        let prompts = [1, 3].map(|count| {
            let before = Conversation::new(conversation.messages[..count].iter().cloned());
            template.render(&before, true).unwrap().text
        });
        let mut at = 0;
        for row in &rows {
            let mut before = String::new();
            for segment in row {
                if segment.is_trained {
                    assert_eq!(before, prompts[at], "{name}");
                    at += 1;
                }
                before.push_str(&segment.text);
            }
        }
        assert_eq!(at, 2, "{name}");
        checked.insert(name.as_str(), rows.len());
    }
    eprintln!("rows of a conversation with two answers: {checked:?}");
    assert!(checked.len() >= 4, "{checked:?}");
}

/// Templates that read the first message cannot render the prompt before it.
#[test]
fn an_answer_may_begin_a_conversation() {
    let begun = |last: &str| {
        Conversation::new([
            Message::new("assistant", "Hello!"),
            Message::new(last, "2+2?"),
            Message::new("assistant", "4"),
        ])
    };
    let rows = |source: &str, conversation: &Conversation| {
        template("begun", source).rows(conversation, Mask::Answers, &ends())
    };
    let expected = "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n";
    // Qwen's template: it adds a system message if the first message is another.
    let system = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}";
    for (before, written) in [("", ""), (system, "<|im_start|>system\nBe kind.<|im_end|>\n")] {
        let answers = rows(&format!("{before}{CHATML}"), &begun("user")).unwrap();
        assert_eq!(answers.len(), 1, "{answers:?}");
        assert_eq!(
            (text(&answers[0]), learned(&answers[0])),
            (format!("{written}{expected}"), vec!["Hello!<|im_end|>\n", "4<|im_end|>\n"])
        );
    }
    let fixtures = fixtures();
    if let Some(source) = fixtures["templates"]["qwen2_5"].as_str() {
        let answers = rows(source, &begun("system")).unwrap();
        assert_eq!(learned(&answers[0]), ["Hello!<|im_end|>\n", "4<|im_end|>\n"]);
    }
    // It writes nothing that begins an answer.
    let bare = "{{ messages[0].role }}{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}";
    let error = rows(bare, &begun("user")).unwrap_err().to_string();
    assert!(error.contains("the conversation begins with an assistant's message, before which"), "{error}");
}

#[test]
fn weights_and_masks_choose_the_answers() {
    let template = chatml();
    let mut conversation = turns(["a", "b"]);
    let check = |conversation: &Conversation, mask, expected: &[&[&str]]| {
        let rows = template.rows(conversation, mask, &ends()).unwrap();
        let texts: Vec<Vec<&str>> = rows.iter().map(|row| learned(row)).collect();
        assert_eq!(texts, expected, "{mask:?}");
        rows
    };
    check(&conversation, Mask::Answers, &[&["a<|im_end|>\n", "b<|im_end|>\n"]]);
    let rows = check(&conversation, Mask::Last, &[&["b<|im_end|>\n"]]);
    let rendered = template.render(&conversation, false).unwrap().text;
    assert_eq!(text(&rows[0]), rendered, "the first answer is read");
    assert_eq!(check(&conversation, Mask::All, &[&[&rendered]]).len(), 1);
    conversation.messages[3].is_trained = false;
    let rows = check(&conversation, Mask::Answers, &[&["a<|im_end|>\n"]]);
    assert!(text(&rows[0]).ends_with("a<|im_end|>\n"), "nothing follows the last learned part");
    check(&conversation, Mask::Last, &[]);
    conversation.messages[1].is_trained = false;
    check(&conversation, Mask::Answers, &[]);
    check(&Conversation::new([Message::new("user", "a")]), Mask::Answers, &[]);
}

#[test]
fn weights_choose_among_the_spans_of_a_template() {
    let source = CHATML.replace(
        "{{ m.content }}<|im_end|>\n",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n\
         {% else %}{{ m.content }}<|im_end|>\n{% endif %}",
    );
    let template = template("marked", &source);
    let mut conversation = turns(["a", "b"]);
    let rows = template.rows(&conversation, Mask::Answers, &ends()).unwrap();
    assert_eq!(learned(&rows[0]), ["a<|im_end|>", "b<|im_end|>"], "a span is extended to the end token");
    conversation.messages[1].is_trained = false;
    let rows = template.rows(&conversation, Mask::Answers, &ends()).unwrap();
    assert_eq!(learned(&rows[0]), ["b<|im_end|>"]);
    conversation.messages[0].fields.insert("content".to_owned(), "\u{fdd0}".into());
    let error = template.rows(&conversation, Mask::Answers, &ends()).unwrap_err().to_string();
    assert!(error.contains("U+FDD0 or U+FDD1"), "{error}");
}

#[test]
fn a_template_whose_answers_do_not_end_is_refused() {
    for source in [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    ] {
        let template = template("plain", source);
        let error = template.rows(&turns(["a", "b"]), Mask::Answers, &ends()).unwrap_err().to_string();
        assert!(error.contains("so the model would never learn to stop"), "{error}");
    }
}

#[test]
fn arguments_of_calls_are_objects_or_texts_as_the_template_takes_them() {
    let call =
        |arguments| json!([{ "type": "function", "function": { "name": "f", "arguments": arguments } }]);
    let mut answer = Message::new("assistant", "");
    answer.fields.insert("tool_calls".to_owned(), call(json!("{\"b\": 1, \"a\": [2]}")));
    let conversation = Conversation::new([Message::new("user", "?"), answer]);
    let source = |call: &str| {
        CHATML.replace(
            "{{ m.content }}",
            &format!("{{% for c in m.tool_calls or [] %}}{{{{ {call} }}}}{{% endfor %}}{{{{ m.content }}}}"),
        )
    };
    for (call, expected) in [
        ("c.function.arguments|tojson", "{\"b\": 1, \"a\": [2]}<|im_end|>\n"),
        ("'x' + c.function.arguments", "x{\"b\": 1, \"a\": [2]}<|im_end|>\n"),
    ] {
        let template = ChatTemplate::new("t", &source(call), TemplateConfig::default()).unwrap();
        let rows = template.rows(&conversation, Mask::Answers, &ends()).unwrap();
        assert_eq!(learned(&rows[0]), [expected]);
    }
}
