//! One pass of a program over tensors: the checks that make it sound, and its division into tasks.
//!
//! The division depends on the shape alone, never on the number of threads, and sums of tasks are added up in order, so that
//! a pass gives the same bits in every run.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::parallel;
use super::tensor::memory_range;
use crate::error::{Error, Result};

mod kernel;
mod loops;
mod math;
pub(crate) mod program;

use kernel::{Element, Layout, Memory, Pass, Registers, Stretch, Sums, TILE, Target};
use loops::{Level, Plain};
pub(super) use math::Real;
use program::{Program, Step};

pub(crate) const NAME: &str = "fused elementwise";
/// Elements of one task: 128 KiB of fp32.
const TASK: usize = 32 * 1024;
/// Tasks of a pass that has a sum for each column, at most: each has its own sums.
const SUMMING_TASKS: usize = 64;
/// Rows of such a task, at least: its sums are a small part of what it reads.
const SUMMING_ROWS: usize = 32;

/// Runs `program` over every place of `shape`, in f64 where `double`, else in fp32.
///
/// Sources broadcast to `shape`. A target has the shape, and is dense; or it has one element, or as many as the last
/// dimension, and receives the sum over all places, or over all rows. A target may be the memory of a source that the program
/// has read by the time it writes.
pub(crate) fn run(
    program: &Program,
    shape: &[i64],
    double: bool,
    sources: &[&Tensor],
    targets: &[&Tensor],
) -> Result<()> {
    let count = |sizes: &[i64]| sizes.iter().map(|&n| usize::try_from(n).unwrap_or(0)).product::<usize>();
    let (columns, total) = (count(&shape[shape.len().saturating_sub(1)..]), count(shape));
    if total == 0 {
        for target in targets {
            let _ = target.shallow_clone().f_zero_()?;
        }
        return Ok(());
    }
    let (plan, _views) = Plan::new(program, shape, [total / columns, columns], double, sources, targets)?;
    let sums = if double { plan.run::<f64>(program)? } else { plan.run::<f32>(program)? };
    for (target, place) in targets.iter().zip(&plan.targets) {
        if let Target::Sums(index) = place {
            write_sums(target, sums.iter().map(|task| &task[*index]))?;
        }
    }
    Ok(())
}

/// Adds up the sums of all tasks, in order, and rounds them once.
fn write_sums<'a>(target: &Tensor, sums: impl Iterator<Item = &'a Sums>) -> Result<()> {
    let mut all = vec![0.0f64; target.numel()];
    for task in sums {
        for (sum, value) in all[task.first..].iter_mut().zip(&task.values) {
            *sum += value;
        }
    }
    let all = Tensor::f_from_slice(&all)?.f_reshape(target.size())?;
    Ok(target.shallow_clone().f_copy_(&all)?)
}

/// A pass whose memory has been checked.
struct Plan {
    sources: Vec<Memory>,
    targets: Vec<Target>,
    /// Of each target that is summed: whether for each column.
    sums: Vec<bool>,
    rows: usize,
    columns: usize,
    /// Whether every operand's rows follow one another without gaps.
    flat: bool,
}

