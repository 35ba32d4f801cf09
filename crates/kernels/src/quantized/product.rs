//! Products with a quantized weight, tile by tile.

use runtime::Result;
use runtime::autograd::{Backward, Forward, Function, apply, retain};
use runtime::device::graph::operators_only;
use runtime::profile::{Flops, kernel, record_external};
use tch::{Device, Kind, Tensor};

use super::blocks::{self, BlockType};
use super::{dequantize_window, expect, refuse, stored_kind};
use crate::{gpu, matmul, nf4};

/// Returns the largest number of bytes of the dequantized values that a product has at a time, unless 128 rows or columns have more: 8 MiB on
/// a CPU, and 64 MiB on a GPU, where a tile takes two launches and most matrices are one tile.
pub fn tile_bytes(device: Device) -> i64 {
    if gpu::is_chosen(device) { 64 << 20 } else { 8 << 20 }
}

/// Smallest number of rows or columns of a tile: products of fewer have other bits in the `gemm` crate.
const LEAST: i64 = 128;
/// Rows or columns of a tile are a multiple of this, unless all fit: whole blocks of NF4.
const MULTIPLE: i64 = 64;

/// Computes `out = x·Ŵᵀ`; with `accumulate`, `out += x·Ŵᵀ`: x `[m, in]`, `out [m, out]`. See [`matmul::mm_into`] for dtypes and errors; x
/// may also have another dtype than `out`.
///
/// # Errors
/// A weight that is not quantized; shapes that do not match; as [`matmul::mm_into`].
pub fn mm_into(out: &mut Tensor, x: &Tensor, weight: &Tensor, accumulate: bool) -> Result<()> {
    multiply(out, x, weight, accumulate, Side::Rows)
}

/// Computes `out = g·Ŵ`; with `accumulate`, `out += g·Ŵ`: g `[m, out]`, `out [m, in]`. See [`mm_into`].
///
/// # Errors
/// As [`mm_into`].
pub fn mm_transposed_into(out: &mut Tensor, g: &Tensor, weight: &Tensor, accumulate: bool) -> Result<()> {
    multiply(out, g, weight, accumulate, Side::Columns)
}

/// The part of the weight in a tile. Either way a tile gives whole elements of the output, so that none is summed over tiles.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Rows,
    Columns,
}

fn multiply(out: &mut Tensor, x: &Tensor, weight: &Tensor, accumulate: bool, side: Side) -> Result<()> {
    let [rows, columns] = expect(weight)?;
    let (length, width) = if side == Side::Rows { (rows, columns) } else { (columns, rows) };
    let (&[m, given], &[to, wide]) = (&x.size()[..], &out.size()[..]) else {
        return Err(refuse(format!("a product of {:?} into {:?}; expected matrices", x.size(), out.size())));
    };
    if (m, given, length) != (to, width, wide) {
        let reason = format!("{:?} times a weight [{rows}, {columns}] into {:?}", x.size(), out.size());
        return Err(refuse(format!("{reason}; expected [m, in] into [m, out], or [m, out] into [m, in]")));
    }
    if m == 0 {
        return Ok(());
    }
    let device = weight.device();
    let on_gpu = gpu::is_chosen(device);
    let kind = match (x.kind(), out.kind()) {
        (kind, result) if kind == result => matmul::compute_kind(device, kind),
        (_, Kind::Double) => Kind::Double,
        // A GPU sums products of 16 bits in fp32.
        (kind @ (Kind::BFloat16 | Kind::Half), Kind::Float) if on_gpu => kind,
        _ => Kind::Float,
    };
    let stored = stored_kind(kind, device);
    let step = (tile_bytes(device) / stored.elt_size_in_bytes() as i64 / width / MULTIPLE * MULTIPLE)
        .max(LEAST)
        .min(length);
    let tile_size = |length: i64| if side == Side::Rows { [length, width] } else { [width, length] };
    let memory = Tensor::f_empty([step * width], (stored, device))?;
    // On the CPU a product in fp32 casts operands in 16 bits itself.
    let x = if mixes(device, kind, x) { x.shallow_clone() } else { x.f_to_kind(kind)? };
    let mut start = 0;
    while start < length {
        let rest = length - start;
        // The last tile is no smaller than the least: the tile before it leaves it enough.
        let leaves_few = (step + 1..step + LEAST).contains(&rest) && step >= 2 * LEAST;
        let count = if leaves_few { (rest - LEAST) / MULTIPLE * MULTIPLE } else { step.min(rest) };
        let mut tile = memory.f_narrow(0, 0, count * width)?.f_view(tile_size(count))?;
        let window = start..start + count;
        let window = if side == Side::Rows { [window, 0..columns] } else { [0..rows, window] };
        dequantize_window(weight, window, &mut tile)?;
        let tile = tile.f_to_kind(kind)?;
        let right = if side == Side::Rows { tile.f_tr()? } else { tile };
        into_window(&mut out.f_narrow(1, start, count)?, &x, &right, accumulate)?;
        start += count;
    }
    Ok(())
}

/// Returns whether [`matmul::mm_into`] takes this operand or output beside others of `kind`.
fn mixes(device: Device, kind: Kind, matrix: &Tensor) -> bool {
    device == Device::Cpu && !gpu::is_chosen(device) && kind == Kind::Float && matrix.kind() != Kind::Double
}

