//! The operands of products, without views of tensors.

use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::Dense;
use runtime::{Error, Result};
use tch::Tensor;

/// An operand of a product: a matrix, the rows of a tensor, or the transpose of one of these.
///
/// On a CPU no view is made of it, which would take longer than the product of small matrices.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(super) tensor: &'a Tensor,
    takes_rows: bool,
    pub(super) is_transposed: bool,
}

impl<'a> From<&'a Tensor> for Matrix<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self { tensor, takes_rows: false, is_transposed: false }
    }
}

impl<'a> Matrix<'a> {
    /// Returns `[…, width]`, contiguous or a matrix, as `[n, width]`.
    pub fn rows(tensor: &'a Tensor) -> Self {
        Self { takes_rows: true, ..Self::from(tensor) }
    }

    /// Returns the transposed matrix.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { is_transposed: !self.is_transposed, ..self }
    }

    pub(super) fn layout(self) -> Result<TensorLayout> {
        let mut layout = TensorLayout::of(self.tensor)?;
        if self.takes_rows && layout.size().len() > 2 {
            let size = layout.size().to_vec();
            layout = layout.rows().ok_or_else(|| {
                let reason = format!("the rows of a tensor {size:?} are not contiguous");
                Error::invalid("matrix product", reason)
            })?;
        }
        Ok(if self.is_transposed { layout.transposed() } else { layout })
    }

    /// Returns the matrix as a tensor: the operand itself, or a view of it.
    pub(super) fn view(self) -> Result<Dense<'a>> {
        let matrix = if self.takes_rows { rows(self.tensor)? } else { Dense::Same(self.tensor) };
        Ok(if self.is_transposed { Dense::Copy(matrix.f_tr()?) } else { matrix })
    }
}

/// Returns `[…, width]` as `[n, width]`, also if n is 0: a matrix itself, a view, or a copy of what cannot be viewed.
pub(super) fn rows(x: &Tensor) -> Result<Dense<'_>> {
    let layout = TensorLayout::of(x)?;
    let (&width, leading) = layout.size().split_last().unwrap_or((&1, &[]));
    if leading.len() == 1 {
        return Ok(Dense::Same(x));
    }
    Ok(Dense::Copy(x.f_reshape([leading.iter().product::<i64>(), width])?))
}
