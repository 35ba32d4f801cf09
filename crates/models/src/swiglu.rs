//! The gated MLPs: of Llama and most families, of Phi-3 with one projection for both products, and of Gemma with a GELU.

use kernels::swiglu::silu_mul;
use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::init::Init;
use crate::linear::{Linear, project_all};
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

/// Gemma's MLP: y = (GELU(x·Gᵀ) ⊙ x·Uᵀ)·Dᵀ with the tanh approximation, and the names of [`Swiglu`]. A token keeps H + 4F elements.
#[derive(Debug)]
pub struct Geglu(Swiglu);

/// Phi-3's MLP: [`Swiglu`] with one projection `gate_up_proj` `[2·inner, hidden]`, whose first half is the gate. A token keeps H + 3F
/// elements.
#[derive(Debug)]
pub struct JointSwiglu {
    gate_up_proj: Box<dyn Projection>,
    down_proj: Box<dyn Projection>,
}

impl Geglu {
    /// Creates an MLP with the given initialisation, without biases.
    ///
    /// # Errors
    /// A width below 1, too little memory.
    pub fn new(hidden: i64, inner: i64, init: Init, options: (Kind, Device)) -> Result<Self> {
        Ok(Self(Swiglu::new(hidden, inner, false, init, options)?))
    }
}

impl JointSwiglu {
    /// Creates an MLP with the given initialisation, without biases.
    ///
    /// # Errors
    /// A width below 1, too little memory.
    pub fn new(hidden: i64, inner: i64, init: Init, options: (Kind, Device)) -> Result<Self> {
        Ok(Self {
            gate_up_proj: Box::new(Linear::with_init(hidden, inner.saturating_mul(2), None, init, options)?),
            down_proj: Box::new(Linear::with_init(inner, hidden, None, init, options)?),
        })
    }
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
        let [gate, up] = project_all([&*self.gate_proj, &*self.up_proj], x, context)?;
        let product = silu_mul(&gate, &up)?;
        drop((gate, up));
        self.down_proj.forward(&product, context)
    }

    fn function(&self) -> MlpFunction {
        MlpFunction::Swiglu
    }
}

impl Module for Geglu {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.0.visit(visitor);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        self.0.visit_mut(visitor)
    }
}

impl Mlp for Geglu {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let [gate, up] = project_all([&*self.0.gate_proj, &*self.0.up_proj], x, context)?;
        let activated = gate.f_gelu("tanh")?;
        drop(gate);
        let product = activated.f_mul(&up)?;
        drop((activated, up));
        self.0.down_proj.forward(&product, context)
    }

    fn function(&self) -> MlpFunction {
        MlpFunction::Geglu
    }
}

impl Module for JointSwiglu {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("gate_up_proj", &*self.gate_up_proj);
        visitor.part("down_proj", &*self.down_proj);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.projection("gate_up_proj", &mut self.gate_up_proj)?;
        visitor.projection("down_proj", &mut self.down_proj)
    }
}

impl Mlp for JointSwiglu {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let both = self.gate_up_proj.forward(x, context)?;
        let inner = self.down_proj.in_features();
        let [gate, up]: [Tensor; 2] = both
            .f_split_with_sizes([inner, inner], -1)?
            .try_into()
            .map_err(|_| crate::Error::invalid("MLP", "expected gate and up"))?;
        self.down_proj.forward(&silu_mul(&gate, &up)?, context)
    }

    fn function(&self) -> MlpFunction {
        MlpFunction::JointSwiglu
    }
}
