//! Best-fit packing of a stream, with a bounded buffer.
//!
//! The buffer holds up to `documents` documents by length. When it is full, one row is closed: it starts with the longest
//! document of the buffer and repeatedly takes the longest that fits, except that the last two are chosen together so that
//! their sum is closest to the remaining room. A document that has waited for more than `patience` rows starts the next row
//! instead, oldest first. So a document waits for at most `patience + documents` rows.
//!
//! Common streaming packers keep one or a few rows open and close a row when the next document does not fit (next-fit, 75 %
//! full on uniform lengths). Choosing among a thousand waiting documents is what fills rows.

use std::collections::VecDeque;

use super::bitmap_tree::BitmapTree;
use super::bound::too_long;
use super::{WHAT, check_capacity};
use crate::error::{Error, Result};

/// Options of streaming packing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamingConfig {
    /// Tokens per row.
    pub capacity: usize,
    /// The maximum number of waiting documents.
    pub documents: usize,
    /// The number of rows after which a waiting document takes precedence.
    pub patience: u64,
}

impl Default for StreamingConfig {
    fn default() -> Self {
        Self { capacity: 512, documents: 1024, patience: 1024 }
    }
}

/// A waiting document.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    document: u64,
    /// The index of its arrival.
    arrival: u64,
    /// The number of rows closed before its arrival.
    since: u64,
}

/// A packer for documents as they arrive.
///
/// ```
/// use dataloading::packing::{StreamingBestFit, StreamingConfig};
///
/// let mut packer = StreamingBestFit::new(&StreamingConfig { capacity: 10, documents: 3, patience: 100 })?;
/// let mut rows = Vec::new();
/// for (document, length) in [7, 6, 3, 4].into_iter().enumerate() {
///     rows.extend(packer.push(document as u64, length)?);
/// }
/// rows.extend(std::iter::from_fn(|| packer.close_row()));
/// assert_eq!(rows, [vec![0, 2], vec![1, 3]]);
/// # Ok::<(), dataloading::Error>(())
/// ```
#[derive(Debug)]
pub struct StreamingBestFit {
    options: StreamingConfig,
    by_length: Vec<VecDeque<Waiting>>,
    lengths: BitmapTree,
    /// Arrival and length of all waiting documents, and of some that have left.
    arrivals: VecDeque<(u64, u32)>,
    waiting: usize,
    arrived: u64,
    closed: u64,
    longest_wait: u64,
}

impl StreamingBestFit {
    /// Creates a packer with an empty buffer.
    ///
    /// # Errors
    /// The capacity or the buffer size is 0.
    pub fn new(options: &StreamingConfig) -> Result<Self> {
        let capacity = check_capacity(options.capacity)? as usize;
        if options.documents == 0 {
            let reason = "a buffer of 0 documents; expected at least 1".into();
            return Err(Error::Config { what: WHAT, reason });
        }
        Ok(Self {
            options: *options,
            by_length: vec![VecDeque::new(); capacity + 1],
            lengths: BitmapTree::new(capacity + 1),
            arrivals: VecDeque::new(),
            waiting: 0,
            arrived: 0,
            closed: 0,
            longest_wait: 0,
        })
    }

    /// Adds a document. Returns the documents of a row if this closes one. A document without tokens is skipped.
    ///
    /// # Errors
    /// The document is longer than a row.
    pub fn push(&mut self, document: u64, length: u32) -> Result<Option<Vec<u64>>> {
        if length == 0 {
            return Ok(None);
        }
        if length as usize > self.options.capacity {
            return Err(too_long(length, self.options.capacity));
        }
        let waiting = Waiting { document, arrival: self.arrived, since: self.closed };
        self.compact();
        self.arrivals.push_back((self.arrived, length));
        self.arrived += 1;
        let same = &mut self.by_length[length as usize];
        if same.is_empty() {
            self.lengths.insert(length as usize);
        }
        same.push_back(waiting);
        self.waiting += 1;
        if self.waiting < self.options.documents { Ok(None) } else { Ok(self.close_row()) }
    }

