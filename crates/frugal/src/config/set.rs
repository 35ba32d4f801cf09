//! Values of a configuration by their keys, as on a command line.

use serde::Deserialize as _;
use serde_json::{Map, Value, json};

use super::given::{Given, current_name, overlay};
use super::written::Written;
use super::{Config, Method, Task, nearest};
use crate::config::origins::DEFAULT;
use crate::error::{Error, Result};

impl Config {
    /// Returns the configuration with one value replaced: `optimizer.lr=1e-4`. The value is written as in TOML; a text needs no quotes.
    ///
    /// # Errors
    /// [`Error::Toml`]: text without `=`; a key that is unknown, with the nearest that is known; a value of the wrong type. A key of an
    /// adapter that there is none of.
    pub fn with(&self, assignment: &str) -> Result<Self> {
        let mut given = Given::all_of(self)?;
        given.assign(assignment)?;
        given.config(given.task().unwrap_or(self.task))
    }

    /// Returns the configuration with the value of one key replaced by another of its type.
    ///
    /// # Errors
    /// [`Error::Toml`]: a key that is unknown; a value of the wrong type.
    pub fn with_value(&self, key: &str, value: Value) -> Result<Self> {
        let mut given = Given::all_of(self)?;
        given.set(key, value, DEFAULT)?;
        given.config(given.task().unwrap_or(self.task))
    }
}

/// Reads `KEY=VALUE` for a configuration in which `values` are given: returns the key, and the value in the key's type.
pub(super) fn assigned(values: &Map<String, Value>, assignment: &str) -> Result<(String, Value)> {
    let refuse = |reason: String| Error::Toml(format!("`{assignment}`: {reason}"));
    let Some((key, text)) = assignment.split_once('=') else {
        return Err(refuse("expected KEY=VALUE, such as optimizer.lr=1e-4".to_owned()));
    };
    let (key, text) = (&*current_name(key.trim()), text.trim());
    if key.is_empty() || key.split('.').any(str::is_empty) {
        return Err(refuse("expected a key with its section, such as optimizer.lr".to_owned()));
    }
    let quoted = Value::String(text.to_owned());
    // `model.name=7` names a folder, though 7 is a number.
    let mut first = None;
    for value in parsed(text).into_iter().chain([quoted]) {
        match check(values, key, value.clone()) {
            Ok(()) => return Ok((key.to_owned(), value)),
            Err(reason) => first = first.or(Some(reason)),
        }
    }
    Err(refuse(first.unwrap_or_default()))
}

/// Checks the value of a key beside the given ones.
fn check(values: &Map<String, Value>, key: &str, value: Value) -> Result<(), String> {
    let defaults = Config::defaults(Task::Finetune, Method::Lora);
    let mut all = serde_json::to_value(defaults).map_err(|cause| cause.to_string())?;
    overlay(&mut all, Value::Object(values.clone()));
    let mut at = &mut all;
    for (number, name) in key.split('.').enumerate() {
        if at.is_null() {
            *at = Value::Object(Map::new());
        }
        let Value::Object(fields) = at else {
            let section = key.split('.').take(number).collect::<Vec<_>>().join(".");
            return Err(format!("`{section}` is a value, not a section"));
        };
        at = fields.entry(name).or_insert(Value::Null);
    }
    if at.is_object() && !value.is_object() {
        return Err(format!("`{key}` is a section; name one of its keys, as {key}.KEY=VALUE"));
    }
    *at = value;
    Written::deserialize(all).map(drop).map_err(|cause| {
        let message = cause.to_string();
        let sections = if key.contains('.') { Vec::new() } else { nearest::known_names(&message) };
        match sections.into_iter().find(|section| has_key(section, key)) {
            Some(section) => format!("the key has no section; did you mean `{section}.{key}`?"),
            None => nearest::with_suggestion(&nearest::in_words(&message)),
        }
    })
}

/// Returns whether a section has a key.
fn has_key(section: &str, key: &str) -> bool {
    // A key that is known takes null, or refuses its type.
    match Written::deserialize(json!({ section: { key: null } })) {
        Ok(_) => true,
        Err(cause) => cause.to_string().starts_with("invalid type: null"),
    }
}

/// Parses a TOML expression; `None` if it is invalid.
fn parsed(text: &str) -> Option<Value> {
    let table = format!("value = {text}").parse::<toml::Table>().ok()?;
    let value = table.get("value")?;
    // JSON would make nothing of an infinite number.
    let is_finite = value.as_float().is_none_or(f64::is_finite);
    is_finite.then(|| serde_json::to_value(value).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Bytes, OffloadTier};

    #[test]
    fn values_are_set_by_key() {
        let lora = Config::defaults(Task::Finetune, Method::Lora);
        let set = |assignment: &str| lora.with(assignment).unwrap();
        assert_eq!(set("optimizer.lr=1e-4").optimizer.lr, 1e-4);
        assert_eq!(set("optimizer.lr=1").optimizer.lr, 1.0);
        assert_eq!(set("training.budget=3GiB").training.budget, Some(Bytes(3 << 30)));
        assert_eq!(set("training.steps = 7").training.steps, Some(7));
        assert_eq!(set("training.rows_at_once=2").training.micro_batch_size, Some(2), "its earlier name");
        assert_eq!(set("training.read_every=2").training.log_every, 2, "its earlier name");
        assert_eq!(set("model.name=7").model.name.as_deref(), Some("7"));
        assert_eq!(set("data.source=a = b.jsonl").data.source, "a = b.jsonl");
        assert_eq!(set("adapter.r=3").adapter.unwrap().r, 3);
        assert_eq!(set("offload.tier=file").offload.unwrap().tier, OffloadTier::File);
        assert_eq!(
            set("data.template_arguments.enable_thinking=false").data.template_arguments["enable_thinking"],
            false
        );
        let names = set("adapter.target_modules=['q_proj', \"v_proj\"]").adapter.unwrap().target_modules;
        assert_eq!(names, Some(["q_proj", "v_proj"].into()));
    }

    #[test]
    fn what_cannot_be_set_is_named() {
        let check = |assignment: &str, expected: &str| {
            let lora = Config::defaults(Task::Finetune, Method::Lora);
            let error = lora.with(assignment).unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{assignment}`: ")) && error.contains(expected), "{error}");
        };
        check("optimizer.lr", "expected KEY=VALUE");
        check(".lr=1", "expected a key with its section");
        check("optimiser.lr=1", "did you mean `optimizer`?");
        check("training.step=1", "did you mean `steps`?");
        check("training.steps=many", "expected a whole number from 0, found \"many\"");
        check("training.steps=1.5", "expected a whole number from 0, found floating point `1.5`");
        check("optimizer.lr=abc", "expected a number, found \"abc\"");
        check("training.baseline=maybe", "expected true or false, found \"maybe\"");
        check("lr=1", "the key has no section; did you mean `optimizer.lr`?");
        check("steps=1", "did you mean `training.steps`?");
        check("r=1", "did you mean `adapter.r`?");
        check("nothing=1", "unknown field `nothing`");
        check("training=1", "`training` is a section");
        check("training.batch.x=1", "`training.batch` is a value");
        check("adapter.rank_=1", "unknown field `rank_`");
    }
}
