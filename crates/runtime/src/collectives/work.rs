//! An operation that is under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::group::Group;
use super::operation_log::Progress;
use super::ordered::OrderedReduction;
use crate::error::{Error, Result};
use crate::profile::range;
use crate::sys::collectives::Transfer;

/// Name of an operation in errors and in the log.
#[derive(Clone, Debug)]
pub(super) struct Operation {
    pub(super) name: &'static str,
    pub(super) label: Arc<str>,
    /// Its number in the log.
    pub(super) number: u64,
}

/// A transfer, and the rank at its other end; `None` for a collective of the backend's own, and for messages with several ranks.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) transfer: Transfer,
    pub(super) peer: Option<usize>,
}

/// The moment at which an operation that is waited for fails.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(Instant);

impl Deadline {
    pub(super) fn after(timeout: Duration) -> Self {
        Self(Instant::now() + timeout)
    }

    pub(super) fn remaining(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}

/// An operation that is under way. It keeps its tensors' memory until it is done; nobody writes to that memory before, and nobody
/// reads what is received.
///
/// Dropping it waits, too, and leaves a failure to the group's next operation.
#[derive(Debug)]
#[must_use = "dropping waits at once"]
pub struct Work {
    group: Group,
    operation: Operation,
    /// In the order in which they are waited for.
    pending: Vec<Pending>,
    reduction: Option<OrderedReduction>,
    finished: bool,
}

impl Work {
    pub(super) fn new(group: &Group, operation: Operation, pending: Vec<Pending>) -> Self {
        Self { group: group.clone(), operation, pending, reduction: None, finished: false }
    }

    pub(super) fn with_reduction(mut self, reduction: Option<OrderedReduction>) -> Self {
        self.reduction = reduction;
        self
    }

    /// Waits until the operation is done, for at most the group's timeout from this call on. An ordered reduction receives and adds
    /// during this call: wait on a thread of its own to overlap it with computation.
    ///
    /// On a GPU nothing waits but the calling thread's current stream, and an ordered reduction is enqueued there; see
    /// [the module](super#gpus).
    ///
    /// # Errors
    /// [`Error::Collective`]: a peer is gone, or did not take part in time. The group is dead then.
    pub fn wait(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.finished, true) {
            return Ok(());
        }
        self.group.check_alive()?;
        let _range = range(&format!("{} {}", self.operation.name, self.operation.label));
        let deadline = Deadline::after(self.group.timeout());
        if let Some(mut reduction) = self.reduction.take() {
            reduction.run(&self.group, &self.operation, deadline)?;
        }
        for pending in self.pending.drain(..) {
            self.group.complete(&self.operation, pending, deadline)?;
        }
        self.group.log(&self.operation, Progress::Done);
        Ok(())
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // A transfer that is dropped before it is done writes nowhere any more, so a panic need not wait for its peers.
        if !std::thread::panicking() {
            let _: Result<(), Error> = self.finish();
        }
    }
}
