//! The TCP connections that libtorch opens in this process.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::net::{getpeername, sockopt};

/// Time without a message after which the system asks the other machine whether it is there, and between two questions.
const QUIET: Duration = Duration::from_secs(15);

/// Lets the system end this process's connections to other machines that do not answer for `patience`. Without it a process whose peer has
/// lost its network waits for hours: nothing tells it. A peer that is slow, or does not read, is not ended: its system answers.
///
/// # Errors
/// The system does not list the process's sockets.
#[cfg(target_os = "linux")]
pub(crate) fn end_when_silent(patience: Duration) -> std::io::Result<()> {
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // SAFETY: if it has been closed meanwhile, the calls below report that; they change nothing but how long a connection is kept.
        let socket = unsafe { BorrowedFd::borrow_raw(number) };
        let peer = getpeername(socket).ok().flatten().and_then(|peer| SocketAddr::try_from(peer).ok());
        if peer.is_none_or(|peer| peer.ip().is_loopback()) {
            continue;
        }
        let milliseconds = u32::try_from(patience.as_millis()).unwrap_or(u32::MAX);
        // Of a socket that is not TCP's these are errors.
        let _ = sockopt::set_socket_keepalive(socket, true)
            .and_then(|()| sockopt::set_tcp_keepidle(socket, QUIET.min(patience)))
            .and_then(|()| sockopt::set_tcp_keepintvl(socket, QUIET.min(patience)))
            .and_then(|()| sockopt::set_tcp_user_timeout(socket, milliseconds));
    }
    Ok(())
}

/// Elsewhere the system's own times hold.
#[cfg(not(target_os = "linux"))]
pub(crate) fn end_when_silent(_: Duration) -> std::io::Result<()> {
    Ok(())
}
