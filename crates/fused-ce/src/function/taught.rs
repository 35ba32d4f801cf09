//! The divergence of a chunk from its teacher, and its gradient.
//!
//! With z `[c, v]` the student's logits of the chunk and y `[c, u]` the teacher's, one more product Y = X'·W'ᵀ makes y, and passes over the
//! first min(v, u) columns of both make D `[c]` and ∂D/∂z in the memory of y. Neither is kept: a recomputation makes them again. For the formulas
//! see [`models::distillation`].

use kernels::cross_entropy::{
    Coefficients, Statistics, Targets as TileTargets, TileInputs, Transform, Wanted,
};
use kernels::low_rank::base_product_into;
use models::distillation::{DistillationConfig, Divergence, log_rest};
use runtime::Result;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use super::Fused;
use crate::inputs::compute_kind;

/// What a student is taught with. The caller's tensors, flat over tokens.
#[derive(Debug)]
pub(crate) struct Taught {
    pub(crate) options: DistillationConfig,
    pub(crate) source: Source,
}

/// Where a teacher's distributions come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// A model's last layer.
    Hidden {
        /// X': `[tokens, h']`.
        x: Tensor,
        /// W': `[u, h']`.
        weight: Tensor,
        /// `[u]`, in the dtype of the logits.
        bias: Option<Tensor>,
        /// Classes `[k]` and rows `[k, h']` in place of the weight's, in the dtype of x.
        replaced: Option<[Tensor; 2]>,
        scale: f64,
        softcap: Option<f64>,
        /// u.
        columns: i64,
    },
    /// `[tokens, k]`.
    TopK { tokens: Tensor, log_probabilities: Tensor },
}

/// The divergence of a chunk `[c]`, and ∂D/∂z of the first columns, if asked for.
pub(super) struct OfChunk {
    pub(super) divergence: Tensor,
    pub(super) gradient: Option<Tensor>,
}

impl Taught {
    /// Tiles of a chunk's logits that exist at a time beside the student's.
    pub(crate) fn tiles(&self) -> u64 {
        match &self.source {
            Source::Hidden { .. } => tiles(self.options.divergence),
            Source::TopK { .. } => 1,
        }
    }
}

/// Returns the tiles of the logits of a chunk that exist at a time beside the student's, with a teacher's logits: these, the student's log-probabilities, and
/// those of the operators.
pub fn tiles(divergence: Divergence) -> u64 {
    match divergence {
        Divergence::ReverseKl => 2,
        Divergence::ForwardKl => 3,
        Divergence::JensenShannon { .. } => 4,
    }
}

impl Fused {
    /// Computes the divergence of the chunk whose logits are `tile`, which is only read, and with `wants_gradient` its gradient with regard to
    /// them.
    pub(super) fn of_teacher(
        &self,
        taught: &Taught,
        tile: &Tensor,
        (start, count): (i64, i64),
        wants_gradient: bool,
    ) -> Result<OfChunk> {
        let temperature = taught.options.temperature;
        match &taught.source {
            Source::Hidden { columns, .. } => {
                let y = self.logits_of_teacher(&taught.source, start, count)?;
                let common = self.sizes.columns.min(*columns);
                // y becomes ln q, and a copy of z ln p.
                let log_p = self.log_softmax(tile.f_narrow(1, 0, common)?.try_div_scalar(temperature)?)?;
                let log_q = y.f_narrow(1, 0, common)?;
                let log_q = match temperature {
                    1.0 => log_q,
                    temperature => log_q.try_mul_scalar_(1.0 / temperature)?,
                };
                let log_q = self.log_softmax(log_q)?;
                of_distributions(taught.options.divergence, log_p, log_q, wants_gradient)
            }
            Source::TopK { tokens, log_probabilities } => {
                let log_p = self.log_softmax(tile.try_div_scalar(temperature)?)?;
                let tokens = self.gather(tokens, start, count)?;
                let log_q = self.gather(log_probabilities, start, count)?.f_to_kind(log_p.kind())?;
                of_tokens(log_p, &tokens, &log_q, wants_gradient)
            }
        }
        .map(|of_chunk| of_chunk.with_temperature(temperature))?
    }

