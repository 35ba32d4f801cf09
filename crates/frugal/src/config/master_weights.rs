//! Handling of updates that are smaller than the last digit of trained 16-bit weights.

use std::fmt;

use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// Handling of updates that are smaller than the last digit of trained bf16 and fp16 weights. No effect on fp32 weights.
///
/// A bf16 number has 8 significant bits, so that an update below 2⁻⁹ of a weight is lost where the weight is rounded to nearest: at the
/// learning rates of fine-tuning nearly all are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum MasterWeights {
    /// Master weights where a plan with them fits the budget and takes at most half as long again as one without; else stochastic
    /// rounding.
    #[default]
    Auto,
    #[cfg_attr(feature = "clap", value(name = "true"))]
    /// The optimizer keeps fp32 copies of the weights, which every update reaches: 4 bytes per weight.
    Always,
    #[cfg_attr(feature = "clap", value(name = "false"))]
    /// Weights are rounded to nearest: most updates of a fine-tuning are lost.
    Never,
    /// Weights are rounded up or down at random, so that every update counts on average. It takes no memory.
    Stochastic,
}

const NAMES: [&str; 4] = ["auto", "true", "false", "stochastic"];

impl MasterWeights {
    /// Returns whether the optimizer keeps fp32 copies. [`MasterWeights::Auto`], where no plan has decided otherwise, keeps them.
    pub fn keeps_copies(self) -> bool {
        matches!(self, Self::Auto | Self::Always)
    }

    /// Returns the seed of stochastic rounding in a training of this seed.
    pub fn rounding_seed(self, seed: u64) -> Option<u64> {
        (self == Self::Stochastic).then_some(seed)
    }
}

impl Serialize for MasterWeights {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Always => serializer.serialize_bool(true),
            Self::Never => serializer.serialize_bool(false),
            Self::Stochastic => serializer.serialize_str("stochastic"),
        }
    }
}

impl<'de> Deserialize<'de> for MasterWeights {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Written;
        impl Visitor<'_> for Written {
            type Value = MasterWeights;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, false, \"auto\" or \"stochastic\"")
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<MasterWeights, E> {
                Ok(if value { MasterWeights::Always } else { MasterWeights::Never })
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<MasterWeights, E> {
                match value {
                    "auto" => Ok(MasterWeights::Auto),
                    "true" => Ok(MasterWeights::Always),
                    "false" => Ok(MasterWeights::Never),
                    "stochastic" => Ok(MasterWeights::Stochastic),
                    other => Err(E::unknown_variant(other, &NAMES)),
                }
            }
        }
        deserializer.deserialize_any(Written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn a_value_is_a_bool_or_a_name() {
        for (text, expected) in [
            ("", MasterWeights::Auto),
            ("master_weights = true", MasterWeights::Always),
            ("master_weights = false", MasterWeights::Never),
            ("master_weights = \"auto\"", MasterWeights::Auto),
            ("master_weights = \"stochastic\"", MasterWeights::Stochastic),
        ] {
            let config: Config = format!("[optimizer]\n{text}\n").parse().unwrap();
            assert_eq!(config.optimizer.master_weights, expected, "{text}");
            assert_eq!(config.to_toml().unwrap().parse::<Config>().unwrap(), config);
        }
        let set = |value: &str| Config::default().with(&format!("optimizer.master_weights={value}"));
        for (value, expected) in [
            ("true", MasterWeights::Always),
            ("false", MasterWeights::Never),
            ("auto", MasterWeights::Auto),
            ("stochastic", MasterWeights::Stochastic),
        ] {
            assert_eq!(set(value).unwrap().optimizer.master_weights, expected);
        }
        let error = set("stochastc").unwrap_err().to_string();
        assert!(error.contains("stochastc") && error.contains("did you mean `stochastic`"), "{error}");
        let error = set("3").unwrap_err().to_string();
        assert!(error.contains("true, false, \"auto\" or \"stochastic\""), "{error}");
    }
}
