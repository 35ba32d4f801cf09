//! Commands that write one result: a signal ends them without a trace.

use std::path::Path;

use frugal::training::interrupt;
use report::cli::without_controls;
use signal_hook::iterator::Signals;

use crate::program::run::ranks::INTERRUPTED;

/// From here on, SIGINT, SIGTERM and SIGHUP, unless this process ignores them, remove what is written to `out` under a temporary name, say so, and end the process.
///
/// # Errors
/// The system refuses a signal handler.
pub(crate) fn remove_on_signals(out: &Path) -> anyhow::Result<()> {
    let mut signals = Signals::new(interrupt::signals())?;
    let out = out.to_owned();
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            files::atomic_write::remove_unfinished();
            let out = out.display().to_string();
            eprintln!("error: interrupted; nothing was written to {}", without_controls(&out));
            std::process::exit(INTERRUPTED.into());
        }
    });
    Ok(())
}
