//! The convolution as an autograd function, by one multiplication and sum of the whole row for each token of the window.

use runtime::autograd::{Backward, Forward, Function};
use runtime::ops::TryScalar;
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use super::NAME;
use crate::matmul::wide_kind;

/// Inputs: x `[b, t, channels]` and the weight. Output: y.
pub(super) struct Convolution {
    window: i64,
    /// Used by forward; backward gets them from libtorch.
    documents: Option<Tensor>,
    previous: Option<Tensor>,
    has_documents: bool,
    has_previous: bool,
}

/// What the sums of a row read.
struct Row<'a> {
    /// x in the dtype of the sums, with `window − 1` tokens before it.
    x: Tensor,
    /// The weights of each token of the window, `[window, channels]`.
    weights: Tensor,
    documents: Option<&'a Tensor>,
    window: i64,
    sequence: i64,
}

impl<'a> Row<'a> {
    fn new(
        x: &Tensor,
        weight: &Tensor,
        documents: Option<&'a Tensor>,
        previous: Option<&Tensor>,
        window: i64,
    ) -> Result<Self> {
        let kind = wide_kind(x.kind());
        let (_, sequence, channels) = x.size3()?;
        let wide = x.f_to_kind(kind)?;
        let x = match previous {
            Some(previous) => Tensor::f_cat(&[&previous.f_to_kind(kind)?, &wide], 1)?,
            None => wide.f_constant_pad_nd([0, 0, window - 1, 0])?,
        };
        let weights = weight.f_reshape([channels, window])?.f_to_kind(kind)?.f_tr()?.f_contiguous()?;
        Ok(Self { x, weights, documents, window, sequence })
    }

    /// Weight `index` for every token, `[channels]`, or `[b, t, channels]` with 0 where the token that it multiplies is of another document.
    fn weight(&self, index: i64) -> Result<Tensor> {
        let weight = self.weights.f_select(0, index)?;
        let distance = self.window - 1 - index;
        match self.documents.filter(|_| distance > 0) {
            None => Ok(weight),
            Some(_) => Ok(self.is_same(distance)?.f_mul(&weight)?),
        }
    }

    /// 1 for tokens whose document is that of the token `distance` before, else 0: `[b, t, 1]`.
    fn is_same(&self, distance: i64) -> Result<Tensor> {
        let Some(ids) = self.documents else {
            return Err(Error::invalid(NAME, "there are no documents"));
        };
        let length = self.sequence;
        let distance = distance.min(length);
        let same = ids.f_narrow(1, distance, length - distance)?.f_eq_tensor(&ids.f_narrow(
            1,
            0,
            length - distance,
        )?)?;
        Ok(same.f_constant_pad_nd([distance, 0])?.f_to_kind(self.x.kind())?.f_unsqueeze(-1)?)
    }

    /// The inputs that weight `index` multiplies.
    fn shifted(&self, index: i64) -> Result<Tensor> {
        Ok(self.x.f_narrow(1, index, self.sequence)?)
    }

    /// s.
    fn sums(&self) -> Result<Tensor> {
        let mut sums = self.shifted(0)?.f_mul(&self.weight(0)?)?;
        for index in 1..self.window {
            let _ = sums.f_addcmul_(&self.shifted(index)?, &self.weight(index)?)?;
        }
        Ok(sums)
    }
}

impl Convolution {
    pub(super) fn new(window: i64, documents: Option<&Tensor>, previous: Option<&Tensor>) -> Self {
        let [documents, previous] = [documents, previous].map(|tensor| tensor.map(Tensor::shallow_clone));
        let (has_documents, has_previous) = (documents.is_some(), previous.is_some());
        Self { window, documents, previous, has_documents, has_previous }
    }
}

impl Function for Convolution {
    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (x, weight) = (inputs[0], inputs[1]);
        let (documents, previous) = (self.documents.take(), self.previous.take());
        let row = Row::new(x, weight, documents.as_ref(), previous.as_ref(), self.window)?;
        let y = row.sums()?.f_silu_()?.f_to_kind(x.kind())?;
        [Some(x), Some(weight), documents.as_ref(), previous.as_ref()]
            .into_iter()
            .flatten()
            .for_each(|tensor| ctx.save(tensor));
        Ok(vec![y])
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let Some(grad) = grads.into_iter().next().flatten() else { return Ok(vec![None, None]) };
        let mut saved = ctx.take_saved().into_iter();
        let mut next =
            || saved.next().ok_or_else(|| Error::invalid(NAME, "a tensor that forward saved is gone"));
        let (x, weight) = (next()?, next()?);
        let documents = if self.has_documents { Some(next()?) } else { None };
        let previous = if self.has_previous { Some(next()?) } else { None };
        let row = Row::new(&x, &weight, documents.as_ref(), previous.as_ref(), self.window)?;
        let of_sums = of_silu(row.sums()?, &grad)?;

        let of_x = if ctx.needs_input_grad(0) {
            let sum = row.x.f_zeros_like()?;
            for index in 0..self.window {
                let _ = sum.f_narrow(1, index, row.sequence)?.f_addcmul_(&of_sums, &row.weight(index)?)?;
            }
            Some(sum.f_narrow(1, self.window - 1, row.sequence)?.f_to_kind(x.kind())?)
        } else {
            None
        };
        let of_weight = if ctx.needs_input_grad(1) {
            let mut columns = Vec::new();
            for index in 0..self.window {
                let mut product = of_sums.f_mul(&row.shifted(index)?)?;
                let distance = self.window - 1 - index;
                if row.documents.is_some() && distance > 0 {
                    product = product.f_mul(&row.is_same(distance)?)?;
                }
                columns.push(product.f_sum_dim_intlist([0i64, 1].as_slice(), false, product.kind())?);
            }
            Some(Tensor::f_stack(&columns, -1)?.f_reshape(weight.size())?.f_to_kind(weight.kind())?)
        } else {
            None
        };
        Ok(vec![of_x, of_weight])
    }
}

/// d·σ(s)(1 + s(1 − σ(s))).
fn of_silu(sums: Tensor, grad: &Tensor) -> Result<Tensor> {
    let kind: Kind = sums.kind();
    let sigmoid = sums.f_sigmoid()?;
    let slope = sums.f_addcmul(&sums, &sigmoid.f_neg()?)?.try_add_scalar(1.0)?.f_mul(&sigmoid)?;
    Ok(grad.f_to_kind(kind)?.f_mul(&slope)?)
}
