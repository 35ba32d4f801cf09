//! Frozen matrices in few bits, and their products: one interface over two formats.
//!
//! | format | bits per weight | tensor |
//! |---|---|---|
//! | [`nf4`] | 4.13 or 4.5 | u8 or i8, `[out, bytes of a row]` |
//! | [`blocks`] of GGUF files | 2.6 to 8.5 | u8 or i8, `[out, blocks of a row, bytes of a block]` |
//!
//! Dtype and shape of a tensor say which format it has, and [`matrix_shape`] recovers `[out, in]`. So a matrix is one tensor of its module:
//! it is offloaded, checkpointed and adapted like any other.
//!
//! **Products** ([`linear`], [`mm_into`], [`mm_transposed_into`]) dequantize a tile of at most [`tile_bytes`], multiply it, and continue
//! with the next, so beyond their results they take the memory of one tile, whatever the size of the matrix; a tile has at least 64 rows or
//! columns. Up to [`FEW`](crate::matmul::FEW) vectors are multiplied without a tile ([`matvec`]). On a CPU tiles are in fp32 (in bf16 for
//! operands in bf16 that the [`processor`](crate::processor) multiplies itself), and an element of a result has the bits of a product with
//! the whole matrix. On a GPU a tile has the dtype of x, so that x in bf16 or fp16 is multiplied on tensor cores, with accumulators in fp32.
//!
//! The gradient of W does not exist; backward computes that of x, g·Ŵ, from tiles of columns, without a transposed copy.
//!
//! ```
//! use kernels::nf4::{self, Scales};
//! use kernels::quantized;
//! use tch::{Kind, Tensor, kind};
//!
//! let weight = nf4::quantize(&Tensor::randn([96, 128], kind::FLOAT_CPU), Scales::Nested)?;
//! assert_eq!(quantized::matrix_shape(&weight), Some([96, 128]));
//!
//! let x = Tensor::randn([5, 128], kind::FLOAT_CPU).set_requires_grad(true);
//! let y = quantized::linear(&x, &weight, None)?;
//! let dense = quantized::dequantize(&weight, Kind::Float)?;
//! assert!(y.allclose(&x.linear::<Tensor>(&dense, None), 1e-5, 1e-5, false));
//! runtime::autograd::backward(&[&y.sum(Kind::Float)])?;
//! assert_eq!(x.grad().size(), [5, 128]);
//! # Ok::<(), runtime::Error>(())
//! ```

pub mod blocks;
mod product;

use std::ops::Range;

use runtime::tensor_layout::TensorLayout;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use blocks::BlockType;
pub(crate) use product::few_vectors;
pub use product::{linear, matvec, mm_into, mm_transposed_into, tile_bytes};

use crate::nf4::{self, Scales};

/// Returns whether a tensor is a matrix in one of the formats.
pub fn is_quantized(weight: &Tensor) -> bool {
    nf4::is_nf4(weight) || BlockType::of(weight).is_some()
}

/// [`is_quantized`] of a tensor of this layout, without a call of libtorch.
pub fn is_quantized_layout(layout: &TensorLayout) -> bool {
    Scales::of(layout.kind()).is_some() && matches!(layout.size().len(), 2 | 3)
}

/// Returns whether a model in this dtype has quantized matrices: a dtype of [`nf4`], or [`blocks::KIND`].
pub fn is_quantized_kind(kind: Kind) -> bool {
    Scales::of(kind).is_some() || kind == blocks::KIND
}

/// Returns `[out, in]` of a weight: its shape, or that of the matrix that it holds. `None` for a tensor that is no matrix, or of bytes
/// that hold none.
pub fn matrix_shape(weight: &Tensor) -> Option<[i64; 2]> {
    match BlockType::of(weight) {
        Some(stored) => {
            let size = weight.size();
            Some([size[0], size[1] * stored.values() as i64])
        }
        None => nf4::matrix_shape(weight),
    }
}

/// Returns Ŵ as a matrix of `kind`: each value computed in fp32 and rounded once.
///
/// # Errors
/// A tensor that is not quantized; errors of libtorch.
pub fn dequantize(weight: &Tensor, kind: Kind) -> Result<Tensor> {
    dequantize_rows(weight, 0..expect(weight)?[0], kind)
}

/// Returns some rows of Ŵ: see [`dequantize`].
///
/// # Errors
/// As [`dequantize`]; rows that W does not have.
pub fn dequantize_rows(weight: &Tensor, rows: Range<i64>, kind: Kind) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let [out, inner] = expect(weight)?;
    if rows.start < 0 || rows.start > rows.end || rows.end > out {
        return Err(refuse(format!("rows {rows:?} of a weight [{out}, {inner}]")));
    }
    let options = (stored_kind(kind, weight.device()), weight.device());
    let mut values = Tensor::f_empty([rows.end - rows.start, inner], options)?;
    dequantize_window(weight, [rows, 0..inner], &mut values)?;
    Ok(values.f_to_kind(kind)?)
}

/// Returns the dtype in which a window is written for a computation in `kind`: one that [`dequantize_window`] supports.
fn stored_kind(kind: Kind, device: Device) -> Kind {
    match kind {
        Kind::BFloat16 => kind,
        Kind::Half if device != Device::Cpu => kind,
        _ => Kind::Float,
    }
}

/// Writes a window of rows and columns of Ŵ into a matrix of its shape: fp32 or bf16, on other devices than the CPU also fp16.
fn dequantize_window(weight: &Tensor, window: [Range<i64>; 2], out: &mut Tensor) -> Result<()> {
    match BlockType::of(weight) {
        Some(stored) => blocks::dequantize_window(stored, weight, window, out),
        None => nf4::dequantize_window(weight, window, out),
    }
}

/// Returns the shape `[out, in]` of a quantized weight, or an error for another tensor.
fn expect(weight: &Tensor) -> Result<[i64; 2]> {
    matrix_shape(weight).filter(|_| is_quantized(weight)).ok_or_else(|| {
        refuse(format!(
            "a tensor in {:?} of shape {:?}, which is not quantized",
            weight.kind(),
            weight.size()
        ))
    })
}

fn refuse(reason: String) -> Error {
    Error::invalid("quantized weight", reason)
}
