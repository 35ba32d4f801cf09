//! The exponents of gradients, and their rounding in fp16 at any scale.
//!
//! A [`GradientRecorder`] wraps another policy and records every gradient that a linear layer or an attention of mixed
//! precision holds in its low dtype: of its output, of its inputs, of its weight. In a backward pass in fp32 that gives the
//! gradients as they are; their exponents e (2ᵉ ≤ |g| < 2ᵉ⁺¹) show what a scale s = 2ᵏ does to them in fp16:
//!
//! - zero where e + k < −25: half of fp16's least number, 2⁻²⁴, rounds to zero;
//! - fewer than 11 bits of mantissa where e + k < −14;
//! - infinite where e + k ≥ 16.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use runtime::autograd::{self, Backward, Forward, Function};
use runtime::precision::{Attention, Policy, Product};
use tch::{Kind, Tensor};

/// The least exponent with a count of its own; below fp32's least.
const LEAST: i64 = -150;
/// The exponent for infinities and NaN, the one after fp32's largest.
const NOT_FINITE: i64 = 128;

/// The kind of a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum GradientKind {
    /// Gradients of inputs and outputs.
    Activations,
    /// Gradients of weights and biases.
    Weights,
}

impl GradientKind {
    /// Both.
    pub(crate) const ALL: [Self; 2] = [Self::Activations, Self::Weights];

    /// Its name in records.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Activations => "activations",
            Self::Weights => "weights",
        }
    }
}

/// Numbers by exponent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Histogram {
    /// Exponent, and how many numbers have it.
    pub exponents: BTreeMap<i64, u64>,
    /// Numbers that are zero.
    pub zeros: u64,
    /// Infinities and NaN.
    pub not_finite: u64,
}

impl Histogram {
    /// Adds a tensor's numbers, of any floating dtype.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub(crate) fn add(&mut self, tensor: &Tensor) -> runtime::Result<()> {
        let _no_grad = autograd::GradMode::off();
        // fp64 holds every subnormal of fp32 as a normal number. `frexp` gives a mantissa in [½, 1).
        let magnitude = tensor.f_to_kind(Kind::Double)?.f_abs()?.f_reshape([-1])?;
        let (_, exponent) = magnitude.f_frexp()?;
        let exponent = exponent.f_to_kind(Kind::Int64)?.f_sub_scalar(1)?.f_clamp(LEAST, NOT_FINITE - 1)?;
        let zero = magnitude.f_eq(0.0)?;
        let finite = magnitude.f_isfinite()?;
        let exponent = exponent.f_masked_fill(&finite.f_logical_not()?, NOT_FINITE)?;
        let exponent = exponent.f_masked_fill(&zero, LEAST - 1)?.f_sub_scalar(LEAST - 1)?;
        let counts = exponent.f_bincount::<Tensor>(None, NOT_FINITE - LEAST + 2)?;
        for (index, count) in Vec::<i64>::try_from(&counts)?.into_iter().enumerate() {
            let count = count.unsigned_abs();
            match index as i64 + LEAST - 1 {
                exponent if exponent < LEAST => self.zeros += count,
                NOT_FINITE => self.not_finite += count,
                exponent if count > 0 => *self.exponents.entry(exponent).or_default() += count,
                _ => {}
            }
        }
        Ok(())
    }

    /// How many numbers there are.
    pub(crate) fn total(&self) -> u64 {
        self.zeros + self.not_finite + self.exponents.values().sum::<u64>()
    }

    fn share(&self, wanted: impl Fn(i64) -> bool) -> f64 {
        let nonzero: u64 = self.exponents.values().sum();
        let count: u64 =
            self.exponents.iter().filter(|(exponent, _)| wanted(**exponent)).map(|(_, n)| n).sum();
        count as f64 / nonzero.max(1) as f64
    }

    /// The share of the numbers other than zero that fp16 makes zero at the scale 2^`log2_scale`.
    pub(crate) fn underflow(&self, log2_scale: i64) -> f64 {
        self.share(|exponent| exponent + log2_scale < -25)
    }

    /// The share of the numbers other than zero that lose bits of their mantissa, those that become zero among them.
    pub(crate) fn subnormal(&self, log2_scale: i64) -> f64 {
        self.share(|exponent| exponent + log2_scale < -14)
    }

    /// The share that becomes infinite.
    pub(crate) fn overflow(&self, log2_scale: i64) -> f64 {
        self.share(|exponent| exponent + log2_scale >= 16)
    }
}

type Seen = Arc<Mutex<BTreeMap<GradientKind, Histogram>>>;

/// Records the gradients of products that another policy computes; with `None`, in the operands' own dtypes.
#[derive(Debug)]
pub(crate) struct GradientRecorder {
    inner: Option<Arc<dyn Policy>>,
    seen: Seen,
}

impl GradientRecorder {
    /// Creates a recorder around `inner`.
    pub(crate) fn new(inner: Option<Arc<dyn Policy>>) -> Self {
        Self { inner, seen: Seen::default() }
    }

    /// Returns the gradients recorded so far.
    pub(crate) fn histogram(&self, kind: GradientKind) -> Histogram {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).get(&kind).cloned().unwrap_or_default()
    }

    fn watched(&self, tensor: &Tensor, kind: GradientKind) -> runtime::Result<Tensor> {
        let [y] = autograd::apply(Watched { kind, seen: self.seen.clone() }, &[tensor])?;
        Ok(y)
    }
}

