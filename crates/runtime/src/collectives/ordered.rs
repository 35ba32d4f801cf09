//! Reductions in the order of ranks, streamed in pieces.
//!
//! `(((g₀ + g₁) + g₂) + …)`, element by element, in fp32 for fp32, bf16 and fp16 (in f64 for f64, in i64 for integers): the bits do not
//! depend on which message arrives first, and are those of one process that adds the same tensors in turn. libtorch's Gloo adds in the
//! order of a ring, in the dtype of the tensor.
//!
//! Each rank sends part `k` of its tensor to rank `k`, `(N − 1) / N` of the whole, which is what a ring sends. The parts travel in
//! pieces of 1 MiB, of which two per rank are received at a time, so the memory beside the tensors is `2 · (N − 1)` MiB.

use std::collections::VecDeque;

use tch::{Kind, Tensor};

use super::group::Group;
use super::operands::{byte_count, overlap, part};
use super::work::{Deadline, Operation, Pending};
use super::{Division, ReduceOp};
use crate::autograd::GradMode;
use crate::error::{Error, Result};

/// Bytes of a piece of an ordered reduction, of which two are received from each rank at a time.
pub const PIECE: i64 = 1 << 20;
/// Pieces of each rank that are received at a time.
const AHEAD: usize = 2;

/// Returns the dtype that tensors of `kind` are reduced in.
pub(super) fn accumulation_kind(kind: Kind, op: ReduceOp) -> Result<Kind> {
    match (op, kind) {
        (ReduceOp::Max, _) => Ok(kind),
        (ReduceOp::Sum, Kind::Float | Kind::Half | Kind::BFloat16) => Ok(Kind::Float),
        (ReduceOp::Sum, Kind::Double) => Ok(Kind::Double),
        (ReduceOp::Sum, Kind::Int64 | Kind::Int | Kind::Int16 | Kind::Int8 | Kind::Uint8) => Ok(Kind::Int64),
        (ReduceOp::Sum, other) => {
            Err(Error::invalid("reduce", format!("{other:?} is not a dtype that is summed")))
        }
    }
}

/// Reduces `value` into `sum`.
pub(super) fn combine(op: ReduceOp, sum: &mut Tensor, value: &Tensor) -> Result<()> {
    match op {
        ReduceOp::Sum => drop(sum.f_add_(value)?),
        ReduceOp::Max => drop(sum.f_maximum_out(sum, value)?),
    }
    Ok(())
}

/// A reduction of one rank's part that is under way.
#[derive(Debug)]
pub(super) struct OrderedReduction {
    op: ReduceOp,
    accumulate: bool,
    /// This rank's part of its own tensor, and what receives the reduced part.
    own: Tensor,
    target: Tensor,
    /// Where pieces are reduced if not in the target.
    sum: Option<Tensor>,
    /// By rank: memory for the pieces that are received, and the number of the first of its messages. None for this rank.
    peers: Vec<Option<Peer>>,
    /// Elements of a piece.
    piece: i64,
    pieces: usize,
    received: VecDeque<Vec<Pending>>,
    posted: usize,
}

#[derive(Debug)]
struct Peer {
    scratch: [Tensor; AHEAD],
    first_message: u64,
}

impl OrderedReduction {
    /// Begins to receive. `source` and `target` are flat and of the division's sizes.
    pub(super) fn post(
        group: &Group,
        operation: &Operation,
        source: &Tensor,
        division: Division,
        target: &Tensor,
        (op, accumulate): (ReduceOp, bool),
    ) -> Result<Self> {
        let own = part(source, division, group.rank())?;
        let kind = accumulation_kind(source.kind(), op)?;
        let piece = elements_of_a_piece(source.kind());
        let elements = own.numel() as i64;
        let in_place = target.kind() == kind && !overlap(target, &own)?;
        let scratch = |kind: Kind| Tensor::f_empty([piece.min(elements)], (kind, tch::Device::Cpu));
        let pieces = usize::try_from((elements + piece - 1) / piece).unwrap_or(usize::MAX);
        let mut peers: Vec<Option<Peer>> = (0..group.size()).map(|_| None).collect();
        for from in group.others() {
            let scratch = [scratch(source.kind())?, scratch(source.kind())?];
            let first_message = group.reserve_receives(from, pieces as u64);
            peers[from] = Some(Peer { scratch, first_message });
        }
        let mut reduction = Self {
            op,
            accumulate,
            own,
            target: target.shallow_clone(),
            sum: if in_place { None } else { Some(scratch(kind)?) },
            peers,
            piece,
            pieces,
            received: VecDeque::new(),
            posted: 0,
        };
        while reduction.posted < pieces.min(AHEAD) {
            reduction.post_next(group, operation)?;
        }
        Ok(reduction)
    }

