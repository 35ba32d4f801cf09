//! Keys that a person set and that nothing in this command reads.

use anyhow::bail;
use dataloading::records::RecordFormat;
use frugal::Config;
use frugal::config::origins::values;
use frugal::config::{ActivationPlan, Method, ObjectiveKind, OffloadTier, ShapeFamily, Task, ZeroStage};
use frugal::rows::Found;

use crate::common_flags::Common;
use crate::flags::flags_of;

/// Keys, or sections of them, that are read under a condition.
struct Readers<'a> {
    keys: &'a [&'a str],
    are_read: bool,
    /// Their reader.
    readers: &'static str,
}

const GSM8K: &str = "it is read for GSM8K: a folder with its train.jsonl and test.jsonl, or --format gsm8k";
const FINETUNE: &str = "`frugal finetune` reads it";
const TRAIN: &str = "`frugal train` reads it";

/// Keys that only GSM8K's problems have.
const OF_GSM8K: [&str; 3] = ["data.shots", "data.strip_annotations", "data.split_seed"];
/// Keys of how a record is written in a model's own words.
const OF_TEMPLATES: [&str; 4] = ["data.chat_template", "data.template_arguments", "data.date", "data.mask"];

/// Refuses values that a training of this task and with these techniques does not read.
///
/// # Errors
/// The first such key, with what does read it.
pub(crate) fn refuse(common: &Common, config: &Config) -> anyhow::Result<()> {
    let is_train = config.task == Task::Train;
    let samples_answers = config.objective.kind == ObjectiveKind::Grpo;
    let has_documents = !config.data.is_synthetic();
    let has_shape = config.model.name.is_none();
    let has_depth = config.model.shape.as_ref().is_some_and(|shape| shape.family == ShapeFamily::Gpt2);
    let ranks = runtime::collectives::Launch::from_environment()?;
    let may_shard =
        matches!(config.optimizer.zero_stage, ZeroStage::Auto | ZeroStage::Three) && ranks.is_some();
    let tier = config.offload.as_ref().map(|offload| offload.tier);
    let rules = [
        Readers {
            keys: &[
                "data.mixture",
                "data.held_out",
                "data.limit",
                "data.mask",
                "data.overlong",
                "data.end_token",
                "data.chat_template",
                "data.template_arguments",
                "data.date",
                "data.prompt_template",
                "data.completion_template",
                "data.format",
                "data.padding_free",
                "objective",
                "training.samples",
                "training.baseline",
                "model.revision",
                "model.offline",
                "model.untied",
            ],
            are_read: !is_train,
            readers: FINETUNE,
        },
        Readers { keys: &OF_GSM8K, are_read: !is_train, readers: FINETUNE },
        Readers {
            keys: &["rollout"],
            are_read: samples_answers,
            readers: "it is read with `objective.kind = \"grpo\"`, which learns from the model's own answers",
        },
        Readers {
            keys: &[
                "data.mixture",
                "data.held_out",
                "data.mask",
                "data.overlong",
                "data.max_length",
                "data.format",
                "data.field",
                "data.prompt_template",
                "data.completion_template",
                "data.padding_free",
                "training.samples",
            ],
            are_read: !samples_answers,
            readers: "with `objective.kind = \"grpo\"` the data are questions, and rows are the model's own answers",
        },
        Readers {
            keys: &["data.padding_free"],
            are_read: config.data.packing.is_none(),
            readers: "it is read without `data.packing`: packed rows have one length",
        },
        Readers {
            keys: &[
                "objective.teacher",
                "objective.teacher_dtype",
                "objective.teacher_place",
                "objective.teacher_top_k",
                "objective.teacher_files",
                "objective.divergence",
                "objective.temperature",
                "objective.label_weight",
            ],
            are_read: config.objective.kind == ObjectiveKind::Distillation,
            readers: "it is read with `objective.kind = \"distillation\"`, which learns from a teacher",
        },
        Readers {
            keys: &["data.strategy", "data.workers", "data.vocabulary", "model.shape"],
            are_read: is_train,
            readers: TRAIN,
        },
        Readers {
            keys: &["model.shape"],
            are_read: has_shape,
            readers: "it is read without `model.name`: a config.json has its own sizes",
        },
        Readers {
            keys: &["model.shape.layers"],
            are_read: has_depth,
            readers: "it is read for --model gpt2; gpt2-like has one layer",
        },
        Readers {
            keys: &["data.strategy", "data.workers", "data.field"],
            are_read: !is_train || has_documents,
            readers: "it is read for data of documents; synthetic data has none",
        },
        Readers {
            keys: &[
                "optimizer.zero_stage",
                "optimizer.replicas",
                "optimizer.reduction",
                "training.sequence_parallel_size",
            ],
            are_read: ranks.is_some(),
            readers: "it is read in a training over several ranks: `frugal launch -n RANKS -- frugal …`",
        },
        Readers {
            keys: &["optimizer.frozen_weights"],
            are_read: may_shard,
            readers: "it is read in a training over several ranks with `optimizer.zero_stage = 3`",
        },
        Readers {
            keys: &["activations.every"],
            are_read: config.activations.plan == ActivationPlan::EveryK,
            readers: "it is read with `activations.plan = \"every-k\"`",
        },
        Readers {
            keys: &["activations.budget"],
            are_read: config.activations.plan == ActivationPlan::Plan,
            readers: "it is read with `activations.plan = \"plan\"`; `training.budget` limits the others",
        },
        Readers {
            keys: &["activations.recompute"],
            are_read: matches!(config.activations.plan, ActivationPlan::Recompute | ActivationPlan::EveryK)
                || config.offload.is_some(),
            readers: "it is read with `activations.plan = \"recompute\"` or \"every-k\"; a plan that is chosen decides it itself",
        },
        Readers {
            keys: &["offload.folder"],
            are_read: tier == Some(OffloadTier::File),
            readers: "it is read with `offload.tier = \"file\"`",
        },
    ];
    rules.iter().try_for_each(|rule| rule.check(common, config))
}

