//! A key-value store that all ranks see.

use std::os::fd::IntoRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Launch, arrival, machines};
use crate::error::{Error, Result};
use crate::sys::{collectives as sys, sockets};

/// The longest that a machine may be silent before connections to it are ended, also by ranks that would wait longer.
const SILENCE: Duration = Duration::from_secs(300);

/// Whether this process has closed the socket of `FRUGAL_LISTEN_FD`, because a store has a duplicate, or is trying one.
static LISTENER_TAKEN: AtomicBool = AtomicBool::new(false);

/// A key-value store that all ranks see: c10d's `TCPStore`, kept by rank 0 or by the launcher. Its keys are this run's and this
/// restart's own. Clones are one store.
///
/// The store ends with the process that keeps it. So each rank ends with a [`Group::barrier`](super::Group::barrier).
#[derive(Clone, Debug)]
pub struct Store {
    pub(super) connection: Arc<sys::Store>,
    pub(super) launch: Arc<Launch>,
    /// The name of each rank's machine; none where all are on one.
    pub(super) machines: Arc<[String]>,
}

/// Whether a program between the launcher and this process has left the socket open: Python's `subprocess` closes it.
fn is_socket(descriptor: i32) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{descriptor}"));
    link.map_or(!cfg!(target_os = "linux"), |to| to.to_string_lossy().starts_with("socket:"))
}

impl Store {
    /// Connects, and waits until all ranks have connected.
    ///
    /// # Errors
    /// Ranks that do not come within `timeout`, or have another number of ranks; an address that is not reached: another call tries again.
    /// A second store in the process to which `frugal launch` gave the listening socket.
    pub fn connect(launch: &Launch, timeout: Duration) -> Result<Self> {
        let server = !launch.agent_store && launch.rank == 0;
        let until = Instant::now() + timeout;
        if !server && !launch.is_local() {
            arrival::reach(launch, timeout)?;
        }
        let listener = if server { launch.listener } else { None };
        if listener.is_some() && LISTENER_TAKEN.swap(true, Ordering::SeqCst) {
            return Err(Error::invalid(
                "store",
                "this process has connected before; clone the store that it has",
            ));
        }
        if listener.is_some_and(|descriptor| !is_socket(descriptor)) {
            LISTENER_TAKEN.store(false, Ordering::SeqCst);
            let reason = "a program between the launcher and this process has closed the launcher's socket, FRUGAL_LISTEN_FD; let it \
                          pass file descriptors on (in Python, `close_fds=False`)";
            return Err(Error::invalid("store", reason));
        }
        let connected = Self::connect_to(launch, server, listener, timeout).and_then(|connection| {
            let launch = Arc::new(launch.clone());
            let store = Self { connection: Arc::new(connection), launch, machines: Arc::default() };
            store.end_when_silent(timeout)?;
            arrival::meet(&store, until, timeout)?;
            Ok(store)
        });
        if let Some(descriptor) = listener {
            match &connected {
                // Else the port would outlive the store.
                Ok(_) => sys::close(descriptor),
                Err(_) => LISTENER_TAKEN.store(false, Ordering::SeqCst),
            }
        }
        let mut store = connected?;
        store.machines = machines::names(&store, timeout)?;
        Ok(store)
    }

    /// Connects once. The store gets a duplicate of the listening socket.
    fn connect_to(
        launch: &Launch,
        server: bool,
        listener: Option<i32>,
        timeout: Duration,
    ) -> Result<sys::Store> {
        let duplicate = listener.map(sys::duplicate).transpose();
        let duplicate = duplicate.map_err(|cause| {
            Error::invalid("store", format!("the launcher's socket, FRUGAL_LISTEN_FD: {cause}"))
        })?;
        let listener = duplicate.map(IntoRawFd::into_raw_fd);
        let address =
            sys::Address { host: &launch.master_address, port: launch.master_port, server, listener };
        let prefix = format!("frugal/{}/{}", launch.run_id, launch.restart_count);
        sys::Store::connect(&address, &prefix, timeout).map_err(|cause| {
            let Launch { rank, world_size, master_address, master_port, .. } = launch;
            let reason = format!(
                "rank {rank} of {world_size}: no connection to rank 0 at {master_address}:{master_port}: {cause}"
            );
            Error::invalid("store", reason)
        })
    }

    /// Lets connections to other machines end when these are gone, after [`SILENCE`] or `timeout`.
    pub(super) fn end_when_silent(&self, timeout: Duration) -> Result<()> {
        if self.launch.is_local() {
            return Ok(());
        }
        let ended = sockets::end_when_silent(timeout.min(SILENCE));
        ended.map_err(|cause| Error::invalid("store", format!("the sockets of this process: {cause}")))
    }

    /// Returns this process's place among the ranks.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }

    /// Sets a key.
    ///
    /// # Errors
    /// The process that keeps the store is gone.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.connection.set(key, value)
    }

    /// Waits until the key is set, and returns its value.
    ///
    /// # Errors
    /// The key is not set within `timeout`; the process that keeps the store is gone.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.connection.get(key, timeout)
    }

    /// Returns whether the key is set.
    ///
    /// # Errors
    /// The process that keeps the store is gone.
    pub fn has(&self, key: &str) -> Result<bool> {
        self.connection.has(key)
    }
}
