//! c10d's store and groups (`cpp/collectives.cpp`).

use std::ffi::{CString, c_char, c_int};
use std::ptr::{null, null_mut};
use std::time::Duration;

use parking_lot::Mutex;
use tch::Tensor;
use torch_sys::C_tensor;

use super::{Status, check};
use crate::error::{Error, Result};

/// An opaque object of the shim.
#[repr(C)]
struct Opaque {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn rt_store_connect(
        host: *const c_char,
        port: c_int,
        server: c_int,
        listen_fd: c_int,
        prefix: *const c_char,
        timeout: i64,
        out: *mut *mut Opaque,
    ) -> Status;
    fn rt_store_free(store: *mut Opaque);
    fn rt_store_set(store: *mut Opaque, key: *const c_char, bytes: *const c_char, size: usize) -> Status;
    fn rt_store_get(
        store: *mut Opaque,
        key: *const c_char,
        timeout: i64,
        out: *mut *mut c_char,
        size: *mut usize,
    ) -> Status;
    fn rt_store_check(store: *mut Opaque, key: *const c_char, out: *mut c_int) -> Status;
    fn rt_group_new(
        store: *mut Opaque,
        name: *const c_char,
        rank: c_int,
        size: c_int,
        interface: *const c_char,
        host: *const c_char,
        timeout: i64,
        stand_in: c_int,
        out: *mut *mut Opaque,
    ) -> Status;
    fn rt_group_new_nccl(
        store: *mut Opaque,
        name: *const c_char,
        rank: c_int,
        size: c_int,
        timeout: i64,
        out: *mut *mut Opaque,
    ) -> Status;
    fn rt_group_connect(group: *mut Opaque, device: c_int) -> Status;
    fn rt_group_abort(group: *mut Opaque);
    fn rt_group_free(group: *mut Opaque);
    fn rt_group_send(
        group: *mut Opaque,
        tensor: *const C_tensor,
        peer: c_int,
        tag: c_int,
        out: *mut *mut Opaque,
    ) -> Status;
    fn rt_group_recv(
        group: *mut Opaque,
        tensor: *const C_tensor,
        peer: c_int,
        tag: c_int,
        out: *mut *mut Opaque,
    ) -> Status;
    fn rt_group_exchange(
        group: *mut Opaque,
        tensors: *const *const C_tensor,
        peers: *const c_int,
        receives: usize,
        count: usize,
        out: *mut *mut Opaque,
    ) -> Status;
    fn rt_group_native(
        group: *mut Opaque,
        operation: c_int,
        input: *const C_tensor,
        output: *const C_tensor,
        timeout: i64,
        out: *mut *mut Opaque,
    ) -> Status;
    fn rt_group_monitored_barrier(group: *mut Opaque, timeout: i64) -> Status;
    fn rt_transfer_wait(work: *mut Opaque, timeout: i64) -> Status;
    fn rt_transfer_free(work: *mut Opaque);
    fn rt_free_message(message: Status);
}

/// Milliseconds for the shim, where 0 would mean no limit.
fn milliseconds(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX).max(1)
}

fn text(what: &str) -> Result<CString> {
    CString::new(what).map_err(|_| Error::invalid("collectives", format!("{what:?} holds a NUL byte")))
}

fn index(number: usize) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

/// A client of a store, and in one process its server.
#[derive(Debug)]
pub(crate) struct Store(*mut Opaque);

// SAFETY: c10d's TCPStore takes a lock in each operation, and PrefixStore has no state of its own that changes.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Sync for Store {}

/// Returns a duplicate of a socket that this process inherited, which children do not inherit; nor do they the socket from here on.
#[cfg(any(target_os = "linux", target_os = "macos"))]
pub(crate) fn duplicate(descriptor: i32) -> std::io::Result<std::os::fd::OwnedFd> {
    use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};

    // SAFETY: the caller has made sure that this is an open socket, which nothing else of the process uses.
    let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(descriptor) };
    fcntl_setfd(socket, FdFlags::CLOEXEC)?;
    Ok(fcntl_dupfd_cloexec(socket, 0)?)
}

/// Lets the process that `command` starts, and no other, inherit a socket of this one.
#[cfg(any(target_os = "linux", target_os = "macos"))]
pub(crate) fn inherit(command: &mut std::process::Command, socket: &impl std::os::fd::AsRawFd) {
    use std::os::fd::BorrowedFd;
    use std::os::unix::process::CommandExt;

    use rustix::io::{FdFlags, fcntl_setfd};

    let descriptor = socket.as_raw_fd();
    let before_exec = move || {
        // SAFETY: the caller keeps the socket open until the command has been started.
        fcntl_setfd(unsafe { BorrowedFd::borrow_raw(descriptor) }, FdFlags::empty())?;
        Ok(())
    };
    // SAFETY: one system call, which may be made between fork and exec.
    unsafe { command.pre_exec(before_exec) };
}

