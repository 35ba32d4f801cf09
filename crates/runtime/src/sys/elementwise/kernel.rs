//! Runs a program over tiles: each step is a loop over one tile, which the compiler vectorizes for the processor at hand, and
//! the registers of a program lie in the core's own cache.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::loops::{self, BLOCK, Level, Place};
use super::math::Real;
use super::program::{Operand, Program, Register, Step};

/// Elements of a tile: 2 KiB of fp32, so that a dozen registers share a first-level cache with what streams through it.
pub(super) const TILE: usize = 512;

/// How the memory of a tensor answers to the place `row`, `column` of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Layout {
    /// One element for each place; rows are so many elements apart, and dense in themselves.
    Full { row_stride: usize },
    /// One element for each column.
    Columns,
    /// One element for all.
    One,
}

/// An element type in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    F64,
    Bf16,
    F16,
}

/// Memory that a pass reads or writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    pub(super) address: usize,
    pub(super) element: Element,
    pub(super) layout: Layout,
    /// Whether steps may read and write it where it is: it is of the type that the pass computes in, and no source is a target.
    pub(super) direct: bool,
}

/// A stretch of a pass: places `start..start + count` of row `row`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    pub(super) row: usize,
    pub(super) start: usize,
    pub(super) count: usize,
}

/// Sums of one task for one target: one for each column, or one for all.
#[derive(Clone, Debug)]
pub(super) struct Sums {
    pub(super) values: Vec<f64>,
    /// The column that the first belongs to.
    pub(super) first: usize,
    /// 0 where one sum takes all; else the number of columns, after which the places begin again.
    pub(super) period: usize,
}

/// What a target of the program is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    Memory(Memory),
    /// The task's sums with this index.
    Sums(usize),
}

/// All that a task needs to know of the pass.
pub(super) struct Pass<'a> {
    pub(super) program: &'a Program,
    pub(super) sources: &'a [Memory],
    pub(super) targets: &'a [Target],
    pub(super) columns: usize,
}

/// A piece of memory that begins where a line of the cache does, so that no vector lies across two.
#[derive(Clone)]
#[repr(align(64))]
struct Aligned<T>([T; BLOCK]);

/// Blocks from one register to the next. One more than a tile has: registers that are a power of two apart would share the same
/// few places of the cache.
const STRIDE: usize = TILE / BLOCK + 1;

/// The registers of one task, and the constants of its steps.
pub(super) struct Registers<T> {
    /// Each register's own memory, then a block for each constant.
    memory: Vec<Aligned<T>>,
    /// Where the content of each register is, in its own memory or in that of a source or target; then the constants.
    places: Vec<Place<T>>,
    /// Of each step: which places it reads.
    operands: Vec<[usize; 3]>,
}

impl<T: Real> Registers<T> {
    pub(super) fn new(program: &Program) -> Self {
        let block = |value: f64| Aligned([T::from_f64(value); BLOCK]);
        let mut memory = vec![block(0.0); program.registers * STRIDE];
        let mut constants = 0;
        let mut place = |operand: Operand| match operand {
            Operand::Register(register) => register,
            Operand::Constant(value) => {
                memory.push(block(value));
                constants += 1;
                program.registers + constants - 1
            }
        };
        let operands = program.steps.iter().map(|step| match *step {
            Step::Load { .. } => [0; 3],
            Step::Unary { of, .. } => [of; 3],
            Step::Binary { a, b, .. } => [a, b, b].map(&mut place),
            Step::Ternary { operands, .. } => operands.map(&mut place),
            Step::Store { from, .. } => [place(from); 3],
        });
        let operands = operands.collect();
        let registers = (0..program.registers).map(|register| (register * STRIDE, BLOCK));
        let constants = (0..constants).map(|constant| (program.registers * STRIDE + constant, 0));
        let place = |(block, step): (usize, usize)| Place { pointer: memory[block].0.as_ptr(), step };
        let places = registers.chain(constants).map(place).collect();
        Self { memory, places, operands }
    }

    /// The start of a register's own memory, which holds its content from now on.
    #[inline(always)]
    fn own(&mut self, register: Register) -> *mut T {
        let memory = &mut self.memory[register * STRIDE..(register + 1) * STRIDE];
        let pointer = memory.as_mut_ptr().cast::<T>();
        self.places[register] = Place { pointer, step: BLOCK };
        pointer
    }

    #[inline(always)]
    fn from(&self, step: usize) -> [Place<T>; 3] {
        self.operands[step].map(|place| self.places[place])
    }
}

