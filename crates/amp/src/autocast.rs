//! Computes what gains by low precision in it, and what would lose in fp32.
//!
//! Within a scope ([`Autocast::enter`]) the products of a model (linear layers, matrix products, attention) round their
//! operands to fp16 or bf16 and accumulate in fp32; normalisations, softmax and losses compute in fp32 (Micikevicius et al.,
//! arXiv:1710.03740). Parameters stay in fp32, and so do their gradients: the rounding is part of the graph.
//!
//! This is not libtorch's autocast, which sits in the dispatcher and sees every operator. Models ask
//! [`runtime::precision`], so what is rounded can be read in their code, and the policy goes where the thread's work goes:
//! into recomputation, whichever thread of the engine runs it.
//!
//! ```
//! use amp::Autocast;
//! use models::module::{Context, Projection};
//! use tch::{Device, Kind, Tensor, kind};
//!
//! let layer = models::Linear::new(8, 4, true, (Kind::Float, Device::Cpu))?;
//! let x = Tensor::randn([2, 8], kind::FLOAT_CPU);
//! let autocast = Autocast::new(Kind::BFloat16)?;
//! let y = {
//!     let _scope = autocast.enter();
//!     layer.forward(&x, &Context::default())?
//! };
//! assert_eq!(y.kind(), Kind::BFloat16);
//! runtime::autograd::backward(&[&y.sum(Kind::Float)])?;
//! assert_eq!(layer.weight.grad().kind(), Kind::Float);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Products where the processor has none
//!
//! libtorch multiplies fp16 on most CPUs at under 1 % of the fp32 rate. There the operands are rounded to fp16 all the same,
//! multiplied in fp32, and the result is rounded once: what a processor with fp16 products and fp32 accumulators gives, at
//! fp32 speed. Attention gets operands that were rounded, in fp32, and its output is rounded.
//!
//! # fp8
//!
//! [`Autocast::fp8`] multiplies linear layers in fp8 with a scale for each tensor: [`fp8_linear`].
//!
//! # The cache of casts
//!
//! A weight is cast once for each version of it and not once for each use: [`cast_cache`].

pub mod cast_cache;
pub mod fp8_linear;
mod rounded_linear;

use std::sync::Arc;

use runtime::matmul::compute_kind;
use runtime::precision::{self, Attention, Entered, Policy};
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use cast_cache::{CastCache, CastStatistics};

/// A policy of mixed precision. Clones share their cache.
#[derive(Debug, Clone)]
pub struct Autocast(Arc<Casts>);

impl Autocast {
    /// Products in `dtype`: [`Kind::Half`] or [`Kind::BFloat16`].
    ///
    /// # Errors
    /// [`Error::Dtype`] for any other.
    pub fn new(dtype: Kind) -> Result<Self> {
        if !matches!(dtype, Kind::Half | Kind::BFloat16) {
            return Err(Error::Dtype { found: dtype });
        }
        Ok(Self(Arc::new(Casts { dtype, fp8: false, pure: false, cache: CastCache::new() })))
    }

    /// Linear layers in fp8 ([`fp8_linear`]), all other products in bf16.
    pub fn fp8() -> Self {
        Self(Arc::new(Casts { dtype: Kind::BFloat16, fp8: true, pure: false, cache: CastCache::new() }))
    }

    /// For a model that is of `dtype` itself, normalisations and all: its products as on hardware that has them, and nothing
    /// in fp32. What mixed precision is compared with.
    ///
    /// # Errors
    /// [`Error::Dtype`] for any dtype but [`Kind::Half`] and [`Kind::BFloat16`].
    pub fn pure(dtype: Kind) -> Result<Self> {
        let Casts { dtype, .. } = *Self::new(dtype)?.0;
        Ok(Self(Arc::new(Casts { dtype, fp8: false, pure: true, cache: CastCache::off() })))
    }

    /// Without the cache: every use of a weight casts it.
    #[must_use]
    pub fn without_cache(self) -> Self {
        let &Casts { dtype, fp8, pure, .. } = &*self.0;
        Self(Arc::new(Casts { dtype, fp8, pure, cache: CastCache::off() }))
    }

