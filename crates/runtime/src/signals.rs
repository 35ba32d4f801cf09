//! Signals that this process ignores.
//!
//! `nohup` ignores SIGHUP for the program that it starts, and a shell without job control SIGINT for a command in the background. A program
//! that installs a handler anyway undoes that, so one asks first.

/// Returns those of `signals` that this process does not ignore, in their order: the ones to install a handler for. All of them where the
/// system does not say.
pub fn not_ignored(signals: &[i32]) -> Vec<i32> {
    signals.iter().copied().filter(|signal| !crate::sys::signals::is_ignored(*signal)).collect()
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn handlers_and_defaults_are_not_ignored() {
        // Rust's runtime ignores SIGPIPE. No signal has the number 0.
        let all = [libc::SIGTERM, libc::SIGPIPE, libc::SIGUSR2, 0];
        assert_eq!(not_ignored(&all), [libc::SIGTERM, libc::SIGUSR2, 0]);
    }
}
