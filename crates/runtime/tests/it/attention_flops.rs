//! FLOPs of attention against a loop over pairs of queries and keys, also for the operators that only CUDA runs.

use runtime::ops::Value;
use runtime::profile::{Flops, flops_of};
use tch::{Device, Kind, Tensor};

/// The keys that a query attends to: from `left` before to `right` after its position.
#[derive(Clone, Copy, Default)]
struct Mask {
    left: Option<i64>,
    right: Option<i64>,
    from_the_end: bool,
}

fn pairs(queries: i64, keys: i64, mask: Mask) -> u64 {
    let shift = if mask.from_the_end { keys - queries } else { 0 };
    let sees = |i: i64, j: i64| {
        mask.left.is_none_or(|left| j >= i + shift - left)
            && mask.right.is_none_or(|right| j <= i + shift + right)
    };
    (0..queries).map(|i| (0..keys).filter(|&j| sees(i, j)).count() as u64).sum()
}

fn zeros(shape: &[i64]) -> Value {
    Tensor::zeros(shape, (Kind::Float, Device::Cpu)).into()
}

fn starts(lengths: &[i64]) -> Value {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += *length as i32;
        Some(*end)
    });
    Tensor::from_slice(&std::iter::once(0).chain(ends).collect::<Vec<i32>>()).into()
}

const HEADS: i64 = 3;
const D: i64 = 8;
const FORWARD: u64 = 4 * D as u64;
const BACKWARD: u64 = 10 * D as u64;

#[test]
fn flops_of_packed_sequences_count_their_own_lengths() {
    let cases: [(&[i64], &[i64]); 4] =
        [(&[5, 1, 7], &[5, 1, 7]), (&[3, 4], &[9, 4]), (&[6, 2], &[2, 8]), (&[4], &[4])];
    let windows = [(None, None), (Some(2), Some(0)), (Some(1), Some(2)), (None, Some(1)), (Some(3), None)];
    for (queries, keys) in cases {
        let (tokens_q, tokens_k): (i64, i64) = (queries.iter().sum(), keys.iter().sum());
        let flops = |mask: Mask, per_pair: u64| {
            let sum = |mask| queries.iter().zip(keys).map(|(&q, &k)| pairs(q, k, mask)).sum::<u64>();
            Flops {
                dense: HEADS as u64 * per_pair * sum(Mask::default()),
                causal: HEADS as u64 * per_pair * sum(mask),
            }
        };
        for (causal, (left, right)) in
            [false, true].into_iter().flat_map(|causal| windows.map(|w| (causal, w)))
        {
            let right = if causal { Some(0) } else { right };
            let mask = Mask { left, right, from_the_end: true };
            let number = |bound: Option<i64>| Value::Int(bound.unwrap_or(-1));
            let (q, kv) = ([tokens_q, HEADS, D], [tokens_k, HEADS, D]);
            let window = || [("window_size_left", number(left)), ("window_size_right", number(right))];
            let forward = [
                zeros(&q),
                zeros(&kv),
                zeros(&kv),
                starts(queries),
                starts(keys),
                9.into(),
                9.into(),
                0.0.into(),
                causal.into(),
                false.into(),
            ];
            let counted = flops_of("aten::_flash_attention_forward", "", &forward, &window()).unwrap();
            assert_eq!(counted, Some(flops(mask, FORWARD)), "{queries:?} {keys:?} {left:?} {right:?}");
            let backward = [
                zeros(&q),
                zeros(&q),
                zeros(&kv),
                zeros(&kv),
                zeros(&q),
                zeros(&[1]),
                starts(queries),
                starts(keys),
                9.into(),
                9.into(),
                0.0.into(),
                causal.into(),
                zeros(&[1]),
                zeros(&[1]),
            ];
            let counted = flops_of("aten::_flash_attention_backward", "", &backward, &window()).unwrap();
            assert_eq!(counted, Some(flops(mask, BACKWARD)));
        }
        for (number, from_the_end) in [(0, false), (1, false), (2, true)] {
            let mask = Mask { left: None, right: (number != 0).then_some(0), from_the_end };
            let (q, kv) = ([1, tokens_q, HEADS, D], [1, tokens_k, HEADS, D]);
            let forward = [
                zeros(&q),
                zeros(&kv),
                zeros(&kv),
                Value::None,
                starts(queries),
                starts(keys),
                9.into(),
                9.into(),
                0.0.into(),
                number.into(),
            ];
            let counted = flops_of("aten::_efficient_attention_forward", "", &forward, &[]).unwrap();
            assert_eq!(counted, Some(flops(mask, FORWARD)));
            let backward = [
                zeros(&q),
                zeros(&q),
                zeros(&kv),
                zeros(&kv),
                Value::None,
                zeros(&q),
                starts(queries),
                starts(keys),
                9.into(),
                9.into(),
                zeros(&[1]),
                0.0.into(),
                zeros(&[1]),
                zeros(&[1]),
                number.into(),
                false.into(),
            ];
            let counted = flops_of("aten::_efficient_attention_backward", "", &backward, &[]).unwrap();
            assert_eq!(counted, Some(flops(mask, BACKWARD)));
        }
    }
}

