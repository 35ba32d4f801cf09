//! Batches in order, though made in any order.
//!
//! A worker takes a ticket, which names the next place of the sequence, when it is less than `ahead` tickets in front of
//! what was handed out; it puts the batch into the ticket's slot. The consumer takes slots in order.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use runtime::device::PinnedBuffer;

use super::cursor::{Cursor, Place};
use super::worker::Made;
use crate::error::Result;

/// What the consumer gets.
pub(super) struct Taken {
    pub(super) made: Result<Made>,
    /// Where the loader stands behind it.
    pub(super) after: Cursor,
}

/// What a worker gets.
pub(super) struct Ticket {
    number: u64,
    pub(super) place: Place,
    after: Cursor,
    /// Memory of a former batch.
    pub(super) memory: Option<PinnedBuffer>,
}

pub(super) struct Queue {
    inner: Mutex<Inner>,
    /// There is a ticket to be had, or no more at all.
    tickets: Condvar,
    /// The next batch is there, or none comes any more.
    batches: Condvar,
    ahead: u64,
}

struct Inner {
    cursor: Cursor,
    next_ticket: u64,
    taken: u64,
    /// Of tickets `taken..`.
    slots: VecDeque<Option<Taken>>,
    /// Memory of batches that were made; the oldest is the likeliest to be free.
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

    /// The next ticket, when there is one; `None` when there are no more. `next` moves the cursor.
    pub(super) fn ticket(
        &self,
        mut next: impl FnMut(&mut Cursor) -> Result<Option<Place>>,
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
            Ok(Some(place)) => {
                let number = inner.next_ticket;
                inner.next_ticket += 1;
                inner.cursor = after;
                inner.slots.push_back(None);
                // Batches that wait, and the consumer's, still view theirs.
                let spare = inner.memory.len() as u64 > self.ahead.saturating_add(1);
                let memory = if spare { inner.memory.pop_front() } else { None };
                Some(Ticket { number, place, after, memory })
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

    /// Fills the ticket's slot.
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

    /// The next batch; `None` at the end of the sequence, and after [`Queue::stop`].
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

    /// No more tickets.
    pub(super) fn stop(&self) {
        self.lock().stopped = true;
        self.tickets.notify_all();
        self.batches.notify_all();
    }

    pub(super) fn worked_seconds(&self) -> f64 {
        self.lock().worked_seconds
    }

    /// Nothing that can panic is done under the lock but a source's own `batches`, which the caller catches.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
