//! PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The configuration is JSON as Python writes it: indented by two, with sorted keys, no final newline, and non-ASCII characters
//! escaped. Unchanged fields are written as they were read, so a folder written by PEFT is identical to the last byte after
//! [`Adapters::load`](crate::Adapters::load) and [`Adapters::save`](crate::Adapters::save).
//!
//! Tensor names are `base_model.model.` followed by the name in [`Adapters::tensors`](crate::Adapters::tensors). An adapter
//! that is not called `default` is in a subfolder of its name.

mod folder;
mod json;
mod tensors;

pub use folder::{LazyTensors, PREFIX, write_folder};

use std::path::Path;

use models::{ExpertTensor, strict_json};
use serde_json::{Map, Value, json};

use crate::config::LoraConfig;
use crate::error::{Error, Result, unsupported};
use crate::experts;

/// Returns PEFT's name of an adapter's tensor of experts, `experts.base_layer.lora_A.weight`, for the model's name,
/// `experts.gate_up_proj.lora_A.weight`, and any other name as it is. `exists` says which names of the model's there are beside it.
pub fn name_of_experts(name: &str, exists: &dyn Fn(&str) -> bool) -> String {
    for of in ExpertTensor::ALL {
        let Some((experts, rest)) = name.split_once(&format!(".{}.lora_", of.name())) else { continue };
        if !experts.ends_with(".experts") {
            continue;
        }
        let is_adapted = |of: &ExpertTensor| exists(&format!("{experts}.{}.lora_{rest}", of.name()));
        let adapted: Vec<ExpertTensor> = ExpertTensor::ALL.into_iter().filter(is_adapted).collect();
        return format!("{}.lora_{rest}", experts::key(experts, of, &adapted));
    }
    name.to_owned()
}

/// File name of the configuration.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// File name of the tensors.
pub const TENSORS_FILE: &str = "adapter_model.safetensors";

/// Fields that change the computation if set.
const UNSUPPORTED: [&str; 12] = [
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
    "tp_layer",
    "runtime_config",
];

/// The fields that PEFT 0.21 writes besides those of [`LoraConfig`].
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
        "task_type": "CAUSAL_LM",
        "use_bdlora": null,
        "use_qalora": false,
        "velora_config": null
    })
}

impl LoraConfig {
    /// Refuses invalid and unsupported configurations.
    ///
    /// # Errors
    /// A setting outside its range; [`Error::Unsupported`].
    pub fn check(&self) -> Result<()> {
        check_unsupported(&self.read)?;
        if self.fan_in_fan_out {
            return Err(unsupported(
                "fan_in_fan_out",
                "true",
                "projections here are [out, in]; set it to false",
            ));
        }
        let options = self.options("")?;
        if self.adapts_parameters() { experts::refuse(&options) } else { Ok(()) }
    }
}

/// Refuses fields that would change the computation.
fn check_unsupported(read: &Map<String, Value>) -> Result<()> {
    let refuse = |field: &str, found: &Value, remedy| Err(unsupported(field, found, remedy));
    if let Some(found) = read.get("peft_type").filter(|found| *found != "LORA") {
        return refuse("peft_type", found, "only LORA adapters can be read");
    }
    let (own, other) = (fields(&LoraConfig::default()), others());
    for (field, value) in read {
        let unset = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(items) => items.is_empty(),
            _ => false,
        };
        // A later version's `use_…` field that is set changes the computation.
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
    /// A missing file, invalid JSON, a field of the wrong type; as [`LoraConfig::check`].
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|cause| {
            let reason = format!("{cause}; an adapter's folder contains {CONFIG_FILE} and {TENSORS_FILE}");
            Error::file(path, reason)
        })?;
        Self::parse(&text, path)
    }

    /// Parses the text of an `adapter_config.json`.
    ///
    /// # Errors
    /// As [`LoraConfig::read`].
    pub fn from_json(text: &str) -> Result<Self> {
        Self::parse(text, Path::new(CONFIG_FILE))
    }

    fn parse(text: &str, path: &Path) -> Result<Self> {
        let refuse =
            |cause: serde_json::Error| Error::file(path, format!("not an adapter configuration: {cause}"));
        let read: Map<String, Value> = strict_json::from_str(text).map_err(refuse)?;
        let set = read.iter().filter(|(field, value)| !(value.is_null() && not_optional(field)));
        let set: Map<String, Value> = set.map(|(field, value)| (field.clone(), value.clone())).collect();
        let config = Self { read, ..serde_json::from_value(Value::Object(set)).map_err(refuse)? };
        config.check()?;
        Ok(config)
    }

    /// Returns the text of `adapter_config.json`, as PEFT would write it.
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

/// Whether null means a field's default, because the field itself cannot be null.
fn not_optional(field: &str) -> bool {
    fields(&LoraConfig::default()).get(field).is_some_and(|default| !default.is_null())
}
