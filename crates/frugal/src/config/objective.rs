//! What is learned.

use std::path::PathBuf;

use models::distillation::{DistillationConfig, Divergence};
use serde::{Deserialize, Serialize};
use training::masked_rows::Grouping;
use training::preference::Objective;

use super::Dtype;
use crate::error::{Error, Result};

/// What is learned of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "clap", clap(rename_all = "kebab-case"))]
pub enum ObjectiveKind {
    /// Each next token.
    #[default]
    NextToken,
    /// Preferences, by direct preference optimization: against the model as it was.
    Dpo,
    /// Preferences, by identity preference optimization: as dpo, with a bound on the margin.
    Ipo,
    /// Preferences, by odds ratios: chosen answers as in ordinary fine-tuning, and no reference.
    Orpo,
    /// Preferences, by mean log-probabilities and a margin, without a reference.
    Simpo,
    /// Preferences, by contrast and the loss of chosen answers, without a reference.
    Cpo,
    /// Answers rated desirable or undesirable one by one, by Kahneman–Tversky optimization: against the model as it was.
    Kto,
    /// Rewards of the model's own answers to questions, by group relative policy optimization.
    Grpo,
    /// The next-token distributions of a teacher, a second model of the same tokens.
    Distillation,
}

impl ObjectiveKind {
    /// Returns its name in flags and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NextToken => "next-token",
            Self::Dpo => "dpo",
            Self::Ipo => "ipo",
            Self::Orpo => "orpo",
            Self::Simpo => "simpo",
            Self::Cpo => "cpo",
            Self::Kto => "kto",
            Self::Grpo => "grpo",
            Self::Distillation => "distillation",
        }
    }

    /// Whether it learns from pairs of answers, or from rated ones.
    pub fn is_preference(self) -> bool {
        !matches!(self, Self::NextToken | Self::Grpo | Self::Distillation)
    }

    /// Whether the loss is one of whole answers.
    pub fn is_of_answers(self) -> bool {
        self.is_preference() || self == Self::Grpo
    }
}

/// Where the log-probabilities of the model at the start come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum ReferenceKind {
    /// From the model without its adapters, in each step; where all weights are trained, from the model before the first step.
    #[default]
    Auto,
    /// From the model without its adapters, in each step.
    AdaptersOff,
    /// From the model before the first step, once for each row.
    BeforeTraining,
}

/// The divergence of a student from its teacher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum DivergenceKind {
    /// KL(teacher ‖ student): the student covers all that the teacher finds probable.
    #[default]
    ForwardKl,
    /// KL(student ‖ teacher): the student leaves out what the teacher finds improbable.
    ReverseKl,
    /// Of both from their mixture, with `objective.beta` as the teacher's share.
    JensenShannon,
}

/// Where the layers of a teacher are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum TeacherPlace {
    /// On the device, or offloaded where the budget has no room for them.
    #[default]
    Auto,
    /// On the device.
    Device,
    /// In host memory, or on a CPU in files: each is loaded when it runs.
    Offloaded,
}

