//! Causal attention within the documents of rows: the bits of each document alone.

use kernels::attention::{CausalOptions, causal_attention, causal_attention_of_rows};
use runtime::autograd::{GradcheckConfig, Keep, grad, gradcheck};
use runtime::profile::Counter;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use crate::causal_attention::THREADS;

/// Documents of 1, 63, 64, 65 and 107 positions, and an empty one, in a row of 300; one of 300 in the next; two in the last.
const STARTS: [i32; 9] = [0, 1, 64, 128, 128, 193, 300, 600, 900 - 40];
const ROWS: i64 = 3;
const LENGTH: i64 = 300;

fn starts() -> Vec<i32> {
    STARTS.into_iter().chain([900]).collect()
}

/// q, k, v and the upstream gradient, `[rows, length, heads·head]`.
fn inputs(heads: [i64; 2], head: i64, kind: Kind) -> [Tensor; 4] {
    let mut generator = Generator::new(4).unwrap();
    [heads[0], heads[1], heads[1], heads[0]].map(|heads| {
        let x = generator.normal(&[ROWS, LENGTH, heads * head], (Kind::Double, Device::Cpu)).unwrap();
        x.to_kind(kind)
    })
}

/// The output, the gradients of q, k and v, and that of the sinks, if there are any.
fn run(
    [q, k, v, upstream]: &[Tensor; 4],
    head: i64,
    of_rows: bool,
    options: CausalOptions<'_>,
) -> Vec<Tensor> {
    let [q, k, v] = [q, k, v].map(|x| x.detach().set_requires_grad(true));
    let sinks = options.sinks.map(|sinks| sinks.detach().set_requires_grad(true));
    let options = CausalOptions { sinks: sinks.as_ref(), ..options };
    let o = if of_rows {
        causal_attention_of_rows(&q, &k, &v, head, options).unwrap()
    } else {
        let heads = |x: &Tensor| {
            let (rows, length, width) = x.size3().unwrap();
            x.view([rows, length, width / head, head]).transpose(1, 2)
        };
        let o = causal_attention(&heads(&q), &heads(&k), &heads(&v), options).unwrap();
        o.transpose(1, 2).reshape(q.size())
    };
    let inputs: Vec<&Tensor> = [&q, &k, &v].into_iter().chain(&sinks).collect();
    let gradients = grad(&[&o], &[Some(upstream)], &inputs, Keep::default()).unwrap();
    std::iter::once(o.detach()).chain(gradients.into_iter().map(Option::unwrap)).collect()
}

/// The same by one call for each document, the gradients of sinks added.
fn one_by_one(all: &[Tensor; 4], head: i64, options: CausalOptions<'_>) -> Vec<Tensor> {
    let parts: Vec<Vec<Tensor>> = starts()
        .windows(2)
        .filter(|ends| ends[0] < ends[1])
        .map(|ends| {
            let (row, first) = (i64::from(ends[0]) / LENGTH, i64::from(ends[0]) % LENGTH);
            let count = i64::from(ends[1] - ends[0]);
            run(&all.each_ref().map(|x| x.narrow(0, row, 1).narrow(1, first, count)), head, true, options)
        })
        .collect();
    (0..parts[0].len())
        .map(|which| {
            let of_parts: Vec<&Tensor> = parts.iter().map(|part| &part[which]).collect();
            match which {
                4 => of_parts.into_iter().fold(Tensor::zeros_like(&parts[0][4]), |sum, part| sum + part),
                _ => Tensor::cat(&of_parts, 1).view([ROWS, LENGTH, -1]),
            }
        })
        .collect()
}

