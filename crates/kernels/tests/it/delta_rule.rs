//! The gated delta rule and its convolution against a loop over tokens in f64, whose gradients are autograd's.

use kernels::causal_conv::causal_conv;
use kernels::delta_rule::{DeltaInputs, gated_delta_rule, gated_delta_step};
use runtime::autograd::{self, Keep};
use tch::{Device, Kind, Tensor, kind};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Rows, tokens, key heads, value heads of each, key, value.
struct Case {
    shape: [i64; 6],
    /// Lengths of the documents of each row; empty without packing.
    documents: &'static [&'static [i64]],
    has_state: bool,
}

const CASES: [Case; 5] = [
    Case { shape: [2, 1, 1, 1, 3, 2], documents: &[], has_state: true },
    Case { shape: [2, 23, 2, 2, 5, 4], documents: &[], has_state: true },
    Case { shape: [1, 150, 1, 3, 4, 6], documents: &[], has_state: false },
    // Several spans of 16 chunks.
    Case { shape: [1, 2100, 1, 1, 3, 2], documents: &[], has_state: true },
    // Boundaries within chunks, at a chunk's start, and of single tokens.
    Case {
        shape: [2, 1200, 1, 2, 3, 2],
        documents: &[&[1, 63, 100, 1, 1, 200, 834], &[700, 324, 176]],
        has_state: false,
    },
];

/// q, k, v, g, β and a state. Decays are slow, with one of e⁻⁵⁰.
fn inputs([b, t, h, r, key, value]: [i64; 6], seed: i64) -> Vec<Tensor> {
    tch::manual_seed(seed);
    let normal = |shape: &[i64]| Tensor::randn(shape, F64);
    let g = Tensor::rand([b, t, h * r], F64) * -0.05;
    let _ = g.narrow(1, t / 3, 1).fill_(-50.0);
    let mut all = vec![normal(&[b, t, h, key]), normal(&[b, t, h, key]), normal(&[b, t, h * r, value]), g];
    all.push(Tensor::rand([b, t, h * r], F64));
    all.push(normal(&[b, h * r, key, value]));
    all.into_iter().map(|x| x.set_requires_grad(true)).collect()
}

fn of(x: &[Tensor]) -> DeltaInputs<'_> {
    DeltaInputs { q: &x[0], k: &x[1], v: &x[2], g: &x[3], beta: &x[4] }
}

fn ids(documents: &[&[i64]]) -> Option<Tensor> {
    if documents.is_empty() {
        return None;
    }
    let mut id = 0;
    let mut row = |lengths: &&[i64]| {
        let list = lengths.iter().flat_map(|&length| {
            id += 1;
            std::iter::repeat_n(id, length as usize)
        });
        Tensor::from_slice(&list.collect::<Vec<i64>>())
    };
    Some(Tensor::stack(&documents.iter().map(&mut row).collect::<Vec<_>>(), 0))
}

/// The rule as a loop over tokens.
fn by_tokens(x: &[Tensor], ids: Option<&Tensor>, has_state: bool) -> (Tensor, Tensor) {
    let unit =
        |x: &Tensor| x * (x.square().sum_dim_intlist([-1].as_slice(), true, Kind::Double) + 1e-6).rsqrt();
    let group = x[2].size()[2] / x[0].size()[2];
    let key = x[0].size()[3];
    let q = (unit(&x[0]) * (key as f64).powf(-0.5)).repeat_interleave_self_int(group, 2, None);
    let k = unit(&x[1]).repeat_interleave_self_int(group, 2, None);
    let mut state = if has_state { x[5].shallow_clone() } else { x[5].zeros_like() };
    let mut outputs = Vec::new();
    for t in 0..q.size()[1] {
        let at = |x: &Tensor| x.select(1, t);
        if let Some(ids) = ids.filter(|_| t > 0) {
            let same = ids.select(1, t).eq_tensor(&ids.select(1, t - 1)).to_kind(Kind::Double);
            state = &state * same.view([-1, 1, 1, 1]);
        }
        state = &state * at(&x[3]).exp().unsqueeze(-1).unsqueeze(-1);
        let old = (&state * at(&k).unsqueeze(-1)).sum_dim_intlist([-2].as_slice(), false, Kind::Double);
        let change = (at(&x[2]) - old) * at(&x[4]).unsqueeze(-1);
        state = &state + at(&k).unsqueeze(-1) * change.unsqueeze(-2);
        outputs.push((&state * at(&q).unsqueeze(-1)).sum_dim_intlist([-2].as_slice(), false, Kind::Double));
    }
    (Tensor::stack(&outputs, 1), state)
}

