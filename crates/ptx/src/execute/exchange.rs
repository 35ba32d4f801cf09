//! Exchanges between the lanes of a warp, which must all be there.

use super::{Faulted, Step};
use crate::arithmetic::lanes;
use crate::error::FaultKind;
use crate::instruction::{Register, Shuffle, Vote};
use crate::warp::lanes_of;

impl Step<'_, '_> {
    pub(super) fn shuffle(
        &mut self,
        (mode, to, valid): (Shuffle, Register, Option<Register>),
        [value, by, clamp]: [Register; 3],
        named: Register,
        mask: u32,
    ) -> Faulted {
        for register in [by, clamp] {
            self.need_defined(register, mask)?;
        }
        self.named_lanes(named, mask)?;
        let (values, by, clamp) =
            (*self.warp.register(value), *self.warp.register(by), *self.warp.register(clamp));
        let sources: Vec<(usize, bool)> =
            (0..32).map(|lane| source(mode, lane, by[lane] as usize, clamp[lane] as usize)).collect();
        for lane in lanes_of(mask) {
            let (from, _) = sources[lane];
            if mask >> from & 1 == 0 {
                let problem = format!("lane {from}, which this one reads, is not there");
                return Err((lane as u32, FaultKind::LaneMask { mask, problem }));
            }
        }
        let known = self.warp.defined(value);
        let defined = lanes_of(mask).fold(0, |all, lane| all | (known >> sources[lane].0 & 1) << lane);
        self.warp.set_where_defined(to, mask, &lanes(|lane| values[sources[lane].0]), defined);
        if let Some(valid) = valid {
            self.warp.set(valid, mask, &lanes(|lane| sources[lane].1.into()));
        }
        Ok(())
    }

    pub(super) fn vote(
        &mut self,
        mode: Vote,
        to: Register,
        predicate: Register,
        named: Register,
        mask: u32,
    ) -> Faulted {
        self.need_defined(predicate, mask)?;
        self.named_lanes(named, mask)?;
        let values = self.warp.register(predicate);
        let ballot = lanes_of(mask).fold(0, |all, lane| all | u32::from(values[lane] != 0) << lane);
        let result = match mode {
            Vote::All => (ballot == mask).into(),
            Vote::Any => (ballot != 0).into(),
            Vote::Uniform => (ballot == 0 || ballot == mask).into(),
            Vote::Ballot => ballot.into(),
        };
        self.warp.set(to, mask, &[result; 32]);
        Ok(())
    }

    /// Refuses a mask that is not that of the lanes which run.
    pub(super) fn named_lanes(&self, named: Register, mask: u32) -> Faulted {
        self.need_defined(named, mask)?;
        let names = self.warp.register(named);
        for lane in lanes_of(mask) {
            let named = names[lane] as u32;
            let fault = |problem| Err((lane as u32, FaultKind::LaneMask { mask: named, problem }));
            if named >> lane & 1 == 0 {
                return fault(format!("lane {lane} runs it and is not in the mask"));
            }
            if named & !mask != 0 {
                return fault(format!("lanes {:#010x} are in it and do not run", named & !mask));
            }
        }
        Ok(())
    }
}

/// The lane that a lane reads, and whether it is in its segment; the arithmetic is that of the PTX manual.
fn source(mode: Shuffle, lane: usize, by: usize, clamp: usize) -> (usize, bool) {
    let (by, bound, segment) = (by & 31, clamp & 31, clamp >> 8 & 31);
    let most = lane & segment | bound & !segment;
    let least = lane & segment;
    let (from, valid) = match mode {
        Shuffle::Up => (lane.wrapping_sub(by), lane >= by && lane - by >= most),
        Shuffle::Down => (lane + by, lane + by <= most),
        Shuffle::Butterfly => (lane ^ by, lane ^ by <= most),
        Shuffle::Index => {
            let from = least | by & !segment;
            (from, from <= most)
        }
    };
    if valid { (from, true) } else { (lane, false) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_of_shuffles() {
        let all = |mode, by, clamp| (0..32).map(|lane| source(mode, lane, by, clamp)).collect::<Vec<_>>();
        assert_eq!(all(Shuffle::Butterfly, 5, 31)[3], (6, true));
        assert_eq!(all(Shuffle::Down, 4, 31)[27..29], [(31, true), (28, false)]);
        assert_eq!(all(Shuffle::Up, 4, 0)[3..5], [(3, false), (0, true)]);
        assert_eq!(all(Shuffle::Index, 9, 31)[30], (9, true));
        // Segments of 8 lanes.
        let clamp = 24 << 8 | 31;
        assert_eq!(all(Shuffle::Index, 1, clamp)[17], (17, true));
        assert_eq!(all(Shuffle::Down, 1, clamp)[6..8], [(7, true), (7, false)]);
    }
}
