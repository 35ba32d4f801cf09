//! Data-parallel ranks in the training loop.
//!
//! The micro-batches of a step are numbered over all ranks, which take [turns](crate::ranks). Every rank reads
//! all of them: then the position in the data and the loss's denominator need no communication, and a checkpoint does not know N.
//! A micro-batch draws its random numbers (dropout) from a seed of its own, and losses are added in the order of the micro-batches,
//! so that no bit depends on N. If passes communicate, a rank without a micro-batch in the last round runs one whose gradients are
//! none.

use std::sync::atomic::Ordering;
use std::time::Duration;

use runtime::collectives::{Group, ReduceConfig};
use runtime::random::{self, begin_step_part};
use tch::{Device, Kind, Tensor};

use super::{Timings, Trainer, timed};
use crate::accumulation::MicroBatches;
use crate::error::Result;
use crate::ranks::Ranks;
use crate::split_mix::split_mix;

/// This rank's share of a step.
pub(super) struct Share {
    ranks: Ranks,
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

impl Share {
    /// Returns the ranks that divide each row; `None` if each takes whole rows.
    pub(super) fn sequence(&self) -> Option<&Group> {
        self.ranks.sequence()
    }

    /// Returns whose a micro-batch is.
    pub(super) fn owner(&self, number: usize) -> Owner {
        if self.ranks.takes(number) {
            Owner::Own
        } else if self.together && number + 1 == self.count && self.ranks.idles(number) {
            Owner::Idle
        } else {
            Owner::Other
        }
    }

    /// Starts a micro-batch: returns whose it is.
    pub(super) fn begin(&self, number: usize) -> Result<Owner> {
        let owner = self.owner(number);
        if owner == Owner::Other {
            return Ok(owner);
        }
        // Ranks with parts of one row draw different numbers.
        let part = self.ranks.part() as u64;
        let seed = if part == 0 { self.seed } else { split_mix(self.seed, part.reverse_bits()) };
        random::seed(split_mix(seed, number as u64 + 1))?;
        begin_step_part((number * self.ranks.parts()) as u64 + part);
        Ok(owner)
    }

    /// Ends the step's micro-batches: returns the losses of all ranks, and leaves the random generators in the same state on each.
    pub(super) fn end(&self, sums: &[Tensor]) -> Result<Vec<Tensor>> {
        random::seed(split_mix(self.seed, 0))?;
        let all = self.sum(&Tensor::f_stack(sums, 0)?, "losses")?;
        (0..sums.len() as i64).map(|number| Ok(all.f_select(0, number)?)).collect()
    }

    /// Returns the values of all micro-batches, along the first dimension: each has those of one rank or one group, and zeros on the others.
    pub(super) fn sum(&self, values: &Tensor, label: &str) -> Result<Tensor> {
        let all = values.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
        self.ranks.all().all_reduce(&all, ReduceConfig::default(), label)?;
        Ok(all.f_to_device(values.device())?)
    }
}

impl Trainer {
    /// Returns this rank's share of a step of `count` micro-batches; `None` for one process alone.
    pub(super) fn share(&self, count: usize) -> Result<Option<Share>> {
        let Some(ranks) = self.optimizer.ranks() else { return Ok(None) };
        let seed =
            Tensor::f_randint_low(0, i64::MAX, [1], (Kind::Int64, Device::Cpu))?.f_int64_value(&[0])?;
        let (seed, together) = (seed.cast_unsigned(), self.optimizer.passes_communicate());
        Ok(Some(Share { ranks, seed, count, together }))
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
            (number + 1).is_multiple_of(share.ranks.turns()) || number + 1 == micro.batches.len()
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
        let decides = self.optimizer.ranks().is_none_or(|ranks| ranks.all().rank() == 0);
        let save = decides && self.options.checkpoint_interval.is_some_and(is_over);
        let [stop, save] = self.any_rank([self.stop.load(Ordering::Relaxed), save], "requests")?;
        Ok(Requests { stop, save })
    }

    /// Returns which of `own` are true on any rank.
    pub(super) fn any_rank<const N: usize>(&self, own: [bool; N], label: &str) -> Result<[bool; N]> {
        let Some(ranks) = self.optimizer.ranks() else { return Ok(own) };
        let flags = Tensor::f_from_slice(&own.map(i64::from))?;
        ranks.all().all_reduce(&flags, ReduceConfig::default(), label)?;
        let flags = Vec::<i64>::try_from(&flags)?;
        Ok(std::array::from_fn(|index| flags[index] > 0))
    }
}
