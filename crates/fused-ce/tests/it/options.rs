//! Every pair of options against the oracle in f64: all logits, with libtorch's graph.

use std::collections::BTreeSet;

use fused_ce::{
    Adapter, Chunk, Denominator, EmptyMean, Gradients, Inputs, LinearCrossEntropy, LogSumExp, Output,
    Reduction, Result, Targets,
};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use crate::naive;

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

/// The number of choices of each flag, in the order of `Case::from`.
const CHOICES: [usize; 17] = [3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 2, 3, 3, 2];

struct Case {
    reduction: Reduction,
    smoothing: bool,
    z_loss: bool,
    softcap: bool,
    scale: bool,
    shift: bool,
    bias: bool,
    adapter: bool,
    token_weights: bool,
    class_weights: bool,
    distributions: bool,
    denominator: usize,
    log_sum_exp: LogSumExp,
    gradients: Gradients,
    chunk: Chunk,
    ignored: usize,
    extras: bool,
}

impl Case {
    fn from(choice: &[usize; 17]) -> Self {
        let on = |index: usize| choice[index] == 1;
        Self {
            reduction: [Reduction::Mean, Reduction::Sum, Reduction::None][choice[0]],
            smoothing: on(1),
            z_loss: on(2),
            softcap: on(3),
            scale: on(4),
            shift: on(5),
            bias: on(6),
            adapter: on(7),
            token_weights: on(8),
            class_weights: on(9),
            distributions: on(10),
            denominator: choice[11],
            log_sum_exp: [LogSumExp::No, LogSumExp::Value, LogSumExp::Differentiable][choice[12]],
            gradients: [Gradients::Forward, Gradients::Backward][choice[13]],
            chunk: [Chunk::Tokens(1), Chunk::Tokens(4), Chunk::Tokens(1000)][choice[14]],
            ignored: choice[15],
            extras: on(16),
        }
    }

    /// Combinations that are refused (tested elsewhere).
    fn is_refused(&self) -> bool {
        self.distributions && self.shift || self.denominator > 0 && self.reduction != Reduction::Mean
    }
}

/// Returns pseudo-random numbers, the same in every run.
struct Draws(u64);

impl Draws {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % count
    }
}

#[test]
fn every_pair_of_options_matches_the_oracle() {
    let (mut draws, mut pairs, mut worst, mut ran) = (Draws(1), BTreeSet::new(), 0f64, 0);
    let mut generator = Generator::new(5).unwrap();
    for _ in 0..700 {
        let choice: [usize; 17] = std::array::from_fn(|index| draws.below(CHOICES[index]));
        let case = Case::from(&choice);
        if case.is_refused() {
            continue;
        }
        for (a, first) in choice.iter().enumerate() {
            for (b, second) in choice.iter().enumerate().skip(a + 1) {
                pairs.insert((a, *first, b, *second));
            }
        }
        let share = check(&case, &mut generator);
        assert!(share <= 1.0, "{choice:?}: {share} of the tolerance");
        worst = worst.max(share);
        ran += 1;
    }
    let after = |index: usize| CHOICES[index + 1..].iter().sum::<usize>();
    let all: usize = CHOICES.iter().enumerate().map(|(index, count)| count * after(index)).sum();
    // Refused: a shift of distributions (1), denominators of sums and of unreduced losses (2 × 2).
    assert_eq!(pairs.len(), all - 1 - 4, "some pair of options was not tried");
    eprintln!("{ran} combinations; largest share of the tolerance {worst:.2}");
}