    /// The dtype of products.
    pub fn dtype(&self) -> Kind {
        self.0.dtype
    }

    /// Computes under this policy, on this thread, until the guard is dropped. May nest, also in another policy.
    pub fn enter(&self) -> Entered {
        precision::enter(Some(self.0.clone()))
    }

    /// The policy, as `training::Trainer::precision` takes it.
    pub fn policy(&self) -> Arc<dyn Policy> {
        self.0.clone()
    }

    /// Computes in the dtypes at hand until the guard is dropped, within any policy.
    pub fn disabled() -> Entered {
        precision::enter(None)
    }

    /// What the cache did so far.
    pub fn statistics(&self) -> CastStatistics {
        self.0.cache.statistics()
    }
}

#[derive(Debug)]
struct Casts {
    dtype: Kind,
    fp8: bool,
    pure: bool,
    cache: CastCache,
}

impl Casts {
    /// Whether tensors of this kind are cast: those that are computed in full by choice (fp64) are not, nor are integers.
    fn casts(&self, tensor: &Tensor) -> bool {
        matches!(tensor.kind(), Kind::Float | Kind::Half | Kind::BFloat16)
    }

    fn low(&self, tensor: &Tensor) -> runtime::Result<Tensor> {
        if self.casts(tensor) { Ok(tensor.f_to_kind(self.dtype)?) } else { Ok(tensor.shallow_clone()) }
    }

    /// The cast of a tensor that is likely to be used again: a leaf.
    fn low_weight(&self, tensor: &Tensor) -> runtime::Result<Tensor> {
        if !self.casts(tensor) || tensor.kind() == self.dtype {
            return Ok(tensor.shallow_clone());
        }
        self.cache.cast(tensor, self.dtype)
    }

    /// Whether the device multiplies the dtype itself.
    fn native(&self, tensor: &Tensor) -> bool {
        compute_kind(tensor.device(), self.dtype) == self.dtype
    }
}

impl Policy for Casts {
    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> runtime::Result<Tensor> {
        if self.fp8 && self.casts(x) && self.casts(weight) {
            return fp8_linear::linear(x, weight, bias, self.dtype);
        }
        let (x, weight) = (self.low(x)?, self.low_weight(weight)?);
        let bias = bias.map(|bias| self.low_weight(bias)).transpose()?;
        if x.kind() != self.dtype || self.native(&x) {
            return runtime::autograd::retain::linear(&x, &weight, bias.as_ref());
        }
        rounded_linear::linear(&x, &weight, bias.as_ref())
    }

    fn matmul(&self, a: &Tensor, b: &Tensor) -> runtime::Result<Tensor> {
        let (a, b) = (self.low(a)?, self.low(b)?);
        if a.kind() != self.dtype || self.native(&a) {
            return Ok(a.f_matmul(&b)?);
        }
        Ok(a.f_to_kind(Kind::Float)?.f_matmul(&b.f_to_kind(Kind::Float)?)?.f_to_kind(self.dtype)?)
    }

    fn attend(&self, qkv: [&Tensor; 3], attention: Attention<'_>) -> runtime::Result<Tensor> {
        let [q, k, v] = qkv;
        let (q, k, v) = (self.low(q)?, self.low(k)?, self.low(v)?);
        if q.kind() != self.dtype || self.native(&q) {
            return attention(&q, &k, &v);
        }
        let wide = |t: &Tensor| t.f_to_kind(Kind::Float);
        Ok(attention(&wide(&q)?, &wide(&k)?, &wide(&v)?)?.f_to_kind(self.dtype)?)
    }

    fn operand(&self, x: &Tensor) -> runtime::Result<Tensor> {
        self.low(x)
    }

    fn weight(&self, weight: &Tensor) -> runtime::Result<Tensor> {
        self.low_weight(weight)
    }

    fn widened_kind(&self, kind: Kind) -> Kind {
        match kind {
            Kind::Half | Kind::BFloat16 if !self.pure => Kind::Float,
            other => other,
        }
    }

    fn entered(&self) {
        self.cache.entered();
    }

    fn left(&self) {
        self.cache.left();
    }
}