/// Runs the program over a stretch.
///
/// # Safety
/// The stretch lies in every source and target that has an element for each place, and no other task writes to what it
/// touches of them. Sums have the room that their `first` and `period` say. The processor has the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn run<T: Real, L: Level>(
    pass: &Pass<'_>,
    registers: &mut Registers<T>,
    sums: &mut [Sums],
    stretch: Stretch,
) {
    let end = stretch.start + stretch.count;
    for start in (stretch.start..end).step_by(TILE) {
        let tile = Stretch { start, count: TILE.min(end - start), ..stretch };
        for (index, step) in pass.program.steps.iter().enumerate() {
            // SAFETY: the tile lies in sources and targets, as the caller says; what a step reads was written before it, and what
            // it writes is no place that it reads: neither a register nor the memory of a source.
            unsafe {
                match *step {
                    Step::Load { to, source } => {
                        let source = &pass.sources[source];
                        match in_place(source, tile, pass.columns) {
                            Some(place) => registers.places[to] = place,
                            None => {
                                let own = std::slice::from_raw_parts_mut(registers.own(to), TILE);
                                load(source, tile, pass.columns, &mut own[..tile.count]);
                            }
                        }
                    }
                    Step::Unary { function, to, .. } => {
                        let [of, ..] = registers.from(index);
                        loops::unary::<T, L>(function, output(pass, registers, index, to, tile), of);
                    }
                    Step::Binary { function, to, .. } => {
                        let [a, b, _] = registers.from(index);
                        loops::binary::<T, L>(function, output(pass, registers, index, to, tile), [a, b]);
                    }
                    Step::Ternary { function, to, .. } => {
                        let from = registers.from(index);
                        loops::ternary::<T, L>(function, output(pass, registers, index, to, tile), from);
                    }
                    Step::Store { target, .. } => {
                        let [from, ..] = registers.from(index);
                        let constant;
                        let values = if from.step == 0 {
                            constant = [*from.pointer; TILE];
                            &constant[..tile.count]
                        } else {
                            std::slice::from_raw_parts(from.pointer, tile.count)
                        };
                        match pass.targets[target] {
                            Target::Memory(memory) if written_in_place(&memory, tile, from) => {}
                            Target::Memory(memory) => store(&memory, tile, values),
                            Target::Sums(index) => add_up(&mut sums[index], tile.start, values),
                        }
                    }
                }
            }
        }
    }
}

/// Where a step may read a tile of a source without a copy: there are only whole blocks, and they follow one another.
///
/// # Safety
/// The tile lies in the source.
#[inline(always)]
unsafe fn in_place<T: Real>(source: &Memory, tile: Stretch, columns: usize) -> Option<Place<T>> {
    let start = match source.layout {
        Layout::Full { row_stride } => tile.row * row_stride + tile.start,
        Layout::Columns if tile.start % columns + tile.count <= columns => tile.start % columns,
        Layout::Columns | Layout::One => return None,
    };
    // SAFETY: as the caller says.
    let pointer = unsafe { (source.address as *const T).add(start) };
    (source.direct && tile.count.is_multiple_of(BLOCK)).then_some(Place { pointer, step: BLOCK })
}

/// The memory of a target for a tile, if steps may write it where it is.
#[inline(always)]
fn target_address<T>(target: &Memory, tile: Stretch) -> Option<usize> {
    let Layout::Full { row_stride } = target.layout else { return None };
    let start = tile.row * row_stride + tile.start;
    (target.direct && tile.count.is_multiple_of(BLOCK)).then_some(target.address + start * size_of::<T>())
}

/// Whether the step that computed the value wrote it there.
#[inline(always)]
fn written_in_place<T>(target: &Memory, tile: Stretch, from: Place<T>) -> bool {
    target_address::<T>(target, tile) == Some(from.pointer as usize)
}

/// Where step `index` writes its result: at once to the target that the next step stores it to, else to register `to`.
///
/// # Safety
/// The tile lies in the targets, and is no other task's. The register's content and the target's are not read while the
/// result lives, but through it.
#[inline(always)]
unsafe fn output<'a, T: Real>(
    pass: &Pass<'_>,
    registers: &mut Registers<T>,
    index: usize,
    to: Register,
    tile: Stretch,
) -> &'a mut [[T; BLOCK]] {
    let blocks = tile.count.div_ceil(BLOCK);
    let own = registers.own(to);
    let target = match pass.program.steps.get(index + 1) {
        Some(Step::Store { from: Operand::Register(from), target }) if *from == to => {
            match &pass.targets[*target] {
                Target::Memory(memory) => target_address::<T>(memory, tile),
                Target::Sums(_) => None,
            }
        }
        _ => None,
    };
    let pointer = target.map_or(own, |address| address as *mut T);
    registers.places[to].pointer = pointer;
    // SAFETY: as the caller says; a register has room for a whole tile.
    unsafe { std::slice::from_raw_parts_mut(pointer.cast(), blocks) }
}

