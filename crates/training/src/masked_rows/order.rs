//! Which rows a batch has: those of packed rows, the order of an epoch, and the division of a step's rows by length.

use std::cmp::Reverse;
use std::ops::Range;

use dataloading::packing::{Algorithm, Assignment, LongDocuments};
use dataloading::permutation::Permutation;
use dataloading::{PackingConfig, PackingPlan};

use super::sizes::positions_of;
use super::{Arrangement, Grouping, Layout, MaskedBatches, MaskedRows, Mixture, refuse};
use crate::error::Result;

impl MaskedBatches {
    /// The units of the batch at a position; `None` after the last epoch.
    pub(super) fn numbers(&self, position: u64) -> Result<Option<Vec<usize>>> {
        let together = self.layout.by_length as u64;
        if together <= 1 || self.is_packed() {
            return Ok(self.in_order(position));
        }
        let first = position - position % together;
        let batches: Vec<_> =
            (first..first + together).map_while(|position| self.in_order(position)).collect();
        let at = (position - first) as usize;
        let Some(rows) = batches.get(at).map(Vec::len) else { return Ok(None) };
        let before: usize = batches[..at].iter().map(Vec::len).sum();
        let mut units = batches
            .concat()
            .into_iter()
            .map(|unit| Ok((Reverse(self.size_of(unit)?.0), unit)))
            .collect::<Result<Vec<_>>>()?;
        units.sort_by_key(|(length, _)| *length);
        let units: Vec<usize> = units.into_iter().map(|(_, unit)| unit).collect();
        Ok(Some(match self.layout.arrangement {
            Arrangement::PaddingFree => dealt(&units, batches.iter().map(Vec::len).collect(), at),
            Arrangement::Padded | Arrangement::Packed(_) => units[before..before + rows].to_vec(),
        }))
    }

    /// The units of the batch at a position, in the epoch's order; `None` after the last epoch.
    fn in_order(&self, position: u64) -> Option<Vec<usize>> {
        let (per_epoch, units) = (self.batches_per_epoch(), self.units() as u64);
        let (epoch, number) = (position / per_epoch, position % per_epoch);
        if self.layout.epochs.is_some_and(|epochs| epoch >= epochs) {
            return None;
        }
        let first = number * self.layout.batch as u64;
        let numbers = first..units.min(first + self.layout.batch as u64);
        Some(match &self.mixture {
            None => {
                let order = self.layout.shuffle.map(|seed| Permutation::new(units, seed, epoch, 0));
                let at = |number| order.as_ref().map_or(number, |order| order.at(number)) as usize;
                numbers.map(at).collect()
            }
            Some(mixture) => numbers.map(|number| self.mixed(mixture, epoch * units + number)).collect(),
        })
    }

    /// The unit at a position of a mixture, over all epochs.
    fn mixed(&self, mixture: &Mixture, position: u64) -> usize {
        let (source, number) = mixture.at(position);
        let units = self.units_of(source) as u64;
        let (epoch, at) = (number / units, number % units);
        // Stream 0 is that of data without a mixture.
        let order = self.layout.shuffle.map(|seed| Permutation::new(units, seed, epoch, source as u64 + 1));
        self.sources[source] + order.map_or(at, |order| order.at(at)) as usize
    }

    /// The units of a source.
    pub(super) fn units_of(&self, source: usize) -> usize {
        self.sources[source + 1] - self.sources[source]
    }

    /// The tokens of an epoch; of a mixture, the mean of a source's rows times their share.
    pub(super) fn tokens_of_epoch(&self) -> usize {
        let Some(mixture) = &self.mixture else { return self.tokens };
        let ((length, counts), units) = (mixture.period(), self.units());
        let of_source = |(source, (count, tokens)): (usize, (&u32, &usize))| {
            let share = f64::from(*count) / length as f64;
            share * units as f64 * *tokens as f64 / self.units_of(source) as f64
        };
        counts.iter().zip(&*self.tokens_of_sources).enumerate().map(of_source).sum::<f64>().round() as usize
    }
}

/// Deals units, the longest first, to batches of `sizes` units, from the first batch to the last and back in turn, so that the sums of their
/// lengths differ little. Returns those of batch `at`, the longest first.
fn dealt(units: &[usize], mut sizes: Vec<usize>, at: usize) -> Vec<usize> {
    let (mut own, mut units, mut forwards) = (Vec::with_capacity(sizes[at]), units.iter(), true);
    while sizes[at] > 0 {
        for turn in 0..sizes.len() {
            let batch = if forwards { turn } else { sizes.len() - 1 - turn };
            if sizes[batch] == 0 {
                continue;
            }
            sizes[batch] -= 1;
            let unit = units.next();
            if batch == at {
                own.extend(unit);
            }
        }
        forwards = !forwards;
    }
    own
}

/// The number of groups of rows before each source, and in all.
pub(super) fn units_of_groups(rows: &MaskedRows, grouping: Grouping) -> Vec<usize> {
    let groups = rows.sources().map(|rows| rows / grouping.rows());
    std::iter::once(0)
        .chain(groups.scan(0, |sum, groups| {
            *sum += groups;
            Some(*sum)
        }))
        .collect()
}

/// Decides which groups of rows share a packed row, if rows are packed; groups of several sources do not. Returns also the number of units
/// before each source, and in all.
pub(super) fn packed(rows: &MaskedRows, layout: &Layout) -> Result<(Option<Assignment>, Vec<usize>)> {
    let groups = units_of_groups(rows, layout.grouping);
    let Some(capacity) = layout.arrangement.capacity() else { return Ok((None, groups)) };
    let options = PackingConfig { capacity, algorithm: Algorithm::default(), long: LongDocuments::Drop };
    let mut all = Assignment { pieces: Vec::new(), offsets: vec![0] };
    let mut sources = vec![0];
    for source in groups.windows(2) {
        if source[0] == source[1] {
            sources.push(all.offsets.len() - 1);
            continue;
        }
        let lengths = lengths(rows, layout.grouping, (source[0]..source[1], capacity))?;
        let own = PackingPlan::new(&lengths, &options)?.assignment();
        let before = all.pieces.len() as u32;
        all.pieces.extend(own.pieces.iter().map(|piece| piece + source[0] as u32));
        all.offsets.extend(own.offsets[1..].iter().map(|offset| offset + before));
        sources.push(all.offsets.len() - 1);
    }
    Ok((Some(all), sources))
}

/// The positions of groups of rows.
fn lengths(
    rows: &MaskedRows,
    grouping: Grouping,
    (groups, capacity): (Range<usize>, usize),
) -> Result<Vec<u32>> {
    let mut lengths = Vec::with_capacity(groups.len());
    for group in groups {
        let mut positions = 0;
        for row in group * grouping.rows()..(group + 1) * grouping.rows() {
            positions += positions_of(rows.size(row)?);
        }
        if positions > capacity {
            let what = match grouping {
                Grouping::Rows | Grouping::Rated => "row",
                Grouping::Pairs { .. } => "pair",
            };
            return Err(refuse(format!(
                "{what} {group} has {positions} positions, but packed rows have {capacity}; use longer packed rows, or leave such {what}s out"
            )));
        }
        lengths.push(positions as u32);
    }
    Ok(lengths)
}
