//! Where a segment's inputs lie between its forward and its backward, when not where they are.

use tch::Tensor;

use crate::error::Result;

/// A place elsewhere (the host's memory, a file) for what a segment keeps. See
/// [`Checkpoint::run_parked`](super::Checkpoint::run_parked).
pub trait Park: Send + Sync + 'static {
    /// Begins to take `input` away. The segment's forward runs on it meanwhile, so it must stay as it is.
    ///
    /// # Errors
    /// No place for it.
    fn park(&self, input: &Tensor) -> Result<Box<dyn Parked>>;
}

/// One tensor that is elsewhere. Dropped when no backward can ask for it any more.
pub trait Parked: Send {
    /// The segment's forward is done: when this returns, nothing of the tensor need be left where it was.
    ///
    /// # Errors
    /// What went wrong on the way.
    fn settle(&self) -> Result<()>;

    /// The tensor, back on its device, with its values ready for the work that the calling thread does next. Called once
    /// for each backward.
    ///
    /// # Errors
    /// What went wrong on the way.
    fn fetch(&self) -> Result<Tensor>;
}