/// What is learned, and how: see [`training::preference`] and [`models::distillation`] for the formulas.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectiveConfig {
    /// What is learned of the data.
    pub kind: ObjectiveKind,
    /// β of `dpo`, `ipo`, `simpo`, `cpo`, `kto`, `grpo` and of the divergence `jensen-shannon`, λ of `orpo`; absent for 0.1, 2 for `simpo`, 0 for
    /// `grpo`, and 0.5 for `jensen-shannon`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beta: Option<f64>,
    /// Where the log-probabilities of the model at the start come from, for `dpo`, `ipo` and `kto`.
    pub reference: ReferenceKind,
    /// Another model that `dpo`, `ipo` and `kto` compare with, whose log-probabilities are computed before the first step: a folder in Hugging
    /// Face's layout, a GGUF file, a name in Ollama's store, or a name on the hub, with the tokenizer of the model that learns; absent for the
    /// model at the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference_model: Option<String>,
    /// ε of `dpo`: the probability that a pair is labelled the wrong way round; absent for 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_smoothing: Option<f64>,
    /// γ of `simpo`: the margin; absent for 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gamma: Option<f64>,
    /// α of `cpo`: the factor of the loss of chosen answers; absent for 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// λ_D of `kto`: the weight of desirable answers; absent for 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desirable_weight: Option<f64>,
    /// λ_U of `kto`: the weight of undesirable answers; absent for 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub undesirable_weight: Option<f64>,
    /// The teacher of `distillation`: a folder in Hugging Face's layout, a GGUF file, a name in Ollama's store, or a name on the hub.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher: Option<String>,
    /// Dtype of the teacher's weights; absent for that of its files, and for their own blocks of a GGUF file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher_dtype: Option<Dtype>,
    /// Where the teacher's layers are.
    pub teacher_place: TeacherPlace,
    /// Asks the teacher once, before the first step, for this many of its most probable tokens at each label; absent to ask it in each step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher_top_k: Option<usize>,
    /// The folder with what the teacher has answered, which other trainings may use without the teacher; absent for one in the run's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher_files: Option<PathBuf>,
    /// D of `distillation`; absent for `forward-kl`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub divergence: Option<DivergenceKind>,
    /// τ of `distillation`: the temperature of both distributions; absent for 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// w of `distillation`: the loss is w times that of the labels and 1 − w times the divergence; absent for 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_weight: Option<f64>,
}

impl ObjectiveConfig {
    /// Returns which rows belong together.
    ///
    /// # Errors
    /// As [`ObjectiveConfig::preference`].
    pub fn grouping(&self) -> Result<Grouping> {
        Ok(self.preference()?.map_or(Grouping::Rows, |objective| objective.grouping()))
    }

    /// Whether it compares with the model at the start, or with another.
    pub fn has_reference(&self) -> bool {
        match self.kind {
            ObjectiveKind::Grpo => self.beta.is_some_and(|beta| beta > 0.0),
            _ => self.preference().is_ok_and(|own| own.is_some_and(|own| own.has_reference())),
        }
    }

    /// Whether the log-probabilities that it compares with are computed before the first step.
    pub fn is_computed_before(&self, has_adapters: bool) -> bool {
        self.has_reference()
            && self.kind != ObjectiveKind::Grpo
            && match self.reference {
                ReferenceKind::Auto => !has_adapters || self.reference_model.is_some(),
                ReferenceKind::AdaptersOff => false,
                ReferenceKind::BeforeTraining => true,
            }
    }

    /// Returns how many forward passes over a batch are computed beside that which is learned from: those of the reference, and of rated answers
    /// both passes over prompts with other answers.
    pub fn further_passes(&self, has_adapters: bool) -> u32 {
        let of_reference = u32::from(self.has_reference() && !self.is_computed_before(has_adapters));
        match self.kind {
            ObjectiveKind::Kto => 1 + 2 * of_reference,
            _ => of_reference,
        }
    }

