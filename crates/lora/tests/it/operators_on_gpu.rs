//! The operators, dtypes and results of adapted projections as on a GPU, on the CPU: products multiply 16 bits, and nothing as large as an
//! activation is cast.

use std::collections::BTreeMap;

use expect_test::{Expect, expect};
use kernels::gpu;
use kernels::nf4::{self, Scales};
use kernels::quantized;
use lora::{LoraConfig, LoraLinear, LoraLinearConfig};
use models::module::{
    Context, Input, LanguageModel, ModuleMapper, Projection, map_modules, parameters, trainable,
};
use models::{DecoderConfig, Linear, Llama};
use runtime::autograd::{Keep, backward, backward_with};
use runtime::memory::{live_bytes, track_cpu};
use runtime::profile::{Counter, Counts, Trace, TraceConfig};
use runtime::random::{Generator, RandomState};
use tch::{Device, Kind, Tensor, kind};
use trace::{Dims, Profile};

const TOKENS: i64 = 96;
const INNER: i64 = 128;
const OUT: i64 = 192;

#[derive(Clone, Copy)]
struct Case {
    nf4: bool,
    dora: bool,
    dropout: f64,
    bias: bool,
}

const PLAIN: Case = Case { nf4: false, dora: false, dropout: 0.0, bias: true };

impl Case {
    /// The layer, x and the gradient of its result, all with values of bf16, except for A and B.
    fn build(self, kind: Kind) -> (LoraLinear, Tensor, Tensor) {
        let mut generator = Generator::new(3).unwrap();
        let mut drawn =
            |shape: &[i64]| generator.normal(shape, kind::FLOAT_CPU).unwrap().to_kind(Kind::BFloat16);
        let dense = drawn(&[OUT, INNER]);
        let weight = match self.nf4 {
            true => nf4::quantize(&dense, Scales::Nested).unwrap(),
            false => dense.to_kind(kind),
        };
        let bias = self.bias.then(|| drawn(&[OUT]).to_kind(kind));
        let (x, upstream) = (drawn(&[2, TOKENS / 2, INNER]), drawn(&[2, TOKENS / 2, OUT]));
        let options = LoraLinearConfig {
            r: 8,
            alpha: 12.0,
            dropout: self.dropout,
            dora: self.dora,
            ..LoraLinearConfig::default()
        };
        let layer = LoraLinear::new(Linear { weight, bias }, &options).unwrap();
        let _no_grad = tch::no_grad_guard();
        for (name, tensor) in parameters(&layer).into_iter().filter(|(name, _)| name.starts_with("lora_B")) {
            let noise = generator.normal(&tensor.size(), kind::FLOAT_CPU).unwrap() * 0.1;
            assert!(tensor.shallow_clone().f_copy_(&noise).is_ok(), "{name}");
        }
        (layer, x.to_kind(kind).set_requires_grad(true), upstream.to_kind(kind))
    }
}

fn step(layer: &LoraLinear, x: &Tensor, upstream: &Tensor) -> Tensor {
    let context = Context { training: true, ..Context::default() };
    let y = layer.forward(x, &context).unwrap();
    backward_with(&[&y], &[Some(upstream)], Keep::default()).unwrap();
    y.detach()
}

/// y, and the gradients of x and of what is learned, in f64.
fn results(layer: &LoraLinear, y: &Tensor, x: &Tensor) -> Vec<Tensor> {
    let learned = parameters(layer).into_iter().filter(|(name, _)| name.starts_with("lora_"));
    let gradients = learned.map(|(_, tensor)| tensor.grad());
    let all = [y.shallow_clone(), x.grad()].into_iter().chain(gradients);
    all.map(|tensor| tensor.to_kind(Kind::Double)).collect()
}

/// Checks that no value differs by more than this share of the largest.
fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    let error = (found - expected).abs().max().double_value(&[]);
    let scale = expected.abs().max().double_value(&[]);
    assert!(error <= tolerance * scale, "{what}: {error} of {scale}");
}

/// Calls of an operator with inputs of the same dtypes and shapes, and the elements of the largest input.
#[derive(Default)]
struct Calls {
    count: usize,
    largest: i64,
}

