//! Steps that a CUDA graph repeats have the bits of the loop's own. `captured` shows it with a recorder; that CUDA captures the same steps only
//! a GPU can show.

use models::module::trainable;
use models::{DecoderConfig, Llama};
use runtime::device;
use tch::{Device, Kind, Tensor};
use training::batches::Synthetic;
use training::observer::Collect;
use training::optimizer::{AdamW, Group};
use training::schedule::{LrSchedule, Shape};
use training::trainer::{Capture, TrainerConfig};
use training::{DeviceOptimizer, Trainer};

const STEPS: u64 = 20;

/// The figures of each step, the weights after the last, and the number of steps that a graph has run.
type Outcome = (Vec<[u64; 3]>, Vec<Tensor>, u64);

fn run(device: Device, kind: Kind, options: TrainerConfig) -> Outcome {
    runtime::random::seed(7).unwrap();
    let config = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::llama(64, 64, 160, 2, 4) };
    let model = Llama::new(&config, (kind, device)).unwrap();
    let optimizer =
        DeviceOptimizer::new(AdamW::default(), Group::by_dimension(trainable(&model), 1e-2, 0.1)).unwrap();
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    trainer.schedule = LrSchedule { shape: Shape::Cosine, warmup: 5, steps: STEPS, floor: 0.1 };
    let records = Collect::default();
    trainer.observers.push(Box::new(records.clone()));
    // Sequences of one block of keys: the backward passes of attention add up in one order.
    let mut data = Synthetic {
        seed: 5,
        vocabulary: 64,
        rows: 4,
        length: 24,
        noise: 1,
        batches: None,
        device,
        position: 0,
    };
    trainer.run(&mut data, None).unwrap();
    let figures = records.take().into_iter().map(|record| {
        [record.loss, record.learning_rate, record.gradient_norm.unwrap_or(-1.0)].map(f64::to_bits)
    });
    let weights = trainable(trainer.model.as_ref());
    let weights = weights.iter().map(|(_, weight)| weight.detach().copy()).collect();
    (figures.collect(), weights, trainer.replays())
}

#[test]
fn steps_that_a_graph_repeats_have_the_bits_of_the_loop() {
    if device::cuda_count().unwrap() == 0 {
        eprintln!("skipped: no CUDA device");
        return;
    }
    let device = device::select("cuda").unwrap();
    for (kind, accumulation) in [(Kind::Float, 1), (Kind::BFloat16, 1), (Kind::BFloat16, 3)] {
        let options = |capture: Capture| TrainerConfig {
            steps: STEPS,
            clip: Some(0.5),
            log_every: 7,
            accumulation,
            capture,
            ..TrainerConfig::default()
        };
        let (figures, weights, replays) = run(device, kind, options(Capture::Off));
        assert_eq!(replays, 0);
        let (captured, captured_weights, replays) = run(device, kind, options(Capture::Auto));
        assert_eq!(captured, figures, "{kind:?}, {accumulation} micro-batches");
        assert_eq!(captured_weights, weights, "{kind:?}, {accumulation} micro-batches");
        // Two steps run as without a graph, and the third is captured.
        assert!(replays >= STEPS - 3, "{kind:?}, {accumulation} micro-batches: {replays} replays");
    }
}
