//! A configuration as it stands in files: with its method in words.

use lora::LoraConfig;
use serde::{Deserialize, Deserializer, Serialize};

use super::{
    ActivationsConfig, Config, DataConfig, ExpertsConfig, LossConfig, Method, MlpConfig, ModelConfig,
    ObjectiveConfig, OffloadConfig, OptimizerConfig, PrecisionConfig, RolloutConfig, Task, TrainingConfig,
};

/// The keys of a file. [`Config`] has no `method`, because the adapter says it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Written {
    pub(super) task: Task,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) method: Option<Method>,
    model: ModelConfig,
    data: DataConfig,
    objective: ObjectiveConfig,
    rollout: RolloutConfig,
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "strict_adapter")]
    adapter: Option<LoraConfig>,
    mlp: MlpConfig,
    loss: LossConfig,
    activations: ActivationsConfig,
    #[serde(skip_serializing_if = "Option::is_none")]
    offload: Option<OffloadConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertsConfig>,
    precision: PrecisionConfig,
    optimizer: OptimizerConfig,
    training: TrainingConfig,
}

impl From<Config> for Written {
    fn from(config: Config) -> Self {
        let method = config.method();
        let Config {
            task,
            model,
            data,
            objective,
            rollout,
            adapter,
            mlp,
            loss,
            activations,
            offload,
            experts,
            precision,
            optimizer,
            training,
        } = config;
        Self {
            task,
            method,
            model,
            data,
            objective,
            rollout,
            adapter,
            mlp,
            loss,
            activations,
            offload,
            experts,
            precision,
            optimizer,
            training,
        }
    }
}

impl TryFrom<Written> for Config {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        let Written {
            task,
            method,
            model,
            data,
            objective,
            rollout,
            adapter,
            mlp,
            loss,
            activations,
            offload,
            experts,
            precision,
            optimizer,
            training,
        } = written;
        let adapter = match (task, method, adapter) {
            (Task::Train, Some(_), _) => return Err(OF_FINE_TUNING.to_owned()),
            (_, Some(Method::Full), Some(_)) => {
                return Err("`adapter` and `method = \"full\"` exclude each other".to_owned());
            }
            // Configurations of earlier versions have no method.
            (_, None | Some(Method::Full), adapter) => adapter,
            (_, Some(method), adapter) => {
                let mut adapter = adapter.unwrap_or_else(Self::default_adapter);
                adapter.use_dora |= method == Method::Dora;
                Some(adapter)
            }
        };
        Ok(Self {
            task,
            model,
            data,
            objective,
            rollout,
            adapter,
            mlp,
            loss,
            activations,
            offload,
            experts,
            precision,
            optimizer,
            training,
        })
    }
}

pub(super) const OF_FINE_TUNING: &str =
    "`method` applies to fine-tuning only: a training from scratch trains all weights";

/// [`LoraConfig`] keeps fields that it does not know, for PEFT's files. In a configuration they are mistakes.
fn strict_adapter<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<LoraConfig>, D::Error> {
    use serde::de::Error as _;
    let fields = serde_json::Map::<String, serde_json::Value>::deserialize(deserializer)?;
    let Ok(serde_json::Value::Object(known)) = serde_json::to_value(LoraConfig::default()) else {
        return Err(D::Error::custom("the adapter's fields are not known"));
    };
    if let Some(unknown) = fields.keys().find(|field| !known.contains_key(*field)) {
        let names: Vec<String> = known.keys().map(|field| format!("`{field}`")).collect();
        return Err(D::Error::custom(format!(
            "unknown field `{unknown}`, expected one of {}",
            names.join(", ")
        )));
    }
    LoraConfig::deserialize(serde_json::Value::Object(fields)).map(Some).map_err(D::Error::custom)
}
