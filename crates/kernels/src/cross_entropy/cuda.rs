//! The passes over a tile of logits as CUDA kernels.

use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::cpu::NAME;
use super::{Coefficients, LogitsPass, Reference, Statistics, Targets, TileInputs, Transform};
use crate::cuda::{
    Argument, Matrix, Source, are_ready, expect, float, int, launch, matrix, optional, pointer, type_of,
    width,
};

pub(crate) const SOURCE: Source = Source(include_str!("cross_entropy.cuh"));

/// Threads of a block that has a row: of the pass that narrows in place, and of the statistics of a long row or of few rows.
const ROW: u32 = 512;
/// Threads of a block of the statistics of other rows, and bytes of the longest of these: more rows at a time hide the ends of each. The
/// fastest on an H200 with 32,000 to 151,936 columns; rows in 16 bits are all of these.
const SHORT: (u32, i64) = (128, 192 << 10);
/// Up to this many rows, blocks of [`SHORT`] leave a large GPU with fewer threads than it can run (132 multiprocessors of 2048), so that
/// too few reads are under way. A power of two: rows that are padded to a multiple of a smaller one keep their side of it, and so their
/// bits.
const FEW_ROWS: i64 = 2048;
/// Threads of a block of the other passes.
const THREADS: u32 = 256;
/// 16-byte packs per thread of the gradient pass.
const PACKS: i64 = 4;

/// The passes over tiles in fp32, bf16 and fp16; for f64, and without NVRTC, [`Reference`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cuda;

/// The fixed part of a tile.
struct Tile {
    matrix: Matrix,
    /// The C++ type of its numbers.
    element: &'static str,
    width: i64,
    device: Device,
}

impl Cuda {
    fn takes(tile: &Tensor) -> bool {
        type_of(tile.kind()).is_some() && are_ready(tile.device())
    }
}

impl LogitsPass for Cuda {
    fn temporaries(&self, tile: Kind) -> u64 {
        if crate::cuda::are_found() { 0 } else { Reference.temporaries(tile) }
    }

    fn narrows_in_place(&self) -> bool {
        crate::cuda::are_found()
    }

    fn row_stride(&self, columns: i64, tile: Kind) -> i64 {
        // The numbers of 16 bytes.
        let multiple = 16 / tile.elt_size_in_bytes() as i64;
        if crate::cuda::are_found() { (columns + multiple - 1) / multiple * multiple } else { columns }
    }

    fn statistics(
        &self,
        tile: &mut Tensor,
        inputs: TileInputs<'_>,
        statistics: &mut Statistics,
    ) -> Result<()> {
        if !Self::takes(tile) {
            return Reference.statistics(tile, inputs, statistics);
        }
        let TileInputs { first, transform, targets, class_weights } = inputs;
        let view = Tile::new(tile, transform.bias, Some(targets))?;
        let Tile { matrix: Matrix { rows, columns, stride }, element, width, device } = view;
        let expect_rows =
            |name, tensor: Option<&Tensor>, kind| expect(NAME, name, tensor, &[rows], (kind, device));
        let Statistics { maximum, sum, target, mass, total, moment, best } = &*statistics;
        for (name, tensor) in [("maximum", Some(maximum)), ("sum", Some(sum)), ("target", Some(target))]
            .into_iter()
            .chain([("mass", mass.as_ref()), ("total", total.as_ref()), ("moment", moment.as_ref())])
        {
            expect_rows(name, tensor, Kind::Float)?;
        }
        expect_rows("best", best.as_ref(), Kind::Int64)?;
        view.weights(class_weights)?;
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        let extra = inputs.is_dense() || total.is_some() || moment.is_some() || best.is_some();
        let threads = statistics_threads(rows, columns, tile.kind());
        let expression =
            format!("ce_statistics<{element}, {width}, {}, {extra}, {threads}>", transform.changes());
        let [labels, distributions, distributions_stride] = target_arguments(targets);
        let [bias, scale, cap] = transform_arguments(transform);
        let arguments = [
            pointer(tile),
            Argument::I64(stride),
            int(NAME, "the number of columns", columns)?,
            Argument::I64(first),
            bias,
            scale,
            cap,
            labels,
            distributions,
            distributions_stride,
            optional(class_weights),
            pointer(maximum),
            pointer(sum),
            pointer(target),
            optional(mass.as_ref()),
            optional(total.as_ref()),
            optional(moment.as_ref()),
            optional(best.as_ref()),
        ];
        launch(SOURCE, &expression, device, (rows, threads), &arguments)?;
        bump_version(tile)
    }

