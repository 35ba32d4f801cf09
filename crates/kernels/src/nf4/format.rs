//! The tensor that holds a matrix: where scales and codes are in it.
//!
//! ```text
//! Scales::Nested (u8)   d fp32 [⌈b/256⌉] · m fp32 · q u8 [b] · codes u8 [n/2]      n = out·in, b = ⌈n/64⌉
//! Scales::Float (i8)    s fp32 [b] · codes u8 [n/2]
//! ```
//!
//! Of a byte of codes the high four bits are the first weight. Codes begin at a multiple of 64 bytes; zeros follow up to a multiple of
//! `out` bytes, so that the tensor is `[out, bytes of a row]`. Two more columns add at least `out` bytes, so the length
//! of a row determines `in`.

use std::ops::Range;
use std::sync::OnceLock;

use runtime::Result;
use tch::{Device, Kind, Tensor};

use super::{BLOCK, expect, refuse};

/// Blocks whose nested scales share a factor.
pub const NESTED_BLOCK: i64 = 256;
/// Alignment of the codes.
const ALIGNMENT: i64 = 64;

/// How the blocks' scales are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// In fp32: 4.5 bits per weight.
    Float,
    /// In eight bits, with a factor in fp32 for each 256 and their mean: 4.13 bits per weight.
    Nested,
}

impl Scales {
    /// Returns the dtype of weights with these scales.
    pub fn kind(self) -> Kind {
        match self {
            Self::Float => Kind::Int8,
            Self::Nested => Kind::Uint8,
        }
    }

    /// Returns how weights in this dtype have their scales; `None` for other dtypes than NF4's.
    pub fn of(kind: Kind) -> Option<Self> {
        [Self::Float, Self::Nested].into_iter().find(|scales| scales.kind() == kind)
    }

