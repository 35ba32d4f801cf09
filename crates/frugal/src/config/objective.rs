//! What is learned.

use serde::{Deserialize, Serialize};
use training::masked_rows::Grouping;
use training::preference::Objective;

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
        }
    }

    /// Whether it learns from pairs of answers, or from rated ones.
    pub fn is_preference(self) -> bool {
        !matches!(self, Self::NextToken | Self::Grpo)
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

/// What is learned, and how: see [`training::preference`] for the formulas.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectiveConfig {
    /// What is learned of the data.
    pub kind: ObjectiveKind,
    /// β of `dpo`, `ipo`, `simpo`, `cpo`, `kto` and `grpo`, λ of `orpo`; absent for 0.1, 2 for `simpo`, and 0 for `grpo`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beta: Option<f64>,
    /// Where the log-probabilities of the model at the start come from, for `dpo`, `ipo` and `kto`.
    pub reference: ReferenceKind,
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
}

impl ObjectiveConfig {
    /// Returns which rows belong together.
    ///
    /// # Errors
    /// As [`ObjectiveConfig::preference`].
    pub fn grouping(&self) -> Result<Grouping> {
        Ok(self.preference()?.map_or(Grouping::Rows, |objective| objective.grouping()))
    }

    /// Whether it compares with the model at the start.
    pub fn has_reference(&self) -> bool {
        match self.kind {
            ObjectiveKind::Grpo => self.beta.is_some_and(|beta| beta > 0.0),
            _ => self.preference().is_ok_and(|own| own.is_some_and(|own| own.has_reference())),
        }
    }

    /// Whether the log-probabilities of the model at the start are computed before the first step.
    pub fn is_computed_before(&self, has_adapters: bool) -> bool {
        self.has_reference()
            && self.kind != ObjectiveKind::Grpo
            && match self.reference {
                ReferenceKind::Auto => !has_adapters,
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
                "an objective over preferences with it, such as `objective.kind = \"dpo\"`",
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
            let is_read = kind.map_or(self.kind != ObjectiveKind::NextToken, |kind| kind == self.kind);
            if let Some(value) = value.filter(|_| !is_read) {
                return Err(Error::Value { key, found: value.to_string(), expected });
            }
        }
        let beta = self.beta.unwrap_or(if self.kind == ObjectiveKind::Simpo { 2.0 } else { 0.1 });
        let objective = match self.kind {
            ObjectiveKind::NextToken | ObjectiveKind::Grpo => return Ok(None),
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
}
