//! The result does not depend on the number of threads if chunks have at least 32 tokens; smaller products are libtorch's,
//! and MKL's bits depend on the threads.

use fused_ce::{Chunk, Inputs, LinearCrossEntropy};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

#[test]
fn chunks_of_32_tokens_and_more_give_the_same_bits_for_any_number_of_threads() {
    let before = tch::get_num_threads();
    let mut generator = Generator::new(4).unwrap();
    for (kind, chunk) in [(Kind::Float, 300), (Kind::Float, 40), (Kind::BFloat16, 100)] {
        let mut normal =
            |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap().to_kind(kind);
        let (x, w) = (normal(&[300, 65]), normal(&[1031, 65]));
        let targets = (Tensor::arange(300, (Kind::Int64, Device::Cpu)) * 13).remainder(1031);
        let results = [1, 2, 3].map(|threads| {
            tch::set_num_threads(threads);
            let (x, w) = (x.copy().set_requires_grad(true), w.copy().set_requires_grad(true));
            let options = LinearCrossEntropy {
                chunk: Some(Chunk::Tokens(chunk)),
                entropy: true,
                predictions: true,
                ..LinearCrossEntropy::default()
            };
            let output = options.run(&Inputs::new(&x, &w, &targets)).unwrap();
            runtime::autograd::backward(&[&output.loss]).unwrap();
            [output.loss.detach(), output.entropy.unwrap(), output.predictions.unwrap(), x.grad(), w.grad()]
        });
        for (threads, found) in (2..).zip(&results[1..]) {
            for (name, (one, several)) in
                ["loss", "entropy", "predictions", "x", "w"].iter().zip(results[0].iter().zip(found))
            {
                assert!(one.equal(several), "{kind:?}, chunks of {chunk}, {threads} threads: {name}");
            }
        }
    }
    tch::set_num_threads(before);
}
