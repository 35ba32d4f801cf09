//! Normalisations of the last dimension.

use kernels::norm::{Keep, Norm, Options, add_norm, layer_norm, rms_norm};
use runtime::ops::TryScalar;
use runtime::precision;
use runtime::tensor_layout::TensorLayout;
use tch::{Device, Kind, Tensor};

use crate::error::{Result, wrong_shape};
use crate::init::Init;
use crate::linear::positive;
use crate::module::{Module, Visitor, VisitorMut};

/// The operator that computes a layer norm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NormKernel {
    /// The fused one ([`kernels::norm`]), which keeps its output where the next product keeps it too.
    #[default]
    Fused,
    /// libtorch's `layer_norm`, which keeps its input, in fp32 within mixed precision: the baseline.
    Libtorch,
}

/// y = (x − mean)/√(variance + eps) ⊙ w + b (Ba, Kiros & Hinton 2016).
#[derive(Debug)]
pub struct LayerNorm {
    /// `[width]`.
    pub weight: Tensor,
    /// `[width]`.
    pub bias: Tensor,
    /// Added to the variance.
    pub eps: f64,
    /// The implementation.
    pub kernel: NormKernel,
}

impl LayerNorm {
    /// Creates a norm with weights 1 and biases 0.
    ///
    /// # Errors
    /// A width below 1.
    pub fn new(width: i64, eps: f64, options: (Kind, Device)) -> Result<Self> {
        positive("layer norm", &[("width", width)])?;
        let weight = Init::Constant(1.0).parameter(&[width], options)?;
        let bias = Init::Constant(0.0).parameter(&[width], options)?;
        Ok(Self { weight, bias, eps, kernel: NormKernel::default() })
    }

    /// Normalises `[…, width]`.
    ///
    /// # Errors
    /// Another width or dtype.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let kind = check("layer norm", x, &self.weight)?;
        if self.kernel == NormKernel::Libtorch {
            let x = x.f_to_kind(precision::widened_kind(kind))?;
            let (width, weight, bias) = ([self.weight.numel() as i64], Some(&self.weight), Some(&self.bias));
            return Ok(x.f_layer_norm(width, weight, bias, self.eps, false)?);
        }
        layer_norm(x, Some(&self.weight), Some(&self.bias), options(kind, self.eps))
    }

    /// Returns s = x + update, both `[…, width]`, and its norm. In one pass, if the two have one dtype.
    ///
    /// # Errors
    /// As [`LayerNorm::forward`].
    pub fn add(&self, x: &Tensor, update: &Tensor) -> Result<(Tensor, Tensor)> {
        let fused = self.kernel == NormKernel::Fused;
        let Some(kind) = fused.then(|| one_kind(x, update)).transpose()?.flatten() else {
            let sum = x.f_add(update)?;
            let norm = self.forward(&sum)?;
            return Ok((sum, norm));
        };
        check("layer norm", x, &self.weight)?;
        let (weight, bias, options) = (Some(&self.weight), Some(&self.bias), options(kind, self.eps));
        let (norm, sum) = add_norm(Norm::Layer, update, x, weight, bias, options)?;
        Ok((sum, norm))
    }
}

/// y = x/√(mean(x²) + eps) ⊙ (w + offset) (Zhang & Sennrich 2019).
#[derive(Debug)]
pub struct RmsNorm {
    /// `[width]`.
    pub weight: Tensor,
    /// Added to the mean square.
    pub eps: f64,
    /// Added to the weight, in fp32 at least: 0, or 1 in Gemma, whose weights are the distance from 1.
    pub offset: f64,
}

impl RmsNorm {
    /// Creates a norm with weights 1.
    ///
    /// # Errors
    /// A width below 1.
    pub fn new(width: i64, eps: f64, options: (Kind, Device)) -> Result<Self> {
        Self::with_offset(width, eps, 0.0, options)
    }

    /// Creates a norm with this offset and weights 1 − offset.
    ///
    /// # Errors
    /// A width below 1.
    pub fn with_offset(width: i64, eps: f64, offset: f64, options: (Kind, Device)) -> Result<Self> {
        positive("RMS norm", &[("width", width)])?;
        Ok(Self { weight: Init::Constant(1.0 - offset).parameter(&[width], options)?, eps, offset })
    }

    /// Normalises `[…, width]`.
    ///
    /// # Errors
    /// Another width or dtype.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let kind = check("RMS norm", x, &self.weight)?;
        let shifted = self.shifted_weight()?;
        rms_norm(x, Some(shifted.as_ref().unwrap_or(&self.weight)), options(kind, self.eps))
    }

    /// Returns s = x + update, both `[…, width]`, and its norm. In one pass, if the two have one dtype.
    ///
    /// # Errors
    /// As [`RmsNorm::forward`].
    pub fn add(&self, x: &Tensor, update: &Tensor) -> Result<(Tensor, Tensor)> {
        let Some(kind) = one_kind(x, update)? else {
            let sum = x.f_add(update)?;
            let norm = self.forward(&sum)?;
            return Ok((sum, norm));
        };
        check("RMS norm", x, &self.weight)?;
        let shifted = self.shifted_weight()?;
        let weight = Some(shifted.as_ref().unwrap_or(&self.weight));
        let (norm, sum) = add_norm(Norm::Rms, update, x, weight, None, options(kind, self.eps))?;
        Ok((sum, norm))
    }

    /// Returns w + offset, if there is an offset.
    fn shifted_weight(&self) -> Result<Option<Tensor>> {
        if self.offset == 0.0 {
            return Ok(None);
        }
        let wide = if self.weight.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        Ok(Some(self.weight.f_to_kind(wide)?.try_add_scalar(self.offset)?))
    }
}

/// Normalises `[…, width]` as an [`RmsNorm`] whose weights are 1.
///
/// # Errors
/// Errors of libtorch.
pub(crate) fn rms_norm_without_weight(x: &Tensor, eps: f64) -> Result<Tensor> {
    rms_norm(x, None, options(TensorLayout::of(x)?.kind(), eps))
}

/// Returns the dtype of two tensors of one dtype, shape and device.
fn one_kind(x: &Tensor, update: &Tensor) -> Result<Option<Kind>> {
    let (x, update) = (TensorLayout::of(x)?, TensorLayout::of(update)?);
    let alike = x.kind() == update.kind() && x.size() == update.size() && x.device() == update.device();
    Ok(alike.then_some(x.kind()))
}

/// Keeps the output if the next product keeps it too, so that the residual stream is freed. Under a policy that makes the
/// product keep another copy, the narrower input is kept.
fn options(kind: Kind, eps: f64) -> Options {
    let output = precision::widened_kind(kind);
    let keep = if precision::is_set() { Keep::Input } else { Keep::Output };
    Options { eps, keep, output: Some(output) }
}

/// Returns the dtype of x.
fn check(operation: &'static str, x: &Tensor, weight: &Tensor) -> Result<Kind> {
    let (layout, of_weight) = (TensorLayout::of(x)?, TensorLayout::of(weight)?);
    if layout.size().last() == of_weight.size().first() {
        return Ok(layout.kind());
    }
    let expected = format!("[…, {}]", weight.numel());
    Err(wrong_shape(operation, "x", x.size(), expected))
}

impl Module for LayerNorm {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
        visitor.parameter("bias", &self.bias);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter("weight", &mut self.weight)?;
        visitor.parameter("bias", &mut self.bias)
    }
}

impl Module for RmsNorm {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter("weight", &mut self.weight)
    }
}
