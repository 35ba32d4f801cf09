//! The gated MLP of Llama and Qwen2.

use runtime::fused::swiglu::silu_mul;
use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::init::Init;
use crate::linear::Linear;
use crate::module::{Context, Mlp, MlpFunction, Module, Projection, Visitor, VisitorMut};

/// y = (SiLU(x·Gᵀ) ⊙ x·Uᵀ)·Dᵀ (Shazeer, arXiv:2002.05202), with Hugging Face's names `gate_proj`, `up_proj`, `down_proj`.
///
/// The gated product is one fused pass ([`silu_mul`]), so a token keeps H + 3F elements for backward: the input, both
/// projections and their product; separate operators keep H + 4F. Techniques that keep less replace it as an [`Mlp`].
#[derive(Debug)]
pub struct Swiglu {
    gate_proj: Box<dyn Projection>,
    up_proj: Box<dyn Projection>,
    down_proj: Box<dyn Projection>,
}

impl Swiglu {
    /// Creates an MLP with the given initialisation; biases, if any, are 0.
    ///
    /// # Errors
    /// A width below 1, too little memory.
    pub fn new(hidden: i64, inner: i64, bias: bool, init: Init, options: (Kind, Device)) -> Result<Self> {
        let linear = |from, to| -> Result<Box<dyn Projection>> {
            let bias = bias.then_some(Init::Constant(0.0));
            Ok(Box::new(Linear::with_init(from, to, bias, init, options)?))
        };
        Ok(Self {
            gate_proj: linear(hidden, inner)?,
            up_proj: linear(hidden, inner)?,
            down_proj: linear(inner, hidden)?,
        })
    }
}

impl Module for Swiglu {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("gate_proj", &*self.gate_proj);
        visitor.part("up_proj", &*self.up_proj);
        visitor.part("down_proj", &*self.down_proj);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.projection("gate_proj", &mut self.gate_proj)?;
        visitor.projection("up_proj", &mut self.up_proj)?;
        visitor.projection("down_proj", &mut self.down_proj)
    }
}

impl Mlp for Swiglu {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let product = silu_mul(&self.gate_proj.forward(x, context)?, &self.up_proj.forward(x, context)?)?;
        self.down_proj.forward(&product, context)
    }

    fn function(&self) -> MlpFunction {
        MlpFunction::Swiglu
    }
}
