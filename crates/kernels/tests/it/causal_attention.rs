//! Fused causal attention on the CPU: compared with the formula in f64, with itself on other numbers of threads, and its derivatives.

use std::sync::Mutex;

use kernels::attention::{
    CausalOptions, SingleQueryOptions, causal_attention, causal_attention_of_rows, single_query_attention,
    takes,
};
use runtime::autograd::{GradcheckConfig, Keep, grad, gradcheck};
use runtime::profile::Counter;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

/// Tests that set the number of threads, one at a time.
pub(crate) static THREADS: Mutex<()> = Mutex::new(());

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

/// q, k, v and the upstream gradient, as views of `[batch, tokens, heads, head]`.
fn inputs(shape: [i64; 5], kind: Kind, seed: u64) -> [Tensor; 4] {
    let [batch, tokens, heads, kv_heads, head] = shape;
    let mut generator = Generator::new(seed).unwrap();
    [heads, kv_heads, kv_heads, heads].map(|heads| {
        let x = generator.normal(&[batch, tokens, heads, head], F64).unwrap();
        x.to_kind(kind).transpose(1, 2)
    })
}

/// The output and the gradients of q, k and v, by operators on all pairs, in f64.
fn oracle([q, k, v, upstream]: &[Tensor; 4], options: CausalOptions<'_>) -> Vec<Tensor> {
    let scale = options.scale.unwrap_or(1.0 / (q.size()[3] as f64).sqrt());
    let [q, k, v] = [q, k, v].map(|x| x.to_kind(Kind::Double).detach().set_requires_grad(true));
    let (heads, kv_heads, tokens) = (q.size()[1], k.size()[1], q.size()[2]);
    let repeated = |x: &Tensor| x.repeat_interleave_self_int(heads / kv_heads, 1, None::<i64>);
    let scores = q.matmul(&repeated(&k).transpose(2, 3)) * scale;
    let scores = options.cap.map_or(scores.shallow_clone(), |cap| (scores / cap).tanh() * cap);
    let seen = Tensor::ones([tokens, tokens], (Kind::Bool, Device::Cpu)).tril(0);
    let seen = options.window.map_or(seen.shallow_clone(), |window| seen.triu(1 - window));
    let hidden = seen.logical_not();
    let o = scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, Kind::Double).matmul(&repeated(&v));
    with_gradients(o, &[&q, &k, &v], &upstream.to_kind(Kind::Double))
}

fn with_gradients(o: Tensor, inputs: &[&Tensor], upstream: &Tensor) -> Vec<Tensor> {
    let gradients = grad(&[&o], &[Some(upstream)], inputs, Keep::default()).unwrap();
    std::iter::once(o.detach()).chain(gradients.into_iter().map(Option::unwrap)).collect()
}

fn fused([q, k, v, upstream]: &[Tensor; 4], options: CausalOptions<'_>) -> Vec<Tensor> {
    let [q, k, v] = [q, k, v].map(|x| x.detach().set_requires_grad(true));
    let o = causal_attention(&q, &k, &v, options).unwrap();
    with_gradients(o, &[&q, &k, &v], upstream)
}

/// The largest error, as a share of the largest element.
fn error(found: &Tensor, expected: &Tensor) -> f64 {
    let difference = (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[]);
    difference / expected.abs().max().double_value(&[])
}

const PLAIN: CausalOptions<'static> =
    CausalOptions { scale: None, window: None, cap: None, sinks: None, documents: None };

/// Scales, windows within a block, of a block and over several, caps that change all scores and few.
const OPTIONS: [CausalOptions<'static>; 8] = [
    PLAIN,
    CausalOptions { scale: Some(0.31), ..PLAIN },
    CausalOptions { window: Some(1), ..PLAIN },
    CausalOptions { window: Some(7), ..PLAIN },
    CausalOptions { window: Some(64), cap: Some(0.8), ..PLAIN },
    CausalOptions { window: Some(130), scale: Some(0.2), ..PLAIN },
    CausalOptions { window: Some(1000), ..PLAIN },
    CausalOptions { cap: Some(2.5), ..PLAIN },
];

