//! Shards of the vocabulary, one thread per rank, against the whole vocabulary.

use std::sync::{Arc, Barrier, Mutex};

use expect_test::expect;
use fused_ce::vocabulary_parallel::{ProcessGroup, ReduceOp, Shard};
use fused_ce::{
    Adapter, Chunk, Denominator, Gradients, Inputs, LinearCrossEntropy, LogSumExp, Output, Reduction, Targets,
};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);
const TOKENS: i64 = 10;
const HIDDEN: i64 = 6;
pub(crate) const VOCABULARY: i64 = 23;
const RANK: i64 = 3;

/// A process group of threads with a barrier.
#[derive(Debug)]
struct Threads {
    barrier: Barrier,
    given: Mutex<Vec<Option<Tensor>>>,
}

#[derive(Debug)]
struct Member {
    rank: usize,
    all: Arc<Threads>,
}

impl ProcessGroup for Member {
    fn all_reduce(&self, tensor: &mut Tensor, reduce: ReduceOp) -> runtime::Result<()> {
        self.all.given.lock().unwrap()[self.rank] = Some(tensor.copy());
        self.all.barrier.wait();
        let result = {
            let given = self.all.given.lock().unwrap();
            let mut tensors = given.iter().flatten();
            let first = tensors.next().unwrap().copy();
            tensors.try_fold(first, |sum, next| {
                if sum.size() != next.size() {
                    let reason = format!("ranks brought {:?} and {:?}", sum.size(), next.size());
                    return Err(runtime::Error::invalid("all_reduce", reason));
                }
                Ok(match reduce {
                    ReduceOp::Sum => sum + next,
                    ReduceOp::Max => sum.maximum(next),
                })
            })
        };
        self.all.barrier.wait();
        tensor.copy_(&result?);
        Ok(())
    }
}

/// The inputs of a case.
pub(crate) struct Whole {
    /// Hidden states, weight, bias, A, B.
    leaves: [Tensor; 5],
    classes: Tensor,
    distributions: Tensor,
    token_weights: Tensor,
    class_weights: Tensor,
    upstream: Tensor,
}

impl Whole {
    pub(crate) fn new(seed: u64) -> Self {
        let mut generator = Generator::new(seed).unwrap();
        let mut normal = |size: &[i64]| generator.normal(size, F64).unwrap();
        let leaves = [
            normal(&[2, TOKENS / 2, HIDDEN]),
            normal(&[VOCABULARY, HIDDEN]),
            normal(&[VOCABULARY]),
            normal(&[RANK, HIDDEN]),
            normal(&[VOCABULARY, RANK]),
        ];
        Self {
            leaves,
            // Each shard has targets, including the first and the last class.
            classes: Tensor::from_slice2(&[[0i64, 22, -100, 7, 11], [15, -100, 19, 3, 8]]),
            distributions: normal(&[2, TOKENS / 2, VOCABULARY]).softmax(-1, Kind::Double),
            token_weights: normal(&[2, TOKENS / 2]).abs(),
            class_weights: normal(&[VOCABULARY]).abs(),
            upstream: normal(&[2, TOKENS / 2]),
        }
    }

