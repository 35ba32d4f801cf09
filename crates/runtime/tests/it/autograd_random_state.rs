//! Random numbers of a recomputed segment. The generator is the process's, so no other test may run at the
//! same time.

use runtime::autograd::{self, checkpoint};
use tch::{Device, Kind, Tensor, kind};

#[test]
fn recomputed_dropout_draws_the_same_mask_and_the_sequence_continues() {
    let x = Tensor::ones([1000], kind::FLOAT_CPU).set_requires_grad(true);
    runtime::random::seed(5).unwrap();
    let [y] = checkpoint(|[x]| Ok([x.f_dropout(0.5, true)?]), [&x]).unwrap();
    let _ = Tensor::rand([7], kind::FLOAT_CPU);
    let before = runtime::random::RandomState::capture(Device::Cpu).unwrap();
    autograd::backward(&[&y.sum(Kind::Float)]).unwrap();
    assert_eq!(x.grad(), y.detach(), "each element's gradient is its own mask");
    assert!(
        before == runtime::random::RandomState::capture(Device::Cpu).unwrap(),
        "backward leaves no trace"
    );
}