    fn logits(&self, tile: &mut Tensor, transform: Transform<'_>) -> Result<()> {
        if !Self::takes(tile) {
            return Reference.logits(tile, transform);
        }
        let view = Tile::new(tile, transform.bias, None)?;
        let Tile { matrix: Matrix { rows, columns, stride }, element, width, device } = view;
        if rows == 0 || columns == 0 || !transform.changes() {
            return Ok(());
        }
        let blocks = blocks(columns, width * i64::from(THREADS));
        let [bias, scale, cap] = transform_arguments(transform);
        let arguments = [
            pointer(tile),
            Argument::I64(stride),
            int(NAME, "the number of columns", columns)?,
            int(NAME, "the number of blocks", blocks)?,
            bias,
            scale,
            cap,
        ];
        let expression = format!("ce_logits<{element}, {width}, {THREADS}>");
        launch(SOURCE, &expression, device, (rows * blocks, THREADS), &arguments)?;
        bump_version(tile)
    }

    fn gradient(
        &self,
        tile: &mut Tensor,
        inputs: TileInputs<'_>,
        coefficients: Coefficients<'_>,
    ) -> Result<()> {
        if !Self::takes(tile) {
            return Reference.gradient(tile, inputs, coefficients);
        }
        let view = Tile::new(tile, None, Some(inputs.targets))?;
        let Tile { matrix: Matrix { rows, columns, .. }, element, width, device } = view;
        let [before, after] = view.gradient_arguments(tile, inputs, coefficients)?;
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        let blocks = blocks(columns, width * PACKS * i64::from(THREADS));
        let arguments = [before, vec![int(NAME, "the number of blocks", blocks)?], after].concat();
        let extra = has_extra_terms(inputs, coefficients);
        let expression = format!("ce_gradient<{element}, {width}, {extra}, {THREADS}>");
        launch(SOURCE, &expression, device, (rows * blocks, THREADS), &arguments)?;
        bump_version(tile)
    }

    fn gradient_as(
        &self,
        tile: &mut Tensor,
        inputs: TileInputs<'_>,
        coefficients: Coefficients<'_>,
        kind: Kind,
    ) -> Result<Tensor> {
        let narrows = tile.kind() == Kind::Float && kind != Kind::Float && Self::takes(tile);
        let Some(narrow_element) = type_of(kind).filter(|_| narrows) else {
            self.gradient(tile, inputs, coefficients)?;
            return Ok(tile.f_to_kind(kind)?);
        };
        let view = Tile::new(tile, None, Some(inputs.targets))?;
        let Tile { matrix: Matrix { rows, columns, .. }, width, device, .. } = view;
        let arguments = view.gradient_arguments(tile, inputs, coefficients)?.concat();
        // 16-bit numbers: as many as fill 16 bytes.
        let width = if width > 1 { 8 } else { 1 };
        if rows > 0 && columns > 0 {
            let extra = has_extra_terms(inputs, coefficients);
            let expression = format!("ce_gradient_narrow<{narrow_element}, {width}, {extra}, {ROW}>");
            launch(SOURCE, &expression, device, (rows, ROW), &arguments)?;
            bump_version(tile)?;
        }
        Ok(tile.f_view_dtype(kind)?.f_narrow(1, 0, columns)?)
    }
}

/// Returns the threads of a block of the statistics: a function of the tile's shape and dtype.
fn statistics_threads(rows: i64, columns: i64, kind: Kind) -> u32 {
    let is_short = kind != Kind::Float || 4 * columns <= SHORT.1;
    if is_short && rows > FEW_ROWS { SHORT.0 } else { ROW }
}

/// Returns whether a gradient has more terms than one class and the softmax.
fn has_extra_terms(inputs: TileInputs<'_>, coefficients: Coefficients<'_>) -> bool {
    coefficients.constant.is_some() || inputs.is_dense()
}