/// Refuses values that are not read for these data.
///
/// # Errors
/// As [`refuse`].
pub(crate) fn refuse_for_data(
    common: &Common,
    config: &Config,
    found: &Found,
    has_validation: bool,
) -> anyhow::Result<()> {
    let is_problems = *found == Found::Gsm8k;
    let formats: &[(RecordFormat, usize)] = match found {
        Found::Records(detected) => &detected.formats,
        Found::Gsm8k | Found::Text => &[],
    };
    let is_of = |format: RecordFormat| formats.iter().any(|(own, _)| *own == format);
    let is_rendered =
        formats.iter().any(|(format, _)| !matches!(format, RecordFormat::Text | RecordFormat::Tokens));
    let has_preferences = config.objective.kind.is_preference();
    let rules = [
        Readers {
            keys: &["data.mask"],
            are_read: !has_preferences,
            readers: "an objective over preferences learns what follows the prompt",
        },
        Readers { keys: &OF_GSM8K, are_read: is_problems, readers: GSM8K },
        Readers {
            keys: &["data.field"],
            are_read: is_of(RecordFormat::Text),
            readers: "it is read for records that hold their text in one field",
        },
        Readers {
            keys: &OF_TEMPLATES,
            are_read: is_rendered,
            readers: "it is read for conversations, and for prompts with their answers",
        },
        Readers {
            keys: &["data.held_out"],
            // Without it nothing is held out either.
            are_read: !has_validation || config.data.held_out <= 0.0,
            readers: "it is read where the data has no validation split",
        },
    ];
    rules.iter().try_for_each(|rule| rule.check(common, config))
}

impl Readers<'_> {
    fn check(&self, common: &Common, config: &Config) -> anyhow::Result<()> {
        if self.are_read {
            return Ok(());
        }
        let defaults = values(&Config::defaults(config.task, config.method().unwrap_or(Method::Full)))?;
        for (key, value) in values(config)? {
            let is_own = self.keys.iter().any(|own| {
                key.strip_prefix(own).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            });
            if is_own && common.asked.has(&key) && !defaults.contains(&(key.clone(), value.clone())) {
                let flag = flags_of(&key)
                    .find(|flag| common.origins.get(&key) == *flag)
                    .map_or_else(String::new, |flag| format!(" ({flag})"));
                bail!("`{key}`{flag} is {value}, which changes nothing here: {}; leave it out", self.readers);
            }
        }
        Ok(())
    }
}
