//! The values of a configuration that a user gave, by key, over the defaults.
//!
//! Values come in layers: a file, then `--set`, then flags; a later one overrides an earlier one, key by key. The defaults are applied
//! last, since some of them depend on the method, the objective and the optimizer. Each value has its [origin](Origins).
//!
//! ```
//! use frugal::config::{Given, Method, Task};
//!
//! let mut given = Given::default();
//! given.text("[adapter]\nr = 4", "file my.toml")?;
//! given.assign("optimizer.clip=0.5")?;
//! let config = given.config(Task::Finetune)?;
//! assert_eq!(config.adapter.map(|adapter| (adapter.r, adapter.lora_alpha)), Some((4, 16.0)));
//! assert_eq!((given.origins().get("adapter.r"), given.origins().get("adapter.lora_alpha")), ("file my.toml", "default"));
//! # Ok::<(), frugal::Error>(())
//! ```

use std::path::Path;

use serde::Deserialize as _;
use serde_json::{Map, Value, json};

use super::written::{OF_FINE_TUNING, Written};
use super::{Config, Method, ObjectiveKind, OptimizerRule, Task, set, with_line};
use crate::config::origins::{DEFAULT, Origins, leaves, values};
use crate::error::{Error, Result};

/// The origin of values that [`Given::assign`] takes.
const ASSIGNED: &str = "--set";
/// Sections, the names that keys in them had in earlier versions, and those that they have.
const EARLIER: [(&str, &str, &str); 2] =
    [("training", "read_every", "log_every"), ("training", "rows_at_once", "micro_batch_size")];

/// Returns the name of a key that is known by an earlier one.
pub fn current_name(key: &str) -> String {
    let earlier = EARLIER.iter().find(|(section, name, _)| key == format!("{section}.{name}"));
    earlier.map_or_else(|| key.to_owned(), |(section, _, name)| format!("{section}.{name}"))
}

/// The values of a configuration that a user gave. See the [module](self).
#[derive(Debug, Clone, Default)]
pub struct Given {
    values: Map<String, Value>,
    origins: Origins,
    /// The origin of values among which every key of an adapter is, whoever gave it: those of a file that a training wrote.
    names_all: Option<String>,
}

impl Given {
    /// Returns every value of a configuration, without an origin.
    pub(super) fn all_of(config: &Config) -> Result<Self> {
        match serde_json::to_value(config) {
            Ok(Value::Object(values)) => {
                Ok(Self { values, names_all: Some(DEFAULT.to_owned()), ..Self::default() })
            }
            Ok(_) => Ok(Self::default()),
            Err(cause) => Err(Error::Toml(cause.to_string())),
        }
    }

    /// Takes the values of a TOML file.
    ///
    /// Of a `config.toml` that a training wrote, a value that is marked as a default and is one still counts as not given: with
    /// another method it is that method's default.
    ///
    /// # Errors
    /// [`Error::File`] with the line: no such file; as [`Given::text`].
    pub fn file(&mut self, path: &Path) -> Result<()> {
        let file = |reason: String| Error::File { path: path.to_owned(), reason };
        let text = std::fs::read_to_string(path).map_err(|cause| file(cause.to_string()))?;
        self.text(&text, &format!("file {}", path.display())).map_err(|error| file(error.to_string()))
    }

    /// Takes the values of TOML text, which come from `origin`.
    ///
    /// # Errors
    /// [`Error::Toml`] with the line: not TOML, a key that is unknown (those that are known are listed), a value of the wrong type.
    pub fn text(&mut self, text: &str, origin: &str) -> Result<()> {
        let written: Written = toml::from_str(text).map_err(|cause| Error::Toml(with_line(text, &cause)))?;
        let table: toml::Table = text.parse().map_err(|cause| Error::Toml(with_line(text, &cause)))?;
        table.iter().try_for_each(|(key, value)| refuse_infinite(key, value))?;
        let mut layer = match serde_json::to_value(&table) {
            Ok(Value::Object(layer)) => layer,
            _ => Map::new(),
        };
        for (section, earlier, name) in EARLIER {
            if let Some(Value::Object(section)) = layer.get_mut(section)
                && let Some(value) = section.remove(earlier)
            {
                section.insert(name.to_owned(), value);
            }
        }
        let marks = Origins::read(text);
        let keys = leaves(&Value::Object(layer.clone()));
        if !keys.is_empty() && keys.iter().all(|(key, _)| marks.has(key)) {
            // Earlier versions wrote no method: a section `adapter` stood for LoRA.
            if written.task == Task::Finetune && written.method.is_none() && !layer.contains_key("adapter") {
                layer.insert("method".to_owned(), json!(Method::Full));
            }
            // PEFT's default targets are no value that TOML has.
            if let Some(Value::Object(adapter)) = layer.get_mut("adapter") {
                adapter.entry("target_modules").or_insert(Value::Null);
            }
            self.names_all = Some(origin.to_owned());
        }
        let mut defaults = values(&Config::defaults(written.task, method_of(&layer)))?;
        // These two decide the others.
        defaults.retain(|(key, _)| key != "task" && key != "method");
        defaults.push(("method".to_owned(), json!(Method::default())));
        for (key, value) in keys {
            // A template that a person has edited since is not that of the run.
            if marks.has(&key) && marks.get(&key) == DEFAULT && defaults.contains(&(key.clone(), value)) {
                remove(&mut layer, &key);
            }
        }
        self.take(layer, origin)
    }

