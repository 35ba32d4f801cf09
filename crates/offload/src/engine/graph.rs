//! A graph's record of the layers that its backward uses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::Engine;
use crate::error::{Result, refused};
use crate::storage::TensorVersions;

impl Engine {
    /// Records the layer's current values, for a graph whose backward uses them.
    pub(crate) fn versions_at_forward(&self, layer: usize) -> Result<TensorVersions> {
        let mut state = self.0.state.lock();
        let of = &mut state.layers[layer];
        of.look(self.0.placement.pinned_for)?;
        Ok(of.versions_at_forward())
    }

    /// Checks that a backward has the layer's values of its forward.
    pub(crate) fn check_unchanged(&self, layer: usize, versions_at_forward: &TensorVersions) -> Result<()> {
        self.0.state.lock().layers[layer].check_unchanged(versions_at_forward)
    }

    /// Counts a forward whose backward is to come.
    pub(crate) fn outstanding(&self, layer: usize) -> Outstanding {
        let count = self.0.state.lock().layers[layer].outstanding.clone();
        count.fetch_add(1, Ordering::Relaxed);
        Outstanding { count, over: AtomicBool::new(false) }
    }

    /// Checks that no layer was stepped before the rest of the model.
    pub(crate) fn begin_forward(&self) -> Result<()> {
        let state = self.0.state.lock();
        let Some(layer) = state.layers.iter().find(|layer| !layer.updated_early.is_empty()) else {
            return Ok(());
        };
        let reason = format!(
            "`{}` was updated during backward, but other parameters were not yet; call `HostAdamW::step` before the next forward, \
             or announce more micro-batches with `HostAdamW::begin`",
            layer.name
        );
        Err(refused("optimizer", reason))
    }
}

/// A forward whose backward is to come. Dropped when it is over, or can no longer happen.
#[derive(Debug)]
pub(crate) struct Outstanding {
    count: Arc<AtomicUsize>,
    over: AtomicBool,
}

impl Outstanding {
    /// Marks the backward as done.
    pub(crate) fn end(&self) {
        if !self.over.swap(true, Ordering::Relaxed) {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Outstanding {
    fn drop(&mut self) {
        self.end();
    }
}
