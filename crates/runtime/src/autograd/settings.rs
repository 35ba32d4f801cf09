//! Settings outside the graph that a forward depends on, such as which adapters are active.
//!
//! A segment that runs again in backward must use the settings of its forward, or its gradients belong to another function. A layer
//! reports what it read with [`note_setting`]; a segment compares the reports of both runs, and returns an error if they differ.

use std::cell::Cell;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::error::{Error, Result};

thread_local! {
    /// A hash of everything noted since the innermost [`Settings::of`] of this thread began.
    static NOTED: Cell<u64> = const { Cell::new(0) };
}

/// Notes a setting that this thread's current forward depends on.
pub fn note_setting(setting: &impl Hash) {
    let mut hasher = DefaultHasher::new();
    (NOTED.get(), setting).hash(&mut hasher);
    NOTED.set(hasher.finish());
}

/// The settings of a segment's run: equal for equal settings, noted in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings(u64);

impl Settings {
    /// Runs `run` and returns what it noted, which an enclosing run notes too.
    pub fn of<T>(run: impl FnOnce() -> T) -> (T, Self) {
        struct Around(u64);
        impl Drop for Around {
            fn drop(&mut self) {
                let inner = NOTED.replace(self.0);
                if inner != 0 {
                    note_setting(&inner);
                }
            }
        }
        let around = Around(NOTED.replace(0));
        let result = run();
        let noted = Self(NOTED.get());
        drop(around);
        (result, noted)
    }

    /// # Errors
    /// A second run of the segment `name` with other settings than this one, the first.
    pub fn check(self, second: Self, name: &'static str) -> Result<()> {
        if self == second {
            return Ok(());
        }
        Err(Error::invalid(
            name,
            "a setting that its layers read (which adapters are active or merged) is another than in the forward; run \
             the backward before it is changed, or change it back",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_settings_in_order_are_equal_and_reach_the_enclosing_run() {
        let noted = |settings: &[&str]| Settings::of(|| settings.iter().for_each(note_setting)).1;
        assert_eq!(noted(&["a", "b"]), noted(&["a", "b"]));
        assert_ne!(noted(&["a", "b"]), noted(&["b", "a"]));
        assert_ne!(noted(&["a"]), noted(&["a", "a"]));
        assert_eq!(noted(&[]), Settings(0));
        let nested = |setting: &str| Settings::of(|| Settings::of(|| note_setting(&setting))).1;
        assert_eq!(nested("a"), nested("a"));
        assert_ne!(nested("a"), nested("b"));
        let words = noted(&["a"]).check(noted(&["b"]), "checkpoint").unwrap_err().to_string();
        assert!(words.starts_with("checkpoint: a setting that its layers read"), "{words}");
        let _caught = std::panic::catch_unwind(|| Settings::of(|| panic!("in a run")));
        assert_eq!(noted(&["a"]), noted(&["a"]), "a run that ended early leaves nothing behind");
    }
}
