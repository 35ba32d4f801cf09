//! The CUDA kernels compared with the passes of the CPU in f64, on the same numbers. Prints that it is skipped without a GPU.

mod attention;
mod dropout;
mod gradients;
mod nf4;

use kernels::adam::{AdamStep, AdamTensors, adam, adam_many};
use kernels::cross_entropy::{
    Coefficients, Cpu, LogitsPass, Statistics, Targets, TileInputs, Transform, Wanted, pass_for,
};
use kernels::norm::{self, Norm, Options};
use kernels::rope::RotaryTable;
use kernels::swiglu;
use runtime::autograd::{self, Keep};
use runtime::ops::optimizer::AdamW;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

fn cuda() -> Option<Device> {
    if runtime::device::cuda_count().unwrap() == 0 {
        eprintln!("skipped: no CUDA device");
        return None;
    }
    Some(runtime::device::select("cuda").unwrap())
}

/// Numbers that are exact in every tested dtype.
fn normal(generator: &mut Generator, shape: &[i64], kind: Kind) -> Tensor {
    let drawn = generator.normal(shape, (Kind::Float, Device::Cpu)).unwrap();
    drawn.to_kind(kind).to_kind(Kind::Double)
}

fn epsilon(kind: Kind) -> f64 {
    match kind {
        Kind::BFloat16 => 2f64.powi(-8),
        Kind::Half => 2f64.powi(-11),
        _ => 2f64.powi(-23),
    }
}

/// The largest difference over the largest number; NaN and ∞ must be where they are expected.
fn distance(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.size(), expected.size());
    let found = found.to_device(Device::Cpu).to_kind(Kind::Double).reshape([-1]);
    let expected = expected.to_kind(Kind::Double).reshape([-1]);
    let finite = expected.isfinite();
    let unlike = found.isfinite().not_equal_tensor(&finite).any().int64_value(&[]);
    assert_eq!(unlike, 0, "{found} {expected}");
    let both = found.isnan().not_equal_tensor(&expected.isnan()).any().int64_value(&[]);
    assert_eq!(both, 0, "NaN is elsewhere");
    let (found, expected) = (found.masked_select(&finite), expected.masked_select(&finite));
    if found.numel() == 0 {
        return 0.0;
    }
    let largest = expected.abs().max().double_value(&[]).max(1e-30);
    (found - expected).abs().max().double_value(&[]) / largest
}

fn close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    let distance = distance(found, expected);
    assert!(distance <= tolerance, "{what}: {distance:e} of {tolerance:e}");
}

