use runtime::autograd::{GradcheckConfig, backward, gradcheck};
use runtime::random::Generator;
use tch::{Kind, kind};

use super::*;
use crate::dropout::Seed;

fn drawn(shapes: &[&[i64]]) -> Vec<Tensor> {
    let mut generator = Generator::new(5).unwrap();
    let draw = |shape: &&[i64]| generator.normal(shape, kind::DOUBLE_CPU).unwrap().set_requires_grad(true);
    shapes.iter().map(draw).collect()
}

const MASKS: [Option<Mask>; 3] =
    [Some(Mask { rate: 0.3, seed: Seed::Host(1) }), None, Some(Mask { rate: 0.5, seed: Seed::Host(2) })];

fn terms(tensors: &[Tensor], masks: [Option<Mask>; 3]) -> Vec<Term<'_>> {
    let pairs = tensors.chunks(2).zip(masks);
    pairs.map(|(pair, mask)| Term { a: &pair[0], b: &pair[1], scale: 0.7, mask }).collect()
}

/// Everything at once: a trained base, two terms with dropout and one without; on a CPU and as on a GPU.
#[test]
fn derivatives_match_finite_differences() {
    let inputs = drawn(&[&[2, 3, 5], &[4, 5], &[4], &[3, 5], &[4, 3], &[2, 5], &[4, 2], &[1, 5], &[4, 1]]);
    for as_on_gpu in [false, true] {
        let _gpu = as_on_gpu.then(gpu::assume);
        let report = gradcheck(
            |inputs| {
                let projection =
                    Affine { weight: &inputs[1], bias: Some(&inputs[2]), terms: terms(&inputs[3..], MASKS) };
                Ok(vec![low_rank_linear(&inputs[0], &projection)?])
            },
            &inputs.iter().collect::<Vec<_>>(),
            GradcheckConfig::default(),
        )
        .unwrap();
        let expected = 24 * (30 + 20 + 4 + 15 + 12 + 10 + 8 + 5 + 4);
        assert_eq!(report.compared, expected, "{report}");
    }
}

/// Projections of different widths and ranks, one without a term and one without a bias, with dropout and without.
#[test]
fn derivatives_of_a_group_match_finite_differences() {
    let inputs = drawn(&[&[2, 3, 5], &[4, 5], &[4], &[3, 5], &[4, 3], &[2, 5], &[3, 5], &[2, 5], &[3, 2]]);
    let _gpu = gpu::assume();
    for masks in [[None; 3], MASKS] {
        let report = gradcheck(
            |inputs| {
                let projections = [
                    Affine { weight: &inputs[1], bias: Some(&inputs[2]), terms: terms(&inputs[3..5], masks) },
                    Affine { weight: &inputs[5], bias: None, terms: Vec::new() },
                    Affine { weight: &inputs[6], bias: None, terms: terms(&inputs[7..9], masks) },
                ];
                low_rank_linears(&inputs[0], &projections)
            },
            &inputs.iter().collect::<Vec<_>>(),
            GradcheckConfig::default(),
        )
        .unwrap();
        assert_eq!(
            report.compared,
            6 * (4 + 2 + 3) * inputs.iter().map(Tensor::numel).sum::<usize>(),
            "{report}"
        );
    }
}

/// A result that nothing uses has no gradient, and the others have theirs.
#[test]
fn a_group_whose_results_are_used_in_part_has_the_gradients_of_that_part() {
    let inputs = drawn(&[&[6, 5], &[4, 5], &[3, 5], &[4, 3], &[2, 5], &[1, 5], &[2, 1]]);
    for weight in [1, 4] {
        let _ = inputs[weight].set_requires_grad(false);
    }
    let projections = || {
        [
            Affine { weight: &inputs[1], bias: None, terms: terms(&inputs[2..4], [None; 3]) },
            Affine { weight: &inputs[4], bias: None, terms: terms(&inputs[5..7], [None; 3]) },
        ]
    };
    let gradients = |group: bool| {
        let _gpu = group.then(gpu::assume);
        let used = match group {
            true => low_rank_linears(&inputs[0], &projections()).unwrap().remove(1),
            false => low_rank_linear(&inputs[0], &projections()[1]).unwrap(),
        };
        backward(&[&used.square().sum(Kind::Double)]).unwrap();
        [0, 5, 6].map(|index| {
            let gradient = inputs[index].grad().copy();
            runtime::autograd::set_grad(&inputs[index], None).unwrap();
            gradient
        })
    };
    for (found, expected) in gradients(true).iter().zip(gradients(false)) {
        assert!(found.allclose(&expected, 1e-12, 1e-12, false));
    }
    let unused = inputs[2].grad();
    assert!(!unused.defined() || unused.abs().max().double_value(&[]) == 0.0);
}
