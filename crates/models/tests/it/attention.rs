//! Attention: three implementations with equal results, and the separation of documents.

use std::collections::BTreeSet;

use models::attention::{AttentionPath, Documents, causal_attention};
use proptest::prelude::*;
use runtime::ops::Value;
use runtime::profile::Counter;
use tch::{Device, IndexOp, Kind, Tensor};

const PATHS: [AttentionPath; 3] = [AttentionPath::Explicit, AttentionPath::DenseMask, AttentionPath::Fused];

fn documents(rows: &[&[usize]]) -> Documents {
    Documents::new(rows, Device::Cpu).unwrap()
}

fn random(shape: [i64; 4]) -> Tensor {
    Tensor::randn(shape, (Kind::Double, Device::Cpu)).set_requires_grad(true)
}

fn gradients(output: &Tensor, inputs: &[&Tensor]) -> Vec<Tensor> {
    // An upstream gradient that differs from position to position.
    let weights = Tensor::arange(output.numel() as i64, (Kind::Double, Device::Cpu)).sin().view_as(output);
    let loss = (output * weights).sum(Kind::Double);
    let found = runtime::autograd::grad(&[&loss], &[None], inputs, Default::default()).unwrap();
    found.into_iter().map(Option::unwrap).collect()
}

fn distance(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

#[test]
fn the_paths_agree_on_outputs_and_gradients() {
    let packed = || Some(documents(&[&[4, 3, 2], &[1, 8]]));
    let cases: [(&str, [i64; 4], i64, Option<Documents>); 7] = [
        ("one document", [2, 7, 3, 5], 3, None),
        ("one position", [1, 1, 1, 1], 1, None),
        ("packed", [2, 9, 2, 4], 2, packed()),
        ("packed, one document of no length", [1, 6, 2, 3], 2, Some(documents(&[&[2, 0, 4]]))),
        ("grouped queries", [2, 7, 6, 5], 2, None),
        ("one head of keys, packed", [2, 9, 4, 4], 1, packed()),
        ("grouped queries, packed", [2, 9, 6, 4], 3, packed()),
    ];
    for (name, shape, kv_heads, documents) in cases {
        let q = random(shape);
        let [k, v] = [(); 2].map(|()| random([shape[0], shape[1], kv_heads, shape[3]]));
        let run = |path| {
            let output = causal_attention(&q, &k, &v, documents.as_ref(), path, 0.0).unwrap();
            let gradients = gradients(&output, &[&q, &k, &v]);
            std::iter::once(output).chain(gradients).collect::<Vec<_>>()
        };
        let oracle = run(AttentionPath::Explicit);
        for path in &PATHS[1..] {
            for (found, expected) in run(*path).iter().zip(&oracle) {
                let distance = distance(found, expected);
                assert!(distance < 1e-12, "{name} {path:?}: {distance}");
            }
        }
    }
}

#[test]
fn a_token_sees_neither_the_future_nor_another_document() {
    let documents = documents(&[&[3, 4], &[7]]);
    let shape = [2, 7, 2, 4];
    for path in PATHS {
        for packed in [None, Some(&documents)] {
            let x = random(shape);
            let output = causal_attention(&x, &x, &x, packed, path, 0.0).unwrap();
            for row in 0..2 {
                for position in 0..7 {
                    let gradient = runtime::autograd::grad(
                        &[&output.i((row, position)).sum(Kind::Double)],
                        &[None],
                        &[&x],
                        runtime::autograd::Keep { graph: true, derivative: false },
                    );
                    let seen = gradient.unwrap().remove(0).unwrap().abs().sum_dim_intlist(
                        [2i64, 3].as_slice(),
                        false,
                        Kind::Double,
                    );
                    for other_row in 0..2 {
                        for other in 0..7 {
                            let same_document = packed.is_none() || row == 1 || (position < 3) == (other < 3);
                            let expected = row == other_row && other <= position && same_document;
                            let found = seen.double_value(&[other_row, other]) > 0.0;
                            assert_eq!(found, expected, "{path:?} {row},{position} sees {other_row},{other}");
                        }
                    }
                }
            }
        }
    }
}

/// Query head i reads the keys of head i / (heads / kv_heads), as Hugging Face's checkpoints have it.
#[test]
fn groups_consist_of_neighbouring_query_heads() {
    let (q, k, v) = (random([1, 5, 6, 4]), random([1, 5, 2, 4]), random([1, 5, 2, 4]));
    for path in PATHS {
        let grouped = causal_attention(&q, &k, &v, None, path, 0.0).unwrap().view([1, 5, 6, 4]);
        for head in 0..6 {
            let one = |x: &Tensor, head| x.narrow(2, head, 1);
            let (k, v) = (one(&k, head / 3), one(&v, head / 3));
            let alone = causal_attention(&one(&q, head), &k, &v, None, AttentionPath::Explicit, 0.0).unwrap();
            let distance = distance(&grouped.select(2, head), &alone);
            assert!(distance < 1e-12, "{path:?} {head}: {distance}");
        }
    }
}

/// The documented choice of libtorch on a CPU, by number (0 math, 1 flash).
#[test]
fn the_cpu_uses_flash_for_every_dtype_and_group_without_dropout() {
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        for kv_heads in [6, 2, 1] {
            for (dropout, expected) in [(0.0, 1), (0.1, 0)] {
                let [q, k, v] = [6, kv_heads, kv_heads].map(|heads| {
                    let x = Tensor::zeros([2, 9, heads, 8], (kind, Device::Cpu)).set_requires_grad(true);
                    x.transpose(1, 2)
                });
                let arguments: [Value; 6] =
                    [(&q).into(), (&k).into(), (&v).into(), Value::None, dropout.into(), true.into()];
                let named = [("enable_gqa", Value::Bool(kv_heads != 6))];
                let choice = runtime::ops::call("aten::_fused_sdp_choice", "", &arguments, &named).unwrap();
                let Value::Int(choice) = choice[0] else { panic!("{choice:?}") };
                assert_eq!(choice, expected, "{kind:?}, {kv_heads} heads of keys, dropout {dropout}");
            }
        }
    }
}

