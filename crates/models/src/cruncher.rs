//! The deep linear model of CS336's second lecture: `Cruncher`.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::init::Init;
use crate::linear::{Linear, positive};
use crate::module::{Context, Editor, Module, Projection, Visitor};

/// `layers` square matrices without a bias, then one to a single number: `[batch, width]` to `[batch]`.
///
/// Weights are drawn with σ = 1/√width, so that the variance of what comes out depends neither on the width nor on the
/// depth.
#[derive(Debug)]
pub struct Cruncher {
    layers: Vec<Box<dyn Projection>>,
    last: Box<dyn Projection>,
}

impl Cruncher {
    /// A model of so many square layers.
    ///
    /// # Errors
    /// A width below 1, a negative number of layers.
    pub fn new(width: i64, layers: i64, options: (Kind, Device)) -> Result<Self> {
        positive("cruncher", &[("width", width), ("layers + 1", layers + 1)])?;
        let linear = |out| -> Result<Box<dyn Projection>> {
            Ok(Box::new(Linear::with_init(width, out, None, Init::lecun(width), options)?))
        };
        let layers = (0..layers).map(|_| linear(width)).collect::<Result<_>>()?;
        Ok(Self { layers, last: linear(1)? })
    }

    /// `[batch, width]` to `[batch]`.
    ///
    /// # Errors
    /// Another width or dtype.
    pub fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let mut x = x.shallow_clone();
        for layer in &self.layers {
            x = layer.forward(&x, context)?;
        }
        Ok(self.last.forward(&x, context)?.f_squeeze_dim(-1)?)
    }
}

impl Module for Cruncher {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        for (index, layer) in self.layers.iter().enumerate() {
            visitor.part(&format!("layers.{index}"), &**layer);
        }
        visitor.part("final", &*self.last);
    }

    fn visit_mut(&mut self, editor: &mut Editor<'_>) -> Result<()> {
        for (index, layer) in self.layers.iter_mut().enumerate() {
            editor.projection(&format!("layers.{index}"), layer)?;
        }
        editor.projection("final", &mut self.last)
    }
}
