//! Origin of each value of a configuration, and `config.toml` with the origins as comments.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{Config, current_name};
use crate::error::Result;

/// The origin of a value that no file and no flag sets.
pub const DEFAULT: &str = "default";

/// The origin of each value, such as `--lr` or `file my.toml`. Keys have their section: `optimizer.lr`.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Origins(#[serde(deserialize_with = "under_current_names")] BTreeMap<String, String>);

/// Reads origins under the current names of their keys: an earlier version may have written the run's record.
fn under_current_names<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<BTreeMap<String, String>, D::Error> {
    let read = BTreeMap::<String, String>::deserialize(deserializer)?;
    Ok(read.into_iter().map(|(key, origin)| (current_name(&key), origin)).collect())
}

/// Returns the values of a configuration by key, in the order of its sections. A list is one value.
///
/// # Errors
/// A value that JSON cannot express.
pub fn values(config: &Config) -> Result<Vec<(String, Value)>> {
    let value = serde_json::to_value(config).map_err(|cause| crate::Error::Toml(cause.to_string()))?;
    Ok(leaves(&value))
}

/// Returns the leaves of a JSON value by key; a null is left out.
pub(crate) fn leaves(value: &Value) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    flatten("", value.clone(), &mut all);
    all
}

fn flatten(prefix: &str, value: Value, into: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(fields) => fields.into_iter().for_each(|(key, value)| {
            let key = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
            flatten(&key, value, into);
        }),
        Value::Null => {}
        value => into.push((prefix.to_owned(), value)),
    }
}

impl Origins {
    /// Sets the origin of a key.
    pub fn set(&mut self, key: &str, origin: &str) {
        self.0.insert(current_name(key), origin.to_owned());
    }

    /// Returns whether a key has an origin.
    pub fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// Removes the origins of the keys that `is_kept` refuses.
    pub fn retain(&mut self, is_kept: impl Fn(&str) -> bool) {
        self.0.retain(|key, _| is_kept(key));
    }

    /// Reads the origins that [`Origins::annotate`] has written beside values.
    pub fn read(text: &str) -> Self {
        let mut origins = Self::default();
        for (key, line) in keys_of_lines(text) {
            if let (Some(key), Some((_, origin))) = (key, line.rsplit_once(" # ")) {
                origins.set(&key, origin);
            }
        }
        origins
    }

    /// Returns the origin of a key: [`DEFAULT`] if none was set.
    pub fn get(&self, key: &str) -> &str {
        self.0.get(key).map_or(DEFAULT, String::as_str)
    }

    /// Returns the TOML text of a configuration with the origin of each value as a comment on its line.
    ///
    /// # Errors
    /// As [`Config::to_toml`].
    pub fn annotate(&self, config: &Config) -> Result<String> {
        let plain = config.to_toml()?;
        let mut text = String::new();
        for (key, line) in keys_of_lines(&plain) {
            text.push_str(line);
            if let Some(key) = key {
                let origin: String = self.get(&key).chars().map(one_line).collect();
                text.push_str(&format!(" # {origin}"));
            }
            text.push('\n');
        }
        // A line within a multi-line string may look like a key, and a comment there would change the string.
        Ok(if text.parse::<Config>().is_ok_and(|read| read == *config) { text } else { plain })
    }
}

/// Returns each line of a configuration's TOML text, with the key whose value begins and ends on it.
fn keys_of_lines(text: &str) -> impl Iterator<Item = (Option<String>, &str)> {
    let (mut section, mut in_text) = (String::new(), false);
    text.lines().map(move |line| {
        let key = line.split_once(" = ").map(|(key, _)| key.trim_matches('"')).filter(|_| !in_text);
        // A multi-line string has its key on its first line, where no comment may follow.
        in_text ^= (line.matches("\"\"\"").count() + line.matches("'''").count()) % 2 == 1;
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = format!("{name}.");
            return (None, line);
        }
        (key.filter(|_| !in_text).map(|key| format!("{section}{key}")), line)
    })
}

/// Replaces control characters, which a TOML comment cannot contain, by blanks.
fn one_line(c: char) -> char {
    if c.is_control() { ' ' } else { c }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Method, Task};

    #[test]
    fn every_value_has_its_origin_beside_it() {
        let mut config = Config::defaults(Task::Finetune, Method::Lora);
        config.data.source = "a # b = c".to_owned();
        config.model.name = Some("first\n[second]\nthird = 3".to_owned());
        let mut origins = Origins::default();
        origins.set("optimizer.lr", "--lr");
        origins.set("data.source", "file\nmy.toml");
        let text = origins.annotate(&config).unwrap();
        assert_eq!(text.parse::<Config>().unwrap(), config);
        assert!(text.contains("\nlr = 0.0002 # --lr\n"), "{text}");
        assert!(text.contains("\nsource = \"a # b = c\" # file my.toml\n"), "{text}");
        assert!(text.contains("\nr = 8 # default\n") && text.contains("batch = 4 # default\n"), "{text}");
        let keys: Vec<String> = values(&config).unwrap().into_iter().map(|(key, _)| key).collect();
        assert!(keys.iter().any(|key| key == "training.batch"), "{keys:?}");
    }
}
