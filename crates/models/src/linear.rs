//! Linear projections.

use runtime::precision;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::init::Init;
use crate::module::{Context, Module, Projection, Visitor, VisitorMut};

/// y = x·Wᵀ + b.
#[derive(Debug)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Tensor,
    /// `[out]`.
    pub bias: Option<Tensor>,
}

impl Linear {
    /// Creates a projection with weights and bias uniform in ±1/√in, as PyTorch's `nn.Linear`.
    ///
    /// # Errors
    /// A width below 1, too little memory.
    pub fn new(in_features: i64, out_features: i64, bias: bool, options: (Kind, Device)) -> Result<Self> {
        let init = Init::torch_linear(in_features);
        Self::with_init(in_features, out_features, bias.then_some(init), init, options)
    }

    /// Creates a projection with the given initialisations; no bias for `None`.
    ///
    /// # Errors
    /// As [`Linear::new`], and those of [`Init::parameter`].
    pub fn with_init(
        in_features: i64,
        out_features: i64,
        bias: Option<Init>,
        weight: Init,
        options: (Kind, Device),
    ) -> Result<Self> {
        positive("linear", &[("in", in_features), ("out", out_features)])?;
        let weight = weight.parameter(&[out_features, in_features], options)?;
        let bias = bias.map(|init| init.parameter(&[out_features], options)).transpose()?;
        Ok(Self { weight, bias })
    }
}

/// Computes x·Wᵀ + b over the last dimension. Every projection of this crate calls this function.
pub(crate) fn project(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let width = weight.size().get(1).copied().unwrap_or(0);
    if x.size().last() != Some(&width) {
        let expected = format!("[…, {width}]");
        return Err(Error::Shape { operation: "linear", name: "x", found: x.size(), expected });
    }
    // A mixed-precision policy, if there is one, decides the dtypes.
    let same_kind = x.kind() == weight.kind() || precision::current().is_some();
    if !same_kind || x.device() != weight.device() {
        return Err(Error::Placement {
            operation: "linear",
            name: "x",
            found_kind: x.kind(),
            found_device: x.device(),
            expected: format!("{:?} on {:?}, as the weight has", weight.kind(), weight.device()),
        });
    }
    Ok(precision::linear(x, weight, bias)?)
}

/// Refuses sizes below 1.
pub(crate) fn positive(what: &'static str, sizes: &[(&str, i64)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size < 1) {
        None => Ok(()),
        Some((name, size)) => {
            Err(Error::Config { what, reason: format!("`{name}` is {size}; expected at least 1") })
        }
    }
}

impl Module for Linear {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
        visitor.optional_parameter("bias", self.bias.as_ref());
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter("weight", &mut self.weight)?;
        visitor.optional_parameter("bias", self.bias.as_mut())
    }
}

impl Projection for Linear {
    fn forward(&self, x: &Tensor, _: &Context<'_>) -> Result<Tensor> {
        project(x, &self.weight, self.bias.as_ref())
    }

    fn in_features(&self) -> i64 {
        self.weight.size()[1]
    }

    fn out_features(&self) -> i64 {
        self.weight.size()[0]
    }
}
