//! NF4: frozen weights in four bits, as in QLoRA (Dettmers et al., arXiv:2305.14314) and bitsandbytes.
//!
//! A matrix W `[out, in]` is read row by row in blocks of 64. With s = max |w| of a block, each w is stored as the index c of the
//! nearest value of [`TABLE`] to w/s; the 16 values are quantiles of a normal distribution. The weight that every product uses is
//!
//! ```text
//! ŵ = s·TABLE[c]      in fp32; s is stored in fp32, or with Scales::Nested as s = d·MAP[q] + m
//! ```
//!
//! where m is the mean of all s, d = max |s − m| of 256 blocks, and q is one byte: bitsandbytes' double quantization. That is 4.5 bits
//! per weight with fp32 scales, and 4.13 with nested ones: 3.9 times fewer than bf16.
//!
//! **One tensor.** Scales and codes of a matrix are one tensor, so that a weight stays one tensor of its module: it is offloaded,
//! checkpointed and adapted like any other. Its shape is `[out, bytes of a row]`, from which [`matrix_shape`](crate::quantized::matrix_shape) recovers `[out, in]`;
//! its dtype is u8 for nested scales, and i8 for fp32 ones. [`sections`] views its parts. `in` must be even.
//!
//! **Products** are those of [`quantized`](crate::quantized). A few vectors are multiplied with codes: each is read once and looked up in a
//! register; with AMX, two vectors and more in bf16 are multiplied with weights rounded to bf16. On a GPU a kernel dequantizes a tile, with
//! the CPU's bits, in one read of its codes and one write of its values; where it cannot run, libtorch's operators do.
//!
//! ```
//! use kernels::nf4::{self, Scales};
//! use kernels::quantized;
//! use tch::{Kind, Tensor, kind};
//!
//! let weight = Tensor::randn([96, 128], kind::FLOAT_CPU);
//! let stored = nf4::quantize(&weight, Scales::Nested)?;
//! assert_eq!(quantized::matrix_shape(&stored), Some([96, 128]));
//!
//! let error = quantized::dequantize(&stored, Kind::Float)? - &weight;
//! assert!(error.abs().max().double_value(&[]) < 0.6);
//! # Ok::<(), runtime::Error>(())
//! ```

mod cpu;
pub(crate) mod cuda;
mod format;
mod reference;

use std::ops::Range;

use tch::{Device, Kind, Tensor};

pub(crate) use cpu::matvec;
pub(crate) use format::matrix_shape;
pub(crate) use format::{Layout, layout};
pub use format::{NESTED_BLOCK, Scales, Sections, empty, is_nf4, nested_map, sections};

use crate::processor::computes_on;
use crate::quantized::dequantize;
use runtime::{Error, Result};

/// The number of weights in a block, which share a scale.
pub const BLOCK: i64 = 64;

/// The 16 values of NF4, by code.
pub const TABLE: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Elements that are cast to fp32 at a time while a matrix is quantized: a multiple of [`BLOCK`].
const PIECE: i64 = 1 << 20;

