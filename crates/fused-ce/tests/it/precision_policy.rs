//! Under a precision policy on the CPU, where products are in fp32, operands are not rounded to the policy's dtype.

use std::sync::Arc;

use fused_ce::{Inputs, LinearCrossEntropy};
use runtime::precision::{self, Policy};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

#[derive(Debug)]
struct Bf16;

impl Policy for Bf16 {
    fn operand(&self, x: &Tensor) -> runtime::Result<Tensor> {
        Ok(x.f_to_kind(Kind::BFloat16)?)
    }
    fn weight(&self, weight: &Tensor) -> runtime::Result<Tensor> {
        self.operand(weight)
    }
}

#[test]
fn hidden_states_are_cast_to_the_weights_dtype() {
    let mut generator = Generator::new(1).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
    let (x, w, b) = (normal(&[6, 5]), normal(&[9, 5]), normal(&[9]));
    let targets = Tensor::from_slice(&[1i64, -100, 8, 0, 3, 3]);
    let run = |x: &Tensor, policy: bool| {
        let x = x.copy().set_requires_grad(true);
        let w = w.copy().set_requires_grad(true);
        let _within = policy.then(|| precision::enter(Some(Arc::new(Bf16))));
        let inputs = Inputs { bias: Some(&b), ..Inputs::new(&x, &w, &targets) };
        let loss = LinearCrossEntropy::default().run(&inputs).unwrap().loss;
        runtime::autograd::backward(&[&loss]).unwrap();
        [loss.detach(), x.grad(), w.grad()]
    };
    // All in fp32: the same bits as without the policy.
    let (with, without) = (run(&x, true), run(&x, false));
    assert!(with.iter().zip(&without).all(|(a, b)| a.equal(b)));
    // bf16 hidden states are cast to fp32, and their gradient is bf16.
    let low = x.to_kind(Kind::BFloat16);
    let (with, wide) = (run(&low, true), run(&low.to_kind(Kind::Float), false));
    assert_eq!(with.each_ref().map(Tensor::kind), [Kind::Float, Kind::BFloat16, Kind::Float]);
    assert!(with[0].equal(&wide[0]) && with[2].equal(&wide[2]));
    assert!(with[1].equal(&wide[1].to_kind(Kind::BFloat16)));
    // Without a policy different dtypes are an error.
    let inputs = Inputs::new(&low, &w, &targets);
    let error = LinearCrossEntropy::default().run(&inputs).unwrap_err().to_string();
    expect_test::expect![
        "linear cross-entropy: `weight` is Float; expected BFloat16; convert it with `to_kind`"
    ]
    .assert_eq(&error);
}
