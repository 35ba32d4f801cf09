//! Peak bytes of a step, by method, compared with `accounting`. The counts are the whole process's, so no other
//! test may run at the same time.
//!
//! On the CPU, the allocator's bytes stand for the device and page-locked tensors for the host.

use std::sync::Arc;

use crate::support::{FLOAT, batch};
use accounting::Decoder;
use accounting::activation_plan::LayerPlan;
use accounting::decoder_flops::Workload;
use accounting::memory::logits::Loss;
use accounting::memory::recipe::Recipe;
use accounting::model::{Family, Sizes};
use accounting::offload::{self as paper, OptimizerPlace, Rates, Setup, Start, StepCosts, sizes};
use accounting::recompute::NormKernel;
use models::module::{Input, LanguageModel, trainable};
use models::{DecoderConfig, Llama};
use offload::{HookPoint, Method, Offload, OffloadConfig, TestHook};
use parking_lot::Mutex;
use runtime::autograd::{backward, set_grad};
use runtime::device;
use runtime::memory::{self, Region};
use tch::{Device, Tensor};

const CPU: Device = Device::Cpu;
const SIZES: Sizes = Sizes {
    family: Family::Qwen2,
    vocabulary: 60,
    context: 32,
    embedding: 256,
    hidden: 256,
    layers: 8,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    feed_forward: 1024,
    tied: true,
    attention_bias: false,
    mlp_bias: false,
    experts: None,
    linear: None,
    windows: None,
    gemma4: None,
};

fn model() -> Box<Llama> {
    runtime::random::seed(4).unwrap();
    let config = DecoderConfig {
        num_key_value_heads: SIZES.kv_heads as i64,
        tie_word_embeddings: true,
        max_position_embeddings: SIZES.context as i64,
        ..DecoderConfig::qwen2(60, 256, 1024, SIZES.layers as i64, 4)
    };
    Box::new(Llama::new(&config, FLOAT).unwrap())
}

/// Synchronises the streams: a layer runs after the gradients of the previous one were stored. Otherwise the number in flight would
/// depend on timing.
#[derive(Default)]
struct InStep(Mutex<Option<Arc<Offload>>>);

impl TestHook for InStep {
    fn at(&self, point: HookPoint) -> runtime::Result<()> {
        let offload = self.0.lock().clone().filter(|_| point == HookPoint::Compute);
        offload.map_or(Ok(()), |offload| offload.synchronize())
    }
}

#[derive(Debug, Clone, Copy)]
struct Peak {
    /// Bytes of a step above those before the model existed.
    bytes: u64,
    /// On the device between steps.
    rest: u64,
    /// Bytes of one layer's flat buffer; 0 without offloading.
    layer: u64,
    ring: u64,
}

/// The peak of a third step.
fn peak(method: Option<(Method, usize)>, training: bool) -> Peak {
    peak_keeping(method, training, 0, false)
}

/// The peak if the last `kept` layers keep their activations, and the others their inputs, on the device or on the host.
fn peak_keeping(method: Option<(Method, usize)>, training: bool, kept: usize, inputs_on_host: bool) -> Peak {
    let tokens = batch(60, 3);
    let host_before = device::pinned_bytes(CPU).unwrap().live;
    let before = memory::live_bytes(CPU).unwrap();
    let mut model = model();
    let in_step = Arc::new(InStep::default());
    let offload = method.map(|(method, ring)| {
        let keep = (SIZES.layers as usize - kept..SIZES.layers as usize).collect();
        let options = OffloadConfig {
            method,
            ring,
            keep,
            inputs_on_host,
            test_hook: Some(in_step.clone()),
            ..OffloadConfig::default()
        };
        Arc::new(options.install(&mut *model).unwrap())
    });
    *in_step.0.lock() = offload.clone();
    let layer = offload.as_ref().map_or(0, |offload| offload.layer_bytes());
    if let Some(offload) = &offload {
        // Only on the host: exactly the flat buffers of all layers.
        assert_eq!(offload.host_bytes().unwrap() - host_before, SIZES.layers * layer);
    }
    let step = || {
        if training {
            let loss = model.loss(&Input::new(&tokens), &tokens).unwrap().sum;
            let inputs = offload.as_ref().map_or(0, |offload| offload.input_bytes());
            let on_host = if inputs_on_host { SIZES.layers - kept as u64 } else { 0 };
            assert_eq!(inputs, on_host * tokens.numel() as u64 * SIZES.hidden * 4);
            backward(&[&loss]).unwrap();
            drop(loss);
            if let Some(offload) = &offload {
                assert_eq!(offload.input_bytes(), 0);
                // Besides the layers, their gradients without alignment; one layer's gradients at a time passed through the device.
                let of_layers = |(name, _): &&(String, &Tensor)| name.starts_with("layers.");
                let trained = trainable(&*model);
                let gradients: u64 =
                    trained.iter().filter(of_layers).map(|(_, tensor)| tensor.numel() as u64 * 4).sum();
                let host = offload.host_bytes().unwrap() - host_before;
                // The buffers of inputs are kept for the next step.
                assert_eq!(host, SIZES.layers * layer + gradients + inputs);
            }
            trainable(&*model).into_iter().for_each(|(_, tensor)| set_grad(tensor, None).unwrap());
        } else {
            let _no_grad = tch::no_grad_guard();
            drop(model.logits(&Input::new(&tokens)).unwrap());
        }
        if let Some(offload) = &offload {
            offload.synchronize().unwrap();
            offload.check_on_host().unwrap();
        }
    };
    step();
    step();
    let rest = memory::live_bytes(CPU).unwrap() - before;
    let region = Region::start(CPU).unwrap();
    step();
    let usage = region.finish().unwrap();
    let ring = offload.as_ref().map_or(0, |offload| offload.ring_bytes());
    if let Some(offload) = &offload {
        assert!(rest >= ring);
        offload.release_ring().unwrap();
        assert_eq!(memory::live_bytes(CPU).unwrap() - before, rest - ring, "the ring is given back");
    }
    *in_step.0.lock() = None;
    drop((offload, model));
    assert_eq!(device::pinned_bytes(CPU).unwrap().live, host_before, "the host's memory is given back");
    assert_eq!(memory::live_bytes(CPU).unwrap(), before, "and the device's");
    Peak { bytes: usage.peak - before, rest, layer, ring }
}

