//! Modelfiles: known formats, default system messages, stop texts, and what is said where a template is not known.

use expect_test::expect;
use gguf::ollama::{self, Chat, ChatFormat, Modelfile, Role};
use serde_json::json;

/// Qwen2.5's template writes a system message of its own where a conversation has none.
fn qwen(conversation: &[(Role, &str)]) -> Option<String> {
    let mut text = String::new();
    if conversation[0].0 != Role::System {
        text.push_str("<|im_start|>system\nYou are Qwen.<|im_end|>\n");
    }
    for (role, content) in conversation {
        text += &format!("<|im_start|>{}\n{content}<|im_end|>\n", role.name());
    }
    Some(text + "<|im_start|>assistant\n")
}

#[test]
fn a_modelfile_has_the_template_its_system_message_and_every_stop() {
    let chat = Chat::from_template("… <|im_start|> …", None, &qwen);
    let stops = ["<|im_end|>", "<|endoftext|>"].map(str::to_owned).to_vec();
    let file = Modelfile {
        from: "model-q8_0.gguf".to_owned(),
        adapter: Some("adapter.gguf".to_owned()),
        chat: Some(chat),
        stops,
        context: Some(32768),
        sampling: ollama::sampling(&json!({ "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05 })),
    };
    expect![[r#"
        FROM ./model-q8_0.gguf
        ADAPTER ./adapter.gguf
        # The chat template is ChatML.
        TEMPLATE """{{- range $i, $_ := .Messages }}
        {{- $last := eq (len (slice $.Messages $i)) 1 }}
        {{- if eq .Role "system" }}{{ "<|im_start|>system\n" }}{{ .Content }}{{ "<|im_end|>\n" }}
        {{- else if eq .Role "user" }}{{ "<|im_start|>user\n" }}{{ .Content }}{{ "<|im_end|>\n" }}
        {{- else if eq .Role "assistant" }}{{ "<|im_start|>assistant\n" }}{{ .Content }}{{ if not $last }}{{ "<|im_end|>\n" }}{{ end }}
        {{- end }}
        {{- if and $last (ne .Role "assistant") }}{{ "<|im_start|>assistant\n" }}{{ end }}
        {{- end }}"""
        SYSTEM """You are Qwen."""
        PARAMETER stop "<|im_end|>"
        PARAMETER stop "<|endoftext|>"
        # The model's context is 32768 tokens; each takes memory.
        PARAMETER num_ctx 8192
        PARAMETER temperature 0.7
        PARAMETER top_k 20
        PARAMETER repeat_penalty 1.05
    "#]]
    .assert_eq(&file.to_string());
}

#[test]
fn every_format_is_told_from_the_others() {
    for format in ChatFormat::all() {
        let render = |conversation: &[(Role, &str)]| Some(format!("<s>{}", format.render(conversation)));
        let template = format.render(&[(Role::System, "S"), (Role::User, "U"), (Role::Assistant, "A")]);
        let found = Chat::from_template(&template, Some("<s>"), &render).unwrap();
        assert_eq!((&found.format.name, found.default_system), (&format.name, None));
    }
}

#[test]
fn an_unknown_template_is_said_to_be() {
    // It changes what was said before.
    let other = |conversation: &[(Role, &str)]| {
        Some(qwen(&conversation[conversation.len() - 1..])?.replace("assistant\n", "assistant: "))
    };
    let chat = Chat::from_template("<|im_start|>", None, &other).unwrap();
    assert_eq!((&*chat.format.name, chat.difference.as_deref()), ("ChatML", Some("a question alone")));
    let file = Modelfile { from: "m.gguf".to_owned(), chat: Some(Ok(chat)), ..Modelfile::default() };
    assert!(
        file.to_string()
            .contains("\n# The model's own template writes a question alone in another way.\nTEMPLATE")
    );
    expect!["it writes other texts than Mistral (a question alone) and Llama 2 (a question alone)"]
        .assert_eq(&Chat::from_template("[INST] <<SYS>>", None, &other).unwrap_err());
    let error = Chat::from_template("### Instruction:", None, &other).unwrap_err();
    expect!["its special tokens are those of no known format; known are ChatML, Llama 3, Gemma, Phi-3, Phi-4 mini, Granite 3, Tulu (OLMo 2), Zephyr, Mistral, Llama 2"]
        .assert_eq(&error);
    // One that changes what was said before.
    let forgetful = |conversation: &[(Role, &str)]| qwen(&conversation[conversation.len() - 1..]);
    let chat = Chat::from_template("<|im_start|>", None, &forgetful).unwrap();
    assert_eq!(chat.difference.as_deref(), Some("several turns"));
    let file = Modelfile { from: "m.gguf".to_owned(), chat: Some(Err(error)), ..Modelfile::default() };
    assert!(
        file.to_string()
            .contains("\n# No TEMPLATE: the model's chat template is not known: its special tokens")
    );
    let none = Modelfile { from: "m.gguf".to_owned(), ..Modelfile::default() };
    assert_eq!(none.to_string(), "FROM ./m.gguf\n# No TEMPLATE: the model has no chat template.\n");
}

/// The texts around the contents are found by rendering, so that a template of one's own is written as it was trained with.
#[test]
fn a_template_of_ones_own_becomes_a_template_of_its_own() {
    let join = |conversation: &[(Role, &str)], turn: &dyn Fn(Role, &str) -> String, prompt: &str| {
        let turns = conversation.iter().map(|(role, content)| turn(*role, content));
        Some(format!("<s>{}{prompt}", turns.collect::<String>()))
    };
    let bars = |role: Role, content: &str| format!("<|im_start|>{}|{content}<|im_end|>", role.name());
    let render = |conversation: &[(Role, &str)]| join(conversation, &bars, "<|im_start|>assistant|");
    let chat = Chat::from_template("<|im_start|>", Some("<s>"), &render).unwrap();
    assert_eq!(
        (&*chat.format.name, &chat.difference, &chat.default_system),
        ("the model's own", &None, &None)
    );
    let file = Modelfile { from: "m.gguf".to_owned(), chat: Some(Ok(chat)), ..Modelfile::default() };
    let file = file.to_string();
    assert!(file.contains("# The chat template is the model's own.\n"), "{file}");
    // One prompt, whichever way its parts are divided among the turns.
    assert!(file.contains("<|im_start|>user|") && file.contains("<|im_start|>assistant|"), "{file}");
    assert!(!file.contains("user\\n"), "{file}");

    let alpaca = |role: Role, content: &str| match role {
        Role::System => format!("{content}\n\n"),
        Role::User => format!("### Instruction:\n{content}\n\n"),
        Role::Assistant => format!("### Response:\n{content}</s>\n\n"),
    };
    let render = |conversation: &[(Role, &str)]| join(conversation, &alpaca, "### Response:\n");
    let chat = Chat::from_template("### Instruction:", Some("<s>"), &render).unwrap();
    let conversation =
        [(Role::System, "Be brief."), (Role::User, "a"), (Role::Assistant, "b"), (Role::User, "c")];
    assert_eq!(
        chat.format.render(&conversation),
        "Be brief.\n\n### Instruction:\na\n\n### Response:\nb</s>\n\n### Instruction:\nc\n\n### Response:\n"
    );
    // With a system message of its own, and with one within the user's turn.
    let render = |conversation: &[(Role, &str)]| {
        let own = [(Role::System, "Be kind.")];
        let is_given = conversation.first().is_some_and(|(role, _)| *role == Role::System);
        let own = if is_given { &[][..] } else { &own };
        join(&[own, conversation].concat(), &bars, "<|im_start|>assistant|")
    };
    let chat = Chat::from_template("", Some("<s>"), &render).unwrap();
    assert_eq!((&*chat.format.name, chat.default_system.as_deref()), ("the model's own", Some("Be kind.")));
}

/// A model's files cannot write directives.
#[test]
fn no_text_of_a_model_becomes_a_directive() {
    let evil = "x\"\"\"\nFROM /etc/passwd\nADAPTER ./evil\nSYSTEM \"\"\"y";
    let render = |conversation: &[(Role, &str)]| {
        let is_given = conversation.first().is_some_and(|(role, _)| *role == Role::System);
        let own = [(Role::System, evil)];
        let own = if is_given { &[][..] } else { &own };
        qwen(&[own, conversation].concat())
    };
    let chat = Chat::from_template("<|im_start|>", None, &render).unwrap();
    assert_eq!(chat.default_system.as_deref(), Some(evil));
    for stop in ["</s>\"\nFROM /etc/passwd", "\"\"\"", "\"\"\"\nFROM /etc/passwd\n\"\"\""] {
        let file = Modelfile {
            from: "m.gguf".to_owned(),
            chat: Some(Ok(chat.clone())),
            stops: vec![stop.to_owned(), "</s>".to_owned()],
            ..Modelfile::default()
        };
        let text = file.to_string();
        assert!(
            !text.lines().skip(1).any(|line| line.starts_with("FROM") || line.starts_with("ADAPTER")),
            "{text}"
        );
        assert!(text.contains("# No SYSTEM: its text cannot be written in a Modelfile.\n"), "{text}");
        assert!(
            text.ends_with(
                "# No PARAMETER stop: its text cannot be written in a Modelfile.\nPARAMETER stop \"</s>\"\n"
            ),
            "{text}"
        );
    }
    let file = Modelfile { from: "a\nADAPTER ./evil".to_owned(), ..Modelfile::default() };
    assert!(file.to_string().starts_with("# No FROM: its text"), "{file}");
}

#[test]
fn a_model_that_is_not_sampled_has_temperature_0() {
    let config = json!({ "do_sample": false, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.1, "eos_token_id": 2 });
    assert_eq!(ollama::sampling(&config), [("temperature", 0.0), ("repeat_penalty", 1.1)]);
    assert_eq!(ollama::sampling(&json!({ "do_sample": true, "min_p": 0.1 })), [("min_p", 0.1)]);
    assert!(ollama::sampling(&json!({ "temperature": null })).is_empty());
    assert!(ollama::sampling(&json!(null)).is_empty());
}
