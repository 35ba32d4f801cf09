//! Ctrl-C saves a checkpoint and exits.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::error::{Error, Result};

/// Returns a flag that SIGINT, SIGTERM and SIGHUP set, for [`Trainer::stop`](crate::trainer::Trainer::stop). A second signal exits the
/// process immediately with status 130.
///
/// # Errors
/// The system refuses a signal handler.
pub fn on_signals() -> Result<Arc<AtomicBool>> {
    let raised = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // Registered in this order, so that the first signal finds the flag unset, then sets it.
        flag::register_conditional_shutdown(signal, 130, raised.clone())
            .and_then(|_| flag::register(signal, raised.clone()))
            .map_err(|cause| Error::config("signals", format!("a handler cannot be registered: {cause}")))?;
    }
    Ok(raised)
}
