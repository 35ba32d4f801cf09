//! Which adapters compute, and whether they drop: read by every layer in every forward, and set from outside.

use std::sync::Arc;

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
    /// Guards that keep dropout off.
    pub(crate) evaluating: usize,
}

impl Switch {
    pub(crate) fn read<T>(&self, read: impl FnOnce(&Setting) -> T) -> T {
        read(&self.0.read())
    }

    pub(crate) fn set<T>(&self, set: impl FnOnce(&mut Setting) -> T) -> T {
        set(&mut self.0.write())
    }

    pub(crate) fn evaluation(self: &Arc<Self>) -> Evaluation {
        self.set(|setting| setting.evaluating += 1);
        Evaluation(self.clone())
    }
}

/// No adapter drops anything until this is dropped.
#[derive(Debug)]
#[must_use = "dropout is on again as soon as the guard is dropped"]
pub struct Evaluation(Arc<Switch>);

impl Drop for Evaluation {
    fn drop(&mut self) {
        self.0.set(|setting| setting.evaluating -= 1);
    }
}
