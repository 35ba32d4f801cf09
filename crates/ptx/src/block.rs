//! A block: its warps in some order, its barriers, its shared memory.

use crate::counts::Counts;
use crate::error::FaultKind;
use crate::execute::Step;
use crate::kernel::{Kernel, Launch};
use crate::memory::{Memory, Region};
use crate::warp::{Grid, State, Warp};

/// The state that the warps of a block share.
pub(crate) struct Block<'k> {
    pub(crate) kernel: &'k Kernel,
    pub(crate) launch: Launch,
    pub(crate) arguments: &'k [u8],
    pub(crate) index: u32,
    pub(crate) shared: Region,
    /// Barriers that all threads have passed.
    pub(crate) epoch: u32,
}

/// A fault, at an instruction and a thread.
pub(crate) struct Found {
    pub(crate) instruction: usize,
    pub(crate) thread: u32,
    pub(crate) kind: FaultKind,
}

impl Block<'_> {
    /// Runs the block to its end.
    pub(crate) fn run(
        &mut self,
        warps: &mut [Warp],
        memory: &mut Memory,
        counts: &mut Counts,
        random: &mut Random,
    ) -> Result<(), Found> {
        let grid = Grid { blocks: self.launch.blocks, threads: self.launch.threads };
        let code = &self.kernel.code;
        for warp in warps.iter_mut() {
            warp.start(&code.registers, grid, self.index, code.instructions.len());
        }
        loop {
            let mut running = warps.iter_mut().filter(|warp| warp.state == State::Running);
            let count = running.by_ref().count();
            if count == 0 {
                if warps.iter().all(|warp| warp.state == State::Ended) {
                    return Ok(());
                }
                self.pass_barrier(warps, counts)?;
                continue;
            }
            let (chosen, burst) = random.choose(count);
            let warp = warps.iter_mut().filter(|warp| warp.state == State::Running).nth(chosen);
            let Some(warp) = warp else { continue };
            for _ in 0..burst {
                if warp.state != State::Running {
                    break;
                }
                Step { block: self, warp, memory, counts }.run()?;
            }
            let executed = counts.instructions();
            if executed > self.launch.limit {
                let kind = FaultKind::Endless { limit: self.launch.limit };
                let instruction = warp.next().map_or(0, |(at, _)| at);
                return Err(Found { instruction, thread: warp.index as u32 * 32, kind });
            }
        }
    }

    /// Every warp waits or has ended: lets them go on, if all wait at one place.
    fn pass_barrier(&mut self, warps: &mut [Warp], counts: &mut Counts) -> Result<(), Found> {
        let first = warps.iter().find_map(|warp| match warp.state {
            State::AtBarrier(at) => Some((at, warp.index as u32 * 32)),
            _ => None,
        });
        let Some((at, thread)) = first else { return Ok(()) };
        for warp in warps.iter() {
            let instead = match warp.state {
                State::AtBarrier(other) if other == at => continue,
                State::AtBarrier(other) => {
                    format!("waits at line {}", self.kernel.code.instructions[other].line)
                }
                _ => "has ended".to_owned(),
            };
            let kind = FaultKind::UnmetBarrier { warp: warp.index, instead };
            return Err(Found { instruction: at, thread, kind });
        }
        self.epoch += 1;
        counts.barriers += 1;
        for warp in warps {
            warp.state = State::Running;
        }
        Ok(())
    }
}

/// The order in which warps and blocks run, of a seed.
pub(crate) struct Random(u64);

impl Random {
    /// With seed 0 everything runs in order.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn draw(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below.max(1) as u64) as usize
    }

    /// Chooses a warp, and how many instructions it runs in a row.
    fn choose(&mut self, count: usize) -> (usize, usize) {
        const LONGEST: usize = 1 << 16;
        if self.0 == 0 { (0, LONGEST) } else { (self.draw(count), 1 + self.draw(64)) }
    }

    /// The order of some blocks.
    pub(crate) fn order(&mut self, count: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count).collect();
        if self.0 != 0 {
            for last in (1..order.len()).rev() {
                let other = self.draw(last + 1);
                order.swap(last, other);
            }
        }
        order
    }
}
