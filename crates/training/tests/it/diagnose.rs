//! Traces of a real loop, recorded here, with and without each injected inefficiency, and the findings of the detectors.
//!
//! A process can run only one trace at a time, so no other test may run at the same time.

use std::sync::{LazyLock, Mutex};

use kernels::linear::product;
use runtime::ops::foreach;
use runtime::ops::optimizer::{AdamW, AdamWTensors, fused_adamw_};
use runtime::profile::{Trace, range};
use tch::{Kind, Tensor, kind::FLOAT_CPU, no_grad};
use trace::{Composition, Diagnosis, Finding, Phase, Profile, TrainingFacts};

/// The injected inefficiency; by default none.
#[derive(Debug, Clone, Copy, Default)]
struct Injected {
    item: bool,
    zeroed: bool,
    zeroed_together: bool,
    unfused: bool,
    odd_width: bool,
    mask: bool,
    converted_mask: bool,
    softmax: bool,
    indexing: bool,
    slow_data: bool,
    tokenizing: bool,
    twice: bool,
    evaluated: bool,
    tiny: bool,
    /// The loader has its own thread.
    worker: bool,
    /// The projections are those of [`linear`], whose products do not pass libtorch's dispatcher.
    own_products: bool,
}

const STEPS: usize = 3;
const BATCH: i64 = 16;
const LENGTH: i64 = 64;
const HEADS: i64 = 4;

struct Model {
    parameters: Vec<Tensor>,
    moments: [Vec<Tensor>; 2],
    steps: Vec<Tensor>,
    mask: Tensor,
}

impl Model {
    fn new(hidden: i64) -> Self {
        let shapes = [[128, hidden], [hidden, 3 * 128], [128, hidden], [hidden, 512]];
        let parameters: Vec<Tensor> = shapes
            .iter()
            .map(|shape| (Tensor::randn(shape, FLOAT_CPU) * 0.05).detach().set_requires_grad(true))
            .collect();
        let zeros = || parameters.iter().map(|parameter| parameter.detach().zeros_like()).collect::<Vec<_>>();
        let moments = [zeros(), zeros()];
        let steps = parameters.iter().map(|_| Tensor::zeros([], FLOAT_CPU)).collect();
        let mask = Tensor::ones([LENGTH, LENGTH], FLOAT_CPU).tril(0).to_kind(Kind::Bool);
        Self { parameters, moments, steps, mask }
    }

    fn forward(&self, x: &Tensor, injected: &Injected) -> Tensor {
        let [into, qkv, out, head] = &self.parameters[..] else { unreachable!() };
        let product = |x: &Tensor, weight: &Tensor| match injected.own_products {
            true => product(x, &weight.tr(), None).unwrap(),
            false => x.matmul(weight),
        };
        let heads =
            product(&product(x, into), qkv).view([BATCH, LENGTH, 3, HEADS, 32]).permute([2, 0, 3, 1, 4]);
        let (q, k, v) = (heads.get(0), heads.get(1), heads.get(2));
        let mask = if injected.mask {
            Tensor::ones([LENGTH, LENGTH], FLOAT_CPU).tril(0).to_kind(Kind::Bool)
        } else if injected.converted_mask {
            self.mask.to_kind(Kind::Float).to_kind(Kind::Bool)
        } else {
            self.mask.shallow_clone()
        };
        let attended = if injected.softmax {
            let scores = q.matmul(&k.transpose(-1, -2)).masked_fill(&mask.logical_not(), f64::NEG_INFINITY);
            scores.softmax(-1, Kind::Float).matmul(&v)
        } else {
            Tensor::scaled_dot_product_attention(&q, &k, &v, Some(&mask), 0.0, false, None, false)
        };
        product(&product(&attended.transpose(1, 2).reshape([BATCH * LENGTH, 128]), out), head)
    }