impl Tile {
    /// Checks the tile and the tensors of its shape.
    fn new(tile: &Tensor, bias: Option<&Tensor>, targets: Option<Targets<'_>>) -> Result<Self> {
        let device = tile.device();
        let options = (Kind::Float, device);
        let view = matrix(NAME, "tile", tile, (tile.kind(), device))?;
        let element = type_of(tile.kind()).ok_or_else(|| {
            Error::invalid(
                NAME,
                format!("no CUDA kernel for a `tile` of {:?}; expected Float, BFloat16 or Half", tile.kind()),
            )
        })?;
        expect(NAME, "bias", bias, &[view.columns], options)?;
        match targets {
            None => {}
            Some(Targets::Columns(columns)) => {
                expect(NAME, "targets", columns, &[view.rows], (Kind::Int64, device))?;
            }
            Some(Targets::Dense(dense)) => {
                let distributions = matrix(NAME, "targets", dense, options)?;
                if (distributions.rows, distributions.columns) != (view.rows, view.columns) {
                    let reason = format!("the targets are {:?}; expected {:?}", dense.size(), tile.size());
                    return Err(Error::invalid(NAME, reason));
                }
            }
        }
        // A row's last columns are read one at a time; so are bias, class weights and targets where they are not aligned.
        let width = width(&[tile.kind()], &[tile], &[view.stride]);
        Ok(Self { matrix: view, element, width, device })
    }

    /// Returns the arguments of the gradient passes, before and after the number of blocks.
    fn gradient_arguments(
        &self,
        tile: &Tensor,
        inputs: TileInputs<'_>,
        coefficients: Coefficients<'_>,
    ) -> Result<[Vec<Argument>; 2]> {
        let TileInputs { transform, targets, class_weights, .. } = inputs;
        let Matrix { rows, columns, stride } = self.matrix;
        let Coefficients { maximum, powers, target, constant } = coefficients;
        let all = [
            ("maximum", Some(maximum)),
            ("powers", Some(powers)),
            ("target", Some(target)),
            ("constant", constant),
        ];
        for (name, tensor) in all {
            expect(NAME, name, tensor, &[rows], (Kind::Float, self.device))?;
        }
        self.weights(class_weights)?;
        let [_, scale, cap] = transform_arguments(transform);
        let before = vec![pointer(tile), Argument::I64(stride), int(NAME, "the number of columns", columns)?];
        let mut after = vec![scale, cap];
        after.extend(target_arguments(targets));
        after.extend([
            optional(class_weights),
            pointer(maximum),
            pointer(powers),
            pointer(target),
            optional(constant),
        ]);
        Ok([before, after])
    }

    fn weights(&self, weights: Option<&Tensor>) -> Result<()> {
        expect(NAME, "class weights", weights, &[self.matrix.columns], (Kind::Float, self.device))
    }
}

fn target_arguments(targets: Targets<'_>) -> [Argument; 3] {
    match targets {
        Targets::Columns(columns) => [pointer(columns), Argument::Pointer(0), Argument::I64(0)],
        Targets::Dense(dense) => [Argument::Pointer(0), pointer(dense), Argument::I64(dense.stride()[0])],
    }
}

fn transform_arguments(transform: Transform<'_>) -> [Argument; 3] {
    [optional(transform.bias), float(transform.scale), float(transform.softcap.unwrap_or(0.0))]
}

fn blocks(columns: i64, block_columns: i64) -> i64 {
    (columns + block_columns - 1) / block_columns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_and_long_rows_have_large_blocks() {
        for kind in [Kind::BFloat16, Kind::Half, Kind::Float] {
            assert_eq!(statistics_threads(256, 32_000, kind), ROW, "{kind:?}");
            assert_eq!(statistics_threads(FEW_ROWS, 32_000, kind), ROW, "{kind:?}");
            assert_eq!(statistics_threads(FEW_ROWS + 1, 32_000, kind), SHORT.0, "{kind:?}");
        }
        assert_eq!(statistics_threads(4096, 151_936, Kind::Float), ROW);
        assert_eq!(statistics_threads(4096, 151_936, Kind::BFloat16), SHORT.0);
    }
}
