//! The formats in which models write a conversation.

use std::fmt::Write as _;
use std::sync::LazyLock;

use super::{Renderer, quoted};

/// The speaker of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions before a conversation.
    System,
    /// A person.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// Returns the name in a chat template.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// Where the system message is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum System<T> {
    /// A turn of its own, between these texts.
    Turn(T, T),
    /// Before the text of the first turn of the user, between these texts.
    InUser(T, T),
}

/// How turns are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatFormat {
    /// The name by which people know it.
    pub name: String,
    /// Texts that a chat template of this format contains.
    pub(super) marks: &'static [&'static str],
    pub(super) system: System<String>,
    pub(super) user: [String; 2],
    pub(super) assistant: [String; 2],
    /// The text that asks for a reply.
    pub(super) prompt: String,
}

/// A row of the table of formats.
struct Known {
    name: &'static str,
    marks: &'static [&'static str],
    system: System<&'static str>,
    user: [&'static str; 2],
    assistant: [&'static str; 2],
    prompt: &'static str,
}

static ALL: LazyLock<Vec<ChatFormat>> = LazyLock::new(|| {
    let format = |known: &Known| ChatFormat {
        name: known.name.to_owned(),
        marks: known.marks,
        system: match known.system {
            System::Turn(before, after) => System::Turn(before.to_owned(), after.to_owned()),
            System::InUser(before, after) => System::InUser(before.to_owned(), after.to_owned()),
        },
        user: known.user.map(str::to_owned),
        assistant: known.assistant.map(str::to_owned),
        prompt: known.prompt.to_owned(),
    };
    FORMATS.iter().map(format).collect()
});

const FORMATS: [Known; 10] = [
    Known {
        name: "ChatML",
        marks: &["<|im_start|>"],
        system: System::Turn("<|im_start|>system\n", "<|im_end|>\n"),
        user: ["<|im_start|>user\n", "<|im_end|>\n"],
        assistant: ["<|im_start|>assistant\n", "<|im_end|>\n"],
        prompt: "<|im_start|>assistant\n",
    },
    Known {
        name: "Llama 3",
        marks: &["<|start_header_id|>"],
        system: System::Turn("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
        user: ["<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"],
        assistant: ["<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"],
        prompt: "<|start_header_id|>assistant<|end_header_id|>\n\n",
    },
    Known {
        name: "Gemma",
        marks: &["<start_of_turn>"],
        system: System::InUser("", "\n\n"),
        user: ["<start_of_turn>user\n", "<end_of_turn>\n"],
        assistant: ["<start_of_turn>model\n", "<end_of_turn>\n"],
        prompt: "<start_of_turn>model\n",
    },
    Known {
        name: "Phi-3",
        marks: &["<|end|>"],
        system: System::Turn("<|system|>\n", "<|end|>\n"),
        user: ["<|user|>\n", "<|end|>\n"],
        assistant: ["<|assistant|>\n", "<|end|>\n"],
        prompt: "<|assistant|>\n",
    },
    Known {
        name: "Phi-4 mini",
        marks: &["<|end|>"],
        system: System::Turn("<|system|>", "<|end|>"),
        user: ["<|user|>", "<|end|>"],
        assistant: ["<|assistant|>", "<|end|>"],
        prompt: "<|assistant|>",
    },
    Known {
        name: "Granite 3",
        marks: &["<|start_of_role|>"],
        system: System::Turn("<|start_of_role|>system<|end_of_role|>", "<|end_of_text|>\n"),
        user: ["<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"],
        assistant: ["<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"],
        prompt: "<|start_of_role|>assistant<|end_of_role|>",
    },
    Known {
        name: "Tulu (OLMo 2)",
        marks: &["<|user|>", "<|assistant|>"],
        system: System::Turn("<|system|>\n", "\n"),
        user: ["<|user|>\n", "\n"],
        assistant: ["<|assistant|>\n", "<|endoftext|>\n"],
        prompt: "<|assistant|>\n",
    },
    Known {
        name: "Zephyr",
        marks: &["<|user|>", "<|assistant|>"],
        system: System::Turn("<|system|>\n", "</s>\n"),
        user: ["<|user|>\n", "</s>\n"],
        assistant: ["<|assistant|>\n", "</s>\n"],
        prompt: "<|assistant|>\n",
    },
    Known {
        name: "Mistral",
        marks: &["[INST]"],
        system: System::InUser("", "\n\n"),
        user: ["[INST] ", "[/INST]"],
        assistant: [" ", "</s>"],
        prompt: "",
    },
    Known {
        name: "Llama 2",
        marks: &["[INST]", "<<SYS>>"],
        system: System::InUser("<<SYS>>\n", "\n<</SYS>>\n\n"),
        user: ["[INST] ", " [/INST]"],
        assistant: [" ", " </s><s>"],
        prompt: "",
    },
];

impl ChatFormat {
    /// Returns all known formats.
    pub fn all() -> &'static [Self] {
        &ALL
    }

    pub(super) fn has_marks(&self, template: &str) -> bool {
        self.marks.iter().all(|mark| template.contains(mark))
    }

    /// Writes a conversation, up to where the reply starts.
    pub fn render(&self, conversation: &[(Role, &str)]) -> String {
        let (mut text, mut pending) = (String::new(), None);
        for (role, content) in conversation {
            match (role, &self.system) {
                (Role::System, System::Turn(before, after)) => text.extend([before, *content, after]),
                (Role::System, System::InUser(..)) => pending = Some(*content),
                (Role::User, system) => {
                    text.push_str(&self.user[0]);
                    if let (Some(message), System::InUser(before, after)) = (pending.take(), system) {
                        text.extend([before, message, after]);
                    }
                    text.extend([*content, &self.user[1]]);
                }
                (Role::Assistant, _) => text.extend([&self.assistant[0], *content, &self.assistant[1]]),
            }
        }
        text + &self.prompt
    }

    /// Compares the format with a model's template over probing conversations. Returns the system message that the template writes by
    /// itself.
    pub(super) fn compare(
        &self,
        begin: Option<&str>,
        render: Renderer<'_>,
    ) -> Result<Option<String>, String> {
        use Role::{Assistant, System, User};

        // The token that begins a text is added by whoever tokenizes it.
        let render = |conversation: &[(Role, &str)]| {
            let text = render(conversation)?;
            let begin =
                begin.filter(|begin| !begin.is_empty() && text.starts_with(begin)).map_or(0, str::len);
            Some(text[begin..].to_owned())
        };
        let one = [(User, "What is 2 + 2?")];
        let text = render(&one).ok_or("a question alone")?;
        let default_system = match text == self.render(&one) {
            true => None,
            false => Some(self.default_system(&text, &one).ok_or("a question alone")?),
        };
        let several = [
            (User, "What is 2 + 2?"),
            (Assistant, "It is 4.\n\nAnything else?"),
            (User, "And 3 + 3?"),
            (Assistant, "6"),
            (User, "Thanks: {{ bye }}"),
        ];
        let system = default_system.as_deref().map(|system| (System, system));
        let expected: Vec<(Role, &str)> = system.into_iter().chain(several).collect();
        if render(&several) != Some(self.render(&expected)) {
            return Err("several turns".to_owned());
        }
        let with_system: Vec<(Role, &str)> = [(System, "You count.")].into_iter().chain(several).collect();
        match render(&with_system) {
            // Some templates have no system message; then Ollama's users have none to lose.
            None => Ok(default_system),
            Some(text) if text == self.render(&with_system) => Ok(default_system),
            Some(_) => Err("a system message".to_owned()),
        }
    }

    /// Returns the system message with which `conversation` becomes `text`.
    fn default_system(&self, text: &str, conversation: &[(Role, &str)]) -> Option<String> {
        let System::Turn(before, after) = &self.system else { return None };
        let rest = text.strip_prefix(before.as_str())?;
        let system = &rest[..rest.find(after.as_str())?];
        let whole: Vec<(Role, &str)> =
            [(Role::System, system)].into_iter().chain(conversation.iter().copied()).collect();
        (self.render(&whole) == text).then(|| system.to_owned())
    }

    /// Returns the template for Go's `text/template`, over Ollama's `.Messages`. Texts are quoted, so that no blank of them is trimmed.
    pub fn go_template(&self) -> String {
        let text =
            |text: &str| if text.is_empty() { String::new() } else { format!("{{{{ {} }}}}", quoted(text)) };
        let [user, assistant] =
            [&self.user, &self.assistant].map(|turn| turn.each_ref().map(|part| text(part)));
        let (system, in_user) = match &self.system {
            System::Turn(before, after) => {
                (format!("{}{{{{ .Content }}}}{}", text(before), text(after)), String::new())
            }
            System::InUser(before, after) => (
                "{{ $system = .Content }}".to_owned(),
                format!(
                    "{{{{ if $system }}}}{}{{{{ $system }}}}{}{{{{ $system = \"\" }}}}{{{{ end }}}}",
                    text(before),
                    text(after)
                ),
            ),
        };
        let mut template = String::new();
        if matches!(self.system, System::InUser(..)) {
            template.push_str("{{- $system := \"\" }}\n");
        }
        let _ = write!(
            template,
            "{{{{- range $i, $_ := .Messages }}}}\n\
             {{{{- $last := eq (len (slice $.Messages $i)) 1 }}}}\n\
             {{{{- if eq .Role \"system\" }}}}{system}\n\
             {{{{- else if eq .Role \"user\" }}}}{}{in_user}{{{{ .Content }}}}{}\n\
             {{{{- else if eq .Role \"assistant\" }}}}{}{{{{ .Content }}}}{{{{ if not $last }}}}{}{{{{ end }}}}\n\
             {{{{- end }}}}\n\
             {{{{- if and $last (ne .Role \"assistant\") }}}}{}{{{{ end }}}}\n\
             {{{{- end }}}}",
            user[0],
            user[1],
            assistant[0],
            assistant[1],
            text(&self.prompt)
        );
        template
    }
}
