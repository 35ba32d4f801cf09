//! Rows in place of the weight's for some classes, against a weight with the rows in it, and against finite differences.

use fused_ce::{Adapter, Chunk, Gradients, Inputs, LinearCrossEntropy, LogSumExp, Reduction, ReplacedRows};
use kernels::nf4::{Scales, quantize};
use kernels::quantized::dequantize;
use runtime::autograd::{GradcheckConfig, backward, gradcheck};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const CLASSES: [i64; 3] = [6, 0, 3];

fn cases() -> Vec<LinearCrossEntropy> {
    let plain = LinearCrossEntropy { chunk: Some(Chunk::Tokens(3)), ..LinearCrossEntropy::default() };
    vec![
        plain.clone(),
        LinearCrossEntropy { reduction: Reduction::Sum, label_smoothing: 0.2, chunk: None, ..plain.clone() },
        LinearCrossEntropy {
            gradients: Gradients::Backward,
            z_loss: 0.05,
            softcap: Some(2.0),
            ..plain.clone()
        },
        LinearCrossEntropy { reduction: Reduction::None, scale: -0.5, shift: 1, ..plain.clone() },
        LinearCrossEntropy { log_sum_exp: LogSumExp::Differentiable, ..plain },
    ]
}

#[test]
fn gradients_of_replaced_rows_match_the_function() {
    let mut generator = Generator::new(5).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Double, Device::Cpu)).unwrap();
    let classes = Tensor::from_slice(&CLASSES);
    let targets = Tensor::from_slice2(&[[1i64, -100, 6, 0], [3, 3, -100, 2]]);
    for options in cases() {
        let leaves =
            [normal(&[2, 4, 5]), normal(&[7, 5]), normal(&[3, 5])].map(|leaf| leaf.set_requires_grad(true));
        let function = |given: &[Tensor]| -> runtime::Result<Vec<Tensor>> {
            let replaced_rows = Some(ReplacedRows { classes: &classes, rows: &given[2] });
            let output =
                options.run(&Inputs { replaced_rows, ..Inputs::new(&given[0], &given[1], &targets) })?;
            Ok([Some(output.loss), output.log_sum_exp].into_iter().flatten().collect())
        };
        gradcheck(function, &leaves.each_ref(), GradcheckConfig::default())
            .unwrap_or_else(|error| panic!("{options:?}: {error}"));
    }
}

#[test]
fn the_loss_and_gradients_are_those_of_a_weight_with_the_rows_in_it() {
    let mut generator = Generator::new(6).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
    let (x, weight, rows) = (normal(&[9, 64]), normal(&[40, 64]), normal(&[3, 64]));
    let classes = Tensor::from_slice(&CLASSES);
    let targets = Tensor::from_slice(&[6i64, 0, 39, -100, 3, 3, 17, 1, 6]);
    let stored = quantize(&weight.to_kind(Kind::BFloat16), Scales::Nested).unwrap();
    let dense = dequantize(&stored, Kind::Float).unwrap();
    for options in cases().into_iter().filter(|options| options.shift == 0) {
        for (weight, reference) in [(&weight, &weight), (&stored, &dense)] {
            let leaf = |tensor: &Tensor| tensor.copy().set_requires_grad(true);
            let [ours, theirs] = [[leaf(&x), leaf(&rows)], [leaf(&x), leaf(&rows)]];
            let replaced_rows = Some(ReplacedRows { classes: &classes, rows: &ours[1] });
            let found =
                options.run(&Inputs { replaced_rows, ..Inputs::new(&ours[0], weight, &targets) }).unwrap();
            let whole = reference.index_copy(0, &classes, &theirs[1]);
            let expected = options.run(&Inputs::new(&theirs[0], &whole, &targets)).unwrap();
            for loss in [&found.loss, &expected.loss] {
                backward(&[&loss.sum(Kind::Float)]).unwrap();
            }
            let close = |found: &Tensor, expected: &Tensor, what: &str| {
                let error = (found - expected).abs().max().double_value(&[]);
                let limit = 2e-6 * expected.abs().max().double_value(&[]).max(1e-3);
                assert!(error <= limit, "{what} of {options:?}: {error:e}");
            };
            close(&found.loss.detach(), &expected.loss.detach(), "loss");
            close(&ours[0].grad(), &theirs[0].grad(), "gradient of the hidden states");
            close(&ours[1].grad(), &theirs[1].grad(), "gradient of the rows");
        }
    }
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let [x, weight] = [[4, 5], [7, 5]].map(|size| Tensor::zeros(size, (Kind::Float, Device::Cpu)));
    let targets = Tensor::from_slice(&[1i64, 2, 3, 4]);
    let classes = Tensor::from_slice(&CLASSES);
    let rows = |size: [i64; 2]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let error = |rows: &Tensor, inputs: Inputs<'_>| {
        let replaced_rows = Some(ReplacedRows { classes: &classes, rows });
        LinearCrossEntropy::default().run(&Inputs { replaced_rows, ..inputs }).unwrap_err().to_string()
    };
    let plain = Inputs::new(&x, &weight, &targets);
    assert!(error(&rows([2, 5]), plain.clone()).contains("expected [3, 5], a row for each class"));
    let bias = Tensor::zeros([7], (Kind::Float, Device::Cpu));
    let found = error(&rows([3, 5]), Inputs { bias: Some(&bias), ..plain.clone() });
    assert!(found.contains("without a bias and an adapter"), "{found}");
    let (a, b) = (rows([2, 5]), rows([7, 2]));
    let adapter = Some(Adapter { a: &a, b: &b, scale: 1.0 });
    assert!(error(&rows([3, 5]), Inputs { adapter, ..plain }).contains("without a bias and an adapter"));
}