fn check(case: &Case, generator: &mut Generator) -> f64 {
    let (batch, sequence, hidden, vocabulary, rank) = (2, 5, 6, 11, 3);
    let mut normal = |size: &[i64]| generator.normal(size, F64).unwrap();
    let x = normal(&[batch, sequence, hidden]);
    let (w, b) = (normal(&[vocabulary, hidden]), normal(&[vocabulary]));
    let (low, up) = (normal(&[rank, hidden]), normal(&[vocabulary, rank]));
    let token_weights = normal(&[batch, sequence]).abs() + 0.1;
    let class_weights = normal(&[vocabulary]).abs() + 0.1;
    let distributions = normal(&[batch, sequence, vocabulary]).softmax(-1, Kind::Double);
    let drawn = (normal(&[batch, sequence]).abs() * 1e6).to_kind(Kind::Int64).remainder(vocabulary);
    let mask = normal(&[batch, sequence]).gt(0.3);
    let classes = match case.ignored {
        0 => drawn,
        1 => drawn.masked_fill(&mask, -100),
        _ => drawn.full_like(-100),
    };
    let upstream = normal(&[batch, sequence]);
    let denominator = Tensor::from(7.5);

    let options = LinearCrossEntropy {
        reduction: case.reduction,
        label_smoothing: if case.smoothing { 0.1 } else { 0.0 },
        z_loss: if case.z_loss { 0.01 } else { 0.0 },
        softcap: case.softcap.then_some(2.0),
        scale: if case.scale { 0.6 } else { 1.0 },
        shift: if case.shift { 2 } else { 0 },
        chunk: Some(case.chunk),
        gradients: case.gradients,
        log_sum_exp: case.log_sum_exp,
        predictions: case.extras,
        entropy: case.extras,
        empty_mean: if case.token_weights { EmptyMean::Nan } else { EmptyMean::Zero },
        ..LinearCrossEntropy::default()
    };
    let run = |how: fn(&Inputs<'_>, &LinearCrossEntropy) -> Result<Output>| -> (Output, Vec<Tensor>) {
        let leaf = |tensor: &Tensor| tensor.copy().set_requires_grad(true);
        let leaves = [leaf(&x), leaf(&w), leaf(&b), leaf(&low), leaf(&up)];
        let inputs = Inputs {
            targets: if case.distributions {
                Targets::Distributions(&distributions)
            } else {
                Targets::Classes(&classes)
            },
            bias: case.bias.then_some(&leaves[2]),
            adapter: case.adapter.then_some(Adapter { a: &leaves[3], b: &leaves[4], scale: 0.5 }),
            token_weights: case.token_weights.then_some(&token_weights),
            class_weights: case.class_weights.then_some(&class_weights),
            denominator: [None, Some(Denominator::Number(7.5)), Some(Denominator::Tensor(&denominator))]
                [case.denominator],
            ..Inputs::new(&leaves[0], &leaves[1], &classes)
        };
        let output = how(&inputs, &options).unwrap();
        let mut total = match case.reduction {
            Reduction::None => (&output.loss * &upstream).sum(Kind::Double),
            _ => &output.loss * 3.0,
        };
        if let (LogSumExp::Differentiable, Some(values)) = (case.log_sum_exp, &output.log_sum_exp) {
            total += (values * &upstream).sum(Kind::Double) * 0.3;
        }
        runtime::autograd::backward(&[&total]).unwrap();
        let gradients = leaves.iter().map(|leaf| {
            let gradient = leaf.grad();
            if gradient.defined() { gradient } else { leaf.zeros_like().detach() }
        });
        (output, gradients.collect())
    };
    let ((ours, our_gradients), (oracle, gradients)) =
        (run(|inputs, options| options.run(inputs)), run(naive::run));
    let mut worst: f64 = 0.0;
    let mut same = |name: &str, found: &Tensor, expected: &Tensor| {
        assert_eq!((found.size(), found.kind()), (expected.size(), expected.kind()), "{name}");
        if found.numel() == 0 {
            return;
        }
        assert_eq!(found.isnan(), expected.isnan(), "{name}");
        let (found, expected) =
            (found.detach().nan_to_num(0.0, None, None), expected.detach().nan_to_num(0.0, None, None));
        let tolerance = 1e-12 * (1.0 + expected.abs().max().double_value(&[]));
        let error = (found - expected).abs().max().double_value(&[]);
        worst = worst.max(if error.is_nan() { f64::INFINITY } else { error / tolerance });
        assert!(error <= tolerance, "{name}: {error:e}");
    };
    same("loss", &ours.loss, &oracle.loss);
    for (name, (found, expected)) in
        ["x", "w", "b", "a", "b of a"].iter().zip(our_gradients.iter().zip(&gradients))
    {
        same(name, found, expected);
    }
    let pairs = [
        (&ours.log_sum_exp, &oracle.log_sum_exp),
        (&ours.predictions, &oracle.predictions),
        (&ours.correct, &oracle.correct),
        (&ours.entropy, &oracle.entropy),
    ];
    for (name, (found, expected)) in ["log-sum-exp", "predictions", "correct", "entropy"].iter().zip(pairs) {
        assert_eq!(found.is_some(), expected.is_some(), "{name}");
        if let (Some(found), Some(expected)) = (found, expected) {
            same(name, found, expected);
        }
    }
    worst
}
