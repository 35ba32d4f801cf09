//! Reductions in the order of ranks, streamed in pieces.
//!
//! `(((g₀ + g₁) + g₂) + …)`, element by element, in fp32 for fp32, bf16 and fp16 (in f64 for f64, in i64 for integers): the bits do not
//! depend on which message arrives first, and are those of one process that adds the same tensors in turn. libtorch's Gloo adds in the
//! order of a ring, in the dtype of the tensor.
//!
//! Each rank sends part `k` of its tensor to rank `k`, `(N − 1) / N` of the whole, which is what a ring sends. The parts travel in
//! pieces ([`piece_bytes`]), two from each rank at a time; the more ranks, the smaller the pieces. So the memory beside the tensors is
//! at most 32 MiB up to 257 ranks; on a GPU, where each round costs a latency, 128 MiB up to 1025.
//!
//! Over Gloo all pieces are sent at once, and wait in the sender's tensor for those that receive them. NCCL has no such queue: there, the
//! ranks exchange one round after the other, and in each round every rank sends one piece to every other and receives one from each.

use std::collections::VecDeque;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::group::Group;
use super::operands::{byte_count, overlap, part};
use super::work::{Deadline, Operation, Pending};
use super::{Division, ReduceOp};
use crate::autograd::GradMode;
use crate::device::{Stream, record_stream};
use crate::error::{Error, Result};

/// Pieces of each rank that are received at a time.
const AHEAD: usize = 2;

/// Returns the bytes of a piece of an ordered reduction over so many ranks; two are received from each other rank at a time.
pub fn piece_bytes(ranks: usize, device: Device) -> usize {
    const LEAST: usize = 64 << 10;
    // Those of a piece at most, and of all that are received at a time.
    let (most, received) = if device == Device::Cpu { (1 << 20, 32 << 20) } else { (8 << 20, 128 << 20) };
    let each = received / (AHEAD * ranks.saturating_sub(1).max(1));
    (each - each % LEAST).clamp(LEAST, most)
}

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
    /// Over NCCL, the whole tensor, whose parts are sent in the same rounds.
    sent: Option<(Tensor, Division)>,
    /// Elements of a piece.
    piece: i64,
    rounds: usize,
    received: VecDeque<Vec<Pending>>,
    posted: usize,
}

