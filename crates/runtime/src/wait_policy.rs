//! How libtorch's CPU threads wait for each other: the wait policy of its OpenMP runtime.
//!
//! Every operator on the CPU ends in a barrier of OpenMP's threads. A thread that waits there first spins, that is, it checks in a
//! busy loop, and then sleeps until it is woken. GNU's OpenMP, which PyTorch's packages contain, spins for 300,000 iterations by
//! default, 6 to 14 ms. On an idle machine that saves the time to wake a thread. Where another process needs the same core, the
//! thread that is waited for gets no time while the others spin, and a training step takes many times as long.
//!
//! [`bound_spinning!`](crate::bound_spinning) limits this to [`SPINS`] iterations, for the whole program. The OpenMP runtime reads its
//! settings when it is loaded, before `main`, so nothing that a library does later has an effect. A program that imports these crates
//! therefore either has this line beside its `main`, as `frugal` has,
//!
//! ```
//! runtime::bound_spinning!();
//! # fn main() {}
//! ```
//!
//! or is started with `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY` in its environment. Without either it waits as PyTorch does.

use std::fmt;

pub use crate::sys::wait_policy::SPINS;

/// The variables by which a person chooses how threads wait; [`bound_spinning!`](crate::bound_spinning) does nothing where one is set.
pub const VARIABLES: [&str; 4] = ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "KMP_LIBRARY"];

/// How the threads of this process wait, by its environment. Displays as a line for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitPolicy {
    /// [`SPINS`] iterations, then sleep.
    Bounded,
    /// A variable of [`VARIABLES`] with its value, set by a person or the program that started this one.
    Chosen(&'static str, String),
    /// The default of the OpenMP runtime.
    Default,
}

impl WaitPolicy {
    /// Returns the policy of this process.
    pub fn of_process() -> Self {
        let set = |name| std::env::var(name).ok().map(|value| (name, value));
        match VARIABLES.into_iter().find_map(set) {
            Some(("GOMP_SPINCOUNT", spins)) if spins.trim() == SPINS.to_string() => Self::Bounded,
            Some((name, value)) => Self::Chosen(name, value),
            None => Self::Default,
        }
    }
}

impl fmt::Display for WaitPolicy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bounded => write!(
                formatter,
                "spin {SPINS} times, then sleep (GOMP_SPINCOUNT and OMP_WAIT_POLICY override this)"
            ),
            Self::Chosen(name, value) => write!(formatter, "{name}={value}"),
            Self::Default => {
                formatter.write_str("OpenMP's default (set GOMP_SPINCOUNT or OMP_WAIT_POLICY to change it)")
            }
        }
    }
}

/// Makes a program's OpenMP threads spin for at most [`SPINS`](crate::wait_policy::SPINS) iterations before they sleep. See
/// [`wait_policy`](crate::wait_policy).
///
/// It belongs into a program, once, beside `main`; a library must not have it, because it concerns the whole process. Before any
/// library is initialised, the program is started anew in the same process with `GOMP_SPINCOUNT` in its environment, which takes the
/// time of loading its libraries, 15 ms. Programs that it starts inherit the variable. It does nothing where the environment
/// already has one of [`VARIABLES`](crate::wait_policy::VARIABLES) or `OMP_NUM_THREADS=1`, and on systems other than Linux.
#[macro_export]
macro_rules! bound_spinning {
    () => {
        #[cfg(target_os = "linux")]
        const _: () = {
            // The section's functions run before the initialisers of all shared libraries, and so before OpenMP reads its settings.
            #[used]
            #[allow(unsafe_code, reason = "the section is an array of functions of this type")]
            #[unsafe(link_section = ".preinit_array")]
            static RESTART: $crate::wait_policy::Preinit = $crate::wait_policy::RESTART;
        };
    };
}

#[doc(hidden)]
#[cfg(target_os = "linux")]
pub use crate::sys::wait_policy::{Preinit, RESTART};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_shown() {
        let shown = |policy: WaitPolicy| policy.to_string();
        assert!(shown(WaitPolicy::Bounded).starts_with(&format!("spin {SPINS} times")));
        assert_eq!(
            shown(WaitPolicy::Chosen("OMP_WAIT_POLICY", "passive".to_owned())),
            "OMP_WAIT_POLICY=passive"
        );
        assert!(shown(WaitPolicy::Default).contains("GOMP_SPINCOUNT"));
    }
}
