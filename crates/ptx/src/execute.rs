//! Executes an instruction of a warp.

mod access;
mod copies;
mod exchange;

use crate::arithmetic::lanes;
use crate::block::{Block, Found};
use crate::counts::Counts;
use crate::error::FaultKind;
use crate::float::moved;
use crate::instruction::{Instruction, Operation, Register};
use crate::memory::Memory;
use crate::scalar::truncate;
use crate::warp::{State, Warp, lanes_of};

/// A warp of a block that runs its next instruction.
pub(crate) struct Step<'s, 'k> {
    pub(crate) block: &'s mut Block<'k>,
    pub(crate) warp: &'s mut Warp,
    pub(crate) memory: &'s mut Memory,
    pub(crate) counts: &'s mut Counts,
}

/// A fault, and the lane that it is of.
type Faulted = Result<(), (u32, FaultKind)>;

impl Step<'_, '_> {
    pub(crate) fn run(mut self) -> Result<(), Found> {
        let Some((at, lanes)) = self.warp.next() else { return Ok(()) };
        let kernel = self.block.kernel;
        let instruction = &kernel.code.instructions[at];
        self.counts.of_class[instruction.class as usize] += 1;
        self.instruction(at, instruction, lanes).map_err(|(lane, kind)| Found {
            instruction: at,
            thread: self.warp.index as u32 * 32 + lane,
            kind,
        })
    }

    /// The running lanes that the guard of an instruction lets execute it.
    fn guarded(&self, instruction: &Instruction, running: u32) -> Result<u32, (u32, FaultKind)> {
        let Some((register, negated)) = instruction.guard else { return Ok(running) };
        self.need_defined(register, running)?;
        let predicate = self.warp.register(register);
        let passes = |lane: usize| (predicate[lane] != 0) != negated;
        Ok(lanes_of(running).fold(0, |mask, lane| mask | u32::from(passes(lane)) << lane))
    }

    fn instruction(&mut self, at: usize, instruction: &Instruction, running: u32) -> Faulted {
        let mask = self.guarded(instruction, running)?;
        // Branches first: lanes whose guard fails take the other path.
        if let Operation::Branch { target, uniform } = instruction.operation {
            if mask != 0 && mask != running {
                if uniform {
                    return Err((mask.trailing_zeros(), FaultKind::DivergentBranch));
                }
                self.counts.divergent_branches += 1;
            }
            self.warp.branch(mask, target, at + 1, instruction.reconvergence);
            return Ok(());
        }
        // Other instructions run in the lanes whose guard holds.
        self.warp.go_to(at + 1);
        if mask == 0 {
            return Ok(());
        }
        // An arm for each operation: registers, parameters, copies and memory, exchanges between lanes, control.
        let first = mask.trailing_zeros();
        match &instruction.operation {
            Operation::Compute { to, inputs, count, compute, approximate } => {
                let known = |all, input: &Register| all & self.warp.defined(*input);
                let defined = inputs[..*count].iter().fold(u32::MAX, known);
                let mut value = compute(inputs.map(|input| self.warp.register(input)));
                let most = self.block.launch.approximation_error;
                if *approximate && most > 0 {
                    value = value.map(|bits| moved(bits, most));
                }
                self.warp.set_where_defined(*to, mask, &value, defined);
            }
            Operation::Move { to, from } => {
                let (value, defined) = (*self.warp.register(*from), self.warp.defined(*from));
                self.warp.set_where_defined(*to, mask, &value, defined);
            }
            Operation::Select { to, a, b, condition: of_condition } => {
                let (a_value, b_value) = (self.warp.register(*a), self.warp.register(*b));
                let condition = self.warp.register(*of_condition);
                let value = lanes(|lane| if condition[lane] != 0 { a_value[lane] } else { b_value[lane] });
                let chosen =
                    lanes_of(mask).fold(0, |all, lane| all | u32::from(condition[lane] != 0) << lane);
                let defined = self.warp.defined(*a) & chosen | self.warp.defined(*b) & !chosen;
                let defined = defined & self.warp.defined(*of_condition);
                self.warp.set_where_defined(*to, mask, &value, defined);
            }
            Operation::Pack { to, parts, bytes } => {
                let mut defined = u32::MAX;
                let mut value = [0; 32];
                for (index, part) in parts.iter().enumerate() {
                    defined &= self.warp.defined(*part);
                    let part = self.warp.register(*part);
                    value = lanes(|lane| value[lane] | truncate(part[lane], *bytes) << (8 * bytes * index));
                }
                self.warp.set_where_defined(*to, mask, &value, defined);
            }
            Operation::Unpack { parts, from, bytes } => {
                let (value, defined) = (*self.warp.register(*from), self.warp.defined(*from));
                for (index, part) in parts.iter().enumerate() {
                    let part_value = value.map(|bits| truncate(bits >> (8 * bytes * index), *bytes));
                    self.warp.set_where_defined(*part, mask, &part_value, defined);
                }
            }
            Operation::Parameter { to, address, offset, scalar } => {
                self.parameter(*to, *address, *offset, *scalar, mask)?;
            }
            Operation::CopyAsync { to, from } => self.begin_copies(at, to, from, mask)?,
            Operation::CommitCopies => self.warp.commit_copies(mask),
            Operation::WaitForCopies { most } => self.end_copies(at, *most, mask)?,
            Operation::Load { access, to } => self.load(at, access, to, mask)?,
            Operation::Store { access, from } => self.store(at, access, from, mask)?,
            Operation::Shuffle { mode, to, valid, value, by, clamp, mask: named } => {
                self.shuffle((*mode, *to, *valid), [*value, *by, *clamp], *named, mask)?;
            }
            Operation::Vote { mode, to, predicate, mask: named } => {
                self.vote(*mode, *to, *predicate, *named, mask)?;
            }
            Operation::ActiveMask { to } => self.warp.set(*to, mask, &[running.into(); 32]),
            Operation::Branch { .. } => {}
            Operation::Exit => self.warp.exit(mask),
            Operation::Trap => return Err((first, FaultKind::Trap)),
            Operation::Barrier => {
                let missing = self.warp.live() & !mask;
                if missing != 0 {
                    return Err((first, FaultKind::DivergentBarrier { missing }));
                }
                self.warp.state = State::AtBarrier(at);
            }
            Operation::WarpBarrier { mask: named } => {
                self.named_lanes(*named, mask)?;
                let missing = self.warp.live() & !mask;
                if missing != 0 {
                    let problem = format!("lanes {missing:#010x} are not among them, which is not supported");
                    return Err((first, FaultKind::LaneMask { mask, problem }));
                }
                self.warp.epoch += 1;
            }
            Operation::Fence => {}
        }
        Ok(())
    }

    /// Refuses to go by what has no value: in an address, a branch, a mask, a store. Computations pass its absence on, since a
    /// compiler may compute ahead what is then not used.
    fn need_defined(&self, register: Register, mask: u32) -> Faulted {
        let missing = mask & !self.warp.defined(register);
        if missing == 0 {
            return Ok(());
        }
        let register = self.block.kernel.code.registers.name(register).to_owned();
        Err((missing.trailing_zeros(), FaultKind::UndefinedRegister { register }))
    }
}
