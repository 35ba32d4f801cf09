//! Which adapters are active: read by every layer in every forward.

use parking_lot::RwLock;

/// Shared by all layers of a model.
#[derive(Debug, Default)]
pub(crate) struct Switch(RwLock<Setting>);

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
        read(&self.0.read())
    }

    pub(crate) fn set<T>(&self, set: impl FnOnce(&mut Setting) -> T) -> T {
        set(&mut self.0.write())
    }
}