#[test]
fn norms_match_the_cpu() {
    let Some(device) = cuda() else { return };
    let mut generator = Generator::new(1).unwrap();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (rows, width) in
            [(3, 1), (5, 7), (600, 96), (33, 250), (700, 896), (17, 4096), (3, 16_384), (2, 20_000)]
        {
            for norm in [Norm::Layer, Norm::Rms] {
                for full in [false, true] {
                    let [x, residual, upstream, sum_gradient] =
                        [(); 4].map(|()| normal(&mut generator, &[rows, width], kind));
                    let weight = normal(&mut generator, &[width], kind);
                    let bias = (norm == Norm::Layer).then(|| normal(&mut generator, &[width], kind));
                    let run = |on: (Kind, Device)| -> Vec<Tensor> {
                        let leaf =
                            |t: &Tensor| t.to_kind(on.0).to_device(on.1).copy().set_requires_grad(true);
                        let (x, weight, bias) = (leaf(&x), leaf(&weight), bias.as_ref().map(leaf));
                        let plain = |t: &Tensor| t.to_kind(on.0).to_device(on.1);
                        let mut inputs = vec![&x, &weight];
                        inputs.extend(&bias);
                        if full {
                            let residual = leaf(&residual);
                            let (y, sum) = norm::add_norm(
                                norm,
                                &x,
                                &residual,
                                Some(&weight),
                                bias.as_ref(),
                                Options::default(),
                            )
                            .unwrap();
                            let given = [Some(plain(&upstream)), Some(plain(&sum_gradient))];
                            let given: Vec<Option<&Tensor>> = given.iter().map(Option::as_ref).collect();
                            let grads =
                                autograd::grad(&[&y, &sum], &given, &inputs, Keep::default()).unwrap();
                            [Some(y), Some(sum)].into_iter().chain(grads).flatten().collect()
                        } else {
                            let y = match norm {
                                Norm::Layer => {
                                    norm::layer_norm(&x, Some(&weight), bias.as_ref(), Options::default())
                                }
                                Norm::Rms => norm::rms_norm(&x, Some(&weight), Options::default()),
                            };
                            let y = y.unwrap();
                            let grads =
                                autograd::grad(&[&y], &[Some(&plain(&upstream))], &inputs, Keep::default())
                                    .unwrap();
                            [Some(y)].into_iter().chain(grads).flatten().collect()
                        }
                    };
                    let expected = run((Kind::Double, Device::Cpu));
                    let (found, again) = (run((kind, device)), run((kind, device)));
                    for (index, ((found, again), expected)) in
                        found.iter().zip(&again).zip(&expected).enumerate()
                    {
                        let what = format!("{kind:?} {norm:?} {rows} × {width}, residual {full}, {index}");
                        assert!(found.equal(again), "{what}: other bits");
                        // A width of 1 has no variance: what is left is the rounding of the sum.
                        let tolerance = if width == 1 { 1e-1 } else { 4.0 * epsilon(kind) + 2e-6 };
                        if width > 1 || kind == Kind::Float && !full {
                            close(&what, found, expected, tolerance.max(if width == 1 { 1.0 } else { 0.0 }));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rotations_match_the_cpu() {
    let Some(device) = cuda() else { return };
    let mut generator = Generator::new(2).unwrap();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (batch, sequence, heads, kv_heads, head) in
            [(2, 5, 3, 1, 6), (1, 130, 14, 2, 64), (3, 7, 4, 4, 128)]
        {
            let width = (heads + 2 * kv_heads) * head;
            let joint = normal(&mut generator, &[batch, sequence, width], kind);
            let positions = Tensor::randint(300, [batch, sequence], (Kind::Int64, Device::Cpu));
            for positions in [None, Some(&positions)] {
                let run = |on: (Kind, Device)| -> Vec<Tensor> {
                    let joint = joint.to_kind(on.0).to_device(on.1).copy().set_requires_grad(true);
                    let windows = joint.split_with_sizes([heads * head, kv_heads * head, kv_heads * head], 2);
                    let q = windows[0].view([batch, sequence, heads, head]);
                    let k = windows[1].view([batch, sequence, kv_heads, head]);
                    let table = RotaryTable::new(head, 300, 1e4, on.1).unwrap();
                    let positions = positions.map(|p| p.to_device(on.1));
                    let (q, k) = table.rotate(&q, &k, positions.as_ref()).unwrap();
                    let both = (&q * 3.0).sum(Kind::Double) + (&k * &k).sum(Kind::Double);
                    autograd::backward(&[&both]).unwrap();
                    vec![q, k, joint.grad()]
                };
                let (found, expected) = (run((kind, device)), run((Kind::Double, Device::Cpu)));
                for (found, expected) in found.iter().zip(&expected) {
                    close(&format!("{kind:?} {head}"), found, expected, 4.0 * epsilon(kind));
                }
            }
        }
    }
}

#[test]
fn swiglu_matches_the_cpu() {
    let Some(device) = cuda() else { return };
    let mut generator = Generator::new(3).unwrap();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (tokens, features) in [(1, 1), (3, 5), (130, 96), (70, 1000), (9, 11_008)] {
            let joint = (normal(&mut generator, &[tokens, 2 * features], kind) * 3.0)
                .to_kind(kind)
                .to_kind(Kind::Double);
            let upstream = normal(&mut generator, &[tokens, features], kind);
            let run = |on: (Kind, Device)| -> Vec<Tensor> {
                let used_up = joint.to_kind(on.0).to_device(on.1).copy();
                let (gate, up) = (used_up.narrow(1, 0, features), used_up.narrow(1, features, features));
                let mut product = Tensor::empty([tokens, features], on);
                swiglu::forward(&gate, &up, None, &mut product).unwrap();
                let grad = upstream.to_kind(on.0).to_device(on.1).copy();
                let swiglu::Gradients { gate, up, product: again } =
                    swiglu::backward(gate, up, None, grad).unwrap();
                let leaf = joint.to_kind(on.0).to_device(on.1).copy().set_requires_grad(true);
                let halves = (leaf.narrow(1, 0, features), leaf.narrow(1, features, features));
                let recorded = swiglu::silu_mul(&halves.0, &halves.1).unwrap();
                let upstream = upstream.to_kind(on.0).to_device(on.1);
                let both_gradients =
                    autograd::grad(&[&recorded], &[Some(&upstream)], &[&leaf], Keep::default()).unwrap();
                let both_gradients = both_gradients.into_iter().flatten();
                [product, gate, up, again, recorded].into_iter().chain(both_gradients).collect()
            };
            let (found, expected) = (run((kind, device)), run((Kind::Double, Device::Cpu)));
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                close(
                    &format!("{kind:?} {tokens} × {features}, {index}"),
                    found,
                    expected,
                    2.0 * epsilon(kind) + 1e-6,
                );
            }
        }
    }
}

/// Every option of a pass, over a vocabulary in two tiles.
#[test]
fn passes_over_logits_match_the_cpu() {
    let Some(device) = cuda() else { return };
    let mut generator = Generator::new(4).unwrap();
    let wanted = Wanted { total: true, moment: true, best: true };
    for columns in [1, 4, 509, 2048, 50_257] {
        for (bias, softcap, scale) in [(false, None, 1.0), (true, Some(5.0), 0.5), (false, None, 2.0)] {
            for dense in [false, true] {
                for plain in [true, false] {
                    let (rows, first) = (7, 3);
                    let products = normal(&mut generator, &[rows, columns], Kind::Float) * 4.0;
                    let bias = bias.then(|| normal(&mut generator, &[columns], Kind::Float));
                    let weights = (!plain).then(|| normal(&mut generator, &[columns], Kind::Float).abs());
                    let labels = Tensor::randint_low(-2, columns + 2, [rows], (Kind::Int64, Device::Cpu));
                    let distributions =
                        normal(&mut generator, &[rows, columns], Kind::Float).softmax(-1, Kind::Double);
                    let numbers = normal(&mut generator, &[3, rows], Kind::Float);
                    if columns > 4 && softcap.is_none() {
                        let _ = products.get(1).narrow(0, 2, 1).fill_(f64::NEG_INFINITY);
                    }
                    let run = |on: (Kind, Device), pass: &dyn LogitsPass| -> Vec<Tensor> {
                        let to = |t: &Tensor| t.to_kind(on.0).to_device(on.1).copy();
                        let (bias, weights) = (bias.as_ref().map(to), weights.as_ref().map(to));
                        let transform = Transform { bias: bias.as_ref(), scale, softcap };
                        let (labels, distributions) = (labels.to_device(on.1), to(&distributions));
                        let targets =
                            if dense { Targets::Dense(&distributions) } else { Targets::Columns(&labels) };
                        let asked = if plain { Wanted::default() } else { wanted };
                        let mut known = Statistics::new(rows, dense, asked, on).unwrap();
                        // Rows with the distance that the pass asks for.
                        let rows_of = |t: &Tensor| {
                            let all = Tensor::zeros([rows, pass.row_stride(columns, on.0)], on);
                            all.narrow(1, 0, columns).copy_(t);
                            all.narrow(1, 0, columns)
                        };
                        let mut tile = rows_of(&products);
                        let inputs =
                            TileInputs { first, transform, targets, class_weights: weights.as_ref() };
                        pass.statistics(&mut tile, inputs, &mut known).unwrap();
                        let mut second = rows_of(&(&products * 0.5));
                        pass.logits(&mut second, transform).unwrap();
                        let mut third = rows_of(&(&products * 0.7));
                        let next = TileInputs { first: first + columns, ..inputs };
                        pass.statistics(&mut third, next, &mut known).unwrap();
                        let logits = tile.copy();
                        let numbers = to(&numbers);
                        let constant = numbers.get(2);
                        let coefficients = Coefficients {
                            maximum: &known.maximum,
                            powers: &numbers.get(0),
                            target: &numbers.get(1),
                            constant: (!plain).then_some(&constant),
                        };
                        let mut narrow = tile.copy();
                        pass.gradient(&mut tile, inputs, coefficients).unwrap();
                        if on.0 == Kind::Float {
                            let kind = if plain { Kind::BFloat16 } else { Kind::Half };
                            let rounded = pass.gradient_as(&mut narrow, inputs, coefficients, kind).unwrap();
                            assert!(rounded.equal(&tile.to_kind(kind)), "{columns} columns: rounded once");
                        }
                        let Statistics { maximum, sum, target, mass, total, moment, best } = known;
                        let optional = [mass, total, moment, best].into_iter().flatten();
                        [logits, second, tile, maximum, sum, target].into_iter().chain(optional).collect()
                    };
                    let expected = run((Kind::Double, Device::Cpu), &Cpu);
                    let found = run((Kind::Float, device), pass_for(device));
                    assert_eq!(found.len(), expected.len());
                    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let what =
                            format!("{columns} columns, {softcap:?}, dense {dense}, plain {plain}: {index}");
                        close(&what, found, expected, 2e-5);
                    }
                }
            }
        }
    }
}

/// Tiles in bf16 and fp16: logits and gradients within one rounding of f64's, statistics of the stored logits.
#[test]
fn passes_over_logits_in_16_bits_are_rounded_once() {
    let Some(device) = cuda() else { return };
    let mut generator = Generator::new(5).unwrap();
    let (rows, pass, cpu) = (7, pass_for(device), (Kind::Double, Device::Cpu));
    for kind in [Kind::BFloat16, Kind::Half] {
        for columns in [1, 8, 509, 50_257] {
            for (bias, softcap, scale) in [(false, None, 1.0), (true, Some(5.0), 0.5)] {
                let what = format!("{kind:?}, {columns} columns, {softcap:?}");
                let products = normal(&mut generator, &[rows, columns], kind) * 4.0;
                let bias = bias.then(|| normal(&mut generator, &[columns], Kind::Float));
                let labels = Tensor::randint_low(-2, columns + 2, [rows], (Kind::Int64, Device::Cpu));
                let numbers = normal(&mut generator, &[2, rows], Kind::Float);
                let on_device = |t: &Tensor| t.to_kind(Kind::Float).to_device(device);
                let (bias_there, labels_there) = (bias.as_ref().map(on_device), labels.to_device(device));
                let there = Transform { bias: bias_there.as_ref(), scale, softcap };
                let here = Transform { bias: bias.as_ref(), scale, softcap };

                let all = Tensor::zeros([rows, pass.row_stride(columns, kind)], (kind, device));
                let mut tile = all.narrow(1, 0, columns);
                tile.copy_(&products);
                let targets = Targets::Columns(&labels_there);
                let mut found =
                    Statistics::new(rows, false, Wanted::default(), (Kind::Float, device)).unwrap();
                let inputs = TileInputs { transform: there, ..TileInputs::new(targets) };
                pass.statistics(&mut tile, inputs, &mut found).unwrap();
                let mut logits = products.copy();
                Cpu.logits(&mut logits, here).unwrap();
                close(&format!("{what}: logits"), &tile, &logits, 2e-5 + epsilon(kind));
                let mut stored = tile.to_device(Device::Cpu).to_kind(Kind::Double);
                let mut known = Statistics::new(rows, false, Wanted::default(), cpu).unwrap();
                let unchanged = TileInputs::new(Targets::Columns(&labels));
                Cpu.statistics(&mut stored, unchanged, &mut known).unwrap();
                close(&format!("{what}: maximum"), &found.maximum, &known.maximum, 0.0);
                close(&format!("{what}: sum"), &found.sum, &known.sum, 2e-5);
                close(&format!("{what}: target"), &found.target, &known.target, 2e-5);

                let (powers, target) = (numbers.get(0), numbers.get(1));
                let by = |maximum, powers, target| Coefficients { maximum, powers, target, constant: None };
                let here = TileInputs { transform: here, ..unchanged };
                Cpu.gradient(&mut stored, here, by(&known.maximum, &powers, &target)).unwrap();
                let [powers, target] = [on_device(&powers), on_device(&target)];
                let by = by(&found.maximum, &powers, &target);
                let gradient = pass.gradient_as(&mut tile, inputs, by, kind).unwrap();
                assert_eq!(gradient.data_ptr(), tile.data_ptr(), "{what}");
                close(&format!("{what}: gradient"), &gradient, &stored, 2e-5 + epsilon(kind));
            }
        }
    }
}

#[test]
fn a_row_with_a_nan_has_sums_and_gradients_of_nan() {
    let Some(device) = cuda() else { return };
    for columns in [1, 5, 4096] {
        let mut tile = Tensor::ones([3, columns], (Kind::Float, device));
        let _ = tile.get(1).narrow(0, columns / 2, 1).fill_(f64::NAN);
        let labels = Tensor::zeros([3], (Kind::Int64, device));
        let (targets, options) = (Targets::Columns(&labels), (Kind::Float, device));
        let mut known = Statistics::new(3, false, Wanted::default(), options).unwrap();
        let pass = pass_for(device);
        pass.statistics(&mut tile, TileInputs::new(targets), &mut known).unwrap();
        let one = Tensor::ones([3], options);
        let coefficients =
            Coefficients { maximum: &known.maximum, powers: &one, target: &one, constant: None };
        pass.gradient(&mut tile, TileInputs::new(targets), coefficients).unwrap();
        let rows = |t: &Tensor| Vec::<bool>::try_from(t).unwrap();
        assert_eq!(rows(&known.sum.isnan()), [false, true, false]);
        assert_eq!(rows(&tile.isnan().all_dim(1, false)), [false, true, false]);
    }
}

#[test]
fn scaling_by_a_device_scalar_works() {
    let Some(device) = cuda() else { return };
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for numbers in [1, 77, 8192, 3_000_001] {
            for factor in [1.0, 0.5, f64::NAN] {
                let mut x = Tensor::randn([numbers], (kind, device));
                let expected = &x * factor;
                let factor = Tensor::full([0i64; 0], factor, (Kind::Float, device));
                kernels::gradients::scale_(&mut x, &factor).unwrap();
                assert_eq!(distance(&x, &expected.to_device(Device::Cpu)), 0.0, "{kind:?} {numbers}");
            }
        }
    }
}

/// A backward on the engine's thread whose first device work is a kernel.
#[test]
fn a_backward_can_start_with_a_kernel() {
    let Some(device) = cuda() else { return };
    let x = Tensor::randn([8, 64], (Kind::Float, device)).set_requires_grad(true);
    let y = norm::rms_norm(&x, None, Options::default()).unwrap();
    let upstream = Tensor::ones([8, 64], (Kind::Float, device));
    let grads = std::thread::spawn(move || {
        autograd::grad(&[&y], &[Some(&upstream)], &[&x], Keep::default()).unwrap().remove(0).unwrap()
    });
    assert!(grads.join().unwrap().isfinite().all().int64_value(&[]) == 1);
}

#[test]
fn a_kernel_must_have_run_before_a_capture() {
    let Some(device) = cuda() else { return };
    let gate = Tensor::randn([33, 77], (Kind::Float, device));
    let mut product = Tensor::zeros([33, 77], (Kind::Float, device));
    let (inside, mut out) = (gate.shallow_clone(), product.shallow_clone());
    let mut step = runtime::device::graph::CapturedStep::capture(device, move || {
        swiglu::forward(&inside, &inside, None, &mut out)
    })
    .unwrap();
    let _ = product.zero_();
    step.replay().unwrap();
    step.synchronize().unwrap();
    close("replayed", &product, &(gate.silu() * &gate).to_device(Device::Cpu), 1e-6);
}

/// Three steps of tensors of many sizes in fp32, bf16 and fp16, against the CPU's pass; a flag on the device skips a step.
#[test]
fn adam_over_many_tensors_matches_the_cpu() {
    let Some(device) = cuda() else { return };
    let mut generator = Generator::new(9).unwrap();
    let sizes = [1, 7, 8, 4096, 16_384, 16_385, 50_001];
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for decoupled in [true, false] {
            // More tensors than fit one launch.
            let masters: Vec<Tensor> =
                (0..70).map(|i| normal(&mut generator, &[sizes[i % 7]], Kind::Float)).collect();
            let gradients: Vec<Vec<Tensor>> = (0..3)
                .map(|_| masters.iter().map(|m| normal(&mut generator, &m.size(), kind) * 0.1).collect())
                .collect();
            let options = AdamW { lr: 0.01, weight_decay: 0.1, ..AdamW::default() };
            let start = |on: Device| -> Vec<[Tensor; 4]> {
                let one = |master: &Tensor| {
                    let master = master.to_kind(Kind::Float).to_device(on).copy();
                    let weight = master.to_kind(if kind == Kind::Float { Kind::BFloat16 } else { kind });
                    [master.zeros_like(), master.zeros_like(), master, weight]
                };
                masters.iter().map(one).collect()
            };
            let (expected, found) = (start(Device::Cpu), start(device));
            let on = |number: f64| Tensor::full([] as [i64; 0], number, (Kind::Float, device));
            let steps: Vec<Tensor> = masters.iter().map(|_| on(0.0)).collect();
            for (index, gradients) in gradients.iter().enumerate() {
                let of = |on: Device| -> Vec<Tensor> {
                    gradients.iter().map(|gradient| gradient.to_kind(kind).to_device(on)).collect()
                };
                let (on_cpu, on_device) = (of(Device::Cpu), of(device));
                for (gradient, [exp_avg, exp_avg_sq, master, weight]) in on_cpu.iter().zip(&expected) {
                    let one = AdamTensors { gradient, master, exp_avg, exp_avg_sq, weight: Some(weight) };
                    let AdamW { lr, beta1, beta2, weight_decay, eps, .. } = options;
                    let step = 1 + index as u64;
                    let step = AdamStep {
                        lr,
                        beta1,
                        beta2,
                        eps,
                        weight_decay,
                        decoupled,
                        step,
                        gradient_factor: None,
                    };
                    adam(&one, &step).unwrap();
                }
                let all: Vec<AdamTensors<'_>> = on_device
                    .iter()
                    .zip(&found)
                    .map(|(gradient, [exp_avg, exp_avg_sq, master, weight])| AdamTensors {
                        gradient,
                        master,
                        exp_avg,
                        exp_avg_sq,
                        weight: Some(weight),
                    })
                    .collect();
                let skipped = adam_many(&all, &steps, options, decoupled, None, Some(&on(1.0))).unwrap();
                let done = adam_many(&all, &steps, options, decoupled, None, Some(&on(0.0))).unwrap();
                assert!(skipped && done);
            }
            assert_eq!(steps[69].double_value(&[]), 3.0);
            for (found, expected) in found.iter().zip(&expected) {
                for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let tolerance = if index == 3 { 2.0 * epsilon(Kind::BFloat16) } else { 4e-6 };
                    close(&format!("{kind:?} {decoupled} {index}"), found, expected, tolerance);
                }
            }
        }
    }
}
