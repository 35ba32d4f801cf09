//! The settings of a training, which a checkpoint keeps and a resume compares.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Trainer;
use crate::error::Result;

/// Settings by name, as text that does not change when it is written and read.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Description {
    /// Settings that make another model of the same tensors.
    model: BTreeMap<String, String>,
    /// Settings that may differ after a resume.
    settings: BTreeMap<String, String>,
}

impl Description {
    pub(super) fn of(trainer: &Trainer) -> Result<Self> {
        let mut model: BTreeMap<String, String> = match trainer.model.config() {
            Value::Object(config) => {
                config.into_iter().map(|(key, value)| (key, value.to_string())).collect()
            }
            _ => BTreeMap::new(),
        };
        if let Some(fingerprint) = trainer.frozen_fingerprint()? {
            model.insert("the frozen parameters".to_owned(), fingerprint);
        }
        let mut settings = BTreeMap::new();
        if let Some(dropout) = model.remove("dropout") {
            settings.insert("dropout".to_owned(), dropout);
        }
        let options = &trainer.options;
        let clip = options.clip.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
        let mut set = |name: &str, value: String| settings.insert(name.to_owned(), value);
        set("optimizer", format!("{:?}", trainer.optimizer.rule()));
        set("schedule", trainer.schedule.to_string());
        set("accumulation", options.accumulation.to_string());
        if let Some(rows) = options.rows {
            set("rows at a time", rows.to_string());
        }
        set("clip", clip);
        if options.embedding_noise > 0.0 {
            set("noise of embeddings", options.embedding_noise.to_string());
        }
        set("non-finite gradients", format!("{:?}", options.non_finite));
        set("overflowing gradients", format!("{:?}", options.overflow));
        for group in trainer.optimizer.groups() {
            set(&format!("learning rate of group {}", group.name), group.lr.to_string());
            set(&format!("weight decay of group {}", group.name), group.weight_decay.to_string());
            set(&format!("frozen group {}", group.name), group.frozen.to_string());
            if let Some(rule) = &group.rule {
                set(&format!("optimizer of group {}", group.name), format!("{rule:?}"));
            }
        }
        Ok(Self { model, settings })
    }

    /// Returns the differences of the model and of the settings, one line each.
    pub(super) fn differences(&self, before: &Self) -> (Vec<String>, Vec<String>) {
        (differences(&self.model, &before.model), differences(&self.settings, &before.settings))
    }
}

fn differences(is: &BTreeMap<String, String>, was: &BTreeMap<String, String>) -> Vec<String> {
    let names: BTreeSet<&String> = is.keys().chain(was.keys()).collect();
    let of = |map: &BTreeMap<String, String>, name: &String| {
        map.get(name).map_or("none", |value| value).to_owned()
    };
    let differ = names.into_iter().filter(|name| is.get(*name) != was.get(*name));
    differ.map(|name| format!("{name} was {} and is now {}", of(was, name), of(is, name))).collect()
}

impl std::fmt::Debug for Trainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trainer")
            .field("step", &self.step)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
