//! The passes over tiles of logits, against libtorch's own operators in f64, tile by tile.

use kernels::cross_entropy::{
    Coefficients, Cpu, LogitsPass, Reference, Statistics, Targets, TileInputs, Transform, Wanted,
};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

struct Case {
    rows: i64,
    vocabulary: i64,
    tile: i64,
    kind: Kind,
    softcap: Option<f64>,
    scale: f64,
    bias: bool,
    weights: bool,
    dense: bool,
    constant: bool,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, vocabulary, tile) in [(1, 1, 1), (3, 7, 7), (5, 1000, 333), (2, 2500, 2500), (9, 1091, 64)] {
        for bits in 0..64u32 {
            let on = |bit: u32| bits >> bit & 1 == 1;
            cases.push(Case {
                rows,
                vocabulary,
                tile,
                kind: if on(0) { Kind::Double } else { Kind::Float },
                softcap: on(1).then_some(3.0),
                scale: if on(1) != on(2) { 0.7 } else { 1.0 },
                bias: on(2),
                weights: on(3),
                dense: on(4),
                constant: on(5),
            });
        }
    }
    cases
}

/// Every statistic by plain operators in f64, and the gradient by libtorch's graph.
#[test]
fn both_passes_agree_with_the_graph_in_f64() {
    let mut generator = Generator::new(3).unwrap();
    let mut worst = [0f64; 2];
    for case in cases() {
        for (index, pass) in [&Cpu as &dyn LogitsPass, &Reference].into_iter().enumerate() {
            worst[index] = worst[index].max(check(&case, pass, &mut generator));
        }
    }
    eprintln!("largest share of the tolerance: {:.2} by the kernel, {:.2} by operators", worst[0], worst[1]);
}

