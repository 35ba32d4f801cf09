//! The passes over a tile of logits: their checks, and their division into rows.

use runtime::autograd::GradMode;
use runtime::parallel;
use runtime::profile::{Flops, kernel, record_external};
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::row::{self, Formula, RowStatistics, RowTarget};
use super::{Coefficients, LogitsPass, Statistics, Targets, TileInputs, Transform};
use crate::operands::{Access, Extent, Operands, Rows};
use crate::simd::Real;

pub(crate) const NAME: &str = "cross-entropy of a tile of logits";

/// One pass over memory, vectorized for the processor, on libtorch's threads. CPU tensors only, and tiles in Float or Double, in
/// which the products of a CPU are computed; another dtype is an error.
#[derive(Clone, Copy, Debug)]
pub struct Cpu;

impl LogitsPass for Cpu {
    fn temporaries(&self, _tile: Kind) -> u64 {
        0
    }

    /// True for bf16; other dtypes are not products' operands on the CPU.
    fn narrows_in_place(&self) -> bool {
        true
    }

    fn statistics(
        &self,
        tile: &mut Tensor,
        inputs: TileInputs<'_>,
        statistics: &mut Statistics,
    ) -> Result<()> {
        not_recorded(tile)?;
        let _scope = kernel("runtime::cross_entropy_statistics", [tile]);
        match tile.kind() {
            Kind::Double => typed_statistics::<f64>(tile, inputs, statistics),
            _ => typed_statistics::<f32>(tile, inputs, statistics),
        }?;
        let passes = 1 + u64::from(inputs.transform.changes()) + u64::from(inputs.is_dense());
        record_external("runtime::cross_entropy_statistics", Flops::from(0), passes * bytes_of(tile))
    }

    fn logits(&self, tile: &mut Tensor, transform: Transform<'_>) -> Result<()> {
        not_recorded(tile)?;
        if !transform.changes() {
            return Ok(());
        }
        let _scope = kernel("runtime::cross_entropy_logits", [tile]);
        match tile.kind() {
            Kind::Double => typed_logits::<f64>(tile, transform),
            _ => typed_logits::<f32>(tile, transform),
        }?;
        record_external("runtime::cross_entropy_logits", Flops::from(0), 2 * bytes_of(tile))
    }

    fn gradient(
        &self,
        tile: &mut Tensor,
        inputs: TileInputs<'_>,
        coefficients: Coefficients<'_>,
    ) -> Result<()> {
        not_recorded(tile)?;
        let _scope = kernel("runtime::cross_entropy_gradient", [tile]);
        match tile.kind() {
            Kind::Double => typed_gradient::<f64>(tile, inputs, coefficients, |_| ()),
            _ => typed_gradient::<f32>(tile, inputs, coefficients, |_| ()),
        }?;
        let passes = 2 + u64::from(inputs.is_dense());
        record_external("runtime::cross_entropy_gradient", Flops::from(0), passes * bytes_of(tile))
    }

    fn gradient_as(
        &self,
        tile: &mut Tensor,
        inputs: TileInputs<'_>,
        coefficients: Coefficients<'_>,
        kind: Kind,
    ) -> Result<Tensor> {
        if (tile.kind(), kind) != (Kind::Float, Kind::BFloat16) {
            self.gradient(tile, inputs, coefficients)?;
            return Ok(tile.f_to_kind(kind)?);
        }
        not_recorded(tile)?;
        let _scope = kernel("runtime::cross_entropy_gradient", [tile]);
        // Each row's gradient in the first half of its memory.
        typed_gradient::<f32>(tile, inputs, coefficients, row::narrow)?;
        let passes = 2 + u64::from(inputs.is_dense());
        record_external("runtime::cross_entropy_gradient", Flops::from(0), passes * bytes_of(tile))?;
        Ok(tile.f_view_dtype(kind)?.f_narrow(1, 0, tile.size()[1])?)
    }
}

fn not_recorded(tile: &Tensor) -> Result<()> {
    if GradMode::enabled() && tile.requires_grad() {
        let reason = "the tile requires a gradient, which is not recorded here; work on a detached one";
        return Err(Error::invalid(NAME, reason));
    }
    Ok(())
}

fn bytes_of(tile: &Tensor) -> u64 {
    tile.numel() as u64 * tile.kind().elt_size_in_bytes() as u64
}