#[test]
fn documents_have_the_bits_of_each_alone() {
    let _turn = THREADS.lock().unwrap();
    let (documents, sinks) = (starts(), Tensor::from_slice(&[0.3f32, -1.0, 2.0, 0.0]));
    let plain = CausalOptions { documents: None, ..CausalOptions::default() };
    let all = [
        plain,
        CausalOptions { window: Some(40), ..plain },
        CausalOptions { window: Some(64), cap: Some(2.0), scale: Some(0.3), ..plain },
        CausalOptions { sinks: Some(&sinks), ..plain },
    ];
    let threads = tch::get_num_threads();
    for (kind, heads, head) in [
        (Kind::Float, [4, 2], 32),
        (Kind::Float, [4, 4], 20),
        (Kind::BFloat16, [4, 1], 16),
        (Kind::Double, [4, 2], 8),
    ] {
        let inputs = inputs(heads, head, kind);
        for options in all {
            let expected = one_by_one(&inputs, head, options);
            let options = CausalOptions { documents: Some(&documents), ..options };
            // Heads as units of backward, and blocks.
            for (of_rows, count) in [(true, 1), (false, 1), (true, 2), (true, 7), (false, 64)] {
                tch::set_num_threads(count);
                let found = run(&inputs, head, of_rows, options);
                tch::set_num_threads(threads);
                for (which, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let what =
                        format!("{kind:?} {heads:?} {options:?} rows: {of_rows}, {count} threads, {which}");
                    if which == 4 {
                        // A sum over documents in another order.
                        let error = (found - expected).abs().max().double_value(&[]);
                        assert!(error < 1e-4, "{what}: {error:e}");
                    } else {
                        assert!(found == expected, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn derivatives_within_documents_match_finite_differences() {
    let mut generator = Generator::new(9).unwrap();
    let inputs = [4, 2, 2].map(|heads| {
        let x = generator.normal(&[2, heads, 5, 3], (Kind::Double, Device::Cpu)).unwrap();
        x.set_requires_grad(true)
    });
    let options = CausalOptions { documents: Some(&[0, 2, 5, 6, 10]), ..CausalOptions::default() };
    let attend = |inputs: &[Tensor]| Ok(vec![causal_attention(&inputs[0], &inputs[1], &inputs[2], options)?]);
    gradcheck(attend, &inputs.each_ref(), GradcheckConfig::default()).unwrap();
}

#[test]
fn the_work_is_that_of_the_documents() {
    let [q, k, v, _] = inputs([4, 2], 8, Kind::Float);
    let count = |documents: Option<&[i32]>| {
        let counter = Counter::on_this_thread().unwrap();
        let options = CausalOptions { documents, ..CausalOptions::default() };
        drop(causal_attention_of_rows(&q, &k, &v, 8, options).unwrap());
        counter.finish().unwrap().total.flops
    };
    let pairs = |lengths: &[u64]| lengths.iter().map(|length| length * length).sum::<u64>();
    let (whole, divided) = (count(None), count(Some(&starts())));
    let [rows, documents] = [pairs(&[300; 3]), pairs(&[1, 63, 64, 65, 107, 300, 260, 40])];
    assert_eq!(divided.dense * rows, whole.dense * documents);
    assert_eq!(whole.dense, 2 * 2 * 4 * 8 * rows);
}

#[test]
fn documents_that_do_not_fit_the_rows_are_refused() {
    let x = Tensor::ones([2, 5, 8], (Kind::Float, Device::Cpu));
    let refused = |documents: &[i32]| {
        let options = CausalOptions { documents: Some(documents), ..CausalOptions::default() };
        causal_attention_of_rows(&x, &x, &x, 8, options).unwrap_err().to_string()
    };
    for documents in [&[][..], &[0], &[1, 10], &[0, 9], &[0, 11]] {
        assert!(
            refused(documents).contains("2 rows of 5 positions; expected starts from 0 to 10"),
            "{documents:?}"
        );
    }
    assert!(refused(&[0, 4, 7, 10]).contains("a document from 4 to 7 in rows of 5 positions"));
    assert!(refused(&[0, 5, 3, 10]).contains("a document from 5 to 3 in rows of 5 positions"));
    let empty = Tensor::ones([2, 0, 8], (Kind::Float, Device::Cpu));
    let options = CausalOptions { documents: Some(&[0, 0]), ..CausalOptions::default() };
    assert_eq!(causal_attention_of_rows(&empty, &empty, &empty, 8, options).unwrap().size(), [2, 0, 8]);
}
