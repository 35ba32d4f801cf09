//! What a graph must know of the layers that its backward will run again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::Engine;
use crate::error::{Error, Result};
use crate::home::Stamp;

impl Engine {
    /// What the layer is now, for a graph whose backward runs it again.
    pub(crate) fn stamp(&self, layer: usize) -> Result<Stamp> {
        let mut state = self.0.state.lock();
        let of = &mut state.layers[layer];
        of.look(self.0.homing.pinned_for)?;
        Ok(of.stamp())
    }

    /// That a backward runs the layer with the values of its forward.
    pub(crate) fn check_unchanged(&self, layer: usize, stamp: &Stamp) -> Result<()> {
        self.0.state.lock().layers[layer].check_unchanged(stamp)
    }

    /// Notes a forward whose backward is to come.
    pub(crate) fn outstanding(&self, layer: usize) -> Outstanding {
        let count = self.0.state.lock().layers[layer].outstanding.clone();
        count.fetch_add(1, Ordering::Relaxed);
        Outstanding { count, over: AtomicBool::new(false) }
    }

    /// That the model is one model: no layer of it has been stepped before the others.
    pub(crate) fn begin_forward(&self) -> Result<()> {
        let state = self.0.state.lock();
        let Some(layer) = state.layers.iter().find(|layer| !layer.ahead.is_empty()) else { return Ok(()) };
        let reason = format!(
            "`{}` was stepped within a backward, and other parameters were not yet; call `HostAdamW::step` before the next forward, \
             or say with `HostAdamW::begin` that more micro-batches come",
            layer.name
        );
        Err(Error::config("optimizer", reason))
    }
}

/// A forward whose backward is to come, until that is over or cannot come any more.
#[derive(Debug)]
pub(crate) struct Outstanding {
    count: Arc<AtomicUsize>,
    over: AtomicBool,
}

impl Outstanding {
    /// Its backward is here, and comes no second time.
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