    fn share(&self) -> Self {
        let same = Tensor::shallow_clone;
        Self {
            leaves: std::array::from_fn(|slot| same(&self.leaves[slot])),
            classes: same(&self.classes),
            distributions: same(&self.distributions),
            token_weights: same(&self.token_weights),
            class_weights: same(&self.class_weights),
            upstream: same(&self.upstream),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Case {
    options: LinearCrossEntropy,
    bias: bool,
    adapter: bool,
    token_weights: bool,
    class_weights: bool,
    distributions: bool,
    denominator: bool,
}

/// The outputs, and the gradients of the leaves of this rank.
pub(crate) type Result = fused_ce::Result<(Vec<Tensor>, [Tensor; 5])>;

pub(crate) fn run(case: &Case, whole: &Whole, slice: Option<(i64, i64, Shard)>) -> Result {
    let (first, rows) = slice.as_ref().map_or((0, VOCABULARY), |(first, rows, _)| (*first, *rows));
    let sliced = |slot: usize| [1, 2, 4].contains(&slot);
    let leaves: [Tensor; 5] = std::array::from_fn(|slot| {
        let leaf = &whole.leaves[slot];
        let leaf = if sliced(slot) { leaf.narrow(0, first, rows) } else { leaf.shallow_clone() };
        leaf.copy().set_requires_grad(true)
    });
    let distributions = whole.distributions.narrow(-1, first, rows);
    let inputs = Inputs {
        targets: match case.distributions {
            true => Targets::Distributions(&distributions),
            false => Targets::Classes(&whole.classes),
        },
        bias: case.bias.then_some(&leaves[2]),
        adapter: case.adapter.then_some(Adapter { a: &leaves[3], b: &leaves[4], scale: 0.7 }),
        token_weights: case.token_weights.then_some(&whole.token_weights),
        class_weights: case.class_weights.then_some(&whole.class_weights),
        denominator: case.denominator.then_some(Denominator::Number(4.5)),
        shard: slice.map(|(_, _, shard)| Arc::new(shard)),
        ..Inputs::new(&leaves[0], &leaves[1], &whole.classes)
    };
    let Output { loss, log_sum_exp, predictions, correct, entropy, .. } = case.options.run(&inputs)?;
    let mut total = match case.options.reduction {
        Reduction::None => (&loss * &whole.upstream).sum(Kind::Double),
        _ => &loss * 1.5,
    };
    if let (LogSumExp::Differentiable, Some(values)) = (case.options.log_sum_exp, &log_sum_exp) {
        total += (values * &whole.upstream).sum(Kind::Double);
    }
    runtime::autograd::backward(&[&total])?;
    let gradients = leaves.each_ref().map(|leaf| match leaf.grad() {
        gradient if gradient.defined() => gradient,
        _ => leaf.detach().zeros_like(),
    });
    let outputs = [Some(loss), log_sum_exp, predictions, correct, entropy];
    Ok((outputs.into_iter().flatten().map(|tensor| tensor.detach()).collect(), gradients))
}

/// Returns the result of each rank, for shards of these sizes.
fn in_slices(case: &Case, whole: &Whole, slices: &[i64]) -> Vec<Result> {
    let all = Arc::new(Threads {
        barrier: Barrier::new(slices.len()),
        given: Mutex::new(slices.iter().map(|_| None).collect()),
    });
    let widest = *slices.iter().max().unwrap();
    let mut first = 0;
    let threads: Vec<_> = slices
        .iter()
        .enumerate()
        .map(|(rank, &rows)| {
            let group = Box::new(Member { rank, all: Arc::clone(&all) });
            let shard = Shard { first, vocabulary: VOCABULARY, widest, group };
            let (case, whole, from) = (case.clone(), whole.share(), first);
            first += rows;
            std::thread::spawn(move || run(&case, &whole, Some((from, rows, shard))))
        })
        .collect();
    assert_eq!(first, VOCABULARY);
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

pub(crate) fn same(name: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!((found.size(), found.kind()), (expected.size(), expected.kind()), "{name}");
    let error = (found - expected).abs().max().to_kind(Kind::Double).double_value(&[]);
    let allowed = 1e-12 * (1.0 + expected.abs().max().to_kind(Kind::Double).double_value(&[]));
    assert!(error <= allowed, "{name}: {error:e}");
}

fn check(case: &Case, whole: &Whole, slices: &[i64]) {
    let (outputs, gradients) = run(case, whole, None).unwrap();
    let ranks: Vec<_> = in_slices(case, whole, slices).into_iter().map(|rank| rank.unwrap()).collect();
    let names = ["x", "w", "b", "a", "b of a"];
    for (found, of_rank) in &ranks {
        assert_eq!(found.len(), outputs.len());
        for (slot, (found, expected)) in found.iter().zip(&outputs).enumerate() {
            same(&format!("{case:?} {slices:?} output {slot}"), found, expected);
        }
        for slot in [0, 3] {
            same(&format!("{case:?} {slices:?} {}", names[slot]), &of_rank[slot], &gradients[slot]);
        }
    }
    for slot in [1, 2, 4] {
        let together: Vec<&Tensor> = ranks.iter().map(|(_, gradients)| &gradients[slot]).collect();
        same(&format!("{case:?} {slices:?} {}", names[slot]), &Tensor::cat(&together, 0), &gradients[slot]);
    }
}

/// Every input and option, with each reduction, with gradients in forward and in backward.
pub(crate) fn cases() -> Vec<Case> {
    let chunk = Some(Chunk::Tokens(3));
    let plain =
        Case { options: LinearCrossEntropy { chunk, ..LinearCrossEntropy::default() }, ..Case::default() };
    let full = LinearCrossEntropy {
        label_smoothing: 0.1,
        z_loss: 0.01,
        softcap: Some(3.0),
        scale: 0.8,
        log_sum_exp: LogSumExp::Value,
        predictions: true,
        entropy: true,
        ..plain.options.clone()
    };
    let every = Case {
        options: full,
        bias: true,
        adapter: true,
        token_weights: true,
        class_weights: true,
        ..plain.clone()
    };
    let mut cases = vec![
        plain.clone(),
        Case { denominator: true, ..every.clone() },
        Case { distributions: true, ..plain.clone() },
        Case { distributions: true, ..every.clone() },
    ];
    for log_sum_exp in [LogSumExp::Value, LogSumExp::Differentiable] {
        cases.push(Case {
            options: LinearCrossEntropy { log_sum_exp, shift: 1, ..every.options.clone() },
            ..every.clone()
        });
    }
    let reduced = |case: &Case, reduction: Reduction, gradients: Gradients| {
        let options = LinearCrossEntropy { reduction, gradients, ..case.options.clone() };
        let denominator = case.denominator && reduction == Reduction::Mean;
        Case { options, denominator, ..case.clone() }
    };
    let each = cases.iter().flat_map(|case| {
        [Reduction::Mean, Reduction::Sum, Reduction::None].into_iter().flat_map(move |reduction| {
            [Gradients::Forward, Gradients::Backward].map(|gradients| reduced(case, reduction, gradients))
        })
    });
    each.collect()
}

#[test]
fn vocabulary_shards_together_match_the_whole() {
    let whole = Whole::new(6);
    for case in cases() {
        for slices in [&[23][..], &[10, 13], &[1, 20, 2], &[5, 3, 9, 1, 5]] {
            check(&case, &whole, slices);
        }
    }
}

/// A rank with fewer rows of W could use larger chunks; all ranks must use the same ones.
#[test]
fn uneven_shards_have_the_same_chunks() {
    let whole = Whole::new(7);
    for rows in [20, 25, 40] {
        let chunk = Some(Chunk::Budget(rows * 8 * 2));
        let case = Case {
            options: LinearCrossEntropy { chunk, ..LinearCrossEntropy::default() },
            ..Case::default()
        };
        check(&case, &whole, &[1, 20, 2]);
        check(&case, &whole, &[19, 4]);
    }
}

/// A vocabulary is often padded to a round number with impossible classes; a whole shard may consist of them.
#[test]
fn a_shard_of_impossible_classes_has_no_effect() {
    let whole = Whole::new(8);
    let _ = whole.leaves[2].narrow(0, 20, 3).fill_(f64::NEG_INFINITY);
    let classes = whole.classes.where_self(&whole.classes.lt(20), &Tensor::from(4i64));
    let whole = Whole { classes, ..whole };
    let options = LinearCrossEntropy {
        predictions: true,
        entropy: true,
        log_sum_exp: LogSumExp::Value,
        ..LinearCrossEntropy::default()
    };
    let case = Case { options, bias: true, ..Case::default() };
    check(&case, &whole, &[20, 3]);
    check(&case, &whole, &[10, 11, 2]);
}

/// Equal logits in two shards: the lowest class is the prediction, as without shards.
#[test]
fn of_equal_logits_the_first_class_is_predicted() {
    let whole = Whole::new(9);
    let leaves = [&whole.leaves[0], &whole.leaves[1].zeros_like()].map(Tensor::shallow_clone);
    let [x, w] = leaves;
    let [_, _, b, a, low] = whole.leaves.each_ref().map(Tensor::shallow_clone);
    let whole = Whole { leaves: [x, w, b, a, low], ..whole };
    let case = Case {
        options: LinearCrossEntropy { predictions: true, ..LinearCrossEntropy::default() },
        ..Case::default()
    };
    check(&case, &whole, &[10, 13]);
    let (outputs, _) = run(&case, &whole, None).unwrap();
    // 0 at the labelled positions, −1 at the two ignored ones.
    assert_eq!(outputs[1].sum(Kind::Int64).int64_value(&[]), -2);
}

#[test]
fn communication_errors_are_returned() {
    #[derive(Debug)]
    struct Broken {
        left: Mutex<i32>,
    }
    impl ProcessGroup for Broken {
        fn all_reduce(&self, _: &mut Tensor, _: ReduceOp) -> runtime::Result<()> {
            let mut left = self.left.lock().unwrap();
            *left -= 1;
            if *left >= 0 { Ok(()) } else { Err(runtime::Error::invalid("all_reduce", "rank 1 is gone")) }
        }
    }
    let whole = Whole::new(10);
    let gone = expect!["all_reduce: rank 1 is gone"];
    // An error in the maximum, the sums, or the sum of the hidden states' gradients; in forward and, for the last, in
    // backward.
    for (calls, gradients) in
        [(0, Gradients::Forward), (1, Gradients::Forward), (2, Gradients::Forward), (2, Gradients::Backward)]
    {
        let options = LinearCrossEntropy { gradients, ..LinearCrossEntropy::default() };
        let group = Box::new(Broken { left: Mutex::new(calls) });
        let shard = Shard { first: 5, vocabulary: VOCABULARY, widest: 9, group };
        let error =
            run(&Case { options, ..Case::default() }, &whole, Some((5, 9, shard))).unwrap_err().to_string();
        assert!(error.contains("rank 1 is gone"), "{calls} {gradients:?}: {error}");
        if gradients == Gradients::Forward {
            gone.assert_eq(&error);
        }
    }
}
