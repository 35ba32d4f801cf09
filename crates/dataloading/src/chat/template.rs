//! A chat template: Jinja that makes one text of a conversation.

use std::error::Error as _;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, ErrorKind, Value};
use serde_json::{Map, Value as Json};

use super::conversation::{Conversation, Message};
use super::generation_tag::{self, CLOSE, FILTER, OPEN};
use super::python_date::Date;
use super::python_json::{python_float, tojson};
use super::{python_filters, python_format, python_methods};
use crate::error::{Error, Result};

/// The budget of a rendering: one for an instruction, and one for each 64 bytes that the template makes, so at most 256 MiB. A
/// conversation of a thousand messages takes about a hundred thousand.
const FUEL: u64 = 4_000_000;
/// Bytes of a template.
const LONGEST_TEMPLATE: usize = 1 << 20;
/// Name of the template within its environment. It has no extension, so that nothing is escaped.
const NAME: &str = "chat_template";

/// The variables of a template beside the conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct TemplateConfig {
    /// `bos_token`, `eos_token` and others, by their name.
    pub special_tokens: Map<String, Json>,
    /// Further variables, such as `enable_thinking`.
    pub arguments: Map<String, Json>,
    /// The date that `strftime_now` formats.
    pub date: Date,
}

impl Default for TemplateConfig {
    fn default() -> Self {
        Self { special_tokens: Map::new(), arguments: Map::new(), date: Date::today() }
    }
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rendered {
    /// The text, special tokens included.
    pub text: String,
    /// The ranges that `{% generation %}` marks, in bytes of the text.
    pub spans: Vec<Range<usize>>,
}

/// A compiled template. It can be shared by threads.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Its name in messages: a file's name.
    from: String,
    source: String,
    marks_generation: bool,
    options: TemplateConfig,
    /// The template that renders conversations with tools instead.
    for_tools: Option<Box<ChatTemplate>>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("from", &self.from)
            .field("marks_generation", &self.marks_generation)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// The message of a template's `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

impl ChatTemplate {
    /// Compiles a template. `from` is what errors call it.
    ///
    /// # Errors
    /// [`Error::Template`] with the line: the syntax is wrong, or the template is longer than 1 MiB.
    pub fn new(from: &str, source: &str, options: TemplateConfig) -> Result<Self> {
        if source.len() > LONGEST_TEMPLATE {
            let reason =
                format!("{} bytes are more than {LONGEST_TEMPLATE}; is it a template?", source.len());
            return Err(Error::Template { from: from.to_owned(), line: None, reason });
        }
        // Jinja2 knows a single kind of line break.
        let source = &source.replace("\r\n", "\n").replace('\r', "\n");
        let (rewritten, marks_generation) = generation_tag::rewrite(&python_format::rewrite(source));
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .expect("the delimiters are the usual ones"),
        );
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(python_methods::call);
        python_filters::add_to(&mut environment);
        environment.add_filter(python_format::FILTER, python_format::percent);
        environment.add_filter("tojson", tojson);
        environment.add_filter("string", |value: &Value| match (python_text(value), value.as_str()) {
            (Some(text), _) => Ok(text),
            (None, Some(text)) => Ok(text.to_owned()),
            (None, None) => python_filters::written(value),
        });
        environment.set_formatter(|out, state, value| match python_text(value) {
            Some(text) => out.write_str(&text).map_err(minijinja::Error::from),
            None => minijinja::escape_formatter(out, state, value),
        });
        environment.add_filter(FILTER, |text: String| format!("{OPEN}{text}{CLOSE}"));
        environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone())
                .with_source(Raised(message)))
        });
        let date = options.date;
        environment.add_function("strftime_now", move |format: String| {
            date.strftime(&format)
                .map_err(|reason| minijinja::Error::new(ErrorKind::InvalidOperation, reason))
        });
        let (from, source) = (from.to_owned(), source.to_owned());
        let mut compiled = Self { environment, from, source, marks_generation, options, for_tools: None };
        let environment = &mut compiled.environment;
        match guarded(|| environment.add_template_owned(NAME, rewritten)) {
            Some(Ok(())) => Ok(compiled),
            Some(Err(error)) => Err(compiled.error(&error)),
            None => {
                Err(compiled
                    .refuse("the engine `minijinja` cannot read it; is it a Jinja template?".to_owned()))
            }
        }
    }

    /// Returns the template with another one for conversations with tools.
    pub fn with_tools_template(mut self, for_tools: Self) -> Self {
        self.for_tools = Some(Box::new(for_tools));
        self
    }

    /// Returns the template that renders a conversation: this, or its template for conversations with tools.
    pub(super) fn chosen(&self, conversation: &Conversation) -> &Self {
        self.for_tools.as_deref().filter(|_| conversation.tools.is_some()).unwrap_or(self)
    }

    /// Returns the template's own text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns what errors call it.
    pub fn from(&self) -> &str {
        &self.from
    }

    /// Returns whether the template marks what the model writes with `{% generation %}`.
    pub fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    /// Returns whether the template asks for the date.
    pub fn reads_the_date(&self) -> bool {
        self.source.contains("strftime_now") || self.for_tools.as_deref().is_some_and(Self::reads_the_date)
    }

    /// Returns everything on which a rendering depends beside the conversation, to check whether rows were rendered by this template.
    pub fn identity(&self) -> Json {
        serde_json::json!({
            "source": self.source,
            "special_tokens": self.options.special_tokens,
            "arguments": self.options.arguments,
            "date": self.reads_the_date().then(|| self.options.date.to_string()),
            "for_tools": self.for_tools.as_deref().map(Self::identity),
        })
    }

    /// Returns what it reads beside the conversation.
    pub fn options(&self) -> &TemplateConfig {
        &self.options
    }

    /// Renders a conversation; with `add_generation_prompt` followed by what begins an answer.
    ///
    /// # Errors
    /// [`Error::Template`] with the template's line: it refuses the conversation (`raise_exception`), fails, or takes too long.
    pub fn render(&self, conversation: &Conversation, add_generation_prompt: bool) -> Result<Rendered> {
        let template = self.chosen(conversation);
        template.render_messages(conversation, &conversation.messages, add_generation_prompt)
    }

    /// Renders other messages in the setting of a conversation.
    pub(super) fn render_messages(
        &self,
        conversation: &Conversation,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<Rendered> {
        if self.marks_generation && holds_marks(conversation, messages) {
            return Err(self.refuse(format!(
                "the conversation contains U+{:04X} or U+{:04X}, which Unicode reserves for programs; remove it",
                OPEN as u32, CLOSE as u32
            )));
        }
        let mut context: Vec<(String, Value)> = Vec::new();
        for fields in [&self.options.special_tokens, &self.options.arguments, &conversation.arguments] {
            context.extend(fields.iter().map(|(name, value)| (name.clone(), value_of(value))));
        }
        let optional = |value: &Option<Json>| value.as_ref().map_or(Value::from(()), value_of);
        context
            .push(("messages".to_owned(), messages.iter().map(|message| object(&message.fields)).collect()));
        context.push(("tools".to_owned(), optional(&conversation.tools)));
        context.push(("documents".to_owned(), optional(&conversation.documents)));
        context.push(("add_generation_prompt".to_owned(), add_generation_prompt.into()));
        let rendered = guarded(|| self.environment.get_template(NAME)?.render(Value::from_pairs(context)));
        let text = match rendered {
            Some(rendered) => rendered.map_err(|error| self.error(&error))?,
            None => return Err(self.refuse("the engine `minijinja` fails on it".to_owned())),
        };
        if !self.marks_generation {
            return Ok(Rendered { text, spans: Vec::new() });
        }
        let (text, spans) = generation_tag::take_spans(&text).map_err(|reason| self.refuse(reason))?;
        Ok(Rendered { text, spans })
    }

    /// Returns an error about the template.
    pub(super) fn refuse(&self, reason: String) -> Error {
        Error::Template { from: self.from.clone(), line: None, reason }
    }

    fn error(&self, error: &minijinja::Error) -> Error {
        let mut source: Option<&(dyn std::error::Error + 'static)> = error.source();
        let mut line = error.line();
        let mut raised = None;
        // An error within a macro is the source of the error of its call.
        while let Some(cause) = source {
            if let Some(Raised(message)) = cause.downcast_ref() {
                raised = Some(message);
            }
            if let Some(inner) = cause.downcast_ref::<minijinja::Error>() {
                line = inner.line().or(line);
            }
            source = cause.source();
        }
        let reason = match (raised, error.kind(), error.detail()) {
            (Some(message), ..) => format!("the template refuses the conversation: {}", message.trim()),
            (None, ErrorKind::OutOfFuel, _) => {
                format!(
                    "the template takes more than {FUEL} instructions or {} MiB; is the conversation that long?",
                    FUEL >> 14
                )
            }
            (None, kind, Some(detail)) => format!("{kind}: {detail}"),
            (None, kind, None) => kind.to_string(),
        };
        Error::Template { from: self.from.clone(), line, reason }
    }
}

/// Calls the engine; `None` if it panics.
fn guarded<T>(run: impl FnOnce() -> T) -> Option<T> {
    // A rendering that failed leaves nothing in the environment, and one that was not compiled is not used.
    catch_unwind(AssertUnwindSafe(run)).ok()
}

/// Returns a float as Python writes it; `None` for other values.
fn python_text(value: &Value) -> Option<String> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok().map(python_float)).flatten()
}

fn holds_marks(conversation: &Conversation, messages: &[Message]) -> bool {
    let fields = messages.iter().map(|message| &message.fields).chain([&conversation.arguments]);
    let beside = [&conversation.tools, &conversation.documents].into_iter().flatten();
    fields.flat_map(Map::values).chain(beside).any(has_mark)
}

fn has_mark(value: &Json) -> bool {
    match value {
        Json::String(text) => text.contains([OPEN, CLOSE]),
        Json::Array(items) => items.iter().any(has_mark),
        Json::Object(fields) => fields.values().any(has_mark),
        _ => false,
    }
}

/// Converts JSON to the engine's values; objects keep their order.
fn value_of(value: &Json) -> Value {
    match value {
        Json::Null => Value::from(()),
        Json::Bool(is) => Value::from(*is),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Value::from(number),
            (None, Some(number)) => Value::from(number),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(value_of).collect(),
        Json::Object(fields) => object(fields),
    }
}

fn object(fields: &Map<String, Json>) -> Value {
    Value::from_pairs(fields.iter().map(|(name, value)| (name.as_str(), value_of(value))))
}
