//! A warp: the registers of its 32 lanes, and which of them run where.
//!
//! Lanes that disagree on a branch run one side after the other and meet where the paths meet ([`crate::control_flow`]). That is a
//! stack of frames; the top one runs.

use crate::arithmetic::{Lanes, lanes};
use crate::decode::{Fixed, Registers, Special};
use crate::instruction::Register;

/// Lanes that run together.
#[derive(Debug, Clone, Copy)]
struct Frame {
    at: usize,
    /// Where they wait for those of the frame below.
    until: usize,
    lanes: u32,
}

/// A copy to shared memory that is on its way.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) place: usize,
    pub(crate) data: Vec<u8>,
}

/// Copies of a lane: those of no group yet, and the groups.
#[derive(Debug, Default)]
struct Copies {
    open: Vec<Pending>,
    groups: Vec<Vec<Pending>>,
}

/// The state of a warp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    /// Waits for the block at this instruction.
    AtBarrier(usize),
    Ended,
}

pub(crate) struct Warp {
    pub(crate) index: usize,
    pub(crate) state: State,
    /// Barriers of the warp that it has passed.
    pub(crate) epoch: u16,
    frames: Vec<Frame>,
    /// For each lane, its copies in flight.
    copies: Vec<Copies>,
    registers: Vec<Lanes>,
    /// For each register, the lanes in which it has a value.
    defined: Vec<u32>,
}

/// A launch's grid, as threads see it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
}

impl Warp {
    pub(crate) fn new(index: usize, registers: &Registers) -> Self {
        let count = registers.count();
        Self {
            index,
            state: State::Ended,
            epoch: 0,
            frames: Vec::new(),
            copies: (0..32).map(|_| Copies::default()).collect(),
            registers: vec![[0; 32]; count],
            defined: vec![0; count],
        }
    }

    /// Begins a block.
    pub(crate) fn start(&mut self, registers: &Registers, grid: Grid, block: u32, end: usize) {
        let first = self.index as u32 * 32;
        let present = grid.threads.saturating_sub(first).min(32);
        let all = if present == 32 { u32::MAX } else { (1 << present) - 1 };
        self.copies.fill_with(Copies::default);
        self.frames.clear();
        self.frames.push(Frame { at: 0, until: end, lanes: all });
        (self.state, self.epoch) = (State::Running, 0);
        self.defined[..registers.declared()].fill(0);
        for (index, fixed) in registers.fixed().iter().enumerate() {
            let register = registers.declared() + index;
            self.defined[register] = u32::MAX;
            self.registers[register] = lanes(|lane| match *fixed {
                Fixed::Constant(bits) => bits,
                Fixed::Special(special) => match special {
                    Special::Thread => u64::from(first) + lane as u64,
                    Special::Threads => grid.threads.into(),
                    Special::Block => block.into(),
                    Special::Blocks => grid.blocks.into(),
                    Special::Lane => lane as u64,
                    Special::Warp => self.index as u64,
                    Special::Fixed(bits) => bits,
                    Special::LaneMask(mask) => mask(lane as u32).into(),
                },
            });
        }
    }

    /// The next instruction and the lanes that run it; `None` at the end.
    pub(crate) fn next(&mut self) -> Option<(usize, u32)> {
        while let Some(frame) = self.frames.last() {
            if frame.lanes != 0 && frame.at != frame.until {
                return Some((frame.at, frame.lanes));
            }
            if self.frames.len() == 1 && frame.lanes != 0 {
                // The text's end is the end of the kernel.
                self.frames.clear();
                break;
            }
            self.frames.pop();
        }
        self.state = State::Ended;
        None
    }

    /// False, and nothing is begun, where another copy of the lane to the place is on its way.
    pub(crate) fn begin_copy(&mut self, lane: usize, copy: Pending) -> bool {
        let Copies { open, groups } = &mut self.copies[lane];
        let overlaps = |other: &Pending| {
            copy.place < other.place + other.data.len() && other.place < copy.place + copy.data.len()
        };
        let sound = !groups.iter().flatten().chain(open.iter()).any(overlaps);
        if sound {
            open.push(copy);
        }
        sound
    }

    pub(crate) fn commit_copies(&mut self, mask: u32) {
        for lane in lanes_of(mask) {
            let Copies { open, groups } = &mut self.copies[lane];
            groups.push(std::mem::take(open));
        }
    }

    /// Takes the copies of all groups but the last `most`; of `None`, all copies.
    pub(crate) fn finished_copies(&mut self, lane: usize, most: Option<usize>) -> Vec<Pending> {
        let Copies { open, groups } = &mut self.copies[lane];
        let finished = groups.len().saturating_sub(most.unwrap_or(0));
        let mut copies: Vec<Pending> = groups.drain(..finished).flatten().collect();
        if most.is_none() {
            copies.append(open);
        }
        copies
    }

    /// Lanes that have not ended.
    pub(crate) fn live(&self) -> u32 {
        self.frames.iter().fold(0, |all, frame| all | frame.lanes)
    }

    pub(crate) fn go_to(&mut self, at: usize) {
        if let Some(frame) = self.frames.last_mut() {
            frame.at = at;
        }
    }

    /// Goes on with the lanes that branch, and those that do not; both meet at `meet`.
    pub(crate) fn branch(&mut self, taken: u32, target: usize, next: usize, meet: usize) {
        let Some(frame) = self.frames.last_mut() else { return };
        let stay = frame.lanes & !taken;
        match (taken, stay) {
            (0, _) => frame.at = next,
            (_, 0) => frame.at = target,
            _ => {
                frame.at = meet;
                for (at, lanes) in [(next, stay), (target, taken)] {
                    if at != meet {
                        self.frames.push(Frame { at, until: meet, lanes });
                    }
                }
            }
        }
    }

    /// Ends these lanes.
    pub(crate) fn exit(&mut self, lanes: u32) {
        for frame in &mut self.frames {
            frame.lanes &= !lanes;
        }
    }

    pub(crate) fn register(&self, register: Register) -> &Lanes {
        &self.registers[register as usize]
    }

    /// The lanes in which a register has a value.
    pub(crate) fn defined(&self, register: Register) -> u32 {
        self.defined[register as usize]
    }

    pub(crate) fn set(&mut self, register: Register, mask: u32, value: &Lanes) {
        let to = &mut self.registers[register as usize];
        if mask == u32::MAX {
            *to = *value;
        } else {
            for (lane, to) in to.iter_mut().enumerate() {
                if mask >> lane & 1 == 1 {
                    *to = value[lane];
                }
            }
        }
        self.defined[register as usize] |= mask;
    }

    /// The same with values that may be missing in some of the lanes.
    pub(crate) fn set_where_defined(&mut self, register: Register, mask: u32, value: &Lanes, defined: u32) {
        self.set(register, mask, value);
        self.defined[register as usize] &= defined | !mask;
    }
}

/// The numbers of the lanes in a mask.
pub(crate) fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| mask >> lane & 1 == 1)
}
