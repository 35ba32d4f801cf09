//! Ollama's Modelfile: the model's file, how a chat is written for it, and where a reply ends.
//!
//! Ollama does not run a model's chat template, which is Jinja; it has a template of Go's. So a Modelfile gets one if the Jinja template
//! is a known [`ChatFormat`], or one whose texts around the contents are the same in each turn: if that renders probing conversations to
//! the same text. Otherwise, if the template's special tokens are those of exactly one known format, the Modelfile gets that format and
//! lists where its text differs from the model's own. If no format is left, the Modelfile has no template, and a comment with the reason.
//!
//! Source: Ollama's `docs/modelfile.md` and `template/template.go`.

mod derived;
mod format;
pub mod store;
mod value;

use std::fmt;

use serde_json::Value;

pub use format::{ChatFormat, Role};
use value::{comment, in_one_line, in_several_lines, quoted_value};

/// The name of a format that was derived from the model's own template.
const NAME: &str = "the model's own";

/// Renders a conversation by the model's own template, up to where the reply starts; `None` if the template refuses it.
pub type Renderer<'a> = &'a dyn Fn(&[(Role, &str)]) -> Option<String>;

/// A chat template as Ollama has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chat {
    /// How turns are written.
    pub format: ChatFormat,
    /// The system message that the model's template writes where a conversation has none.
    pub default_system: Option<String>,
    /// Differences from the text of the model's own template.
    pub difference: Option<String>,
}

impl Chat {
    /// Finds the format of a chat template. A template that begins with the token that begins a text may do so: Ollama adds it.
    ///
    /// # Errors
    /// Why no known format is the template's, in words.
    pub fn from_template(template: &str, begin: Option<&str>, render: Renderer<'_>) -> Result<Self, String> {
        let candidates = ChatFormat::all().iter().filter(|format| format.has_marks(template));
        let mut others = Vec::new();
        for format in candidates {
            match format.compare(begin, render) {
                Ok(default_system) => {
                    return Ok(Self { format: format.clone(), default_system, difference: None });
                }
                Err(reason) => others.push((format, reason)),
            }
        }
        if let Some((format, default_system)) = derived::format(begin, render) {
            return Ok(Self { format, default_system, difference: None });
        }
        match others.as_slice() {
            [] => Err(unknown()),
            [(format, reason)] => {
                Ok(Self { format: (*format).clone(), default_system: None, difference: Some(reason.clone()) })
            }
            several => {
                let tried = several.iter().map(|(format, reason)| format!("{} ({reason})", format.name));
                Err(format!("it writes other texts than {}", tried.collect::<Vec<_>>().join(" and ")))
            }
        }
    }
}

fn unknown() -> String {
    let names: Vec<&str> = ChatFormat::all().iter().map(|format| &*format.name).collect();
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
    /// The context in tokens.
    pub context: Option<u64>,
    /// Parameters of sampling, by Ollama's names.
    pub sampling: Vec<(&'static str, f64)>,
}

/// Returns the sampling parameters of a model's `generation_config.json`, by Ollama's names. A model that is not to be sampled has
/// temperature 0, whatever else the file has.
pub fn sampling(generation_config: &Value) -> Vec<(&'static str, f64)> {
    const NAMES: [(&str, &str); 5] = [
        ("temperature", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "repeat_penalty"),
    ];
    let is_greedy = generation_config["do_sample"] == Value::Bool(false);
    let mut parameters: Vec<(&str, f64)> = if is_greedy { vec![("temperature", 0.0)] } else { Vec::new() };
    for (name, ollama_name) in NAMES {
        let is_kept = !is_greedy || ollama_name == "repeat_penalty";
        parameters
            .extend(generation_config[name].as_f64().filter(|_| is_kept).map(|value| (ollama_name, value)));
    }
    parameters
}

/// The context that is asked for at most: Ollama reserves the memory of the whole when a model is loaded.
const CONTEXT: u64 = 8192;

impl fmt::Display for Modelfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut directive = |name: &str, value: Option<String>| match value {
            Some(value) => writeln!(f, "{name} {value}"),
            None => writeln!(f, "# No {name}: its text cannot be written in a Modelfile."),
        };
        directive("FROM", in_one_line(&format!("./{}", self.from)))?;
        if let Some(adapter) = &self.adapter {
            directive("ADAPTER", in_one_line(&format!("./{adapter}")))?;
        }
        match &self.chat {
            Some(Ok(chat)) => {
                directive("#", Some(comment(&format!("The chat template is {}.", chat.format.name))))?;
                if let Some(difference) = &chat.difference {
                    let text = format!("The model's own template writes {difference} in another way.");
                    directive("#", Some(comment(&text)))?;
                }
                directive("TEMPLATE", in_several_lines(&chat.format.go_template()))?;
                if let Some(system) = &chat.default_system {
                    directive("SYSTEM", in_several_lines(system))?;
                }
            }
            Some(Err(reason)) => {
                let text = format!("No TEMPLATE: the model's chat template is not known: {reason}.");
                directive("#", Some(comment(&text)))?;
            }
            None => directive("#", Some("No TEMPLATE: the model has no chat template.".to_owned()))?,
        }
        for stop in &self.stops {
            directive("PARAMETER stop", quoted_value(stop))?;
        }
        if let Some(context) = self.context {
            let text = format!("The model's context is {context} tokens; each takes memory.");
            directive("#", Some(text))?;
            directive("PARAMETER num_ctx", Some(context.min(CONTEXT).to_string()))?;
        }
        self.sampling.iter().try_for_each(|(name, value)| writeln!(f, "PARAMETER {name} {value}"))
    }
}

/// A text in double quotes, as Go reads it.
fn quoted(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{escaped}\"")
}
