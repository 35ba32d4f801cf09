//! Which adapters compute: read by every layer in every forward, and set from outside.

use parking_lot::RwLock;

/// Shared by all layers of one model.
#[derive(Debug, Default)]
pub(crate) struct Switch(RwLock<Setting>);

/// What a forward goes by.
#[derive(Debug, Clone, Default)]
pub(crate) struct Setting {
    /// Names of the adapters that compute.
    pub(crate) active: Vec<String>,
    /// Guards that keep adapters off.
    pub(crate) disabled: usize,
}

impl Switch {
    pub(crate) fn read<T>(&self, read: impl FnOnce(&Setting) -> T) -> T {
        read(&self.0.read())
    }

    pub(crate) fn set<T>(&self, set: impl FnOnce(&mut Setting) -> T) -> T {
        set(&mut self.0.write())
    }
}
