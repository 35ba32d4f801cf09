//! Autocast: matrix products in fp16, bf16 or fp8, everything else in fp32.
//!
//! Within a scope ([`Autocast::enter`]) linear layers, matrix products and attention round their operands to fp16 or bf16
//! and accumulate in fp32; normalisations, softmax and losses compute in fp32 (Micikevicius et al., arXiv:1710.03740).
//! Parameters and their gradients stay in fp32: the cast is part of the graph.
//!
//! libtorch's autocast intercepts every operator in the dispatcher. Here a model calls [`runtime::precision`] for its
//! products, so its code shows what is cast. Activation checkpointing recomputes under the policy of the forward pass, on
//! any thread of the autograd engine.
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
//! # CPUs without native low-precision products
//!
//! On most CPUs libtorch multiplies fp16 at under 1 % of the fp32 rate. There the operands are rounded to fp16, multiplied
//! in fp32, and the result is rounded once. The numerics are those of native fp16 products with fp32 accumulators; the speed
//! is that of fp32. Attention receives the rounded operands in fp32 and rounds its output.
//!
//! # fp8
//!
//! [`Autocast::fp8`] computes linear layers in fp8 with one scale per tensor: [`fp8_linear`].
//!
//! # Cast cache
//!
//! A weight is cast once per version, not once per use: [`cast_cache`].

pub mod cast_cache;
pub mod fp8_linear;
mod rounded_linear;

use std::sync::Arc;

use kernels::matmul::compute_kind;
use kernels::quantized::is_quantized;
use runtime::precision::{self, Attention, Policy, PolicyGuard, Product};
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use cast_cache::{CastCache, CastStatistics};

/// A mixed-precision policy. Clones share one cast cache.
#[derive(Debug, Clone)]
pub struct Autocast(Arc<CastPolicy>);

impl Autocast {
    /// Creates a policy that computes products in `dtype`: [`Kind::Half`] or [`Kind::BFloat16`].
    ///
    /// # Errors
    /// Any other dtype.
    pub fn new(dtype: Kind) -> Result<Self> {
        if !matches!(dtype, Kind::Half | Kind::BFloat16) {
            return Err(Error::config(
                "autocast",
                format!("{dtype:?} is not a low-precision dtype; expected Half or BFloat16"),
            ));
        }
        Ok(Self(Arc::new(CastPolicy { dtype, fp8: false, pure: false, cache: CastCache::new() })))
    }

    /// Creates a policy that computes linear layers in fp8 ([`fp8_linear`]) and all other products in bf16.
    pub fn fp8() -> Self {
        Self(Arc::new(CastPolicy { dtype: Kind::BFloat16, fp8: true, pure: false, cache: CastCache::new() }))
    }

    /// Creates a policy for a model whose parameters have `dtype` themselves: nothing computes in fp32, normalisations
    /// included. Products have the numerics of native hardware. This is the baseline for mixed precision.
    ///
    /// # Errors
    /// Any dtype but [`Kind::Half`] and [`Kind::BFloat16`].
    pub fn pure(dtype: Kind) -> Result<Self> {
        let CastPolicy { dtype, .. } = *Self::new(dtype)?.0;
        Ok(Self(Arc::new(CastPolicy { dtype, fp8: false, pure: true, cache: CastCache::disabled() })))
    }

    /// Returns the dtype of products.
    pub fn dtype(&self) -> Kind {
        self.0.dtype
    }

    /// Applies this policy to the current thread until the guard is dropped. Scopes nest, also with other policies.
    pub fn enter(&self) -> PolicyGuard {
        precision::enter(Some(self.0.clone()))
    }

    /// Returns the policy for `training::Trainer::precision`.
    pub fn policy(&self) -> Arc<dyn Policy> {
        self.0.clone()
    }

    /// Disables any policy on the current thread until the guard is dropped.
    pub fn disabled() -> PolicyGuard {
        precision::enter(None)
    }

