//! Rows of an embedding and of the output projection that replace the table's own for a few tokens.
//!
//! ```text
//! E[i] = R[k] if i = ids[k], else W[i]        W [v, d] frozen, of any dtype or quantized; R [n, d] trained, n ≪ v
//! x = E[tokens]          ∂L/∂R[k] = Σ over positions with token ids[k] of ∂L/∂x
//! z = h·Eᵀ [.., v]       ∂L/∂R[k] = Σ over positions of ∂L/∂z[ids[k]]·h
//! ```
//!
//! So new tokens are trained at the price of n rows: no gradient and no state of an optimizer has the size of the table, and the table
//! may be in NF4 or in the blocks of a GGUF file. The rows are values, not differences, as in PEFT's `trainable_token_indices`: a table
//! that was resized with other random rows gives the same model. PEFT copies the table with the rows in it for each forward; here the
//! looked-up rows and the columns of the logits are replaced.
//!
//! Where the head is tied to the embedding, both have the same rows, and their gradients add up.

use kernels::linear::linear;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use crate::error::{Error, Result, wrong_shape};
use crate::module::{Module, Visitor, VisitorMut};

/// The name of the rows within their part, as in PEFT's files.
pub const TOKEN_ROWS: &str = "token_adapter.trainable_tokens_delta";

/// Rows that replace those of some tokens. See the [module](self).
#[derive(Debug)]
pub struct TokenRows {
    /// R: `[n, width]`, the row of each token in the order of [`TokenRows::tokens`].
    pub rows: Tensor,
    /// `[n]` int64: the tokens in the order of `rows`.
    tokens: Tensor,
    /// `[n]` int64: the tokens in ascending order.
    sorted: Tensor,
    /// `[n]` int64: the row of each token of `sorted`.
    places: Tensor,
}

impl TokenRows {
    /// Creates rows `[tokens, width]` for these tokens, in their order.
    ///
    /// # Errors
    /// No token, a token below 0 or one that is there twice; another number of rows.
    pub fn new(tokens: &[i64], rows: Tensor) -> Result<Self> {
        let refuse = |reason: String| Err(Error::invalid("token rows", reason));
        if rows.dim() != 2 || rows.size()[0] != tokens.len() as i64 {
            let expected = format!("[{}, width], a row for each token", tokens.len());
            return Err(wrong_shape("token rows", "rows", rows.size(), expected));
        }
        let mut order: Vec<(i64, i64)> = tokens.iter().copied().zip(0..).collect();
        order.sort_unstable();
        if let Some(pair) = order.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return refuse(format!("token {} is there twice; name each token once", pair[0].0));
        }
        match order.first() {
            None => return refuse("there is no token; name at least one".to_owned()),
            Some((token, _)) if *token < 0 => {
                return refuse(format!("token {token} is below 0; tokens count from 0"));
            }
            Some(_) => {}
        }
        let (sorted, places): (Vec<i64>, Vec<i64>) = order.into_iter().unzip();
        let device = rows.device();
        let on_device =
            |values: &[i64]| -> Result<Tensor> { Ok(Tensor::f_from_slice(values)?.f_to_device(device)?) };
        Ok(Self {
            tokens: on_device(tokens)?,
            sorted: on_device(&sorted)?,
            places: on_device(&places)?,
            rows,
        })
    }

    /// Returns the tokens `[n]`, int64, in the order of the rows.
    pub fn tokens(&self) -> &Tensor {
        &self.tokens
    }

    /// Returns another handle on the same rows.
    pub fn shallow_clone(&self) -> Self {
        let clone = Tensor::shallow_clone;
        Self {
            rows: clone(&self.rows),
            tokens: clone(&self.tokens),
            sorted: clone(&self.sorted),
            places: clone(&self.places),
        }
    }

    /// Replaces the rows of the table that were looked up for `tokens_bt` `[batch, sequence]`: `looked_up` `[batch, sequence, width]`.
    ///
    /// The number of operations does not depend on the tokens, so a CUDA graph can repeat it.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn embed(&self, looked_up: &Tensor, tokens_bt: &Tensor) -> Result<Tensor> {
        let last = self.sorted.size()[0] - 1;
        let at = tokens_bt.f_searchsorted(&self.sorted, false, false, "left", None::<&Tensor>)?;
        let at = at.try_clamp_max(last)?.f_reshape([-1])?;
        let size = tokens_bt.size();
        let is_replaced =
            self.sorted.f_index_select(0, &at)?.f_reshape(size.as_slice())?.f_eq_tensor(tokens_bt)?;
        let row = self.places.f_index_select(0, &at)?.f_reshape(size.as_slice())?;
        // The gradient of a row is summed in the dtype of the rows.
        let rows = Tensor::f_embedding(&self.rows, &row, -1, false, false)?.f_to_kind(looked_up.kind())?;
        Ok(rows.f_where_self(&is_replaced.f_unsqueeze(-1)?, looked_up)?)
    }

    /// Replaces columns of `products` `[…, vocabulary]`, the products of `hidden` `[…, width]` with the table.
    /// Overwrites `products`, or where autograd records makes new ones.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn project(&self, products: &mut Tensor, hidden: &Tensor) -> Result<()> {
        let rows = self.rows.f_to_kind(hidden.kind())?;
        let columns = linear(hidden, &rows, None)?.f_to_kind(products.kind())?;
        if products.requires_grad() || columns.requires_grad() {
            // They may be a view that a hand-written function made, which autograd does not let change in place.
            *products = products.f_index_copy(-1, &self.tokens, &columns)?;
            return Ok(());
        }
        let _ = products.f_index_copy_(-1, &self.tokens, &columns)?;
        Ok(())
    }

    /// Refuses a token beyond a table of `vocabulary` rows, and rows of another width.
    ///
    /// # Errors
    /// These two.
    pub fn check_against(&self, [vocabulary, width]: [i64; 2]) -> Result<()> {
        let largest = self.sorted.f_int64_value(&[self.sorted.size()[0] - 1])?;
        if largest >= vocabulary {
            return Err(Error::invalid(
                "token rows",
                format!(
                    "token {largest} is beyond a table of {vocabulary} rows; resize the model's vocabulary first"
                ),
            ));
        }
        if self.rows.size()[1] != width {
            let expected = format!("[n, {width}], the width of the table");
            return Err(wrong_shape("token rows", "rows", self.rows.size(), expected));
        }
        Ok(())
    }
}

