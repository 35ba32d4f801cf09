//! The passes over a tile of logits: their checks, and their division into rows.

use runtime::parallel;
use runtime::tensor_memory::{bump_version, memory_range};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use crate::operands::{Rows, apart, rows};
use crate::simd::Real;

mod arguments;
mod kernel;

pub use arguments::{Coefficients, Statistics, Targets, Transform, Wanted};

use kernel::{Formula, RowStatistics, RowTarget};

pub(crate) const NAME: &str = "cross-entropy of a tile of logits";

/// See [`super::LogitsPass::statistics`].
pub(crate) fn statistics(
    tile: &Tensor,
    first: i64,
    transform: Transform<'_>,
    targets: Targets<'_>,
    class_weights: Option<&Tensor>,
    statistics: &mut Statistics,
) -> Result<()> {
    match tile.kind() {
        Kind::Double => typed_statistics::<f64>(tile, first, transform, targets, class_weights, statistics),
        _ => typed_statistics::<f32>(tile, first, transform, targets, class_weights, statistics),
    }
}

/// See [`super::LogitsPass::logits`].
pub(crate) fn logits(tile: &Tensor, transform: Transform<'_>) -> Result<()> {
    match tile.kind() {
        Kind::Double => typed_logits::<f64>(tile, transform),
        _ => typed_logits::<f32>(tile, transform),
    }
}

/// See [`super::LogitsPass::gradient`].
pub(crate) fn gradient(
    tile: &Tensor,
    transform: Transform<'_>,
    targets: Targets<'_>,
    class_weights: Option<&Tensor>,
    coefficients: Coefficients<'_>,
) -> Result<()> {
    match tile.kind() {
        Kind::Double => typed_gradient::<f64>(tile, transform, targets, class_weights, coefficients, |_| ()),
        _ => typed_gradient::<f32>(tile, transform, targets, class_weights, coefficients, |_| ()),
    }
}

/// The gradient of a Float tile in bf16: each row's in the first half of its memory.
pub(crate) fn narrow_gradient(
    tile: &Tensor,
    transform: Transform<'_>,
    targets: Targets<'_>,
    class_weights: Option<&Tensor>,
    coefficients: Coefficients<'_>,
) -> Result<()> {
    typed_gradient::<f32>(tile, transform, targets, class_weights, coefficients, kernel::narrow)
}

fn typed_statistics<R: Real>(
    tile: &Tensor,
    first: i64,
    transform: Transform<'_>,
    targets: Targets<'_>,
    class_weights: Option<&Tensor>,
    statistics: &mut Statistics,
) -> Result<()> {
    let view = Tile::<R>::new(tile)?;
    let formula = view.formula(transform, class_weights)?;
    let given = targets;
    let targets = view.targets(targets)?;
    let first = usize::try_from(first).map_err(|_| refuse("a tile begins at column 0 or later"))?;
    let cells = |name, tensor: &Tensor| view.cells::<R>(name, tensor, R::KIND);
    let optional =
        |name, tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| cells(name, tensor)).transpose();
    check_written(statistics, transform, given, class_weights)?;
    let (maximum, sum) = (cells("maximum", &statistics.maximum)?, cells("sum", &statistics.sum)?);
    let target = cells("target", &statistics.target)?;
    let (mass, total) = (optional("mass", &statistics.mass)?, optional("total", &statistics.total)?);
    let moment = optional("moment", &statistics.moment)?;
    let best = statistics.best.as_ref();
    let best = best.map(|best| view.cells::<i64>("best", best, Kind::Int64)).transpose()?;
    let matrix = view.rows;
    if matrix.is_empty() {
        return Ok(());
    }
    parallel::for_each(matrix.rows, |row| {
        // SAFETY: each row is one task's, and every vector has an element for it (`Tile::cells`).
        unsafe {
            let get = |cells: Option<Cells<R>>| cells.map(|cells| cells.get(row).to_f64());
            let mut of_row = RowStatistics {
                maximum: maximum.get(row),
                sum: sum.get(row).to_f64(),
                target: target.get(row).to_f64(),
                mass: get(mass),
                total: get(total),
                moment: get(moment),
                best: best.map(|best| best.get(row)),
            };
            kernel::statistics(row_of::<R>(matrix, row), first, formula, targets.of(row), &mut of_row);
            let put = |cells: Option<Cells<R>>, value: Option<f64>| {
                if let (Some(cells), Some(value)) = (cells, value) {
                    cells.set(row, R::from_f64(value));
                }
            };
            maximum.set(row, of_row.maximum);
            sum.set(row, R::from_f64(of_row.sum));
            target.set(row, R::from_f64(of_row.target));
            put(mass, of_row.mass);
            put(total, of_row.total);
            put(moment, of_row.moment);
            if let (Some(cells), Some(value)) = (best, of_row.best) {
                cells.set(row, value);
            }
        }
    })?;
    bump_version(tile)
}

