//! Removes a command's temporary files when a signal ends it.

use std::path::Path;

use frugal::training::interrupt;
use report::cli::without_controls;
use signal_hook::iterator::Signals;

use crate::run::ranks::INTERRUPTED;

/// Starts a thread that, on SIGINT, SIGTERM or SIGHUP, removes the temporary files of `out`, prints an error and ends the process. A
/// signal that this process ignores stays ignored.
///
/// # Errors
/// The system refuses a signal handler.
pub(crate) fn remove_unfinished_files(out: &Path) -> anyhow::Result<()> {
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