#[inline(always)]
fn add_up<T: Real>(sums: &mut Sums, start: usize, values: &[T]) {
    /// Sums that grow side by side.
    const LANES: usize = 16;
    if sums.period == 0 {
        let mut lanes = [0.0; LANES];
        for chunk in values.chunks(LANES) {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *lane += value.to_f64();
            }
        }
        sums.values[0] += lanes.iter().sum::<f64>();
        return;
    }
    let (mut column, mut values) = (start % sums.period - sums.first, values);
    while !values.is_empty() {
        let (now, later) = values.split_at(values.len().min(sums.period - sums.first - column));
        for (sum, value) in sums.values[column..].iter_mut().zip(now) {
            *sum += value.to_f64();
        }
        (column, values) = (0, later);
    }
}

/// # Safety
/// The tile lies in `memory`, which nobody writes now but this task.
#[inline(always)]
unsafe fn load<T: Real>(memory: &Memory, tile: Stretch, columns: usize, to: &mut [T]) {
    // SAFETY: by the layout, these are elements of the memory.
    unsafe {
        match memory.layout {
            Layout::Full { row_stride } => read(memory, tile.row * row_stride + tile.start, to),
            Layout::Columns => {
                let (mut column, mut rest) = (tile.start % columns, to);
                while !rest.is_empty() {
                    let count = rest.len().min(columns - column);
                    let (now, later) = rest.split_at_mut(count);
                    read(memory, column, now);
                    (column, rest) = (0, later);
                }
            }
            Layout::One => {
                read(memory, 0, &mut to[..1]);
                let value = to[0];
                to.fill(value);
            }
        }
    }
}

/// # Safety
/// `memory` has elements `start..start + to.len()`, which nobody writes now.
#[inline(always)]
unsafe fn read<T: Real>(memory: &Memory, start: usize, to: &mut [T]) {
    // SAFETY: as the caller says. The slices end with this call.
    unsafe {
        match memory.element {
            Element::F32 => {
                let from = slice::<f32>(memory.address, start, to.len());
                for (to, from) in to.iter_mut().zip(from) {
                    *to = T::from_f32(*from);
                }
            }
            Element::F64 => {
                let from = slice::<f64>(memory.address, start, to.len());
                for (to, from) in to.iter_mut().zip(from) {
                    *to = T::from_f64(*from);
                }
            }
            Element::Bf16 => {
                let from = slice::<bf16>(memory.address, start, to.len());
                for (to, from) in to.iter_mut().zip(from) {
                    *to = T::from_f32(f32::from_bits(u32::from(from.to_bits()) << 16));
                }
            }
            Element::F16 => {
                let from = slice::<f16>(memory.address, start, to.len());
                let mut wide = [0.0f32; TILE];
                from.convert_to_f32_slice(&mut wide[..to.len()]);
                for (to, from) in to.iter_mut().zip(&wide) {
                    *to = T::from_f32(*from);
                }
            }
        }
    }
}

/// # Safety
/// The tile lies in `memory`, which nobody else reads or writes now.
#[inline(always)]
unsafe fn store<T: Real>(memory: &Memory, tile: Stretch, values: &[T]) {
    let Layout::Full { row_stride } = memory.layout else { return };
    let start = tile.row * row_stride + tile.start;
    // SAFETY: as the caller says. The slices end with this call.
    unsafe {
        match memory.element {
            Element::F32 => {
                let to = slice_mut::<f32>(memory.address, start, values.len());
                for (to, value) in to.iter_mut().zip(values) {
                    *to = value.to_f32();
                }
            }
            Element::F64 => {
                let to = slice_mut::<f64>(memory.address, start, values.len());
                for (to, value) in to.iter_mut().zip(values) {
                    *to = value.to_f64();
                }
            }
            Element::Bf16 => {
                let to = slice_mut::<bf16>(memory.address, start, values.len());
                for (to, value) in to.iter_mut().zip(values) {
                    *to = nearest_bf16(value.to_f32());
                }
            }
            Element::F16 => {
                let to = slice_mut::<f16>(memory.address, start, values.len());
                let mut wide = [0.0f32; TILE];
                for (wide, value) in wide.iter_mut().zip(values) {
                    *wide = value.to_f32();
                }
                to.convert_from_f32_slice(&wide[..values.len()]);
            }
        }
    }
}

/// Rounds to the nearest, to the even one of two, without a branch.
#[inline(always)]
fn nearest_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // Of a NaN the top of its mantissa may be all that is set, so a quiet one takes its place.
    bf16::from_bits(if value.is_nan() { 0x7fc0 } else { rounded as u16 })
}

/// # Safety
/// There are `count` elements of `E` from `start` on, which nobody writes while the slice lives.
#[inline(always)]
unsafe fn slice<'a, E>(address: usize, start: usize, count: usize) -> &'a [E] {
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts((address as *const E).add(start), count) }
}

/// # Safety
/// There are `count` elements of `E` from `start` on, which nobody else uses while the slice lives.
#[inline(always)]
unsafe fn slice_mut<'a, E>(address: usize, start: usize, count: usize) -> &'a mut [E] {
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts_mut((address as *mut E).add(start), count) }
}
