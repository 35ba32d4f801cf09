//! Rotary embedding: compared with the formula in f64, its derivatives, and invalid inputs.

use kernels::rope::RotaryTable;
use runtime::autograd::{self, GradMode, GradcheckConfig, Keep, gradcheck};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor, kind};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

fn table(head: i64, max_positions: i64) -> RotaryTable {
    RotaryTable::new(head, max_positions, 500_000.0, Device::Cpu).unwrap()
}

/// x·cos + rotate_half(x)·sin in f64, with angles computed here.
fn oracle(x: &Tensor, positions: &Tensor) -> Tensor {
    let head = x.size()[3];
    let exponent = Tensor::arange(head / 2, F64) * (-2.0 / head as f64);
    let angles = positions.to_kind(Kind::Double).unsqueeze(2) * (exponent * 500_000f64.ln()).exp();
    let angles = Tensor::cat(&[&angles, &angles], 2).unsqueeze(2);
    let x = x.to_kind(Kind::Double);
    let halves = x.chunk(2, 3);
    &x * angles.cos() + Tensor::cat(&[-&halves[1], halves[0].shallow_clone()], 3) * angles.sin()
}

fn positions(batch: i64, sequence: i64, count: i64) -> Tensor {
    let numbers = Tensor::arange(batch * sequence, kind::INT64_CPU);
    ((numbers * 37 + 5).remainder(count)).view([batch, sequence])
}

