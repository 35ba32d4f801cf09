//! The orders of elements in memory that passes read.

use runtime::tensor_layout::TensorLayout;
use smallvec::SmallVec;

/// The order of an operand's elements in memory.
#[derive(Clone, Copy)]
pub(super) enum Layout {
    Contiguous,
    /// A matrix `[rows, columns]` whose rows are dense, at any distance.
    DenseRows,
    /// `[…, columns]`: its rows are those of such a matrix.
    FlatRows,
    /// Any dimensions, the last one dense, the others with any strides from 0 on.
    DenseHeads,
    /// Contiguous in some order of the dimensions.
    WithoutGaps,
}

impl Layout {
    pub(super) fn fits(self, tensor: &TensorLayout) -> bool {
        match self {
            Self::Contiguous => tensor.is_contiguous(),
            Self::DenseRows => match (tensor.size(), tensor.stride()) {
                (&[rows, columns], &[row_stride, column_stride]) => {
                    (rows == 0 || columns < 2 || column_stride == 1) && (rows < 2 || row_stride >= columns)
                }
                _ => false,
            },
            Self::FlatRows => has_flat_rows(tensor),
            Self::DenseHeads => dense_heads(tensor.size(), tensor.stride()),
            Self::WithoutGaps => tensor.numel() == 0 || no_gaps(tensor.size(), tensor.stride()),
        }
    }
}

/// Returns whether a tensor `[…, columns]` is a matrix of dense rows at one distance; a vector is one row.
pub(crate) fn has_flat_rows(tensor: &TensorLayout) -> bool {
    let (size, stride) = (tensor.size(), tensor.stride());
    let (Some((&columns, leading)), Some((&column_stride, strides))) =
        (size.split_last(), stride.split_last())
    else {
        return true;
    };
    let rows: i64 = leading.iter().product();
    let row_stride = row_stride(size, stride);
    let mut expected = row_stride;
    let apart = leading.iter().zip(strides).rev().filter(|(size, _)| **size != 1).all(|(size, stride)| {
        let fits = *stride == expected;
        expected = stride * size;
        fits
    });
    (rows == 0 || columns < 2 || column_stride == 1) && (rows < 2 || row_stride >= columns && apart)
}

/// Returns the distance of rows: the stride of the last of the leading dimensions that has several.
pub(super) fn row_stride(size: &[i64], stride: &[i64]) -> i64 {
    let columns = size.last().copied().unwrap_or(1);
    let leading = size.iter().zip(stride).rev().skip(1);
    leading.filter(|(size, _)| **size != 1).map(|(_, stride)| *stride).next().unwrap_or(columns)
}

/// Returns whether the last dimension is dense and no stride is negative. libtorch calls any strides of a tensor without elements
/// contiguous, and any stride of a dimension of 1.
pub(crate) fn has_dense_heads(tensor: &TensorLayout) -> bool {
    dense_heads(tensor.size(), tensor.stride())
}

fn dense_heads(size: &[i64], stride: &[i64]) -> bool {
    size.contains(&0)
        || (stride.last() == Some(&1) || size.last() == Some(&1)) && stride.iter().all(|stride| *stride >= 0)
}

/// Returns whether the elements are contiguous and distinct in memory, in any order of the dimensions.
pub(crate) fn has_no_gaps(tensor: &TensorLayout) -> bool {
    no_gaps(tensor.size(), tensor.stride())
}

fn no_gaps(size: &[i64], stride: &[i64]) -> bool {
    let dimensions = stride.iter().copied().zip(size.iter().copied());
    let mut dimensions: SmallVec<[(i64, i64); 8]> = dimensions.filter(|&(_, size)| size != 1).collect();
    dimensions.sort_unstable();
    let mut expected = 1;
    dimensions.into_iter().all(|(stride, size)| {
        let fits = stride == expected;
        expected *= size;
        fits
    })
}
