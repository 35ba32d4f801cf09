//! The values of flags: how they are read, and what they are in a configuration.

use std::path::Path;
use std::str::FromStr;

use clap::builder::{EnumValueParser, TypedValueParser as _, ValueParser};
use clap::{Arg, ArgAction, ValueEnum, ValueHint};
use frugal::config::{Bytes, NewToken};
use serde::Serialize;
use serde_json::{Value, json};

/// The value that a flag takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Takes {
    /// None: the flag sets its key to this JSON.
    Nothing(&'static str),
    /// One, by its name in the help.
    One { name: &'static str, parser: fn() -> ValueParser },
    /// A path.
    Path { name: &'static str },
    /// A value, and the flag may be given several times.
    Several { name: &'static str },
    /// Several between commas, and the value that they make.
    List { name: &'static str, parser: fn() -> ValueParser, value: fn(Vec<Value>) -> Value },
}

pub(crate) const fn switch(value: &'static str) -> Takes {
    Takes::Nothing(value)
}

pub(crate) const fn text(name: &'static str) -> Takes {
    Takes::One { name, parser: parsed::<String> }
}

pub(crate) const fn path(name: &'static str) -> Takes {
    Takes::Path { name }
}

pub(crate) const fn whole(name: &'static str) -> Takes {
    Takes::One { name, parser: parsed::<u64> }
}

pub(crate) const fn number(name: &'static str) -> Takes {
    Takes::One { name, parser: finite }
}

pub(crate) const fn choice<T: Choice>(name: &'static str) -> Takes {
    Takes::One { name, parser: named::<T> }
}

pub(crate) const fn several(name: &'static str) -> Takes {
    Takes::Several { name }
}

pub(crate) const fn list(
    name: &'static str,
    parser: fn() -> ValueParser,
    value: fn(Vec<Value>) -> Value,
) -> Takes {
    Takes::List { name, parser, value }
}

impl Takes {
    /// Returns an argument that takes it.
    pub(crate) fn argument(self, argument: Arg) -> Arg {
        match self {
            Self::Nothing(_) => argument.action(ArgAction::SetTrue),
            // A number below 0 is a wrong value, not an unknown flag.
            Self::One { name, parser } => {
                argument.value_name(name).value_parser(parser()).allow_negative_numbers(true)
            }
            Self::Path { name } => {
                argument.value_name(name).value_parser(parsed::<String>()).value_hint(ValueHint::AnyPath)
            }
            Self::Several { name } => {
                argument.value_name(name).value_parser(parsed::<String>()).action(ArgAction::Append)
            }
            Self::List { name, parser, .. } => argument
                .value_name(name)
                .value_parser(parser())
                .value_delimiter(',')
                .action(ArgAction::Append),
        }
    }
}

/// An enum of a configuration that is written as its flag's values are.
pub(crate) trait Choice: ValueEnum + Serialize + Clone + Send + Sync + 'static {}

impl<T: ValueEnum + Serialize + Clone + Send + Sync + 'static> Choice for T {}

/// A name of an enum.
fn named<T: Choice>() -> ValueParser {
    EnumValueParser::<T>::new().map(|value| json!(value)).into()
}

/// A value that a type parses.
pub(crate) fn parsed<T: FromStr<Err: ToString> + Serialize>() -> ValueParser {
    (|text: &str| text.parse::<T>().map(|value| json!(value)).map_err(|error| error.to_string())).into()
}

/// A finite number: no key has an infinite one.
fn finite() -> ValueParser {
    (|text: &str| match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(json!(number)),
        Ok(_) => Err("expected a finite number".to_owned()),
        Err(error) => Err(error.to_string()),
    })
    .into()
}

/// A whole number of the model's sizes.
pub(crate) fn size() -> ValueParser {
    clap::value_parser!(i64).range(1..).map(|size| json!(size)).into()
}

/// A whole number of at least `LEAST`.
pub(crate) fn least<const LEAST: i64>() -> ValueParser {
    clap::value_parser!(u32).range(LEAST..).map(|number| json!(number)).into()
}

/// A ZeRO stage.
pub(crate) fn zero_stage() -> ValueParser {
    (|text: &str| match text {
        "auto" => Ok(json!(text)),
        "1" | "2" | "3" => Ok(json!(text.parse::<u8>().unwrap_or_default())),
        _ => Err("give 1, 2, 3 or auto"),
    })
    .into()
}

/// A memory limit.
pub(crate) fn bytes() -> ValueParser {
    (|text: &str| budget(text).map(|bytes| json!(bytes))).into()
}

/// Reads a memory limit.
///
/// # Errors
/// A small number without a unit: one was forgotten.
pub(crate) fn budget(text: &str) -> Result<Bytes, String> {
    let budget: Bytes = text.parse()?;
    match text.trim().parse::<u64>() {
        Ok(number) if number < 1 << 20 => {
            Err(format!("this is {budget}; give a unit, as {number}MiB or {number}GiB"))
        }
        _ => Ok(budget),
    }
}

/// The tokens in a file.
pub(crate) fn new_tokens() -> ValueParser {
    (|text: &str| match NewToken::read(Path::new(text)) {
        Ok(tokens) => Ok(json!(tokens)),
        Err(error) => Err(error.to_string()),
    })
    .into()
}

/// How adapters are initialised: a truth value, or a name.
pub(crate) fn initialization() -> ValueParser {
    (|text: &str| match text.to_lowercase().as_str() {
        "true" => Ok(json!(true)),
        "false" => Ok(json!(false)),
        _ => Ok::<_, String>(json!(text)),
    })
    .into()
}

/// Names of projections: a list, which `none` leaves empty, or the pattern of all.
pub(crate) fn targets(names: Vec<Value>) -> Value {
    match &names[..] {
        [Value::String(one)] if one.eq_ignore_ascii_case("all-linear") => json!(one),
        [Value::String(one)] if one.eq_ignore_ascii_case("none") => json!([]),
        _ => names.iter().filter_map(Value::as_str).map(str::trim).collect(),
    }
}

/// The same with the short names of a plan: `q` is `q_proj`, and `all` all projections.
pub(crate) fn short_targets(names: Vec<Value>) -> Value {
    const SHORT: [&str; 7] = ["q", "k", "v", "o", "gate", "up", "down"];
    let long = |name: Value| match name.as_str().map(str::trim) {
        Some("all") => json!("all-linear"),
        Some(name) if SHORT.contains(&name) => json!(format!("{name}_proj")),
        _ => name,
    };
    targets(names.into_iter().map(long).collect())
}

/// A list of values.
pub(crate) fn array(values: Vec<Value>) -> Value {
    Value::Array(values)
}

/// The training method.
#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MethodArg {
    /// Low-rank adapters
    Lora,
    /// Low-rank adapters with a learned magnitude for each row of the weights
    Dora,
    /// All weights
    Full,
    /// QLoRA: an alias that names the flags to use instead
    #[value(hide = true)]
    Qlora,
}

/// The computation of a step.
#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StepArg {
    /// Train low-rank adapters
    Lora,
    /// Train low-rank adapters and the magnitudes of rows (DoRA)
    Dora,
    /// Train all weights
    Full,
    /// Run the forward pass only
    Inference,
    /// As in [`MethodArg`]
    #[value(hide = true)]
    Qlora,
}

/// The schedule of the learning rate.
#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ScheduleArg {
    /// No decay
    Constant,
    /// Linear decay to 0 at the last step
    Linear,
    /// Cosine decay to 0 at the last step
    Cosine,
}

/// The tokens of a row that count in the loss.
#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MaskArg {
    /// Every assistant turn or completion, except messages of weight 0
    Answers,
    /// The last assistant turn
    Last,
    /// All tokens
    All,
}