/// Lets the process that `command` starts be asked to end when this one, or the thread that starts it, ends in whatever way.
#[cfg(target_os = "linux")]
pub(crate) fn end_with_parent(command: &mut std::process::Command) {
    use std::os::unix::process::CommandExt;

    use rustix::process::{Signal, set_parent_process_death_signal};

    let before_exec = || Ok(set_parent_process_death_signal(Some(Signal::TERM))?);
    // SAFETY: one system call, which may be made between fork and exec.
    unsafe { command.pre_exec(before_exec) };
}

/// Closes a socket that this process inherited.
#[cfg(any(target_os = "linux", target_os = "macos"))]
pub(crate) fn close(descriptor: i32) {
    use std::os::fd::FromRawFd;

    // SAFETY: as in `duplicate`; the caller uses it no more.
    drop(unsafe { std::os::fd::OwnedFd::from_raw_fd(descriptor) });
}

/// Where a store is.
#[derive(Debug)]
pub(crate) struct Address<'a> {
    pub(crate) host: &'a str,
    pub(crate) port: u16,
    /// Whether this process keeps it.
    pub(crate) server: bool,
    /// The listening socket that the server takes.
    pub(crate) listener: Option<i32>,
}

impl Store {
    /// Waits until all `ranks` have connected.
    pub(crate) fn connect(address: &Address<'_>, prefix: &str, timeout: Duration) -> Result<Self> {
        let (host, prefix) = (text(address.host)?, text(prefix)?);
        let mut store = null_mut();
        let (server, listener) = (c_int::from(address.server), address.listener.unwrap_or(-1));
        let (port, timeout) = (c_int::from(address.port), milliseconds(timeout));
        // SAFETY: the texts and the out-parameter are valid during the call. The socket is this process's to give, as the caller
        // has made sure; where it is no socket, the store refuses it.
        let status = unsafe {
            rt_store_connect(host.as_ptr(), port, server, listener, prefix.as_ptr(), timeout, &mut store)
        };
        // SAFETY: the status is fresh.
        unsafe { check(status) }?;
        Ok(Self(store))
    }

    pub(crate) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let key = text(key)?;
        // SAFETY: the store is alive; the key and the bytes are valid during the call.
        unsafe { check(rt_store_set(self.0, key.as_ptr(), value.as_ptr().cast(), value.len())) }
    }

    pub(crate) fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let key = text(key)?;
        let (mut block, mut size): (*mut c_char, usize) = (null_mut(), 0);
        // SAFETY: the store is alive; the key and the out-parameters are valid during the call.
        unsafe { check(rt_store_get(self.0, key.as_ptr(), milliseconds(timeout), &mut block, &mut size)) }?;
        // SAFETY: on success the shim wrote a block of `size` bytes.
        let value = unsafe { std::slice::from_raw_parts(block.cast::<u8>(), size) }.to_vec();
        // SAFETY: the block is ours and not used after this.
        unsafe { rt_free_message(block) };
        Ok(value)
    }

    pub(crate) fn has(&self, key: &str) -> Result<bool> {
        let key = text(key)?;
        let mut there: c_int = 0;
        // SAFETY: the store is alive; the key and the out-parameter are valid during the call.
        unsafe { check(rt_store_check(self.0, key.as_ptr(), &mut there)) }?;
        Ok(there != 0)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the store is ours and not used after this; groups hold references of their own.
        unsafe { rt_store_free(self.0) };
    }
}

/// Where the ranks of a group meet.
#[derive(Debug)]
pub(crate) enum Interface {
    /// The network interface of that name.
    Named(String),
    /// The interface with that address.
    Address(String),
}

/// A rank's connections with the others of its group.
#[derive(Debug)]
pub(crate) struct Backend(Mutex<*mut Opaque>);

// SAFETY: the lock makes posting one thread's at a time, which is all that c10d asks; what is posted completes on its own threads.
unsafe impl Send for Backend {}
// SAFETY: as above.
unsafe impl Sync for Backend {}

/// A tensor to or from the rank that is named.
pub(crate) type Message = (usize, Tensor);

/// A collective of the backend's own.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Native {
    AllReduceSum = 0,
    AllReduceMax = 1,
    AllGather = 2,
    ReduceScatterSum = 3,
}

impl Backend {
    /// Connects with all other ranks over Gloo; with `stand_in`, in a group that behaves as one over NCCL.
    pub(crate) fn gloo(
        store: &Store,
        name: &str,
        (rank, size): (usize, usize),
        interface: &Interface,
        timeout: Duration,
        stand_in: bool,
    ) -> Result<Self> {
        let name = text(name)?;
        let (interface, host) = match interface {
            Interface::Named(name) => (Some(text(name)?), None),
            Interface::Address(host) => (None, Some(text(host)?)),
        };
        let pointer = |text: &Option<CString>| text.as_ref().map_or(null(), |text| text.as_ptr());
        let mut group = null_mut();
        // SAFETY: the store is alive; the texts, which are null where there is none, and the out-parameter are valid during the call.
        let status = unsafe {
            rt_group_new(
                store.0,
                name.as_ptr(),
                index(rank),
                index(size),
                pointer(&interface),
                pointer(&host),
                milliseconds(timeout),
                c_int::from(stand_in),
                &mut group,
            )
        };
        // SAFETY: the status is fresh.
        unsafe { check(status) }?;
        Ok(Self(Mutex::new(group)))
    }