    /// Returns the objective over preferences; `None` for that of next tokens.
    ///
    /// # Errors
    /// A value outside its range, or of another objective.
    pub fn preference(&self) -> Result<Option<Objective>> {
        // The kinds that a key belongs to; `None` for all over preferences.
        let kinds: [(&'static str, Option<f64>, Option<ObjectiveKind>, &'static str); 6] = [
            (
                "objective.beta",
                self.beta,
                None,
                "an objective over preferences with it, such as `objective.kind = \"dpo\"`, or `objective.divergence = \"jensen-shannon\"`",
            ),
            (
                "objective.label_smoothing",
                self.label_smoothing,
                Some(ObjectiveKind::Dpo),
                "`objective.kind = \"dpo\"` with it",
            ),
            (
                "objective.gamma",
                self.gamma,
                Some(ObjectiveKind::Simpo),
                "`objective.kind = \"simpo\"` with it",
            ),
            ("objective.alpha", self.alpha, Some(ObjectiveKind::Cpo), "`objective.kind = \"cpo\"` with it"),
            (
                "objective.desirable_weight",
                self.desirable_weight,
                Some(ObjectiveKind::Kto),
                "`objective.kind = \"kto\"` with it",
            ),
            (
                "objective.undesirable_weight",
                self.undesirable_weight,
                Some(ObjectiveKind::Kto),
                "`objective.kind = \"kto\"` with it",
            ),
        ];
        for (key, value, kind, expected) in kinds {
            let is_read = kind.map_or(self.reads_beta(), |kind| kind == self.kind);
            if let Some(value) = value.filter(|_| !is_read) {
                return Err(Error::Value { key, found: value.to_string(), expected });
            }
        }
        let beta = self.beta.unwrap_or(if self.kind == ObjectiveKind::Simpo { 2.0 } else { 0.1 });
        let objective = match self.kind {
            ObjectiveKind::NextToken | ObjectiveKind::Grpo | ObjectiveKind::Distillation => return Ok(None),
            ObjectiveKind::Dpo => {
                Objective::Dpo { beta, label_smoothing: self.label_smoothing.unwrap_or(0.0) }
            }
            ObjectiveKind::Ipo => Objective::Ipo { beta },
            ObjectiveKind::Orpo => Objective::Orpo { lambda: beta },
            ObjectiveKind::Simpo => Objective::SimPo { beta, gamma: self.gamma.unwrap_or(1.0) },
            ObjectiveKind::Cpo => Objective::Cpo { beta, alpha: self.alpha.unwrap_or(1.0) },
            ObjectiveKind::Kto => Objective::Kto {
                beta,
                desirable_weight: self.desirable_weight.unwrap_or(1.0),
                undesirable_weight: self.undesirable_weight.unwrap_or(1.0),
            },
        };
        objective.check()?;
        Ok(Some(objective))
    }

    fn reads_beta(&self) -> bool {
        match self.kind {
            ObjectiveKind::NextToken => false,
            ObjectiveKind::Distillation => self.divergence == Some(DivergenceKind::JensenShannon),
            _ => true,
        }
    }

    /// Returns what is learned from a teacher; `None` for another objective.
    ///
    /// # Errors
    /// A value outside its range, or of another objective; no teacher.
    pub fn distillation(&self) -> Result<Option<DistillationConfig>> {
        const EXPECTED: &str = "`objective.kind = \"distillation\"` with it";
        let given: [(&'static str, Option<String>); 7] = [
            ("objective.teacher", self.teacher.clone()),
            ("objective.teacher_dtype", self.teacher_dtype.map(name)),
            ("objective.teacher_top_k", self.teacher_top_k.map(|k| k.to_string())),
            ("objective.teacher_files", self.teacher_files.as_ref().map(|path| path.display().to_string())),
            ("objective.divergence", self.divergence.map(name)),
            ("objective.temperature", self.temperature.map(|value| value.to_string())),
            ("objective.label_weight", self.label_weight.map(|value| value.to_string())),
        ];
        if self.kind != ObjectiveKind::Distillation {
            let found = given.into_iter().find_map(|(key, value)| Some((key, value?)));
            let place = (self.teacher_place != TeacherPlace::Auto)
                .then(|| ("objective.teacher_place", name(self.teacher_place)));
            return match found.or(place) {
                Some((key, found)) => Err(Error::Value { key, found, expected: EXPECTED }),
                None => Ok(None),
            };
        }
        let config = DistillationConfig {
            divergence: match self.divergence.unwrap_or_default() {
                DivergenceKind::ForwardKl => Divergence::ForwardKl,
                DivergenceKind::ReverseKl => Divergence::ReverseKl,
                DivergenceKind::JensenShannon => Divergence::JensenShannon { beta: self.beta.unwrap_or(0.5) },
            },
            temperature: self.temperature.unwrap_or(1.0),
            label_weight: self.label_weight.unwrap_or(0.0),
        };
        config.check()?;
        Ok(Some(config))
    }
}

/// A value's name in files.
fn name<T: Serialize>(value: T) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}
