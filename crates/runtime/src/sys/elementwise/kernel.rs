//! Runs a program over tiles: each step is a loop over one tile, which the compiler vectorizes for the processor at hand, and
//! the registers of a program lie in the core's own cache.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::math::Real;
use super::program::{Binary, Operand, Program, Register, Step, Unary};

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

/// The registers of one task.
pub(super) struct Registers<T>(Vec<Vec<T>>);

impl<T: Real> Registers<T> {
    pub(super) fn new(count: usize) -> Self {
        Self((0..count).map(|_| vec![T::ZERO; TILE]).collect())
    }
}

/// Runs the program over a stretch.
///
/// # Safety
/// The stretch lies in every source and target that has an element for each place, and no other task writes to what it
/// touches of them. Sums have the room that their `first` and `period` say.
#[inline(always)]
pub(super) unsafe fn run<T: Real>(
    pass: &Pass<'_>,
    registers: &mut Registers<T>,
    sums: &mut [Sums],
    stretch: Stretch,
) {
    let end = stretch.start + stretch.count;
    for start in (stretch.start..end).step_by(TILE) {
        let tile = Stretch { start, count: TILE.min(end - start), ..stretch };
        for step in &pass.program.steps {
            match *step {
                Step::Load { to, source } => {
                    let to = &mut registers.0[to];
                    // SAFETY: the tile lies in the source, as the caller says.
                    unsafe { load(&pass.sources[source], tile, pass.columns, &mut to[..tile.count]) };
                }
                // No closures here: one would be a function of its own, compiled without the processor's vector instructions.
                Step::Unary { function, to, of } => {
                    let mut taken = registers.take(to);
                    unary(function, registers.slice(of, tile.count), &mut taken[..tile.count]);
                    registers.0[to] = taken;
                }
                Step::Binary { function, to, a, b } => {
                    let (mut taken, n) = (registers.take(to), tile.count);
                    let out = &mut taken[..n];
                    let constant = T::from_f64;
                    match (a, b) {
                        (Operand::Register(a), Operand::Register(b)) => {
                            binary(function, registers.slice(a, n), registers.slice(b, n), out);
                        }
                        (Operand::Register(a), Operand::Constant(b)) => {
                            binary(function, registers.slice(a, n), Splat(constant(b)), out);
                        }
                        (Operand::Constant(a), Operand::Register(b)) => {
                            binary(function, Splat(constant(a)), registers.slice(b, n), out);
                        }
                        (Operand::Constant(a), Operand::Constant(b)) => {
                            out.fill(constant(a).binary(function, constant(b)));
                        }
                    }
                    registers.0[to] = taken;
                }
                Step::Select { to, mask, yes, no } => {
                    let (mut taken, n) = (registers.take(to), tile.count);
                    let out = &mut taken[..n];
                    let mask = registers.slice(mask, n);
                    let constant = T::from_f64;
                    match (yes, no) {
                        (Operand::Register(a), Operand::Register(b)) => {
                            select(mask, registers.slice(a, n), registers.slice(b, n), out);
                        }
                        (Operand::Register(a), Operand::Constant(b)) => {
                            select(mask, registers.slice(a, n), Splat(constant(b)), out);
                        }
                        (Operand::Constant(a), Operand::Register(b)) => {
                            select(mask, Splat(constant(a)), registers.slice(b, n), out);
                        }
                        (Operand::Constant(a), Operand::Constant(b)) => {
                            select(mask, Splat(constant(a)), Splat(constant(b)), out);
                        }
                    }
                    registers.0[to] = taken;
                }
                Step::Store { from, target } => {
                    let constant;
                    let values = match from {
                        Operand::Register(from) => registers.slice(from, tile.count),
                        Operand::Constant(value) => {
                            constant = [T::from_f64(value); TILE];
                            &constant[..tile.count]
                        }
                    };
                    match pass.targets[target] {
                        // SAFETY: the tile lies in the target, and is no other task's, as the caller says.
                        Target::Memory(memory) => unsafe { store(&memory, tile, values) },
                        Target::Sums(index) => add_up(&mut sums[index], tile.start, values),
                    }
                }
            }
        }
    }
}

impl<T: Real> Registers<T> {
    #[inline(always)]
    fn slice(&self, register: Register, count: usize) -> &[T] {
        &self.0[register][..count]
    }

    /// Register `to`, to be written while others are read, and put back. A step's `to` is none of those that it reads.
    #[inline(always)]
    fn take(&mut self, to: Register) -> Vec<T> {
        std::mem::take(&mut self.0[to])
    }
}

/// Where a loop reads its element `i`.
trait Read<T>: Copy {
    fn read(self, i: usize) -> T;
}

/// The same everywhere.
#[derive(Clone, Copy)]
struct Splat<T>(T);

impl<T: Copy> Read<T> for Splat<T> {
    #[inline(always)]
    fn read(self, _: usize) -> T {
        self.0
    }
}

impl<T: Copy> Read<T> for &[T] {
    #[inline(always)]
    fn read(self, i: usize) -> T {
        self[i]
    }
}

#[inline(always)]
fn unary<T: Real>(function: Unary, of: &[T], to: &mut [T]) {
    // One loop for each function: the match must not stand inside of it.
    macro_rules! each {
        ($($name:ident),*) => {
            match function {
                $(Unary::$name => for (to, x) in to.iter_mut().zip(of) {
                    *to = x.unary(Unary::$name);
                },)*
            }
        };
    }
    each!(Negate, Reciprocal, Sqrt, Rsqrt, Exp, Ln, Tanh, Sigmoid, Erf, Relu, Abs, Sign);
}

#[inline(always)]
fn binary<T: Real>(function: Binary, a: impl Read<T>, b: impl Read<T>, to: &mut [T]) {
    macro_rules! each {
        ($($name:ident),*) => {
            match function {
                $(Binary::$name => for (i, to) in to.iter_mut().enumerate() {
                    *to = a.read(i).binary(Binary::$name, b.read(i));
                },)*
            }
        };
    }
    each!(Add, Subtract, Multiply, Divide, Maximum, Minimum, Less, LessEqual, Equal, NotEqual);
}

#[inline(always)]
fn select<T: Real>(mask: &[T], yes: impl Read<T>, no: impl Read<T>, to: &mut [T]) {
    for (i, (to, mask)) in to.iter_mut().zip(mask).enumerate() {
        let (yes, no) = (yes.read(i), no.read(i));
        *to = if *mask == T::ZERO { no } else { yes };
    }
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
