//! Storage of offloaded layers other than host memory and files.
//!
//! `offload` loads a layer into a slot, computes, and delivers its gradients. A [`LayerSource`] provides the layer's values and
//! accumulates its gradients, in place of host memory. So one schedule of loads serves host memory and shards on other ranks
//! (`sharding`).

use std::fmt::Debug;
use std::ops::Range;

use runtime::ops::TryScalar;
use tch::{Device, Tensor};

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

    /// Whether a region that it takes stays in the memory of [`LayerRegion::values`], so that a layer is computed with there if all
    /// of its regions are taken, and not loaded.
    fn keeps_memory(&self) -> bool {
        false
    }

    /// Copies the values of a tensor that has none in memory yet ([`set_placeholder`]) into `target`, by its name in the model: from a
    /// file, so that a layer is whole only while it is taken. Returns whether the source has them.
    ///
    /// # Errors
    /// Values that cannot be read.
    fn read(&self, name: &str, target: &Tensor) -> Result<bool> {
        let _ = (name, target);
        Ok(false)
    }

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

/// Frees a tensor's memory; it keeps dtype and shape. Its elements share the memory of one NaN: what reads them is seen, and libtorch
/// refuses to write them. A tensor of one element, or none, keeps its own.
///
/// # Errors
/// Errors of libtorch.
pub fn set_placeholder(tensor: &Tensor) -> runtime::Result<()> {
    if tensor.numel() > 1 {
        let _no_grad = tch::no_grad_guard();
        let nan = Tensor::try_full([1], f64::NAN, (tensor.kind(), Device::Cpu))?;
        tensor.shallow_clone().f_set_data(&nan.f_expand(tensor.size().as_slice(), false)?)?;
    }
    Ok(())
}

/// Returns whether all elements of a tensor share one element's memory, as after [`set_placeholder`].
pub fn is_placeholder(tensor: &Tensor) -> bool {
    let shared = |(size, stride): (&i64, i64)| *size == 1 || stride == 0;
    tensor.numel() > 1 && tensor.size().iter().zip(tensor.stride()).all(shared)
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn a_placeholder_has_the_memory_of_one_element() {
        for shape in [&[3, 4][..], &[7], &[5, 1], &[1, 6]] {
            let tensor = Tensor::zeros(shape, (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
            assert!(!is_placeholder(&tensor), "{shape:?}");
            set_placeholder(&tensor).unwrap();
            assert!(is_placeholder(&tensor) && tensor.requires_grad(), "{shape:?}");
            assert_eq!((tensor.size(), tensor.kind()), (shape.to_vec(), Kind::BFloat16));
            assert_eq!(i64::try_from(tensor.isnan().all()).unwrap(), 1);
        }
        let scalar = Tensor::from(1.0);
        set_placeholder(&scalar).unwrap();
        assert!(!is_placeholder(&scalar) && f64::try_from(scalar).unwrap() == 1.0);
    }
}
