//! Methods of fine-tuning.

use serde::{Deserialize, Serialize};

use super::{Config, Task};

/// Method of fine-tuning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Low-rank adapters.
    #[default]
    Lora,
    /// Low-rank adapters with a learned magnitude for each row of the weights.
    Dora,
    /// All weights.
    Full,
}

impl Method {
    /// Returns its name in flags and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lora => "lora",
            Self::Dora => "dora",
            Self::Full => "full",
        }
    }
}

impl Config {
    /// Returns what a fine-tuning trains, which follows from its adapter; `None` for a training from scratch.
    pub fn method(&self) -> Option<Method> {
        match (self.task, &self.adapter) {
            (Task::Train, _) => None,
            (Task::Finetune, None) => Some(Method::Full),
            (Task::Finetune, Some(adapter)) if adapter.use_dora => Some(Method::Dora),
            (Task::Finetune, Some(_)) => Some(Method::Lora),
        }
    }
}