/// The prediction of `accounting`, with gradients stored before the next layer runs, as in [`InStep`].
fn on_paper(costs: &StepCosts, method: paper::Method) -> u64 {
    let rates = Rates { load: 1e15, store: f64::MAX, host_optimizer: 1e15, device_optimizer: 1e15 };
    let setup = Setup { method, resident: vec![], optimizer: OptimizerPlace::Host };
    paper::simulate(costs, &rates, &setup, Start::Warm).unwrap().device.total
}

fn close(what: &str, measured: u64, expected: u64, tolerance: f64) {
    let off = measured as f64 / expected as f64 - 1.0;
    eprintln!("{what}: {measured} bytes, {expected} on paper, {:+.2} %", off * 100.0);
    assert!(off.abs() <= tolerance, "{what}: {measured} bytes, {expected} on paper");
}

#[test]
fn peaks_are_ordered_and_match_the_prediction() {
    memory::track_cpu().unwrap();
    // Allocations made once per process.
    peak(None, true);
    let decoder = Decoder::new(SIZES).unwrap();
    let work = Workload { batch: 2, sequence: 9 };
    let choices = sizes::Choices {
        recipe: Recipe::FP32,
        loss: Loss::Eager,
        norm: NormKernel::Output,
        ..sizes::Choices::default()
    };
    for training in [false, true] {
        let costs =
            if training { sizes::training } else { sizes::inference }(&decoder, work, &choices).unwrap();
        let kind = if training { "training" } else { "inference" };
        let resident = peak(None, training);
        let one = peak(Some((Method::Function, 3)), training);
        let rings: Vec<Peak> = (1..=4).map(|ring| peak(Some((Method::Overlap, ring)), training)).collect();

        assert_eq!(one.layer, costs.layers[0].slot_bytes, "a layer's flat buffer");
        // Each slot costs a layer, to the byte; the fixed part is the same for all.
        for (ring, found) in rings.iter().enumerate() {
            assert_eq!(found.ring, (ring as u64 + 1) * found.layer);
            assert_eq!(found.rest - found.ring, one.rest, "{kind}: the fixed part");
        }
        for pair in rings.windows(2) {
            assert_eq!(pair[1].bytes - pair[0].bytes, one.layer, "{kind}: a slot more");
        }
        assert!(resident.bytes > rings[3].bytes && rings[2].bytes > one.bytes, "{kind}");

        let single = if training { 0.02 } else { 0.001 };
        let expected = on_paper(&costs, paper::Method::OneAtATime);
        close(&format!("{kind}, one layer at a time"), one.bytes, expected, single);
        for (ring, found) in (1..).zip(&rings) {
            let expected = on_paper(&costs, paper::Method::Overlap { ring });
            let tolerance = if ring == 1 { single } else { 0.02 };
            close(&format!("{kind}, ring {ring}"), found.bytes, expected, tolerance);
        }
        if !training {
            continue;
        }
        let plan = vec![LayerPlan::KeepAll; SIZES.layers as usize];
        let keeps =
            sizes::with_activation_plan(costs.clone(), &decoder, None, work, &choices, &plan).unwrap();
        for (kept, ring) in [(8, 1), (8, 2), (3, 1), (3, 2)] {
            let mut some = costs.clone();
            for layer in SIZES.layers as usize - kept..SIZES.layers as usize {
                some.layers[layer].kept = keeps.layers[layer].kept;
            }
            let found = peak_keeping(Some((Method::Overlap, ring)), true, kept, false);
            let expected = on_paper(&some, paper::Method::Overlap { ring });
            close(&format!("activations of {kept} layers kept, ring {ring}"), found.bytes, expected, 0.02);
            // Not the weights.
            assert_eq!(
                (found.ring, found.rest),
                (ring as u64 * one.layer, one.rest + ring as u64 * one.layer)
            );
        }
        // Inputs on the host: at most two of them are on the device.
        for (method, kept) in [(Method::Function, 0), (Method::Overlap, 0), (Method::Overlap, 3)] {
            let mut some = costs.clone();
            some.working.inputs_on_host = true;
            for layer in SIZES.layers as usize - kept..SIZES.layers as usize {
                some.layers[layer].kept = keeps.layers[layer].kept;
            }
            let found = peak_keeping(Some((method, 2)), true, kept, true);
            let on_device = peak_keeping(Some((method, 2)), true, kept, false);
            let paper = match method {
                Method::Function => paper::Method::OneAtATime,
                _ => paper::Method::Overlap { ring: 2 },
            };
            let what = format!("{}, inputs on the host, activations of {kept} layers kept", method.name());
            close(&what, found.bytes, on_paper(&some, paper), 0.02);
            let inputs = (SIZES.layers - kept as u64) * costs.working.input_bytes;
            assert!(found.bytes < on_device.bytes, "{what}: {inputs} bytes of inputs");
        }
    }
}