fn check(case: &Case, pass: &dyn LogitsPass, generator: &mut Generator) -> f64 {
    let (n, v, options) = (case.rows, case.vocabulary, (case.kind, Device::Cpu));
    let mut normal = |size: &[i64]| generator.normal(size, options).unwrap();
    let products = normal(&[n, v]) * 2.0;
    let bias = case.bias.then(|| normal(&[v]));
    let weights = case.weights.then(|| normal(&[v]).abs() + 0.1);
    let distribution = normal(&[n, v]).softmax(-1, case.kind);
    let [alpha, beta, gamma] = [normal(&[n]), normal(&[n]), normal(&[n])];
    let columns = (normal(&[n]).abs() * 1e6).to_kind(Kind::Int64).remainder(v);

    // The oracle.
    let wide = |t: &Tensor| t.to_kind(Kind::Double);
    let r = wide(&products).copy().set_requires_grad(true);
    let mut z = bias.as_ref().map_or(r.shallow_clone(), |bias| &r + wide(bias)) * case.scale;
    if let Some(cap) = case.softcap {
        z = (z / cap).tanh() * cap;
    }
    let (plain, log_sum_exp) = (z.detach(), z.logsumexp([1i64].as_slice(), false));
    let w = weights.as_ref().map_or(Tensor::ones([v], (Kind::Double, Device::Cpu)), wide);
    let t = if case.dense {
        wide(&distribution) * &w
    } else {
        Tensor::zeros([n, v], (Kind::Double, Device::Cpu)).scatter_value(1, &columns.unsqueeze(1), 1.0)
    };
    let dim = [1i64].as_slice();
    let sum = |x: Tensor| x.sum_dim_intlist(dim, false, Kind::Double);
    let mut loss = &log_sum_exp * wide(&alpha) - sum(&z * &t) * wide(&beta);
    if case.constant {
        loss -= sum(&z * &w) * wide(&gamma);
    }
    loss.sum(Kind::Double).backward();

    // The tested passes, in tiles.
    let mut tiles = Vec::new();
    let wanted = Wanted { total: true, moment: true, best: true };
    let mut statistics = Statistics::new(n, case.dense, wanted, options).unwrap();
    let starts: Vec<i64> = (0..v).step_by(case.tile as usize).collect();
    let part = |t: &Tensor, dim: i64, start: i64| t.narrow(dim, start, case.tile.min(v - start)).contiguous();
    let targets_of = |start: i64| {
        if case.dense { part(&distribution, 1, start) } else { &columns - start }
    };
    fn of(dense: bool, tensor: &Tensor) -> Targets<'_> {
        if dense { Targets::Dense(tensor) } else { Targets::Columns(tensor) }
    }
    let vectors = |start: i64| {
        let take = |t: &Option<Tensor>| t.as_ref().map(|t| part(t, 0, start));
        (take(&bias), take(&weights), targets_of(start))
    };
    for &start in &starts {
        let mut tile = part(&products, 1, start);
        let (bias, weights, target) = vectors(start);
        let transform = Transform { bias: bias.as_ref(), scale: case.scale, softcap: case.softcap };
        let targets = of(case.dense, &target);
        let inputs = TileInputs { first: start, transform, targets, class_weights: weights.as_ref() };
        pass.statistics(&mut tile, inputs, &mut statistics).unwrap();
        tiles.push(tile);
    }
    let ours_log_sum_exp = statistics.log_sum_exp().unwrap();
    let entropy = statistics.entropy().unwrap();
    let powers = &alpha / &statistics.sum;
    for (&start, tile) in starts.iter().zip(&mut tiles) {
        let (bias, weights, target) = vectors(start);
        let transform = Transform { bias: bias.as_ref(), scale: case.scale, softcap: case.softcap };
        let by = Coefficients {
            maximum: &statistics.maximum,
            powers: &powers,
            target: &beta,
            constant: case.constant.then_some(&gamma),
        };
        let targets = of(case.dense, &target);
        let inputs = TileInputs { first: start, transform, targets, class_weights: weights.as_ref() };
        pass.gradient(tile, inputs, by).unwrap();
    }

    let probabilities = plain.softmax(-1, Kind::Double);
    let mut pairs = vec![
        ("log-sum-exp", ours_log_sum_exp, log_sum_exp.detach()),
        ("target", statistics.target, sum(&plain * &t)),
        ("total", statistics.total.unwrap(), sum(&plain * &w)),
        ("entropy", entropy, &log_sum_exp.detach() - sum(&plain * probabilities)),
        ("gradient", Tensor::cat(&tiles, 1), r.grad()),
    ];
    if case.dense {
        pairs.push(("mass", statistics.mass.unwrap(), sum(t)));
    }
    let mut worst: f64 = 0.0;
    for (name, found, expected) in pairs {
        // Relative to the largest value: an fp32 sum over a row is off by a few last places of its largest partial sum.
        let scale = expected.abs().max().double_value(&[]).max((v as f64).sqrt());
        let tolerance = scale * if case.kind == Kind::Double { 1e-13 } else { 3e-6 };
        let error = (wide(&found) - expected).abs().max().double_value(&[]);
        let what = format!("{name} of {n} × {v} in tiles of {} by {pass:?}", case.tile);
        assert!(error <= tolerance, "{what}: {error:e} of {tolerance:e}");
        worst = worst.max(error / tolerance);
    }
    assert_eq!(statistics.best.unwrap(), products_argmax(&plain, case.kind), "{n} × {v}");
    worst
}

fn products_argmax(logits: &Tensor, kind: Kind) -> Tensor {
    // Equal logits of the tile's dtype may differ in f64.
    logits.to_kind(kind).argmax(-1, false)
}

