//! The trained tensors of one projection's adapter.

use kernels::dropout::Mask;
use kernels::low_rank::Term;
use runtime::ops::TryScalar;
use runtime::random::Generator;
use tch::{Kind, Tensor};

use crate::dora::{row_norms, squared_norms};
use crate::error::Result;
use crate::init::Initial;
use crate::options::LoraLinearConfig;

/// One adapter of one projection.
#[derive(Debug)]
pub(crate) struct Adapter {
    pub(crate) name: String,
    /// `[r, in]`.
    pub(crate) a: Tensor,
    /// `[out, r]`.
    pub(crate) b: Tensor,
    /// `[out]`, for DoRA.
    pub(crate) magnitude: Option<Tensor>,
    /// A frozen low-rank term that is subtracted.
    pub(crate) offset: Option<(Tensor, Tensor)>,
    pub(crate) scaling: f64,
    pub(crate) dropout: f64,
}

impl Adapter {
    /// Creates an adapter for W `[out, in]`.
    pub(crate) fn new(
        name: &str,
        weight: &Tensor,
        options: &LoraLinearConfig,
        generator: &mut Generator,
    ) -> Result<Self> {
        options.check()?;
        let scaling = options.scaling();
        let Initial { a, b, offset } = options.init.draw(weight, options.r, scaling, generator)?;
        let mut adapter = Self {
            name: name.to_owned(),
            a: a.f_set_requires_grad(true)?,
            b: b.f_set_requires_grad(true)?,
            magnitude: None,
            offset,
            scaling,
            dropout: options.dropout,
        };
        if options.dora {
            let _no_grad = tch::no_grad_guard();
            let squares = squared_norms(weight)?;
            let norms = row_norms(weight, &squares, &adapter.terms(None), None)?;
            adapter.magnitude = Some(norms.f_set_requires_grad(true)?);
        }
        Ok(adapter)
    }

    pub(crate) fn shallow_clone(&self) -> Self {
        let clone = Tensor::shallow_clone;
        Self {
            name: self.name.clone(),
            a: clone(&self.a),
            b: clone(&self.b),
            magnitude: self.magnitude.as_ref().map(clone),
            offset: self.offset.as_ref().map(|(a, b)| (clone(a), clone(b))),
            ..*self
        }
    }

    /// Returns the low-rank terms. The subtracted term has no dropout, because it belongs to W.
    pub(crate) fn terms(&self, mask: Option<Mask>) -> Vec<Term<'_>> {
        let mut terms = vec![Term { a: &self.a, b: &self.b, scale: self.scaling, mask }];
        terms.extend(self.offset.as_ref().map(|(a, b)| Term { a, b, scale: -self.scaling, mask: None }));
        terms
    }

    /// Returns the trained tensors with PEFT's names.
    pub(crate) fn tensors(&self) -> Vec<(&'static str, &Tensor)> {
        let mut tensors = vec![("lora_A", &self.a), ("lora_B", &self.b)];
        tensors.extend(self.magnitude.as_ref().map(|magnitude| ("lora_magnitude_vector", magnitude)));
        tensors
    }

    /// Returns s·B·A minus the subtracted term: the change of W, `[out, in]`.
    pub(crate) fn delta(&self) -> Result<Tensor> {
        let mut sum: Option<Tensor> = None;
        for Term { a, b, scale, .. } in self.terms(None) {
            let product = b.f_mm(a)?.try_mul_scalar(scale)?;
            sum = Some(match sum {
                Some(sum) => sum.f_add(&product)?,
                None => product,
            });
        }
        Ok(sum.unwrap_or_else(|| Tensor::zeros([0], (Kind::Float, self.a.device()))))
    }
}