/// [`matmul::mm_into`] for a tile that has the dtype of the computation, and an output of any.
fn into_window(out: &mut Tensor, x: &Tensor, right: &Tensor, accumulate: bool) -> Result<()> {
    let kind = right.kind();
    if out.kind() == kind
        || out.kind() == Kind::Float && kind != Kind::Double
        || mixes(out.device(), kind, out)
    {
        return matmul::mm_into(out, x, right, accumulate);
    }
    let mut wide = match accumulate {
        true => out.f_to_kind(kind)?,
        false => Tensor::f_empty(out.size(), (kind, out.device()))?,
    };
    matmul::mm_into(&mut wide, x, right, accumulate)?;
    out.f_copy_(&wide)?;
    Ok(())
}

/// Computes `x·Ŵᵀ` into fp32 for at most [`FEW`](matmul::FEW) vectors `x [vectors, in]` without a tile; `None` for more, on other
/// devices, and in NF4 for widths that are no multiples of 64.
///
/// # Errors
/// A weight that is not quantized; another width.
pub fn matvec(x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
    few_vectors(x, weight, None, Kind::Float)
}

/// [`matvec`] with a bias `[out]`, in `kind` if that is bf16.
pub(crate) fn few_vectors(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    kind: Kind,
) -> Result<Option<Tensor>> {
    let [rows, columns] = expect(weight)?;
    let &[vectors, width] = &x.size()[..] else {
        return Err(refuse(format!("x is {:?}; expected [vectors, in]", x.size())));
    };
    if width != columns {
        return Err(refuse(format!("x is {:?} for a weight [{rows}, {columns}]", x.size())));
    }
    let on_cpu = [Some(x), Some(weight), bias].into_iter().flatten().all(|one| one.device() == Device::Cpu);
    let on_cpu = on_cpu && !gpu::is_chosen(Device::Cpu) && !operators_only();
    let stored = BlockType::of(weight);
    let are_whole = stored.is_some() || columns % nf4::BLOCK == 0;
    if !on_cpu || !(1..=matmul::FEW).contains(&vectors) || !are_whole {
        return Ok(None);
    }
    let scope = kernel("kernels::quantized::matvec", [x, weight]);
    let product = match stored {
        Some(stored) => blocks::matvec(stored, x, weight, bias, kind)?,
        None => nf4::matvec(x, weight, bias, kind)?,
    };
    drop(scope);
    let flops = Flops::from((2 * vectors * rows * columns).unsigned_abs());
    record_external("kernels::quantized::matvec", flops, weight.numel() as u64)?;
    Ok(Some(product))
}

/// Computes x·Ŵᵀ + b over the last dimension, in x's dtype: x `[…, in]`, b `[out]` of any floating dtype. Keeps nothing but the weight for
/// backward, which computes the gradients of x and b.
///
/// # Errors
/// As [`mm_into`].
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut inputs = vec![x, weight];
    inputs.extend(bias);
    let function = QuantizedLinear { shape: x.size(), kind: x.kind(), bias: bias.map(Tensor::kind) };
    let [y] = apply(function, &inputs)?;
    Ok(y)
}

struct QuantizedLinear {
    /// Of x.
    shape: Vec<i64>,
    kind: Kind,
    /// The dtype of the bias.
    bias: Option<Kind>,
}

impl Function for QuantizedLinear {
    fn name(&self) -> &'static str {
        "quantized linear"
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (x, weight) = (inputs[0], inputs[1]);
        if ctx.needs_input_grad(0) {
            ctx.save(weight);
        }
        retain::kept(|| {
            let [out, inner] = expect(weight)?;
            let x = matrix(x, inner)?;
            let leading = &self.shape[..self.shape.len() - 1];
            // No view: libtorch refuses to change views that a function returns in place.
            let y = Tensor::f_empty([leading, &[out]].concat(), (self.kind, x.device()))?;
            let mut rows = y.f_view([x.size()[0], out])?;
            if let Some(bias) = inputs.get(2) {
                rows.f_copy_(&bias.f_expand_as(&rows)?)?;
            }
            mm_into(&mut rows, &x, weight, self.bias.is_some())?;
            Ok(vec![y])
        })
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let saved = ctx.take_saved();
        let mut result: Vec<Option<Tensor>> = vec![None, None];
        let Some(grad) = grads.into_iter().next().flatten() else { return Ok(result) };
        let grad = grad.f_reshape([-1, grad.size().last().copied().unwrap_or(1)])?;
        if let (true, [weight]) = (ctx.needs_input_grad(0), &saved[..]) {
            let [_, inner] = expect(weight)?;
            let mut dx = Tensor::f_empty([grad.size()[0], inner], (self.kind, grad.device()))?;
            mm_transposed_into(&mut dx, &grad, weight, false)?;
            result[0] = Some(dx.f_view(&self.shape[..])?);
        }
        if let Some(kind) = self.bias {
            let sum = |_| Ok::<_, runtime::Error>(grad.f_sum_dim_intlist([0].as_slice(), false, kind)?);
            result.push(ctx.needs_input_grad(2).then_some(()).map(sum).transpose()?);
        }
        Ok(result)
    }
}

/// Views `[…, width]` as rows, also if there is none.
fn matrix(x: &Tensor, width: i64) -> Result<Tensor> {
    let size = x.size();
    match size.split_last() {
        Some((&last, leading)) if last == width => Ok(x.f_reshape([leading.iter().product(), width])?),
        _ => Err(refuse(format!("x is {size:?} for a weight with {width} columns"))),
    }
}
