//! The projections of a block that are adapted.

use std::fmt;
use std::str::FromStr;

use decoder::{LINEAR_ATTENTION, SHARED_EXPERT};

use crate::model::{AttentionKind, Decoder, ExpertSizes, Linear, Part};
use crate::{Error, exact};

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
    /// Linear attention's queries, keys and values.
    LinearQkv,
    /// Linear attention's gate.
    LinearGate,
    /// Linear attention's rates.
    LinearRate,
    /// Linear attention's decays.
    LinearDecay,
    /// Linear attention's output projection.
    LinearOutput,
}

impl Projection {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Query,
        Self::Key,
        Self::Value,
        Self::Output,
        Self::Gate,
        Self::Up,
        Self::Down,
        Self::LinearQkv,
        Self::LinearGate,
        Self::LinearRate,
        Self::LinearDecay,
        Self::LinearOutput,
    ];
    /// Those of linear attention, in order of application.
    pub(crate) const LINEAR: [Self; 5] =
        [Self::LinearQkv, Self::LinearGate, Self::LinearRate, Self::LinearDecay, Self::LinearOutput];

    /// Returns the name for [`Targets`]; with `_proj` appended where it has none, the checkpoint's.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Query => "q",
            Self::Key => "k",
            Self::Value => "v",
            Self::Output => "o",
            Self::Gate => "gate",
            Self::Up => "up",
            Self::Down => "down",
            Self::LinearQkv => "in_proj_qkv",
            Self::LinearGate => "in_proj_z",
            Self::LinearRate => "in_proj_b",
            Self::LinearDecay => "in_proj_a",
            Self::LinearOutput => "out",
        }
    }

    /// Returns the projection of a module, by its name within a layer, such as `self_attn.q_proj`; `None` for another module.
    pub fn of_module(name: &str) -> Option<Self> {
        let (part, name) = name.rsplit_once('.')?;
        let is_named =
            |which: &Self| name == which.name() || name.strip_suffix("_proj") == Some(which.name());
        let which = Self::ALL.into_iter().find(is_named)?;
        let is_there = match which {
            Self::Query | Self::Key | Self::Value | Self::Output => part == "self_attn",
            Self::Gate | Self::Up | Self::Down => part == "mlp" || part == SHARED_EXPERT,
            _ => part == LINEAR_ATTENTION,
        };
        is_there.then_some(which)
    }

    /// The projections of a block with this kind of attention. Those of routed experts are not among them.
    pub(crate) fn linears(model: &Decoder, kind: AttentionKind) -> Result<Vec<(Self, Linear)>, Error> {
        let attention = match kind {
            AttentionKind::Linear => model.family.linear_projections(),
            AttentionKind::Full | AttentionKind::Windowed { .. } => model.family.projections(),
        };
        let attention =
            model.linears_of(attention)?.into_iter().filter(|linear| linear.part == Part::Attention);
        let is_routed = |linear: &Linear| model.experts.is_some() && !linear.name.starts_with(SHARED_EXPERT);
        let mlp = model.feed_forward_linears()?.into_iter().filter(|linear| !is_routed(linear));
        let named = |linear: Linear| Self::of_module(linear.name).map(|which| (which, linear));
        Ok(attention.chain(mlp).filter_map(named).collect())
    }
}

/// A set of projections. Read from names separated by commas, with or without `_proj`; `all` is every one, and `none` is
/// none.
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
pub struct Targets([bool; 12]);

impl Targets {
    /// No projection.
    pub const NONE: Self = Self([false; 12]);
    /// q, k, v and o.
    pub const ATTENTION: Self = {
        let mut targets = Self::NONE;
        let mut index = 0;
        while index < 4 {
            targets.0[index] = true;
            index += 1;
        }
        targets
    };
    /// All that a model has: PEFT's `all-linear`.
    pub const ALL: Self = Self([true; 12]);

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

/// The tensors of all experts of a layer that are adapted. Read from their names, separated by commas.
///
/// ```
/// use accounting::lora::ExpertTargets;
///
/// let both: ExpertTargets = "gate_up_proj,down_proj".parse()?;
/// assert_eq!(both, ExpertTargets { gate_up: true, down: true });
/// assert_eq!(both.to_string(), "gate_up_proj,down_proj");
/// # Ok::<(), accounting::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertTargets {
    /// Gate and up, which are one tensor: `gate_up_proj`.
    pub gate_up: bool,
    /// `down_proj`.
    pub down: bool,
}

impl ExpertTargets {
    /// None.
    pub const NONE: Self = Self { gate_up: false, down: false };
    const NAMES: [&str; 2] = ["gate_up_proj", "down_proj"];

    /// Returns whether any is adapted.
    pub const fn any(self) -> bool {
        self.gate_up || self.down
    }

    /// The widths of the input and of the output of each adapted tensor, for one expert.
    pub(crate) fn widths(self, hidden: u64, experts: &ExpertSizes) -> Result<Vec<[u64; 2]>, Error> {
        let inner = experts.feed_forward;
        let both = exact::product("width of gate and up", &[2, inner])?;
        let all = [(self.gate_up, [hidden, both]), (self.down, [inner, hidden])];
        Ok(all.into_iter().filter(|(is_adapted, _)| *is_adapted).map(|(_, widths)| widths).collect())
    }
}

impl fmt::Display for ExpertTargets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = Self::NAMES.into_iter().zip([self.gate_up, self.down]);
        let names: Vec<&str> = all.filter(|(_, is_adapted)| *is_adapted).map(|(name, _)| name).collect();
        f.write_str(&names.join(","))
    }
}

impl FromStr for ExpertTargets {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut targets = Self::NONE;
        for given in text.split(',').map(str::trim) {
            match given.rsplit('.').next() {
                Some("gate_up_proj") => targets.gate_up = true,
                Some("down_proj") => targets.down = true,
                _ => return Err(Error::unknown("tensor of experts", given, Self::NAMES)),
            }
        }
        Ok(targets)
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
            match short {
                "all" => return Ok(Self::ALL),
                "none" => continue,
                _ => {}
            }
            let known = Projection::ALL.into_iter().find(|known| known.name() == short);
            let known = known.ok_or_else(|| {
                Error::unknown(
                    "target",
                    given,
                    Projection::ALL.map(Projection::name).into_iter().chain(["all", "none"]),
                )
            })?;
            targets.0[known as usize] = true;
        }
        Ok(targets)
    }
}