/// Grouped keys are not copied: only the kernel moves bytes, forward and backward.
#[test]
fn grouped_keys_are_not_copied() {
    let [q, k, v] = [4, 2, 2].map(|heads| random([2, 9, heads, 8]));
    let upstream = Tensor::ones([2, 9, 32], (Kind::Double, Device::Cpu));
    let counter = Counter::on_this_thread().unwrap();
    let output = causal_attention(&q, &k, &v, None, AttentionPath::Fused, 0.0).unwrap();
    let keep = runtime::autograd::Keep::default();
    let found = runtime::autograd::grad(&[&output], &[Some(&upstream)], &[&q, &k, &v], keep).unwrap();
    let counts = counter.finish().unwrap();
    assert_eq!(found[1].as_ref().unwrap().size(), k.size());
    let moved = counts.by_op.iter().filter(|op| op.total.bytes > 0).map(|op| op.name.as_str());
    let forward = "runtime::causal_attention";
    let expected = BTreeSet::from([forward.to_owned(), format!("{forward}_backward")]);
    assert_eq!(moved.map(str::to_owned).collect::<BTreeSet<_>>(), expected);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_pack_equals_its_documents_one_by_one(lengths in prop::collection::vec(1usize..9, 1..6), heads in 1i64..4) {
        let total = lengths.iter().sum::<usize>() as i64;
        let packed = documents(&[&lengths]);
        let [q, k, v] = [(); 3].map(|()| random([1, total, heads, 3]));
        let together = causal_attention(&q, &k, &v, Some(&packed), AttentionPath::Fused, 0.0).unwrap();
        let mut start = 0;
        for length in lengths.into_iter().map(|length| length as i64) {
            let part = |x: &Tensor| x.narrow(1, start, length);
            let alone = causal_attention(&part(&q), &part(&k), &part(&v), None, AttentionPath::Explicit, 0.0).unwrap();
            prop_assert!(distance(&alone, &together.narrow(1, start, length)) < 1e-12);
            start += length;
        }
    }
}