#[derive(Debug)]
struct Peer {
    /// In turns; one where all fits into it.
    scratch: Vec<Tensor>,
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
        let piece = elements_of_a_piece(group, source);
        let elements = own.numel() as i64;
        let in_place = target.kind() == kind && !overlap(target, &own)?;
        let scratch = |kind: Kind| Ok(Tensor::f_empty([piece.min(elements)], (kind, source.device()))?);
        let pieces = rounds(elements, piece);
        let sent = group.is_over_nccl().then(|| (source.shallow_clone(), division));
        let mut peers: Vec<Option<Peer>> = (0..group.size()).map(|_| None).collect();
        for from in group.others() {
            let scratch = (0..AHEAD.min(pieces)).map(|_| scratch(source.kind())).collect::<Result<_>>()?;
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
            // A rank whose part is short still sends to those whose parts are not. The first rank's is the longest.
            rounds: if sent.is_some() { rounds(division.len(0), piece) } else { pieces },
            sent,
            piece,
            received: VecDeque::new(),
            posted: 0,
        };
        while reduction.posted < reduction.rounds.min(AHEAD) {
            reduction.post_next(group, operation)?;
        }
        Ok(reduction)
    }

    /// Receives and reduces all pieces.
    pub(super) fn run(&mut self, group: &Group, operation: &Operation, deadline: Deadline) -> Result<()> {
        let _no_grad = GradMode::off();
        self.keep_scratch(group)?;
        for round in 0..self.rounds {
            for pending in self.received.pop_front().unwrap_or_default() {
                group.complete(operation, pending, deadline)?;
            }
            self.reduce(round)?;
            if self.posted < self.rounds {
                self.post_next(group, operation)?;
            }
        }
        Ok(())
    }

    /// The stream that reduces may be another one than that on which the scratch was allocated, which gets it back afterwards.
    fn keep_scratch(&self, group: &Group) -> Result<()> {
        if !group.is_over_nccl() || self.own.numel() == 0 {
            return Ok(());
        }
        let stream = Stream::current(group.device())?;
        let received = self.peers.iter().flatten().flat_map(|peer| &peer.scratch);
        received.chain(&self.sum).try_for_each(|scratch| record_stream(scratch, &stream))
    }

    /// First element of a piece of this rank's part, and their number: 0 after the last piece.
    fn range(&self, piece: usize) -> (i64, i64) {
        let start = self.piece * piece as i64;
        (start, self.piece.min(self.own.numel() as i64 - start).max(0))
    }

    fn post_next(&mut self, group: &Group, operation: &Operation) -> Result<()> {
        let (_, length) = self.range(self.posted);
        let mut receives = Vec::new();
        for from in group.others() {
            let Some(peer) = self.peers[from].as_ref().filter(|_| length > 0) else { continue };
            receives.push((from, peer.scratch[self.posted % AHEAD].f_narrow(0, 0, length)?));
        }
        let mut pending = Vec::new();
        match &self.sent {
            Some((source, division)) => {
                let sends = parts_of_round(*division, group.others(), self.piece, self.posted);
                let sends = sends.map(|(to, part)| Ok((to, elements(source, &part)?)));
                pending = group.exchange(operation, receives, sends.collect::<Result<_>>()?)?;
            }
            None => {
                for (from, into) in receives {
                    let first = self.peers[from].as_ref().map_or(0, |peer| peer.first_message);
                    let sequence = first + self.posted as u64;
                    pending.extend(group.post_reserved_recv(operation, &into, from, sequence)?);
                }
            }
        }
        self.received.push_back(pending);
        self.posted += 1;
        Ok(())
    }

    fn reduce(&self, piece: usize) -> Result<()> {
        let (start, length) = self.range(piece);
        if length == 0 {
            return Ok(());
        }
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

/// Over Gloo, begins to send the other ranks their parts of `source`, piece by piece.
pub(super) fn send_parts(
    group: &Group,
    operation: &Operation,
    source: &Tensor,
    division: Division,
) -> Result<Vec<Pending>> {
    if group.is_over_nccl() {
        return Ok(Vec::new());
    }
    let piece = elements_of_a_piece(group, source);
    let mut pending = Vec::new();
    for round in 0..rounds(division.len(0), piece) {
        for (to, part) in parts_of_round(division, group.others(), piece, round) {
            pending.extend(group.post_send(operation, &elements(source, &part)?, to)?);
        }
    }
    Ok(pending)
}

/// The elements that are sent to each of `ranks` in a round, one piece of each one's part at most.
fn parts_of_round(
    division: Division,
    ranks: impl Iterator<Item = usize>,
    piece: i64,
    round: usize,
) -> impl Iterator<Item = (usize, Range<i64>)> {
    let offset = piece * round as i64;
    ranks.filter_map(move |to| {
        let part = division.range(to);
        let start = part.start + offset;
        let end = part.end.min(start + piece);
        (start < end).then_some((to, start..end))
    })
}

/// Number of pieces of `elements` elements.
fn rounds(elements: i64, piece: i64) -> usize {
    usize::try_from((elements + piece - 1) / piece).unwrap_or(usize::MAX)
}

fn elements(flat: &Tensor, range: &Range<i64>) -> Result<Tensor> {
    Ok(flat.f_narrow(0, range.start, range.end - range.start)?)
}

/// Bytes that [`send_parts`] sends.
pub(super) fn bytes_of_parts(group: &Group, source: &Tensor, division: Division) -> u64 {
    let own = division.len(group.rank()) as u64 * source.kind().elt_size_in_bytes() as u64;
    byte_count(source) - own
}

fn elements_of_a_piece(group: &Group, source: &Tensor) -> i64 {
    let bytes = piece_bytes(group.size(), source.device());
    (bytes / source.kind().elt_size_in_bytes().max(1)) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_received_at_a_time_is_bounded() {
        for (device, ranks, most) in [(Device::Cpu, 257, 32 << 20), (Device::Cuda(0), 1025, 128 << 20)] {
            let received = |ranks: usize| AHEAD * (ranks - 1) * piece_bytes(ranks, device);
            assert!((2..=ranks).all(|ranks| received(ranks) <= most));
            assert_eq!(received(ranks), most);
        }
        assert_eq!(
            [2, 17, 18, 1024].map(|ranks| piece_bytes(ranks, Device::Cpu) >> 10),
            [1024, 1024, 960, 64]
        );
    }

    /// Transfers of a rank in a round: (peer, elements).
    fn exchanged(
        division: Division,
        ranks: usize,
        piece: i64,
        rank: usize,
        round: usize,
    ) -> [Vec<(usize, i64)>; 2] {
        let others = || (0..ranks).filter(move |&other| other != rank);
        let sent = parts_of_round(division, others(), piece, round);
        let own = division.len(rank) - piece * round as i64;
        let received = others().filter(|_| own > 0).map(|from| (from, own.min(piece)));
        [sent.map(|(to, part)| (to, part.end - part.start)).collect(), received.collect()]
    }

    #[test]
    fn in_each_round_a_rank_sends_what_its_peers_receive() {
        for (elements, per_rank, ranks, piece) in [
            (0, 0, 2, 4),
            (1, 1, 3, 4),
            (24, 8, 3, 4),
            (23, 8, 3, 4),
            (10, 8, 4, 4),
            (9, 3, 3, 4),
            (100, 34, 3, 7),
        ] {
            let division = Division { elements, per_rank };
            let rounds = rounds(division.len(0), piece);
            let mut sent_to = vec![0; ranks];
            for round in 0..=rounds {
                for rank in 0..ranks {
                    let [sends, receives] = exchanged(division, ranks, piece, rank, round);
                    assert!(round < rounds || (sends.is_empty() && receives.is_empty()));
                    for &(to, length) in &sends {
                        let [_, theirs] = exchanged(division, ranks, piece, to, round);
                        assert!(theirs.contains(&(rank, length)), "{division:?}: {rank} to {to} in {round}");
                        sent_to[to] += length;
                    }
                    for &(from, length) in &receives {
                        let [theirs, _] = exchanged(division, ranks, piece, from, round);
                        assert!(
                            theirs.contains(&(rank, length)),
                            "{division:?}: {rank} from {from} in {round}"
                        );
                    }
                }
            }
            let expected = (0..ranks).map(|rank| division.len(rank) * (ranks as i64 - 1));
            assert_eq!(sent_to, expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn pieces_of_a_part_that_is_shorter_than_others_end_earlier() {
        let division = Division { elements: 14, per_rank: 8 };
        let check = |round: usize, expected: &[(usize, Range<i64>)]| {
            assert_eq!(parts_of_round(division, 0..3, 4, round).collect::<Vec<_>>(), expected);
        };
        check(0, &[(0, 0..4), (1, 8..12)]);
        check(1, &[(0, 4..8), (1, 12..14)]);
        check(2, &[]);
    }
}
