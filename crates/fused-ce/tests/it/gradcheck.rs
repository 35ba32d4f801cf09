//! Gradients against finite differences in f64, without an oracle.

use fused_ce::{Adapter, Chunk, Gradients, Inputs, LinearCrossEntropy, LogSumExp, Reduction};
use runtime::autograd::{GradcheckConfig, gradcheck};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

#[test]
fn gradients_match_the_function() {
    let mut generator = Generator::new(2).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Double, Device::Cpu)).unwrap();
    let plain = LinearCrossEntropy { chunk: Some(Chunk::Tokens(3)), ..LinearCrossEntropy::default() };
    let cases = [
        plain.clone(),
        LinearCrossEntropy { reduction: Reduction::Sum, label_smoothing: 0.2, ..plain.clone() },
        LinearCrossEntropy {
            gradients: Gradients::Backward,
            z_loss: 0.05,
            softcap: Some(2.0),
            ..plain.clone()
        },
        LinearCrossEntropy { reduction: Reduction::None, scale: -0.5, shift: 1, ..plain.clone() },
        LinearCrossEntropy { log_sum_exp: LogSumExp::Differentiable, ..plain },
    ];
    for options in cases {
        let leaves: Vec<Tensor> = [vec![2, 4, 5], vec![7, 5], vec![7], vec![2, 5], vec![7, 2]]
            .iter()
            .map(|size| normal(size).set_requires_grad(true))
            .collect();
        let targets = Tensor::from_slice2(&[[1i64, -100, 6, 0], [3, 3, -100, 2]]);
        let function = |given: &[Tensor]| -> runtime::Result<Vec<Tensor>> {
            let inputs = Inputs {
                bias: Some(&given[2]),
                adapter: Some(Adapter { a: &given[3], b: &given[4], scale: 1.5 }),
                ..Inputs::new(&given[0], &given[1], &targets)
            };
            let output = options.run(&inputs)?;
            Ok([Some(output.loss), output.log_sum_exp].into_iter().flatten().collect())
        };
        let inputs: Vec<&Tensor> = leaves.iter().collect();
        gradcheck(function, &inputs, GradcheckConfig::default())
            .unwrap_or_else(|error| panic!("{options:?}: {error}"));
    }
}
