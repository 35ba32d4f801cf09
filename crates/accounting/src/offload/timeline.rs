//! Operations of the streams, with their times.

/// A stream: runs one operation at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StreamKind {
    /// The device's compute.
    Compute,
    /// Host or file to device.
    Load,
    /// Device to host.
    Store,
    /// The host's optimizer.
    Host,
}

impl StreamKind {
    /// All streams, in the order of a timeline.
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

/// An operation of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// A layer's forward.
    Forward,
    /// Embedding, head and loss.
    Head,
    /// A layer's backward, with its recomputation.
    Backward,
    /// An optimizer's step.
    Step,
    /// Copying weights: of a whole layer, or the updated ones.
    Weights,
    /// Copying gradients.
    Gradients,
    /// Copying a layer's input to the host or back.
    Inputs,
}

impl Operation {
    /// Returns the name in tables and timelines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Head => "head",
            Self::Backward => "backward",
            Self::Step => "step",
            Self::Weights => "weights",
            Self::Gradients => "gradients",
            Self::Inputs => "inputs",
        }
    }
}

/// A span of an operation on a stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The stream.
    pub stream: StreamKind,
    /// The operation.
    pub operation: Operation,
    /// The layer; `None` for the fixed part, or all.
    pub layer: Option<usize>,
    /// Seconds from the start of the step, at least 0, also if a load started before.
    pub start: f64,
    /// Seconds from the start of the step, at most its end.
    pub end: f64,
    /// Bytes copied, all counted in the step in which the copy started.
    pub bytes: u64,
}