    /// Divides the upstream gradients `[c]` of a chunk between labels and teacher: returns those of the labels, and ∂L/∂r of the teacher's part with
    /// regard to the products r of the student's chunk, whose logits are `tile`.
    pub(super) fn divided(
        &self,
        upstream: Tensor,
        of_teacher: Option<(f64, OfChunk)>,
        tile: &Tensor,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Some((weight, OfChunk { gradient: Some(mut gradient), .. })) = of_teacher else {
            return Ok((upstream, None));
        };
        let scale = self.options.scale * (1.0 - weight);
        let _ = gradient.f_mul_(&column(&upstream.try_mul_scalar(scale)?)?)?;
        if let Some(cap) = self.options.softcap {
            let slope = tile.f_narrow(1, 0, gradient.size()[1])?.f_square()?;
            let slope = slope.try_mul_scalar_(-1.0 / (cap * cap))?.try_add_scalar_(1.0)?;
            let _ = gradient.f_mul_(&slope)?;
        }
        Ok((upstream.try_mul_scalar(weight)?, Some(gradient)))
    }

    /// Turns logits into the gradient of the products, in this dtype, with the teacher's part of it.
    pub(super) fn gradient_of(
        &self,
        tile: &mut Tensor,
        (inputs, coefficients): (TileInputs<'_>, Coefficients<'_>),
        of_teacher: Option<Tensor>,
        kind: Kind,
    ) -> Result<Tensor> {
        let Some(of_teacher) = of_teacher else {
            return self.pass.gradient_as(tile, inputs, coefficients, kind);
        };
        self.pass.gradient(tile, inputs, coefficients)?;
        let _ = tile.f_narrow(1, 0, of_teacher.size()[1])?.f_add_(&of_teacher)?;
        drop(of_teacher);
        Ok(tile.f_to_kind(kind)?)
    }

    /// Computes the teacher's logits `[count, u]` of a chunk.
    fn logits_of_teacher(&self, source: &Source, start: i64, count: i64) -> Result<Tensor> {
        let Source::Hidden { x, weight, bias, replaced, scale, softcap, columns } = source else {
            return Err(runtime::Error::invalid("linear cross-entropy", "the teacher has no hidden states"));
        };
        let x = self.gather(x, start, count)?;
        let kind = compute_kind(x.kind());
        let mut y = Tensor::f_empty([count, *columns], (kind, x.device()))?;
        base_product_into(&mut y, &x, weight, false)?;
        if let Some([classes, rows]) = replaced {
            let mut of_rows = Tensor::f_empty([count, rows.size()[0]], (kind, x.device()))?;
            base_product_into(&mut of_rows, &x, rows, false)?;
            let _ = y.f_index_copy_(1, classes, &of_rows)?;
        }
        self.pass.logits(&mut y, Transform { bias: bias.as_ref(), scale: *scale, softcap: *softcap })?;
        Ok(y.f_to_kind(self.plan.compute)?)
    }

    /// Subtracts log Σ eᶻ from each row, in place.
    fn log_softmax(&self, tile: Tensor) -> Result<Tensor> {
        let mut tile = tile;
        let options = (tile.kind(), tile.device());
        let mut row = Statistics::new(tile.size()[0], false, Wanted::default(), options)?;
        let columns = Tensor::f_zeros([tile.size()[0]], (Kind::Int64, tile.device()))?;
        let inputs = TileInputs::new(TileTargets::Columns(&columns));
        self.pass.statistics(&mut tile, inputs, &mut row)?;
        Ok(tile.f_sub_(&row.log_sum_exp()?.f_unsqueeze(1)?)?)
    }
}

impl OfChunk {
    fn with_temperature(self, temperature: f64) -> Result<Self> {
        if temperature != 1.0
            && let Some(gradient) = &self.gradient
        {
            let _ = gradient.try_mul_scalar_(1.0 / temperature)?;
        }
        Ok(self)
    }
}

/// The sum of each row, in the tile's dtype.
fn row_sums(tile: &Tensor) -> Result<Tensor> {
    Ok(tile.f_sum_dim_intlist([-1i64].as_slice(), false, tile.kind())?)
}

