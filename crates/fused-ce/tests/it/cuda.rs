//! On a CUDA device, against the naive implementation in f64 over the same rounded operands. Prints that it is skipped without a device.

#![expect(
    clippy::print_stdout,
    reason = "a test that does nothing says so, and shares of the tolerance are printed"
)]

use fused_ce::{Adapter, Chunk, Gradients, Inputs, LinearCrossEntropy, Output, Result};
use runtime::autograd::backward;
use runtime::device::{cuda_count, select};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use crate::naive;

fn on_cuda(body: impl FnOnce(Device)) {
    match cuda_count().unwrap() {
        0 => println!("skipped: no CUDA device"),
        _ => body(select("cuda").unwrap()),
    }
}

/// Tokens, hidden size, vocabulary and rank of a case.
type Shape = [i64; 4];

/// Hidden states, weight, bias, A, B and targets; a third of the targets is ignored.
struct Operands {
    tensors: [Tensor; 5],
    targets: Tensor,
    labelled: i64,
}

impl Operands {
    fn new([tokens, hidden, vocabulary, rank]: Shape, kind: Kind) -> Self {
        let mut generator = Generator::new(tokens.unsigned_abs()).unwrap();
        let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
        let tensors = [
            normal(&[tokens, hidden]),
            normal(&[vocabulary, hidden]) * 0.3,
            normal(&[vocabulary]),
            normal(&[rank, hidden]) * 0.1,
            normal(&[vocabulary, rank]),
        ];
        let place = Tensor::arange(tokens, (Kind::Int64, Device::Cpu));
        let targets = (&place * 31 + 5).remainder(vocabulary);
        let targets = targets.where_self(&place.remainder(3).ne(1), &Tensor::from(-100i64));
        let labelled = targets.ge(0).sum(Kind::Int64).int64_value(&[]);
        Self { tensors: tensors.map(|tensor| tensor.to_kind(kind)), targets, labelled }
    }

    /// Returns the loss and the gradients, in f64 on the CPU. `extras`: bias and adapter. `infinite`: the value of the hidden states of
    /// ignored tokens.
    fn run(
        &self,
        how: impl Fn(&Inputs<'_>) -> Result<Output>,
        (kind, device): (Option<Kind>, Device),
        labelled_tokens: Option<i64>,
        extras: bool,
        infinite: bool,
    ) -> Vec<Tensor> {
        let [x, w, bias, a, b] = self.tensors.each_ref().map(|tensor| {
            let tensor = tensor.to_kind(kind.unwrap_or(tensor.kind()));
            tensor.to_device(device)
        });
        let ignored = self.targets.lt(0).to_device(device).unsqueeze(1);
        let x = if infinite { x.masked_fill(&ignored, f64::INFINITY) } else { x };
        let leaves = [x, w, bias, a, b].map(|tensor| tensor.copy().set_requires_grad(true));
        let targets = self.targets.to_device(device);
        let inputs = Inputs {
            bias: extras.then_some(&leaves[2]),
            adapter: extras.then_some(Adapter { a: &leaves[3], b: &leaves[4], scale: 0.5 }),
            labelled_tokens,
            ..Inputs::new(&leaves[0], &leaves[1], &targets)
        };
        let loss = how(&inputs).unwrap().loss;
        backward(&[&(&loss * 3.0)]).unwrap();
        let used = if extras { 5 } else { 2 };
        let gradients = leaves.iter().take(used).map(Tensor::grad);
        [loss.detach()]
            .into_iter()
            .chain(gradients)
            .map(|tensor| tensor.to_kind(Kind::Double).to_device(Device::Cpu))
            .collect()
    }
}

/// One chunk and several, labels counted or not, both places of the gradients, logits rounded or not.
#[test]
fn every_plan_on_cuda_computes_the_same() {
    on_cuda(|device| {
        // The second matrix is so large that one chunk's product is rounded to 16 bits at once.
        for shape in [[301, 96, 5003, 4], [530, 512, 8208, 8], [33, 40, 1001, 2]] {
            for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
                let operands = Operands::new(shape, kind);
                let mut worst = 0f64;
                for extras in [false, true] {
                    let options = LinearCrossEntropy::default();
                    let exact = operands.run(
                        |inputs| naive::run(inputs, &options),
                        (Some(Kind::Double), Device::Cpu),
                        None,
                        extras,
                        false,
                    );
                    for bits in 0..24 {
                        let on = |bit: i32| bits >> bit & 1 == 1;
                        let labelled = [None, Some(operands.labelled), Some(shape[0])][bits as usize >> 3];
                        let options = LinearCrossEntropy {
                            chunk: on(0).then_some(Chunk::Tokens(97)),
                            gradients: if on(1) { Gradients::Forward } else { Gradients::Backward },
                            round_logits: on(2),
                            ..LinearCrossEntropy::default()
                        };
                        let found = operands.run(
                            |inputs| options.run(inputs),
                            (None, device),
                            labelled,
                            extras,
                            true,
                        );
                        // Half a unit in the last place of the operands and results, and of logits of up to 16.
                        let bound = match (kind, options.round_logits) {
                            (Kind::Float, _) => 2e-5,
                            (Kind::Half, false) => 2e-3,
                            (Kind::Half, true) | (_, false) => 1.2e-2,
                            (_, true) => 6e-2,
                        };
                        for (index, (found, exact)) in found.iter().zip(&exact).enumerate() {
                            let largest = exact.abs().max().double_value(&[]);
                            let error = (found - exact).abs().max().double_value(&[]) / largest;
                            worst = worst.max(error / bound);
                            assert!(
                                error <= bound,
                                "{index} of {kind:?}, {shape:?}, {labelled:?}, {options:?}: {error:e}"
                            );
                        }
                    }
                }
                println!("{shape:?} in {kind:?}: {worst:.2} of the bound");
            }
        }
    });
}
