//! Ctrl-C: ends the running program and skips the rest; a second Ctrl-C exits at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Exit status of a program that SIGINT ended, as shells count it.
const INTERRUPTED: i32 = 130;

/// Whether the user has interrupted the run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Handles SIGINT and SIGTERM for the rest of the process.
    pub(crate) fn install() -> Result<Self> {
        let wanted = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // The order matters: the first signal finds the flag unset and only sets it.
            flag::register_conditional_shutdown(signal, INTERRUPTED, Arc::clone(&wanted))
                .and_then(|_| flag::register(signal, Arc::clone(&wanted)))
                .context("cannot handle signals")?;
        }
        Ok(Self(wanted))
    }

    pub(crate) fn wanted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
