//! The counter compared with formulas. Each test counts its own thread only.

use runtime::profile::{Counter, Counts, Flops, recompute, record_external};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn count(work: impl FnOnce()) -> Counts {
    let counter = Counter::on_this_thread().unwrap();
    work();
    counter.finish().unwrap()
}

/// Dense FLOPs of work in which every operator is known.
fn dense(work: impl FnOnce()) -> u64 {
    let counts = count(work);
    assert_eq!(counts.unknown, [] as [String; 0], "{counts}");
    counts.total.flops.dense
}

fn randn(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, F32)
}

fn leaf(shape: &[i64]) -> Tensor {
    randn(shape).set_requires_grad(true)
}

fn sdpa([q, k, v]: [&Tensor; 3], dropout: f64, causal: bool) -> Tensor {
    Tensor::scaled_dot_product_attention(q, k, v, None::<&Tensor>, dropout, causal, None, false)
}

#[test]
fn flops_of_products_match_their_formulas() {
    let (m, k, n, b) = (5, 7, 11, 3);
    let (x, w, bias) = (randn(&[m, k]), randn(&[k, n]), randn(&[n]));
    let (xs, ws) = (randn(&[b, m, k]), randn(&[b, k, n]));
    let (row, column) = (randn(&[k]), randn(&[m]));
    let product = (2 * m * k * n) as u64;
    let batch = b as u64;
    type Work<'a> = Box<dyn Fn() -> Tensor + 'a>;
    let cases: [(&str, u64, Work<'_>); 17] = [
        ("mm", product, Box::new(|| x.mm(&w))),
        ("mm out=", product, Box::new(|| x.mm_out(&Tensor::empty([m, n], F32), &w))),
        ("addmm", product, Box::new(|| bias.addmm(&x, &w))),
        ("addmm_", product, Box::new(|| Tensor::zeros([m, n], F32).addmm_(&x, &w))),
        ("bmm", batch * product, Box::new(|| xs.bmm(&ws))),
        ("baddbmm", batch * product, Box::new(|| bias.baddbmm(&xs, &ws, 1, 1))),
        ("addbmm", batch * product, Box::new(|| bias.addbmm(&xs, &ws))),
        ("mv", (2 * m * k) as u64, Box::new(|| x.mv(&row))),
        ("addmv", (2 * m * k) as u64, Box::new(|| column.addmv(&x, &row))),
        ("dot", (2 * k) as u64, Box::new(|| row.dot(&row))),
        ("linear with a bias", product, Box::new(|| x.linear(&w.tr(), Some(&bias)))),
        ("linear over a batch", batch * product, Box::new(|| xs.linear(&w.tr(), None::<&Tensor>))),
        ("matmul that broadcasts", batch * product, Box::new(|| x.matmul(&ws))),
        ("matmul with a vector", batch * (2 * m * k) as u64, Box::new(|| xs.matmul(&row))),
        (
            "einsum",
            batch * product,
            Box::new(|| Tensor::einsum("bmk,bkn->bnm", &[&xs, &ws], None::<Vec<i64>>)),
        ),
        ("an empty operand", 0, Box::new(|| x.narrow(0, 0, 0).mm(&w))),
        (
            "what contracts nothing",
            0,
            Box::new(|| (&x * 2.0 + 1.0).silu().softmax(-1, Kind::Float).sum(Kind::Float).sqrt()),
        ),
    ];
    for (name, expected, work) in cases {
        assert_eq!(dense(|| drop(work())), expected, "{name}");
    }
}

#[test]
fn linear_backward_is_one_product_for_each_gradient() {
    let (t, d, f) = (6, 4, 10);
    let product = (2 * t * d * f) as u64;
    for (x_grad, w_grad) in [(true, true), (true, false), (false, true)] {
        let x = randn(&[2, t / 2, d]).set_requires_grad(x_grad);
        let w = randn(&[f, d]).set_requires_grad(w_grad);
        let flops = dense(|| x.linear(&w, None::<&Tensor>).square().sum(Kind::Float).backward());
        assert_eq!(flops, product * (1 + u64::from(x_grad) + u64::from(w_grad)));
    }
}

#[test]
fn flops_of_convolutions_count_taps() {
    let (n, c_in, c_out, size, taps) = (2u64, 4u64, 6u64, 9u64, 3u64);
    let x = leaf(&[2, 4, 9, 9]);
    for (stride, padding, dilation, groups) in [(1, 0, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1)] {
        let w = leaf(&[6, 4 / groups, 3, 3]);
        let side = (size + 2 * padding as u64 - dilation as u64 * (taps - 1) - 1) / stride as u64 + 1;
        let expected = 2 * n * c_out * side * side * (c_in / groups as u64) * taps * taps;
        let forward = || x.conv2d(&w, None::<&Tensor>, stride, padding, dilation, groups);
        assert_eq!(dense(|| drop(forward())), expected);
        let y = forward();
        assert_eq!(dense(|| y.sum(Kind::Float).backward()), 2 * expected);
    }
    let w = leaf(&[4, 6, 3, 3]);
    let y = x.conv_transpose2d(&w, None::<&Tensor>, 1, 0, 0, 1, 1);
    let expected = 2 * n * c_in * size * size * c_out * taps * taps;
    assert_eq!(dense(|| drop(x.conv_transpose2d(&w, None::<&Tensor>, 1, 0, 0, 1, 1))), expected);
    assert_eq!(dense(|| y.sum(Kind::Float).backward()), 2 * expected);
    let sequence = randn(&[2, 4, 20]);
    let w = randn(&[6, 4, 5]);
    assert_eq!(dense(|| drop(sequence.conv1d(&w, None::<&Tensor>, 1, 0, 1, 1))), 2 * 2 * 6 * 16 * 4 * 5);
}

#[test]
fn flops_of_attention_count_once_in_both_conventions() {
    let (b, h, t, d) = (2u64, 3u64, 8u64, 4u64);
    let make = || leaf(&[2, 3, 8, 4]);
    let (pairs, kept) = (t * t, t * (t + 1) / 2);
    for causal in [false, true] {
        let (q, k, v) = (make(), make(), make());
        let mut output = None;
        let forward = count(|| {
            output = Some(sdpa([&q, &k, &v], 0.0, causal));
        });
        let backward = count(|| output.unwrap().sum(Kind::Float).backward());
        let flops = |per_pair: u64| Flops {
            dense: b * h * pairs * per_pair,
            causal: b * h * if causal { kept } else { pairs } * per_pair,
        };
        assert_eq!(forward.total.flops, flops(4 * d), "{forward}");
        assert_eq!(backward.total.flops, flops(10 * d), "{backward}");
        assert_eq!(forward.op("aten::_scaled_dot_product_flash_attention_for_cpu").calls, 1);
        assert!(forward.unknown.is_empty() && backward.unknown.is_empty());
    }
    // Dropout uses the decomposed path, whose products are counted, once.
    let (q, k, v) = (make(), make(), make());
    let math = count(|| drop(sdpa([&q, &k, &v], 0.1, true)));
    assert_eq!(math.total.flops, Flops::from(b * h * pairs * 4 * d), "{math}");
    assert_eq!(math.unknown, [] as [String; 0]);
    // More keys than queries: the queries are at the first positions.
    let counts = count(|| {
        let k = randn(&[2, 3, 20, 4]);
        drop(sdpa([&randn(&[2, 3, 8, 4]), &k, &k], 0.0, true));
    });
    assert_eq!(counts.total.flops, Flops { dense: b * h * 8 * 20 * 4 * d, causal: b * h * kept * 4 * d });
}

#[test]
fn flops_of_an_attention_block_are_the_sum_of_its_parts() {
    let (b, t, d, h) = (2, 16, 32, 4);
    let x = leaf(&[b, t, d]);
    let (w_qkv, w_out) = (leaf(&[3 * d, d]), leaf(&[d, d]));
    let block = || {
        let qkv = x.linear(&w_qkv, None::<&Tensor>).view([b, t, 3, h, d / h]).permute([2, 0, 3, 1, 4]);
        sdpa([&qkv.get(0), &qkv.get(1), &qkv.get(2)], 0.0, true)
            .transpose(1, 2)
            .reshape([b, t, d])
            .linear(&w_out, None::<&Tensor>)
    };
    let projections = (2 * b * t * 4 * d * d) as u64;
    let scores = (2 * b * t * t * d) as u64;
    assert_eq!(dense(|| drop(block())), projections + 2 * scores);
    let y = block();
    assert_eq!(dense(|| y.sum(Kind::Float).backward()), 2 * projections + 5 * scores);
}

#[test]
fn counted_bytes_are_those_of_operands_and_results() {
    let (x, w) = (randn(&[5, 7]), randn(&[7, 11]));
    let bytes = |work: &dyn Fn() -> Tensor| count(|| drop(work())).total.bytes;
    assert_eq!(bytes(&|| x.mm(&w)), 4 * (35 + 77 + 55));
    assert_eq!(bytes(&|| &x + &x), 4 * 3 * 35);
    assert_eq!(bytes(&|| x.view([7, 5]).tr().unsqueeze(0)), 0, "views move nothing");
    assert_eq!(bytes(&|| Tensor::empty([100], F32)), 0);
    assert_eq!(
        bytes(&|| x.narrow(0, 0, 1).expand([9, 7], false).exp()),
        4 * (7 + 63),
        "an expanded operand counts once"
    );
    assert_eq!(bytes(&|| x.shallow_clone().exp_()), 4 * 2 * 35, "in place: read and written");
    assert_eq!(bytes(&|| randn(&[3, 4]).zero_()), 4 * (12 + 12), "made once, overwritten once");
    let table = randn(&[1000, 4]);
    let rows = Tensor::from_slice(&[1i64, 5]);
    assert_eq!(
        bytes(&|| table.index_select(0, &rows)),
        2 * 8 + 2 * 4 * 2 * 4,
        "a gather reads what it gives"
    );
    let counts = count(|| drop(x.mm(&w) + 1.0));
    assert_eq!(counts.by_op.iter().map(|op| op.name.as_str()).collect::<Vec<_>>(), ["aten::mm", "aten::add"]);
}

#[test]
fn recomputed_work_is_counted_separately() {
    let (x, w) = (randn(&[4, 8]), randn(&[8, 2]));
    let counts = count(|| {
        let _ = x.mm(&w);
        {
            let _outer = recompute();
            let _inner = recompute();
            let _ = x.mm(&w);
            drop(_inner);
            let _ = x.mm(&w);
        }
        let _ = x.mm(&w);
    });
    assert_eq!(counts.total.flops.dense, 4 * 128);
    assert_eq!(counts.recomputed.flops.dense, 2 * 128);
    assert_eq!(counts.recomputed.calls, 2);
    assert_eq!(counts.by_op[0].recomputed, counts.recomputed);
}

#[test]
fn an_operator_without_a_formula_is_reported() {
    let x = randn(&[4, 4]);
    let counts = count(|| drop((x.fft_rfft(None, -1, "backward"), x.mm(&x))));
    assert_eq!(counts.unknown, ["aten::_fft_r2c"]);
    assert_eq!(counts.total.flops.dense, 128);
    let text = counts.to_string();
    assert!(
        text.ends_with("warning: the FLOPs of these operators are not known: aten::_fft_r2c\n"),
        "{text}"
    );
    assert!(text.starts_with("operator"), "{text}");
    // Sparse operands: the dense formula would be wrong.
    let counts = count(|| drop(x.to_sparse(None, None::<i64>, None).mm(&x)));
    assert!(counts.unknown.iter().any(|name| name.contains("mm")), "{counts}");
}

#[test]
fn external_work_is_counted() {
    record_external("nobody counts", Flops::from(1), 1).unwrap();
    let counts = count(|| {
        let _again = recompute();
        record_external("kernel", Flops { dense: 10, causal: 6 }, 3).unwrap();
        record_external("kernel", Flops::from(1), 0).unwrap();
    });
    assert_eq!(counts.total, counts.recomputed);
    assert_eq!(counts.op("kernel").flops, Flops { dense: 11, causal: 7 });
    assert_eq!((counts.op("kernel").calls, counts.op("kernel").bytes), (2, 3));
    assert_eq!(counts.op("another").calls, 0);
}

#[test]
fn counters_may_overlap_in_any_order() {
    let x = randn(&[2, 2]);
    let first = Counter::on_this_thread().unwrap();
    let _ = x.mm(&x);
    let second = Counter::on_this_thread().unwrap();
    let _ = x.mm(&x);
    assert_eq!(first.counts().unwrap().total.calls, 2);
    assert_eq!(first.finish().unwrap().total.flops.dense, 32);
    let _ = x.mm(&x);
    assert_eq!(second.finish().unwrap().total.flops.dense, 32);
    drop(Counter::on_this_thread().unwrap());
    assert_eq!(count(|| ()), Counts::default());
}

#[test]
fn a_failing_operator_does_not_break_the_counter() {
    let x = randn(&[2, 3]);
    let counts = count(|| {
        assert!(x.f_matmul(&x).is_err());
        let _ = x.mm(&x.tr());
    });
    assert_eq!(counts.op("aten::mm").flops.dense, 24, "what failed is no work: {counts}");
}
