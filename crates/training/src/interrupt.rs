//! Ctrl-C saves a checkpoint and exits.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::error::{Error, Result};

/// Returns the signals that ask a program to end: SIGINT, SIGTERM and SIGHUP, without those that this process ignores, as under `nohup`.
pub fn signals() -> Vec<i32> {
    runtime::signals::not_ignored(&[SIGINT, SIGTERM, SIGHUP])
}

/// Returns a flag that the [`signals`] set, for [`Trainer::stop`](crate::trainer::Trainer::stop). A second signal exits the
/// process immediately with status 130. An ignored signal stays ignored. The handlers are the process's, for good: for programs, not for
/// libraries.
///
/// # Errors
/// The system refuses a signal handler.
pub fn on_signals() -> Result<Arc<AtomicBool>> {
    let raised = Arc::new(AtomicBool::new(false));
    for signal in signals() {
        // Registered in this order, so that the first signal finds the flag unset, then sets it.
        flag::register_conditional_shutdown(signal, 130, raised.clone())
            .and_then(|_| flag::register(signal, raised.clone()))
            .map_err(|cause| Error::config("signals", format!("a handler cannot be registered: {cause}")))?;
    }
    Ok(raised)
}