fn typed_logits<R: Real>(tile: &Tensor, transform: Transform<'_>) -> Result<()> {
    let view = Tile::<R>::new(tile)?;
    let formula = view.formula(transform, None)?;
    let matrix = view.rows;
    if matrix.is_empty() {
        return Ok(());
    }
    parallel::for_each(matrix.rows, |row| {
        // SAFETY: each row is one task's.
        unsafe { kernel::logits(row_of::<R>(matrix, row), formula) }
    })?;
    bump_version(tile)
}

fn typed_gradient<R: Real>(
    tile: &Tensor,
    transform: Transform<'_>,
    targets: Targets<'_>,
    class_weights: Option<&Tensor>,
    coefficients: Coefficients<'_>,
    finish: fn(&mut [R]),
) -> Result<()> {
    let view = Tile::<R>::new(tile)?;
    let formula = view.formula(transform, class_weights)?;
    let targets = view.targets(targets)?;
    let cells = |name, tensor: &Tensor| view.cells::<R>(name, tensor, R::KIND);
    let maximum = cells("maximum", coefficients.maximum)?;
    let (powers, target) = (cells("powers", coefficients.powers)?, cells("target", coefficients.target)?);
    let constant = coefficients.constant.map(|constant| cells("constant", constant)).transpose()?;
    let matrix = view.rows;
    if matrix.is_empty() {
        return Ok(());
    }
    parallel::for_each(matrix.rows, |row| {
        // SAFETY: each row is one task's, and every vector has an element for it (`Tile::cells`).
        unsafe {
            let coefficients = kernel::RowCoefficients {
                maximum: maximum.get(row),
                powers: powers.get(row),
                target: target.get(row),
                constant: constant.map(|constant| constant.get(row)),
            };
            let row_of_tile = row_of::<R>(matrix, row);
            kernel::gradient(row_of_tile, formula, targets.of(row), coefficients);
            finish(row_of_tile);
        }
    })?;
    bump_version(tile)
}

/// Refuses statistics that share memory with each other, or with what the rows read while other rows write.
fn check_written(
    statistics: &Statistics,
    transform: Transform<'_>,
    targets: Targets<'_>,
    class_weights: Option<&Tensor>,
) -> Result<()> {
    let Statistics { maximum, sum, target, mass, total, moment, best } = statistics;
    let written = [
        ("maximum", Some(maximum)),
        ("sum", Some(sum)),
        ("target", Some(target)),
        ("mass", mass.as_ref()),
        ("total", total.as_ref()),
        ("moment", moment.as_ref()),
        ("best", best.as_ref()),
    ];
    let targets = match targets {
        Targets::Columns(columns) => ("target columns", Some(columns)),
        Targets::Dense(distributions) => ("target distributions", Some(distributions)),
    };
    let read = [("bias", transform.bias), ("class_weights", class_weights), targets];
    let ranges = |named: &[(&'static str, Option<&Tensor>)]| -> Result<Vec<_>> {
        named
            .iter()
            .filter_map(|(name, tensor)| Some(memory_range((*tensor)?).map(|range| (*name, range))))
            .collect()
    };
    let (written, read) = (ranges(&written)?, ranges(&read)?);
    for (index, (name, range)) in written.iter().enumerate() {
        let mut others = written[..index].iter().chain(&read);
        if let Some((other, _)) = others.find(|(_, other)| other.start < range.end && range.start < other.end)
        {
            return Err(refuse(format!("`{name}` overlaps `{other}` in memory; give it memory of its own")));
        }
    }
    Ok(())
}

fn refuse(reason: impl Into<String>) -> Error {
    Error::invalid(NAME, reason.into())
}

/// A tile's memory, and checked views beside it.
struct Tile<'a, R> {
    rows: Rows,
    tensor: &'a Tensor,
    element: std::marker::PhantomData<R>,
}

