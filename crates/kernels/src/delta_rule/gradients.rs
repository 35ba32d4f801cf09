//! The pass backward over a span of chunks. The mathematics is in the [module above](super).

use runtime::Result;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use super::chunks::{Span, by_group, transpose};
use super::{DeltaInputs, Sizes, normalise};

/// The gradients of a span's inputs, `[b, tokens, heads, width]` in fp32 or f64.
pub(super) struct Gradients {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) g: Tensor,
    pub(super) beta: Tensor,
}

/// Returns Σ x·y over the last dimension, which stays.
fn dot(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    sum(&x.f_mul(y)?, -1)
}

fn sum(x: &Tensor, dim: i64) -> Result<Tensor> {
    Ok(x.f_sum_dim_intlist([dim].as_slice(), true, x.kind())?)
}

/// Σ over the value heads of a key head.
fn over_group(x: &Tensor) -> Result<Tensor> {
    if x.size()[2] == 1 { Ok(x.shallow_clone()) } else { sum(x, 2) }
}

/// The gradient of x from that of x·ρ with ρ = rsqrt(Σx² + ε): ρ(d − x̂⟨x̂, d⟩).
fn of_normalised(x: &Tensor, d: Tensor) -> Result<Tensor> {
    let (normalised, factor) = normalise(x)?;
    let along = dot(&normalised, &d)?;
    Ok(d.f_sub(&normalised.f_mul(&along)?)?.f_mul(&factor)?)
}

impl Span {
    /// Returns the gradients of the span's inputs and of the state before it, from those of its outputs (`[b, h, r, c, n, value]`) and of the
    /// state after it.
    pub(super) fn backward(
        &self,
        inputs: &DeltaInputs<'_>,
        sizes: &Sizes,
        before: &Tensor,
        d_o: &Tensor,
        d_state: Tensor,
    ) -> Result<(Gradients, Tensor)> {
        let group = sizes.group;
        let passed = self.advance(before, false, true)?;
        let states = Tensor::f_stack(&passed.states, 3)?;
        let new = &passed.new_values;
        drop(passed.states);

        // From the last chunk to the first: dS′ before each, and R.
        let of_outputs = transpose(&self.p)?.f_matmul(d_o)?;
        let entering = d_o.f_mul(&self.enter)?;
        let rate_enter = self.beta.f_mul(&self.enter)?;
        let mut d_state = d_state;
        let (mut r, mut d_states) = (Vec::new(), Vec::new());
        for index in (0..self.tokens.chunks()).rev() {
            let of = |x: &Tensor| x.f_select(3, index);
            let d_new = of(&of_outputs)?.f_add(&of(&self.k_leave)?.f_matmul(&d_state)?)?;
            let of_change = transpose(&of(&self.inverse)?)?.f_matmul(&d_new)?;
            let [q, k] = [&self.q, &self.k].map(|x| by_group(&transpose(&of(x)?)?, group));
            let read = q?.f_matmul(&of(&entering)?)?;
            let old = k?.f_matmul(&of_change.f_mul(&of(&rate_enter)?)?)?;
            let next = d_state.f_mul(&of(&self.pass)?)?.f_add(&read)?.f_sub(&old)?;
            d_states.push(std::mem::replace(&mut d_state, next));
            r.push(of_change);
        }
        let in_order = |mut parts: Vec<Tensor>| -> Result<Tensor> {
            parts.reverse();
            Ok(Tensor::f_stack(&parts, 3)?)
        };
        let (r, d_states) = (in_order(r)?, in_order(d_states)?);
        drop((of_outputs, entering));

        // Products with states, `[b, h, r, c, n, key]`.
        let of_read = d_o.f_matmul(&transpose(&states)?)?.f_mul_(&self.enter)?;
        let of_old = r.f_matmul(&transpose(&states)?)?.f_mul_(&self.enter.f_neg()?)?;
        let of_leave = new.f_matmul(&transpose(&d_states)?)?.f_mul_(&self.leave)?;
        let old_dot = dot(&of_old, &self.k)?;
        let leave_dot = dot(&of_leave, &self.k)?;

        // Pairs of tokens: G and diag(β)F, and their sums by rows and columns.
        let mut of_p = d_o.f_matmul(&transpose(new)?)?;
        let mut f = r.f_matmul(&transpose(new)?)?.f_mul_(&self.decay.f_tril(-1)?.f_neg_()?)?;
        let f_kk = sum(&f.f_mul(&self.kk)?, -1)?;
        let f = f.f_mul_(&self.beta)?;
        let pairs = of_p.f_mul(&self.p)?.f_addcmul_(&f, &self.kk)?;
        let of_c = sum(&pairs, -1)?.f_sub(&transpose(&sum(&pairs, -2)?)?)?;
        drop(pairs);
        let of_p = over_group(&of_p.f_mul_(&self.decay)?)?;
        let f = over_group(&f)?;

        let d_beta = dot(&r, &self.v)?.f_add(&old_dot)?.f_add(&f_kk)?;
        let of_c =
            of_c.f_add(&dot(&of_read, &self.q)?)?.f_addcmul(&self.beta, &old_dot)?.f_sub(&leave_dot)?;
        let last = sum(&leave_dot, -2)?;
        let last = last.f_addcmul(&self.pass, &sum(&dot(&d_states, &states)?, -2)?)?;
        let mut end = of_c.f_narrow(-2, of_c.size()[4] - 1, 1)?;
        let _ = end.f_add_(&last)?;
        let d_g = of_c.f_flip([-2])?.f_cumsum(-2, of_c.kind())?.f_flip([-2])?;

        let d_q = over_group(&of_read)?.f_add(&of_p.f_matmul(&self.k)?)?;
        let d_k = over_group(&of_leave.f_addcmul(&of_old, &self.beta)?)?
            .f_add(&transpose(&of_p)?.f_matmul(&self.q)?)?
            .f_add(&f.f_add(&transpose(&f)?)?.f_matmul(&self.k)?)?;

        // The gradients of queries and keys before their normalisation.
        let kind = d_k.kind();
        let raw = |x: &Tensor| self.tokens.split(x, sizes.key_heads, kind);
        let d_q = of_normalised(&raw(inputs.q)?, d_q.try_mul_scalar((sizes.key as f64).powf(-0.5))?)?;
        let d_k = of_normalised(&raw(inputs.k)?, d_k)?;
        let join = |x: &Tensor, kind: Kind| self.tokens.join(x, kind);
        let gradients = Gradients {
            q: join(&d_q, inputs.q.kind())?,
            k: join(&d_k, inputs.k.kind())?,
            v: join(&r.f_mul(&self.beta)?, inputs.v.kind())?,
            g: join(&d_g, inputs.g.kind())?.f_squeeze_dim(-1)?,
            beta: join(&d_beta, inputs.beta.kind())?.f_squeeze_dim(-1)?,
        };
        Ok((gradients, d_state))
    }
}