const SHAPES: [[i64; 5]; 11] = [
    [1, 1, 1, 1, 1],
    [2, 3, 2, 1, 4],
    [1, 63, 3, 3, 16],
    [2, 64, 4, 2, 64],
    [1, 65, 2, 2, 64],
    [1, 129, 6, 2, 80],
    [2, 200, 9, 3, 64],
    [1, 257, 2, 1, 128],
    [1, 100, 4, 1, 256],
    [3, 17, 5, 5, 40],
    [1, 520, 2, 2, 72],
];

#[test]
fn every_shape_and_dtype_matches_the_formula() {
    // f32 sums of up to 520 terms; 16 bits are rounded once, and so are their gradients.
    for (kind, tolerance) in
        [(Kind::Double, 1e-13), (Kind::Float, 1e-5), (Kind::BFloat16, 6e-3), (Kind::Half, 8e-4)]
    {
        for (number, shape) in SHAPES.into_iter().enumerate() {
            let inputs = inputs(shape, kind, number as u64);
            for options in OPTIONS {
                let expected = oracle(&inputs, options);
                for (name, (found, expected)) in
                    ["o", "q", "k", "v"].iter().zip(fused(&inputs, options).iter().zip(&expected))
                {
                    assert_eq!((found.kind(), found.size()), (kind, expected.size()), "{name} {shape:?}");
                    let error = error(found, expected);
                    // The only token's scores have no gradient.
                    let is_zero = expected.abs().max().double_value(&[]) < 1e-12;
                    assert!(is_zero || error < tolerance, "{kind:?} {shape:?} {options:?} {name}: {error:e}");
                }
            }
        }
    }
}

/// Whether a thread takes all blocks of a head or some of them, and how many threads there are.
#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let _alone = THREADS.lock().unwrap();
    let threads = tch::get_num_threads();
    let windowed = CausalOptions { window: Some(70), cap: Some(1.5), ..PLAIN };
    for (kind, options) in [(Kind::Float, PLAIN), (Kind::BFloat16, PLAIN), (Kind::Float, windowed)] {
        for shape in [[1, 300, 4, 1, 64], [1, 130, 3, 3, 40], [2, 65, 4, 2, 16]] {
            let inputs = inputs(shape, kind, 7);
            let run = |threads| {
                tch::set_num_threads(threads);
                fused(&inputs, options)
            };
            let expected = run(1);
            for threads in [2, 3, 7] {
                for (found, expected) in run(threads).iter().zip(&expected) {
                    assert_eq!(found, expected, "{kind:?} {shape:?} on {threads} threads");
                }
            }
        }
    }
    tch::set_num_threads(threads);
}

#[test]
fn every_layout_has_the_same_bits() {
    let [q, k, v, upstream] = inputs([2, 70, 4, 2, 32], Kind::Float, 3);
    let expected = fused(&[&q, &k, &v, &upstream].map(Tensor::shallow_clone), PLAIN);
    let [batch, tokens, head] = [2, 70, 32];
    // One projection for all, the heads side by side; heads first; every second element; an upstream gradient that is expanded.
    let joint = Tensor::cat(&[&q, &k, &v].map(|x| x.transpose(1, 2)), 2).view([batch, tokens, 8 * head]);
    let parts = joint.view([batch, tokens, 8, head]).split_with_sizes([4, 2, 2], 2);
    let joint = [0, 1, 2].map(|part: usize| parts[part].transpose(1, 2));
    let heads_first = [&q, &k, &v].map(Tensor::contiguous);
    let sparse = [&q, &k, &v].map(|x| {
        let twice = Tensor::cat(&[x.unsqueeze(4), x.unsqueeze(4)], 4).flatten(3, 4);
        twice.slice(3, 0, None, 2)
    });
    for [q, k, v] in [joint, heads_first, sparse] {
        let found = fused(&[q, k, v, upstream.contiguous()], PLAIN);
        assert_eq!(found, expected);
    }
    let ones = Tensor::ones([1], (Kind::Float, Device::Cpu)).expand(q.size(), false);
    let dense = fused(&[&q, &k, &v, &ones.contiguous()].map(Tensor::shallow_clone), PLAIN);
    assert_eq!(fused(&[q, k, v, ones], PLAIN), dense);
}

