//! How the process treats a signal.

/// Whether a signal is ignored; false if the system does not say.
#[cfg(unix)]
pub(crate) fn is_ignored(signal: i32) -> bool {
    // SAFETY: zeros are a valid `sigaction`; with a null action the call only writes the present one, which outlives it.
    unsafe {
        let mut present: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut present) == 0
            && present.sa_sigaction == libc::SIG_IGN
    }
}

/// Nothing is ignored there.
#[cfg(not(unix))]
pub(crate) fn is_ignored(_: i32) -> bool {
    false
}