    /// Receives and reduces all pieces.
    pub(super) fn run(&mut self, group: &Group, operation: &Operation, deadline: Deadline) -> Result<()> {
        let _no_grad = GradMode::off();
        for piece in 0..self.pieces {
            for pending in self.received.pop_front().unwrap_or_default() {
                group.complete(operation, pending, deadline)?;
            }
            self.reduce(piece)?;
            if self.posted < self.pieces {
                self.post_next(group, operation)?;
            }
        }
        Ok(())
    }

    fn range(&self, piece: usize) -> (i64, i64) {
        let start = self.piece * piece as i64;
        (start, self.piece.min(self.own.numel() as i64 - start))
    }

    fn post_next(&mut self, group: &Group, operation: &Operation) -> Result<()> {
        let (_, length) = self.range(self.posted);
        let mut pending = Vec::new();
        for from in group.others() {
            let Some(peer) = &self.peers[from] else { continue };
            let into = peer.scratch[self.posted % AHEAD].f_narrow(0, 0, length)?;
            let sequence = peer.first_message + self.posted as u64;
            pending.extend(group.post_reserved_recv(operation, &into, from, sequence)?);
        }
        self.received.push_back(pending);
        self.posted += 1;
        Ok(())
    }

    fn reduce(&self, piece: usize) -> Result<()> {
        let (start, length) = self.range(piece);
        let mut target = self.target.f_narrow(0, start, length)?;
        let mut sum = match &self.sum {
            Some(sum) => sum.f_narrow(0, 0, length)?,
            None => target.shallow_clone(),
        };
        if self.accumulate && self.sum.is_some() {
            sum.f_copy_(&target)?;
        }
        for (rank, peer) in self.peers.iter().enumerate() {
            let value = match peer {
                Some(peer) => peer.scratch[piece % AHEAD].f_narrow(0, 0, length)?,
                None => self.own.f_narrow(0, start, length)?,
            };
            if rank == 0 && !self.accumulate {
                sum.f_copy_(&value)?;
            } else {
                combine(self.op, &mut sum, &value)?;
            }
        }
        if self.sum.is_some() {
            target.f_copy_(&sum)?;
        }
        Ok(())
    }
}

/// Begins to send the other ranks their parts of `source`, piece by piece.
pub(super) fn send_parts(
    group: &Group,
    operation: &Operation,
    source: &Tensor,
    division: Division,
) -> Result<Vec<Pending>> {
    let piece = elements_of_a_piece(source.kind());
    let mut pending = Vec::new();
    let mut start = 0;
    while start < division.per_rank {
        for to in group.others() {
            let range = division.range(to);
            let length = piece.min(range.end - range.start - start);
            if length > 0 {
                let values = source.f_narrow(0, range.start + start, length)?;
                pending.extend(group.post_send(operation, &values, to)?);
            }
        }
        start += piece;
    }
    Ok(pending)
}

/// Bytes that [`send_parts`] sends.
pub(super) fn bytes_of_parts(group: &Group, source: &Tensor, division: Division) -> u64 {
    let own = division.len(group.rank()) as u64 * source.kind().elt_size_in_bytes() as u64;
    byte_count(source) - own
}

fn elements_of_a_piece(kind: Kind) -> i64 {
    PIECE / i64::try_from(kind.elt_size_in_bytes()).unwrap_or(1)
}