impl Module for TokenRows {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter(TOKEN_ROWS, &self.rows);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter(TOKEN_ROWS, &mut self.rows)
    }
}

/// Rows of a table that are read at a time for their mean.
const PIECE: i64 = 4096;

/// Returns the mean of a table's first `count` rows, also of a quantized one: `[width]` in fp32, f64 for f64.
///
/// # Errors
/// A table without these rows.
pub fn mean_row(table: &Tensor, count: i64) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let table = table.f_detach()?;
    let kind = if table.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let mut sum: Option<Tensor> = None;
    for start in (0..count).step_by(PIECE as usize) {
        let piece = table.f_narrow(0, start, PIECE.min(count - start))?;
        let piece = match kernels::quantized::is_quantized(&table) {
            true => kernels::quantized::dequantize(&piece, Kind::Float)?,
            false => piece.f_to_kind(kind)?,
        };
        let rows = piece.f_sum_dim_intlist([0].as_slice(), false, kind)?;
        sum = Some(match sum {
            Some(sum) => sum.f_add(&rows)?,
            None => rows,
        });
    }
    let sum = sum.ok_or_else(|| Error::invalid("token rows", "the mean of no rows"))?;
    Ok(sum.try_div_scalar(count as f64)?)
}

/// Returns rows of a table in `kind`, also of a quantized one: `[tokens, width]`.
///
/// # Errors
/// A token outside the table.
pub fn rows_of(table: &Tensor, tokens: &[i64], kind: Kind) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let index = Tensor::f_from_slice(tokens)?.f_to_device(table.device())?;
    let rows = table.f_detach()?.f_index_select(0, &index)?;
    if !kernels::quantized::is_quantized(table) {
        return Ok(rows.f_to_kind(kind)?);
    }
    Ok(kernels::quantized::dequantize(&rows, Kind::BFloat16)?.f_to_kind(kind)?)
}
