//! Which adapters are active: read by every layer in every forward.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

/// Shared by all layers of a model.
#[derive(Debug, Default)]
pub(crate) struct Switch {
    setting: RwLock<Setting>,
    /// Counts the changes, so that a layer finds its adapters by name once per change and not once per forward.
    version: AtomicU64,
}

/// The settings of a forward.
#[derive(Debug, Clone, Default)]
pub(crate) struct Setting {
    /// Names of the active adapters.
    pub(crate) active: Vec<String>,
    /// Number of guards that disable all adapters.
    pub(crate) disabled: usize,
}

impl Switch {
    pub(crate) fn read<T>(&self, read: impl FnOnce(&Setting) -> T) -> T {
        read(&self.setting.read())
    }

    pub(crate) fn set<T>(&self, set: impl FnOnce(&mut Setting) -> T) -> T {
        let mut setting = self.setting.write();
        let result = set(&mut setting);
        self.version.fetch_add(1, Ordering::Release);
        result
    }

    /// Returns a number that each change makes another.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }
}