impl Policy for GradientRecorder {
    fn linear(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        product: Product<'_>,
    ) -> runtime::Result<Tensor> {
        let (x, weight) =
            (self.watched(x, GradientKind::Activations)?, self.watched(weight, GradientKind::Weights)?);
        let bias = bias.map(|bias| self.watched(bias, GradientKind::Weights)).transpose()?;
        let y = match &self.inner {
            Some(inner) => inner.linear(&x, &weight, bias.as_ref(), product)?,
            None => x.f_linear(&weight, bias.as_ref())?,
        };
        self.watched(&y, GradientKind::Activations)
    }

    fn matmul(&self, a: &Tensor, b: &Tensor) -> runtime::Result<Tensor> {
        let y = match &self.inner {
            Some(inner) => inner.matmul(a, b)?,
            None => a.f_matmul(b)?,
        };
        self.watched(&y, GradientKind::Activations)
    }

    fn attend(&self, [q, k, v]: [&Tensor; 3], attention: Attention<'_>) -> runtime::Result<Tensor> {
        let y = match &self.inner {
            Some(inner) => inner.attend([q, k, v], attention)?,
            None => attention(q, k, v)?,
        };
        self.watched(&y, GradientKind::Activations)
    }

    fn operand(&self, x: &Tensor) -> runtime::Result<Tensor> {
        self.inner.as_ref().map_or_else(|| Ok(x.shallow_clone()), |inner| inner.operand(x))
    }

    fn weight(&self, weight: &Tensor) -> runtime::Result<Tensor> {
        self.inner.as_ref().map_or_else(|| Ok(weight.shallow_clone()), |inner| inner.weight(weight))
    }

    fn widened_kind(&self, kind: Kind) -> Kind {
        self.inner.as_ref().map_or(kind, |inner| inner.widened_kind(kind))
    }

    fn entered(&self) {
        if let Some(inner) = &self.inner {
            inner.entered();
        }
    }

    fn left(&self) {
        if let Some(inner) = &self.inner {
            inner.left();
        }
    }
}

/// Its input, whose gradient it looks at.
struct Watched {
    kind: GradientKind,
    seen: Seen,
}

impl Function for Watched {
    fn forward(&mut self, _: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        Ok(vec![inputs[0].f_alias_copy()?])
    }

    fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> runtime::Result<Vec<Option<Tensor>>> {
        if let Some(Some(grad)) = grads.first() {
            self.seen
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .entry(self.kind)
                .or_default()
                .add(grad)?;
        }
        Ok(grads)
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use tch::kind;

    use super::*;

    #[test]
    fn exponents_and_what_fp16_makes_of_them() {
        let values: Vec<f32> = vec![
            1.0,
            -1.5,
            2.0,
            0.0,
            -0.0,
            f32::MIN_POSITIVE,
            1e-45,
            f32::MAX,
            f32::INFINITY,
            f32::NAN,
            6e-8,
            2.9e-8,
            65_536.0,
        ];
        let mut histogram = Histogram::default();
        histogram.add(&Tensor::from_slice(&values)).unwrap();
        assert_eq!((histogram.zeros, histogram.not_finite, histogram.total()), (2, 2, 13));
        let expected = [(-149, 1), (-126, 1), (-26, 1), (-24, 1), (0, 2), (1, 1), (16, 1), (127, 1)];
        assert_eq!(histogram.exponents, BTreeMap::from(expected));
        for log2 in [-10, 0, 3, 12, 100] {
            let scaled: Vec<f16> = values
                .iter()
                .filter(|value| value.is_finite() && **value != 0.0)
                .map(|value| f16::from_f64(f64::from(*value) * 2f64.powi(log2)))
                .collect();
            let share = |wanted: fn(&f16) -> bool| {
                scaled.iter().filter(|value| wanted(value)).count() as f64 / scaled.len() as f64
            };
            assert_eq!(histogram.underflow(log2.into()), share(|v| v.to_f64() == 0.0), "2^{log2}");
            assert_eq!(histogram.overflow(log2.into()), share(|v| v.is_infinite()), "2^{log2}");
            let lossy = |v: &f16| v.to_f64() == 0.0 || v.to_f64().abs() < 2f64.powi(-14);
            assert_eq!(histogram.subnormal(log2.into()), share(lossy), "2^{log2}");
        }
    }

    #[test]
    fn a_probe_changes_nothing_and_sees_every_gradient_of_a_product() {
        let leaf = |size: &[i64], scale: f64| {
            let n: i64 = size.iter().product();
            ((Tensor::arange(n, kind::DOUBLE_CPU) + 1.0).sin() * scale).reshape(size).set_requires_grad(true)
        };
        let run = |policy: Option<Arc<dyn Policy>>| {
            let (x, w, b) = (leaf(&[3, 4], 1.0), leaf(&[5, 4], 0.5), leaf(&[5], 2.0));
            let y = {
                let _within = policy.map(|policy| runtime::precision::enter(Some(policy)));
                kernels::linear::linear(&x, &w, Some(&b)).unwrap()
            };
            autograd::backward(&[&y.square().sum(Kind::Double)]).unwrap();
            [y.detach(), x.grad(), w.grad(), b.grad()]
        };
        let probe = Arc::new(GradientRecorder::new(None));
        let plain = run(None);
        assert_eq!(run(Some(probe.clone())), plain);
        let mut expected = Histogram::default();
        for tensor in [&plain[2], &plain[3]] {
            expected.add(tensor).unwrap();
        }
        assert_eq!(probe.histogram(GradientKind::Weights), expected);
        let mut expected = Histogram::default();
        for tensor in [&plain[1], &(&plain[0] * 2.0)] {
            expected.add(tensor).unwrap();
        }
        assert_eq!(probe.histogram(GradientKind::Activations), expected);
    }
}
