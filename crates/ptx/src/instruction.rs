//! Instructions as they are executed: operands are numbers of registers, constants among them.

use crate::arithmetic::Compute;
use crate::scalar::Scalar;

/// The number of a register.
pub(crate) type Register = u32;

/// An instruction, and where it stands.
pub(crate) struct Instruction {
    pub(crate) line: usize,
    pub(crate) text: String,
    /// The predicate without which a lane does nothing, and whether it is negated.
    pub(crate) guard: Option<(Register, bool)>,
    pub(crate) operation: Operation,
    pub(crate) class: Class,
    /// Where the lanes of a branch that disagree meet again.
    pub(crate) reconvergence: usize,
}

/// The operation of an instruction.
pub(crate) enum Operation {
    /// `to = f(inputs)`; `count` of them are used.
    Compute {
        to: Register,
        inputs: [Register; 4],
        count: usize,
        compute: Compute,
        approximate: bool,
    },
    /// Copies, with what is known of the value.
    Move {
        to: Register,
        from: Register,
    },
    /// A value that is built of narrower ones, the first in the low bits.
    Pack {
        to: Register,
        parts: Vec<Register>,
        bytes: usize,
    },
    Unpack {
        parts: Vec<Register>,
        from: Register,
        bytes: usize,
    },
    /// `to = condition ? a : b`.
    Select {
        to: Register,
        a: Register,
        b: Register,
        condition: Register,
    },
    /// A launch's argument, or a part of it.
    Parameter {
        to: Register,
        address: Option<Register>,
        offset: i64,
        scalar: Scalar,
    },
    /// Begins a copy from global to shared memory.
    CopyAsync {
        to: Access,
        from: Access,
    },
    /// Makes the copies that were begun since the last time a group.
    CommitCopies,
    /// Waits until at most so many groups are on their way; of `None`, until no copy is.
    WaitForCopies {
        most: Option<usize>,
    },
    Load {
        access: Access,
        to: Vec<Register>,
    },
    Store {
        access: Access,
        from: Vec<Register>,
    },
    Shuffle {
        mode: Shuffle,
        to: Register,
        valid: Option<Register>,
        value: Register,
        by: Register,
        clamp: Register,
        mask: Register,
    },
    Vote {
        mode: Vote,
        to: Register,
        predicate: Register,
        mask: Register,
    },
    /// The lanes that run.
    ActiveMask {
        to: Register,
    },
    Branch {
        target: usize,
        uniform: bool,
    },
    Exit,
    Trap,
    /// Waits for all threads of the block.
    Barrier,
    /// Waits for the lanes of a mask.
    WarpBarrier {
        mask: Register,
    },
    /// Orders memory for others; no order between threads follows from it alone.
    Fence,
}

/// Where a load or store goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) scalar: Scalar,
    pub(crate) address: Register,
    pub(crate) offset: i64,
    /// Through the cache that does not see writes: nobody may write there during the kernel.
    pub(crate) non_coherent: bool,
}

/// The memory of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
    /// Whichever the address is of.
    Generic,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// The part of a processor that an instruction occupies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// fp32 additions, products and their combinations.
    Float,
    /// fp64.
    Double,
    /// Integers, logic, comparisons, choices and copies.
    Integer,
    /// Conversions between types.
    Convert,
    /// The special functions, and what is built on them: divisions, roots.
    Special,
    /// Accesses to global memory.
    Global,
    /// Accesses to shared memory.
    Shared,
    /// Exchanges between the lanes of a warp.
    Shuffle,
    /// Branches, barriers, arguments.
    Control,
}

impl Class {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Float,
        Self::Double,
        Self::Integer,
        Self::Convert,
        Self::Special,
        Self::Global,
        Self::Shared,
        Self::Shuffle,
        Self::Control,
    ];
}
