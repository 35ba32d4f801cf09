//! What ranks divide.

use std::fmt;

use accounting::memory::zero;
use serde::de::{Deserializer, Error, Unexpected, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// What the ranks of a training divide. No stage changes a bit of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum ZeroStage {
    /// The fastest that the plan finds within the budget; without a prediction the first that the other techniques allow.
    #[default]
    Auto,
    /// The optimizer state.
    One,
    /// The gradients too.
    Two,
    /// The layers' weights too.
    Three,
}

impl ZeroStage {
    /// The stages, without [`ZeroStage::Auto`].
    pub const ALL: [Self; 3] = [Self::One, Self::Two, Self::Three];

    /// Returns the stage of ZeRO; `None` while that is open.
    pub fn decided(self) -> Option<zero::ZeroStage> {
        Some(match self {
            Self::Auto => return None,
            Self::One => zero::ZeroStage::One,
            Self::Two => zero::ZeroStage::Two,
            Self::Three => zero::ZeroStage::Three,
        })
    }

    fn of_number(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|stage| stage.decided().is_some_and(|stage| stage.number() == number))
    }
}

impl From<zero::ZeroStage> for ZeroStage {
    /// Plain data parallelism, which no training over ranks has, is [`ZeroStage::One`].
    fn from(stage: zero::ZeroStage) -> Self {
        Self::of_number(stage.number()).unwrap_or(Self::One)
    }
}

impl Serialize for ZeroStage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.decided() {
            Some(stage) => serializer.serialize_u64(stage.number()),
            None => serializer.serialize_str("auto"),
        }
    }
}

impl<'de> Deserialize<'de> for ZeroStage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Written;
        impl Visitor<'_> for Written {
            type Value = ZeroStage;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("1, 2, 3 or \"auto\"")
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<ZeroStage, E> {
                ZeroStage::of_number(value)
                    .ok_or_else(|| E::invalid_value(Unexpected::Unsigned(value), &self))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<ZeroStage, E> {
                let stage = u64::try_from(value).ok().and_then(ZeroStage::of_number);
                stage.ok_or_else(|| E::invalid_value(Unexpected::Signed(value), &self))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<ZeroStage, E> {
                match value {
                    "auto" => Ok(ZeroStage::Auto),
                    other => Err(E::unknown_variant(other, &["auto"])),
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
    fn a_stage_is_a_number_or_auto() {
        let parsed = |text: &str| format!("[optimizer]\n{text}\n").parse::<Config>();
        for (text, expected) in [
            ("", ZeroStage::Auto),
            ("zero_stage = \"auto\"", ZeroStage::Auto),
            ("zero_stage = 1", ZeroStage::One),
            ("zero_stage = 3", ZeroStage::Three),
        ] {
            let config = parsed(text).unwrap();
            assert_eq!(config.optimizer.zero_stage, expected, "{text}");
            assert_eq!(config.to_toml().unwrap().parse::<Config>().unwrap(), config);
        }
        let set = |value: &str| Config::default().with(&format!("optimizer.zero_stage={value}"));
        assert_eq!(set("2").unwrap().optimizer.zero_stage, ZeroStage::Two);
        for value in ["0", "4", "-1"] {
            let error = set(value).unwrap_err().to_string();
            assert!(error.contains("1, 2, 3 or \"auto\""), "{error}");
        }
    }
}