    fn update(&mut self, injected: &Injected) {
        let gradients: Vec<Tensor> = self.parameters.iter().map(Tensor::grad).collect();
        if injected.unfused {
            no_grad(|| {
                let [first, second] = &mut self.moments;
                for (index, parameter) in self.parameters.iter_mut().enumerate() {
                    let (m, v, gradient) = (&mut first[index], &mut second[index], &gradients[index]);
                    let _ = m.g_mul_scalar_(0.9).g_add_(&(gradient * 0.1));
                    let _ = v.g_mul_scalar_(0.999).g_add_(&(gradient.square() * 0.001));
                    let _ = parameter.g_sub_(&(&*m / (v.sqrt() + 1e-8) * 1e-3));
                }
            });
        } else {
            let tensors = AdamWTensors {
                params: &self.parameters,
                grads: &gradients,
                exp_avgs: &self.moments[0],
                exp_avg_sqs: &self.moments[1],
                steps: &self.steps,
            };
            fused_adamw_(&tensors, AdamW::default(), None).unwrap();
        }
    }
}

fn step(model: &mut Model, injected: &Injected) {
    let _step = range("step");
    let (x, labels) = {
        let _data = range("data");
        if injected.tokenizing {
            let _tokenize = range("tokenize");
            let _ = "one of many words ".repeat(1000).split(' ').map(str::len).sum::<usize>();
        }
        if injected.slow_data {
            let a = Tensor::ones([768, 768], FLOAT_CPU);
            let _ = a.matmul(&a).matmul(&a);
        }
        (
            Tensor::ones([BATCH * LENGTH, 128], FLOAT_CPU),
            Tensor::zeros([BATCH * LENGTH], (Kind::Int64, tch::Device::Cpu)),
        )
    };
    let loss = {
        let _forward = range("forward");
        let mut logits = model.forward(&x, injected);
        if injected.twice {
            let _ = no_grad(|| model.forward(&x, injected)).argmax(-1, false);
        }
        let mut labels = labels;
        if injected.indexing {
            let kept = labels.ge(0);
            logits = logits.index(&[Some(&kept)]);
            labels = labels.index(&[Some(&kept)]);
        }
        if injected.tiny {
            let mut small = Tensor::zeros([4], FLOAT_CPU);
            for _ in 0..4000 {
                small += 1.0;
            }
        }
        logits.cross_entropy_for_logits(&labels)
    };
    if injected.evaluated {
        let _forward = range("forward");
        let _ = no_grad(|| model.forward(&x, injected)).argmax(-1, false);
    }
    {
        let _backward = range("backward");
        loss.backward();
    }
    if injected.item {
        let _ = loss.double_value(&[]);
    }
    {
        let _optimizer = range("optimizer");
        model.update(injected);
    }
    if injected.zeroed_together {
        let _no_grad = tch::no_grad_guard();
        let gradients: Vec<Tensor> =
            model.parameters.iter().map(|parameter| parameter.grad().detach()).collect();
        foreach::zero_(&gradients).unwrap();
    }
    for parameter in &mut model.parameters {
        if injected.zeroed {
            parameter.zero_grad();
        } else if !injected.zeroed_together {
            // A new leaf over the same memory, without a gradient.
            *parameter = parameter.detach().set_requires_grad(true);
        }
    }
}

static TURN: LazyLock<Mutex<()>> = LazyLock::new(|| Mutex::new(()));

fn record(injected: Injected) -> Profile {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // Other programs on the machine do not change counts.
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let mut model = Model::new(if injected.odd_width { 250 } else { 256 });
    step(&mut model, &injected); // so that all steps find gradients and state as their predecessor left them
    let trace = Trace::start(Default::default()).unwrap();
    for _ in 0..STEPS {
        if injected.worker {
            let worker = std::thread::spawn(|| {
                let _load = range("load");
                let _ = Tensor::ones([64, 64], FLOAT_CPU).tril(0);
            });
            worker.join().unwrap();
        }
        step(&mut model, &injected);
    }
    trace.save(&path).unwrap();
    Profile::read(&path).unwrap()
}

fn diagnose(injected: Injected) -> Diagnosis {
    Diagnosis::new(&record(injected), &TrainingFacts::default()).unwrap()
}

#[test]
fn a_good_loop_has_no_findings() {
    let own = Injected { worker: true, own_products: true, ..Injected::default() };
    let of_own = diagnose(own);
    assert!(of_own.findings.is_empty(), "{of_own}");
    let diagnosis = diagnose(Injected { worker: true, ..Injected::default() });
    assert!(diagnosis.findings.is_empty(), "{diagnosis}");
    let text = diagnosis.to_string();
    assert!(text.starts_with("nothing found in 3 steps of "), "{text}");
    for name in Diagnosis::detectors() {
        assert!(text.contains(&format!("\n  {name}: ")), "{text}");
    }
}

