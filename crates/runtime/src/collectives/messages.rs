//! The messages of operations: their numbers, tags, counts and failures.
//!
//! A message's tag has its number and a hash of its size, so that ranks that disagree time out, where Gloo would abort the process. A
//! failed operation makes its group unusable, and the ranks write to the store what they were doing.

use std::fmt::Display;
use std::sync::atomic::Ordering;

use tch::{Kind, Tensor};

use super::failure::{self, CollectiveError};
use super::group::Group;
use super::operands::byte_count;
use super::operation_log::Progress;
use super::work::{Deadline, Operation, Pending};
use crate::autograd::GradMode;
use crate::error::{Error, Result};
use crate::ops::TryScalar;
use crate::sys::collectives::Message;

impl Group {
    /// Enters an operation into the log.
    ///
    /// # Errors
    /// The first failure, if the group is dead.
    pub(super) fn begin(&self, name: &'static str, label: &str, bytes: u64) -> Result<Operation> {
        self.check_alive()?;
        let number = self.0.state.lock().log.add(name, label, bytes);
        Ok(Operation { name, label: label.into(), number })
    }

    pub(super) fn check_alive(&self) -> Result<()> {
        let failure = self.0.state.lock().failure.clone();
        failure.map_or(Ok(()), |failure| Err(Error::Collective(Box::new(failure))))
    }

    pub(super) fn log(&self, operation: &Operation, progress: Progress) {
        self.0.state.lock().log.set(operation.number, progress);
    }

    /// Begins to receive and to send tensors; nothing for those that are empty. Over NCCL, which matches messages by their order alone,
    /// all begin together: one after the other, two ranks that both receive first would wait for each other. An error is a failure of
    /// the group.
    pub(super) fn exchange(
        &self,
        operation: &Operation,
        mut receives: Vec<Message>,
        mut sends: Vec<Message>,
    ) -> Result<Vec<Pending>> {
        receives.retain(|(_, tensor)| tensor.numel() > 0);
        sends.retain(|(_, tensor)| tensor.numel() > 0);
        let Some(backend) = self.backend().filter(|_| self.is_over_nccl()) else {
            let receives = receives.iter().map(|(from, tensor)| self.post_recv(operation, tensor, *from));
            let sends = sends.iter().map(|(to, tensor)| self.post_send(operation, tensor, *to));
            return receives.chain(sends).filter_map(Result::transpose).collect();
        };
        let mut peers = receives.iter().chain(&sends).map(|(peer, _)| *peer);
        let Some(first) = peers.next() else { return Ok(Vec::new()) };
        let peer = peers.all(|peer| peer == first).then_some(first);
        let transfer =
            backend.exchange(&receives, &sends).map_err(|cause| self.fail(operation, peer, &cause))?;
        let bytes = |messages: &[Message]| messages.iter().map(|(_, tensor)| byte_count(tensor)).sum();
        self.count(bytes(&sends), bytes(&receives));
        Ok(vec![Pending { transfer, peer }])
    }

    /// Counts bytes that cross the wire.
    pub(super) fn count(&self, sent: u64, received: u64) {
        self.0.sent.fetch_add(sent, Ordering::Relaxed);
        self.0.received.fetch_add(received, Ordering::Relaxed);
    }

    /// Begins to send over Gloo; nothing where the tensor is empty.
    pub(super) fn post_send(
        &self,
        operation: &Operation,
        tensor: &Tensor,
        to: usize,
    ) -> Result<Option<Pending>> {
        let bytes = byte_count(tensor);
        let Some(backend) = self.0.backend.as_ref().filter(|_| tensor.numel() > 0) else {
            self.0.sent.fetch_add(bytes, Ordering::Relaxed);
            return Ok(None);
        };
        let sequence = next(&mut self.0.state.lock().sends[to], 1);
        let transfer = backend
            .send(tensor, to, tag(sequence, operation.name, bytes))
            .map_err(|cause| self.fail(operation, Some(to), &cause))?;
        self.count(bytes, 0);
        Ok(Some(Pending { transfer, peer: Some(to) }))
    }

    /// Begins to receive over Gloo; nothing where the tensor is empty.
    fn post_recv(&self, operation: &Operation, tensor: &Tensor, from: usize) -> Result<Option<Pending>> {
        if tensor.numel() == 0 {
            return Ok(None);
        }
        let sequence = self.reserve_receives(from, 1);
        self.post_reserved_recv(operation, tensor, from, sequence)
    }

    /// Takes the numbers of the next `count` messages from a rank, for receives that are posted later.
    pub(super) fn reserve_receives(&self, from: usize, count: u64) -> u64 {
        next(&mut self.0.state.lock().receives[from], count)
    }

    pub(super) fn post_reserved_recv(
        &self,
        operation: &Operation,
        tensor: &Tensor,
        from: usize,
        sequence: u64,
    ) -> Result<Option<Pending>> {
        let bytes = byte_count(tensor);
        let Some(backend) = &self.0.backend else {
            self.0.received.fetch_add(bytes, Ordering::Relaxed);
            let _no_grad = GradMode::off();
            let _ = tensor.shallow_clone().f_zero_()?;
            return Ok(None);
        };
        let transfer = backend
            .recv(tensor, from, tag(sequence, operation.name, bytes))
            .map_err(|cause| self.fail(operation, Some(from), &cause))?;
        self.count(0, bytes);
        Ok(Some(Pending { transfer, peer: Some(from) }))
    }

