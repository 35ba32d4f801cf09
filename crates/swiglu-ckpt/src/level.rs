//! Checkpoint levels: what a SwiGLU keeps between forward and backward.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// The activations that are kept for backward; the rest is recomputed. H is the hidden size, F the feed-forward size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum CheckpointLevel {
    /// x, x·W, SiLU(x·W), x·V: H + 3F elements per token, nothing recomputed. The assignment's level 0.
    #[default]
    SaveAll,
    /// x, x·W, x·V: H + 2F elements per token; recomputes SiLU, one elementwise pass.
    SaveGateUp,
    /// x, x·W: H + F elements per token; recomputes x·V, 1/9 of a step's products.
    SaveOne,
    /// x: H elements per token; recomputes x·W and x·V, 2/9 of a step's products (never the down-projection). The assignment's
    /// level 1.
    InputOnly,
    /// As [`InputOnly`](Self::InputOnly), over tiles of tokens, so that the temporaries of forward and backward take at most
    /// `bytes` for any number of tokens. Weight gradients accumulate in fp32. (A strided input is copied as a whole; a GPU's
    /// elementwise pass takes a third more; if low precision is computed in fp32, the weights are cast as a whole.)
    InputOnlyTiled {
        /// Maximum size of the `[tile, F]` temporaries, in bytes.
        bytes: u64,
    },
}

impl CheckpointLevel {
    /// The levels that the benchmark compares, with a tile of 16 MiB.
    pub const ALL: [Self; 5] = [
        Self::SaveAll,
        Self::SaveGateUp,
        Self::SaveOne,
        Self::InputOnly,
        Self::InputOnlyTiled { bytes: 16 << 20 },
    ];

    /// Returns the elements kept per token, if all weights and the input need gradients.
    pub fn saved_elements_per_token(self, hidden: u64, intermediate: u64) -> u64 {
        hidden
            + intermediate
                * match self {
                    Self::SaveAll => 3,
                    Self::SaveGateUp => 2,
                    Self::SaveOne => 1,
                    Self::InputOnly | Self::InputOnlyTiled { .. } => 0,
                }
    }

    /// Returns how many products of the forward are recomputed, of 3 in forward and 6 in backward.
    pub fn recomputed_products(self) -> u32 {
        match self {
            Self::SaveAll | Self::SaveGateUp => 0,
            Self::SaveOne => 1,
            Self::InputOnly | Self::InputOnlyTiled { .. } => 2,
        }
    }

    /// Returns the name without the tile's size.
    pub fn name(self) -> &'static str {
        match self {
            Self::SaveAll => "save-all",
            Self::SaveGateUp => "save-gate-up",
            Self::SaveOne => "save-one",
            Self::InputOnly => "input-only",
            Self::InputOnlyTiled { .. } => "input-only-tiled",
        }
    }
}

impl fmt::Display for CheckpointLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InputOnlyTiled { bytes } if bytes % (1 << 20) == 0 => {
                write!(f, "{}:{}MiB", self.name(), bytes >> 20)
            }
            Self::InputOnlyTiled { bytes } => write!(f, "{}:{bytes}", self.name()),
            _ => f.write_str(self.name()),
        }
    }
}

impl FromStr for CheckpointLevel {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let unknown = || {
            Error::Invalid(format!(
                "unknown checkpoint level `{text}`; expected save-all (or 0), save-gate-up, save-one, input-only (or 1), or \
                 input-only-tiled:BYTES (for example input-only-tiled:16MiB)"
            ))
        };
        match text {
            "save-all" | "0" => Ok(Self::SaveAll),
            "save-gate-up" => Ok(Self::SaveGateUp),
            "save-one" => Ok(Self::SaveOne),
            "input-only" | "1" => Ok(Self::InputOnly),
            _ => {
                let size = text.strip_prefix("input-only-tiled:").ok_or_else(unknown)?;
                let (number, unit) =
                    size.split_at(size.find(|c: char| !c.is_ascii_digit()).unwrap_or(size.len()));
                let shift = match unit {
                    "" | "B" => 0,
                    "KiB" => 10,
                    "MiB" => 20,
                    "GiB" => 30,
                    _ => return Err(unknown()),
                };
                let number: u64 = number.parse().map_err(|_| unknown())?;
                let bytes = number.checked_mul(1 << shift).filter(|&bytes| bytes > 0).ok_or_else(unknown)?;
                Ok(Self::InputOnlyTiled { bytes })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_round_trip() {
        for level in CheckpointLevel::ALL {
            assert_eq!(level.to_string().parse::<CheckpointLevel>().unwrap(), level);
        }
        assert_eq!("0".parse::<CheckpointLevel>().unwrap(), CheckpointLevel::SaveAll);
        assert_eq!("1".parse::<CheckpointLevel>().unwrap(), CheckpointLevel::InputOnly);
        let tiled = CheckpointLevel::InputOnlyTiled { bytes: 1000 };
        assert_eq!(tiled.to_string(), "input-only-tiled:1000");
        assert_eq!("input-only-tiled:1000B".parse::<CheckpointLevel>().unwrap(), tiled);
    }

    #[test]
    fn unknown_names_are_errors() {
        let huge = "input-only-tiled:99999999999GiB";
        for text in [
            "",
            "2",
            "-1",
            "save",
            "input-only-tiled",
            "input-only-tiled:",
            "input-only-tiled:0",
            "input-only-tiled:4MB",
            huge,
        ] {
            let error = text.parse::<CheckpointLevel>().unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("unknown checkpoint level `{text}`; expected save-all (or 0)")),
                "{error}"
            );
        }
    }
}