impl Plan {
    /// The pass, and the views of the sources that it reads, which must outlive it: some are copies.
    fn new(
        program: &Program,
        shape: &[i64],
        [rows, columns]: [usize; 2],
        double: bool,
        sources: &[&Tensor],
        targets: &[&Tensor],
    ) -> Result<(Self, Vec<Tensor>)> {
        let computed = if double { Element::F64 } else { Element::F32 };
        let mut plan =
            Self { sources: Vec::new(), targets: Vec::new(), sums: Vec::new(), rows, columns, flat: true };
        let (mut read, mut views) = (Vec::new(), Vec::new());
        for source in sources {
            let mut view = dense(source)?.f_expand(shape, true)?;
            if layout(&view).is_none() {
                view = view.f_contiguous()?;
            }
            let layout = layout(&view).unwrap_or(Layout::Full { row_stride: columns });
            read.push(memory_range(&view)?);
            plan.flat &= rows == 1 || !matches!(layout, Layout::Full { row_stride } if row_stride != columns);
            let element = element(view.kind())?;
            let address = view.data_ptr() as usize;
            plan.sources.push(Memory { address, element, layout, direct: element == computed });
            views.push(view);
        }
        let mut written: Vec<Range<usize>> = Vec::new();
        for (index, target) in targets.iter().enumerate() {
            let target = dense(target)?;
            if target.size() != shape {
                plan.targets.push(Target::Sums(plan.sums.len()));
                plan.sums.push(target.numel() != 1);
                if target.numel() != 1 && target.numel() != columns {
                    let reason =
                        format!("a target of {:?} is no sum over places of {shape:?}", target.size());
                    return Err(Error::invalid(NAME, reason));
                }
                continue;
            }
            if !target.is_contiguous() {
                return Err(Error::invalid(NAME, "a target is not contiguous"));
            }
            let range = memory_range(target)?;
            let layout = Layout::Full { row_stride: columns };
            let (element, address) = (element(target.kind())?, target.data_ptr() as usize);
            let overlaps = |other: &Range<usize>| other.start < range.end && range.start < other.end;
            let alone = !read.iter().any(overlaps);
            let memory = Memory { address, element, layout, direct: alone && element == computed };
            let stored = program
                .steps
                .iter()
                .position(|step| matches!(step, Step::Store { target, .. } if *target == index));
            let fits = |(source, of): (usize, &Range<usize>)| {
                let late = program
                    .steps
                    .iter()
                    .skip(stored.unwrap_or(0))
                    .any(|step| matches!(step, Step::Load { source: loaded, .. } if *loaded == source));
                let read = plan.sources[source];
                let same = read.element == memory.element && *of == range;
                !overlaps(of) || same && !late
            };
            if written.iter().any(overlaps) || !read.iter().enumerate().all(fits) {
                return Err(Error::invalid(NAME, "a target overlaps another tensor of the pass in memory"));
            }
            // What is overwritten must be read first.
            for (source, of) in plan.sources.iter_mut().zip(&read) {
                source.direct &= !overlaps(of);
            }
            written.push(range);
            plan.targets.push(Target::Memory(memory));
        }
        Ok((plan, views))
    }

    /// The pieces that tasks work on: ranges of rows and of columns. Where rows follow one another and no sum of columns is
    /// wanted, all places are one row.
    fn tasks(&self) -> Vec<(Range<usize>, Range<usize>)> {
        let (rows, columns) = (self.rows, self.columns);
        let pieces = |all: usize, size: usize| {
            (0..all).step_by(size.max(1)).map(move |start| start..all.min(start + size.max(1)))
        };
        if !self.sums.contains(&true) {
            return if self.flat {
                pieces(rows * columns, TASK).map(|places| (0..1, places)).collect()
            } else {
                pieces(rows, TASK / columns).map(|rows| (rows, 0..columns)).collect()
            };
        }
        let by_rows = (rows / SUMMING_ROWS).min(rows * columns / TASK).clamp(1, SUMMING_TASKS);
        let block = columns.div_ceil(SUMMING_TASKS).next_multiple_of(TILE);
        if by_rows >= columns.div_ceil(block) {
            pieces(rows, rows.div_ceil(by_rows)).map(|rows| (rows, 0..columns)).collect()
        } else {
            pieces(columns, block).map(|columns| (0..rows, columns)).collect()
        }
    }

    /// Runs all tasks; gives the sums of each.
    fn run<T: Real>(&self, program: &Program) -> Result<Vec<Vec<Sums>>> {
        let pass = Pass { program, sources: &self.sources, targets: &self.targets, columns: self.columns };
        let run = |(rows, columns): &(Range<usize>, Range<usize>)| {
            let mut sums: Vec<Sums> = self.sums.iter().map(|&each| self.empty_sums(each, columns)).collect();
            let mut registers = Registers::<T>::new(program);
            let task =
                Task { plan: self, pass: &pass, rows, columns, registers: &mut registers, sums: &mut sums };
            dispatch(task);
            sums
        };
        let tasks = self.tasks();
        let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1);
        if threads < 2 || self.rows * self.columns <= 2 * TASK {
            return Ok(tasks.iter().map(run).collect());
        }
        parallel::map(tasks.len(), |task| run(&tasks[task]))
    }

    fn empty_sums(&self, for_each_column: bool, columns: &Range<usize>) -> Sums {
        if !for_each_column {
            return Sums { values: vec![0.0], first: 0, period: 0 };
        }
        Sums { values: vec![0.0; columns.len()], first: columns.start, period: self.columns }
    }
}

