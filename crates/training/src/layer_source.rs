//! Where the bytes of offloaded layers are, besides host memory and files.
//!
//! `offload` loads a layer into a slot, computes, and gives its gradients to whoever sums them up. A [`LayerSource`] takes the place of
//! the layer's host memory and of the gradients' sums. So the schedule of loads serves host memory and shards on other ranks
//! (`sharding`) alike.

use std::fmt::Debug;
use std::ops::Range;

use tch::Tensor;

use crate::error::Result;

/// Tensors of one layer and dtype, all trained or none, which are loaded together.
#[derive(Debug)]
pub struct LayerRegion<'a> {
    /// The layer's name.
    pub layer: &'a str,
    /// Whether its tensors are trained.
    pub trained: bool,
    /// The values, `[elements]`; 0 between tensors.
    pub values: &'a Tensor,
    /// Each tensor's name, handle and elements. The handles keep neither their memory nor their values.
    pub tensors: Vec<(String, Tensor, Range<i64>)>,
}

/// Holds regions of layers. Loads come from one thread, and gradients from the threads of backward.
pub trait LayerSource: Debug + Send + Sync {
    /// Whether it takes regions that are trained, or not.
    fn takes(&self, trained: bool) -> bool;

    /// Takes the values of a region. Returns the region's number.
    ///
    /// # Errors
    /// A region that the source cannot hold.
    fn take(&self, region: &LayerRegion<'_>) -> Result<usize>;

    /// Loads a region into `target`, its bytes in a slot, and waits for it.
    ///
    /// # Errors
    /// Values that do not come.
    fn load(&self, region: usize, target: &Tensor) -> runtime::Result<()>;

    /// Takes gradients of a region, each with its index among the region's tensors. `last` is set where no forward of the layer waits
    /// for its backward.
    ///
    /// # Errors
    /// Gradients that come too late; a failure of those before.
    fn deliver(&self, region: usize, gradients: Vec<(usize, Tensor)>, last: bool) -> Result<()>;
}
