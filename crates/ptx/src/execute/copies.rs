//! Asynchronous copies from global to shared memory.
//!
//! The target of a copy has no value from its beginning to the end of the wait for its group, so a read in between is an
//! error. So is another copy of the thread to the target before the wait: either may end last. At both ends the copy is a write of
//! its thread: other threads need a barrier before they touch the target.

use super::{Faulted, Step};
use crate::error::FaultKind;
use crate::instruction::Access;
use crate::warp::{Pending, lanes_of};

impl Step<'_, '_> {
    pub(super) fn begin_copies(&mut self, at: usize, to: &Access, from: &Access, mask: u32) -> Faulted {
        let bytes = to.scalar.bytes();
        let (places, sources) = (self.addresses(to, bytes, mask)?, self.addresses(from, bytes, mask)?);
        for ((lane, place), source) in lanes_of(mask).zip(places).zip(sources) {
            let who = self.who(at, lane);
            let instructions = &self.block.kernel.code.instructions;
            let lines = |instruction: u32| instructions[instruction as usize].line;
            let fault = |kind: FaultKind| (lane as u32, kind);
            let (region, offset) = self.memory.find(source, bytes).map_err(fault)?;
            let data = region.load((offset, bytes), from, who, &lines).map_err(fault)?.to_vec();
            if !self.block.shared.has(place, bytes) {
                let place = self.block.shared.place(place);
                return Err(fault(FaultKind::OutOfBounds { bytes, place }));
            }
            let place = place as usize;
            self.block.shared.store(place, &data, who, &lines).map_err(fault)?;
            self.block.shared.forget(place, bytes);
            if !self.warp.begin_copy(lane, Pending { place, data }) {
                let place = self.block.shared.place(place as u64);
                return Err(fault(FaultKind::CopiesOverlap { place }));
            }
        }
        Ok(())
    }

    pub(super) fn end_copies(&mut self, at: usize, most: Option<usize>, mask: u32) -> Faulted {
        for lane in lanes_of(mask) {
            for Pending { place, data } in self.warp.finished_copies(lane, most) {
                let who = self.who(at, lane);
                let instructions = &self.block.kernel.code.instructions;
                let lines = |instruction: u32| instructions[instruction as usize].line;
                let stored = self.block.shared.store(place, &data, who, &lines);
                stored.map_err(|kind| (lane as u32, kind))?;
            }
        }
        Ok(())
    }
}
