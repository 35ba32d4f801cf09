//! Interval between checkpoints.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Interval between checkpoints: a number of steps, or a time: `500`, `"10m"`, `"600s"`, `"2h"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointEvery {
    /// After this many steps.
    Steps(u64),
    /// After this time since the last one, at the end of the first step that begins after it; over ranks, by the clock of rank 0.
    Time(Duration),
}

impl Default for CheckpointEvery {
    fn default() -> Self {
        Self::Time(Duration::from_secs(600))
    }
}

impl CheckpointEvery {
    /// Returns the steps, if it is steps.
    pub fn steps(self) -> Option<u64> {
        match self {
            Self::Steps(steps) => Some(steps),
            Self::Time(_) => None,
        }
    }

    /// Returns the time, if it is a time.
    pub fn time(self) -> Option<Duration> {
        match self {
            Self::Steps(_) => None,
            Self::Time(time) => Some(time),
        }
    }
}

/// Units of a time, and their seconds.
const UNITS: [(char, u64); 3] = [('h', 3600), ('m', 60), ('s', 1)];

impl fmt::Display for CheckpointEvery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps(steps) => write!(f, "{steps}"),
            Self::Time(time) => {
                let all = time.as_secs();
                let (unit, seconds) =
                    UNITS.into_iter().find(|(_, seconds)| all.is_multiple_of(*seconds)).unwrap_or(('s', 1));
                write!(f, "{}{unit}", all / seconds)
            }
        }
    }
}

impl FromStr for CheckpointEvery {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let wrong = || {
            format!("`{text}` is neither a number of steps above 0, as 500, nor a time, as 10m, 600s or 2h")
        };
        let unit = UNITS.into_iter().find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, seconds)));
        let (number, seconds) = unit.map_or((text, None), |(number, seconds)| (number, Some(seconds)));
        let number: u64 = number.trim_end().parse().map_err(|_| wrong())?;
        match (number, seconds) {
            (0, _) => Err(wrong()),
            (steps, None) => Ok(Self::Steps(steps)),
            (number, Some(seconds)) => {
                Ok(Self::Time(Duration::from_secs(number.checked_mul(seconds).ok_or_else(wrong)?)))
            }
        }
    }
}

impl Serialize for CheckpointEvery {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Steps(steps) => serializer.serialize_u64(*steps),
            Self::Time(_) => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for CheckpointEvery {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = CheckpointEvery;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of steps above 0, or a time such as \"10m\"")
            }

            fn visit_u64<E: serde::de::Error>(self, steps: u64) -> Result<CheckpointEvery, E> {
                self.visit_str(&steps.to_string())
            }

            fn visit_i64<E: serde::de::Error>(self, steps: i64) -> Result<CheckpointEvery, E> {
                self.visit_str(&steps.to_string())
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<CheckpointEvery, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn steps_and_times_are_read_and_written() {
        let parse = |text: &str| text.parse::<CheckpointEvery>();
        let time = |seconds| Ok(CheckpointEvery::Time(Duration::from_secs(seconds)));
        assert_eq!(parse("500"), Ok(CheckpointEvery::Steps(500)));
        assert_eq!(parse("10m"), time(600));
        assert_eq!(parse("600s"), time(600));
        assert_eq!(parse("2 h"), time(7200));
        for wrong in ["0", "0s", "ten", "10d", "-5", "m", "", "99999999999999999999h"] {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains("nor a time, as 10m"), "{error}");
        }
        for (text, shown) in [("90s", "90s"), ("120s", "2m"), ("3600s", "1h"), ("7", "7")] {
            assert_eq!(parse(text).unwrap().to_string(), shown);
        }
    }

    #[test]
    fn a_configuration_has_it_as_a_number_or_as_a_text() {
        let written = Config::default().to_toml().unwrap();
        assert!(written.contains("checkpoint_every = \"10m\"\n"), "{written}");
        for (text, expected) in [("500", "500"), ("\"45s\"", "45s"), ("\"20\"", "20")] {
            let config: Config = format!("[training]\ncheckpoint_every = {text}").parse().unwrap();
            assert_eq!(config.training.checkpoint_every.to_string(), expected);
            assert_eq!(config.to_toml().unwrap().parse::<Config>().unwrap(), config);
        }
        let set = |text: &str| Config::default().with(&format!("training.checkpoint_every={text}"));
        assert_eq!(set("10m").unwrap().training.checkpoint_every, CheckpointEvery::default());
        assert_eq!(set("30").unwrap().training.checkpoint_every, CheckpointEvery::Steps(30));
        for wrong in ["0", "-1", "soon"] {
            let error = set(wrong).unwrap_err().to_string();
            assert!(error.contains("nor a time, as 10m"), "{error}");
        }
    }
}