/// A column of factors for rows.
fn column(rows: &Tensor) -> Result<Tensor> {
    Ok(rows.f_unsqueeze(1)?)
}

/// Computes the divergence of log-probabilities `[c, v]`, whose memory it uses, and ∂D/∂(τ·ln p), if asked for.
fn of_distributions(
    divergence: Divergence,
    mut log_p: Tensor,
    mut log_q: Tensor,
    wants_gradient: bool,
) -> Result<OfChunk> {
    match divergence {
        Divergence::ForwardKl => {
            let q = log_q.f_exp()?;
            let divergence = row_sums(&log_q.f_sub_(&log_p)?.f_mul_(&q)?)?;
            let gradient = wants_gradient.then(|| log_p.f_exp_()?.f_sub_(&q)).transpose()?;
            Ok(OfChunk { divergence, gradient })
        }
        Divergence::ReverseKl => {
            // p·(ln p − ln q).
            let mut terms = log_q.f_neg_()?.f_add_(&log_p)?;
            let p = log_p.f_exp_()?;
            let mut terms = terms.f_mul_(&p)?;
            let divergence = row_sums(&terms)?;
            let gradient = wants_gradient
                .then(|| -> Result<_> { Ok(terms.f_addcmul_(&p, &column(&divergence)?.f_neg()?)?) })
                .transpose()?;
            Ok(OfChunk { divergence, gradient })
        }
        Divergence::JensenShannon { beta } => {
            // With d = ln β − ln(1 − β), the sums ln q + d and ln p differ from those of the mixture by ln(1 − β) alone.
            let of_student = (-beta).ln_1p();
            let d = beta.ln() - of_student;
            let _ = log_q.try_add_scalar_(d)?;
            let mut log_m = log_q.f_logaddexp(&log_p)?;
            // Σ q·(ln q − ln m), with q = e^(ln q + d)·e^(−d).
            let powers = log_q.f_exp()?;
            let terms = log_q.f_sub_(&log_m)?.try_add_scalar_(-d - of_student)?.f_mul_(&powers)?;
            let of_teacher = row_sums(&terms)?.try_mul_scalar(beta * (-d).exp())?;
            drop((powers, terms, log_q));
            // p·(ln p − ln m).
            let mut terms = log_m.f_neg_()?.f_add_(&log_p)?.try_add_scalar_(-of_student)?;
            let p = log_p.f_exp_()?;
            let mut terms = terms.f_mul_(&p)?;
            let k = row_sums(&terms)?;
            let divergence = of_teacher.f_add(&k.try_mul_scalar(1.0 - beta)?)?;
            let gradient = wants_gradient
                .then(|| -> Result<_> {
                    let gradient = terms.f_addcmul_(&p, &column(&k)?.f_neg()?)?;
                    Ok(gradient.try_mul_scalar_(1.0 - beta)?)
                })
                .transpose()?;
            Ok(OfChunk { divergence, gradient })
        }
    }
}

/// Computes the forward divergence of log-probabilities `[c, v]`, whose memory it uses, from a teacher's of `tokens` `[c, k]`.
fn of_tokens(mut log_p: Tensor, tokens: &Tensor, log_q: &Tensor, wants_gradient: bool) -> Result<OfChunk> {
    let own = log_p.f_gather(1, tokens, false)?;
    let [log_s, log_r] = [log_rest(log_q)?, log_rest(&own)?];
    let q = log_q.f_exp()?;
    let outside = log_s.f_sub(&log_r)?;
    let divergence = row_sums(&log_q.f_sub(&own)?.f_mul(&q)?)?.f_add(&log_s.f_exp()?.f_mul(&outside)?)?;
    if !wants_gradient {
        return Ok(OfChunk { divergence, gradient: None });
    }
    // p·(1 − s/r) everywhere, and p − q in the set.
    let share = column(&outside.f_exp()?)?;
    let p = own.f_exp()?;
    let mut gradient = log_p.f_exp_()?.f_mul_(&share.f_neg()?.try_add_scalar_(1.0)?)?;
    let gradient = gradient.f_scatter_(1, tokens, &p.f_sub(&q)?)?;
    Ok(OfChunk { divergence, gradient: Some(gradient) })
}