impl<'a, R: Real> Tile<'a, R> {
    fn new(tensor: &'a Tensor) -> Result<Self> {
        let rows = rows(NAME, "tile", tensor, R::KIND)?;
        Ok(Self { rows, tensor, element: std::marker::PhantomData })
    }

    /// `[n]` of dtype `kind`, which is that of `T`.
    fn cells<T>(&self, name: &str, tensor: &Tensor, kind: Kind) -> Result<Cells<T>> {
        Ok(Cells {
            pointer: self.vector(name, tensor, kind, self.rows.rows)?,
            element: std::marker::PhantomData,
        })
    }

    fn vector(&self, name: &str, tensor: &Tensor, kind: Kind, length: usize) -> Result<usize> {
        let fits = tensor.kind() == kind
            && tensor.device() == Device::Cpu
            && tensor.size() == [i64::try_from(length).unwrap_or(i64::MAX)]
            && tensor.is_contiguous()
            && !tensor.is_neg();
        if !fits {
            return Err(refuse(format!(
                "`{name}` is {:?} {:?} on {:?}{}; expected contiguous {kind:?} [{length}] on the CPU",
                tensor.kind(),
                tensor.size(),
                tensor.device(),
                if tensor.is_neg() { ", lazily negated (`resolve_neg`)" } else { "" }
            )));
        }
        let (a, b) = (memory_range(tensor)?, memory_range(self.tensor)?);
        if a.start < b.end && b.start < a.end {
            return Err(refuse(format!("`{name}` overlaps the tile in memory; give it memory of its own")));
        }
        Ok(tensor.data_ptr() as usize)
    }

    fn slice<'t>(&self, name: &str, tensor: &'t Tensor) -> Result<&'t [R]> {
        let length = self.rows.columns;
        let start = self.vector(name, tensor, R::KIND, length)?;
        if length == 0 {
            return Ok(&[]);
        }
        // SAFETY: `vector` has checked that there are this many elements of this type; they live as long as the tensor, and
        // nothing here writes them, because they do not overlap the tile.
        Ok(unsafe { std::slice::from_raw_parts(start as *const R, length) })
    }

    fn formula<'t>(
        &self,
        transform: Transform<'t>,
        class_weights: Option<&'t Tensor>,
    ) -> Result<Formula<'t, R>> {
        let bias = transform.bias.map(|bias| self.slice("bias", bias)).transpose()?;
        let class_weights = class_weights.map(|weights| self.slice("class_weights", weights)).transpose()?;
        let (scale, softcap) = (R::from_f64(transform.scale), transform.softcap.map(R::from_f64));
        Ok(Formula { bias, scale, softcap, class_weights })
    }

    fn targets(&self, targets: Targets<'_>) -> Result<TileTargets<R>> {
        match targets {
            Targets::Columns(columns) => Ok(TileTargets::Columns(
                self.cells("target columns", columns, Kind::Int64)?,
                self.rows.columns,
            )),
            Targets::Dense(distributions) => {
                let view = rows(NAME, "target distributions", distributions, R::KIND)?;
                if distributions.size() != self.tensor.size() {
                    let (found, expected) = (distributions.size(), self.tensor.size());
                    return Err(refuse(format!(
                        "`target distributions` is {found:?} and the tile {expected:?}"
                    )));
                }
                if !apart(view, self.rows, R::KIND.elt_size_in_bytes()) {
                    return Err(refuse("`target distributions` overlaps the tile in memory"));
                }
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
    // SAFETY: the row lies in the tile, whose rows do not overlap (`rows`), and only the caller uses it. The address is that of an
    // element, not the null of an empty tensor.
    unsafe { std::slice::from_raw_parts_mut(start, tile.columns) }
}

/// One element for each row.
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
    unsafe fn of(&self, row: usize) -> RowTarget<'_, R> {
        match self {
            Self::Columns(cells, columns) => {
                // SAFETY: the vector has an element for each row (`Tile::cells`); nothing writes it.
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