    /// Takes one value: `optimizer.lr=1e-4`. The value is written as in TOML; a text needs no quotes.
    ///
    /// # Errors
    /// [`Error::Toml`]: text without `=`; a key that is unknown, with the nearest that is known; a value of the wrong type.
    pub fn assign(&mut self, assignment: &str) -> Result<()> {
        let (key, value) = set::assigned(&self.values, assignment)?;
        self.set(&key, value, ASSIGNED)
    }

    /// Takes the value of a key, which has the key's type.
    ///
    /// # Errors
    /// As [`Given::text`].
    pub fn set(&mut self, key: &str, value: Value, origin: &str) -> Result<()> {
        // A table replaces another as a whole.
        self.forget(key);
        let layer = key.rsplit('.').fold(value, |value, name| json!({ name: value }));
        match layer {
            Value::Object(layer) => self.take(layer, origin),
            _ => Ok(()),
        }
    }

    /// Puts a layer over the others.
    fn take(&mut self, layer: Map<String, Value>, origin: &str) -> Result<()> {
        let dora = use_dora(&layer);
        // The last one to speak of the method decides it, by either key.
        match layer.get("method").and_then(Value::as_str) {
            Some("full") => {
                let adapter = self.values.get("adapter").map(leaves).unwrap_or_default();
                for key in adapter.iter().map(|(key, _)| format!("adapter.{key}")) {
                    if self.names_all.as_deref() == Some(self.origins.get(&key)) {
                        self.forget(&key);
                    }
                }
            }
            Some("dora") if dora == Some(false) => {
                return Err(Error::Conflict {
                    first: "`method = \"dora\"`".to_owned(),
                    second: "`adapter.use_dora = false`".to_owned(),
                    why: "DoRA is LoRA with learned magnitudes",
                    remedy: "leave one of them out",
                });
            }
            Some(_) if dora.is_none() => self.forget(USE_DORA),
            None if dora.is_some() && method_of(&self.values) != Method::Full => self.forget("method"),
            _ => {}
        }
        let layer = Value::Object(layer);
        leaves(&layer).iter().for_each(|(key, _)| self.origins.set(key, origin));
        let mut values = Value::Object(std::mem::take(&mut self.values));
        overlay(&mut values, layer);
        if let Value::Object(values) = values {
            self.values = values;
        }
        Ok(())
    }

    /// Forgets the value of a key, or of all keys of a section.
    pub fn forget(&mut self, key: &str) {
        remove(&mut self.values, key);
        let within = format!("{key}.");
        self.origins.retain(|own| own != key && !own.starts_with(&within));
    }

    /// Returns the task, if it was given.
    pub fn task(&self) -> Option<Task> {
        Task::deserialize(self.values.get("task")?).ok()
    }

    /// Returns what a fine-tuning trains: as given, else LoRA.
    pub fn method(&self) -> Method {
        method_of(&self.values)
    }

    /// Returns `adapter.use_dora`, if [`Given::assign`] gave it.
    pub fn assigned_dora(&self) -> Option<bool> {
        use_dora(&self.values).filter(|_| self.origins.get(USE_DORA) == ASSIGNED)
    }

    /// Returns where the values come from, by their keys; the others are defaults.
    pub fn origins(&self) -> &Origins {
        &self.origins
    }

    /// Returns the origin of the values of a file that a training wrote, if there is one.
    pub fn of_training(&self) -> Option<&str> {
        self.names_all.as_deref()
    }

