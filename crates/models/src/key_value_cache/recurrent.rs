//! The states of layers with linear attention, whose size does not grow with the row.
//!
//! A pass makes new states and leaves the old ones as they are, so a pass that fails has changed nothing; they become the cache's with its
//! keys and values.

use tch::{Device, Kind, Tensor};

use super::{CacheWrites, Extension, KeyValueCache, WHAT};
use crate::error::{Error, Result};

/// What the layers with linear attention keep of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentShape {
    /// Number of these layers.
    pub layers: usize,
    /// Heads of values.
    pub heads: i64,
    /// Width of a key.
    pub key: i64,
    /// Width of a value.
    pub value: i64,
    /// Channels of the convolution.
    pub channels: i64,
    /// Inputs of the convolution before a token that its result depends on.
    pub window: i64,
}

impl RecurrentShape {
    /// Returns the bytes of a row: a state in fp32 for each layer and head, and the window in `kind`.
    pub fn bytes_per_row(&self, kind: Kind) -> u64 {
        let state = self.heads * self.key * self.value * state_kind(kind).elt_size_in_bytes() as i64;
        let window = self.channels * self.window * kind.elt_size_in_bytes() as i64;
        u64::try_from(self.layers as i64 * (state + window)).unwrap_or(0)
    }
}

fn state_kind(kind: Kind) -> Kind {
    kernels::matmul::wide_kind(kind)
}

/// The state of one layer.
#[derive(Debug)]
pub(crate) struct Recurrent {
    /// The last inputs of the convolution, `[rows, window, channels]`.
    pub(crate) window: Tensor,
    /// `[rows, heads, key, value]`, fp32, or f64 in a cache of f64.
    pub(crate) state: Tensor,
}

impl Recurrent {
    pub(super) fn empty(shape: &RecurrentShape, rows: i64, (kind, device): (Kind, Device)) -> Result<Self> {
        let window = Tensor::f_zeros([rows, shape.window, shape.channels], (kind, device))?;
        let state = Tensor::f_zeros([rows, shape.heads, shape.key, shape.value], (state_kind(kind), device))?;
        Ok(Self { window, state })
    }

    /// Returns copies of the rows with these numbers, int64.
    pub(super) fn select(&self, rows: &Tensor) -> Result<Self> {
        let copies = |x: &Tensor| x.f_index_select(0, rows);
        Ok(Self { window: copies(&self.window)?, state: copies(&self.state)? })
    }

    /// Removes `row`, whose number the last row takes.
    pub(super) fn swap_remove(&mut self, row: i64, last: i64) -> Result<()> {
        for tensor in [&mut self.window, &mut self.state] {
            if row != last {
                tensor.f_select(0, row)?.f_copy_(&tensor.f_select(0, last)?)?;
            }
            *tensor = tensor.f_narrow(0, 0, last)?;
        }
        Ok(())
    }
}

impl Extension<'_> {
    /// Returns which of the new tokens are no padding, `[rows, new]`, bool; `None` if all are.
    pub(crate) fn real(&self) -> Option<&Tensor> {
        self.real.as_ref()
    }

    /// Returns the state of a layer before this pass.
    ///
    /// # Errors
    /// A layer that the cache does not have.
    pub(crate) fn recurrent(&self, layer: usize) -> Result<&Recurrent> {
        self.cache.recurrent.get(layer).ok_or_else(|| {
            let count = self.cache.recurrent.len();
            Error::invalid(WHAT, format!("recurrent layer {layer} of {count}"))
        })
    }

    /// Gives the state of a layer after this pass.
    ///
    /// # Errors
    /// A layer that the cache does not have, or that wrote already.
    pub(crate) fn write_recurrent(&self, layer: usize, new: Recurrent) -> Result<()> {
        let old = self.recurrent(layer)?;
        let mut pending = self.recurrent.borrow_mut();
        pending.resize_with(self.cache.recurrent.len(), || None);
        if pending[layer].is_some() {
            return Err(Error::invalid(WHAT, format!("recurrent layer {layer} wrote twice")));
        }
        let window = new.window.f_to_kind(old.window.kind())?.f_contiguous()?;
        pending[layer] = Some(Recurrent { window, state: new.state });
        self.written.set(self.written.get() + 1);
        Ok(())
    }
}

impl KeyValueCache {
    /// Takes the states of a pass that all layers have written.
    pub(super) fn take_recurrent(&mut self, writes: &mut CacheWrites) {
        for (old, new) in self.recurrent.iter_mut().zip(writes.recurrent.drain(..)) {
            if let Some(new) = new {
                *old = new;
            }
        }
    }
}
