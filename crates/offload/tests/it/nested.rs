//! A nested block: one layer, which is loaded as a whole.

use models::Result;
use models::module::{Block, Context, Module, Visitor, VisitorMut, parameters};
use offload::{Method, OffloadConfig};
use tch::{Device, Kind, Tensor};

/// x·w, and then what is inside.
#[derive(Debug)]
struct Outer {
    weight: Tensor,
    inner: Option<Box<dyn Block>>,
}

impl Module for Outer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
        if let Some(inner) = &self.inner {
            visitor.part("inner", &**inner);
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter("weight", &mut self.weight)?;
        self.inner.as_mut().map_or(Ok(()), |inner| visitor.block("inner", inner))
    }
}

impl Block for Outer {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        let y = x * &self.weight;
        self.inner.as_ref().map_or_else(|| Ok(y.shallow_clone()), |inner| inner.forward(&y, context))
    }
}

#[derive(Debug)]
struct Model(Box<dyn Block>);

impl Module for Model {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("outer", &*self.0);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.block("outer", &mut self.0)
    }
}

fn number(value: f64) -> Tensor {
    Tensor::full([1], value, (Kind::Float, Device::Cpu)).set_requires_grad(true)
}

#[test]
fn a_nested_block_belongs_to_its_outer_block() {
    for (method, ring) in [(Method::Overlap, 1), (Method::Overlap, 2), (Method::Function, 1)] {
        let inner = Outer { weight: number(3.0), inner: None };
        let mut model = Model(Box::new(Outer { weight: number(2.0), inner: Some(Box::new(inner)) }));
        let offload = OffloadConfig { method, ring, ..OffloadConfig::default() }.install(&mut model).unwrap();
        assert_eq!((offload.blocks(), offload.layer_bytes()), (1, 2 * 256));
        for _ in 0..2 {
            let y = model.0.forward(&number(5.0), &Context::default()).unwrap();
            assert_eq!(y.double_value(&[0]), 30.0);
            runtime::autograd::backward(&[&y]).unwrap();
            offload.check_on_host().unwrap();
        }
        let gradients: Vec<(String, f64)> = parameters(&model)
            .into_iter()
            .map(|(name, tensor)| (name, tensor.grad().double_value(&[0])))
            .collect();
        let expected = [("outer.weight".to_owned(), 30.0), ("outer.inner.weight".to_owned(), 20.0)];
        assert_eq!(gradients, expected, "{} {ring}", method.name());
    }
}
