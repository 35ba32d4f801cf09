//! Ollama's Modelfile: the model's file, how a chat is written for it, and where a reply ends.
//!
//! Ollama does not run a model's chat template, which is Jinja; it has a template of Go's. So a Modelfile gets one if the Jinja template
//! is a known [`ChatFormat`]: if it renders probing conversations to the same text ([`Chat::of`]), or where nothing can render it, if its
//! special tokens are those of one format alone ([`Chat::by_tokens`]). Else the Modelfile has no template, and says so.
//!
//! Source: Ollama's `docs/modelfile.md` and `template/template.go`.

mod format;

use std::fmt;

pub use format::{ChatFormat, Role};

/// Renders a conversation by the model's own template, up to where the reply starts; `None` if the template refuses it.
pub type Renderer<'a> = &'a dyn Fn(&[(Role, &str)]) -> Option<String>;

/// A chat template as Ollama has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chat {
    /// How turns are written.
    pub format: &'static ChatFormat,
    /// The system message that the model's template writes where a conversation has none.
    pub default_system: Option<String>,
    /// Whether the model's template was rendered and compared, and not only recognised by its special tokens.
    pub is_compared: bool,
}

impl Chat {
    /// Finds the format of a chat template. A template that begins with the token that begins a text may do so: Ollama adds it.
    ///
    /// # Errors
    /// Why no known format is the template's, in words.
    pub fn of(template: &str, begin: Option<&str>, render: Renderer<'_>) -> Result<Self, String> {
        let candidates = ChatFormat::all().iter().filter(|format| format.has_marks(template));
        let mut tried = Vec::new();
        for format in candidates {
            match format.compare(begin, render) {
                Ok(default_system) => return Ok(Self { format, default_system, is_compared: true }),
                Err(reason) => tried.push(format!("{} ({reason})", format.name)),
            }
        }
        Err(match tried.as_slice() {
            [] => unknown(),
            _ => format!("it writes other texts than {}", tried.join(" and ")),
        })
    }

    /// Recognises the format of a chat template by its special tokens, without rendering it.
    ///
    /// # Errors
    /// No format, or several, with these tokens, in words.
    pub fn by_tokens(template: &str) -> Result<Self, String> {
        let candidates: Vec<&ChatFormat> =
            ChatFormat::all().iter().filter(|format| format.has_marks(template)).collect();
        match candidates.as_slice() {
            [] => Err(unknown()),
            [format] => Ok(Self { format, default_system: None, is_compared: false }),
            several => {
                let names: Vec<&str> = several.iter().map(|format| format.name).collect();
                Err(format!("its special tokens are those of several formats: {}", names.join(", ")))
            }
        }
    }
}

fn unknown() -> String {
    let names: Vec<&str> = ChatFormat::all().iter().map(|format| format.name).collect();
    format!("its special tokens are those of no known format; known are {}", names.join(", "))
}

/// The text of a Modelfile, by [`fmt::Display`].
#[derive(Debug, Clone, Default)]
pub struct Modelfile {
    /// The model's file, relative to the Modelfile.
    pub from: String,
    /// The adapter's file, relative to the Modelfile.
    pub adapter: Option<String>,
    /// The chat template, or why there is none.
    pub chat: Option<Result<Chat, String>>,
    /// The texts at which a reply ends.
    pub stops: Vec<String>,
}

impl fmt::Display for Modelfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "FROM ./{}", self.from)?;
        if let Some(adapter) = &self.adapter {
            writeln!(f, "ADAPTER ./{adapter}")?;
        }
        match &self.chat {
            Some(Ok(chat)) => {
                let name = chat.format.name;
                match chat.is_compared {
                    true => writeln!(f, "# The chat template is {name}.")?,
                    false => {
                        writeln!(f, "# The chat template is {name} by its special tokens.")?;
                        writeln!(f, "# A system message that the model's own template adds is not here.")?;
                    }
                }
                writeln!(f, "TEMPLATE \"\"\"{}\"\"\"", chat.format.go_template())?;
                if let Some(system) = &chat.default_system {
                    writeln!(f, "SYSTEM \"\"\"{system}\"\"\"")?;
                }
            }
            Some(Err(reason)) => {
                writeln!(f, "# No TEMPLATE: the model's chat template is not known: {reason}.")?
            }
            None => writeln!(f, "# No TEMPLATE: the model has no chat template.")?,
        }
        self.stops.iter().try_for_each(|stop| writeln!(f, "PARAMETER stop {}", quoted(stop)))
    }
}

/// A text in double quotes, as Go and Modelfiles read it.
fn quoted(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{escaped}\"")
}
