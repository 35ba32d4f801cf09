//! Which accesses nothing orders.
//!
//! Two accesses to one place, at least one of them a write, must be ordered: by being of one thread, by a barrier of the block
//! between them, or by a barrier of the warp. Nothing orders the blocks of a grid. Each place remembers its last write and its
//! last reads, which finds every such pair whatever order the threads happened to run in.

/// The origin of an access: a thread, and how many barriers it has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Who {
    pub(crate) block: u32,
    pub(crate) thread: u16,
    /// Barriers of the block that the thread has passed.
    pub(crate) epoch: u32,
    /// Barriers of its warp.
    pub(crate) warp_epoch: u16,
    /// The instruction's number in the kernel.
    pub(crate) instruction: u32,
}

/// The last write, or the last reads, of a place.
#[derive(Debug, Clone, Copy)]
struct Mark {
    /// The block's number and 1; 0 for no access.
    block: u32,
    epoch: u32,
    thread: u16,
    warp_epoch: u16,
    instruction: u32,
}

/// A mark's block: several have read.
const SEVERAL_BLOCKS: u32 = u32::MAX;
/// A mark's thread: several of one block have read; of one warp, of the lowest thread that the other bits name.
const SEVERAL_WARPS: u16 = u16::MAX;
const SEVERAL_LANES: u16 = 0x8000;

const NONE: Mark = Mark { block: 0, epoch: 0, thread: 0, warp_epoch: 0, instruction: 0 };

impl Mark {
    fn of(who: Who) -> Self {
        let Who { block, thread, epoch, warp_epoch, instruction } = who;
        Self { block: block + 1, epoch, thread, warp_epoch, instruction }
    }

    fn is_before(&self, who: Who) -> bool {
        if self.block == 0 {
            return true;
        }
        if self.block != who.block + 1 {
            return false;
        }
        self.epoch < who.epoch
            || self.thread == who.thread
            || self.thread != SEVERAL_WARPS
                && (self.thread & !SEVERAL_LANES) / 32 == who.thread / 32
                && self.warp_epoch < who.warp_epoch
    }

    /// These reads and one more.
    fn and(self, who: Who) -> Self {
        let new = Self::of(who);
        if self.block == 0 || self.block == new.block && (self.thread == new.thread || self.epoch < new.epoch)
        {
            return new;
        }
        if self.block != new.block {
            return Self { block: SEVERAL_BLOCKS, ..new };
        }
        if self.thread == SEVERAL_WARPS || (self.thread & !SEVERAL_LANES) / 32 != new.thread / 32 {
            return Self { thread: SEVERAL_WARPS, ..new };
        }
        if self.warp_epoch < new.warp_epoch {
            return new;
        }
        Self { thread: (new.thread / 32 * 32) | SEVERAL_LANES, ..new }
    }

    fn describe(&self, what: &str, lines: &dyn Fn(u32) -> usize) -> String {
        let line = lines(self.instruction);
        let who = match (self.block, self.thread) {
            (SEVERAL_BLOCKS, _) => "of several blocks".to_owned(),
            (block, SEVERAL_WARPS) => format!("of several warps of block {}", block - 1),
            (block, thread) if thread & SEVERAL_LANES != 0 => {
                format!("of several lanes of warp {} of block {}", (thread & !SEVERAL_LANES) / 32, block - 1)
            }
            (block, thread) => format!("of block {}, thread {thread}", block - 1),
        };
        format!("the {what} {who} at line {line}")
    }
}

#[derive(Debug, Clone, Copy)]
struct Cell {
    write: Mark,
    read: Mark,
    /// Read through the cache that does not see writes.
    non_coherent: bool,
}

const EMPTY: Cell = Cell { write: NONE, read: NONE, non_coherent: false };

/// The accesses of one buffer during a launch.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    cells: Vec<Cell>,
    /// Bytes of a cell: those of the narrowest access so far.
    granule: usize,
    bytes: usize,
}

/// Two accesses that nothing orders.
pub(crate) struct Conflict {
    pub(crate) what: &'static str,
    pub(crate) earlier: String,
}

impl Marks {
    pub(crate) fn new(bytes: usize) -> Self {
        Self { cells: vec![EMPTY; bytes.div_ceil(4)], granule: 4, bytes }
    }

    /// Makes cells that an access covers whole.
    fn cells(&mut self, at: usize, bytes: usize) -> &mut [Cell] {
        while !at.is_multiple_of(self.granule) || !bytes.is_multiple_of(self.granule) {
            self.granule /= 2;
            self.cells = self.cells.iter().flat_map(|cell| [*cell; 2]).collect();
        }
        &mut self.cells[at / self.granule..(at + bytes).div_ceil(self.granule)]
    }

    pub(crate) fn read(
        &mut self,
        (at, bytes): (usize, usize),
        who: Who,
        non_coherent: bool,
        lines: &dyn Fn(u32) -> usize,
    ) -> Result<(), Conflict> {
        for cell in self.cells(at, bytes) {
            if !cell.write.is_before(who) {
                let earlier = cell.write.describe("write", lines);
                return Err(Conflict { what: "the read of", earlier });
            }
            if non_coherent && cell.write.block != 0 {
                let earlier = cell.write.describe("write", lines);
                return Err(Conflict { what: "the non-coherent read of", earlier });
            }
            cell.read = cell.read.and(who);
            cell.non_coherent |= non_coherent;
        }
        Ok(())
    }

