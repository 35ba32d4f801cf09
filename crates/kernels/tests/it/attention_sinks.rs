//! Attention sinks on the CPU, in fused attention and in that of one query: against a softmax with one more column in f64.

use kernels::attention::{
    CausalOptions, SingleQueryOptions, causal_attention, causal_attention_of_rows, single_query_attention,
};
use runtime::autograd::{GradcheckConfig, Keep, grad, gradcheck};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);
const PLAIN: CausalOptions<'static> =
    CausalOptions { scale: None, window: None, cap: None, sinks: None, documents: None };

/// q, k, v, sinks and the upstream gradient; one head's sink is far above its scores, and one far below.
fn inputs([batch, tokens, heads, kv_heads, head]: [i64; 5], kind: Kind, seed: u64) -> [Tensor; 5] {
    let mut generator = Generator::new(seed).unwrap();
    let [q, k, v, upstream] = [heads, kv_heads, kv_heads, heads].map(|heads| {
        let x = generator.normal(&[batch, tokens, heads, head], F64).unwrap();
        x.to_kind(kind).transpose(1, 2)
    });
    let sinks = generator.normal(&[heads], F64).unwrap();
    if heads > 2 {
        let _ = sinks.narrow(0, 1, 1).fill_(40.0);
        let _ = sinks.narrow(0, 2, 1).fill_(-60.0);
    }
    [q, k, v, sinks.to_kind(kind), upstream]
}

/// Scores of all pairs in f64, and a column for the sink.
fn formula([q, k, v, sinks]: [&Tensor; 4], options: CausalOptions<'_>) -> Tensor {
    let (batch, heads, tokens, head) = q.size4().unwrap();
    let repeated = |x: &Tensor| x.repeat_interleave_self_int(heads / x.size()[1], 1, None::<i64>);
    let scale = options.scale.unwrap_or(1.0 / (head as f64).sqrt());
    let scores = q.matmul(&repeated(k).transpose(2, 3)) * scale;
    let scores = options.cap.map_or(scores.shallow_clone(), |cap| (scores / cap).tanh() * cap);
    let seen = Tensor::ones([tokens, tokens], (Kind::Bool, Device::Cpu)).tril(0);
    let seen = options.window.map_or(seen.shallow_clone(), |window| seen.triu(1 - window));
    let scores = scores.masked_fill(&seen.logical_not(), f64::NEG_INFINITY);
    let column = sinks.view([1, heads, 1, 1]).expand([batch, heads, tokens, 1], false);
    let weights = Tensor::cat(&[scores, column], -1).softmax(-1, Kind::Double).narrow(-1, 0, tokens);
    weights.matmul(&repeated(v))
}

fn with_gradients(o: Tensor, inputs: &[&Tensor], upstream: &Tensor) -> Vec<Tensor> {
    let gradients = grad(&[&o], &[Some(upstream)], inputs, Keep::default()).unwrap();
    std::iter::once(o.detach()).chain(gradients.into_iter().map(Option::unwrap)).collect()
}

fn leaves(inputs: &[Tensor; 5], kind: Kind) -> [Tensor; 4] {
    [0, 1, 2, 3].map(|index| inputs[index].to_kind(kind).detach().set_requires_grad(true))
}

fn fused(inputs: &[Tensor; 5], options: CausalOptions<'_>) -> Vec<Tensor> {
    let [q, k, v, sinks] = leaves(inputs, inputs[0].kind());
    let o = causal_attention(&q, &k, &v, CausalOptions { sinks: Some(&sinks), ..options }).unwrap();
    with_gradients(o, &[&q, &k, &v, &sinks], &inputs[4])
}

fn error(found: &Tensor, expected: &Tensor) -> f64 {
    let difference = (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[]);
    difference / expected.abs().max().double_value(&[]).max(1e-12)
}

#[test]
fn every_shape_and_dtype_matches_the_formula() {
    let shapes =
        [[1, 1, 1, 1, 1], [2, 3, 2, 1, 4], [2, 64, 4, 2, 64], [1, 129, 6, 2, 80], [2, 200, 3, 3, 40]];
    let options = [
        PLAIN,
        CausalOptions { scale: Some(0.31), ..PLAIN },
        CausalOptions { window: Some(1), ..PLAIN },
        CausalOptions { window: Some(70), cap: Some(0.8), ..PLAIN },
    ];
    // Backward reads the rounded output, from which the gradient of a score within a window of one token is a difference.
    for (kind, tolerance) in
        [(Kind::Double, 1e-13), (Kind::Float, 1e-5), (Kind::BFloat16, 2e-2), (Kind::Half, 2.5e-3)]
    {
        for (number, shape) in shapes.into_iter().enumerate() {
            let inputs = inputs(shape, kind, number as u64);
            for options in options {
                let [q, k, v, sinks] = leaves(&inputs, Kind::Double);
                let o = formula([&q, &k, &v, &sinks], options);
                let expected = with_gradients(o, &[&q, &k, &v, &sinks], &inputs[4].to_kind(Kind::Double));
                let found = fused(&inputs, options);
                for (name, (found, expected)) in
                    ["o", "q", "k", "v", "sinks"].iter().zip(found.iter().zip(&expected))
                {
                    assert_eq!((found.kind(), found.size()), (kind, expected.size()), "{name} {shape:?}");
                    let error = error(found, expected);
                    assert!(error < tolerance, "{kind:?} {shape:?} {options:?} {name}: {error:e}");
                }
            }
        }
    }
}

