//! Which cases of an experiment a table, a plot, a finding or a claim is about.

use serde::Deserialize;
use serde_json::Value;

use crate::record::{Case, same_value};

/// Case keys with the values wanted. A list of values means any of them.
///
/// ```
/// use report::{Case, Filter};
///
/// let filter = Filter(Case::new().with("level", vec!["SaveAll", "SaveOne"]).with("batch", 8));
/// assert!(filter.matches(&Case::new().with("batch", 8.0).with("level", "SaveOne").with("layers", 3)));
/// assert!(!filter.matches(&Case::new().with("batch", 8).with("level", "InputOnly")));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(transparent)]
pub struct Filter(pub Case);

impl Filter {
    /// Returns whether `case` has every key of this filter with a wanted value. The empty filter takes every case.
    pub fn matches(&self, case: &Case) -> bool {
        self.0.0.iter().all(|(key, want)| {
            case.get(key).is_some_and(|have| {
                same_value(have, want)
                    || matches!(want, Value::Array(any) if any.iter().any(|want| same_value(have, want)))
            })
        })
    }

    /// Returns whether this filter restricts `key`.
    pub fn fixes(&self, key: &str) -> bool {
        self.0.get(key).is_some()
    }

    /// Returns the keys that have exactly one wanted value, with it.
    pub fn fixed(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.0.0.iter().filter(|(_, want)| !want.is_array())
    }
}