    /// Closes a row of waiting documents, or returns `None` if there are none. Call it repeatedly at the end of the stream.
    pub fn close_row(&mut self) -> Option<Vec<u64>> {
        let first = self.overdue().or_else(|| self.lengths.last())?;
        let mut row = Vec::new();
        self.take(first, &mut row);
        let mut room = self.options.capacity - first;
        while let Some(length) = self.next_length(room) {
            self.take(length, &mut row);
            room -= length;
        }
        self.closed += 1;
        Some(row)
    }

    /// Returns the number of waiting documents.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns the maximum number of rows that a document has waited.
    pub fn longest_wait(&self) -> u64 {
        self.longest_wait
    }

    /// Removes the arrivals of documents that have left, once they are the majority; otherwise they would accumulate behind
    /// a document that waits long. Each pass removes at least half, so the cost per document is constant.
    fn compact(&mut self) {
        const SPARE: usize = 64;
        if self.arrivals.len() > 2 * self.waiting + SPARE {
            // Documents of one length leave in order of arrival.
            let by_length = &self.by_length;
            let waits = |arrival: u64, length: u32| {
                by_length[length as usize].front().is_some_and(|oldest| oldest.arrival <= arrival)
            };
            self.arrivals.retain(|&(arrival, length)| waits(arrival, length));
        }
    }

    /// Returns the length of the oldest document, if it has waited long enough.
    fn overdue(&mut self) -> Option<usize> {
        while let Some(&(arrival, length)) = self.arrivals.front() {
            // Documents of one length leave in order of arrival.
            match self.by_length[length as usize].front() {
                Some(oldest) if oldest.arrival <= arrival => {
                    let waited = self.closed - oldest.since;
                    return (waited >= self.options.patience).then_some(length as usize);
                }
                _ => self.arrivals.pop_front(),
            };
        }
        None
    }

    /// Returns the length to put into `room` next: the longest that fits, unless two shorter ones together fill the room
    /// better than that one and the longest beside it.
    fn next_length(&self, room: usize) -> Option<usize> {
        const TRIES: usize = 16;
        let longest = self.lengths.at_most(room)?;
        let (mut best, mut best_sum) = (longest, 0);
        let mut candidate = Some(longest);
        for _ in 0..TRIES {
            let Some(length) = candidate else { break };
            let beside = self
                .lengths
                .at_most(room - length)
                .filter(|&other| other != length || self.by_length[length].len() > 1);
            let sum = length + beside.unwrap_or(0);
            if sum > best_sum {
                (best, best_sum) = (length, sum);
            }
            if sum == room {
                break;
            }
            candidate = length.checked_sub(1).and_then(|below| self.lengths.at_most(below));
        }
        Some(best)
    }

    fn take(&mut self, length: usize, row: &mut Vec<u64>) {
        let same = &mut self.by_length[length];
        let Some(waiting) = same.pop_front() else { return };
        if same.is_empty() {
            self.lengths.remove(length);
        }
        self.waiting -= 1;
        self.longest_wait = self.longest_wait.max(self.closed - waiting.since);
        row.push(waiting.document);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_documents_are_released_behind_a_waiting_one() {
        let options = StreamingConfig { capacity: 10, documents: 2, patience: u64::MAX };
        let mut packer = StreamingBestFit::new(&options).unwrap();
        // Shorter than all others, and nothing fits beside it.
        assert_eq!(packer.push(0, 9).unwrap(), None);
        for document in 1..10_000 {
            assert_eq!(packer.push(document, 10).unwrap(), Some(vec![document]));
            assert!(packer.arrivals.len() <= 68, "{} arrivals, one waits", packer.arrivals.len());
        }
        assert_eq!(packer.close_row(), Some(vec![0]));
    }
}