#[test]
fn flops_of_every_fused_variant_are_counted() {
    let (b, t) = (2, 6);
    let x = || zeros(&[b, HEADS, t, D]);
    let n = || zeros(&[1]);
    let no = || Value::None;
    let mask = || Value::BoolList(vec![true; 4]);
    for causal in [false, true] {
        let c = || Value::Bool(causal);
        let dropout = || Value::Double(0.0);
        let cases: [(&str, Vec<Value>); 11] = [
            ("_scaled_dot_product_flash_attention_for_cpu", vec![x(), x(), x(), dropout(), c()]),
            (
                "_scaled_dot_product_flash_attention_for_cpu_backward",
                vec![x(), x(), x(), x(), x(), n(), dropout(), c()],
            ),
            ("_scaled_dot_product_flash_attention", vec![x(), x(), x(), dropout(), c()]),
            (
                "_scaled_dot_product_flash_attention_backward",
                vec![x(), x(), x(), x(), x(), n(), n(), n(), t.into(), t.into(), dropout(), c(), n(), n()],
            ),
            (
                "_scaled_dot_product_efficient_attention",
                vec![x(), x(), x(), no(), true.into(), dropout(), c()],
            ),
            (
                "_scaled_dot_product_efficient_attention_backward",
                vec![x(), x(), x(), x(), n(), x(), n(), n(), n(), dropout(), mask(), c()],
            ),
            ("_scaled_dot_product_cudnn_attention", vec![x(), x(), x(), no(), true.into(), dropout(), c()]),
            (
                "_scaled_dot_product_cudnn_attention_backward",
                vec![
                    x(),
                    x(),
                    x(),
                    x(),
                    x(),
                    n(),
                    n(),
                    n(),
                    n(),
                    n(),
                    n(),
                    t.into(),
                    t.into(),
                    dropout(),
                    c(),
                ],
            ),
            (
                "_cudnn_attention_forward",
                vec![x(), x(), x(), no(), no(), no(), t.into(), t.into(), true.into(), dropout(), c()],
            ),
            ("_scaled_dot_product_fused_attention_overrideable", vec![x(), x(), x(), no(), dropout(), c()]),
            (
                "_scaled_dot_product_fused_attention_overrideable_backward",
                vec![
                    x(),
                    x(),
                    x(),
                    x(),
                    n(),
                    mask(),
                    x(),
                    n(),
                    n(),
                    n(),
                    t.into(),
                    t.into(),
                    dropout(),
                    c(),
                    n(),
                    n(),
                ],
            ),
        ];
        for (name, arguments) in cases {
            let per_pair = if name.ends_with("backward") { BACKWARD } else { FORWARD };
            let kept = if causal { t * (t + 1) / 2 } else { t * t };
            let each = (b * HEADS) as u64 * per_pair;
            let expected = Flops { dense: each * (t * t) as u64, causal: each * kept as u64 };
            let counted = flops_of(&format!("aten::{name}"), "", &arguments, &[]).unwrap();
            assert_eq!(counted, Some(expected), "{name}");
        }
    }
}

#[test]
fn flops_without_a_formula_are_unknown() {
    assert_eq!(flops_of("aten::relu", "", &[zeros(&[1])], &[]).unwrap(), None);
    let error = flops_of("aten::mm", "", &[zeros(&[1])], &[]).unwrap_err().to_string();
    assert!(
        error.starts_with("profile::flops_of: aten::mm() is missing value for argument 'mat2'"),
        "{error}"
    );
}
