//! Data-parallel ranks in the training loop.
//!
//! The micro-batches of a step are numbered over all ranks, and rank r of N computes those with number mod N = r. Every rank reads
//! all of them: then the position in the data and the loss's denominator need no communication, and a checkpoint does not know N.
//! A micro-batch draws its random numbers (dropout) from a seed of its own, and losses are added in the order of the micro-batches,
//! so that no bit depends on N. If passes communicate, a rank without a micro-batch in the last round runs one whose gradients are
//! none.

use std::sync::atomic::Ordering;
use std::time::Duration;

use runtime::collectives::{Group, ReduceConfig};
use runtime::random;
use tch::{Device, Kind, Tensor};

use super::{Timings, Trainer, timed};
use crate::accumulation::MicroBatches;
use crate::error::Result;
use crate::split_mix::split_mix;

/// This rank's share of a step.
pub(super) struct Share {
    group: Group,
    /// Seed of the step's random numbers, the same on every rank.
    seed: u64,
    /// Micro-batches of the step.
    count: usize,
    /// Whether all ranks run in each round.
    together: bool,
}

/// Whose a micro-batch is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// This rank's.
    Own,
    /// Another rank's, which this one runs as well, because it has none in this round.
    Idle,
    /// Another rank's.
    Other,
}

/// The requests to a training before a step, the same on every rank.
pub(super) struct Requests {
    /// To end.
    pub(super) stop: bool,
    /// To write a checkpoint after the step.
    pub(super) save: bool,
}

/// Whether this rank has no batch in the last round, if the last batch is number `last`.
pub(crate) fn idles(group: &Group, last: usize) -> bool {
    group.rank() > last % group.size()
}

impl Share {
    /// Starts a micro-batch: returns whose it is.
    pub(super) fn begin(&self, number: usize) -> Result<Owner> {
        let owner = if number % self.group.size() == self.group.rank() {
            Owner::Own
        } else if self.together && number + 1 == self.count && idles(&self.group, number) {
            Owner::Idle
        } else {
            return Ok(Owner::Other);
        };
        random::seed(split_mix(self.seed, number as u64 + 1))?;
        Ok(owner)
    }

    /// Ends the step's micro-batches: returns the losses of all ranks, and leaves the random generators in the same state on each.
    pub(super) fn end(&self, sums: &[Tensor]) -> Result<Vec<Tensor>> {
        random::seed(split_mix(self.seed, 0))?;
        // Each micro-batch is one rank's, and zeros on the others: a sum is exact.
        let all = Tensor::f_stack(sums, 0)?.f_to_device(Device::Cpu)?.f_contiguous()?;
        self.group.all_reduce(&all, ReduceConfig::default(), "losses")?;
        let all = all.f_to_device(sums[0].device())?;
        (0..sums.len() as i64).map(|number| Ok(all.f_select(0, number)?)).collect()
    }
}

impl Trainer {
    /// Returns this rank's share of a step of `count` micro-batches; `None` for one process alone.
    pub(super) fn share(&self, count: usize) -> Result<Option<Share>> {
        let Some(group) = self.optimizer.ranks() else { return Ok(None) };
        let seed =
            Tensor::f_randint_low(0, i64::MAX, [1], (Kind::Int64, Device::Cpu))?.f_int64_value(&[0])?;
        let (seed, together) = (seed.cast_unsigned(), self.optimizer.passes_communicate());
        Ok(Some(Share { group, seed, count, together }))
    }

    /// Reduces the gradients if micro-batch `number` ends a round.
    pub(super) fn reduce(
        &mut self,
        share: Option<&Share>,
        number: usize,
        micro: &MicroBatches,
        timings: &mut Timings,
    ) -> Result<()> {
        let ends = |share: &Share| {
            (number + 1).is_multiple_of(share.group.size()) || number + 1 == micro.batches.len()
        };
        match share {
            Some(share) if ends(share) => timed("reduce", &mut timings.backward, || self.optimizer.reduce()),
            _ => Ok(()),
        }
    }

    /// Returns whether any rank has been asked to stop, and whether the interval between checkpoints is over by the clock of rank 0:
    /// by clocks of their own, ranks would not agree on the step.
    pub(super) fn requests(&self) -> Result<Requests> {
        let is_over = |interval: Duration| self.saved_at.elapsed() >= interval;
        let decides = self.optimizer.ranks().is_none_or(|group| group.rank() == 0);
        let save = decides && self.options.checkpoint_interval.is_some_and(is_over);
        let [stop, save] = self.any_rank([self.stop.load(Ordering::Relaxed), save], "requests")?;
        Ok(Requests { stop, save })
    }

    /// Returns which of `own` are true on any rank.
    pub(super) fn any_rank<const N: usize>(&self, own: [bool; N], label: &str) -> Result<[bool; N]> {
        let Some(group) = self.optimizer.ranks() else { return Ok(own) };
        let flags = Tensor::f_from_slice(&own.map(i64::from))?;
        group.all_reduce(&flags, ReduceConfig::default(), label)?;
        let flags = Vec::<i64>::try_from(&flags)?;
        Ok(std::array::from_fn(|index| flags[index] > 0))
    }
}