/// Heads side by side in a row, as projections return them, dense or in a joint projection.
#[test]
fn rows_have_the_bits_of_heads() {
    let options = CausalOptions { window: Some(33), ..PLAIN };
    for kind in [Kind::Float, Kind::BFloat16] {
        let heads = inputs([2, 70, 4, 2, 24], kind, 6);
        let expected = fused(&heads, options);
        let rows = |x: &Tensor| x.transpose(1, 2).reshape([2, 70, -1]);
        let [q, k, v, upstream] = heads.each_ref().map(rows);
        let joint = Tensor::cat(&[&q, &k, &v], 2).split_with_sizes([96, 48, 48], 2);
        for [q, k, v] in [[q, k, v], [0, 1, 2].map(|part: usize| joint[part].shallow_clone())] {
            let [q, k, v] = [q, k, v].map(|x| x.detach().set_requires_grad(true));
            let o = causal_attention_of_rows(&q, &k, &v, 24, options).unwrap();
            for (found, expected) in with_gradients(o, &[&q, &k, &v], &upstream).iter().zip(&expected) {
                assert_eq!(*found, rows(expected), "{kind:?}");
            }
        }
    }
    let row = Tensor::ones([1, 3, 10], (Kind::Float, Device::Cpu));
    let words = causal_attention_of_rows(&row, &row, &row, 4, PLAIN).unwrap_err().to_string();
    assert_eq!(
        words,
        "causal attention: q is [1, 3, 10]; expected [batch, tokens, heads·head] with heads of 4"
    );
}

#[test]
fn derivatives_match_finite_differences() {
    let [q, k, v, _] = inputs([1, 5, 4, 2, 3], Kind::Double, 11);
    let inputs = [q, k, v].map(|x| x.contiguous().set_requires_grad(true));
    let bent = CausalOptions { scale: Some(0.7), window: Some(3), cap: Some(0.9), ..PLAIN };
    for options in [CausalOptions { scale: Some(0.7), ..PLAIN }, bent] {
        let attend =
            |inputs: &[Tensor]| Ok(vec![causal_attention(&inputs[0], &inputs[1], &inputs[2], options)?]);
        gradcheck(attend, &inputs.each_ref(), GradcheckConfig::default()).unwrap();
    }
}

/// Large scores neither overflow nor lose the largest; a NaN or an infinity reaches what sees it, and nothing else.
#[test]
fn extreme_scores_are_those_of_the_formula() {
    let [q, k, v, upstream] = inputs([1, 150, 2, 1, 16], Kind::Float, 5);
    let large = [&q * 300.0, k.shallow_clone(), v.shallow_clone(), upstream.shallow_clone()];
    for options in [PLAIN, CausalOptions { window: Some(20), ..PLAIN }] {
        let options = CausalOptions { scale: Some(0.25), ..options };
        for (found, expected) in fused(&large, options).iter().zip(&oracle(&large, options)) {
            let error = error(found, expected);
            assert!(error < 1e-4, "{error:e}");
        }
    }
    for wrong in [f64::NAN, f64::INFINITY] {
        let broken = v.copy();
        let _ = broken.narrow(2, 100, 1).fill_(wrong);
        let o = causal_attention(&q, &k, &broken, PLAIN).unwrap();
        let seen = o.isfinite().all_dim(3, false).all_dim(1, false).squeeze();
        // A weight of 0 times it is NaN in its block of keys, as in libtorch.
        assert!(bool::try_from(seen.narrow(0, 0, 64).all()).unwrap(), "earlier blocks do not see it");
        assert!(!bool::try_from(seen.narrow(0, 100, 50).any()).unwrap(), "later tokens do");
        let broken = q.copy();
        let _ = broken.narrow(2, 70, 1).fill_(f64::NAN);
        let o = causal_attention(&broken, &k, &v, PLAIN).unwrap();
        assert_eq!(
            o.isnan()
                .any_dim(3, false)
                .any_dim(1, false)
                .to_kind(Kind::Int64)
                .sum(Kind::Int64)
                .int64_value(&[]),
            1
        );
    }
}