/// The operators that read numbers: those of each name, dtypes and shapes with their calls. Views, allocations and composite operators are
/// left out.
fn operators(run: impl FnOnce()) -> (BTreeMap<String, Calls>, Counts) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let counter = Counter::on_this_thread().unwrap();
    let trace = Trace::start(TraceConfig { memory: false, ..TraceConfig::default() }).unwrap();
    run();
    trace.save(&path).unwrap();
    let (profile, counts) = (Profile::read(&path).unwrap(), counter.finish().unwrap());
    let mut calls = BTreeMap::new();
    for operator in &profile.operators {
        let name = profile.operator_name(operator);
        let is_counted = counts.by_op.iter().any(|counted| counted.name == name);
        if !is_counted || name.ends_with("::to") {
            continue;
        }
        let elements = |dims: &[i64]| dims.iter().product::<i64>();
        let largest = operator.inputs.iter().map(|input| match &input.dims {
            Dims::One(dims) => elements(dims),
            Dims::List(list) => list.iter().map(|dims| elements(dims)).max().unwrap_or_default(),
        });
        let largest = largest.max().unwrap_or_default();
        let inputs = operator.inputs.iter().map(|input| (profile.input_kind(input), &input.dims));
        let tensors = inputs.filter_map(|(kind, dims)| match dims {
            Dims::One(dims) if !dims.is_empty() => Some(format!("{}{dims:?}", kind.replace("c10::", ""))),
            Dims::List(list) => Some(format!("{list:?}")),
            _ => None,
        });
        let words: Vec<String> = std::iter::once(name.to_owned()).chain(tensors).collect();
        // Without an input it fills new memory.
        if words.len() > 1 {
            let calls: &mut Calls = calls.entry(words.join(" ")).or_default();
            *calls = Calls { count: calls.count + 1, largest };
        }
    }
    (calls, counts)
}

fn check(case: Case, expected: &Expect) {
    let _gpu = gpu::assume();
    let (layer, x, upstream) = case.build(Kind::BFloat16);
    let (calls, counts) = operators(|| drop(step(&layer, &x, &upstream)));
    let mut text: String =
        calls.iter().map(|(call, Calls { count, .. })| format!("{count} {call}\n")).collect();
    // A mask becomes a number on the CPU only: a GPU's kernel multiplies by it.
    let is_cast = |call: &str| call.contains("copy") && !call.contains("bool[");
    for (call, Calls { largest, .. }) in calls.iter().filter(|(call, _)| is_cast(call)) {
        assert!(*largest < TOKENS * INNER, "a cast as large as an activation: {call}\n{text}");
    }
    let is_product =
        |call: &str| ["aten::mm", "aten::addmm", "runtime::"].iter().any(|name| call.starts_with(name));
    for (call, Calls { largest, .. }) in calls.iter().filter(|(call, _)| is_product(call)) {
        assert!(*largest < TOKENS * INNER || !call.contains("float"), "a product in fp32: {call}\n{text}");
        assert!(!call.starts_with("runtime::"), "a product of a CPU: {call}\n{text}");
    }
    text += &format!("bytes {}", counts.total.bytes);
    expected.assert_eq(&text);
}