#[test]
fn derivatives_match_finite_differences() {
    let [q, k, v, sinks, _] = inputs([1, 5, 2, 1, 3], Kind::Double, 11);
    let inputs = [q, k, v, sinks].map(|x| x.contiguous().set_requires_grad(true));
    let options = CausalOptions { scale: Some(0.7), window: Some(3), ..PLAIN };
    let attend = |inputs: &[Tensor]| {
        let options = CausalOptions { sinks: Some(&inputs[3]), ..options };
        Ok(vec![causal_attention(&inputs[0], &inputs[1], &inputs[2], options)?])
    };
    let report = gradcheck(attend, &inputs.each_ref(), GradcheckConfig::default()).unwrap();
    assert!(report.percent_of_tolerance <= 100.0, "{report}");
}

/// As projections return them, with a sink that is trained alone, and on any number of threads.
#[test]
fn rows_of_projections_and_threads_give_the_same_bits() {
    let threads = tch::get_num_threads();
    let inputs = inputs([2, 150, 4, 2, 16], Kind::Float, 5);
    let expected = fused(&inputs, PLAIN);
    let flat = |x: &Tensor| x.transpose(1, 2).flatten(2, 3).contiguous();
    for threads in [1, 3] {
        tch::set_num_threads(threads);
        let [q, k, v] = [0, 1, 2].map(|index| flat(&inputs[index]));
        let sinks = inputs[3].detach().set_requires_grad(true);
        let options = CausalOptions { sinks: Some(&sinks), ..PLAIN };
        let o = causal_attention_of_rows(&q, &k, &v, 16, options).unwrap();
        let found = with_gradients(o, &[&sinks], &flat(&inputs[4]));
        assert_eq!(found[0], flat(&expected[0]), "{threads} threads");
        assert_eq!(found[1], expected[4], "{threads} threads");
    }
    tch::set_num_threads(threads);
}

#[test]
fn attention_of_one_query_matches_the_formula() {
    for (kind, tolerance) in [(Kind::Double, 1e-13), (Kind::Float, 1e-5), (Kind::BFloat16, 6e-3)] {
        for (number, [batch, keys, heads, kv_heads, head]) in
            [[1, 1, 1, 1, 1], [2, 40, 4, 2, 64], [1, 1100, 3, 1, 40]].into_iter().enumerate()
        {
            let mut generator = Generator::new(number as u64).unwrap();
            let mut normal = |shape: &[i64]| generator.normal(shape, F64).unwrap().to_kind(kind);
            let q = normal(&[batch, heads, head]);
            let [k, v] = [0, 1].map(|_| normal(&[batch, kv_heads, keys, head]));
            let sinks = normal(&[heads]) * 8.0;
            let options = SingleQueryOptions { sinks: Some(&sinks), ..SingleQueryOptions::default() };
            let found = single_query_attention(&q, &k, &v, options).unwrap();
            let [q, k, v, sinks] = [&q, &k, &v, &sinks].map(|x| x.to_kind(Kind::Double));
            let grouped = q.view([batch, kv_heads, heads / kv_heads, head]);
            let scores = grouped.matmul(&k.transpose(2, 3)) / (head as f64).sqrt();
            let column = sinks.view([1, kv_heads, heads / kv_heads, 1]);
            let column = column.expand([batch, kv_heads, heads / kv_heads, 1], false);
            let weights = Tensor::cat(&[scores, column], -1).softmax(-1, Kind::Double).narrow(-1, 0, keys);
            let off = error(&found, &weights.matmul(&v).view([batch, heads, head]));
            assert!(off < tolerance, "{kind:?} {number}: {off:e}");
        }
    }
}

#[test]
fn sinks_of_another_number_of_heads_are_refused() {
    let [q, k, v, sinks, _] = inputs([1, 5, 4, 2, 8], Kind::Float, 1);
    let two = sinks.narrow(0, 0, 2);
    let error = causal_attention(&q, &k, &v, CausalOptions { sinks: Some(&two), ..PLAIN });
    assert!(error.unwrap_err().to_string().contains("`sinks` is Float [2]"));
}