/// Quantizes a matrix `[out, in]` of a floating dtype and any device, with bitsandbytes' rounding: w·(1/s) to the nearest value, the
/// lower one of two that are equally near. It takes a piece of 4 MiB beside the result, and the scales in fp32: 1/16 byte per weight, twice
/// that for nested ones. A weight that is not contiguous is copied.
///
/// # Errors
/// A tensor that is no floating matrix with an even number of columns; values that are not finite in fp32.
pub fn quantize(weight: &Tensor, scales: Scales) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let &[out, inner] = &weight.size()[..] else {
        return Err(refuse(format!("a weight of shape {:?}; expected [out, in]", weight.size())));
    };
    if !weight.is_floating_point() {
        return Err(refuse(format!("a weight in {:?}; expected a floating dtype", weight.kind())));
    }
    // The codes and the blocks' scales in fp32, piece by piece.
    let packed = empty([out, inner], scales, Device::Cpu)?;
    let parts = sections(&packed)?;
    let elements = out * inner;
    let blocks = (elements + BLOCK - 1) / BLOCK;
    let absmax = Tensor::f_empty([blocks], (Kind::Float, Device::Cpu))?;
    let flat = weight.f_detach()?.f_resolve_neg()?.f_reshape([-1])?;
    for start in (0..elements).step_by(PIECE as usize) {
        let length = PIECE.min(elements - start);
        let piece = flat.f_narrow(0, start, length)?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?;
        let piece_absmax = absmax.f_narrow(0, start / BLOCK, (length + BLOCK - 1) / BLOCK)?;
        let codes = parts.codes.f_narrow(0, start / 2, length / 2)?;
        if !cpu::quantize(&piece.f_contiguous()?, &piece_absmax, &codes)? {
            return Err(refuse("a weight that has a value which is not finite in fp32".to_owned()));
        }
    }
    // The scales, as they are or quantized themselves.
    match &parts.nested {
        None => parts.absmax.shallow_clone().f_copy_(&absmax.f_view_dtype(Kind::Uint8)?)?,
        Some((nested, offset)) => {
            let mean = mean_of_scales(&absmax)?;
            cpu::quantize_scales(&absmax.f_sub(&mean)?, nested, &parts.absmax)?;
            offset.shallow_clone().f_copy_(&mean.f_view([1])?.f_view_dtype(Kind::Uint8)?)?;
            // A scale near the largest number may be rounded up to infinity.
            let is_large = blocks > 0 && absmax.f_max()?.f_double_value(&[])? > f64::from(f32::MAX) / 4.0;
            if is_large && !is_finite(&dequantize(&packed, Kind::Float)?)? {
                return Err(refuse(format!(
                    "a weight with values up to {:e}, whose scales overflow fp32 when they are quantized; scale the weight down, or \
                     keep the scales in fp32 (Scales::Float)",
                    absmax.f_max()?.f_double_value(&[])?
                )));
            }
        }
    }
    Ok(packed.f_to_device(weight.device())?)
}

/// Returns the mean of the blocks' scales: in fp32 as bitsandbytes computes it, or in fp64 where their sum overflows.
fn mean_of_scales(absmax: &Tensor) -> Result<Tensor> {
    let mean = absmax.f_mean(Kind::Float)?;
    if absmax.numel() == 0 || is_finite(&mean)? {
        return Ok(mean);
    }
    Ok(absmax.f_to_kind(Kind::Double)?.f_mean(Kind::Double)?.f_to_kind(Kind::Float)?)
}

fn is_finite(tensor: &Tensor) -> Result<bool> {
    Ok(tensor.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0)
}

/// Writes a window of rows and columns of ŵ into a matrix of its shape: fp32 or bf16, on other devices than the CPU also fp16.
pub(crate) fn dequantize_window(weight: &Tensor, window: [Range<i64>; 2], out: &mut Tensor) -> Result<()> {
    pass_for(weight.device()).dequantize(weight, window, out)
}

/// The pass on one kind of device.
trait DequantizePass {
    /// See [`dequantize_window`].
    fn dequantize(&self, weight: &Tensor, window: [Range<i64>; 2], out: &mut Tensor) -> Result<()>;
}

/// Returns the fastest pass for a weight on `device`.
fn pass_for(device: Device) -> &'static dyn DequantizePass {
    if computes_on(device) { &cpu::Cpu } else { &cuda::Cuda }
}

/// Returns the shape `[out, in]` of an NF4 weight, or an error for another tensor.
pub(crate) fn expect(weight: &Tensor) -> Result<[i64; 2]> {
    matrix_shape(weight).filter(|_| is_nf4(weight)).ok_or_else(|| {
        refuse(format!("a tensor in {:?} of shape {:?}, which is not NF4", weight.kind(), weight.size()))
    })
}

fn refuse(reason: String) -> Error {
    Error::invalid("nf4", reason)
}