    pub(crate) fn write(
        &mut self,
        (at, bytes): (usize, usize),
        who: Who,
        lines: &dyn Fn(u32) -> usize,
    ) -> Result<(), Conflict> {
        for cell in self.cells(at, bytes) {
            if !cell.write.is_before(who) {
                let earlier = cell.write.describe("write", lines);
                return Err(Conflict { what: "the write of", earlier });
            }
            if !cell.read.is_before(who) {
                let earlier = cell.read.describe("read", lines);
                return Err(Conflict { what: "the write of", earlier });
            }
            if cell.non_coherent {
                let earlier = cell.read.describe("non-coherent read", lines);
                return Err(Conflict { what: "the write of", earlier });
            }
            cell.write = Mark::of(who);
        }
        Ok(())
    }

    /// Bytes that were read, and bytes that were written.
    pub(crate) fn touched(&self) -> (u64, u64) {
        let count = |was: fn(&Cell) -> bool| {
            let bytes = self.cells.iter().filter(|cell| was(cell)).count() * self.granule;
            bytes.min(self.bytes) as u64
        };
        (count(|cell| cell.read.block != 0), count(|cell| cell.write.block != 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(block: u32, thread: u16, epoch: u32, warp_epoch: u16) -> Who {
        Who { block, thread, epoch, warp_epoch, instruction: 0 }
    }

    /// Accesses of one place in turn; whether the last one is unordered with one before.
    fn races(accesses: &[(char, Who)]) -> bool {
        let mut marks = Marks::new(8);
        let mut last = false;
        for (index, (kind, who)) in accesses.iter().enumerate() {
            let ordered = match kind {
                'r' => marks.read((4, 4), *who, false, &|_| 1),
                'n' => marks.read((4, 4), *who, true, &|_| 1),
                _ => marks.write((4, 4), *who, &|_| 1),
            };
            last = ordered.is_err();
            assert!(!last || index == accesses.len() - 1, "{index}");
        }
        last
    }

    #[test]
    fn what_orders_two_accesses() {
        let thread = |n| who(0, n, 0, 0);
        assert!(!races(&[('w', thread(1)), ('r', thread(1)), ('w', thread(1))]));
        assert!(races(&[('w', thread(1)), ('r', thread(2))]));
        assert!(races(&[('r', thread(1)), ('w', thread(2))]));
        assert!(races(&[('w', thread(1)), ('w', thread(40))]));
        assert!(!races(&[('r', thread(1)), ('r', thread(2)), ('r', who(5, 0, 0, 0))]));
        // A barrier of the block, and a barrier of the warp, which orders nothing for other warps.
        assert!(!races(&[('w', thread(1)), ('r', who(0, 40, 1, 0))]));
        assert!(!races(&[('w', thread(1)), ('r', who(0, 2, 0, 1))]));
        assert!(races(&[('w', thread(1)), ('r', who(0, 40, 0, 1))]));
        // Nothing orders blocks.
        assert!(races(&[('w', thread(1)), ('w', who(1, 1, 7, 0))]));
        assert!(races(&[('r', who(2, 0, 0, 0)), ('r', thread(1)), ('w', who(0, 1, 3, 0))]));
    }

    #[test]
    fn readers_are_remembered_together() {
        let thread = |n| who(0, n, 0, 0);
        assert!(races(&[('r', thread(1)), ('r', thread(2)), ('w', thread(1))]));
        assert!(races(&[('r', thread(1)), ('r', thread(70)), ('r', thread(2)), ('w', thread(2))]));
        assert!(!races(&[('r', thread(1)), ('r', thread(70)), ('w', who(0, 2, 1, 0))]));
        assert!(!races(&[('r', thread(1)), ('r', thread(2)), ('w', who(0, 3, 0, 1))]));
        assert!(races(&[('r', thread(1)), ('r', thread(40)), ('w', who(0, 3, 0, 1))]));
    }

    #[test]
    fn what_is_read_without_coherence_is_never_written() {
        let thread = who(0, 1, 0, 0);
        assert!(races(&[('n', thread), ('w', thread)]));
        assert!(races(&[('w', thread), ('n', thread)]));
    }

    #[test]
    fn narrow_accesses_divide_the_cells() {
        let mut marks = Marks::new(7);
        let line: &dyn Fn(u32) -> usize = &|_| 1;
        assert!(marks.write((0, 4), who(0, 0, 0, 0), line).is_ok());
        assert!(marks.write((4, 2), who(0, 1, 0, 0), line).is_ok());
        assert!(marks.write((6, 1), who(0, 2, 0, 0), line).is_ok());
        assert_eq!(marks.touched(), (0, 7));
        let conflict = marks.write((3, 1), who(1, 9, 0, 0), line).err().map(|conflict| conflict.earlier);
        assert_eq!(conflict.as_deref(), Some("the write of block 0, thread 0 at line 1"));
    }
}
