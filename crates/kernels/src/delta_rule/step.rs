//! The rule for one token.
//!
//! The state is read once for keys and queries, and written once: with S the state before the token,
//!
//! ```text
//! δ = β(v − e^g·Sᵀk)        o = e^g·Sᵀq + ⟨q, k⟩δ        S′ = e^g·S + kδᵀ
//! ```

use runtime::Result;
use runtime::ops::TryScalar;
use tch::Tensor;

use super::chunks::by_group;
use super::{DeltaInputs, Sizes, normalise};

pub(super) fn step(inputs: &DeltaInputs<'_>, sizes: &Sizes, state: &Tensor) -> Result<(Tensor, Tensor)> {
    let &Sizes { batch, key_heads, group, key, value, .. } = sizes;
    let kind = state.kind();
    let by_head = |x: &Tensor, rows: i64, width: i64| -> Result<Tensor> {
        Ok(x.f_to_kind(kind)?.f_reshape([batch, key_heads, rows, 1, width])?)
    };
    let (q, _) = normalise(&by_head(inputs.q, 1, key)?)?;
    let q = q.try_mul_scalar((key as f64).powf(-0.5))?;
    let (k, _) = normalise(&by_head(inputs.k, 1, key)?)?;
    let v = by_head(inputs.v, group, value)?;
    let beta = by_head(inputs.beta, group, 1)?;
    let decay = by_head(inputs.g, group, 1)?.f_exp()?;

    let state = state.f_view([batch, key_heads, group, key, value])?;
    let both = by_group(&Tensor::f_cat(&[&k, &q], -2)?, group)?;
    let read = both.f_matmul(&state)?.f_mul(&decay)?;
    let change = v.f_sub(&read.f_narrow(-2, 0, 1)?)?.f_mul(&beta)?;
    let along = q.f_mul(&k)?.f_sum_dim_intlist([-1].as_slice(), true, kind)?;
    let o = read.f_narrow(-2, 1, 1)?.f_addcmul(&along, &change)?;
    let new = state.f_mul(&decay)?.f_addcmul(&k.f_transpose(-1, -2)?, &change)?;
    let o = o.f_reshape([batch, 1, key_heads * group, value])?.f_to_kind(inputs.v.kind())?;
    Ok((o, new.f_reshape(sizes.state())?))
}
