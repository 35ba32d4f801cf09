//! Removing and setting gradients.

use runtime::autograd::{backward, set_grad};
use tch::{Kind, Tensor, kind};

#[test]
fn a_removed_gradient_is_stored_again() {
    let x = Tensor::from_slice(&[1.0f32, 2.0]).set_requires_grad(true);
    backward(&[&x.square().sum(Kind::Float)]).unwrap();
    set_grad(&x, None).unwrap();
    assert!(!x.grad().defined());
    backward(&[&x.square().sum(Kind::Float)]).unwrap();
    assert_eq!(x.grad(), Tensor::from_slice(&[2.0f32, 4.0]));

    set_grad(&x, Some(&Tensor::from_slice(&[10.0f32, 20.0]))).unwrap();
    backward(&[&x.square().sum(Kind::Float)]).unwrap();
    assert_eq!(x.grad(), Tensor::from_slice(&[12.0f32, 24.0]));
}

#[test]
fn a_gradient_with_another_shape_is_refused() {
    let x = Tensor::zeros([2], kind::FLOAT_CPU).set_requires_grad(true);
    let error = set_grad(&x, Some(&Tensor::zeros([3], kind::DOUBLE_CPU))).unwrap_err().to_string();
    assert_eq!(error, "autograd::set_grad: the gradient is Double [3] on Cpu and the leaf Float [2] on Cpu");
    assert!(set_grad(&Tensor::new(), None).is_err());
}
