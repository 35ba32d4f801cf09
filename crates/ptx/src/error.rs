//! Errors: text that is not understood, a launch that does not fit, a fault of the kernel.

use std::fmt;

/// A failure of parsing, of a launch, or of the kernel that runs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The text is not PTX.
    #[error("line {line}: {message}")]
    Syntax {
        /// Line of the text, from 1.
        line: usize,
        /// The expected text.
        message: String,
    },
    /// PTX that this interpreter does not execute. It never skips an instruction.
    #[error("line {line}: `{text}` is not supported: {reason}")]
    Unsupported {
        /// Line of the text, from 1.
        line: usize,
        /// The statement.
        text: String,
        /// Which part of it.
        reason: String,
    },
    /// A name that the module does not have.
    #[error("the module has no kernel `{name}`; it has {}", .known.join(", "))]
    NoKernel {
        /// The name that was looked up.
        name: String,
        /// The kernels that there are.
        known: Vec<String>,
    },
    /// Arguments or sizes that do not fit the kernel.
    #[error("{kernel}: {message}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// The mismatch.
        message: String,
    },
    /// A buffer that is read on the host before a kernel has written all of it.
    #[error("buffer `{buffer}`: {missing} of {bytes} bytes were never written, the first at offset {first}")]
    Unwritten {
        /// The buffer's name.
        buffer: String,
        /// Bytes without a value.
        missing: usize,
        /// Size of the buffer.
        bytes: usize,
        /// Offset of the first byte without a value.
        first: usize,
    },
    /// The kernel did what it must not.
    #[error(transparent)]
    Fault(Box<Fault>),
}

/// A kernel's mistake, at the instruction and the thread that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The kernel's name in the PTX.
    pub kernel: String,
    /// Line of the PTX, from 1.
    pub line: usize,
    /// The statement.
    pub instruction: String,
    /// The block.
    pub block: u32,
    /// The thread in its block; the first one, where several are concerned.
    pub thread: u32,
    /// The kind of fault.
    pub kind: FaultKind,
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, line, instruction, block, thread, kind } = self;
        write!(out, "{kernel}, line {line} `{instruction}`, block {block}, thread {thread}: {kind}")
    }
}

impl std::error::Error for Fault {}

/// The kinds of mistakes that are noticed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FaultKind {
    /// An access outside of every buffer.
    #[error("{bytes} bytes at {place} are out of bounds")]
    OutOfBounds {
        /// Width of the access.
        bytes: usize,
        /// The address, seen from the nearest buffer.
        place: String,
    },
    /// An address that its access' width does not divide.
    #[error("{bytes} bytes at {place} are not aligned")]
    Misaligned {
        /// Width of the access.
        bytes: usize,
        /// The address.
        place: String,
    },
    /// A write to a buffer that was given as read-only.
    #[error("a write to {place}, which is read-only")]
    ReadOnly {
        /// The address.
        place: String,
    },
    /// Two asynchronous copies of a thread to one place, the second begun before the wait for the first: either may
    /// end last.
    #[error("a race: an asynchronous copy to {place} begins while another one to it is in flight")]
    CopiesOverlap {
        /// The address.
        place: String,
    },
    /// A read of memory that nothing has written.
    #[error("{place} is read, but was never written")]
    Uninitialised {
        /// The address.
        place: String,
    },
    /// An address, a branch, a mask or a store with a value that comes from a register which nothing has written.
    #[error("register {register} has no value: it, or what it was computed from, was never written")]
    UndefinedRegister {
        /// Its name in the PTX.
        register: String,
    },
    /// Two accesses that nothing orders, at least one of them a write.
    #[error("a race: {what} {place}; unordered with {earlier}")]
    Race {
        /// Reads or writes.
        what: &'static str,
        /// The address.
        place: String,
        /// The access before.
        earlier: String,
    },
    /// A barrier that only some threads of a warp reach.
    #[error("a barrier that lanes {missing:#010x} of the warp do not reach")]
    DivergentBarrier {
        /// The lanes that run elsewhere.
        missing: u32,
    },
    /// A barrier that waits for a warp that has ended or waits at another one.
    #[error("a barrier that warp {warp} does not reach: it {instead}")]
    UnmetBarrier {
        /// The other warp.
        warp: usize,
        /// The behaviour that was observed instead.
        instead: String,
    },
    /// An exchange between lanes whose mask is not the lanes that are there.
    #[error("the mask {mask:#010x} of an exchange between lanes: {problem}")]
    LaneMask {
        /// The mask.
        mask: u32,
        /// The problem.
        problem: String,
    },
    /// `bra.uni` with threads that disagree.
    #[error("a branch that is marked uniform diverges")]
    DivergentBranch,
    /// `trap`, which is how a kernel gives up.
    #[error("the kernel traps")]
    Trap,
    /// More instructions than the launch allows.
    #[error("{limit} instructions of warps were executed and the kernel has not ended")]
    Endless {
        /// The launch's limit.
        limit: u64,
    },
}
