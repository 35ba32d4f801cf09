//! Live bytes at the peak and between forward and backward. The counts are the whole process's, so no
//! other test may run at the same time.

#![expect(clippy::print_stdout, reason = "bytes are printed beside their bounds")]

use fused_ce::{Chunk, Gradients, LinearCrossEntropy, Reduction};
use runtime::memory::{Region, live_bytes, track_cpu};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;
const HIDDEN: i64 = 32;
const VOCABULARY: i64 = 4096;
const BUDGET: u64 = 4 << 20;

/// The peak beyond inputs and their gradients, and the bytes saved between forward and backward beyond the gradients.
fn run(kind: Kind, tokens: i64, ignored: bool, options: &LinearCrossEntropy) -> (u64, u64) {
    let mut generator = Generator::new(1).unwrap();
    let mut normal = |size: &[i64]| {
        generator.normal(size, (Kind::Float, CPU)).unwrap().to_kind(kind).set_requires_grad(true)
    };
    let (x, w) = (normal(&[tokens, HIDDEN]), normal(&[VOCABULARY, HIDDEN]));
    let targets = Tensor::arange(tokens, (Kind::Int64, CPU)).remainder(VOCABULARY);
    if ignored {
        let _ = targets.narrow(0, 0, tokens / 2).fill_(-100);
    }
    let gradients = (x.numel() + w.numel()) as u64 * kind.elt_size_in_bytes() as u64;
    let before = live_bytes(CPU).unwrap();
    let region = Region::start(CPU).unwrap();
    let loss = options.loss(&x, &w, &targets).unwrap();
    let loss = if options.reduction == Reduction::None {
        let sum = loss.sum(Kind::Float);
        drop(loss);
        sum
    } else {
        loss
    };
    let held = live_bytes(CPU).unwrap() - before;
    runtime::autograd::backward(&[&loss]).unwrap();
    drop(loss);
    let peak = region.finish().unwrap().peak_above_start();
    assert!(x.grad().defined() && w.grad().defined());
    assert_eq!(live_bytes(CPU).unwrap() - before, gradients, "only the gradients stay");
    let held = if options.gradients == Gradients::Forward { held.saturating_sub(gradients) } else { held };
    (peak.saturating_sub(gradients), held)
}

#[test]
fn the_budget_bounds_memory_for_any_number_of_tokens() {
    track_cpu().unwrap();
    let plain = LinearCrossEntropy { chunk: Some(Chunk::Budget(BUDGET)), ..LinearCrossEntropy::default() };
    let waits = LinearCrossEntropy { gradients: Gradients::Backward, ..plain.clone() };
    let each = LinearCrossEntropy { reduction: Reduction::None, ..waits.clone() };
    for (number, options) in [&plain, &waits, &each].into_iter().enumerate() {
        for (index, kind) in [Kind::Float, Kind::BFloat16, Kind::Half].into_iter().enumerate() {
            // Each is met with each of the others.
            let ignored = (number + index) % 2 == 1;
            let [(few, _), (many, held)] = [1024, 4096].map(|tokens| run(kind, tokens, ignored, options));
            // In low precision the gradient of the weight is summed in fp32 first.
            let sum = if kind == Kind::Float { 0 } else { (VOCABULARY * HIDDEN * 4) as u64 };
            let name = format!("{kind:?} {:?} {:?} {ignored}", options.gradients, options.reduction);
            println!("{name}: {many} bytes beyond inputs and gradients, {held} held");
            assert!(many <= BUDGET + sum + (2 << 20), "{name}: {many}");
            // fp16 saves the gradient of the hidden states in fp32 until it is scaled.
            let of_each_token = if kind == Kind::Half { 64 + 4 * HIDDEN as u64 } else { 64 };
            assert!(many.saturating_sub(few) <= of_each_token * 3072, "{name}: {few}, then {many}");
            if options.gradients == Gradients::Backward {
                // Maximum, sum, class and index of each row.
                assert!(held <= (4 + 4 + 8 + 8 + 4) * 4096 + 1024, "{name}: {held}");
            } else if kind != Kind::Half {
                assert!(held <= 16 * 4096 + 1024, "{name}: {held}");
            }
        }
    }
    // Bytes of all logits.
    assert!((4096 * VOCABULARY * 4) as u64 >= 16 * BUDGET);

    // Without gradient recording only the loss remains.
    let _no_grad = runtime::autograd::GradMode::off();
    let mut generator = Generator::new(1).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, CPU)).unwrap();
    let (x, w) = (normal(&[1024, HIDDEN]), normal(&[VOCABULARY, HIDDEN]));
    let targets = Tensor::arange(1024, (Kind::Int64, CPU));
    let before = live_bytes(CPU).unwrap();
    let region = Region::start(CPU).unwrap();
    let loss = plain.loss(&x, &w, &targets).unwrap();
    assert!(region.finish().unwrap().peak_above_start() <= BUDGET + (1 << 20));
    assert_eq!(live_bytes(CPU).unwrap() - before, loss.numel() as u64 * 4);
}
