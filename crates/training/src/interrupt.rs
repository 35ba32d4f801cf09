//! Ctrl-C saves and exits.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::error::{Error, Result};

/// A flag that SIGINT and SIGTERM raise: give it to [`Trainer::stop`](crate::trainer::Trainer::stop). A second signal ends
/// the process at once, with status 130.
///
/// # Errors
/// The system refuses a handler.
pub fn on_signals() -> Result<Arc<AtomicBool>> {
    let raised = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag down, then raises it.
        flag::register_conditional_shutdown(signal, 130, raised.clone())
            .and_then(|_| flag::register(signal, raised.clone()))
            .map_err(|cause| Error::config("signals", format!("no handler can be set: {cause}")))?;
    }
    Ok(raised)
}