    /// A group over NCCL, for [`connect`](Backend::connect). The caller has loaded libtorch_cuda.
    pub(crate) fn nccl(
        store: &Store,
        name: &str,
        (rank, size): (usize, usize),
        timeout: Duration,
    ) -> Result<Self> {
        let (name, timeout) = (text(name)?, milliseconds(timeout));
        let mut group = null_mut();
        // SAFETY: the store is alive; the name and the out-parameter are valid during the call.
        let status = unsafe {
            rt_group_new_nccl(store.0, name.as_ptr(), index(rank), index(size), timeout, &mut group)
        };
        // SAFETY: the status is fresh.
        unsafe { check(status) }?;
        Ok(Self(Mutex::new(group)))
    }

    /// Connects a group over NCCL, once: waits until all ranks do. The caller has checked that the device exists.
    pub(crate) fn connect(&self, device: c_int) -> Result<()> {
        let group = self.0.lock();
        // SAFETY: the group is alive and ours alone during the call.
        unsafe { check(rt_group_connect(*group, device)) }
    }

    /// Ends what is under way over NCCL; nothing over Gloo.
    pub(crate) fn abort(&self) {
        let group = self.0.lock();
        // SAFETY: the group is alive and ours alone during the call.
        unsafe { rt_group_abort(*group) };
    }

    /// Begins messages over NCCL together: contiguous tensors of the group's device with at least one element. That nobody uses the
    /// memory of those that are received meanwhile is for the caller to see to.
    pub(crate) fn exchange(&self, receives: &[Message], sends: &[Message]) -> Result<Transfer> {
        let messages = || receives.iter().chain(sends);
        let tensors: Vec<*const C_tensor> = messages().map(|(_, tensor)| tensor.as_ptr()).collect();
        let peers: Vec<c_int> = messages().map(|(peer, _)| index(*peer)).collect();
        let mut work = null_mut();
        let group = self.0.lock();
        let (tensors, peers, count) = (tensors.as_ptr(), peers.as_ptr(), peers.len());
        // SAFETY: the group is alive and ours alone during the call; the lists have `count` elements, and the tensors outlive it, and
        // their memory the work.
        unsafe { check(rt_group_exchange(*group, tensors, peers, receives.len(), count, &mut work)) }?;
        Ok(Transfer(work))
    }

    /// Begins to send a contiguous CPU tensor with at least one element.
    pub(crate) fn send(&self, tensor: &Tensor, peer: usize, tag: i32) -> Result<Transfer> {
        let mut work = null_mut();
        let group = self.0.lock();
        // SAFETY: the group is alive and ours alone during the call; the tensor outlives it, and its memory the work.
        unsafe { check(rt_group_send(*group, tensor.as_ptr(), index(peer), tag, &mut work)) }?;
        Ok(Transfer(work))
    }

    /// Begins to receive into a contiguous CPU tensor with at least one element. That nobody uses its memory meanwhile is for the
    /// caller to see to, as with every in-place operation of libtorch.
    pub(crate) fn recv(&self, tensor: &Tensor, peer: usize, tag: i32) -> Result<Transfer> {
        let mut work = null_mut();
        let group = self.0.lock();
        // SAFETY: as for `send`.
        unsafe { check(rt_group_recv(*group, tensor.as_ptr(), index(peer), tag, &mut work)) }?;
        Ok(Transfer(work))
    }

    /// Begins a collective of the backend's own. All ranks have agreed on the sizes.
    pub(crate) fn native(
        &self,
        operation: Native,
        input: &Tensor,
        output: Option<&Tensor>,
        timeout: Duration,
    ) -> Result<Transfer> {
        let mut work = null_mut();
        let group = self.0.lock();
        let output = output.map_or(null(), Tensor::as_ptr);
        let operation = operation as c_int;
        // SAFETY: as for `send`; the output is null or a tensor that outlives the call.
        let status = unsafe {
            rt_group_native(*group, operation, input.as_ptr(), output, milliseconds(timeout), &mut work)
        };
        // SAFETY: the status is fresh.
        unsafe { check(status) }?;
        Ok(Transfer(work))
    }

    /// Waits until all ranks have come, over Gloo.
    pub(crate) fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        let group = self.0.lock();
        // SAFETY: the group is alive and ours alone during the call.
        unsafe { check(rt_group_monitored_barrier(*group, milliseconds(timeout))) }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: the group is ours and not used after this. Transfers outlive it: c10d counts its references.
        unsafe { rt_group_free(*self.0.get_mut()) };
    }
}

/// A transfer on its way. It keeps its tensor's memory.
#[derive(Debug)]
pub(crate) struct Transfer(*mut Opaque);

// SAFETY: c10d's works may be waited for on any thread; `wait` takes it mutably, so on one at a time.
unsafe impl Send for Transfer {}

impl Transfer {
    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<()> {
        // SAFETY: the work is alive.
        unsafe { check(rt_transfer_wait(self.0, milliseconds(timeout))) }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // SAFETY: the work is ours and not used after this.
        unsafe { rt_transfer_free(self.0) };
    }
}
