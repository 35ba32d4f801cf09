//! The projections of a block that are adapted.

use std::fmt;
use std::str::FromStr;

use crate::Error;
use crate::model::{Decoder, Linear};

/// A projection of a block, in order of application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Projection {
    /// Queries.
    Query,
    /// Keys.
    Key,
    /// Values.
    Value,
    /// The attention's output projection.
    Output,
    /// The SwiGLU's gate projection.
    Gate,
    /// The SwiGLU's up-projection.
    Up,
    /// The SwiGLU's down-projection.
    Down,
}

impl Projection {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate, Self::Up, Self::Down];

    /// Returns the name for [`Targets`]; with `_proj` appended, the checkpoint's.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Query => "q",
            Self::Key => "k",
            Self::Value => "v",
            Self::Output => "o",
            Self::Gate => "gate",
            Self::Up => "up",
            Self::Down => "down",
        }
    }

    /// The projections of a block.
    pub(crate) fn linears(model: &Decoder) -> Result<Vec<(Self, Linear)>, Error> {
        Ok(Self::ALL.into_iter().zip(model.block_linears()?).collect())
    }
}

/// A set of projections. Read from names separated by commas, with or without `_proj`; `all` is every one.
///
/// ```
/// use accounting::lora::{Projection, Targets};
///
/// let targets: Targets = "q,v_proj".parse()?;
/// assert_eq!(targets, Targets::new(&[Projection::Query, Projection::Value]));
/// assert_eq!(targets.to_string(), "q,v");
/// assert!("q,w".parse::<Targets>().unwrap_err().to_string().starts_with("unknown target `w`; known are: q, k,"));
/// # Ok::<(), accounting::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Targets([bool; 7]);

impl Targets {
    /// No projection.
    pub const NONE: Self = Self([false; 7]);
    /// q, k, v and o.
    pub const ATTENTION: Self = Self([true, true, true, true, false, false, false]);
    /// All seven: PEFT's `all-linear`.
    pub const ALL: Self = Self([true; 7]);

    /// Creates a set.
    pub fn new(projections: &[Projection]) -> Self {
        let mut targets = Self::NONE;
        for &projection in projections {
            targets.0[projection as usize] = true;
        }
        targets
    }

    /// Returns whether a projection is adapted.
    pub const fn has(self, projection: Projection) -> bool {
        self.0[projection as usize]
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Projection::ALL.into_iter().filter(|one| self.has(*one)).map(Projection::name);
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

impl FromStr for Targets {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut targets = Self::NONE;
        for given in text.split(',').map(str::trim) {
            let short = given.strip_suffix("_proj").unwrap_or(given);
            if short == "all" {
                return Ok(Self::ALL);
            }
            let known = Projection::ALL.into_iter().find(|known| known.name() == short);
            let known = known.ok_or_else(|| {
                Error::unknown(
                    "target",
                    given,
                    Projection::ALL.map(Projection::name).into_iter().chain(["all"]),
                )
            })?;
            targets.0[known as usize] = true;
        }
        Ok(targets)
    }
}