#[test]
fn a_bf16_layer_multiplies_in_bf16() {
    check(
        PLAIN,
        &expect![[r#"
            1 aten::_foreach_copy_ [[8, 128], [192, 8]] [[8, 128], [192, 8]]
            1 aten::addmm BFloat16[192] BFloat16[96, 8] BFloat16[8, 192]
            1 aten::addmm BFloat16[96, 8] BFloat16[96, 128] BFloat16[128, 8] BFloat16[96, 8]
            1 aten::addmm BFloat16[96, 8] BFloat16[96, 192] BFloat16[192, 8] BFloat16[96, 8]
            1 aten::addmm_ BFloat16[96, 128] BFloat16[96, 192] BFloat16[192, 128]
            1 aten::addmm_ BFloat16[96, 192] BFloat16[96, 128] BFloat16[128, 192]
            1 aten::mm BFloat16[192, 96] BFloat16[96, 8]
            1 aten::mm BFloat16[8, 96] BFloat16[96, 128]
            1 aten::mm BFloat16[96, 8] BFloat16[8, 128]
            bytes 515456"#]],
    );
}

#[test]
fn a_bf16_layer_with_dropout_multiplies_in_bf16() {
    check(
        Case { dropout: 0.25, bias: false, ..PLAIN },
        &expect![[r#"
            1 aten::_foreach_copy_ [[8, 128], [192, 8]] [[8, 128], [192, 8]]
            3 aten::_to_copy bool[96, 128]
            1 aten::addmm BFloat16[96, 8] BFloat16[96, 128] BFloat16[128, 8] BFloat16[96, 8]
            1 aten::addmm BFloat16[96, 8] BFloat16[96, 192] BFloat16[192, 8] BFloat16[96, 8]
            1 aten::addmm_ BFloat16[96, 128] BFloat16[96, 192] BFloat16[192, 128]
            1 aten::addmm_ BFloat16[96, 192] BFloat16[96, 128] BFloat16[128, 192]
            1 aten::mm BFloat16[192, 96] BFloat16[96, 8]
            1 aten::mm BFloat16[8, 96] BFloat16[96, 128]
            1 aten::mm BFloat16[96, 8] BFloat16[8, 128]
            1 aten::mm BFloat16[96, 8] BFloat16[8, 192]
            3 aten::mul_ BFloat16[96, 128] BFloat16[96, 128]
            bytes 883720"#]],
    );
}

#[test]
fn an_nf4_layer_multiplies_in_bf16() {
    check(
        Case { nf4: true, ..PLAIN },
        &expect![[r#"
            1 aten::_foreach_copy_ [[8, 128], [192, 8]] [[8, 128], [192, 8]]
            1 aten::addmm BFloat16[192] BFloat16[96, 8] BFloat16[8, 192]
            1 aten::addmm BFloat16[96, 8] BFloat16[96, 128] BFloat16[128, 8] BFloat16[96, 8]
            1 aten::addmm BFloat16[96, 8] BFloat16[96, 192] BFloat16[192, 8] BFloat16[96, 8]
            1 aten::addmm_ BFloat16[96, 128] BFloat16[96, 192] BFloat16[192, 128]
            1 aten::addmm_ BFloat16[96, 192] BFloat16[96, 128] BFloat16[128, 192]
            1 aten::mm BFloat16[192, 96] BFloat16[96, 8]
            1 aten::mm BFloat16[8, 96] BFloat16[96, 128]
            1 aten::mm BFloat16[96, 8] BFloat16[8, 128]
            bytes 515456"#]],
    );
}

#[test]
fn a_dora_layer_multiplies_in_bf16() {
    check(
        Case { dora: true, ..PLAIN },
        &expect![[r#"
            2 aten::_to_copy float[192, 8]
            2 aten::_to_copy float[192]
            3 aten::_to_copy float[8, 128]
            2 aten::add float[192]
            1 aten::add_ BFloat16[96, 192] BFloat16[192]
            2 aten::add_ float[192] float[192]
            2 aten::addcmul BFloat16[96, 192] BFloat16[96, 192] BFloat16[192]
            1 aten::addmm BFloat16[96, 8] BFloat16[96, 128] BFloat16[128, 8] BFloat16[96, 8]
            1 aten::addmm BFloat16[96, 8] BFloat16[96, 192] BFloat16[192, 8] BFloat16[96, 8]
            1 aten::addmm_ BFloat16[96, 128] BFloat16[96, 8] BFloat16[8, 128]
            1 aten::addmm_ BFloat16[96, 192] BFloat16[96, 8] BFloat16[8, 192]
            1 aten::clamp_min_ float[192]
            2 aten::div float[192] float[192]
            1 aten::div_ float[192] float[192]
            1 aten::mm BFloat16[1, 96] BFloat16[96, 192]
            1 aten::mm BFloat16[192, 128] BFloat16[128, 8]
            1 aten::mm BFloat16[192, 96] BFloat16[96, 8]
            1 aten::mm BFloat16[8, 96] BFloat16[96, 128]
            1 aten::mm BFloat16[96, 128] BFloat16[128, 192] BFloat16[96, 192]
            1 aten::mm BFloat16[96, 192] BFloat16[192, 128] BFloat16[96, 128]
            1 aten::mm float[192, 8] float[8, 8]
            1 aten::mm float[8, 128] float[128, 8]
            1 aten::mul BFloat16[96, 192] BFloat16[96, 192]
            2 aten::mul float[192, 8] float[192, 8]
            4 aten::mul float[192]
            1 aten::sqrt_ float[192]
            4 aten::sub float[192]
            2 aten::sum float[192, 8]
            bytes 1134848"#]],
    );
}

/// Between forward and backward: y, which is the caller's, u, and A and B as they were multiplied; `accounting` predicts these.
#[test]
fn a_bf16_layer_keeps_u_and_its_factors_in_bf16() {
    track_cpu().unwrap();
    let _gpu = gpu::assume();
    let (layer, x, upstream) = PLAIN.build(Kind::BFloat16);
    let context = Context { training: true, ..Context::default() };
    let before = live_bytes(Device::Cpu).unwrap();
    let y = layer.forward(&x, &context).unwrap();
    let kept = live_bytes(Device::Cpu).unwrap() - before;
    assert_eq!(kept as i64, 2 * (TOKENS * (OUT + 8) + 8 * (INNER + OUT)));
    backward_with(&[&y], &[Some(&upstream)], Keep::default()).unwrap();
    drop(y);
    // dx in bf16, dA and dB in fp32.
    let left = live_bytes(Device::Cpu).unwrap() - before;
    assert_eq!(left as i64, 2 * TOKENS * INNER + 4 * 8 * (INNER + OUT));
}

/// Results against the same numbers in f64: y, then the gradients of x, A and B, each with the bound of `kernels::low_rank`.
#[test]
fn results_are_within_the_bounds_of_their_roundings() {
    for (nf4, dropout, bias) in
        [(false, 0.0, true), (false, 0.25, false), (true, 0.0, true), (true, 0.25, true)]
    {
        for kind in [Kind::BFloat16, Kind::Half] {
            let case = Case { nf4, dropout, bias, ..PLAIN };
            let state = RandomState::capture(Device::Cpu).unwrap();
            let (layer, x, upstream) = case.build(kind);
            let found = {
                let (_gpu, _replay) = (gpu::assume(), state.replay().unwrap());
                let y = step(&layer, &x, &upstream);
                assert_eq!((y.kind(), x.grad().kind()), (kind, kind));
                results(&layer, &y, &x)
            };
            let mut tensors = parameters(&layer).into_iter().map(|(_, tensor)| match nf4::is_nf4(tensor) {
                true => quantized::dequantize(tensor, Kind::Float).unwrap().to_kind(Kind::Double),
                false => tensor.detach().to_kind(Kind::Double),
            });
            let [w, b] = [
                tensors.next().unwrap(),
                if bias { tensors.next().unwrap() } else { Tensor::zeros([OUT], kind::DOUBLE_CPU) },
            ];
            let [a_ri, b_or] = [tensors.next().unwrap(), tensors.next().unwrap()];
            let rows = |tensor: &Tensor, width| tensor.detach().to_kind(Kind::Double).view([TOKENS, width]);
            let (x, g) = (rows(&x, INNER), rows(&upstream, OUT));
            let scale = 12.0 / 8.0;
            let mask = match dropout > 0.0 {
                true => {
                    let _replay = state.replay().unwrap();
                    let mask = kernels::dropout::Mask::draw(dropout).unwrap();
                    mask.keep(&[TOKENS, INNER], kind::DOUBLE_CPU).unwrap() * mask.scale()
                }
                false => Tensor::ones([TOKENS, INNER], kind::DOUBLE_CPU),
            };
            let dropped = &x * &mask;
            let u = dropped.matmul(&a_ri.tr()) * scale;
            let y = x.matmul(&w.tr()) + &b + u.matmul(&b_or.tr());
            let du = g.matmul(&b_or) * scale;
            let dx = g.matmul(&w) + du.matmul(&a_ri) * &mask;
            let exact = [y, dx, du.tr().matmul(&dropped), g.tr().matmul(&u)];

            // The same sums of magnitudes.
            let [xm, gm, wm, am, bm] = [&dropped, &g, &w, &a_ri, &b_or].map(Tensor::abs);
            let (um, dum) = (xm.matmul(&am.tr()) * scale, gm.matmul(&bm) * scale);
            let base = [x.abs().matmul(&wm.tr()), gm.matmul(&wm)];
            let unit = if kind == Kind::Half { 2f64.powi(-11) } else { 2f64.powi(-8) };
            // Each value of NF4 is rounded, and an accumulator rounds each of its at most 192 + 8 sums.
            let of_base = if nf4 { unit } else { 0.0 } + 200.0 * 2f64.powi(-24);
            let bounds = [
                (exact[0].abs() + b.abs() + um.matmul(&bm.tr()) * 4.0) * unit + &base[0] * of_base,
                (exact[1].abs() + dum.matmul(&am) * &mask * 4.0) * unit + &base[1] * of_base,
                dum.tr().matmul(&xm) * (2.0 * unit),
                gm.tr().matmul(&um) * (2.0 * unit),
            ];
            for (index, ((found, exact), bound)) in found.iter().zip(&exact).zip(&bounds).enumerate() {
                let found = found.view(exact.size().as_slice());
                // Fp16 loses what is below its smallest number, 2⁻²⁴.
                let excess =
                    ((&found - exact).abs() - bound * 1.05 - 1e-4 * f64::from(u8::from(kind == Kind::Half)))
                        .max();
                assert!(excess.double_value(&[]) <= 0.0, "{nf4} {dropout} {kind:?} {index}: {excess}");
                // The bound is not idle: errors reach a part of it somewhere.
                let used = ((&found - exact).abs() / bound).max().double_value(&[]);
                assert!(used > 0.005, "{nf4} {dropout} {kind:?} {index}: {used}");
            }
        }
    }
}

/// As on a GPU and as on a CPU differ by roundings of bf16 only, also with DoRA.
#[test]
fn both_forms_agree() {
    for dora in [false, true] {
        for (nf4, dropout) in [(false, 0.0), (true, 0.3)] {
            let case = Case { nf4, dora, dropout, bias: true };
            let state = RandomState::capture(Device::Cpu).unwrap();
            let run = |kind: Kind, on_gpu: bool| {
                let _replay = state.replay().unwrap();
                let _gpu = on_gpu.then(gpu::assume);
                let (layer, x, upstream) = case.build(kind);
                results(&layer, &step(&layer, &x, &upstream), &x)
            };
            let expected = run(Kind::Float, false);
            for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 2e-2)] {
                for (index, (found, expected)) in run(kind, true).iter().zip(&expected).enumerate() {
                    assert_close(found, expected, tolerance, &format!("{dora} {nf4} {kind:?} {index}"));
                }
            }
        }
    }
}

/// q, k and v are one function, and gate and up another: one product for every u of them, one for every dA, and one sum for dx.
#[test]
fn a_layer_of_a_model_runs_projections_of_one_input_at_once() {
    let config = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::qwen2(50, 64, 96, 1, 4) };
    let step = |kind: Kind, on_gpu: bool, lora: &LoraConfig| {
        let _gpu = on_gpu.then(gpu::assume);
        tch::manual_seed(5);
        let mut model = Llama::new(&config, (kind, Device::Cpu)).unwrap();
        let _adapters = lora.install(&mut model).unwrap();
        let tokens = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6]).view([1, 8]);
        let (calls, _) = operators(|| {
            let hidden = model.hidden(&Input::new(&tokens)).unwrap();
            let upstream = Generator::new(9).unwrap().normal(&hidden.size(), kind::FLOAT_CPU).unwrap();
            backward(&[&(hidden * upstream.to_kind(kind)).sum(Kind::Float)]).unwrap();
        });
        let gradients: Vec<(String, Tensor)> = trainable(&model)
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.grad().to_kind(Kind::Double)))
            .collect();
        (calls, gradients)
    };
    let all = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let [all, some] = [all.into(), ["q_proj", "v_proj"].into()].map(|targets| LoraConfig {
        r: 4,
        init_lora_weights: false.into(),
        target_modules: Some(targets),
        seed: 7,
        ..LoraConfig::default()
    });
    for (lora, count) in [(&all, 14), (&some, 4)] {
        let (_, expected) = step(Kind::Float, false, lora);
        for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 6e-2)] {
            let (_, found) = step(kind, true, lora);
            assert_eq!((found.len(), expected.len()), (count, count));
            for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                assert_close(found, expected, tolerance, &format!("{kind:?} {name}"));
            }
        }
    }
    let (calls, _) = step(Kind::BFloat16, true, &all);
    let products = |call: &&String| call.starts_with("aten::mm") || call.starts_with("aten::addmm");
    let products = calls.iter().filter(|(call, _)| products(call));
    let text: String = products.map(|(call, Calls { count, .. })| format!("{count} {call}\n")).collect();
    expect![[r#"
        2 aten::addmm BFloat16[32] BFloat16[8, 4] BFloat16[4, 32]
        1 aten::addmm BFloat16[64] BFloat16[8, 4] BFloat16[4, 64]
        1 aten::addmm BFloat16[8, 12] BFloat16[8, 64] BFloat16[64, 12] BFloat16[8, 12]
        2 aten::addmm BFloat16[8, 4] BFloat16[8, 32] BFloat16[32, 4] BFloat16[8, 4]
        4 aten::addmm BFloat16[8, 4] BFloat16[8, 64] BFloat16[64, 4] BFloat16[8, 4]
        3 aten::addmm BFloat16[8, 4] BFloat16[8, 96] BFloat16[96, 4] BFloat16[8, 4]
        1 aten::addmm BFloat16[8, 8] BFloat16[8, 64] BFloat16[64, 8] BFloat16[8, 8]
        2 aten::addmm_ BFloat16[8, 32] BFloat16[8, 64] BFloat16[64, 32]
        3 aten::addmm_ BFloat16[8, 64] BFloat16[8, 64] BFloat16[64, 64]
        3 aten::addmm_ BFloat16[8, 64] BFloat16[8, 96] BFloat16[96, 64]
        3 aten::addmm_ BFloat16[8, 96] BFloat16[8, 64] BFloat16[64, 96]
        1 aten::mm BFloat16[12, 8] BFloat16[8, 64]
        2 aten::mm BFloat16[32, 8] BFloat16[8, 4]
        1 aten::mm BFloat16[4, 8] BFloat16[8, 64]
        1 aten::mm BFloat16[4, 8] BFloat16[8, 96]
        3 aten::mm BFloat16[64, 8] BFloat16[8, 4]
        3 aten::mm BFloat16[8, 4] BFloat16[4, 64]
        3 aten::mm BFloat16[8, 4] BFloat16[4, 96]
        2 aten::mm BFloat16[8, 8] BFloat16[8, 64]
        2 aten::mm BFloat16[96, 8] BFloat16[8, 4]
    "#]]
    .assert_eq(&text);
}

/// Adapts q with DoRA, and k and v without.
struct DoraOfQueries(f64);

impl ModuleMapper for DoraOfQueries {
    fn projection(&mut self, name: &str, slot: &mut Box<dyn Projection>) -> models::Result<()> {
        if !["q_proj", "k_proj", "v_proj"].iter().any(|end| name.ends_with(end)) {
            return Ok(());
        }
        let options = LoraLinearConfig {
            r: 4,
            dropout: self.0,
            dora: name.ends_with("q_proj"),
            init: lora::Init::Gaussian,
            ..LoraLinearConfig::default()
        };
        let layer = LoraLinear::of(slot.as_ref(), &options).unwrap();
        let _no_grad = tch::no_grad_guard();
        for (_, tensor) in parameters(&layer).into_iter().filter(|(name, _)| name.starts_with("lora_B")) {
            let _ = tensor.shallow_clone().fill_(0.1);
        }
        *slot = Box::new(layer);
        Ok(())
    }
}

/// k and v with LoRA beside q with DoRA are one function, and all masks are those of a CPU. (An `Adapters` runs DoRA alone.)
#[test]
fn lora_beside_dora_runs_as_one_function_without_it() {
    let config = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::qwen2(50, 64, 96, 1, 4) };
    let state = RandomState::capture(Device::Cpu).unwrap();
    let step = |on_gpu: bool, dropout: f64| {
        let (_gpu, _replay) = (on_gpu.then(gpu::assume), state.replay().unwrap());
        tch::manual_seed(5);
        let mut model = Llama::new(&config, (Kind::Double, Device::Cpu)).unwrap();
        map_modules(&mut model, &mut DoraOfQueries(dropout)).unwrap();
        let others = parameters(&model).into_iter().filter(|(name, _)| !name.contains("lora_"));
        others.for_each(|(_, tensor)| drop(tensor.set_requires_grad(false)));
        let tokens = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6]).view([1, 8]);
        let context = Context { training: true, ..Context::default() };
        let (calls, _) = operators(|| {
            let hidden = model.hidden(&Input { tokens: &tokens, positions: None, context }).unwrap();
            backward(&[&hidden.square().sum(Kind::Double)]).unwrap();
        });
        let learned = trainable(&model).into_iter().filter(|(name, _)| name.contains("lora_"));
        let gradients: Vec<Tensor> = learned.map(|(_, tensor)| tensor.grad().copy()).collect();
        let joint = calls.keys().filter(|call| call.contains("[8, 64] ") && call.contains("[64, 8]")).count();
        (gradients, joint)
    };
    for dropout in [0.0, 0.25] {
        let ((found, joint), (expected, separate)) = (step(true, dropout), step(false, dropout));
        assert_eq!((found.len(), expected.len(), separate), (7, 7, 0));
        // The ranks of k and v; with dropout each u is a product of its own input.
        assert_eq!(joint, usize::from(dropout == 0.0));
        for (found, expected) in found.iter().zip(&expected) {
            assert_close(found, expected, 1e-12, &format!("dropout {dropout}"));
        }
    }
}