fn typed_statistics<R: Real>(
    tile: &Tensor,
    inputs: TileInputs<'_>,
    statistics: &mut Statistics,
) -> Result<()> {
    let mut view = Tile::<R>::new(tile)?;
    let formula = view.formula(inputs.transform, inputs.class_weights)?;
    let targets = view.targets(inputs.targets)?;
    let first = usize::try_from(inputs.first).map_err(|_| refuse("a tile begins at column 0 or later"))?;
    let mut written = |name, tensor: &Tensor| view.writes::<R>(name, tensor, R::KIND);
    let (maximum, sum) = (written("maximum", &statistics.maximum)?, written("sum", &statistics.sum)?);
    let target = written("target", &statistics.target)?;
    let mut optional =
        |name, tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| written(name, tensor)).transpose();
    let (mass, total) = (optional("mass", &statistics.mass)?, optional("total", &statistics.total)?);
    let moment = optional("moment", &statistics.moment)?;
    let best = statistics.best.as_ref();
    let best = best.map(|best| view.writes::<i64>("best", best, Kind::Int64)).transpose()?;
    view.operands.check()?;
    let matrix = view.rows;
    if matrix.is_empty() {
        return Ok(());
    }
    parallel::for_each(matrix.rows, |row| {
        // SAFETY: each row is one task's, and every vector has an element for it (`Operands`).
        unsafe {
            let get = |cells: Option<Cells<R>>| cells.map(|cells| cells.get(row).to_f64());
            let mut row_statistics = RowStatistics {
                maximum: maximum.get(row),
                sum: sum.get(row).to_f64(),
                target: target.get(row).to_f64(),
                mass: get(mass),
                total: get(total),
                moment: get(moment),
                best: best.map(|best| best.get(row)),
            };
            row::statistics(row_of::<R>(matrix, row), first, formula, targets.row(row), &mut row_statistics);
            let put = |cells: Option<Cells<R>>, value: Option<f64>| {
                if let (Some(cells), Some(value)) = (cells, value) {
                    cells.set(row, R::from_f64(value));
                }
            };
            maximum.set(row, row_statistics.maximum);
            sum.set(row, R::from_f64(row_statistics.sum));
            target.set(row, R::from_f64(row_statistics.target));
            put(mass, row_statistics.mass);
            put(total, row_statistics.total);
            put(moment, row_statistics.moment);
            if let (Some(cells), Some(value)) = (best, row_statistics.best) {
                cells.set(row, value);
            }
        }
    })?;
    bump_version(tile)
}

fn typed_logits<R: Real>(tile: &Tensor, transform: Transform<'_>) -> Result<()> {
    let mut view = Tile::<R>::new(tile)?;
    let formula = view.formula(transform, None)?;
    view.operands.check()?;
    let matrix = view.rows;
    if matrix.is_empty() {
        return Ok(());
    }
    parallel::for_each(matrix.rows, |row| {
        // SAFETY: each row is one task's.
        unsafe { row::logits(row_of::<R>(matrix, row), formula) }
    })?;
    bump_version(tile)
}

fn typed_gradient<R: Real>(
    tile: &Tensor,
    inputs: TileInputs<'_>,
    coefficients: Coefficients<'_>,
    finish: fn(&mut [R]),
) -> Result<()> {
    let mut view = Tile::<R>::new(tile)?;
    let formula = view.formula(inputs.transform, inputs.class_weights)?;
    let targets = view.targets(inputs.targets)?;
    let mut cells = |name, tensor: &Tensor| view.reads::<R>(name, tensor, R::KIND);
    let maximum = cells("maximum", coefficients.maximum)?;
    let (powers, target) = (cells("powers", coefficients.powers)?, cells("target", coefficients.target)?);
    let constant = coefficients.constant.map(|constant| cells("constant", constant)).transpose()?;
    view.operands.check()?;
    let matrix = view.rows;
    if matrix.is_empty() {
        return Ok(());
    }
    parallel::for_each(matrix.rows, |row| {
        // SAFETY: each row is one task's, and every vector has an element for it (`Operands`).
        unsafe {
            let coefficients = row::RowCoefficients {
                maximum: maximum.get(row),
                powers: powers.get(row),
                target: target.get(row),
                constant: constant.map(|constant| constant.get(row)),
            };
            let row_of_tile = row_of::<R>(matrix, row);
            row::gradient(row_of_tile, formula, targets.row(row), coefficients);
            finish(row_of_tile);
        }
    })?;
    bump_version(tile)
}

fn refuse(reason: impl Into<String>) -> Error {
    Error::invalid(NAME, reason.into())
}

/// A tile's memory, and the other operands of a pass.
struct Tile<'a, R> {
    rows: Rows,
    tensor: &'a Tensor,
    operands: Operands,
    element: std::marker::PhantomData<R>,
}

impl<'a, R: Real> Tile<'a, R> {
    fn new(tensor: &'a Tensor) -> Result<Self> {
        let mut operands = Operands::new(NAME, Device::Cpu);
        let rows = operands.rows(Access::Write, "tile", tensor, R::KIND, Extent::Any)?;
        Ok(Self { rows, tensor, operands, element: std::marker::PhantomData })
    }