    /// Waits for a transfer.
    pub(super) fn complete(
        &self,
        operation: &Operation,
        mut pending: Pending,
        deadline: Deadline,
    ) -> Result<()> {
        pending
            .transfer
            .wait(deadline.remaining())
            .map_err(|cause| self.fail(operation, pending.peer, &cause))
    }

    /// Declares the group dead, unless it is, and returns its first failure. Sends the failure to the other ranks, and asks for theirs.
    pub(super) fn fail(&self, operation: &Operation, peer: Option<usize>, cause: &dyn Display) -> Error {
        let cause = cause.to_string();
        let failure = CollectiveError {
            group: self.name().to_owned(),
            rank: self.rank(),
            size: self.size(),
            operation: operation.name,
            label: operation.label.to_string(),
            peer,
            machines: self.machines(),
            cause: failure::without_source_line(&cause).to_owned(),
            reports: Vec::new(),
        };
        {
            let mut state = self.0.state.lock();
            if let Some(first) = &state.failure {
                return Error::Collective(Box::new(first.clone()));
            }
            state.failure = Some(failure.clone());
            state.log.set(operation.number, Progress::Failed);
        }
        if let Some(backend) = self.backend().filter(|_| self.is_over_nccl()) {
            backend.abort();
        }
        let own = failure.report();
        let mut reports = self.0.store.as_ref().map_or_else(Vec::new, |store| {
            failure::exchange(store, &self.prefix(), (self.rank(), self.size()), own.clone())
        });
        reports.retain(|(_, report)| *report != own);
        let failure = CollectiveError { reports, ..failure };
        let mut state = self.0.state.lock();
        state.log.dump(self.name(), self.rank(), &failure.to_string());
        state.failure = Some(failure.clone());
        Error::Collective(Box::new(failure))
    }

    /// Compares the size and dtype of a tensor with the next rank's: a byte is sent around the ranks whose tag has both, and is not
    /// counted. Where they differ it does not arrive. Over NCCL, whose messages have no tags, nothing is compared.
    pub(super) fn compare_sizes(&self, operation: &Operation, tensor: &Tensor) -> Result<()> {
        let Some(backend) = self.backend().filter(|_| !self.is_over_nccl()) else { return Ok(()) };
        let (to, from) = ((self.rank() + 1) % self.size(), (self.rank() + self.size() - 1) % self.size());
        let what = format!("{} of {:?}", operation.name, tensor.kind());
        let byte = |value: i64| Tensor::try_full([1], value, (Kind::Uint8, tensor.device()));
        let (token, arrived) = (byte(1)?, byte(0)?);
        let (sent, received) = {
            let mut state = self.0.state.lock();
            (next(&mut state.sends[to], 1), next(&mut state.receives[from], 1))
        };
        let deadline = Deadline::after(self.timeout());
        let bytes = byte_count(tensor);
        let receive = backend.recv(&arrived, from, tag(received, &what, bytes));
        let receive = receive.map_err(|cause| self.fail(operation, Some(from), &cause))?;
        let send = backend.send(&token, to, tag(sent, &what, bytes));
        let send = send.map_err(|cause| self.fail(operation, Some(to), &cause))?;
        self.complete(operation, Pending { transfer: receive, peer: Some(from) }, deadline)?;
        self.complete(operation, Pending { transfer: send, peer: Some(to) }, deadline)
    }
}

fn next(counter: &mut u64, count: u64) -> u64 {
    let value = *counter;
    *counter += count;
    value
}

/// The tag of a message: its number among those from the one rank to the other, and a hash of what it is. c10d matches messages by tag
/// alone, and one whose size is not that of the tensor that receives it would end the process; ranks that disagree wait for different
/// tags instead, and the operation fails at its deadline. The highest bit keeps off the tags of c10d's barrier.
fn tag(sequence: u64, operation: &str, bytes: u64) -> i32 {
    // The two ends of a message that is sent alone have two names.
    let operation = if operation == "recv" { "send" } else { operation };
    let data = operation.bytes().chain(bytes.to_le_bytes());
    let hash = data
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let hash = (hash ^ hash >> 15 ^ hash >> 30 ^ hash >> 45) & 0x7fff;
    i32::try_from(1 << 30 | (sequence & 0x7fff) << 15 | hash).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::tag;

    #[test]
    fn tags_differ_by_number_operation_and_size_and_are_above_those_of_the_barrier() {
        let mut tags: Vec<i32> = (0..1000).map(|sequence| tag(sequence, "send", 8)).collect();
        tags.extend([tag(0, "all_gather", 8), tag(0, "send", 12), tag(0x7fff, "send", 8)]);
        assert!(tags.iter().all(|&tag| tag >= 1 << 30));
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), 1003);
        assert_eq!(tag(3, "send", 8), tag(0x8003, "send", 8));
        assert_eq!(tag(3, "send", 8), tag(3, "recv", 8));
    }
}