/// In bf16 and fp16: logits and gradients rounded once, and statistics of the stored logits.
#[test]
fn tiles_in_16_bits_are_rounded_once() {
    let mut generator = Generator::new(9).unwrap();
    let (rows, columns) = (5, 301);
    for (kind, unit) in [(Kind::BFloat16, 2f64.powi(-8)), (Kind::Half, 2f64.powi(-11))] {
        for (bias, softcap, scale) in [(false, None, 1.0), (true, Some(5.0), 0.7)] {
            for dense in [false, true] {
                let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
                let products = (normal(&[rows, columns]) * 4.0).to_kind(kind);
                let bias = bias.then(|| normal(&[columns]));
                let weights = normal(&[columns]).abs();
                let distributions = normal(&[rows, columns]).softmax(-1, Kind::Float);
                let [powers, target, constant] = [normal(&[rows]), normal(&[rows]), normal(&[rows])];
                let labels = Tensor::from_slice(&[3i64, -1, 300, 301, 0]);
                let f64_of = |t: &Tensor| t.to_kind(Kind::Double);
                let (bias_f64, weights_f64) = (bias.as_ref().map(f64_of), f64_of(&weights));
                let distributions_f64 = f64_of(&distributions);
                let wanted = Wanted { total: true, moment: true, best: true };
                let what = format!("{kind:?}, softcap {softcap:?}, dense {dense}");
                // Within one rounding, and what fp32 loses before.
                let close = |name: &str, found: &Tensor, exact: &Tensor, unit: f64| {
                    let allowed = exact.abs() * unit + exact.abs().max() * 3e-6 + 1e-7;
                    let share = ((f64_of(found) - exact).abs() / allowed).max().double_value(&[]);
                    assert!(share <= 1.0, "{what}, {name}: {share} of the tolerance");
                };

                let mut tile = products.copy();
                let transform = Transform { bias: bias.as_ref(), scale, softcap };
                let targets = if dense { Targets::Dense(&distributions) } else { Targets::Columns(&labels) };
                let mut known = Statistics::new(rows, dense, wanted, (Kind::Float, Device::Cpu)).unwrap();
                let inputs = TileInputs { first: 3, transform, targets, class_weights: Some(&weights) };
                Reference.statistics(&mut tile, inputs, &mut known).unwrap();
                let mut alone = products.copy();
                Reference.logits(&mut alone, transform).unwrap();
                assert!(alone.equal(&tile), "{what}: recomputed logits are other ones");

                let transform_f64 = Transform { bias: bias_f64.as_ref(), scale, softcap };
                let targets_f64 =
                    if dense { Targets::Dense(&distributions_f64) } else { Targets::Columns(&labels) };
                let mut logits = f64_of(&products);
                Cpu.logits(&mut logits, transform_f64).unwrap();
                close("logits", &tile, &logits, unit);
                let mut stored = f64_of(&tile);
                let mut exact = Statistics::new(rows, dense, wanted, (Kind::Double, Device::Cpu)).unwrap();
                let inputs_f64 = TileInputs {
                    first: 3,
                    transform: transform_f64,
                    targets: targets_f64,
                    class_weights: Some(&weights_f64),
                };
                let unchanged = TileInputs { transform: Transform::default(), ..inputs_f64 };
                Cpu.statistics(&mut stored, unchanged, &mut exact).unwrap();
                for (name, found, exact) in [
                    ("sum", &known.sum, &exact.sum),
                    ("maximum", &known.maximum, &exact.maximum),
                    ("target", &known.target, &exact.target),
                    ("total", known.total.as_ref().unwrap(), exact.total.as_ref().unwrap()),
                    ("moment", known.moment.as_ref().unwrap(), exact.moment.as_ref().unwrap()),
                ] {
                    close(name, found, exact, 0.0);
                }
                assert_eq!(known.best, exact.best, "{what}");

                let by = Coefficients {
                    maximum: &known.maximum,
                    powers: &powers,
                    target: &target,
                    constant: Some(&constant),
                };
                let [maximum, powers, target, constant] =
                    [&known.maximum, &powers, &target, &constant].map(f64_of);
                let by_f64 = Coefficients {
                    maximum: &maximum,
                    powers: &powers,
                    target: &target,
                    constant: Some(&constant),
                };
                Cpu.gradient(&mut stored, inputs_f64, by_f64).unwrap();
                let gradient = Reference.gradient_as(&mut tile, inputs, by, kind).unwrap();
                assert_eq!(gradient.data_ptr(), tile.data_ptr(), "{what}: the gradient is the tile");
                close("gradient", &gradient, &stored, unit);
            }
        }
    }
}

