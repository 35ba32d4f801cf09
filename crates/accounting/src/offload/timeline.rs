//! What lanes do, and when.

/// What does one thing at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// The device's compute.
    Compute,
    /// Host or file to device.
    Load,
    /// Device to host.
    Store,
    /// The host's optimizer.
    Host,
}

impl Lane {
    /// All lanes, in the order in which a timeline shows them.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Load, Self::Store, Self::Host];

    /// `compute`, `load`, `store` or `host`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Load => "load",
            Self::Store => "store",
            Self::Host => "host",
        }
    }
}

/// What a lane does in a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// A layer's forward.
    Forward,
    /// Embedding, head and loss.
    Head,
    /// A layer's backward, with its recomputation.
    Backward,
    /// An optimizer's step.
    Step,
    /// Weights move: of a whole layer, or the changed ones.
    Weights,
    /// Gradients move.
    Gradients,
}

impl Work {
    /// A word for tables and timelines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Head => "head",
            Self::Backward => "backward",
            Self::Step => "step",
            Self::Weights => "weights",
            Self::Gradients => "gradients",
        }
    }
}

/// A lane at work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Which lane.
    pub lane: Lane,
    /// What it does.
    pub work: Work,
    /// For which layer; `None`: the fixed part, or all.
    pub layer: Option<usize>,
    /// Seconds from the start of the step; 0 at least, also where a load began before.
    pub start: f64,
    /// Seconds from the start of the step; its end at most.
    pub end: f64,
    /// Bytes moved, all of them in the step in which the transfer began.
    pub bytes: u64,
}