/// The injected inefficiency is found, with no others except those named, and its figures match the loop.
fn check(injected: Injected, name: &str, per_step: f64, evidence: &[&str], also: &[&str]) -> Finding {
    let diagnosis = diagnose(injected);
    let finding =
        diagnosis.finding(name).unwrap_or_else(|| panic!("{name} was not found: {diagnosis}")).clone();
    for found in &diagnosis.findings {
        assert!(found.name == name || also.contains(&found.name), "{injected:?}: {diagnosis}");
    }
    assert_eq!(finding.per_step, per_step, "{finding:?}");
    for words in evidence {
        assert!(finding.evidence.contains(words), "{words}: {finding:?}");
    }
    let share = finding.share.unwrap();
    assert!(share > 0.0 && share <= 1.0, "{finding:?}");
    assert!(diagnosis.to_string().contains(&finding.remedy));
    finding
}

#[test]
fn reading_a_value_in_each_step_is_found() {
    let injected = Injected { item: true, ..Injected::default() };
    check(injected, "host synchronisation", 1.0, &["1 × in a step", "in rest"], &[]);
}

#[test]
fn zeroed_gradients_are_found() {
    let injected = Injected { zeroed: true, ..Injected::default() };
    check(injected, "zeroed gradients", 4.0, &["4 × in a step", "4 additions", "[128, 256]"], &[]);
    let injected = Injected { zeroed_together: true, ..Injected::default() };
    check(injected, "zeroed gradients", 4.0, &["4 × in a step", "4 additions"], &[]);
}

#[test]
fn an_unfused_optimizer_is_found() {
    let injected = Injected { unfused: true, ..Injected::default() };
    // mul_, mul, add_; mul_, square, mul, add_; sqrt, add, div, mul, sub_.
    check(injected, "unfused optimizer", 48.0, &["48 operators over 4 parameters", "12.0 each"], &[]);
}

#[test]
fn a_width_of_250_is_found() {
    for own_products in [false, true] {
        let injected = Injected { odd_width: true, own_products, ..Injected::default() };
        check(injected, "odd widths", 4.0, &["250 (next multiple 256)", "multiple of 16"], &[]);
    }
}

#[test]
fn a_mask_built_in_forward_is_found() {
    let injected = Injected { mask: true, ..Injected::default() };
    check(
        injected,
        "mask in each forward",
        3.0,
        &["aten::ones [64, 64]", "aten::tril [64, 64]", "aten::to"],
        &[],
    );
}

#[test]
fn a_mask_converted_in_forward_is_found() {
    let injected = Injected { converted_mask: true, ..Injected::default() };
    check(injected, "mask in each forward", 2.0, &["aten::to [64, 64]"], &[]);
}

#[test]
fn math_attention_is_found() {
    let injected = Injected { softmax: true, ..Injected::default() };
    check(injected, "attention by softmax", 1.0, &["[64, 64, 64]"], &[]);
}

#[test]
fn boolean_indexing_in_the_loss_is_found() {
    let injected = Injected { indexing: true, ..Injected::default() };
    check(injected, "boolean indexing", 2.0, &["aten::index [1024]"], &[]);
}

#[test]
fn loading_on_the_training_thread_is_found() {
    let injected = Injected { slow_data: true, ..Injected::default() };
    let finding = check(injected, "waiting for data", 0.0, &["no worker is seen"], &[]);
    assert_eq!(finding.remedy, "Load in worker threads that prefetch.");
    let with_worker = Injected { worker: true, ..injected };
    let finding = check(with_worker, "waiting for data", 0.0, &["workers load them"], &[]);
    assert!(finding.remedy.starts_with("Give the loader more workers"), "{finding:?}");
}

#[test]
fn tokenizing_on_the_training_thread_is_found() {
    let injected = Injected { tokenizing: true, ..Injected::default() };
    check(injected, "tokenizing in the step", 1.0, &["tokenizes 1 ×"], &["waiting for data"]);
}

#[test]
fn a_second_forward_for_a_metric_is_found() {
    for own_products in [false, true] {
        let injected = Injected { twice: true, own_products, ..Injected::default() };
        check(injected, "double evaluation", 1.0, &["operators twice"], &[]);
    }
    let injected = Injected { evaluated: true, ..Injected::default() };
    check(injected, "double evaluation", 1.0, &["2 forward parts and 1 backward"], &[]);
}

