//! Each weight cast once.
//!
//! A cast is kept under the tensor that it is of, that tensor's version, and whether it was recorded in a graph. So it can
//! never be stale: an in-place change (an optimizer's step, a load) makes a new version, and what was cast without
//! gradients is never handed to a training (which PyTorch's cache does: pytorch/pytorch#158232). Frozen weights are kept
//! like all others; PyTorch keeps leaves that require a gradient and no other, and so casts a frozen base at each use. Only
//! leaves are kept: an activation is used once.
//!
//! The tensor itself is held with its cast, so that no other can take its place in memory. Everything is let go when the last
//! thread leaves the outermost scope.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use runtime::precision::identity;
use tch::{Kind, Tensor};

/// What a cache did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CastStatistics {
    /// Casts that were there.
    pub hits: u64,
    /// Casts that were made.
    pub misses: u64,
    /// Bytes that it holds now.
    pub bytes: u64,
    /// The most that it held.
    pub peak_bytes: u64,
}

#[derive(Debug)]
struct Entry {
    version: i64,
    cast: Tensor,
    /// Keeps the address, which is the key, from being used again.
    _of: Tensor,
}

#[derive(Debug, Default)]
struct Kept {
    /// By tensor, and whether the cast is part of a graph.
    entries: HashMap<(usize, bool), Entry>,
    statistics: CastStatistics,
    /// Scopes that threads are in.
    scopes: usize,
}

/// Casts of leaves. See the [module](self).
#[derive(Debug)]
pub struct CastCache {
    kept: Option<Mutex<Kept>>,
}

impl CastCache {
    pub(super) fn new() -> Self {
        Self { kept: Some(Mutex::default()) }
    }

    pub(super) fn off() -> Self {
        Self { kept: None }
    }

    fn lock(&self) -> Option<MutexGuard<'_, Kept>> {
        self.kept.as_ref().map(|kept| kept.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn statistics(&self) -> CastStatistics {
        self.lock().map_or_else(CastStatistics::default, |kept| kept.statistics)
    }

    pub(super) fn cast(&self, tensor: &Tensor, dtype: Kind) -> runtime::Result<Tensor> {
        let Some(mut kept) = self.lock().filter(|kept| kept.scopes > 0 && tensor.is_leaf()) else {
            return Ok(tensor.f_to_kind(dtype)?);
        };
        let recorded = runtime::autograd::GradMode::enabled() && tensor.requires_grad();
        let key = (identity(tensor)?, recorded);
        let version = tensor.f_internal_version()?;
        if let Some(entry) = kept.entries.get(&key).filter(|entry| entry.version == version) {
            let cast = entry.cast.shallow_clone();
            kept.statistics.hits += 1;
            return Ok(cast);
        }
        let cast = tensor.f_to_kind(dtype)?;
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        let entry = Entry { version, cast: cast.shallow_clone(), _of: tensor.shallow_clone() };
        let replaced = kept.entries.insert(key, entry).map_or(0, |old| bytes(&old.cast));
        let Kept { statistics, .. } = &mut *kept;
        statistics.misses += 1;
        statistics.bytes = statistics.bytes + bytes(&cast) - replaced;
        statistics.peak_bytes = statistics.peak_bytes.max(statistics.bytes);
        Ok(cast)
    }

    pub(super) fn entered(&self) {
        if let Some(mut kept) = self.lock() {
            kept.scopes += 1;
        }
    }

    pub(super) fn left(&self) {
        let Some(mut kept) = self.lock() else { return };
        kept.scopes = kept.scopes.saturating_sub(1);
        if kept.scopes == 0 {
            kept.statistics.bytes = 0;
            // Let go of outside of the lock: a tensor's last handle may free a graph.
            let entries = std::mem::take(&mut kept.entries);
            drop(kept);
            drop(entries);
        }
    }
}