#[test]
fn the_work_is_counted_as_libtorchs() {
    let [q, k, v, upstream] = inputs([2, 70, 4, 2, 32], Kind::Float, 3);
    let [q, k, v] = [q, k, v].map(|x| x.set_requires_grad(true));
    let count = |attend: &dyn Fn() -> Tensor| {
        let counter = Counter::on_this_thread().unwrap();
        let o = attend();
        drop(grad(&[&o], &[Some(&upstream)], &[&q, &k, &v], Keep::default()).unwrap());
        counter.finish().unwrap().total.flops
    };
    let ours = count(&|| causal_attention(&q, &k, &v, PLAIN).unwrap());
    let theirs =
        count(&|| Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, true));
    assert_eq!(ours, theirs);
    // Of 70 queries the first 20 see all before them, the others 20 keys each: 1210 of the 2485 pairs below the diagonal.
    let within =
        count(&|| causal_attention(&q, &k, &v, CausalOptions { window: Some(20), ..PLAIN }).unwrap());
    assert_eq!(within.causal * 2485, ours.causal * 1210);
    assert_eq!(within.dense * 70, ours.dense * 20);
}

#[test]
fn what_does_not_fit_is_refused() {
    let [q, k, v, _] = inputs([1, 4, 4, 2, 8], Kind::Float, 1);
    assert!(
        takes(Device::Cpu, Kind::Half)
            && !takes(Device::Cpu, Kind::Int64)
            && !takes(Device::Cuda(0), Kind::Float)
    );
    let refused =
        |q: &Tensor, k: &Tensor, v: &Tensor| causal_attention(q, k, v, PLAIN).unwrap_err().to_string();
    assert!(
        refused(&q, &k.narrow(2, 0, 3), &v)
            .contains("expected Float [1, 2, 4, 8] with a dense last dimension on Cpu")
    );
    assert!(refused(&q, &k.to_kind(Kind::Double), &v).contains("`k` is Double"));
    assert!(refused(&q.narrow(1, 0, 3), &k, &v).contains("q is Float [1, 3, 4, 8], k [1, 2, 4, 8]"));
    let integers = [&q, &k, &v].map(|x| x.to_kind(Kind::Int64));
    assert!(refused(&integers[0], &integers[1], &integers[2]).contains("q is Int64"));
    let with = |options| causal_attention(&q, &k, &v, options).unwrap_err().to_string();
    let text = with(CausalOptions { window: Some(0), ..PLAIN });
    assert!(text.contains("the window is 0 tokens; expected at least 1"), "{text}");
    let text = with(CausalOptions { cap: Some(0.0), ..PLAIN });
    assert!(text.contains("the cap is 0; expected a finite number above 0"), "{text}");
    let none = q.narrow(2, 0, 0);
    assert_eq!(
        causal_attention(&none, &k.narrow(2, 0, 0), &v.narrow(2, 0, 0), PLAIN).unwrap().size(),
        [1, 4, 0, 8]
    );
}

