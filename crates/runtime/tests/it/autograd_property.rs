//! Any arity, any pattern of inputs that need gradients, any outputs that are used: the hand-written node agrees with
//! libtorch's own graph.

use proptest::prelude::*;
use runtime::Result;
use runtime::autograd::{self, Backward, Forward, Function};
use tch::{Kind, Tensor, kind};

/// yⱼ = Σᵢ (i + j + 1)·xᵢ², for n inputs and m outputs.
struct Mix {
    inputs: usize,
    outputs: usize,
}

fn coefficient(i: usize, j: usize) -> f64 {
    (i + j + 1) as f64
}

fn mix(inputs: &[&Tensor], outputs: usize) -> Vec<Tensor> {
    (0..outputs)
        .map(|j| {
            inputs
                .iter()
                .enumerate()
                .map(|(i, x)| x.square() * coefficient(i, j))
                .reduce(|a, b| a + b)
                .unwrap()
        })
        .collect()
}

impl Function for Mix {
    fn forward(&mut self, ctx: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        for (index, input) in inputs.iter().enumerate() {
            if ctx.needs_input_grad(index) {
                ctx.save(input);
            }
        }
        Ok(mix(inputs, self.outputs))
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let mut saved = ctx.take_saved().into_iter();
        Ok((0..self.inputs)
            .map(|i| {
                if !ctx.needs_input_grad(i) {
                    return None;
                }
                let x = saved.next().unwrap();
                grads
                    .iter()
                    .enumerate()
                    .filter_map(|(j, grad)| grad.as_ref().map(|grad| grad * &x * (2.0 * coefficient(i, j))))
                    .reduce(|a, b| a + b)
            })
            .collect())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn gradients_match_the_recorded_graph(
        needs in proptest::collection::vec(any::<bool>(), 1..8),
        used in proptest::collection::vec(any::<bool>(), 1..5),
        seed in 0i64..1000,
    ) {
        prop_assume!(needs.iter().any(|&n| n) && used.iter().any(|&u| u));
        tch::manual_seed(seed);
        let inputs: Vec<Tensor> =
            needs.iter().map(|&need| Tensor::randn([3], kind::DOUBLE_CPU).set_requires_grad(need)).collect();
        let references: Vec<Tensor> =
            inputs.iter().zip(&needs).map(|(x, &need)| x.detach().copy().set_requires_grad(need)).collect();

        let loss = |outputs: &[Tensor]| {
            outputs.iter().zip(&used).filter(|(_, used)| **used).map(|(y, _)| y.exp().sum(Kind::Double))
                .reduce(|a, b| a + b).unwrap() * 1e-3
        };
        let ours = autograd::apply_any(Mix { inputs: needs.len(), outputs: used.len() }, &inputs.iter().collect::<Vec<_>>()).unwrap();
        prop_assert_eq!(ours.len(), used.len());
        autograd::backward(&[&loss(&ours)]).unwrap();
        loss(&mix(&references.iter().collect::<Vec<_>>(), used.len())).backward();
        for (ours, reference) in inputs.iter().zip(&references) {
            prop_assert_eq!(ours.grad().defined(), reference.requires_grad());
            if reference.requires_grad() {
                prop_assert!(ours.grad().allclose(&reference.grad(), 1e-12, 1e-12, false));
            }
        }
    }
}
