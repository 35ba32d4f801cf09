//! A cache of low-precision copies of the weights.
//!
//! The key of an entry is the tensor, its memory and version, and whether the cast was recorded in a graph. So an entry is never stale:
//! an in-place change (an optimizer step, a load) makes a new version, other memory (`set_data`) another address, and a cast made
//! without gradients is never returned to a forward pass that needs them (PyTorch's cache does so: pytorch/pytorch#158232). Frozen
//! weights are cached as well; PyTorch caches only leaves that require a gradient, and so casts a frozen base model at each use.
//! Activations are used once and are not cached.
//!
//! Tensors that are made for one use are not cached either: offloaded and sharded layers run with leaves of their own for each use, under
//! [`uncached`](runtime::precision::uncached); and without a graph every tensor is a leaf, such as a weight that was just computed, so
//! casts of tensors that nobody else has any more are dropped whenever the number of entries has doubled.
//!
//! An entry also holds the original tensor and its memory, so that their addresses are not reused. The cache is cleared when the last
//! thread leaves the outermost scope.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use runtime::memory::use_count;
use runtime::precision::identity;
use tch::{Kind, Tensor};

/// Counters of a cast cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CastStatistics {
    /// Casts found in the cache.
    pub hits: u64,
    /// Casts computed.
    pub misses: u64,
    /// Bytes held.
    pub bytes: u64,
    /// Maximum of `bytes` so far.
    pub peak_bytes: u64,
}

#[derive(Debug)]
struct Entry {
    version: i64,
    cast: Tensor,
    /// Holds the tensor so that its address, the key, is not reused.
    original: Tensor,
    /// Another tensor over the memory that was cast, which the original may have left since.
    memory: Tensor,
}

impl Entry {
    fn is_current(&self, tensor: &Tensor, version: i64) -> bool {
        self.version == version && self.memory.data_ptr() == tensor.data_ptr()
    }

    fn bytes(&self) -> u64 {
        (self.cast.numel() * self.cast.kind().elt_size_in_bytes()) as u64
    }
}

/// The number of entries up to which none is looked for that nobody needs.
const FEW: usize = 64;

#[derive(Debug, Default)]
struct State {
    /// By tensor, and whether the cast is part of a graph.
    entries: HashMap<(usize, bool), Entry>,
    statistics: CastStatistics,
    /// Open scopes on all threads.
    scopes: usize,
    /// Entries when those that nobody needs were last dropped.
    kept: usize,
}

impl State {
    /// Takes out the entries whose tensors nobody else has, when their number has doubled since the last time.
    fn take_unneeded(&mut self) -> runtime::Result<Vec<Entry>> {
        if self.entries.len() < FEW.max(2 * self.kept) {
            return Ok(Vec::new());
        }
        let mut unneeded = Vec::new();
        for (key, entry) in &self.entries {
            // The graph of a cast that was recorded has the tensor too.
            let own = 1 + usize::from(key.1);
            if use_count(&entry.original)? <= own {
                unneeded.push(*key);
            }
        }
        let taken: Vec<Entry> = unneeded.iter().filter_map(|key| self.entries.remove(key)).collect();
        self.statistics.bytes -= taken.iter().map(Entry::bytes).sum::<u64>();
        self.kept = self.entries.len();
        Ok(taken)
    }
}

/// A cache of casts of leaf tensors. See the [module](self).
#[derive(Debug)]
pub struct CastCache {
    state: Option<Mutex<State>>,
}

impl CastCache {
    pub(super) fn new() -> Self {
        Self { state: Some(Mutex::default()) }
    }

    pub(super) fn disabled() -> Self {
        Self { state: None }
    }

    fn lock(&self) -> Option<MutexGuard<'_, State>> {
        self.state.as_ref().map(|state| state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn statistics(&self) -> CastStatistics {
        self.lock().map_or_else(CastStatistics::default, |state| state.statistics)
    }

    pub(super) fn cast(&self, tensor: &Tensor, dtype: Kind) -> runtime::Result<Tensor> {
        let Some(mut state) = self.lock().filter(|state| state.scopes > 0 && tensor.is_leaf()) else {
            return Ok(tensor.f_to_kind(dtype)?);
        };
        let recorded = runtime::autograd::GradMode::enabled() && tensor.requires_grad();
        let key = (identity(tensor)?, recorded);
        let version = tensor.f_internal_version()?;
        if let Some(entry) = state.entries.get(&key).filter(|entry| entry.is_current(tensor, version)) {
            let cast = entry.cast.shallow_clone();
            state.statistics.hits += 1;
            return Ok(cast);
        }
        let cast = tensor.f_to_kind(dtype)?;
        let entry = Entry {
            version,
            cast: cast.shallow_clone(),
            original: tensor.shallow_clone(),
            memory: tensor.f_detach()?,
        };
        let bytes = entry.bytes();
        let replaced = state.entries.insert(key, entry);
        let State { statistics, .. } = &mut *state;
        statistics.misses += 1;
        statistics.bytes = statistics.bytes + bytes - replaced.as_ref().map_or(0, Entry::bytes);
        statistics.peak_bytes = statistics.peak_bytes.max(statistics.bytes);
        let unneeded = state.take_unneeded()?;
        // Dropped outside the lock: the last handle of a tensor may free a graph.
        drop(state);
        drop((replaced, unneeded));
        Ok(cast)
    }

    pub(super) fn entered(&self) {
        if let Some(mut state) = self.lock() {
            state.scopes += 1;
        }
    }

    pub(super) fn left(&self) {
        let Some(mut state) = self.lock() else { return };
        state.scopes = state.scopes.saturating_sub(1);
        if state.scopes == 0 {
            (state.statistics.bytes, state.kept) = (0, 0);
            // Dropped outside the lock: the last handle of a tensor may free a graph.
            let entries = std::mem::take(&mut state.entries);
            drop(state);
            drop(entries);
        }
    }
}
