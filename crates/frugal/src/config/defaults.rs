//! The values of a configuration that nobody gave.
//!
//! They depend on the task and on what a fine-tuning trains, the learning rate on whether it learns from pairs, and with the weight decay on the optimizer. Files, `--set` and flags are applied over them key by
//! key ([`Given`](super::Given)), so a section that names one key keeps the others.

use lora::LoraConfig;
use training::schedule::Shape;

use super::{Config, DataConfig, Method, OptimizerConfig, Task, TrainingConfig};

/// Learning rate of full fine-tuning.
const FULL_LEARNING_RATE: f64 = 2e-5;
/// Learning rates of an objective over whole answers, with adapters and of all weights.
const ANSWER_LEARNING_RATES: [f64; 2] = [1e-5, 1e-6];
/// Tokens of a row in a training from scratch.
const LENGTH: usize = 32;

impl Default for Config {
    /// A fine-tuning of all weights, as a model without an adapter is trained.
    fn default() -> Self {
        Self::defaults(Task::Finetune, Method::Full)
    }
}

impl Config {
    /// Returns the default of every key. A training from scratch has no `method`.
    pub fn defaults(task: Task, method: Method) -> Self {
        let optimizer = OptimizerConfig::default();
        let config = Self {
            task,
            model: super::ModelConfig::default(),
            data: DataConfig::default(),
            objective: super::ObjectiveConfig::default(),
            rollout: super::RolloutConfig::default(),
            adapter: None,
            mlp: super::MlpConfig::default(),
            loss: super::LossConfig::default(),
            activations: super::ActivationsConfig::default(),
            offload: None,
            experts: None,
            precision: super::PrecisionConfig::default(),
            optimizer,
            training: TrainingConfig::default(),
        };
        match (task, method) {
            (Task::Train, _) => Self {
                data: DataConfig {
                    source: super::SYNTHETIC.to_owned(),
                    max_length: Some(LENGTH),
                    ..DataConfig::default()
                },
                optimizer: OptimizerConfig {
                    lr: 1e-3,
                    schedule: Shape::Constant,
                    warmup: 0.0,
                    weight_decay: 0.1,
                    clip: 0.0,
                    ..OptimizerConfig::default()
                },
                training: TrainingConfig {
                    batch: 8,
                    accumulation: 1,
                    keep: 3,
                    log_every: 10,
                    ..TrainingConfig::default()
                },
                ..config
            },
            (Task::Finetune, Method::Full) => Self {
                optimizer: OptimizerConfig { lr: FULL_LEARNING_RATE, ..OptimizerConfig::default() },
                ..config
            },
            (Task::Finetune, Method::Lora | Method::Dora) => {
                let adapter = LoraConfig { use_dora: method == Method::Dora, ..Self::default_adapter() };
                Self { adapter: Some(adapter), ..config }
            }
        }
    }

    /// Returns the learning rate of an objective over whole answers, which takes smaller steps.
    pub(super) fn learning_rate_of_answers(method: Method) -> f64 {
        ANSWER_LEARNING_RATES[usize::from(method == Method::Full)]
    }

    /// Returns the default adapter of a fine-tuning: it adapts attention with α = 2r. ([`LoraConfig::default`] has
    /// PEFT's defaults, which are those of a file in PEFT's format.)
    pub fn default_adapter() -> LoraConfig {
        LoraConfig {
            r: 8,
            lora_alpha: 16.0,
            lora_dropout: 0.05,
            target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj"].into()),
            ..LoraConfig::default()
        }
    }
}
