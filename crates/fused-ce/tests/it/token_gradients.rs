//! Per-token losses whose gradient reaches the hidden states alone, which forward computes: against those of a head that is trained, which
//! backward computes from the logits again.

use fused_ce::{Adapter, Chunk, Inputs, LinearCrossEntropy, Reduction};
use runtime::autograd::backward;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

/// The losses, and the gradient of the hidden states.
fn run(kind: Kind, options: &LinearCrossEntropy, has_adapter: bool, trains_head: bool) -> [Tensor; 2] {
    let mut generator = Generator::new(5).unwrap();
    let mut normal =
        |size: &[i64]| generator.normal(size, (Kind::Double, Device::Cpu)).unwrap().to_kind(kind);
    let (hidden, weight) = (normal(&[2, 20, 16]).set_requires_grad(true), normal(&[50, 16]));
    let (a, b, upstream) = (normal(&[3, 16]), normal(&[50, 3]), normal(&[2, 20]));
    let weight = weight.set_requires_grad(trains_head);
    let targets = Tensor::arange(40, (Kind::Int64, Device::Cpu)).reshape([2, 20]);
    let _ = targets.narrow(1, 3, 5).fill_(-100);
    let adapter = has_adapter.then_some(Adapter { a: &a, b: &b, scale: 0.5 });
    let losses = options.run(&Inputs { adapter, ..Inputs::new(&hidden, &weight, &targets) }).unwrap().loss;
    backward(&[&(&losses * upstream).sum(losses.kind())]).unwrap();
    assert_eq!(weight.grad().defined(), trains_head);
    [losses.detach(), hidden.grad()].map(|tensor| tensor.to_kind(Kind::Double))
}

#[test]
fn a_frozen_head_gives_the_gradient_of_a_trained_one() {
    for (kind, bound) in
        [(Kind::Double, 1e-12), (Kind::Float, 1e-5), (Kind::BFloat16, 2e-2), (Kind::Half, 2e-3)]
    {
        for chunk in [7, 64] {
            for (softcap, has_adapter) in [(None, false), (Some(3.0), true)] {
                let options = LinearCrossEntropy {
                    reduction: Reduction::None,
                    chunk: Some(Chunk::Tokens(chunk)),
                    softcap,
                    ..LinearCrossEntropy::default()
                };
                let [frozen, trained] =
                    [false, true].map(|trains_head| run(kind, &options, has_adapter, trains_head));
                assert_eq!(frozen[0], trained[0], "losses, {kind:?}");
                let error = (&frozen[1] - &trained[1]).abs().max().double_value(&[]);
                let largest = trained[1].abs().max().double_value(&[]);
                assert!(error <= bound * largest, "{kind:?} {chunk} {softcap:?}: {error:e} of {largest}");
                assert_eq!(frozen[1].narrow(1, 3, 5).abs().max().double_value(&[]), 0.0);
            }
        }
    }
}