fn largest(x: &Tensor) -> f64 {
    x.abs().max().double_value(&[])
}

/// Outputs, final state, and the gradients of every input of a weighted sum of both.
fn with_gradients(x: &[Tensor], (o, state): (Tensor, Tensor), has_state: bool) -> Vec<Tensor> {
    let weights = |x: &Tensor| Tensor::arange(x.numel() as i64, F64).sin().view_as(x);
    let loss = (&o * weights(&o)).sum(Kind::Double) + (&state * weights(&state)).sum(Kind::Double);
    let inputs: Vec<&Tensor> = x.iter().take(5 + usize::from(has_state)).collect();
    let gradients = autograd::grad(&[&loss], &[None], &inputs, Keep::default()).unwrap();
    [o.detach(), state.detach()].into_iter().chain(gradients.into_iter().flatten()).collect()
}

#[test]
fn chunks_have_the_values_and_gradients_of_a_loop_over_tokens() {
    for (case, seed) in CASES.iter().zip(0..) {
        let x = inputs(case.shape, seed);
        let ids = ids(case.documents);
        let state = case.has_state.then(|| &x[5]);
        let found = gated_delta_rule(&of(&x), ids.as_ref(), state).unwrap();
        let found = with_gradients(&x, found, case.has_state);
        let expected = by_tokens(&x, ids.as_ref(), case.has_state);
        let expected = with_gradients(&x, expected, case.has_state);
        assert_eq!(found.len(), expected.len());
        for ((name, found), expected) in
            ["o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate"].iter().zip(&found).zip(&expected)
        {
            let error = largest(&(found - expected)) / largest(expected).max(1.0);
            assert!(error < 1e-10, "{name} of {:?}: {error:e}", case.shape);
        }
    }
}

/// A row of documents has the results of the documents alone, also where nothing decays.
#[test]
fn documents_do_not_see_each_other() {
    let lengths = [3, 70, 1, 130, 64];
    let x = inputs([1, lengths.iter().sum(), 2, 1, 4, 4], 9);
    let no_decay = Tensor::zeros_like(&x[3]);
    let mut x: Vec<Tensor> = x.iter().map(Tensor::detach).collect();
    x[3] = no_decay;
    let ids = ids(&[&lengths]).unwrap();
    let (packed, _) = gated_delta_rule(&of(&x), Some(&ids), None).unwrap();
    let mut start = 0;
    for length in lengths {
        let part: Vec<Tensor> = x[..5].iter().map(|x| x.narrow(1, start, length)).collect();
        let (alone, _) = gated_delta_rule(&of(&part), None, None).unwrap();
        assert!(largest(&(packed.narrow(1, start, length) - alone)) < 1e-12, "{start}");
        start += length;
    }
}

/// A row in two parts, the second from the first's state, and then token by token.
#[test]
fn a_state_continues_a_row() {
    for kind in [Kind::Double, Kind::Float] {
        let x: Vec<Tensor> =
            inputs([2, 90, 2, 2, 8, 8], 4).iter().map(|x| x.detach().to_kind(kind)).collect();
        let part = |start, length| x[..5].iter().map(|x| x.narrow(1, start, length)).collect::<Vec<_>>();
        let (whole, end) = gated_delta_rule(&of(&x), None, Some(&x[5])).unwrap();
        let (first, mut state) = gated_delta_rule(&of(&part(0, 70)), None, Some(&x[5])).unwrap();
        let mut outputs = vec![first];
        for t in 70..90 {
            let (o, next) = gated_delta_step(&of(&part(t, 1)), &state).unwrap();
            outputs.push(o);
            state = next;
        }
        let tolerance = if kind == Kind::Double { 1e-12 } else { 1e-5 };
        assert!(largest(&(Tensor::cat(&outputs, 1) - whole)) < tolerance);
        assert!(largest(&(state - end)) < tolerance);
    }
}

/// Low precision is rounded once; strong decays and long rows stay finite in fp32, with their gradients.
#[test]
fn low_precision_is_computed_in_fp32() {
    let wide = inputs([2, 300, 2, 1, 16, 16], 5);
    let _ = wide[3].detach().narrow(1, 100, 64).fill_(-20.0);
    for (kind, tolerance) in [(Kind::Float, 2e-5), (Kind::BFloat16, 1e-2), (Kind::Half, 2e-3)] {
        let x: Vec<Tensor> = wide
            .iter()
            .enumerate()
            .map(|(index, x)| x.detach().to_kind(if index < 3 { kind } else { Kind::Float }))
            .map(|x| x.set_requires_grad(true))
            .collect();
        let same: Vec<Tensor> =
            x.iter().map(|x| x.detach().to_kind(Kind::Double).set_requires_grad(true)).collect();
        let found = gated_delta_rule(&of(&x), None, None).unwrap();
        assert_eq!((found.0.kind(), found.1.kind()), (kind, Kind::Float));
        let expected = by_tokens(&same, None, false);
        let found = with_gradients(&x, (found.0.to_kind(Kind::Double), found.1.to_kind(Kind::Double)), false);
        let expected = with_gradients(&same, expected, false);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = largest(&(found - expected)) / largest(expected).max(1.0);
            assert!(error < tolerance, "{index} in {kind:?}: {error:e}");
        }
    }
}