/// Every dtype, odd sizes, from partial blocks to several tasks; views of a joint projection, and transposed ones.
#[test]
fn rotations_match_the_formula_for_every_dtype_and_layout() {
    let mut generator = Generator::new(1).unwrap();
    // A position up to 700, whose fp32 cosine is within 2⁻²⁵: the table's error is the same for every dtype.
    for (kind, tolerance) in
        [(Kind::Float, 4e-7), (Kind::Double, 2e-7), (Kind::BFloat16, 6e-3), (Kind::Half, 8e-4)]
    {
        let shapes =
            [[1, 1, 1, 1, 2], [2, 5, 3, 1, 6], [1, 9, 4, 2, 34], [2, 70, 14, 2, 64], [3, 50, 3, 3, 100]];
        for [batch, sequence, heads, kv_heads, head] in shapes {
            let table = table(head, 700);
            let all = heads + 2 * kv_heads;
            let joint = generator.normal(&[batch, sequence, all * head], F64).unwrap().to_kind(kind);
            let parts =
                joint.view([batch, sequence, all, head]).split_with_sizes([heads, kv_heads, kv_heads], 2);
            let transposed = |x: &Tensor| x.transpose(1, 2).contiguous().transpose(1, 2);
            let layouts: [(&str, [Tensor; 2]); 3] = [
                ("joint", [parts[0].shallow_clone(), parts[1].shallow_clone()]),
                ("dense", [parts[0].contiguous(), parts[1].contiguous()]),
                ("heads first", [transposed(&parts[0]), transposed(&parts[1])]),
            ];
            let given = positions(batch, sequence, 700);
            let counted = Tensor::arange(sequence, kind::INT64_CPU).expand([batch, sequence], false);
            for (layout, [q, k]) in &layouts {
                for positions in [None, Some(&given)] {
                    let (rotated_q, rotated_k) = table.rotate(q, k, positions).unwrap();
                    for (from, found) in [(q, rotated_q), (k, rotated_k)] {
                        let expected = oracle(from, positions.unwrap_or(&counted));
                        assert_eq!((found.kind(), found.is_contiguous()), (kind, true));
                        let size = expected.abs().max().double_value(&[]);
                        let error =
                            (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[]) / size;
                        let given = positions.is_some();
                        assert!(
                            error <= tolerance,
                            "{kind:?} {layout} {:?} given {given}: {error:e}",
                            from.size()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn the_product_of_two_positions_depends_on_their_distance() {
    let mut generator = Generator::new(2).unwrap();
    let table = table(8, 64);
    let [q, k] = [(); 2].map(|()| generator.normal(&[1, 1, 1, 8], F64).unwrap());
    let product = |q_position: i64, k_position: i64| {
        let place = |p: i64| Tensor::from_slice(&[p]).view([1, 1]);
        let (rotated, _) = table.rotate(&q, &k, Some(&place(q_position))).unwrap();
        let (_, other) = table.rotate(&q, &k, Some(&place(k_position))).unwrap();
        (rotated * other).sum(Kind::Double).double_value(&[])
    };
    let (near, far) = (product(3, 1), product(3, 20));
    assert!((near - product(60, 58)).abs() < 1e-5, "{near}");
    assert!((near - far).abs() > 1e-3, "{near} {far}");
}

#[test]
fn derivatives_match_central_differences() {
    let mut generator = Generator::new(4).unwrap();
    let table = table(6, 20);
    let mut leaf = |shape: &[i64]| generator.normal(shape, F64).unwrap().set_requires_grad(true);
    let (q, k) = (leaf(&[2, 3, 2, 6]), leaf(&[2, 3, 1, 6]));
    let joint = leaf(&[1, 4, 18]);
    for positions in [None, Some(&positions(2, 3, 20))] {
        let rotate = |x: &[Tensor]| {
            let (q, k) = table.rotate(&x[0], &x[1], positions)?;
            Ok(vec![q, k])
        };
        let report = gradcheck(rotate, &[&q, &k], GradcheckConfig::default()).unwrap();
        assert!(report.percent_of_tolerance <= 100.0, "{report}");
        // The derivative's own derivative: the square makes the first one depend on the input.
        let slope = |x: &[Tensor]| {
            // Central differences are taken without a graph; the first derivative needs one all the same.
            let _recorded = GradMode::on();
            let leaf = |x: &Tensor| {
                if x.requires_grad() { x.shallow_clone() } else { x.detach().set_requires_grad(true) }
            };
            let x = [leaf(&x[0]), leaf(&x[1])];
            let (q, k) = table.rotate(&x[0], &x[1], positions)?;
            let sum = q.f_square()?.f_mul(&q)?.f_sum(Kind::Double)? + k.f_square()?.f_sum(Kind::Double)?;
            let keep = Keep { graph: true, derivative: true };
            let slopes = autograd::grad(&[&sum], &[None], &[&x[0], &x[1]], keep)?;
            Ok(slopes.into_iter().flatten().collect())
        };
        let report = gradcheck(slope, &[&q, &k], GradcheckConfig::default()).unwrap();
        assert!(report.percent_of_tolerance <= 100.0, "{report}");
    }
    let from_joint = |x: &[Tensor]| {
        let parts = x[0].f_view([1, 4, 3, 6])?.f_split_with_sizes([2, 1], 2)?;
        let (q, k) = table.rotate(&parts[0], &parts[1], None)?;
        Ok(vec![q, k])
    };
    let report = gradcheck(from_joint, &[&joint], GradcheckConfig::default()).unwrap();
    assert!(report.percent_of_tolerance <= 100.0, "{report}");
}

/// An expanded gradient has many elements at one address; a frozen query has none; a given gradient belongs to the caller.
#[test]
fn gradients_of_every_layout_are_rotated_back() {
    let mut generator = Generator::new(5).unwrap();
    let table = table(4, 9);
    let mut random = |heads: i64| generator.normal(&[2, 5, heads, 4], F64).unwrap();
    let (q, k, upstream) = (random(3), random(1).set_requires_grad(true), random(1));
    let counted = Tensor::arange(5, kind::INT64_CPU).expand([2, 5], false);
    let back = |grad: &Tensor| oracle(grad, &-&counted);
    let close = |a: &Tensor, b: &Tensor| assert!((a - b).abs().max().double_value(&[]) < 1e-6);

    // A result of q alone has no gradient for k.
    let (rotated_q, _) = table.rotate(&q, &k, None).unwrap();
    let found = autograd::grad(&[&rotated_q.sum(Kind::Double)], &[None], &[&k], Keep::default()).unwrap();
    assert!(found[0].is_none());

    let (_, rotated_k) = table.rotate(&q, &k, None).unwrap();
    let kept = upstream.copy();
    let found = autograd::grad(&[&rotated_k], &[Some(&upstream)], &[&k], Keep::default()).unwrap();
    close(found[0].as_ref().unwrap(), &back(&kept));
    assert_eq!(upstream, kept, "the caller's gradient is not written");

    let (_, rotated_k) = table.rotate(&q, &k, None).unwrap();
    let found = autograd::grad(&[&rotated_k.sum(Kind::Double)], &[None], &[&k], Keep::default()).unwrap();
    close(found[0].as_ref().unwrap(), &back(&kept.ones_like()));

    // As attention returns it: heads before the sequence.
    let (_, rotated_k) = table.rotate(&q, &k, None).unwrap();
    let heads_first = rotated_k.transpose(1, 2) * upstream.transpose(1, 2).contiguous();
    let found = autograd::grad(&[&heads_first.sum(Kind::Double)], &[None], &[&k], Keep::default()).unwrap();
    close(found[0].as_ref().unwrap(), &back(&kept));
}

/// Heads side by side in a row, as a projection returns them.
#[test]
fn rows_rotate_as_heads() {
    let mut generator = Generator::new(6).unwrap();
    let table = table(4, 9);
    let mut random = |heads: i64| generator.normal(&[2, 5, heads, 4], F64).unwrap();
    let (q, k, upstream) = (random(3), random(2), random(3));
    let run = |q: &Tensor, k: &Tensor, upstream: &Tensor| {
        let q = q.detach().set_requires_grad(true);
        let (rotated, rotated_k) = table.rotate(&q, k, None).unwrap();
        let found = autograd::grad(&[&rotated], &[Some(upstream)], &[&q], Keep::default()).unwrap();
        [Some(rotated.detach()), Some(rotated_k), found.into_iter().next().flatten()].map(Option::unwrap)
    };
    let rows = |x: &Tensor| x.view([2, 5, -1]);
    let expected = run(&q, &k, &upstream);
    let found = run(&rows(&q), &rows(&k), &rows(&upstream));
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(*found, rows(expected));
    }
}

#[test]
fn changing_positions_before_backward_is_an_error() {
    let table = table(4, 9);
    let x = Tensor::ones([1, 2, 1, 4], F64).set_requires_grad(true);
    let mut positions = Tensor::from_slice(&[1i64, 2]).view([1, 2]);
    let (q, _) = table.rotate(&x, &x, Some(&positions)).unwrap();
    let _ = positions.f_add_scalar_(1).unwrap();
    let error = autograd::backward(&[&q.sum(Kind::Double)]).unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

#[test]
fn mismatched_inputs_are_refused() {
    let table = table(4, 9);
    let x = |shape: &[i64]| Tensor::ones(shape, kind::FLOAT_CPU);
    let good = x(&[1, 2, 1, 4]);
    let words = |q: &Tensor, k: &Tensor, positions: Option<&Tensor>| {
        table.rotate(q, k, positions).unwrap_err().to_string()
    };
    let at = |positions: &[i64]| Tensor::from_slice(positions).view([1, -1]);
    let cases = [
        (words(&x(&[2, 1, 6]), &good, None), "`q` has shape [2, 1, 6]; expected [b, t, heads, 4]"),
        (words(&good, &x(&[1, 2, 1, 6]), None), "`k` has shape [1, 2, 1, 6]; expected [1, 2, heads, 4]"),
        (words(&good, &x(&[1, 3, 1, 4]), None), "`k` has shape [1, 3, 1, 4]; expected [1, 2, heads, 4]"),
        (
            words(&good, &good.to_kind(Kind::Half), None),
            "`k` is Half on Cpu; expected Float, Double, BFloat16 or Half, the same for q and k, on Cpu where the table is",
        ),
        (
            words(&good, &good, Some(&at(&[1, 2, 3]))),
            "positions are Int64 [1, 3] on Cpu; expected Int64 [1, 2] on Cpu",
        ),
        (
            words(&good, &good, Some(&at(&[0, 9]))),
            "position 9 is outside the table's 9 positions (0 to 8); cut the rows, or make the table longer",
        ),
        (
            words(&good, &good, Some(&at(&[-1, 0]))),
            "position -1 is outside the table's 9 positions (0 to 8); cut the rows, or make the table longer",
        ),
        (
            words(&x(&[1, 10, 1, 4]), &x(&[1, 10, 1, 4]), None),
            "position 9 is outside the table's 9 positions (0 to 8); cut the rows, or make the table longer",
        ),
    ];
    for (found, expected) in cases {
        assert_eq!(found, format!("rotary embedding: {expected}"));
    }
    let empty = x(&[1, 0, 1, 4]);
    let (q, _) = table.rotate(&empty, &empty, None).unwrap();
    assert_eq!(q.size(), [1, 0, 1, 4]);
}

/// A long table is computed as far as it is used, and a part of it has the bits of the whole.
#[test]
fn a_table_grows_as_positions_are_used() {
    let count = 40_000;
    let whole: Tensor = table(8, count).values(count).unwrap();
    assert_eq!(whole.size(), [count, 2, 4]);
    let q = Tensor::arange(3 * 2 * 8, (Kind::Float, Device::Cpu)).view([1, 3, 2, 8]);
    for top in [8191i64, 8192, 20_000, count - 1] {
        let growing = table(8, count);
        let layer = growing.clone();
        assert_eq!(growing.values(1).unwrap().size()[0], 8192);
        let positions = Tensor::from_slice(&[7, top, 0]).view([1, 3]);
        let (rotated, _) = growing.rotate(&q, &q, Some(&positions)).unwrap();
        let rows = layer.values(1).unwrap();
        assert!(rows.size()[0] > top, "the clones share the rows");
        assert_eq!(rows, whole.narrow(0, 0, rows.size()[0]));
        let full = table(8, count);
        assert_eq!(full.values(count).unwrap(), whole);
        assert_eq!(full.rotate(&q, &q, Some(&positions)).unwrap().0, rotated);
    }
    let long = Tensor::ones([1, 9000, 1, 8], (Kind::Float, Device::Cpu));
    let growing = table(8, count);
    let _ = growing.rotate(&long, &long, None).unwrap();
    assert_eq!(growing.values(1).unwrap().size()[0], 16_384);
    for (position, sequence) in [(count, 3), (-1, 3)] {
        let positions = Tensor::from_slice(&[0, position, 1]).view([1, sequence]);
        let error = growing.rotate(&q, &q, Some(&positions)).unwrap_err().to_string();
        let expected = format!("position {position} is outside the table's 40000 positions (0 to 39999)");
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn a_table_beyond_memory_is_an_error() {
    // 10¹⁸ positions on the CPU start with the first ones; computing all of them at once is an error.
    let table = table(64, 1_000_000_000_000_000_000);
    let error = table.values(1_000_000_000_000_000_000).unwrap_err().to_string();
    assert!(error.contains("positions for heads of 64 has 4 · "), "{error}");
    assert!(error.ends_with("more memory than there is; make the model with fewer positions"), "{error}");
}