#[test]
fn rows_of_impossible_classes_and_rows_with_nan_are_correct() {
    let nan = f64::NAN;
    let none = f64::NEG_INFINITY;
    let row = |values: &[f64]| Tensor::from_slice(values).to_kind(Kind::Float);
    // The first tile of the first row has no possible class; the second row has a NaN, the third no possible class at
    // all.
    let logits =
        Tensor::stack(&[row(&[none, none, 1.0, 2.0]), row(&[0.0, nan, 1.0, 2.0]), row(&[none; 4])], 0);
    for pass in [&Cpu as &dyn LogitsPass, &Reference] {
        let wanted = Wanted { moment: true, ..Wanted::default() };
        let mut statistics = Statistics::new(3, false, wanted, (Kind::Float, Device::Cpu)).unwrap();
        let columns = Tensor::from_slice(&[3i64, 3, 3]);
        let mut tiles = [logits.narrow(1, 0, 2).contiguous(), logits.narrow(1, 2, 2).contiguous()];
        for (start, tile) in [0, 2].into_iter().zip(&mut tiles) {
            let local = &columns - start;
            let inputs = TileInputs { first: start, ..TileInputs::new(Targets::Columns(&local)) };
            pass.statistics(tile, inputs, &mut statistics).unwrap();
        }
        let log_sum_exp = statistics.log_sum_exp().unwrap();
        let values = Vec::<f32>::try_from(&log_sum_exp).unwrap();
        assert!((values[0] - (1f32.exp() + 2f32.exp()).ln()).abs() < 1e-6, "{values:?}");
        assert!(values[1].is_nan() && values[2] == f32::NEG_INFINITY, "{values:?}");
        let entropy = statistics.entropy().unwrap().double_value(&[0]);
        let p = 1.0 / (1.0 + 1f64.exp());
        assert!((entropy + p * p.ln() + (1.0 - p) * (1.0 - p).ln()).abs() < 1e-6, "{entropy}");
        let ones = Tensor::ones([3], tch::kind::FLOAT_CPU);
        let powers = &ones / &statistics.sum;
        let maximum = &statistics.maximum;
        let by = Coefficients { maximum, powers: &powers, target: &ones, constant: None };
        for (start, tile) in [0, 2].into_iter().zip(&mut tiles) {
            let local = &columns - start;
            pass.gradient(tile, TileInputs::new(Targets::Columns(&local)), by).unwrap();
        }
        let gradient = Tensor::cat(&tiles, 1);
        let first = Vec::<f32>::try_from(gradient.get(0)).unwrap();
        assert_eq!(first[..2], [0.0, 0.0], "{pass:?}");
        assert!((f64::from(first[2]) - p).abs() < 1e-6 && (f64::from(first[3]) + p).abs() < 1e-6);
        assert_eq!(gradient.get(1).isnan().any().int64_value(&[]), 1);
    }
}

/// In bf16, the gradient is that in fp32, rounded, in the memory of the tile.
#[test]
fn a_gradient_in_bf16_lies_in_the_memory_of_the_tile() {
    runtime::memory::track_cpu().unwrap();
    let mut generator = Generator::new(8).unwrap();
    for (rows, columns) in [(1, 1), (3, 7), (5, 1091), (0, 4), (4, 0)] {
        let options = (Kind::Float, Device::Cpu);
        let mut normal = |size: &[i64]| generator.normal(size, options).unwrap();
        let whole = normal(&[rows, columns + 2]);
        let logits = whole.narrow(1, 1, columns);
        let [maximum, powers, target] = [normal(&[rows]), normal(&[rows]), normal(&[rows])];
        if rows > 1 && columns > 0 {
            let _ = logits.get(1).get(columns - 1).fill_(f64::NAN);
        }
        let targets = Tensor::zeros([rows], (Kind::Int64, Device::Cpu));
        let by = Coefficients { maximum: &maximum, powers: &powers, target: &target, constant: None };
        let transform = Transform { bias: None, scale: 0.7, softcap: Some(2.0) };
        let inputs = TileInputs { transform, ..TileInputs::new(Targets::Columns(&targets)) };
        let mut wide = logits.copy();
        Cpu.gradient(&mut wide, inputs, by).unwrap();
        let expected = wide.to_kind(Kind::BFloat16);
        let mut tile = logits.shallow_clone();
        let region = runtime::memory::Region::start(Device::Cpu).unwrap();
        let narrow = Cpu.gradient_as(&mut tile, inputs, by, Kind::BFloat16).unwrap();
        assert_eq!(region.finish().unwrap().peak_above_start(), 0);
        assert_eq!((narrow.kind(), narrow.size()), (Kind::BFloat16, vec![rows, columns]));
        assert_eq!(narrow.data_ptr(), logits.data_ptr());
        let same = narrow.allclose(&expected, 0.0, 0.0, true);
        assert!(same, "{rows} {columns}");
    }
}