    /// `[n]` of dtype `kind`, which is that of `T`; read.
    fn reads<T>(&mut self, name: &'static str, tensor: &Tensor, kind: Kind) -> Result<Cells<T>> {
        let pointer = self.operands.read(name, tensor, kind, &[self.rows.rows as i64][..])?;
        Ok(Cells { pointer, element: std::marker::PhantomData })
    }

    /// `[n]` of dtype `kind`, which is that of `T`; written.
    fn writes<T>(&mut self, name: &'static str, tensor: &Tensor, kind: Kind) -> Result<Cells<T>> {
        let pointer = self.operands.write(name, tensor, kind, &[self.rows.rows as i64][..])?;
        Ok(Cells { pointer, element: std::marker::PhantomData })
    }

    fn slice<'t>(&mut self, name: &'static str, tensor: &'t Tensor) -> Result<&'t [R]> {
        let length = self.rows.columns;
        let start = self.operands.read(name, tensor, R::KIND, &[length as i64][..])?;
        if length == 0 {
            return Ok(&[]);
        }
        // SAFETY: `Operands` has checked that there are this many elements of this type; they live as long as the tensor, and nothing
        // writes them: by `Operands::check`, which every pass calls before it begins, they overlap nothing that is written.
        Ok(unsafe { std::slice::from_raw_parts(start as *const R, length) })
    }

    fn formula<'t>(
        &mut self,
        transform: Transform<'t>,
        class_weights: Option<&'t Tensor>,
    ) -> Result<Formula<'t, R>> {
        let bias = transform.bias.map(|bias| self.slice("bias", bias)).transpose()?;
        let class_weights = class_weights.map(|weights| self.slice("class_weights", weights)).transpose()?;
        let (scale, softcap) = (R::from_f64(transform.scale), transform.softcap.map(R::from_f64));
        Ok(Formula { bias, scale, softcap, class_weights })
    }

    fn targets(&mut self, targets: Targets<'_>) -> Result<TileTargets<R>> {
        match targets {
            Targets::Columns(columns) => Ok(TileTargets::Columns(
                self.reads("target columns", columns, Kind::Int64)?,
                self.rows.columns,
            )),
            Targets::Dense(distributions) => {
                let size = self.tensor.size();
                let view = self.operands.rows(
                    Access::Read,
                    "target distributions",
                    distributions,
                    R::KIND,
                    &size[..],
                )?;
                Ok(TileTargets::Dense(view, std::marker::PhantomData))
            }
        }
    }
}

/// Row `index` of a tile of `R`.
///
/// # Safety
/// The row is one of the tile's, which has columns and outlives `'a`, and no other code uses the row meanwhile.
unsafe fn row_of<'a, R>(tile: Rows, index: usize) -> &'a mut [R] {
    let start = (tile.pointer as *mut R).wrapping_add(index * tile.row_stride);
    // SAFETY: the row lies in the tile, whose rows do not overlap (`Operands`), and only the caller uses it. The address is that of an
    // element, not the null of an empty tensor.
    unsafe { std::slice::from_raw_parts_mut(start, tile.columns) }
}

/// A vector with an element for each row.
struct Cells<T> {
    pointer: usize,
    element: std::marker::PhantomData<fn() -> T>,
}

impl<T> Clone for Cells<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Cells<T> {}

impl<T: Copy> Cells<T> {
    /// # Safety
    /// There is an element for `row`, and no other code writes it meanwhile.
    unsafe fn get(self, row: usize) -> T {
        // SAFETY: by this function's contract.
        unsafe { *(self.pointer as *const T).add(row) }
    }

    /// # Safety
    /// There is an element for `row`, and no other code uses it meanwhile.
    unsafe fn set(self, row: usize, value: T) {
        // SAFETY: by this function's contract.
        unsafe { *(self.pointer as *mut T).add(row) = value }
    }
}

enum TileTargets<R> {
    Columns(Cells<i64>, usize),
    Dense(Rows, std::marker::PhantomData<fn() -> R>),
}

impl<R: Real> TileTargets<R> {
    /// # Safety
    /// `row` is one of the tile's, which has columns.
    unsafe fn row(&self, row: usize) -> RowTarget<'_, R> {
        match self {
            Self::Columns(cells, columns) => {
                // SAFETY: the vector has an element for each row (`Operands`); nothing writes it.
                let column = unsafe { cells.get(row) };
                RowTarget::Column(usize::try_from(column).ok().filter(|column| column < columns))
            }
            Self::Dense(view, _) => {
                let start = (view.pointer as *const R).wrapping_add(row * view.row_stride);
                // SAFETY: the row lies in the matrix, which has the tile's shape; nothing writes it.
                RowTarget::Dense(unsafe { std::slice::from_raw_parts(start, view.columns) })
            }
        }
    }
}