#[test]
fn tiny_operators_are_found() {
    let injected = Injected { tiny: true, ..Injected::default() };
    let diagnosis = diagnose(injected);
    let finding = diagnosis.finding("tiny operators").unwrap_or_else(|| panic!("{diagnosis}"));
    assert!(finding.per_step > 4000.0 && finding.share.unwrap() >= 0.25, "{finding:?}");
}

#[test]
fn facts_outside_the_trace_are_reported() {
    let profile = record(Injected::default());
    let facts = TrainingFacts {
        padding_share: Some(0.4),
        parameters_without_gradient: Some(vec!["unused.weight".into(), "unused.bias".into()]),
        elements_without_gradient: Some(1056),
        ..TrainingFacts::default()
    };
    let diagnosis = Diagnosis::new(&profile, &facts).unwrap();
    let names: Vec<&str> = diagnosis.findings.iter().map(|finding| finding.name).collect();
    assert_eq!(names, ["padding", "unused parameters"], "the one of unknown cost comes last: {diagnosis}");
    let padding = &diagnosis.findings[0];
    let composition = Composition::new(&profile).unwrap();
    let parts = [Phase::Forward, Phase::Backward].map(|phase| composition.phase(phase).seconds);
    let expected = 0.4 * parts.iter().sum::<f64>() / composition.median.seconds;
    assert!((padding.share.unwrap() - expected).abs() < 1e-12, "{padding:?}");
    let evidence = &diagnosis.findings[1].evidence;
    assert_eq!(
        evidence,
        "2 trainable parameters with 1056 elements got no gradient: unused.weight, unused.bias"
    );
    let little = TrainingFacts {
        padding_share: Some(0.05),
        parameters_without_gradient: Some(vec![]),
        ..TrainingFacts::default()
    };
    assert!(Diagnosis::new(&profile, &little).unwrap().findings.is_empty());
}

#[test]
fn the_composition_of_a_real_trace_adds_up() {
    let composition = Composition::new(&record(Injected { worker: true, ..Injected::default() })).unwrap();
    assert_eq!(composition.steps.len(), STEPS);
    for step in &composition.steps {
        let sum: f64 = step.phases.iter().sum();
        assert!((sum - step.seconds).abs() < 1e-9, "{step:?}");
        assert!(step.idle_seconds >= 0.0 && step.idle_seconds < step.seconds, "{step:?}");
        let parts = [Phase::Data, Phase::Forward, Phase::Backward, Phase::Optimizer];
        assert!(parts.iter().all(|&phase| step.phases[phase as usize] > 0.0), "{step:?}");
        assert!(step.allocated_bytes > 0.0);
    }
    // Four products forward, and two for the gradients of each but the first, whose input needs none.
    assert_eq!(composition.operator("aten::mm").unwrap().calls, 4.0 + 7.0);
    assert_eq!(composition.operator("aten::_fused_adamw_").unwrap().calls, 1.0);
    assert!(composition.operator("aten::tril").is_none(), "the worker's");
    // On one thread, self times and idle time are the step.
    let own: f64 = composition.operators.iter().map(|operator| operator.seconds).sum();
    assert!(own <= composition.steps.iter().map(|step| step.seconds).fold(0.0, f64::max), "{composition}");
}

#[test]
fn a_product_that_copies_its_bias_is_one_call() {
    let [bias, x, w] = [[512], [256], [512]].map(|[rows]| Tensor::ones([rows, 512], FLOAT_CPU));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let trace = Trace::start(Default::default()).unwrap();
    for _ in 0..STEPS {
        let _step = range("step");
        let _forward = range("forward");
        for _ in 0..20 {
            let _ = bias.get(0).addmm(&x, &w);
        }
    }
    trace.save(&path).unwrap();
    let profile = Profile::read(&path).unwrap();
    let median = Composition::new(&profile).unwrap().median;
    assert!(median.host_seconds < 0.3 * median.seconds, "{median:?}");
    let diagnosis = Diagnosis::new(&profile, &TrainingFacts::default()).unwrap();
    assert!(diagnosis.finding("tiny operators").is_none(), "{diagnosis}");
}