/// Generation's step: groups of queries, chunks of keys, masks, caps, keys within a larger cache, every dtype.
#[test]
fn attention_of_one_query_matches_the_formula() {
    let shapes: [[i64; 5]; 8] = [
        [1, 1, 1, 1, 1],
        [2, 40, 4, 2, 64],
        [1, 513, 14, 2, 64],
        [3, 64, 2, 2, 40],
        [1, 1100, 3, 1, 128],
        [2, 65, 8, 1, 72],
        [1, 512, 4, 4, 256],
        [2, 700, 6, 3, 16],
    ];
    for (kind, tolerance) in
        [(Kind::Double, 1e-13), (Kind::Float, 1e-5), (Kind::BFloat16, 6e-3), (Kind::Half, 8e-4)]
    {
        for (number, [batch, keys, heads, kv_heads, head]) in shapes.into_iter().enumerate() {
            let mut generator = Generator::new(number as u64).unwrap();
            let mut normal = |shape: &[i64]| generator.normal(shape, F64).unwrap().to_kind(kind);
            let q = normal(&[batch, heads, head]);
            let [k, v] = [0, 1].map(|_| normal(&[batch, kv_heads, keys + 7, head]).narrow(2, 3, keys));
            let shown = Tensor::arange(keys, (Kind::Int64, Device::Cpu)).remainder(3).not_equal(0);
            let shown = shown.logical_or(&Tensor::arange(keys, (Kind::Int64, Device::Cpu)).eq(0));
            // The other rows see all.
            let rows = Tensor::arange(batch, (Kind::Int64, Device::Cpu)).unsqueeze(1).not_equal(0);
            let mask = shown.unsqueeze(0).logical_or(&rows);
            for (mask, scale, cap) in [
                (None, None, None),
                (Some(&mask), Some(0.31), None),
                (None, None, Some(2.5)),
                (Some(&mask), None, Some(0.7)),
            ] {
                let options = SingleQueryOptions { mask, scale, cap, sinks: None };
                let found = single_query_attention(&q, &k, &v, options).unwrap();
                let [q, k, v] = [&q, &k, &v].map(|x| x.to_kind(Kind::Double));
                let grouped = q.view([batch, kv_heads, heads / kv_heads, head]);
                let mut scores =
                    grouped.matmul(&k.transpose(2, 3)) * scale.unwrap_or(1.0 / (head as f64).sqrt());
                if let Some(cap) = cap {
                    scores = (scores / cap).tanh() * cap;
                }
                if let Some(mask) = mask {
                    let hidden = mask.logical_not().view([batch, 1, 1, keys]);
                    scores = scores.masked_fill(&hidden, f64::NEG_INFINITY);
                }
                let expected = scores.softmax(-1, Kind::Double).matmul(&v).view([batch, heads, head]);
                let off = error(&found, &expected);
                assert!(off < tolerance, "{kind:?} {:?} {options:?}: {off:e}", shapes[number]);
            }
        }
    }
}

#[test]
fn attention_of_one_query_does_not_depend_on_threads() {
    let _alone = THREADS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let threads = tch::get_num_threads();
    let mut generator = Generator::new(9).unwrap();
    let q = generator.normal(&[2, 6, 64], (Kind::Float, Device::Cpu)).unwrap();
    let k = generator.normal(&[2, 2, 1500, 64], (Kind::Float, Device::Cpu)).unwrap();
    let on = |threads: i32| {
        tch::set_num_threads(threads);
        single_query_attention(&q, &k, &k, SingleQueryOptions::default()).unwrap()
    };
    let expected = on(1);
    for more in [2, 3, 8] {
        assert_eq!(on(more), expected, "{more} threads");
    }
    tch::set_num_threads(threads);
}

#[test]
fn attention_of_one_query_refuses_what_does_not_fit() {
    let float = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let mask = Tensor::ones([1, 5], (Kind::Bool, Device::Cpu));
    let of = |q: &[i64], k: &[i64], mask| {
        let k = float(k);
        let options = SingleQueryOptions { mask, ..SingleQueryOptions::default() };
        single_query_attention(&float(q), &k, &k, options).map(|_| ()).unwrap_err().to_string()
    };
    for text in [
        of(&[1, 3, 8], &[1, 2, 5, 8], None),
        of(&[1, 2, 8], &[1, 2, 5, 4], None),
        of(&[1, 2, 8], &[2, 2, 5, 8], None),
        of(&[1, 2, 8], &[1, 2, 6, 8], Some(&mask)),
    ] {
        assert!(text.contains("attention") || text.contains("expand"), "{text}");
    }
    let q = float(&[1, 2, 8]).set_requires_grad(true);
    let k = float(&[1, 2, 5, 8]);
    let error = single_query_attention(&q, &k, &k, SingleQueryOptions::default()).unwrap_err().to_string();
    assert!(error.contains("requires a gradient"), "{error}");
}
