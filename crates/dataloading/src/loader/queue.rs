//! A queue that delivers batches in order, although workers finish them in any order.
//!
//! A worker takes a ticket for the next batch of the sequence, as long as fewer than `ahead` tickets are outstanding, and
//! puts the batch into the slot of the ticket. The consumer takes the slots in order.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use runtime::device::PinnedBuffer;

use super::cursor::{BatchId, Cursor};
use super::worker::Made;
use crate::error::Result;

/// A batch for the consumer.
pub(super) struct Taken {
    pub(super) made: Result<Made>,
    /// The position of the loader after it.
    pub(super) after: Cursor,
}

/// A ticket for a worker.
pub(super) struct Ticket {
    number: u64,
    pub(super) id: BatchId,
    after: Cursor,
    /// The memory of a former batch.
    pub(super) memory: Option<PinnedBuffer>,
}

pub(super) struct Queue {
    inner: Mutex<Inner>,
    /// Signals a new ticket, or the end of tickets.
    tickets: Condvar,
    /// Signals the next batch, or the end of batches.
    batches: Condvar,
    ahead: u64,
}

struct Inner {
    cursor: Cursor,
    next_ticket: u64,
    taken: u64,
    /// The slots of tickets `taken..`.
    slots: VecDeque<Option<Taken>>,
    /// The memory of former batches; the oldest is the most likely to be free.
    memory: VecDeque<PinnedBuffer>,
    ended: bool,
    stopped: bool,
    worked_seconds: f64,
}

impl Queue {
    pub(super) fn new(cursor: Cursor, ahead: usize) -> Self {
        let inner = Inner {
            cursor,
            next_ticket: 0,
            taken: 0,
            slots: VecDeque::new(),
            memory: VecDeque::new(),
            ended: false,
            stopped: false,
            worked_seconds: 0.0,
        };
        Self {
            inner: Mutex::new(inner),
            tickets: Condvar::new(),
            batches: Condvar::new(),
            ahead: ahead as u64,
        }
    }

    /// Waits for the next ticket; `None` at the end. `next` advances the cursor.
    pub(super) fn ticket(
        &self,
        mut next: impl FnMut(&mut Cursor) -> Result<Option<BatchId>>,
    ) -> Option<Ticket> {
        let mut inner = self.lock();
        while !inner.stopped && !inner.ended && inner.next_ticket >= inner.taken.saturating_add(self.ahead) {
            inner = self.tickets.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        if inner.stopped || inner.ended {
            return None;
        }
        let mut after = inner.cursor;
        match next(&mut after) {
            Ok(Some(id)) => {
                let number = inner.next_ticket;
                inner.next_ticket += 1;
                inner.cursor = after;
                inner.slots.push_back(None);
                // The prefetched batches and the consumer's batch still view their memory.
                let spare = inner.memory.len() as u64 > self.ahead.saturating_add(1);
                let memory = if spare { inner.memory.pop_front() } else { None };
                Some(Ticket { number, id, after, memory })
            }
            ending => {
                if let Err(error) = ending {
                    let after = inner.cursor;
                    inner.slots.push_back(Some(Taken { made: Err(error), after }));
                }
                inner.ended = true;
                drop(inner);
                self.tickets.notify_all();
                self.batches.notify_all();
                None
            }
        }
    }

    /// Fills the slot of a ticket.
    pub(super) fn put(
        &self,
        ticket: &Ticket,
        made: Result<Made>,
        memory: Option<PinnedBuffer>,
        seconds: f64,
    ) {
        let mut inner = self.lock();
        inner.worked_seconds += seconds;
        inner.memory.extend(memory);
        let slot = (ticket.number - inner.taken) as usize;
        inner.slots[slot] = Some(Taken { made, after: ticket.after });
        drop(inner);
        if slot == 0 {
            self.batches.notify_all();
        }
    }

    /// Waits for the next batch; `None` at the end of the sequence and after [`Queue::stop`].
    pub(super) fn take(&self) -> Option<Taken> {
        let mut inner = self.lock();
        loop {
            match inner.slots.front() {
                Some(Some(_)) => break,
                None if inner.ended || inner.stopped => return None,
                _ => inner = self.batches.wait(inner).unwrap_or_else(PoisonError::into_inner),
            }
        }
        let taken = inner.slots.pop_front().flatten();
        inner.taken += 1;
        drop(inner);
        self.tickets.notify_one();
        taken
    }

    /// Stops giving out tickets.
    pub(super) fn stop(&self) {
        self.lock().stopped = true;
        self.tickets.notify_all();
        self.batches.notify_all();
    }

    pub(super) fn worked_seconds(&self) -> f64 {
        self.lock().worked_seconds
    }

    /// Under the lock only `batches` of a source can panic, and the caller catches that.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