#[test]
fn the_convolution_is_libtorchs() {
    for (kind, tolerance) in [(Kind::Double, 1e-13), (Kind::Float, 2e-6), (Kind::BFloat16, 2e-2)] {
        for (lengths, window) in [(vec![9], 4), (vec![2], 4), (vec![1, 4, 2, 6], 4), (vec![3, 5], 1)] {
            tch::manual_seed(3);
            let t: i64 = lengths.iter().sum();
            let leaf = |shape: &[i64]| Tensor::randn(shape, F64).to_kind(kind).set_requires_grad(true);
            let (x, weight) = (leaf(&[2, t, 5]), leaf(&[5, 1, window]));
            let ids = ids(&[&lengths, &lengths]);
            let ids = ids.filter(|_| lengths.len() > 1);
            let found = causal_conv(&x, &weight, ids.as_ref(), None).unwrap();
            let [wide_x, wide_weight] =
                [&x, &weight].map(|x| x.detach().to_kind(Kind::Double).set_requires_grad(true));
            let parts = wide_x.split_with_sizes(&lengths, 1).into_iter().map(|part| {
                let length = part.size()[1];
                let bias: Option<Tensor> = None;
                let sums = part.transpose(1, 2).conv1d(&wide_weight, bias, [1], [window - 1], [1], 5);
                sums.narrow(2, 0, length).silu().transpose(1, 2)
            });
            let expected = Tensor::cat(&parts.collect::<Vec<_>>(), 1);
            assert_eq!(found.kind(), kind);
            let with_gradients = |y: &Tensor, x: &Tensor, weight: &Tensor| {
                let loss = (y.to_kind(Kind::Double) * Tensor::arange(y.numel() as i64, F64).sin().view_as(y))
                    .sum(Kind::Double);
                let gradients = autograd::grad(&[&loss], &[None], &[x, weight], Keep::default()).unwrap();
                [y.detach()].into_iter().chain(gradients.into_iter().flatten()).collect::<Vec<_>>()
            };
            let found = with_gradients(&found, &x, &weight);
            let expected = with_gradients(&expected, &wide_x, &wide_weight);
            for (found, expected) in found.iter().zip(&expected) {
                let error = largest(&(found - expected)) / largest(expected).max(1.0);
                assert!(error < tolerance, "{kind:?} {lengths:?}: {error:e}");
            }
        }
    }
    // A row continues after the inputs before it.
    let (x, weight) = (Tensor::randn([1, 9, 3], F64), Tensor::randn([3, 4], F64));
    let whole = causal_conv(&x, &weight, None, None).unwrap();
    let rest = causal_conv(&x.narrow(1, 5, 4), &weight, None, Some(&x.narrow(1, 2, 3))).unwrap();
    assert!(largest(&(whole.narrow(1, 5, 4) - rest)) < 1e-14);
}

#[test]
fn shapes_are_refused_by_name() {
    let x = |shape: &[i64]| Tensor::zeros(shape, kind::FLOAT_CPU);
    let (q, v, g) = (x(&[1, 4, 2, 3]), x(&[1, 4, 3, 3]), x(&[1, 4, 3]));
    let words = |inputs: DeltaInputs<'_>| gated_delta_rule(&inputs, None, None).unwrap_err().to_string();
    assert_eq!(
        words(DeltaInputs { q: &q, k: &q, v: &v, g: &g, beta: &g }),
        "gated delta rule: `v` has shape [1, 4, 3, 3]; expected [1, 4, a multiple of 2, value], none of them 0"
    );
    let v = x(&[1, 4, 4, 3]);
    assert_eq!(
        words(DeltaInputs { q: &q, k: &q, v: &v, g: &g, beta: &g }),
        "gated delta rule: `g` has shape [1, 4, 3]; expected [1, 4, 4]"
    );
    let error = causal_conv(&x(&[1, 4, 2]), &x(&[3, 4]), None, None).unwrap_err().to_string();
    assert_eq!(
        error,
        "causal convolution: `weight` has shape [3, 4]; expected [2, window] or [2, 1, window]"
    );
}