/// One task.
struct Task<'a, T> {
    plan: &'a Plan,
    pass: &'a Pass<'a>,
    rows: &'a Range<usize>,
    columns: &'a Range<usize>,
    registers: &'a mut Registers<T>,
    sums: &'a mut [Sums],
}

/// Runs a task with the widest vectors that the processor has.
fn dispatch<T: Real>(task: Task<'_, T>) {
    #[cfg(target_arch = "x86_64")]
    {
        use loops::{Narrow, Wide};

        /// # Safety
        /// The processor has the instructions.
        #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
        unsafe fn wide<T: Real>(task: Task<'_, T>) {
            // SAFETY: as the caller says.
            unsafe { task.run::<Wide>() }
        }

        /// # Safety
        /// The processor has the instructions.
        #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
        unsafe fn narrow<T: Real>(task: Task<'_, T>) {
            // SAFETY: as the caller says.
            unsafe { task.run::<Narrow>() }
        }

        match crate::processor::simd() {
            // SAFETY: the processor has what the function was compiled for: `processor::simd` names what it has.
            crate::processor::Simd::Avx512 => return unsafe { wide(task) },
            // SAFETY: as above.
            crate::processor::Simd::Avx2 => return unsafe { narrow(task) },
            _ => {}
        }
    }
    // SAFETY: every processor has these instructions.
    unsafe { task.run::<Plain>() }
}

impl<T: Real> Task<'_, T> {
    /// # Safety
    /// The processor has the instructions of `L`.
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        let Self { plan, pass, rows, columns, registers, sums } = self;
        // Rows that follow one another are one row.
        let (rows, columns) = if plan.flat && *columns == (0..plan.columns) {
            (0..1, rows.start * plan.columns..rows.end * plan.columns)
        } else {
            (rows.clone(), columns.clone())
        };
        for row in rows {
            let stretch = Stretch { row, start: columns.start, count: columns.len() };
            // SAFETY: tasks share no place, and each place lies in the memory that `Plan::new` checked. The processor has the
            // instructions, as the caller says.
            unsafe { kernel::run::<T, L>(pass, registers, sums, stretch) };
        }
    }
}

/// Whether a pass takes this dtype.
pub(crate) fn takes(kind: Kind) -> bool {
    element(kind).is_ok()
}

fn element(kind: Kind) -> Result<Element> {
    Ok(match kind {
        Kind::Float => Element::F32,
        Kind::Double => Element::F64,
        Kind::BFloat16 => Element::Bf16,
        Kind::Half => Element::F16,
        other => {
            let reason = format!("{other:?} is no dtype of a pass; expected Float, Double, BFloat16 or Half");
            return Err(Error::invalid(NAME, reason));
        }
    })
}

fn dense(tensor: &Tensor) -> Result<&Tensor> {
    if tensor.device() != Device::Cpu || tensor.is_sparse() || tensor.is_neg() || tensor.is_mkldnn() {
        let reason = "a tensor is not dense on the CPU; use `to_dense` or `resolve_neg`, and move it there";
        return Err(Error::invalid(NAME, reason));
    }
    Ok(tensor)
}

/// How a tensor that was expanded to the shape of the pass lies in memory, where a pass can read it.
fn layout(view: &Tensor) -> Option<Layout> {
    let (size, stride) = (view.size(), view.stride());
    let Some((&columns, leading)) = size.split_last() else { return Some(Layout::One) };
    let last = *stride.last()?;
    let moving = |i: &usize| size[*i] > 1;
    if (0..size.len()).filter(moving).all(|i| stride[i] == 0) {
        return Some(Layout::One);
    }
    if columns > 1 && last != 1 {
        return None;
    }
    let mut rows = (0..leading.len()).rev().filter(moving);
    let Some(innermost) = rows.next() else { return Some(Layout::Full { row_stride: 0 }) };
    let row_stride = stride[innermost];
    if row_stride == 0 {
        return rows.all(|i| stride[i] == 0).then_some(Layout::Columns);
    }
    let mut expected = row_stride * size[innermost];
    for i in rows {
        if stride[i] != expected {
            return None;
        }
        expected *= size[i];
    }
    Some(Layout::Full { row_stride: usize::try_from(row_stride).ok()? })
}