#[test]
fn mismatched_inputs_are_refused() {
    let x = random([2, 4, 1, 2]);
    let error = |documents: Option<&Documents>, dropout| {
        causal_attention(&x, &x, &x, documents, AttentionPath::Fused, dropout).unwrap_err().to_string()
    };
    assert_eq!(error(None, 1.0), "attention: dropout is 1; expected a probability in [0, 1)");
    assert_eq!(
        error(Some(&documents(&[&[2, 2]])), 0.0),
        "attention: `document ids` has shape [1, 4]; expected [2, 4], the shape of the rows"
    );
    let words = |q: [i64; 4], k: [i64; 4], v: [i64; 4]| {
        let [q, k, v] = [q, k, v].map(random);
        causal_attention(&q, &k, &v, None, AttentionPath::Fused, 0.0).unwrap_err().to_string()
    };
    let (q, k) = ([2, 4, 6, 2], [2, 4, 3, 2]);
    for (found, expected) in [
        (words(q, [2, 4, 4, 2], [2, 4, 4, 2]), "4 key heads do not divide 6 query heads"),
        (words(q, [2, 5, 3, 2], [2, 5, 3, 2]), "`k` has shape [2, 5, 3, 2]; expected [2, 4, heads, 2], as q"),
        (words(q, k, q), "`v` has shape [2, 4, 6, 2]; expected [2, 4, 3, 2], as k"),
    ] {
        assert_eq!(found, format!("attention: {expected}"));
    }
}

#[test]
fn inconsistent_documents_are_refused() {
    let make = |ids: &[i64], cu_seqlens: &[i32], starts: &[i32]| {
        let ids = Tensor::from_slice(ids).view([2, 4]);
        Documents::from_parts(ids, Tensor::from_slice(cu_seqlens), starts.to_vec())
    };
    let good = make(&[0, 0, 1, 1, 2, 2, 2, 2], &[0, 2, 4, 8], &[0, 2, 4, 8]).unwrap();
    let same = documents(&[&[2, 2], &[4]]);
    assert_eq!((good.ids(), good.cu_seqlens()), (same.ids(), same.cu_seqlens()));
    assert_eq!((good.starts(), good.longest()), (same.starts(), same.longest()));
    assert_eq!(good.longest(), 4);
    let crossing = [0, 0, 0, 0, 0, 0, 1, 1];
    let ends = "expected rising numbers from 0 to 8, the number of positions";
    type Case<'a> = (&'a [i64], &'a [i32], &'a [i32], String);
    let cases: [Case<'_>; 6] = [
        (
            &crossing,
            &[0, 6, 8],
            &[0, 6, 8],
            "packed documents: the document at positions 0 to 5 crosses the end of a row of 4; divide it, or end the row before it".into(),
        ),
        (&crossing, &[0, 4, 7], &[0, 4, 7], format!("packed documents: the documents start at [0, 4, 7]; {ends}")),
        (&crossing, &[0, 5, 4, 8], &[0, 5, 4, 8], format!("packed documents: the documents start at [0, 5, 4, 8]; {ends}")),
        (&crossing, &[0, 8], &[0, 4, 8], "packed documents: `cu_seqlens` has shape [2]; expected [3], one per start".into()),
        (
            &crossing,
            &[0, 4, 8],
            &[0, 4, 8],
            "packed documents: ids or cu_seqlens contradict the starts [0, 4, 8]".into(),
        ),
        (
            &[0, 0, 0, 0, 1, 1, 1, 1],
            &[0, 3, 8],
            &[0, 4, 8],
            "packed documents: ids or cu_seqlens contradict the starts [0, 4, 8]".into(),
        ),
    ];
    for (ids, cu_seqlens, starts, expected) in cases {
        assert_eq!(make(ids, cu_seqlens, starts).unwrap_err().to_string(), expected);
    }
    let kinds = Documents::from_parts(
        Tensor::zeros([2, 4], (Kind::Int, Device::Cpu)),
        Tensor::from_slice(&[0i32, 8]),
        vec![0, 8],
    );
    assert!(
        kinds
            .unwrap_err()
            .to_string()
            .contains("ids are Int on Cpu and cu_seqlens Int on Cpu; expected Int64 and Int")
    );
    let unequal: [&[usize]; 2] = [&[2, 2], &[3]];
    for rows in [&unequal[..], &[], &[&[]]] {
        let error = Documents::new(rows, Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("expected at least one row, all of the same length"), "{error}");
    }
}
