//! The layout of a tensor from one call into libtorch, instead of one call for each property (`cpp/layout.cpp`).

use std::ops::Range;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::{Status, check};
use crate::error::{Error, Result};

/// Dimensions whose sizes and strides come with the call: few, because layouts are copied often.
const DIMENSIONS: usize = 4;

const STRIDED: u8 = 1;
const NEGATED: u8 = 2;
const CONTIGUOUS: u8 = 4;
const MEMORY: u8 = 8;
const OTHER_DEVICE: u8 = 16;
const RECORDED: u8 = 32;
const SOLE_OWNER: u8 = 64;

/// `TensorLayout` of `cpp/layout.cpp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Raw {
    sizes: [i64; DIMENSIONS],
    strides: [i64; DIMENSIONS],
    begin: usize,
    end: usize,
    dims: i32,
    device: i16,
    kind: i8,
    flags: u8,
}

unsafe extern "C" {
    fn rt_layout(tensor: *const C_tensor, out: *mut Raw) -> Status;
}

/// Shape, strides, dtype, device and addresses of a tensor at the time of [`TensorLayout::of`].
#[derive(Clone, Debug)]
pub struct TensorLayout {
    raw: Raw,
    kind: Kind,
    /// Sizes and strides of a tensor of more than 4 dimensions.
    many: Option<(Vec<i64>, Vec<i64>)>,
}

impl TensorLayout {
    /// Describes a tensor. Allocates nothing for one of at most 4 dimensions.
    ///
    /// # Errors
    /// A tensor that is not defined, of a dtype that `tch` does not know, or on another device than a CPU or a CUDA device.
    pub fn of(tensor: &Tensor) -> Result<Self> {
        let mut raw = Raw::default();
        // SAFETY: the tensor and the out-parameter outlive the call, which writes one `TensorLayout`, whose fields are those of `Raw`.
        unsafe { check(rt_layout(tensor.as_ptr(), &mut raw)) }?;
        if raw.kind < 0 {
            return Err(Error::Torch("the tensor is undefined".to_owned()));
        }
        if raw.flags & OTHER_DEVICE != 0 {
            let reason = format!("a tensor is on {:?}; expected the CPU or a CUDA device", tensor.device());
            return Err(Error::invalid("layout", reason));
        }
        let kind = kind(raw.kind).ok_or_else(|| {
            Error::invalid("layout", format!("a tensor has the unknown dtype {}", raw.kind))
        })?;
        let many = raw.dims as usize > DIMENSIONS;
        Ok(Self { raw, kind, many: many.then(|| (tensor.size(), tensor.stride())) })
    }

    /// Returns the size of each dimension.
    pub fn size(&self) -> &[i64] {
        self.many.as_ref().map_or_else(|| &self.raw.sizes[..self.raw.dims as usize], |(size, _)| size)
    }

    /// Returns the distance of neighbours in each dimension, in elements; zeros for a sparse tensor.
    pub fn stride(&self) -> &[i64] {
        self.many.as_ref().map_or_else(|| &self.raw.strides[..self.raw.dims as usize], |(_, stride)| stride)
    }

    /// Returns the layout as a matrix of rows, with the leading dimensions as one; `None` for a scalar or a vector, and for a tensor of more
    /// than two dimensions that is not contiguous or has more than 4.
    pub fn rows(mut self) -> Option<Self> {
        match self.size() {
            [_, _] => Some(self),
            &[ref leading @ .., width]
                if leading.len() > 1 && self.is_contiguous() && self.many.is_none() =>
            {
                let rows = leading.iter().product();
                self.raw.sizes[..2].copy_from_slice(&[rows, width]);
                self.raw.strides[..2].copy_from_slice(&[width, 1]);
                self.raw.dims = 2;
                Some(self)
            }
            _ => None,
        }
    }

    /// Returns the layout of the transposed matrix; itself if it is no matrix.
    pub fn transposed(mut self) -> Self {
        if self.raw.dims == 2 {
            self.raw.sizes.swap(0, 1);
            self.raw.strides.swap(0, 1);
            let ([rows, columns, ..], [row, column, ..]) = (self.raw.sizes, self.raw.strides);
            let is_contiguous =
                rows * columns == 0 || (columns == 1 || column == 1) && (rows == 1 || row == columns);
            self.raw.flags =
                if is_contiguous { self.raw.flags | CONTIGUOUS } else { self.raw.flags & !CONTIGUOUS };
        }
        self
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.size().iter().product::<i64>() as usize
    }

    /// Returns the dtype.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns whether the elements are floating-point numbers.
    pub fn is_floating_point(&self) -> bool {
        matches!(
            self.kind,
            Kind::Half
                | Kind::Float
                | Kind::Double
                | Kind::BFloat16
                | Kind::Float8e5m2
                | Kind::Float8e4m3fn
                | Kind::Float8e5m2fnuz
                | Kind::Float8e4m3fnuz
        )
    }

    /// Returns the device.
    pub fn device(&self) -> Device {
        usize::try_from(self.raw.device).map_or(Device::Cpu, Device::Cuda)
    }

    /// Returns whether the elements are at strides in memory: not sparse, not of another library.
    pub fn is_strided(&self) -> bool {
        self.raw.flags & STRIDED != 0
    }

    /// Returns whether libtorch negates the elements when they are read.
    pub fn is_neg(&self) -> bool {
        self.raw.flags & NEGATED != 0
    }

    /// Returns whether the elements are dense, in the order of the dimensions.
    pub fn is_contiguous(&self) -> bool {
        self.raw.flags & CONTIGUOUS != 0
    }

    /// Returns whether operators with this tensor are recorded: it requires a gradient, and this thread records gradients.
    pub fn is_recorded(&self) -> bool {
        self.raw.flags & RECORDED != 0
    }

    /// Returns whether no other code can access the memory, as [`is_sole_owner`](super::tensor::is_sole_owner).
    pub fn is_sole_owner(&self) -> bool {
        self.raw.flags & SOLE_OWNER != 0
    }

    /// Returns the bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.numel() * self.kind.elt_size_in_bytes()
    }

    /// Returns the addresses of the elements; empty without elements.
    ///
    /// # Errors
    /// A tensor whose memory is detached ([`MovableMemory`](crate::memory::MovableMemory)), or that has no storage.
    pub fn range(&self) -> Result<Range<usize>> {
        if self.raw.flags & MEMORY == 0 {
            return Err(Error::Torch("the tensor has elements, but no memory".to_owned()));
        }
        Ok(self.raw.begin..self.raw.end)
    }
}

/// The dtype of a number of `c10::ScalarType` (torch/headeronly/core/ScalarType.h).
fn kind(number: i8) -> Option<Kind> {
    Some(match number {
        0 => Kind::Uint8,
        1 => Kind::Int8,
        2 => Kind::Int16,
        3 => Kind::Int,
        4 => Kind::Int64,
        5 => Kind::Half,
        6 => Kind::Float,
        7 => Kind::Double,
        8 => Kind::ComplexHalf,
        9 => Kind::ComplexFloat,
        10 => Kind::ComplexDouble,
        11 => Kind::Bool,
        12 => Kind::QInt8,
        13 => Kind::QUInt8,
        14 => Kind::QInt32,
        15 => Kind::BFloat16,
        23 => Kind::Float8e5m2,
        24 => Kind::Float8e4m3fn,
        25 => Kind::Float8e5m2fnuz,
        26 => Kind::Float8e4m3fnuz,
        _ => return None,
    })
}