    /// Returns the configuration of a task: the defaults of this task and method, with what was given in their place.
    ///
    /// # Errors
    /// Another task; values of an adapter where all weights are trained; a method for a training from scratch.
    pub fn config(&self, task: Task) -> Result<Config> {
        if let Some(own) = self.task().filter(|own| *own != task) {
            let (found, expected) = match own {
                Task::Train => ("train", "\"finetune\": `frugal train` trains from scratch"),
                Task::Finetune => ("finetune", "\"train\": `frugal finetune` fine-tunes"),
            };
            return Err(Error::Value { key: "task", found: format!("\"{found}\""), expected });
        }
        if task == Task::Train && self.values.contains_key("method") {
            return Err(Error::Toml(OF_FINE_TUNING.to_owned()));
        }
        let method = self.method();
        let adapter = self.values.get("adapter").map(leaves).unwrap_or_default();
        if let (Task::Finetune, Method::Full, Some((key, _))) = (task, method, adapter.first()) {
            return Err(Error::Conflict {
                first: format!("`adapter.{key}`"),
                second: "`method = \"full\"`".to_owned(),
                why: "all weights are trained, and there is no adapter",
                remedy: "leave the adapter's settings out, or use `method = \"lora\"`",
            });
        }
        let failed = |cause: serde_json::Error| Error::Toml(cause.to_string());
        let mut all = serde_json::to_value(Config::defaults(task, method)).map_err(failed)?;
        let kind = self.values.get("objective").and_then(|objective| objective.get("kind"));
        let kind = kind.and_then(|kind| ObjectiveKind::deserialize(kind).ok()).unwrap_or_default();
        if kind.is_of_answers() {
            overlay(&mut all, json!({ "optimizer": { "lr": Config::learning_rate_of_answers(method) } }));
        }
        let rule = self.values.get("optimizer").and_then(|optimizer| optimizer.get("rule"));
        if let Some(rule) = rule.and_then(|rule| OptimizerRule::deserialize(rule).ok()) {
            let [lr, weight_decay] = rule.default_factors();
            scale(&mut all["optimizer"]["lr"], lr);
            scale(&mut all["optimizer"]["weight_decay"], weight_decay);
        }
        let mut values = self.values.clone();
        values.remove("method");
        if method == Method::Full {
            values.remove("adapter");
        }
        overlay(&mut all, Value::Object(values));
        Config::deserialize(all).map_err(failed)
    }
}

/// The key that makes LoRA DoRA.
const USE_DORA: &str = "adapter.use_dora";

fn use_dora(values: &Map<String, Value>) -> Option<bool> {
    values.get("adapter")?.get("use_dora")?.as_bool()
}

/// The method of given values.
fn method_of(values: &Map<String, Value>) -> Method {
    let named = values.get("method").and_then(|method| Method::deserialize(method).ok());
    match (named, use_dora(values)) {
        (Some(Method::Full), _) => Method::Full,
        (_, Some(true)) => Method::Dora,
        (named, _) => named.unwrap_or_default(),
    }
}

/// Multiplies a number, to twelve digits, so that a fifth of 2e-5 is written as 4e-6.
fn scale(number: &mut Value, factor: f64) {
    let scaled = number.as_f64().filter(|_| factor != 1.0).map(|value| format!("{:.11e}", value * factor));
    if let Some(scaled) = scaled.and_then(|scaled| scaled.parse::<f64>().ok()) {
        *number = json!(scaled);
    }
}

/// Puts values over others, key by key.
pub(super) fn overlay(below: &mut Value, above: Value) {
    match (below, above) {
        (Value::Object(below), Value::Object(above)) => {
            for (key, value) in above {
                overlay(below.entry(key).or_insert(Value::Null), value);
            }
        }
        (below, above) => *below = above,
    }
}

/// Removes the value of a key, if there is one.
fn remove(values: &mut Map<String, Value>, key: &str) {
    match key.split_once('.') {
        None => {
            values.remove(key);
        }
        Some((section, rest)) => {
            if let Some(Value::Object(fields)) = values.get_mut(section) {
                remove(fields, rest);
            }
        }
    }
}

/// Refuses infinities and NaN, which JSON does not have and no key uses.
fn refuse_infinite(key: &str, value: &toml::Value) -> Result<()> {
    match value {
        toml::Value::Table(fields) => {
            fields.iter().try_for_each(|(name, value)| refuse_infinite(&format!("{key}.{name}"), value))
        }
        toml::Value::Array(items) => items.iter().try_for_each(|item| refuse_infinite(key, item)),
        toml::Value::Float(number) if !number.is_finite() => {
            Err(Error::Toml(format!("`{key}` is {number}; expected a finite number")))
        }
        _ => Ok(()),
    }
}