    /// Returns the bytes before the codes of a matrix of `elements`.
    fn bytes_before_codes(self, elements: i64) -> i64 {
        let blocks = (elements + BLOCK - 1) / BLOCK;
        let bytes = match self {
            Self::Float => 4 * blocks,
            Self::Nested => 4 * ((blocks + NESTED_BLOCK - 1) / NESTED_BLOCK) + 4 + blocks,
        };
        (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT
    }

    fn row_bytes(self, [out, inner]: [i64; 2]) -> i64 {
        let elements = out * inner;
        (self.bytes_before_codes(elements) + elements / 2 + out - 1) / out
    }
}

/// Returns whether a tensor is a matrix in NF4.
pub fn is_nf4(weight: &Tensor) -> bool {
    Scales::of(weight.kind()).is_some() && weight.dim() == 2
}

/// Returns `[out, in]` of a weight: its shape, or that of the matrix that it holds in NF4. `None` for a tensor that is no matrix, or
/// of bytes that hold none.
pub(crate) fn matrix_shape(weight: &Tensor) -> Option<[i64; 2]> {
    let &[out, row] = &weight.size()[..] else { return None };
    let Some(scales) = Scales::of(weight.kind()) else { return Some([out, row]) };
    // A byte of a row holds less than two weights; the number of bytes increases with each pair of columns.
    let (mut low, mut high) = (1, row);
    while low < high {
        let middle = (low + high) / 2;
        if scales.row_bytes([out.max(1), 2 * middle]) < row { low = middle + 1 } else { high = middle }
    }
    let inner = 2 * low;
    (out > 0 && scales.row_bytes([out, inner]) == row).then_some([out, inner])
}

/// Creates the tensor for a matrix `[out, in]`; its values are zeros.
///
/// # Errors
/// A size below 1, an odd `in`; too little memory.
pub fn empty([out, inner]: [i64; 2], scales: Scales, device: Device) -> Result<Tensor> {
    if out < 1 || inner < 2 || inner % 2 != 0 || out.checked_mul(inner).is_none() {
        let reason =
            format!("a matrix [{out}, {inner}]; expected at least one row, and an even number of columns");
        return Err(refuse(reason));
    }
    Ok(Tensor::f_zeros([out, scales.row_bytes([out, inner])], (scales.kind(), device))?)
}

/// The parts of a weight, as flat views of its bytes (u8).
#[derive(Debug)]
pub struct Sections {
    /// Two weights in each byte, the first in the high four bits.
    pub codes: Tensor,
    /// s of each block in fp32, or with nested scales q.
    pub absmax: Tensor,
    /// With nested scales d of each 256 blocks, and m, in fp32.
    pub nested: Option<(Tensor, Tensor)>,
}

/// Views the parts of a weight, which must be contiguous.
///
/// # Errors
/// A tensor that is not NF4, or not contiguous.
pub fn sections(weight: &Tensor) -> Result<Sections> {
    let Layout { codes, absmax, nested } = layout(weight)?;
    let flat = weight.f_detach()?.f_view([-1])?.f_view_dtype(Kind::Uint8)?;
    let part = |range: Range<usize>| flat.f_narrow(0, range.start as i64, range.len() as i64);
    let nested = match nested {
        Some([factors, offset]) => Some((part(factors)?, part(offset)?)),
        None => None,
    };
    Ok(Sections { codes: part(codes)?, absmax: part(absmax)?, nested })
}

/// The bytes of each of the [`Sections`].
pub(crate) struct Layout {
    pub(crate) codes: Range<usize>,
    pub(crate) absmax: Range<usize>,
    pub(crate) nested: Option<[Range<usize>; 2]>,
}

/// Returns where the parts of a weight are.
pub(crate) fn layout(weight: &Tensor) -> Result<Layout> {
    let [out, inner] = expect(weight)?;
    if !weight.is_contiguous() {
        return Err(refuse(format!("a weight of strides {:?}; expected a contiguous one", weight.stride())));
    }
    let elements = out * inner;
    let blocks = (elements + BLOCK - 1) / BLOCK;
    let part = |start: i64, length: i64| start as usize..(start + length) as usize;
    let scales = Scales::of(weight.kind()).unwrap_or(Scales::Nested);
    let codes = part(scales.bytes_before_codes(elements), elements / 2);
    if scales == Scales::Float {
        return Ok(Layout { codes, absmax: part(0, 4 * blocks), nested: None });
    }
    let factors = 4 * ((blocks + NESTED_BLOCK - 1) / NESTED_BLOCK);
    let nested = Some([part(0, factors), part(factors, 4)]);
    Ok(Layout { codes, absmax: part(factors + 4, blocks), nested })
}

/// Returns the 256 values of nested scales: bitsandbytes' signed dynamic map (Dettmers et al., arXiv:2110.02861). For i from 0 to 6 it
/// has ±10^(i − 6) times the centres of 2^i equal parts of [0.1, 1], and 0 and 1. A torch that was built for another processor may
/// compute some of them with another last bit.
pub fn nested_map() -> &'static [f32; 256] {
    static MAP: OnceLock<[f32; 256]> = OnceLock::new();
    MAP.get_or_init(|| {
        let mut values = vec![0.0, 1.0];
        for exponent in 0..7 {
            let (parts, power) = (1 << exponent, 10f64.powi(exponent - 6) as f32);
            let step = (1.0 - 0.1f32) / parts as f32;
            // As `torch.linspace` on a CPU with FMA: from both ends.
            let bound = |index: i32| {
                if index < (parts + 1) / 2 {
                    step.mul_add(index as f32, 0.1)
                } else {
                    (-step).mul_add((parts - index) as f32, 1.0)
                }
            };
            for index in 0..parts {
                let value = power * ((bound(index) + bound(index + 1)) / 2.0);
                values.extend([value, -value]);
            }
        }
        values.sort_by(f32::total_cmp);
        values.try_into().expect("two and twice 127")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_of_a_matrix_follows_from_its_bytes() {
        for scales in [Scales::Float, Scales::Nested] {
            for out in [1, 2, 3, 5, 64, 127, 1000, 4864] {
                for inner in (2..200).step_by(2).chain([896, 4864, 18944]) {
                    let packed = empty([out, inner], scales, Device::Cpu).unwrap();
                    assert_eq!(matrix_shape(&packed), Some([out, inner]), "{scales:?}");
                    let parts = sections(&packed).unwrap();
                    assert_eq!(parts.codes.numel() as i64, out * inner / 2);
                }
            }
        }
        let bits =
            |scales| empty([4864, 896], scales, Device::Cpu).unwrap().numel() as f64 * 8.0 / (4864.0 * 896.0);
        assert!((4.12..4.14).contains(&bits(Scales::Nested)), "{}", bits(Scales::Nested));
        assert!((bits(Scales::Float) - 4.5).abs() < 1e-3);
    }

    #[test]
    fn other_tensors_are_refused_by_name() {
        let error = empty([3, 5], Scales::Nested, Device::Cpu).unwrap_err().to_string();
        assert!(
            error.contains("[3, 5]; expected at least one row, and an even number of columns"),
            "{error}"
        );
        let bytes = Tensor::zeros([1000, 1], (Kind::Uint8, Device::Cpu));
        assert_eq!(matrix_shape(&bytes), None);
        let error = sections(&bytes).unwrap_err().to_string();
        assert!(error.contains("of shape [1000, 1], which is not NF4"), "{error}");
        let dense = Tensor::zeros([3, 5], (Kind::Float, Device::Cpu));
        assert_eq!((matrix_shape(&dense), is_nf4(&dense)), (Some([3, 5]), false));
    }
}