    /// Returns the counters of the cast cache.
    pub fn statistics(&self) -> CastStatistics {
        self.0.cache.statistics()
    }
}

#[derive(Debug)]
struct CastPolicy {
    dtype: Kind,
    fp8: bool,
    pure: bool,
    cache: CastCache,
}

/// Returns whether a tensor is cast. fp64 tensors and integers are not.
fn is_cast(tensor: &Tensor) -> bool {
    matches!(tensor.kind(), Kind::Float | Kind::Half | Kind::BFloat16)
}

impl CastPolicy {
    fn cast(&self, tensor: &Tensor) -> runtime::Result<Tensor> {
        if is_cast(tensor) { Ok(tensor.f_to_kind(self.dtype)?) } else { Ok(tensor.shallow_clone()) }
    }

    /// Casts a weight through the cache.
    fn cast_weight(&self, tensor: &Tensor) -> runtime::Result<Tensor> {
        if !is_cast(tensor) || tensor.kind() == self.dtype {
            return Ok(tensor.shallow_clone());
        }
        self.cache.cast(tensor, self.dtype)
    }

    /// Returns whether the device has native products of the dtype.
    fn is_native(&self, tensor: &Tensor) -> bool {
        compute_kind(tensor.device(), self.dtype) == self.dtype
    }
}

impl Policy for CastPolicy {
    fn linear(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        product: Product<'_>,
    ) -> runtime::Result<Tensor> {
        if self.fp8 && is_cast(x) && is_cast(weight) {
            return fp8_linear::linear(x, weight, bias, self.dtype);
        }
        let (x, weight) = (self.cast(x)?, self.cast_weight(weight)?);
        let bias = bias.map(|bias| self.cast_weight(bias)).transpose()?;
        if x.kind() != self.dtype || self.is_native(&x) || is_quantized(&weight) {
            return product(&x, &weight, bias.as_ref());
        }
        rounded_linear::linear(&x, &weight, bias.as_ref())
    }

    fn matmul(&self, a: &Tensor, b: &Tensor) -> runtime::Result<Tensor> {
        let (a, b) = (self.cast(a)?, self.cast(b)?);
        if a.kind() != self.dtype || self.is_native(&a) {
            return Ok(a.f_matmul(&b)?);
        }
        Ok(a.f_to_kind(Kind::Float)?.f_matmul(&b.f_to_kind(Kind::Float)?)?.f_to_kind(self.dtype)?)
    }

    fn attend(&self, qkv: [&Tensor; 3], attention: Attention<'_>) -> runtime::Result<Tensor> {
        let [q, k, v] = qkv;
        let (q, k, v) = (self.cast(q)?, self.cast(k)?, self.cast(v)?);
        if q.kind() != self.dtype || self.is_native(&q) {
            return attention(&q, &k, &v);
        }
        let fp32 = |t: &Tensor| t.f_to_kind(Kind::Float);
        Ok(attention(&fp32(&q)?, &fp32(&k)?, &fp32(&v)?)?.f_to_kind(self.dtype)?)
    }

    fn operand(&self, x: &Tensor) -> runtime::Result<Tensor> {
        self.cast(x)
    }

    fn weight(&self, weight: &Tensor) -> runtime::Result<Tensor> {
        self.cast_weight(weight)
    }

    fn widened_kind(&self, kind: Kind) -> Kind {
        match kind {
            Kind::Half | Kind::BFloat16 if !self.pure => Kind::Float,
            other => other,
        }
    }

    fn uncached(&self) -> Option<Arc<dyn Policy>> {
        let Self { dtype, fp8, pure, .. } = *self;
        Some(Arc::new(Self { dtype, fp8, pure, cache: CastCache::disabled() }))
    }

    fn entered(&self) {
        self.cache.entered();
    }

    fn left(&self) {
        self.cache.left();
    }
}
