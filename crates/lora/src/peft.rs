//! PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The configuration is JSON as Python writes it: an indent of two, sorted keys, no newline at the end, everything beyond ASCII
//! escaped. What was read is written back as it was, a field that was changed excepted; so a folder that PEFT wrote is the same to
//! the last byte after [`Adapters::load`](crate::Adapters::load) and [`Adapters::save`](crate::Adapters::save).
//!
//! Tensors are called `base_model.model.` and what [`Adapters::tensors`](crate::Adapters::tensors) calls them. An adapter that
//! is not called `default` lies in a folder of its name.

mod folder;
mod json;
mod tensors;

pub use folder::{PREFIX, write_folder};

use std::path::Path;

use models::strict_json;
use serde_json::{Map, Value, json};

use crate::config::LoraConfig;
use crate::error::{Error, Result};

/// Name of the configuration's file.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// Name of the tensors' file.
pub const TENSORS_FILE: &str = "adapter_model.safetensors";

/// Fields that change what is computed, when they are set.
const UNSUPPORTED: [&str; 14] = [
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
    "tp_layer",
    "runtime_config",
];

/// What PEFT 0.21 writes beside the fields of [`LoraConfig`].
fn others() -> Value {
    json!({
        "alora_invocation_tokens": null,
        "arrow_config": null,
        "auto_mapping": null,
        "corda_config": null,
        "eva_config": null,
        "inference_mode": true,
        "kasa_config": null,
        "layer_replication": null,
        "loftq_config": {},
        "lora_bias": false,
        "lora_ga_config": null,
        "megatron_config": null,
        "megatron_core": "megatron.core",
        "monteclora_config": null,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "revision": null,
        "target_parameters": null,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": null,
        "use_bdlora": null,
        "use_qalora": false,
        "velora_config": null
    })
}

/// Refuses what would be computed differently.
pub(crate) fn check_unsupported(read: &Map<String, Value>) -> Result<()> {
    let refuse = |field: &str, found: &Value, remedy| {
        Err(Error::Unsupported { field: field.to_owned(), found: found.to_string(), remedy })
    };
    if let Some(found) = read.get("peft_type").filter(|found| *found != "LORA") {
        return refuse("peft_type", found, "only LORA's adapters can be read");
    }
    let (own, other) = (fields(&LoraConfig::default()), others());
    for (field, value) in read {
        let unset = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(items) => items.is_empty(),
            _ => false,
        };
        // What a later version calls `use_…` and switches on is another computation.
        let unknown = field.starts_with("use_") && !own.contains_key(field) && other.get(field).is_none();
        if !unset && (UNSUPPORTED.contains(&field.as_str()) || unknown && *value == Value::Bool(true)) {
            return refuse(
                field,
                value,
                "train the adapter without it, or merge it with PEFT and load the merged model",
            );
        }
    }
    Ok(())
}

fn fields(config: &LoraConfig) -> Map<String, Value> {
    match serde_json::to_value(config) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    }
}

impl LoraConfig {
    /// Reads `adapter_config.json`.
    ///
    /// # Errors
    /// A missing file, malformed JSON, a field of another type; as [`LoraConfig::check`].
    pub fn read(path: &Path) -> Result<Self> {
        let refuse = |reason: String| Error::File { path: path.to_owned(), reason };
        let text = std::fs::read_to_string(path).map_err(|cause| {
            refuse(format!("{cause}; an adapter's folder has {CONFIG_FILE} and {TENSORS_FILE}"))
        })?;
        Self::from_json(&text).map_err(|error| match error {
            Error::File { reason, .. } => refuse(reason),
            other => other,
        })
    }

    /// Reads the text of an `adapter_config.json`.
    ///
    /// # Errors
    /// As [`LoraConfig::read`].
    pub fn from_json(text: &str) -> Result<Self> {
        let refuse = |cause: serde_json::Error| Error::File {
            path: CONFIG_FILE.into(),
            reason: format!("not a configuration of an adapter: {cause}"),
        };
        let read: Map<String, Value> = strict_json::from_str(text).map_err(refuse)?;
        let set = read.iter().filter(|(field, value)| !(value.is_null() && not_optional(field)));
        let set: Map<String, Value> = set.map(|(field, value)| (field.clone(), value.clone())).collect();
        let config = Self { read, ..serde_json::from_value(Value::Object(set)).map_err(refuse)? };
        config.check()?;
        Ok(config)
    }

    /// The text of `adapter_config.json`, as PEFT would write it.
    pub fn to_json(&self) -> String {
        let now = fields(self);
        if self.read.is_empty() {
            let mut all = now;
            if let Value::Object(others) = others() {
                all.extend(others);
            }
            return json::python(&Value::Object(all));
        }
        let known =
            fields(&LoraConfig::from_json(&Value::Object(self.read.clone()).to_string()).unwrap_or_default());
        let defaults = fields(&Self::default());
        let mut all = self.read.clone();
        for (field, value) in now {
            let before =
                if self.read.contains_key(&field) { known.get(&field) } else { defaults.get(&field) };
            if before != Some(&value) {
                all.insert(field, value);
            }
        }
        json::python(&Value::Object(all))
    }
}

/// Whether null stands for a field's default, because the field itself has no null.
fn not_optional(field: &str) -> bool {
    fields(&LoraConfig::default()).get(field).is_some_and(|default| !default.is_null())
}