#[test]
fn misuse_is_refused_with_the_tensors_name() {
    let options = (Kind::Float, Device::Cpu);
    let mut statistics = Statistics::new(2, false, Wanted::default(), options).unwrap();
    let columns = Tensor::from_slice(&[0i64, 1]);
    let short = Tensor::from_slice(&[0i64]);
    let bias = Tensor::zeros([4], options);
    let cases: [(Tensor, Transform<'_>, Targets<'_>, &str); 4] = [
        (
            Tensor::zeros([2, 3], (Kind::BFloat16, Device::Cpu)),
            Transform::default(),
            Targets::Columns(&columns),
            "`tile` is BFloat16",
        ),
        (Tensor::zeros([3, 2], options).tr(), Transform::default(), Targets::Columns(&columns), "dense rows"),
        (
            Tensor::zeros([2, 3], options),
            Transform { bias: Some(&bias), ..Transform::default() },
            Targets::Columns(&columns),
            "`bias` is Float [4] on Cpu; expected contiguous Float [3]",
        ),
        (Tensor::zeros([2, 3], options), Transform::default(), Targets::Columns(&short), "`target columns`"),
    ];
    for (mut tile, transform, targets, message) in cases {
        let inputs = TileInputs { transform, ..TileInputs::new(targets) };
        let error = Cpu.statistics(&mut tile, inputs, &mut statistics).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
}

/// A statistic that is also read as a bias or a class weight would change while rows read it.
#[test]
fn written_statistics_share_memory_with_nothing() {
    let vector = |value: f64| Tensor::full([4], value, (Kind::Float, Device::Cpu));
    let (bias, targets) = (vector(0.5), Tensor::zeros([4], (Kind::Int64, Device::Cpu)));
    let known = || {
        let wanted = Wanted { total: true, moment: true, best: true };
        Statistics::new(4, false, wanted, (Kind::Float, Device::Cpu)).unwrap()
    };
    let run = |mut known: Statistics, bias: &Tensor, weights: &Tensor, targets: &Tensor| {
        let mut tile = Tensor::ones([4, 4], (Kind::Float, Device::Cpu));
        let transform = Transform { bias: Some(bias), ..Transform::default() };
        let targets = Targets::Columns(targets);
        let inputs = TileInputs { first: 0, transform, targets, class_weights: Some(weights) };
        Cpu.statistics(&mut tile, inputs, &mut known)
    };
    let weights = vector(1.0);
    run(known(), &bias, &weights, &targets).unwrap();
    // One tensor may be read twice.
    run(known(), &bias, &bias, &targets).unwrap();
    for (shared, other) in [
        (Statistics { sum: bias.shallow_clone(), ..known() }, "bias"),
        (Statistics { total: Some(weights.shallow_clone()), ..known() }, "class_weights"),
        (Statistics { best: Some(targets.shallow_clone()), ..known() }, "target columns"),
        (
            {
                let known = known();
                Statistics { target: known.sum.shallow_clone(), ..known }
            },
            "sum",
        ),
    ] {
        let error = run(shared, &bias, &weights, &targets).unwrap_err().to_string();
        assert!(error.contains("overlap") && error.contains(&format!("`{other}`")), "{error}");
    }
}
